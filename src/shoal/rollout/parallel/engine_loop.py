"""The thread that reads all sockets, forms batches and sends answers, while the engine answers in another.

So the next batch is ready when the engine has done one, and is launched before the answers of the last are sent; an
engine that answers at once is asked without that detour. One that fails is asked again for half of the batch, so
that a request which cannot be answered fails alone; one that hangs is left behind and restarted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from shoal.core.errors import EngineError
from shoal.rollout.parallel.answering import Answerer, Result
from shoal.rollout.parallel.batching import Batcher
from shoal.rollout.parallel.connections import Connections
from shoal.rollout.parallel.link import Address
from shoal.rollout.parallel.running import Call, Runner
from shoal.rollout.parallel.waiting import Report, Waiting, WaitingRoom

logger = logging.getLogger(__name__)
QUICK = 1e-3
"""Seconds of an engine call that nothing else need be done meanwhile."""
KNOWN = 8
"""Batches after which it is known how long an engine takes."""
PATIENCE = 5.0
"""Seconds that a call which runs when all ends has to end itself."""


class EngineLoop:
    """What a `SharedLLMInferenceManager` does, whose arguments are explained there.

    Everything but `post`, `serve` and `close` belongs to its own thread.
    """

    def __init__(
        self,
        answerer: Answerer,
        batcher: Batcher[Waiting],
        *,
        request_timeout: float | None,
        engine_timeout: float | None,
        max_pending: int,
        silence: float | None,
        on_report: Report | None,
    ) -> None:
        self.answerer, self.batcher = answerer, batcher
        self.statistics = answerer.statistics
        self.room = room = WaitingRoom(batcher, request_timeout, max_pending, on_report)
        self._connections = Connections(room.hear, room.ended, room.is_full, self.statistics, silence)
        self._request_timeout, self._engine_timeout = request_timeout, engine_timeout
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running: Call | None = None
        self._done: list[Call] = []  # answered, but the answers are not sent yet
        self._closed, self._why = False, "the shared engine was closed"
        self._next_sweep = 0.0
        self._runner = Runner(self._report)
        self._thread = threading.Thread(target=self._run, daemon=True, name="shoal-inference")
        self._thread.start()

    # --- from any thread
    def post(self, action: Callable[[], None]) -> None:
        """Have something done by the thread.

        Raises:
            EngineError: it has ended.
        """
        with self._lock:  # `close` does what came before it
            if self._closed:
                raise EngineError(self._why)
            self._inbox.append(action)
        self._connections.ring()

    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        with self._lock:
            if self._closed:
                raise EngineError(self._why)
            address = self._connections.serve()
        self._connections.ring()
        return address

    def close(self) -> None:
        """Refuse what waits, end the threads and remove the socket; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connections.ring()
        self._thread.join(2 * PATIENCE)
        self._wind_up()

    def _wind_up(self) -> None:
        self._runner.end()
        while self._inbox:
            with contextlib.suppress(Exception):
                self._inbox.popleft()()
        self._deliver()
        left = self.batcher.queue.take(2**62)
        if self._running is not None:  # the engine hangs
            self._running.abandoned = True
            left += self._running.batch
        for item in left:
            self._reply(item, EngineError(self._why))
        self._connections.close()

    # --- the thread
    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is: nobody is to wait for this thread any more
            with self._lock:
                if self._closed:
                    return
                self._closed, self._why = True, f"the shared engine's thread failed: {error!r}"
            logger.exception("the shared engine's thread failed; all further requests are refused")
            self._wind_up()

    def _work(self) -> None:
        batcher = self.batcher
        while not self._closed:
            now = time.monotonic()
            running = self._running
            wait = batcher.wait(now) if running is None else None
            self._look(wait, now)
            if self._running is None:
                now = time.monotonic()
                if running is None and wait is None:
                    batcher.idle(now)
                if batcher.wait(now) == 0.0:
                    self._launch(batcher.queue.take(batcher.max_batch), now)
            if self._done:
                self._deliver()
        patience = time.monotonic() + PATIENCE
        while self._running is not None and (now := time.monotonic()) < patience:
            self._look(patience - now, now)
        self._deliver()

    def _look(self, wait: float | None, now: float) -> None:
        """Take in what arrived, waiting up to `wait` seconds for something to."""
        connections = self._connections
        if len(connections) or self._request_timeout is not None:
            wait = 1.0 if wait is None else min(wait, 1.0)  # for the sweep
        running = self._running
        if running is not None and running.deadline is not None:
            left = max(running.deadline - now, 0.0)
            wait = left if wait is None else min(wait, left)
        connections.look(wait)
        while self._inbox:
            self._inbox.popleft()()
        if now >= self._next_sweep:
            self._next_sweep = now + 1.0
            connections.sweep(now)
            self.room.sweep(now)
            connections.flush()
        if running is not None and running is self._running and running.deadline is not None:
            self._watch(running, running.deadline)

    def _launch(self, batch: list[Waiting], now: float) -> None:
        """Ask the engine: here if it answers at once, else in a thread, while requests go on being read."""
        timeout = self._engine_timeout
        call = Call(batch, now, None if timeout is None else now + timeout)
        self._running = call
        if (
            timeout is None
            and self.statistics.batches >= KNOWN
            and self.batcher.cost.seconds(len(batch)) < QUICK
        ):
            call.ask(self.answerer)
            self._finish(call)
        else:
            self._runner.start(call, lambda: call.ask(self.answerer))

    def _finish(self, call: Call) -> None:
        """The engine has answered; it may be asked again before the answers are sent."""
        if call.abandoned:
            return
        self._running = None
        self._done.append(call)
        batcher, statistics = self.batcher, self.statistics
        size, seconds = len(call.batch), call.ended - call.began
        batcher.idle(call.ended)
        if size:
            batcher.cost.add(size, seconds)
            statistics.requests += size
            statistics.batches += 1
            statistics.engine_seconds += seconds
            statistics.batch_sizes.append(size)
            batcher.latencies.answered([item.episode for item in call.batch], call.ended)

    def _deliver(self) -> None:
        """Send the answers of calls that are over."""
        for call in self._done:
            for item, result in zip(call.batch, call.results, strict=True):
                self._reply(item, result)
        self._done.clear()
        self._connections.flush()

    def _reply(self, item: Waiting, result: Result) -> None:
        try:
            item.reply(item.number, result)
        except Exception as error:  # an answer that cannot be sent, say: it fails alone
            logger.exception("an answer of the engine could not be given")
            with contextlib.suppress(Exception):
                item.reply(item.number, EngineError(f"its answer could not be given: {error}"))

    # --- an engine that hangs
    def _watch(self, call: Call, deadline: float) -> None:
        """Leave the engine's thread behind if it is overdue, and take another engine in another thread."""
        now = time.monotonic()
        if self.answerer.restarting:
            call.deadline = now + (self._engine_timeout or 0.0)
        elif now >= deadline:
            call.abandoned = True
            why = f"it did not answer within {self._engine_timeout} s"
            self._runner = Runner(self._report)
            self._running = again = Call([], now)
            self._runner.start(again, lambda: self.answerer.replace(why))
            for item in call.batch:
                item.restarts += 1
                if item.restarts > self.answerer.retries:
                    self._reply(item, TimeoutError(f"the engine hangs: {why}"))
                else:
                    self.batcher.queue.put(item.asker, item)
            self._connections.flush()

    def _report(self, call: Call) -> None:
        """A call is over (in the engine's thread)."""
        self._inbox.append(lambda: self._finish(call))
        self._connections.ring()
