"""One engine call at a time, in a thread that can be left behind: an engine may hang, and Python cannot stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from shoal.core.errors import EngineError
from shoal.rollout.parallel.answering import Answerer, Result
from shoal.rollout.parallel.waiting import Waiting


class Call:
    """One batch that the engine is asked for.

    Args:
        batch: the requests that wait for it.
        deadline: when the engine counts as hung, on the monotonic clock.
    """

    __slots__ = ("abandoned", "batch", "began", "deadline", "ended", "results")

    def __init__(self, batch: list[Waiting], began: float, deadline: float | None = None) -> None:
        self.batch, self.began, self.deadline = batch, began, deadline
        self.abandoned = False
        """Nobody waits for the results any more."""
        self.results: list[Result] = []
        self.ended = began

    def ask(self, answerer: Answerer) -> None:
        """Wait for the engine."""
        try:
            self.results = answerer.answer([item.request for item in self.batch], self._is_abandoned)
        except BaseException as error:  # SystemExit, say: it must not end the thread that everybody waits for
            refused = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self.results = [refused] * len(self.batch)
        self.ended = time.monotonic()

    def _is_abandoned(self) -> bool:
        return self.abandoned


class Runner:
    """A thread for calls that take their time.

    Args:
        on_done: called from the thread with every call that is over and was not abandoned.
    """

    def __init__(self, on_done: Callable[[Call], None]) -> None:
        self._on_done = on_done
        self._calls: SimpleQueue[tuple[Call, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shoal-engine")
        self._thread.start()

    def start(self, call: Call, work: Callable[[], None]) -> None:
        """Do `work`, then report `call`."""
        self._calls.put((call, work))

    def end(self) -> None:
        """Let the thread go once it is idle; one that hangs stays behind as a daemon."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, work = item
            work()
            if call.abandoned:
                return
            self._on_done(call)
