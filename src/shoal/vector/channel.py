"""Messages between the pool and a worker over a socket pair: pickled frames with a length in front.

Only shoal's own processes are at the ends. Sending and receiving go on in slices, with a look at the other
side between them, so that neither can block for ever on a process that is gone.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import cloudpickle

HEADER = struct.Struct("<Q")


class ChannelClosedError(Exception):
    """The other side is gone."""


def dumps(value: Any) -> bytes:
    """Pickle, with cloudpickle's help for what pickle cannot name (lambdas, classes of `__main__`)."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]


class Channel:
    """One end.

    Args:
        sock: the socket; it is owned from now on.
        slice_seconds: how long one system call may wait; None waits for ever (a worker's end: it is killed
            when its parent goes).
    """

    def __init__(self, sock: socket.socket, slice_seconds: float | None = None) -> None:
        sock.settimeout(slice_seconds)
        self.sock = sock

    def send(self, data: bytes, check: Callable[[], None] | None = None) -> None:
        """Send one frame; `check` is called while waiting and may raise."""
        view = memoryview(HEADER.pack(len(data)) + data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except TimeoutError:
                if check is not None:
                    check()
            except OSError as error:
                raise ChannelClosedError(str(error)) from error

    def receive(self, check: Callable[[], None] | None = None) -> Any:
        """The next message; `check` is called while waiting and may raise."""
        return pickle.loads(self.receive_bytes(check))

    def receive_bytes(self, check: Callable[[], None] | None = None) -> bytearray:
        """The next message as it was sent."""
        (length,) = HEADER.unpack(self._read(HEADER.size, check))
        return self._read(length, check)

    def _read(self, length: int, check: Callable[[], None] | None) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self.sock.recv_into(view)
            except TimeoutError:
                if check is not None:
                    check()
                continue
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if count == 0:
                raise ChannelClosedError("closed by the other side")
            view = view[count:]
        return data

    def close(self) -> None:
        """Close this end."""
        self.sock.close()
