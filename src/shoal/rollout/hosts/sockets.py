"""Hosts in other processes: frames of msgpack over a Unix socket that only this user's processes can use.

The host connects, gets its setup (pickled by the driver that started it), reads it, which may import much, says that it
is there, and answers until the socket ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.workers import dumps
from shoal.rollout.hosts.episodes import Begin, Event, Reply, Setup, SlotThreads
from shoal.rollout.hosts.host import WorkerHost

_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A host is there."""

    number: int
    pid: int


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Say which slots are overdue."""


class Overdue(msgspec.Struct, frozen=True, array_like=True, tag="overdue"):
    """Slots whose env does not answer, and what it is at."""

    slots: tuple[tuple[int, str], ...]


class CloseEnvs(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Close all envs."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """They are closed."""


encode = msgspec.msgpack.Encoder().encode
_to_host = msgspec.msgpack.Decoder(Begin | Reply | Look | CloseEnvs)
_to_driver = msgspec.msgpack.Decoder(Hello | Event | Overdue | Closed)


def framed(data: bytes) -> bytes:
    """A frame: its length, and the data."""
    return _LENGTH.pack(len(data)) + data


# --- the driver's side
class SocketHost(WorkerHost, asyncio.Protocol):
    """A host at the other end of a socket.

    Args:
        listener: where it connects.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.setup)
        self._listener = listener
        self._buffer = bytearray()
        self._out: list[bytes] = []
        self._asked: dict[type, asyncio.Future[Any]] = {}  # what is waited for beside the slots, by its kind
        self._transport: asyncio.WriteTransport
        self.pid = 0
        self.ended: Callable[[], str] = lambda: "lost its connection"
        """Says how its process ended, and sees that it has."""

    # asyncio's
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other side is there."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._listener.hosts.add(self)
        self.send(self._listener.data)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are whole."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            self._hear(_to_driver.decode(memoryview(buffer)[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is gone."""
        self.lose(f"{self.name} {self.ended()}")

    def _hear(self, message: Hello | Event | Overdue | Closed) -> None:
        if isinstance(message, Event):
            self._settle(message)
        elif isinstance(message, Hello):
            self.pid, self.name = message.pid, f"worker process {message.pid}"
            self._listener.connected(self, message.number)
        elif (asked := self._asked.pop(type(message), None)) is not None and not asked.done():
            asked.set_result(message)

    # a host
    def send(self, data: bytes) -> None:
        """Send a frame, with the others of this turn of the loop."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(framed(data))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self.lost:
            self._transport.write(b"".join(out))

    def tell(self, message: Begin | Reply) -> Awaitable[Event]:
        """The slot's answer."""
        future = self._ask(message)
        self.send(encode(message))
        return future

    def _question(self, question: Look | CloseEnvs, kind: type) -> asyncio.Future[Any]:
        """What will be answered to a question that is about all slots."""
        self._asked[kind] = asyncio.get_running_loop().create_future()
        self.send(encode(question))
        return self._asked[kind]

    async def _look(self) -> list[tuple[int, str]]:
        return list((await self._question(Look(), Overdue)).slots)

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and make sure that its process ends."""
        super().lose(why, hung=hung, slot=slot)
        self._transport.close()
        self._listener.hosts.discard(self)

    async def close_envs(self, seconds: float) -> None:
        """Close the envs; a host that does not within its time is lost."""
        if self.lost:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._question(CloseEnvs(), Closed)
        except TimeoutError:
            self.lose(f"{self.name} did not close its envs within {seconds:g} s")


class Listener:
    """Where hosts connect: a socket in a folder of this user's own.

    Args:
        setup: what each of them plays.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.path = ""
        self.hosts: set[SocketHost] = set()
        self._expected: dict[int, asyncio.Future[SocketHost]] = {}
        self.data = b""
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._folder = ""

    async def start(self) -> None:
        """Listen, if that has not begun."""
        async with self._starting:
            if self._server is not None:
                return
            self.data = pickled(self.setup)
            self._folder = tempfile.mkdtemp(prefix="shoal-")
            self.path = f"{self._folder}/hosts"
            loop = asyncio.get_running_loop()
            made = loop.create_unix_server(lambda: SocketHost(self), self.path, start_serving=False)
            self._server = await made  # at once: what is broken off from here on can be closed
            await self._server.start_serving()

    def expect(self, number: int) -> asyncio.Future[SocketHost]:
        """The host of this number, once it connects."""
        future: asyncio.Future[SocketHost] = asyncio.get_running_loop().create_future()
        self._expected[number] = future
        return future

    def connected(self, host: SocketHost, number: int) -> None:
        """A host is there; it ends at once if nobody waits for it any more."""
        future = self._expected.pop(number, None)
        if future is None or future.done():
            host.end()
        else:
            future.set_result(host)

    def close(self) -> None:
        """End all connections and remove the socket."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for host in list(self.hosts):
            host.end()
        self.hosts.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


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


# --- the host's side
def serve(path: str, number: int) -> None:
    """Be host `number` of the driver at a socket, until the driver is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lock = threading.Lock()

        def send(message: Hello | Event | Overdue | Closed) -> None:
            data = framed(encode(message))
            with lock, contextlib.suppress(OSError):  # the driver is gone, which the loop below sees
                connection.sendall(data)

        frames = _frames(connection)
        first = next(frames, None)
        if first is None:
            return
        threads = SlotThreads(unpickled(first), send)
        send(Hello(number, os.getpid()))  # from here on limits of envs count, imports of their modules do not
        sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
        for frame in frames:
            message = _to_host.decode(frame)
            if isinstance(message, Look):
                send(Overdue(tuple(threads.overdue())))
            elif isinstance(message, CloseEnvs):
                threading.Thread(target=_close, args=(threads, send), daemon=True).start()
            else:
                threads.post(message)
        threads.close_envs()
        threads.end()


def _close(threads: SlotThreads, send: Callable[[Closed], None]) -> None:
    for closing in threads.close_envs():
        closing.exception()
    send(Closed())


def _frames(connection: socket.socket) -> Iterator[bytes]:
    """The frames that arrive, until the other side is gone."""
    with connection.makefile("rb", 1 << 16) as file, contextlib.suppress(OSError):
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            yield data
