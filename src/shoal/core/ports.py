"""Servers of this machine: a port to answer on, and how clients reach one where a proxy is set."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import urllib.parse
import urllib.request

from shoal.core.errors import ConfigError

LOCAL = "127.0.0.1"
THIS_MACHINE = (LOCAL, "localhost", "::1")
"""Its names, for which no proxy is used."""


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


def no_proxy() -> dict[str, str]:
    """`NO_PROXY` and `no_proxy` for a program that asks this machine: what they hold here, and its names."""
    held = [name.strip() for key in ("NO_PROXY", "no_proxy") for name in os.environ.get(key, "").split(",")]
    names = "*" if "*" in held else ",".join(dict.fromkeys(filter(None, (*held, *THIS_MACHINE))))
    return dict.fromkeys(("NO_PROXY", "no_proxy"), names)


def proxy_for(url: str) -> str | None:
    """The proxy by which an address is reached: `HTTP_PROXY`, `HTTPS_PROXY` or `ALL_PROXY`, unless `NO_PROXY` names it.

    This machine is reached without one. A proxy that speaks SOCKS is not used.
    """
    parts = urllib.parse.urlsplit(url)
    if is_this_machine(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    known = urllib.request.getproxies()
    proxy = known.get(parts.scheme) or known.get("all") or ""
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    return proxy if proxy.startswith(("http://", "https://")) else None


def is_this_machine(host: str) -> bool:
    """Whether a host's name is one of this machine.

    >>> is_this_machine("localhost"), is_this_machine("127.0.0.1"), is_this_machine("::1"), is_this_machine("a.org")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
