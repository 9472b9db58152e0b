"""A port of this machine on which a server of shoal answers."""

from __future__ import annotations

import errno
import socket

from shoal.core.errors import ConfigError

LOCAL = "127.0.0.1"


def listening(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1. Connections made before the server accepts are queued.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: no port has that number, another program has it, or it is not this user's to take.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"port must be a whole number from 0 to 65535 (0 takes a free one), got {port!r}")
    # asyncio switches Nagle's delay of 40 ms off where a socket names its protocol
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOCAL, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"port {port} {why}; choose another, or 0 for a free one") from error
    return listener
