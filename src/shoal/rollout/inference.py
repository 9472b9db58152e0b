"""One engine for many askers: threads of this process, worker processes over a Unix socket, a Ray cluster.

One thread reads all sockets and forms batches. The engine answers in another, so that the next batch is ready when
it has done one, and is launched before the answers of the last are sent; an engine that answers at once is asked
without that detour. One that fails is asked again for half of the batch, so that a request which cannot be
answered fails alone; one that hangs is left behind and restarted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from shoal.core.errors import EngineError
from shoal.rollout.answering import Answerer, Result, Statistics
from shoal.rollout.batching import Batcher, Schedule
from shoal.rollout.connections import Connections
from shoal.rollout.engine import ChatTokenizer, Completion, Engine, Key, Level, Request
from shoal.rollout.link import Address
from shoal.rollout.running import Call, Runner
from shoal.rollout.waiting import Report, Waiting, WaitingRoom
from shoal.rollout.wire import episode_of

QUICK = 1e-3
"""Seconds of an engine call that nothing else need be done meanwhile."""
KNOWN = 8
"""Batches after which it is known how long an engine takes."""
PATIENCE = 5.0
"""Seconds that a call which runs when all ends has to end itself."""


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
        self.statistics = Statistics()
        self._answerer = Answerer(engine, retries, restart, max_restarts, self.statistics)
        self._batcher: Batcher[Waiting] = Batcher(schedule, max_batch)
        self._room = room = WaitingRoom(self._batcher, request_timeout, max_pending, on_report)
        self._connections = Connections(room.hear, room.ended, room.is_full, self.statistics, silence)
        self._request_timeout, self._engine_timeout = request_timeout, engine_timeout
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running: Call | None = None
        self._done: list[Call] = []  # answered, but the answers are not sent yet
        self._closed = False
        self._next_sweep = 0.0
        self._runner = Runner(self._report)
        self._thread = threading.Thread(target=self._loop, daemon=True, name="shoal-inference")
        self._thread.start()

    def __enter__(self) -> SharedLLMInferenceManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- an engine itself
    @property
    def engine(self) -> Engine:
        """What answers now; another one after a restart."""
        return self._answerer.engine

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
        return self._batcher.schedule

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
        items = self._room.items(asker, requests, reply)

        def enqueue() -> None:
            for item in items:
                self._room.enter(item)

        self._post(enqueue)

    # --- which episodes there are
    def expect(self, n_episodes: int) -> None:
        """So many episodes will ask from now on; the barrier schedule waits for all of them."""

        def begin() -> None:
            self._batcher.live = n_episodes

        self._post(begin)

    def connect(self, asker: int) -> SharedLLMInferenceManager:
        """A link for a worker in this process: this object."""
        del asker
        return self

    def left(self, key: Key, report: bytes = b"") -> None:
        """An episode is over (or given up): it will not ask again."""
        asker = threading.get_ident()
        self._post(lambda: self._room.left(asker, episode_of(key), report))

    # --- other processes
    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        with self._lock:
            address = self._connections.serve()
        self._connections.ring()
        return address

    # --- the end
    def close(self) -> None:
        """Refuse what waits, end the threads and remove the socket; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connections.ring()
        self._thread.join(2 * PATIENCE)
        self._runner.end()
        while self._inbox:
            self._inbox.popleft()()
        self._deliver()
        left = self._batcher.queue.take(2**62)
        if self._running is not None:  # the engine hangs
            self._running.abandoned = True
            left += self._running.batch
        for item in left:
            item.reply(item.number, EngineError("the shared engine was closed"))
        self._connections.close()

    # --- the loop
    def _loop(self) -> None:
        batcher = self._batcher
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
            self._room.sweep(now)
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
            and self._batcher.cost.seconds(len(batch)) < QUICK
        ):
            call.ask(self._answerer)
            self._finish(call)
        else:
            self._runner.start(call, lambda: call.ask(self._answerer))

    def _finish(self, call: Call) -> None:
        """The engine has answered; it may be asked again before the answers are sent."""
        if call.abandoned:
            return
        self._running = None
        self._done.append(call)
        batcher, statistics = self._batcher, self.statistics
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
                item.reply(item.number, result)
        self._done.clear()
        self._connections.flush()

    # --- an engine that hangs
    def _watch(self, call: Call, deadline: float) -> None:
        """Leave the engine's thread behind if it is overdue, and take another engine in another thread."""
        now = time.monotonic()
        if self._answerer.restarting:
            call.deadline = now + (self._engine_timeout or 0.0)
        elif now >= deadline:
            call.abandoned = True
            why = f"it did not answer within {self._engine_timeout} s"
            self._runner = Runner(self._report)
            self._running = again = Call([], now)
            self._runner.start(again, lambda: self._answerer.replace(why))
            for item in call.batch:
                item.restarts += 1
                if item.restarts > self._answerer.retries:
                    item.reply(item.number, TimeoutError(f"the engine hangs: {why}"))
                else:
                    self._batcher.queue.put(item.asker, item)
            self._connections.flush()

    # --- what arrives
    def _report(self, call: Call) -> None:
        """A call is over (in the engine's thread)."""
        self._inbox.append(lambda: self._finish(call))
        self._connections.ring()

    def _post(self, action: Callable[[], None]) -> None:
        if self._closed:
            raise EngineError("the shared engine was closed")
        self._inbox.append(action)
        self._connections.ring()
