"""Hosts in other processes: whole messages of msgpack over a connection of multiprocessing.

A worker process has a pipe of its own; a task of joblib, wherever joblib runs it, connects to a socket that only this
user's processes can use. The host's side waits for its messages, the driver's side never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from typing import Any

from shoal.core.errors import ConfigError, WorkerDiedError, format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.core.workers import PRELOAD, WorkerProcess, describe_exit, dumps
from shoal.rollout.hosts.episodes import (
    START,
    Event,
    Message,
    Report,
    Setup,
    SlotThreads,
    decode_event,
    decode_message,
    encode,
)
from shoal.rollout.hosts.host import (
    Host,
    HostLostError,
    Hosts,
    HostsFailedError,
    LocalHosts,
    SlotsHost,
    ThreadHost,
)

logger = logging.getLogger(__name__)
PRELOAD.append(__name__)
START_SECONDS = 120.0
"""Seconds within which a process must have imported what its envs need, whatever their limits."""
_HEAD = struct.Struct("!i")
"""What multiprocessing sends before each message: its length."""


# --- the driver's side
class Pipe(asyncio.Protocol):
    """This side of a connection of multiprocessing in an event loop; it waits for the other side neither way.

    Args:
        received: called with each message.
        ended: called when the other side is gone.
    """

    def __init__(self, received: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._received, self._ended = received, ended
        self._buffer, self._out = bytearray(), bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._closed = False

    async def open(self, pipe: Any) -> None:
        """Speak over this connection, which stays the caller's to close."""
        own = socket.socket(fileno=os.dup(pipe.fileno()))
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=own)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        if self._closed:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that are whole."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _HEAD.size:
            end = at + _HEAD.size + _HEAD.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            self._received(bytes(memoryview(buffer)[at + _HEAD.size : end]))
            at = end
        del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is gone, or this one was closed."""
        self._ended()

    def send(self, data: bytes) -> None:
        """Send a message, with the others of this turn of the loop."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += _HEAD.pack(len(data)) + data

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(out)

    def close(self) -> None:
        """Close this side at once; may be called twice."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()


class PipeHost(SlotsHost):
    """A host at the other end of a pipe.

    Args:
        setup: of its episodes.
        process: the process of its own, which ends with it; None where another program runs it.
    """

    name = "a worker process"

    def __init__(self, setup: Setup, process: WorkerProcess | None = None) -> None:
        super().__init__(setup)
        self._pipe = Pipe(lambda data: self._receive(decode_event(data)), self._gone)
        self._process = process
        if process is not None:
            asyncio.get_running_loop().add_reader(process.sentinel, self._gone)

    async def open(self, pipe: Any) -> PipeHost:
        """This host, when it has its setup.

        Raises:
            HostsFailedError: it does not start.
        """
        started = self._expected(START)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._pipe.open(pipe)
                self.name = f"worker process {(await started).pid}"
        except TimeoutError as error:
            self.end()
            raise HostsFailedError(f"a worker process did not start within {START_SECONDS:g} s") from error
        except HostLostError as error:
            raise HostsFailedError(f"{error} before it played anything") from error
        except BaseException:
            self.end()
            raise
        return self

    def _send(self, message: Message) -> None:
        self._pipe.send(encode(message))

    def _gone(self) -> None:
        """The connection or the process has ended."""
        if not self.lost:
            self.lose(f"{self.name} {ended_how(self._process)}")

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and end its process."""
        if self.lost:
            return
        super().lose(why, hung=hung, slot=slot)
        self._pipe.close()
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            self._process.close()

    def pids(self) -> list[int]:
        """Its process, if that is its own."""
        return [] if self._process is None else [self._process.pid]


def ended_how(process: WorkerProcess | None) -> str:
    """How a process ended whose connection is gone."""
    if process is None or not process.wait(1.0):
        return "lost its connection"
    return describe_exit(process.exit_code)


class ProcessHosts(Hosts):
    """Hosts in processes, started when first needed and kept for the next rollout.

    Args:
        setup: of their episodes.
        count: how many.
    """

    def __init__(self, setup: Setup, count: int) -> None:
        super().__init__(count)
        self._setup, self._data = setup, pickled(setup)

    async def _start(self, number: int) -> Host:
        """A host in a new process."""
        try:
            process = WorkerProcess(serve_alone, (self._data,))
        except (OSError, WorkerDiedError) as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        return await PipeHost(self._setup, process).open(process.pipe)


class JoblibHosts(ProcessHosts):
    """Tasks of a `joblib.Parallel`, which runs in a side thread and whose tasks connect from wherever they are.

    Each is started once a rollout; a process of its own takes the place of one that is lost or does not connect.

    Args:
        setup: of their episodes.
        count: how many tasks.
        backend: joblib's name of it.
    """

    def __init__(self, setup: Setup, count: int, backend: str) -> None:
        with needs_extra(f"rollouts on joblib's {backend}", "parallel"):
            import joblib
        super().__init__(setup, count)
        self._joblib, self._backend = joblib, backend
        self._thread = OwnThread("shoal-joblib")
        self._tasks: asyncio.Future[None] | None = None  # of this rollout

    async def _start(self, number: int) -> Host:
        tasks = self._tasks = self._tasks or self._begin()
        if number not in self._wanted:  # a spare host, or a second one of that number
            return await super()._start(number)
        self._wanted.discard(number)
        connecting = asyncio.ensure_future(self._connected())
        self._connecting.append(connecting)
        try:
            waiting: list[asyncio.Future[Any]] = [connecting, tasks]
            await asyncio.wait(waiting, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            connecting.cancel()
            raise
        why = f"did not start within {START_SECONDS:g} s"
        if connecting.done():
            try:
                return connecting.result()
            except HostsFailedError as error:
                why = f"failed: {error}"
        elif tasks.done() and (broke := tasks.exception()) is not None:
            why = f"broke: {format_error(broke)}"
        connecting.cancel()
        logger.warning("a worker of joblib's %s %s; a process takes its place", self._backend, why)
        return await super()._start(number)

    def _begin(self) -> asyncio.Future[None]:
        """Start the tasks, which connect to a socket in a folder of this user's own."""
        self._wanted, self._turn = set(range(self.count)), asyncio.Lock()
        self._connecting: list[asyncio.Task[Host]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
        path = f"{self._folder.name}/hosts"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(self.count)
        self._listener.setblocking(False)
        tasks = asyncio.wrap_future(self._thread.submit(partial(self._run, path)))
        tasks.add_done_callback(lambda tasks: tasks.cancelled() or tasks.exception())
        return tasks

    def _run(self, path: str) -> None:
        parallel = self._joblib.Parallel(n_jobs=self.count, backend=self._backend)
        parallel(self._joblib.delayed(connect_and_serve)(path, self._data) for _ in range(self.count))

    async def _connected(self) -> Host:
        """The host of the next task that connects."""
        async with self._turn:
            pipe, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        with pipe:
            return await PipeHost(self._setup).open(pipe)

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs and end the tasks."""
        del keep_envs
        await super().close()
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            for host in await asyncio.gather(*self._connecting, return_exceptions=True):
                if isinstance(host, Host):  # also one that connected when the rollout was broken off
                    host.end()
            self._listener.close()  # which ends those that connected too late
            await asyncio.wait([tasks], timeout=self._setup.close_seconds)
            self._folder.cleanup()

    async def close(self) -> None:
        """End everything; joblib keeps its idle processes for a while."""
        try:
            await self.rest(keep_envs=False)
        finally:
            self._thread.end()


def make_hosts(backend: str, setup: Setup, count: int, ray_options: dict[str, Any]) -> Hosts | None:
    """The hosts of a backend; none of "serial", which plays in the caller's thread."""
    if backend == "serial":
        return None
    if backend == "thread":
        return LocalHosts(partial(ThreadHost, setup), count)
    if backend == "process":
        return ProcessHosts(setup, count)
    if backend == "ray":
        from shoal.rollout.hosts.ray import RayHosts

        return RayHosts(setup, count, ray_options)
    return JoblibHosts(setup, count, backend)


# --- the host's side
def pickled(setup: Setup) -> bytes:
    """A setup as bytes, and where its modules are found.

    Raises:
        ConfigError: it cannot be sent to another process.
    """
    try:
        return dumps(([item for item in sys.path if isinstance(item, str)], dumps(setup)))
    except Exception as error:
        raise ConfigError(
            f"this rollout cannot be sent to a worker process ({error}); use backend='thread'"
        ) from error


def unpickled(data: bytes) -> Setup:
    """The setup that `pickled` wrote in another process."""
    path, setup = pickle.loads(data)
    sys.path += [item for item in path if item not in sys.path]
    return pickle.loads(setup)  # type: ignore[no-any-return]


def serve(pipe: Any, data: bytes) -> None:
    """Play the episodes of the driver at the other end of a connection, until it is gone."""
    lock = threading.Lock()

    def send(event: Event | Report) -> None:
        encoded = encode(event)
        with lock, contextlib.suppress(OSError):  # the driver is gone, which the loop below sees
            pipe.send_bytes(encoded)

    threads = SlotThreads(unpickled(data), send)
    sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
    send(Report(START, os.getpid()))  # from here on limits of envs count, imports of their modules do not
    with contextlib.suppress(EOFError, OSError):
        while True:
            threads.post(decode_message(pipe.recv_bytes()))
    threads.close_envs()
    threads.end()


def serve_alone(pipe: Any, data: bytes) -> None:
    """Be a host in a process of its own; it ends at once, whatever its envs are doing."""
    serve(pipe, data)
    os._exit(0)


def connect_and_serve(path: str, data: bytes) -> None:
    """Be a host for the driver that listens at a socket."""
    with connection.Client(path, "AF_UNIX") as pipe:
        serve(pipe, data)
