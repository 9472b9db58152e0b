"""Connections of multiprocessing in an event loop: messages are read and written without waiting in a thread."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any

_HEAD = struct.Struct("!i")
"""What multiprocessing sends before each message: its length."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def streams_of(pipe: Any) -> Streams:
    """Streams over this side of a connection of multiprocessing, which stays the caller's to close."""
    return await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(pipe.fileno())))


async def received(reader: asyncio.StreamReader) -> bytes:
    """The next message that the other side sends with `send_bytes`.

    Raises:
        OSError, EOFError: it is gone, or this side was closed.
    """
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return await reader.readexactly(size)


def framed(data: bytes) -> bytes:
    """What to write for `recv_bytes` of the other side."""
    return _HEAD.pack(len(data)) + data
