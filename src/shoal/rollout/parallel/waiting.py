"""What waits for a shared engine: requests with their deadlines, and what workers say of their episodes.

All of it belongs to the engine's thread, but for making a `Waiting`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from shoal.rollout.parallel.answering import Result
from shoal.rollout.parallel.batching import Batcher
from shoal.rollout.parallel.connections import Asker, Connection
from shoal.rollout.parallel.wire import Alive, Ask, Entered, Left, episode_of, request_of
from shoal.rollout.samplers.sampler import Request

logger = logging.getLogger(__name__)
Report = Callable[[Hashable, bytes], None]
Episode = tuple[int, int, int, int]


class Waiting(msgspec.Struct, eq=False):
    """One request until it is answered."""

    asker: Hashable
    number: int
    request: Request
    reply: Callable[[int, Result], None]
    deadline: float | None
    arrived: float
    episode: Episode
    restarts: int = 0


class WaitingRoom:
    """Puts requests into the batcher's queue, and takes them out again when nobody waits for them any more.

    Args:
        batcher: whose queue it is.
        timeout: seconds from a request to its answer, after which it is refused.
        max_pending: waiting requests of one connection; beyond it nothing more is to be read from it
            (but in lockstep).
        on_report: called with the asker and what it sent at the end of an episode.
    """

    def __init__(
        self, batcher: Batcher[Waiting], timeout: float | None, max_pending: int, on_report: Report | None
    ) -> None:
        self._batcher = batcher
        self._queue, self._latencies = batcher.queue, batcher.latencies
        self._entered_by: dict[Connection, set[Episode]] = {}
        if batcher.schedule == "barrier":  # it waits for everybody: whoever is not heard would stop all
            max_pending = sys.maxsize
        self._timeout, self._max_pending, self._on_report = timeout, max_pending, on_report

    def items(
        self, asker: Hashable, requests: Sequence[Request], reply: Callable[[int, Result], None]
    ) -> list[Waiting]:
        """Requests that arrive now, from any thread."""
        now = time.monotonic()
        deadline = None if self._timeout is None else now + self._timeout
        return [
            Waiting(asker, number, request, reply, deadline, now, episode_of(request.key))
            for number, request in enumerate(requests)
        ]

    def enter(self, item: Waiting) -> None:
        """A request waits from now on."""
        self._latencies.asked(item.episode, item.arrived)
        self._queue.put(item.asker, item)

    def hear(self, connection: Connection, message: Ask | Entered | Left | Alive) -> None:
        """What a worker process says."""
        if isinstance(message, Ask):
            now, asked = time.monotonic(), message.asked
            if asked is None or asked > now:
                asked = now
            deadline = None if self._timeout is None else now + self._timeout
            self.enter(
                Waiting(
                    connection.asker,
                    message.number,
                    request_of(message),
                    connection.reply,
                    deadline,
                    asked,
                    episode_of(message.key),
                )
            )
        elif isinstance(message, Entered):
            self._entered_by.setdefault(connection, set()).update(message.keys)
            self.entered(message.keys)
        elif isinstance(message, Left):
            self._entered_by.get(connection, set()).discard(message.key)
            self.left(connection.asker, message.key, message.report)

    def entered(self, episodes: Iterable[Episode]) -> None:
        """Episodes are at play."""
        self._batcher.at_play.update(episodes)

    def left(self, asker: Hashable, episode: Episode, report: bytes) -> None:
        """An episode will not ask again."""
        self._batcher.at_play.discard(episode)
        self._latencies.left(episode)
        if report and self._on_report is not None:
            try:
                self._on_report(asker, report)
            except Exception:  # it must not end the thread that everybody waits for
                logger.exception("what was to be done with a report failed")

    def is_full(self, asker: Asker | None) -> bool:
        """Whether so much of an asker waits that no more is to be read from it."""
        most = self._max_pending
        return self._queue.size >= most and self._queue.waiting(asker) >= most

    def ended(self, connection: Connection) -> None:
        """A worker's connection is gone: nobody waits for its answers any more."""
        self._batcher.at_play -= self._entered_by.pop(connection, set())
        if connection.asker is not None:
            for item in self._queue.drop(connection.asker):
                self._latencies.left(item.episode)

    def sweep(self, now: float) -> None:
        """Refuse requests that waited too long."""
        if self._timeout is None:
            return
        for item in self._queue.take(2**62):
            if item.deadline is not None and now >= item.deadline:
                item.reply(item.number, TimeoutError(f"no answer within {self._timeout} s"))
            else:
                self._queue.put(item.asker, item)
