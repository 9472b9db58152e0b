"""How a reset or step goes over the lanes of a pool: begun on each, collected from each, failures dealt with.

What a backend is (the caller itself, threads, processes, other machines) is known only to the lanes.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

from shoal.core.errors import WorkerTimeoutError
from shoal.vector.actions import Loose, for_share
from shoal.vector.failures import Failure
from shoal.vector.results import Record
from shoal.vector.share import Extras
from shoal.vector.standing import Pending, Standing


class PendingTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """A `*_wait(timeout=…)` ran out; the late replies are dropped when they come."""


class Operations(Standing):
    """A pool that can begin an operation on its environments and collect what comes of it."""

    def _begin_step(self, chosen: list[int] | None, loose: Loose) -> None:
        if self.slots.ring > 1:
            self._turn_ring(chosen)
        if chosen is None:
            self._step_begun = time.perf_counter()
            for lane in self.lanes:
                lane.start_step(
                    None, for_share(loose, lane.first, lane.count) if loose else loose, self._ring
                )
            self._pending = self._whole
        else:
            for lane, members in self.by_lane(chosen):
                lane.start_step(members, for_share(loose, lane.first, lane.count), self._ring)
                self._pending.append((lane, members))
        self._state = "step"

    def _begin_reset(
        self, chosen: list[int] | None, seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        everyone = range(self.num_envs) if chosen is None else chosen
        alive = [i for i in everyone if self.active[i]]
        if len(alive) == self.num_envs:
            self.recovery.revive_lost()
        self.recovery.forget(alive)
        self._turn_ring(None if len(alive) == self.num_envs else alive)
        for i in alive:
            self.seeds[i] = seeds[i]
        for lane, members in self.by_lane(alive):
            lane.start("reset", members, [seeds[lane.first + j] for j in members], options, self._ring)
            self._pending.append((lane, members))

    def _gather(self, pending: list[Pending], timeout: float | None, word: str) -> list[Extras | None]:
        """The replies of lanes at work: first the caller's own share, then the others as they come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Extras | None] = [None] * len(pending)
        try:
            for inline in (True, False):
                for k, (lane, _) in enumerate(pending):
                    if lane.inline is inline:
                        left = None if deadline is None else max(0.0, deadline - time.monotonic())
                        replies[k] = lane.finish(left)
        except TimeoutError:
            raise PendingTimeoutError(
                f"The call to `{word}_wait` has timed out after {timeout} second(s)."
            ) from None
        return replies

    def _collect(self, timeout: float | None, word: str) -> list[Record]:
        """Finish a reset or step: keep what came beside the slots, deal with failures, return the infos."""
        pending, self._pending, self._state = self._pending, [], None
        if pending is self._whole and timeout is None:
            replies = self._finish_whole(pending)
        else:
            replies = self._gather(pending, timeout, word)
        records, self._paid = self._paid, []
        return self.take(pending, replies, records, word)

    def _finish_whole(self, pending: list[Pending]) -> list[Extras | None]:
        """The replies of a full step, the caller's own share first; notes how long it waited for others."""
        replies: list[Extras | None] = []
        now = time.perf_counter
        waiting = 0.0
        for lane, _ in pending:
            if not waiting and not lane.inline:
                waiting = now()
            replies.append(lane.finish())
        end = now()
        if waiting:
            self._waited += end - waiting
        self._stepping += end - self._step_begun
        return replies

    def take(
        self, pending: list[Pending], replies: list[Extras | None], records: list[Record], word: str
    ) -> list[Record]:
        """Take over the replies of lanes; returns the infos, completed by those of replaced environments."""
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, replies, strict=True):
            if reply is not None:
                but = {failure.env for failure in reply.failures}
                self.results.keep(lane, members, reply, but)
                records += reply.infos
                failures += reply.failures
        if self._same_step and word == "step" and self.slots.any_end():
            self.results.add_plain_ends(
                records, (lane.first + j for lane, members in pending for j in members)
            )
        if failures:
            failures.sort(key=lambda failure: failure.env)
            self.tell(failures)
            stepped = {lane.first + j for lane, members in pending for j in members}
            replaced = self.recovery.handle(failures, stepped, word)
            told = {record[0] for record in replaced}
            records = [record for record in records if record[0] not in told] + replaced
        return records

    def tell(self, failures: list[Failure]) -> None:
        """Called with the failures of an operation before they are dealt with; for subclasses."""
