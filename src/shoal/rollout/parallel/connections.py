"""The sockets of a shared engine: who may connect, how much is read from whom, and the bell that ends a wait.

Everything but `ring` and `serve` belongs to the engine's thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.rollout.parallel.answering import Result, Statistics
from shoal.rollout.parallel.link import CHUNK, Address
from shoal.rollout.parallel.wire import MAX_FRAME, Alive, Ask, Hello, Left, answer_of, frame, server_frames

logger = logging.getLogger(__name__)
Asker = tuple[str, int, int]
MAX_CONNECTIONS = 1024
PATIENCE = 30.0
"""Seconds within which a connection must have introduced itself and a message that began must end."""
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Connections:
    """Sockets that are waited for together.

    Args:
        on_message: called with a connection and what it said.
        on_end: called with a connection that has ended.
        is_full: whether so much of an asker waits that no more is to be read from it.
        statistics: where refused connections are counted.
        silence: seconds without a sign of life after which a worker process is killed; None waits for ever.
    """

    def __init__(
        self,
        on_message: Callable[[Connection, Ask | Left | Alive], None],
        on_end: Callable[[Connection], None],
        is_full: Callable[[Asker | None], bool],
        statistics: Statistics,
        silence: float | None = None,
    ) -> None:
        self._on_message, self._on_end, self._is_full = on_message, on_end, is_full
        self._statistics = statistics
        self._silence = silence
        self._epoll = select.epoll()
        self._bell: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        self._epoll.register(self._bell, READ)
        self._by_descriptor: dict[int, Connection] = {}
        self._dirty: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._paused = False
        self._folder: Path | None = None
        self._chunk = memoryview(bytearray(CHUNK))
        self._token = secrets.token_bytes(16)

    def __len__(self) -> int:
        """How many there are to be swept."""
        return len(self._by_descriptor) + self._paused

    # --- from any thread
    def ring(self) -> None:
        """End the present wait, or the next one."""
        with self._ringing, contextlib.suppress(BlockingIOError):
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def serve(self) -> Address:
        """Listen on a Unix socket that only this user's processes with the returned secret can use."""
        if self._listener is None:
            folder = Path(tempfile.mkdtemp(prefix="shoal-"))
            if len(str(folder)) > 90:  # a Unix socket's path has room for 107 bytes
                folder.rmdir()
                folder = Path(tempfile.mkdtemp(prefix="shoal-", dir="/tmp"))
            self._folder = folder
            self._listener = _listen(folder / "engine")
            self._epoll.register(self._listener, READ)
        beat = None if self._silence is None else min(0.5, self._silence / 4)
        return Address(self._listener.getsockname(), self._token, beat)

    # --- from the engine's thread
    def look(self, wait: float | None) -> None:
        """Handle what arrived, waiting up to `wait` seconds for something to; None waits as long as it takes."""
        writable = False
        for descriptor, events in self._epoll.poll(wait):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                if events & WRITE:
                    self._dirty.add(connection)
                    writable = True
                if events & ~WRITE:
                    self._receive(connection)
            elif descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
        if writable:
            self.flush()

    def flush(self) -> None:
        """Send the answers that were written since the last time."""
        for connection in self._dirty:
            if connection.open:
                if not connection.flush():
                    self.drop(connection)
                elif connection.out or connection.events != READ:
                    self._listen_to(connection)
        self._dirty.clear()

    def sweep(self, now: float) -> None:
        """End connections that keep us waiting, and workers that give no sign of life."""
        if self._paused and self._listener is not None:
            self._epoll.modify(self._listener, READ)
            self._paused = False
        for connection in list(self._by_descriptor.values()):
            silent = now - connection.since
            if (connection.asker is None or connection.frames.partial) and silent > PATIENCE:
                self.drop(connection)
            elif self._silence is not None and silent > self._silence:
                logger.warning(
                    "worker process %d gave no sign of life for %.3g s and is killed", connection.pid, silent
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(connection.pid, signal.SIGKILL)
                self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """End a connection."""
        if not connection.open:
            return
        connection.open = False
        del self._by_descriptor[connection.descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection.descriptor)
        connection.sock.close()
        self._on_end(connection)

    def close(self) -> None:
        """End all connections and remove the socket."""
        for connection in list(self._by_descriptor.values()):
            self.drop(connection)
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._epoll.close()
        with self._ringing:
            bell, self._bell = self._bell, None
            if bell is not None:
                os.close(bell)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._pause(listener, error)
                return
            pid, uid, _ = struct.unpack(
                "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if uid != os.getuid() or len(self._by_descriptor) >= MAX_CONNECTIONS:
                self._statistics.refused_connections += 1
                sock.close()
                continue
            sock.setblocking(False)
            connection = Connection(sock, pid, self._dirty)
            self._by_descriptor[connection.descriptor] = connection
            self._epoll.register(connection.descriptor, READ)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """No descriptor is free, say: who wants to connect has to wait until the next sweep."""
        logger.warning("a worker cannot connect to the shared engine yet: %s", error)
        self._epoll.modify(listener, 0)
        self._paused = True

    def _receive(self, connection: Connection) -> None:
        try:
            size = connection.sock.recv_into(self._chunk)
            if not size:
                self.drop(connection)
                return
            for message in connection.frames.feed(self._chunk[:size]):
                if connection.asker is not None:
                    self._on_message(connection, message)
                else:
                    self._introduce(connection, message)
            connection.since = time.monotonic()
        except BlockingIOError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.debug("a connection to the shared engine was ended: %s", error)
            self._statistics.refused_connections += connection.asker is None
            self.drop(connection)
            return
        if self._is_full(connection.asker):
            self._listen_to(connection)

    def _introduce(self, connection: Connection, message: object) -> None:
        if not isinstance(message, Hello):
            raise ValueError("the first message must be an introduction")
        if not hmac.compare_digest(message.token, self._token):
            raise ValueError("wrong secret")
        connection.asker = ("socket", message.asker, connection.descriptor)
        connection.frames.most = MAX_FRAME

    def _listen_to(self, connection: Connection) -> None:
        """Wait for what concerns a connection: not for requests while too many of its own wait already."""
        events = 0 if self._is_full(connection.asker) else READ
        events |= WRITE if connection.out else 0
        if events != connection.events:
            self._epoll.modify(connection.descriptor, events)
            connection.events = events


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    return listener


class Connection:
    """One worker's socket, this side."""

    def __init__(self, sock: socket.socket, pid: int, dirty: set[Connection]) -> None:
        self.sock, self.pid = sock, pid
        self.descriptor = sock.fileno()
        self.open = True
        self.asker: Asker | None = None
        self.frames = server_frames()
        self.out = bytearray()
        self.since = time.monotonic()
        self.events: int = READ
        self._dirty = dirty

    def reply(self, number: int, result: Result) -> None:
        """Queue an answer; it is sent with the others of its batch."""
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
