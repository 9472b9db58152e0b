"""Lanes in threads of the caller's own process: for environments that wait and need no isolation."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from shoal.vector.actions import Loose, read
from shoal.vector.failures import Failure, from_exception, timed_out
from shoal.vector.share import EnvFn, Extras, Share
from shoal.vector.slots import Slots
from shoal.vector.waiting import SLICE


class ThreadLane:
    """A share that a thread of this process steps."""

    inline = False

    def __init__(self, share: Share, backend: ThreadBackend) -> None:
        self.first, self.count = share.first, share.count
        self.ring = 0
        self.rings_bell = False
        self.lost: Failure | None = None
        self.home: Any = None
        self.backend = backend
        self._all = range(share.count)
        self._queued: tuple[Any, ...] | None = None
        self._abandoned = False
        self._doing = ("", 0.0)
        self.adopt(share)

    def adopt(self, share: Share) -> None:
        """Begin with a fresh share and a fresh thread."""
        self.share, self.lost = share, None
        self._busy = self._abandoned = False
        self._queued = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._seen = (-1, 0.0)
        thread = threading.Thread(
            target=_serve, args=(share, self._work, self._answers, self.backend.bell), daemon=True
        )
        thread.name = f"shoal-envs-{self.first}"
        thread.start()

    def start_step(self, members: Sequence[int] | None, loose: Loose, ring: int) -> None:
        """Begin to step all envs of the share, or only `members`."""
        chosen = self._all if members is None else members
        self._begin("step", read(self.share.slots, self.first, chosen, loose), chosen, ring)

    def start(self, operation: str, *args: Any) -> None:
        """Begin another operation of `Share`, by name."""
        self._begin(operation, *args)

    def _begin(self, *job: Any) -> None:
        if self._busy:  # an abandoned reply is still to come: this waits its turn
            self._abandoned, self._queued = True, job
            return
        self._busy = True
        now = time.monotonic()
        self._doing, self._seen = (job[0], now), (-1, now)
        self._work.put(job)

    def finished(self) -> bool:
        """The reply is there, or never will be."""
        return self.lost is not None or not self._answers.empty()

    def check(self) -> None:
        """Give up on a thread that has been at one env for too long."""
        limit = self.backend.step_timeout
        if limit is None or not self._busy or self.lost is not None or not self._answers.empty():
            return
        now, at = time.monotonic(), self.share.at_work
        if at != self._seen[0]:
            self._seen = (at, now)
        elif now - self._seen[1] > limit:
            self.lost = timed_out(self.first + at, self._doing[0], None, None, limit)
            self.share.detach()  # should it ever wake up, it must not write into its successor's rows

    def finish(self, timeout: float | None = None) -> Extras | None:
        """The reply; an env that hangs gives its failure."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                extras = self._wait(deadline)
                self._busy = False
                queued, self._queued = self._queued, None
                if not self._abandoned or queued is None or self.lost is not None:
                    self._abandoned = False
                    return extras
                self._abandoned = False
                self._begin(*queued)
        except BaseException:
            self._abandoned = True
            raise

    def _wait(self, deadline: float | None) -> Extras | None:
        while True:
            self.check()
            if self.lost is not None:
                return Extras(failures=[self.lost])
            pause = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            try:
                answer = (
                    self._answers.get(timeout=max(pause, 0.0)) if pause > 0 else self._answers.get_nowait()
                )
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None
                continue
            if isinstance(answer, BaseException):
                raise answer
            extras: Extras | None = answer
            return extras

    def close(self, timeout: float) -> None:
        """Have the thread close its envs; one that hangs is left behind, as threads cannot be killed."""
        if self.lost is None:
            self._work.put(None)
            end = time.monotonic() + timeout
            while not self._closed() and time.monotonic() < end:
                time.sleep(0.001)

    def _closed(self) -> bool:
        try:
            while self._answers.get_nowait() is not _CLOSED:
                pass
        except queue.Empty:
            return False
        return True


_CLOSED = object()


def _serve(share: Share, work: Any, answers: Any, bell: threading.Semaphore) -> None:
    while (job := work.get()) is not None:
        operation, *args = job
        try:
            answer = getattr(share, operation)(*args)
        except BaseException as error:  # handed over: the caller raises it
            answer = error
        answers.put(answer)
        bell.release()
    try:
        share.close()
    except BaseException as error:
        answers.put(Extras(failures=[from_exception(share.first, "close", error)]))
    answers.put(_CLOSED)


class ThreadBackend:
    """What thread lanes share."""

    def __init__(self, step_timeout: float | None) -> None:
        self.step_timeout = step_timeout
        self.bell = threading.Semaphore(0)
        self.restarts = 0

    def lanes(
        self,
        env_fns: Sequence[EnvFn],
        envs: Sequence[Any],
        cuts: Sequence[tuple[int, int]],
        slots: Slots,
        autoreset: AutoresetMode,
        check_nan: bool,
    ) -> list[ThreadLane]:
        """One lane for each `(from, to)` of `cuts`, over environments that exist already."""
        return [
            ThreadLane(
                Share(env_fns[lo:hi], lo, slots, autoreset, check_nan=check_nan, envs=envs[lo:hi]), self
            )
            for lo, hi in cuts
        ]

    def revive(self, lane: ThreadLane) -> Sequence[ThreadLane]:
        """A fresh thread with fresh environments for a lane whose thread hangs."""
        old = lane.share
        lane.adopt(Share(old.env_fns, old.first, old.slots, old.autoreset, check_nan=old.check_nan))
        self.restarts += 1
        return [lane]

    def wait_bell(self, seconds: float) -> None:
        """Sleep until a lane has an answer."""
        if self.bell.acquire(timeout=max(seconds, 0.0)):
            while self.bell.acquire(blocking=False):
                pass

    def stats(self) -> list[dict[str, Any]]:
        """Threads have no memory of their own."""
        return []

    def close(self, seconds: float) -> None:
        """Nothing beyond the lanes."""
        del seconds
