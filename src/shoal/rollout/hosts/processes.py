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
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from typing import Any

import msgspec

from shoal.core.errors import ConfigError, WorkerDiedError, format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.core.workers import PRELOAD, WorkerProcess, describe_exit, dumps
from shoal.rollout.hosts.episodes import Begin, Event, Reply, Setup, SlotThreads
from shoal.rollout.hosts.host import Host, Hosts, HostsFailedError, LocalHosts, ThreadHost, WorkerHost

logger = logging.getLogger(__name__)
PRELOAD.append(__name__)
START_SECONDS = 120.0
"""Seconds within which a process must have imported what its envs need, whatever their limits."""
_HEAD = struct.Struct("!i")
"""What multiprocessing sends before each message: its length."""


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """A host has its setup, and waits for episodes."""

    pid: int


class Question(msgspec.Struct, frozen=True, array_like=True, tag="question"):
    """What is asked of all slots: "overdue" or "close_envs"."""

    name: str


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """What came of a question: the slots that are overdue, and why."""

    name: str
    slots: list[tuple[int, str]]


encode = msgspec.msgpack.Encoder().encode
_to_host = msgspec.msgpack.Decoder(Begin | Reply | Question)
_to_driver = msgspec.msgpack.Decoder(Here | Event | Answered)


# --- the driver's side
class Pipe(asyncio.Protocol):
    """This side of a connection of multiprocessing in an event loop; it waits for the other side neither way.

    Args:
        hear: called with each message.
        ended: called when the other side is gone.
    """

    def __init__(self, hear: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._hear, self._ended = hear, ended
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
        """Hear the messages that are whole."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _HEAD.size:
            end = at + _HEAD.size + _HEAD.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            self._hear(bytes(memoryview(buffer)[at + _HEAD.size : end]))
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


class PipeHost(WorkerHost):
    """A host at the other end of a pipe.

    Args:
        setup: what it plays.
        process: the process of its own, which ends with it; None where another program runs it.
    """

    def __init__(self, setup: Setup, process: WorkerProcess | None = None) -> None:
        super().__init__(setup)
        self.pipe = Pipe(self._message, self._gone)
        self.here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process = process
        self._asked: dict[str, asyncio.Future[Any]] = {}
        if process is not None:
            asyncio.get_running_loop().add_reader(process.sentinel, self._gone)

    def _send(self, message: Begin | Reply) -> None:
        self.pipe.send(encode(message))

    def _message(self, data: bytes) -> None:
        message = _to_driver.decode(data)
        if isinstance(message, Event):
            self._hear(message)
        elif isinstance(message, Here):
            self.name = f"worker process {message.pid}"
            if not self.here.done():
                self.here.set_result(None)
        elif (asked := self._asked.pop(message.name, None)) is not None and not asked.done():
            asked.set_result(message.slots)

    async def _ask(self, name: str) -> Any:
        self._asked[name] = asyncio.get_running_loop().create_future()
        self.pipe.send(encode(Question(name)))
        return await self._asked[name]

    def _gone(self) -> None:
        """The connection or the process has ended."""
        if not self.lost:
            self.lose(f"{self.name} {ended_how(self._process)}")

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and end its process."""
        if self.lost:
            return
        super().lose(why, hung=hung, slot=slot)
        if not self.here.done():
            self.here.set_exception(HostsFailedError(f"{why} before it played anything"))
            self.here.exception()  # nobody need be waiting for it
        self.pipe.close()
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
        setup: what they play.
        count: how many.
    """

    def __init__(self, setup: Setup, count: int) -> None:
        super().__init__(count, setup.close_seconds)
        self._setup, self._data = setup, pickled(setup)

    async def _start(self, number: int) -> Host:
        """A host in a new process."""
        try:
            process = WorkerProcess(serve_alone, (self._data,))
        except (OSError, WorkerDiedError) as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        host = PipeHost(self._setup, process)
        host.name = "a worker process"
        try:
            async with asyncio.timeout(START_SECONDS):
                await host.pipe.open(process.pipe)
                await host.here
        except TimeoutError as error:
            host.end()
            raise HostsFailedError(f"a worker process did not start within {START_SECONDS:g} s") from error
        except BaseException:
            host.end()
            raise
        return host


class JoblibHosts(ProcessHosts):
    """Tasks of a `joblib.Parallel`, which runs in a side thread and whose tasks connect from wherever they are.

    Each is started once a rollout; in the place of one that is lost, or does not come, there is a process of its own.

    Args:
        setup: what they play.
        count: how many tasks.
        backend: joblib's name of it.
    """

    def __init__(self, setup: Setup, count: int, backend: str) -> None:
        with needs_extra(f"rollouts on joblib's {backend}", "parallel"):
            import joblib
        super().__init__(setup, count)
        self._joblib, self._backend = joblib, backend
        self._thread = OwnThread("shoal-joblib")
        self._begun: asyncio.Task[asyncio.Future[Any]] | None = None  # the tasks of this rollout

    async def _start(self, number: int) -> Host:
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._begin())
        tasks = await asyncio.shield(self._begun)
        if number not in self._wanted:  # a spare host, or a second one of that number
            return await super()._start(number)
        self._wanted.discard(number)
        came = asyncio.ensure_future(self._came.get())
        waiting: list[asyncio.Future[Any]] = [came, tasks]
        await asyncio.wait(waiting, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if came.done():
            return came.result()
        came.cancel()
        broke = tasks.exception() if tasks.done() else None
        why = (
            f"did not start within {START_SECONDS:g} s" if broke is None else f"broke: {format_error(broke)}"
        )
        logger.warning("a worker of joblib's %s %s; a process takes its place", self._backend, why)
        return await super()._start(number)

    async def _begin(self) -> asyncio.Future[Any]:
        """Listen in a folder of this user's own, and start the tasks."""
        self._wanted, self._came, self._all = (
            set(range(self.count)),
            asyncio.Queue[PipeHost](),
            list[PipeHost](),
        )
        self._folder = tempfile.mkdtemp(prefix="shoal-")
        path = f"{self._folder}/hosts"
        made = asyncio.get_running_loop().create_unix_server(self._comes, path, start_serving=False)
        self._server = await made  # at once: what is broken off from here on can be closed
        tasks = asyncio.wrap_future(self._thread.submit(partial(self._run, path)))
        tasks.add_done_callback(lambda tasks: tasks.cancelled() or tasks.exception())
        await self._server.start_serving()
        return tasks

    def _run(self, path: str) -> None:
        parallel = self._joblib.Parallel(n_jobs=self.count, backend=self._backend)
        parallel(self._joblib.delayed(connect_and_serve)(path, self._data) for _ in range(self.count))

    def _comes(self) -> Pipe:
        host = PipeHost(self._setup)
        host.here.add_done_callback(lambda here: None if here.exception() else self._came.put_nowait(host))
        self._all.append(host)
        if self._begun is None:  # the rollout is over
            host.end()
        return host.pipe

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs and end the tasks."""
        del keep_envs
        await super().close()
        begun, self._begun = self._begun, None
        if begun is None:
            return
        tasks = await begun
        self._server.close()
        for host in self._all:  # also those that came too late
            host.end()
        await asyncio.wait([tasks], timeout=self._seconds)
        shutil.rmtree(self._folder, ignore_errors=True)

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
    if backend == "threads":
        return LocalHosts(partial(ThreadHost, setup), count, setup.close_seconds)
    if backend == "processes":
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
            f"this rollout cannot be sent to a worker process ({error}); use backend='threads'"
        ) from error


def unpickled(data: bytes) -> Setup:
    """The setup that `pickled` wrote in another process."""
    path, setup = pickle.loads(data)
    sys.path += [item for item in path if item not in sys.path]
    return pickle.loads(setup)  # type: ignore[no-any-return]


def serve(pipe: Any, data: bytes) -> None:
    """Play what the driver at the other end of a connection asks for, until it is gone."""
    lock = threading.Lock()

    def send(message: Here | Event | Answered) -> None:
        encoded = encode(message)
        with lock, contextlib.suppress(OSError):  # the driver is gone, which the loop below sees
            pipe.send_bytes(encoded)

    def close() -> None:
        for closing in threads.close_envs():
            closing.exception()
        send(Answered("close_envs", []))

    threads = SlotThreads(unpickled(data), send)
    sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
    send(Here(os.getpid()))  # from here on limits of envs count, imports of their modules do not
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = _to_host.decode(pipe.recv_bytes())
            if not isinstance(message, Question):
                threads.post(message)
            elif message.name == "overdue":
                send(Answered("overdue", threads.overdue()))
            else:
                threading.Thread(target=close, daemon=True).start()
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
