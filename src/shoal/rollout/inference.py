"""One engine for many askers: threads of this process, worker processes over a Unix socket, a Ray cluster.

One thread reads all sockets, forms batches and runs the engine; what arrives meanwhile waits in the kernel and
joins the next batch. An engine that fails is asked again for half of the batch, so that a request which cannot
be answered fails alone; one that hangs is left behind and restarted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import EngineError
from shoal.rollout.batching import Batcher, Schedule
from shoal.rollout.engine import ChatTokenizer, Completion, Engine, Key, Level, Request
from shoal.rollout.wire import (
    Address,
    Ask,
    Hello,
    Left,
    Refusal,
    answer_of,
    episode_of,
    frame,
    request_of,
    server_frames,
)

logger = logging.getLogger(__name__)
Result = Completion | Exception
Report = Callable[[Hashable, bytes], None]
MAX_CONNECTIONS = 1024
PATIENCE = 30.0
"""Seconds within which a connection must have introduced itself and a message that began must end."""


@dataclass(slots=True)
class Statistics:
    """What a shared engine did so far."""

    requests: int = 0
    batches: int = 0
    engine_seconds: float = 0.0
    failures: int = 0
    restarts: int = 0
    refused_connections: int = 0
    batch_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=4096))


@dataclass(slots=True)
class _Waiting:
    asker: Hashable
    number: int
    request: Request
    reply: Callable[[int, Result], None]
    deadline: float | None
    arrived: float
    seconds: float | None = None
    restarts: int = 0


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
        on_report: Report | None = None,
    ) -> None:
        self.engine = engine
        self.statistics = Statistics()
        self.on_report = on_report
        self._batcher: Batcher[_Waiting] = Batcher(schedule, max_batch)
        self._request_timeout, self._engine_timeout = request_timeout, engine_timeout
        self._retries, self._restart, self._restarts_left = retries, restart, max_restarts
        self._max_pending = max_pending
        self._inbox: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._connections: dict[socket.socket, _Connection] = {}
        self._dirty: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._generation = 0
        self._busy: tuple[float, list[_Waiting]] | None = None
        self._closed = False
        self._hung: str | None = None
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
        seconds: float | None = None,
    ) -> None:
        """Queue requests; `reply(place, result)` is called for each from the engine's thread and must not wait."""
        now, deadline = time.monotonic(), self._deadline()
        items = [
            _Waiting(asker, number, request, reply, deadline, now, seconds)
            for number, request in enumerate(requests)
        ]

        def enqueue() -> None:
            for item in items:
                self._enqueue(item)

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
        self._post(lambda: self._episode_left(threading.get_ident(), episode_of(key), report))

    # --- other processes
    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
                if len(str(self._folder)) > 90:  # a Unix socket's path has room for 107 bytes
                    self._folder.rmdir()
                    self._folder = Path(tempfile.mkdtemp(prefix="shoal-", dir="/tmp"))
                self._token = secrets.token_bytes(16)
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                path = self._folder / "engine"
                listener.bind(str(path))
                path.chmod(0o600)
                listener.listen(128)
                listener.setblocking(False)
                self._listener = listener
                self._post(lambda: self._listen(listener))
            return Address(str(self._folder / "engine"), self._token)

    def _listen(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, listener)

    # --- the end
    def close(self) -> None:
        """Refuse what waits, end the thread and remove the socket; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring()
        self._thread.join(5.0)  # a hung engine's thread stays behind, as a daemon
        self._generation += 1
        while self._inbox:
            self._inbox.popleft()()
        for item in self._batcher.queue.take(2**62):
            item.reply(item.number, EngineError("the shared engine was closed"))
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._bell)

    # --- the loop
    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(
            target=self._loop, args=(self._generation,), daemon=True, name="shoal-engine"
        )
        thread.start()
        return thread

    def _loop(self, generation: int) -> None:
        batcher = self._batcher
        while True:
            wait = batcher.wait(time.monotonic())
            self._look(wait)
            if self._closed:
                return
            if wait == 0.0 and len(batcher.queue):
                batch = batcher.queue.take(batcher.max_batch)
                if not self._run(batch, generation):
                    return
            elif wait is None:
                batcher.idle(time.monotonic())

    def _look(self, wait: float | None) -> None:
        """Take in what arrived, waiting up to `wait` seconds for something to."""
        now = time.monotonic()
        if self._connections or self._request_timeout is not None:
            wait = min(1.0 if wait is None else wait, 1.0)  # for the sweep
        for key, events in self._selector.select(wait):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif key.data is self._listener:
                self._accept()
            else:
                if events & selectors.EVENT_WRITE:
                    self._dirty.add(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
        while self._inbox:
            self._inbox.popleft()()
        if now >= self._next_sweep:
            self._next_sweep = now + 1.0
            self._sweep(now)
        if self._dirty:
            self._flush()

    def _run(self, batch: list[_Waiting], generation: int) -> bool:
        """Run one batch and answer it; False when this thread was left behind meanwhile."""
        began = time.monotonic()
        with self._lock:
            self._busy = (began, batch)
        if self._hung is not None:
            results: list[Result] = [EngineError(self._hung)] * len(batch)
        else:
            results = self._answer([item.request for item in batch], generation)
        ended = time.monotonic()
        with self._lock:
            if generation != self._generation:
                return False
            self._busy = None
        self._batcher.cost.add(len(batch), ended - began)
        self._batcher.idle(ended)
        statistics = self.statistics
        statistics.requests += len(batch)
        statistics.batches += 1
        statistics.engine_seconds += ended - began
        statistics.batch_sizes.append(len(batch))
        for item, result in zip(batch, results, strict=True):
            self._batcher.latencies.answered(episode_of(item.request.key), ended)
            item.reply(item.number, result)
        self._flush()
        return True

    def _answer(self, requests: list[Request], generation: int, attempt: int = 0) -> list[Result]:
        """The engine's answers; when it fails, halves of the batch, so that what cannot be answered fails alone."""
        try:
            each = getattr(self.engine, "generate_each", None)
            completions = self.engine.generate(requests) if each is None else each(requests)
            if len(completions) != len(requests):
                raise EngineError(f"the engine gave {len(completions)} answers to {len(requests)} requests")
            failed = [i for i, answer in enumerate(completions) if isinstance(answer, Exception)]
            if not failed or attempt >= self._retries or generation != self._generation:
                return list(completions)
            self.statistics.failures += len(failed)
            again = self._answer([requests[i] for i in failed], generation, attempt + 1)
            second = dict(zip(failed, again, strict=True))
            return [second.get(i, answer) for i, answer in enumerate(completions)]
        except Exception as error:
            if generation != self._generation:
                return [error] * len(requests)
            self.statistics.failures += 1
            if not isinstance(error, EngineError):
                self._restart_engine(f"it raised {type(error).__name__}: {error}")
            if len(requests) > 1:
                half = len(requests) // 2
                return self._answer(requests[:half], generation) + self._answer(requests[half:], generation)
            if attempt < self._retries:
                return self._answer(requests, generation, attempt + 1)
            if isinstance(error, EngineError):
                return [error]
            refused = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            refused.__cause__ = error
            return [refused]

    def _restart_engine(self, why: str) -> bool:
        if self._restart is None or self._restarts_left <= 0:
            return False
        self._restarts_left -= 1
        logger.warning("the engine is restarted: %s", why)
        try:
            self.engine = self._restart()
        except Exception:  # whatever it is, it must not end the thread that everybody waits for
            logger.exception("the engine could not be restarted")
            return False
        self.statistics.restarts += 1
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
                self._generation += 1
            why = f"it did not answer within {self._engine_timeout} s"
            if not self._restart_engine(why):
                self._hung = f"the engine hangs: {why}"
                logger.error("%s; all further requests are refused", self._hung)

            def again(batch: list[_Waiting] = batch, why: str = why) -> None:
                for item in batch:
                    item.restarts += 1
                    if item.restarts > self._retries:
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
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._bell, 1)

    def _deadline(self) -> float | None:
        return None if self._request_timeout is None else time.monotonic() + self._request_timeout

    def _enqueue(self, item: _Waiting) -> None:
        self._batcher.latencies.asked(episode_of(item.request.key), item.arrived, item.seconds)
        self._batcher.queue.put(item.asker, item)

    def _episode_left(self, asker: Hashable, episode: tuple[int, int, int, int], report: bytes) -> None:
        self._batcher.live -= 1
        self._batcher.latencies.left(episode)
        if self.on_report is not None:
            self.on_report(asker, report)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                _, uid, _ = struct.unpack(
                    "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                )
                if uid != os.getuid() or len(self._connections) >= MAX_CONNECTIONS:
                    self.statistics.refused_connections += 1
                    sock.close()
                    continue
                sock.setblocking(False)
                connection = _Connection(sock, self._dirty)
                self._connections[sock] = connection
                self._selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(2**18)
            if not data:
                self._drop(connection)
                return
            for message in connection.frames.feed(data):
                self._handle(connection, message)
            connection.since = time.monotonic()
        except BlockingIOError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.debug("a connection to the shared engine was ended: %s", error)
            self.statistics.refused_connections += connection.asker is None
            self._drop(connection)
            return
        if len(self._batcher.queue) >= self._max_pending:
            self._listen_to(connection)

    def _handle(self, connection: _Connection, message: Any) -> None:
        if connection.asker is None:
            if not isinstance(message, Hello):
                raise ValueError("the first message must be an introduction")
            if not hmac.compare_digest(message.token, self._token):
                raise ValueError("wrong secret")
            connection.asker = ("socket", message.asker, connection.sock.fileno())
        elif isinstance(message, Ask):
            item = _Waiting(
                connection.asker,
                message.number,
                request_of(message),
                connection.reply,
                self._deadline(),
                time.monotonic(),
                message.seconds,
            )
            self._enqueue(item)
        elif isinstance(message, Left):
            self._episode_left(connection.asker, message.key, message.report)

    def _flush(self) -> None:
        """Send the answers that were written since the last time."""
        for connection in self._dirty:
            if connection.sock in self._connections:
                if not connection.flush():
                    self._drop(connection)
                elif connection.out or connection.events != selectors.EVENT_READ:
                    self._listen_to(connection)
        self._dirty.clear()

    def _listen_to(self, connection: _Connection) -> None:
        """Wait for what concerns a connection: not for requests while too many of its own wait already."""
        waiting = self._batcher.queue.waiting(connection.asker)
        events = selectors.EVENT_READ if waiting < self._max_pending else 0
        events |= selectors.EVENT_WRITE if connection.out else 0
        if events == connection.events:
            return
        if not events:
            self._selector.unregister(connection.sock)
        elif not connection.events:
            self._selector.register(connection.sock, events, connection)
        else:
            self._selector.modify(connection.sock, events, connection)
        connection.events = events

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.asker is not None:
            for item in self._batcher.queue.drop(connection.asker):
                self._batcher.latencies.left(episode_of(item.request.key))

    def _sweep(self, now: float) -> None:
        """End connections that keep us waiting, and refuse requests that waited too long."""
        for connection in list(self._connections.values()):
            silent = connection.asker is None or connection.frames.partial
            if silent and now - connection.since > PATIENCE:
                self._drop(connection)
        if self._request_timeout is None:
            return
        items = self._batcher.queue.take(2**62)
        for item in items:
            if item.deadline is not None and now >= item.deadline:
                item.reply(item.number, TimeoutError(f"no answer within {self._request_timeout} s"))
            else:
                self._batcher.queue.put(item.asker, item)


class _Connection:
    """One worker's socket, this side."""

    def __init__(self, sock: socket.socket, dirty: set[_Connection]) -> None:
        self.sock = sock
        self._dirty = dirty
        self.asker: tuple[str, int, int] | None = None
        self.frames = server_frames()
        self.out = bytearray()
        self.since = time.monotonic()
        self.events: int = selectors.EVENT_READ

    def reply(self, number: int, result: Result) -> None:
        """Queue an answer; it is sent with the others of its batch."""
        if isinstance(result, Exception):
            self.out += frame(Refusal(number, str(result), isinstance(result, TimeoutError)))
        else:
            self.out += frame(answer_of(number, result))
        self._dirty.add(self)

    def flush(self) -> bool:
        """Send what the other side takes; False when it is gone."""
        try:
            while self.out:
                sent = self.sock.send(self.out)
                del self.out[:sent]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
