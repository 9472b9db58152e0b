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
import sys
import tempfile
import threading
from functools import partial
from multiprocessing import connection
from typing import Any

import msgspec

from shoal.core.errors import ConfigError, WorkerDiedError, format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.core.streams import Streams, framed, received, streams_of
from shoal.core.workers import PRELOAD, WorkerProcess, dumps, ended_how
from shoal.rollout.hosts.episodes import (
    Event,
    Message,
    Report,
    Setup,
    SlotThreads,
    decode_event,
    decode_message,
    encode,
)
from shoal.rollout.hosts.host import Host, Hosts, HostsFailedError, SlotsHost, ThreadHost

logger = logging.getLogger(__name__)
PRELOAD.append(__name__)
START_SECONDS = 120.0
"""Seconds within which a process must have imported what its envs need, whatever their limits."""


# --- the driver's side
class PipeHost(SlotsHost):
    """A host at the other end of a connection; `process` is that of its own, if it has one, and ends with it."""

    name = "a worker process"

    def __init__(self, setup: Setup, streams: Streams, process: WorkerProcess | None = None) -> None:
        super().__init__(setup)
        self._reader, self._writer = streams
        self._process = process
        self._out: list[bytes] = []
        self._reading = asyncio.create_task(self._read())
        if process is not None:
            asyncio.get_running_loop().add_reader(process.sentinel, self._gone)

    async def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            while True:
                self._receive(decode_event(await received(self._reader)))
        self._gone()

    def _send(self, message: Message) -> None:
        if not self._out:  # those of one turn of the loop go together: the process wakes once
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(framed(encode(message)))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self.lost:
            self._writer.write(b"".join(out))

    def _gone(self) -> None:
        """The connection or the process has ended."""
        if not self.lost:
            self.lose(f"{self.name} {ended_how(self._process)}")

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and end its process."""
        if self.lost:
            return
        super().lose(why, hung=hung, slot=slot)
        self._writer.transport.abort()
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            self._process.close()

    def pids(self) -> list[int]:
        """Its process, if that is its own."""
        return [] if self._process is None else [self._process.pid]


class ProcessHosts(Hosts):
    """Hosts in processes, started when first needed and kept for the next rollout."""

    def __init__(self, setup: Setup, count: int) -> None:
        super().__init__(count=count)
        self._setup, self._data = setup, pickled(setup)
        self._starting: dict[int, asyncio.Task[Host]] = {}

    async def host(self, number: int) -> Host:
        """Host `number`; one that still starts when a rollout is over is there for the next."""
        known = self._hosts.get(number)
        if known is not None and not known.lost:
            return known
        if number not in self._starting:
            starting = self._starting[number] = asyncio.create_task(super().host(number))
            starting.add_done_callback(lambda task: self._started(number, task))
        return await asyncio.shield(self._starting[number])

    def _started(self, number: int, task: asyncio.Task[Host]) -> None:
        del self._starting[number]
        if not task.cancelled():
            task.exception()  # nobody need be waiting for it

    async def close(self) -> None:
        """Close the envs and end all hosts, those that still start too; may be called twice."""
        if starting := list(self._starting.values()):
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
        await super().close()

    async def _start(self, number: int) -> Host:
        """A host in a new process."""
        try:
            process = WorkerProcess(serve_alone, (self._data,))
        except (OSError, WorkerDiedError) as error:
            raise HostsFailedError(f"no worker process can be started: {error}") from error
        return await self._host(await streams_of(process.pipe), process)

    async def _host(self, streams: Streams, process: WorkerProcess | None = None) -> Host:
        """The host at the other end, when it has its setup."""
        host = PipeHost(self._setup, streams, process)
        host.name = f"worker process {await host.start(START_SECONDS)}"
        return host


class JoblibHosts(ProcessHosts):
    """Tasks of a `joblib.Parallel`, which runs in a side thread and whose tasks connect from wherever they are.

    Each is started once a rollout; a process of its own takes the place of one that is lost or does not connect.
    """

    def __init__(self, setup: Setup, count: int, backend: str) -> None:
        with needs_extra(f"rollouts on joblib's {backend}", "parallel"):
            import joblib
        super().__init__(setup, count)
        self._joblib, self._backend = joblib, backend
        self._thread = OwnThread("shoal-joblib")
        self._tasks: asyncio.Future[None] | None = None  # of this rollout
        self._beginning = asyncio.Lock()

    async def _start(self, number: int) -> Host:
        async with self._beginning:
            tasks = self._tasks = self._tasks or await self._begin()
        if number >= self.count or number in self._hosts:  # a spare host, or a second one of that number
            return await super()._start(number)
        connecting = asyncio.ensure_future(self._connected.get())
        waiting: list[asyncio.Future[Any]] = [connecting, tasks]
        try:
            await asyncio.wait(waiting, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return await self._host(connecting.result())
            broke = tasks.exception() if tasks.done() else None
            why = f"broke: {format_error(broke)}" if broke else f"did not start within {START_SECONDS:g} s"
        except HostsFailedError as error:
            why = f"failed: {error}"
        finally:
            connecting.cancel()
        logger.warning("a worker of joblib's %s %s; a process takes its place", self._backend, why)
        return await super()._start(number)

    async def _begin(self) -> asyncio.Future[None]:
        """Start the tasks, which connect to a socket in a folder of this user's own."""
        self._connected = asyncio.Queue[Streams]()
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
        self._writers: list[asyncio.StreamWriter] = []
        path = f"{self._folder.name}/hosts"
        self._server = await asyncio.start_unix_server(self._joined, path, backlog=self.count)
        tasks = asyncio.wrap_future(self._thread.submit(partial(self._run, path)))
        tasks.add_done_callback(lambda tasks: tasks.cancelled() or tasks.exception())
        return tasks

    def _run(self, path: str) -> None:
        parallel = self._joblib.Parallel(n_jobs=self.count, backend=self._backend)
        parallel(self._joblib.delayed(connect_and_serve)(path, self._data) for _ in range(self.count))

    def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task has connected."""
        self._writers.append(writer)
        self._connected.put_nowait((reader, writer))

    async def rest(self, *, keep_envs: bool) -> None:
        """Close the envs and end the tasks."""
        del keep_envs
        await super().close()
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            self._server.close()
            for writer in self._writers:  # also of what connected when the rollout was broken off
                writer.transport.abort()
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
        return Hosts(partial(ThreadHost, setup), count)
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

    def tell(event: Event | Report) -> None:
        encoded = encode(event)
        with lock, contextlib.suppress(OSError):  # the driver is gone, which the loop below sees
            pipe.send_bytes(encoded)

    threads = SlotThreads(unpickled(data), tell)
    sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
    with contextlib.suppress(EOFError, OSError):
        while True:
            threads.post(decode_message(pipe.recv_bytes()))
    threads.end()


def serve_alone(pipe: Any, data: bytes) -> None:
    """Be a host in a process of its own; it ends at once, whatever its envs are doing."""
    serve(pipe, data)
    os._exit(0)


def connect_and_serve(path: str, data: bytes) -> None:
    """Be a host for the driver that listens at a socket."""
    with connection.Client(path, "AF_UNIX") as pipe:
        serve(pipe, data)
