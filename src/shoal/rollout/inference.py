"""One engine for many askers: threads of this process, worker processes over a Unix socket, a Ray cluster.

One thread reads all sockets, forms batches and runs the engine; what arrives meanwhile waits in the kernel and
joins the next batch. An engine that fails is asked again for half of the batch, so that a request which cannot
be answered fails alone; one that hangs is left behind and restarted.
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
from shoal.rollout.waiting import Report, Waiting, WaitingRoom
from shoal.rollout.wire import episode_of


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
        self._busy: tuple[float, list[Waiting]] | None = None
        self._closed = False
        self._next_sweep = 0.0
        self._thread = self._start_thread()
        if engine_timeout is not None:
            threading.Thread(target=self._watch, daemon=True, name="shoal-engine-watch").start()

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
        """Refuse what waits, end the thread and remove the socket; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connections.ring()
        self._thread.join(5.0)  # a hung engine's thread stays behind, as a daemon
        self._answerer.generation += 1
        while self._inbox:
            self._inbox.popleft()()
        for item in self._batcher.queue.take(2**62):
            item.reply(item.number, EngineError("the shared engine was closed"))
        self._connections.close(thread_ended=not self._thread.is_alive())

    # --- the loop
    def _start_thread(self) -> threading.Thread:
        generation = self._answerer.generation
        thread = threading.Thread(target=self._loop, args=(generation,), daemon=True, name="shoal-engine")
        thread.start()
        return thread

    def _loop(self, generation: int) -> None:
        batcher = self._batcher
        while not self._closed:
            now = time.monotonic()
            wait = batcher.wait(now)
            self._look(wait, now)
            now = time.monotonic()
            if wait is None:
                batcher.idle(now)
            if len(batcher.queue) and not self._closed and batcher.wait(now) == 0.0:
                batch = batcher.queue.take(batcher.max_batch)
                if not self._run(batch, generation):
                    return

    def _look(self, wait: float | None, now: float) -> None:
        """Take in what arrived, waiting up to `wait` seconds for something to."""
        connections = self._connections
        if len(connections) or self._request_timeout is not None:
            wait = min(1.0 if wait is None else wait, 1.0)  # for the sweep
        connections.look(wait)
        while self._inbox:
            self._inbox.popleft()()
        if now >= self._next_sweep:
            self._next_sweep = now + 1.0
            connections.sweep(now)
            self._room.sweep(now)
        connections.flush()

    def _run(self, batch: list[Waiting], generation: int) -> bool:
        """Run one batch and answer it; False when this thread was left behind meanwhile."""
        began = time.monotonic()
        with self._lock:
            self._busy = (began, batch)
        results = self._answerer.answer([item.request for item in batch], generation)
        ended = time.monotonic()
        with self._lock:
            if generation != self._answerer.generation:
                return False
            self._busy = None
        batcher, statistics = self._batcher, self.statistics
        batcher.cost.add(len(batch), ended - began)
        batcher.idle(ended)
        statistics.requests += len(batch)
        statistics.batches += 1
        statistics.engine_seconds += ended - began
        statistics.batch_sizes.append(len(batch))
        answered = batcher.latencies.answered
        for item, result in zip(batch, results, strict=True):
            answered(item.episode, ended)
            item.reply(item.number, result)
        self._connections.flush()
        return True

    def _watch(self) -> None:
        """Leave a hung engine behind."""
        assert self._engine_timeout is not None
        while not self._closed:
            time.sleep(self._engine_timeout / 8)
            with self._lock:
                if self._busy is None or time.monotonic() - self._busy[0] < self._engine_timeout:
                    continue
                batch = self._busy[1]
                self._busy = None
                self._answerer.generation += 1
            why = f"it did not answer within {self._engine_timeout} s"
            self._answerer.replace(why)

            def again(batch: list[Waiting] = batch, why: str = why) -> None:
                for item in batch:
                    item.restarts += 1
                    if item.restarts > self._answerer.retries:
                        item.reply(item.number, TimeoutError(f"the engine hangs: {why}"))
                    else:
                        self._batcher.queue.put(item.asker, item)

            self._post(again)
            self._thread = self._start_thread()

    # --- what arrives
    def _post(self, action: Callable[[], None]) -> None:
        if self._closed:
            raise EngineError("the shared engine was closed")
        self._inbox.append(action)
        self._connections.ring()
