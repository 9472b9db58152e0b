"""One engine for many askers: threads of this process, worker processes over a Unix socket, a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

from shoal.rollout.parallel.answering import Answerer, Result, Statistics
from shoal.rollout.parallel.batching import Batcher, Schedule
from shoal.rollout.parallel.engine_loop import EngineLoop
from shoal.rollout.parallel.link import Address
from shoal.rollout.parallel.waiting import Report
from shoal.rollout.parallel.wire import episode_of
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Engine, Key, Level, Request


class SharedLLMInferenceManager:
    """Batches the requests of many askers for one engine; an `Engine` itself, safe to use from any thread.

    Args:
        engine: what answers.
        schedule: when a batch is launched, see `shoal.rollout.batching`.
        max_batch: requests of one batch, at most.
        request_timeout: seconds from a request to its answer, after which it is refused.
        engine_timeout: seconds of one engine call, after which the engine counts as hung.
        retries: further attempts for a request that fails alone.
        restart: makes a new engine after a crash or hang; without it, a hung engine refuses all further requests.
        max_restarts: of the engine.
        max_pending: waiting requests of one connection; beyond it nothing more is read from it.
        silence: seconds without a sign of life after which a worker process that is connected is killed.
        on_report: called with the asker and what it sent at the end of an episode (in the engine's thread).

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Schedule = "adaptive",
        max_batch: int = 4096,
        request_timeout: float | None = None,
        engine_timeout: float | None = None,
        retries: int = 1,
        restart: Callable[[], Engine] | None = None,
        max_restarts: int = 3,
        max_pending: int = 1024,
        silence: float | None = None,
        on_report: Report | None = None,
    ) -> None:
        self._loop = EngineLoop(
            Answerer(engine, retries, restart, max_restarts),
            Batcher(schedule, max_batch),
            request_timeout=request_timeout,
            engine_timeout=engine_timeout,
            max_pending=max_pending,
            silence=silence,
            on_report=on_report,
        )

    def __enter__(self) -> SharedLLMInferenceManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- an engine itself
    @property
    def engine(self) -> Engine:
        """What answers now; another one after a restart."""
        return self._loop.answerer.engine

    @property
    def statistics(self) -> Statistics:
        """What it did so far."""
        return self._loop.statistics

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The engine's."""
        return self.engine.tokenizer

    @property
    def level(self) -> Level:
        """The engine's."""
        return self.engine.level

    @property
    def weights_version(self) -> int:
        """The engine's."""
        return self.engine.weights_version

    @property
    def schedule(self) -> Schedule:
        """When batches are launched."""
        return self._loop.batcher.schedule

    def generate(self, requests: Sequence[Request], timeout: float | None = None) -> list[Completion]:
        """One completion a request, in order; waits for its batch.

        Raises:
            EngineError: the engine could not answer.
            TimeoutError: no answer within `timeout` or `request_timeout`.
        """
        results = self.generate_each(requests, timeout)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results  # type: ignore[return-value]

    def generate_each(self, requests: Sequence[Request], timeout: float | None = None) -> list[Result]:
        """Like `generate`, with an exception in the place of each request that has no answer."""
        results: dict[int, Result] = {}
        done = threading.Event()

        def reply(number: int, result: Result) -> None:
            results[number] = result
            if len(results) == len(requests):
                done.set()

        if not requests:
            return []
        self.submit(threading.get_ident(), requests, reply)
        if not done.wait(timeout):
            raise TimeoutError(f"the engine did not answer within {timeout} s")
        return [results[number] for number in range(len(requests))]

    def submit(
        self,
        asker: Hashable,
        requests: Sequence[Request],
        reply: Callable[[int, Result], None],
    ) -> None:
        """Queue requests; `reply(place, result)` is called for each from the engine's thread and must not wait."""
        room = self._loop.room
        items = room.items(asker, requests, reply)

        def enqueue() -> None:
            for item in items:
                room.enter(item)

        self._loop.post(enqueue)

    # --- which episodes there are
    def entered(self, keys: Sequence[Key]) -> None:
        """The episodes of these keys are at play until they leave; the barrier schedule waits for all of them."""
        episodes = [episode_of(key) for key in keys]
        self._loop.post(lambda: self._loop.room.entered(episodes))

    def connect(self, asker: int) -> SharedLLMInferenceManager:
        """A link for a worker in this process: this object."""
        del asker
        return self

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over, or its worker lost: it does not ask again until it enters again."""
        asker = threading.get_ident()
        self._loop.post(lambda: self._loop.room.left(asker, episode_of(key), report))

    # --- other processes
    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        return self._loop.serve()

    # --- the end
    def close(self) -> None:
        """Refuse what waits, end the threads and remove the socket; may be called twice."""
        self._loop.close()
