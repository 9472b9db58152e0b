"""Hosts in other processes: frames of msgpack over a Unix socket that only this user's processes with a key can use.

The host connects, gets its setup (pickled by the driver that started it), and answers until the socket ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.workers import dumps
from shoal.rollout.hosts.episodes import Begin, Event, Reply, Setup, SlotThreads
from shoal.rollout.hosts.host import OpenSlots

_LENGTH = struct.Struct("<I")
MOST = 1 << 30
"""Bytes of a frame."""
MOST_HELLO = 1 << 12
"""Bytes of the first frame, before the key is known."""
MISSED = 5.0
"""Seconds beyond the limits of envs after which a host that does not answer at all is given up."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A host is there."""

    key: str
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
class SocketHost(asyncio.Protocol):
    """A host at the other end of a socket.

    Args:
        listener: whose key it must know.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._slots = OpenSlots()
        self._buffer = bytearray()
        self._known = False
        self._out: list[bytes] = []
        self._looked: asyncio.Future[list[tuple[int, str]]] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport
        self.pid, self.number = 0, -1
        self.ended: Callable[[], str] = lambda: "lost its connection"
        """Says how its process ended, and sees that it has."""

    @property
    def lost(self) -> bool:
        """Whether it does not answer any more."""
        return self._slots.lost

    # asyncio's
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other side is there."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are whole."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > (MOST if self._known else MOST_HELLO):
                return self.lose("sent a frame that is too long")
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                self._hear(_to_driver.decode(memoryview(buffer)[at + _LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                return self.lose(f"sent what is no message: {error}")
            at = end
        del buffer[:at]
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is gone."""
        self.lose(self.ended())

    def _hear(self, message: Hello | Event | Overdue | Closed) -> None:
        if not self._known:
            if not (isinstance(message, Hello) and secrets.compare_digest(message.key, self._listener.key)):
                self._transport.close()
                return
            self._known, self.pid, self.number = True, message.pid, message.number
            self._listener.connected(self)
        elif isinstance(message, Event):
            self._slots.settle(message)
        elif isinstance(message, Overdue) and self._looked is not None and not self._looked.done():
            self._looked.set_result(list(message.slots))
        elif isinstance(message, Closed) and self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

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
        future = self._slots.open(message)
        self.send(encode(message))
        return future

    async def overdue(self) -> list[tuple[int, str]]:
        """The host's reply; without one in time it is lost."""
        setup = self._listener.setup
        limit = max(setup.step_timeout or 0.0, setup.make_timeout or 0.0) + MISSED
        self._looked = asyncio.get_running_loop().create_future()
        self.send(encode(Look()))
        try:
            async with asyncio.timeout(limit):
                return await self._looked
        except TimeoutError:
            self.lose(f"gave no sign of life for {limit:g} s", hung=True)
            return []

    def give_up(self, slot: int, why: str) -> None:
        """The whole process is given up."""
        self.lose(why, hung=True, slot=slot)

    def lose(self, why: str, *, hung: bool = False, slot: int | None = None) -> None:
        """Stop waiting for it, and make sure that its process ends."""
        self._slots.lose(
            why if slot is not None else f"worker process {self.pid} {why}", hung=hung, slot=slot
        )
        self._transport.close()
        self._listener.disconnected(self)

    async def close_envs(self, seconds: float) -> None:
        """Close the envs; a host that does not within its time is lost."""
        if self.lost:
            return
        if self._closed is None or self._closed.done():
            self._closed = asyncio.get_running_loop().create_future()
            self.send(encode(CloseEnvs()))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._closed)
        except TimeoutError:
            self.lose(f"did not close its envs within {seconds:g} s")

    def end(self) -> None:
        """Close the connection, at which the host ends."""
        self._slots.lose("it was ended")
        self._transport.close()


class Listener:
    """Where hosts connect: a socket in a folder of this user's own.

    Args:
        setup: what each of them plays.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.key = secrets.token_hex(16)
        self.path = ""
        self.arrived: asyncio.Queue[SocketHost] = asyncio.Queue()
        """Hosts that have connected before they were expected."""
        self.hosts: set[SocketHost] = set()
        self._expected: dict[int, asyncio.Future[SocketHost]] = {}
        self._data: bytes | None = None
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._folder = ""

    async def start(self) -> None:
        """Listen, if that has not begun."""
        async with self._starting:
            if self._server is not None:
                return
            self._data = pickled(self.setup)
            self._folder = tempfile.mkdtemp(prefix="shoal-")
            self.path = f"{self._folder}/hosts"
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: SocketHost(self), self.path)

    def expect(self, number: int) -> asyncio.Future[SocketHost]:
        """The host of this number, once it connects."""
        future: asyncio.Future[SocketHost] = asyncio.get_running_loop().create_future()
        self._expected[number] = future
        return future

    def connected(self, host: SocketHost) -> None:
        """A host has said its key."""
        assert self._data is not None
        host.send(self._data)
        self.hosts.add(host)
        future = self._expected.pop(host.number, None)
        if future is None or future.done():
            self.arrived.put_nowait(host)
        else:
            future.set_result(host)

    def disconnected(self, host: SocketHost) -> None:
        """A host is gone."""
        self.hosts.discard(host)

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
def serve(path: str, key: str, number: int) -> None:
    """Be host `number` of the driver at a socket, until the driver is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lock = threading.Lock()

        def send(message: Hello | Event | Overdue | Closed) -> None:
            data = framed(encode(message))
            with lock, contextlib.suppress(OSError):  # the driver is gone, which the loop below sees
                connection.sendall(data)

        send(Hello(key, number, os.getpid()))
        frames = _frames(connection)
        first = next(frames, None)
        if first is None:
            return
        sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
        threads = SlotThreads(unpickled(first), send)
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
