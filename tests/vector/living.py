"""Which processes live, asked of a table that changes while it is read; and what takes how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil

SLACK = 20.0
"""Seconds that a busy machine may add to a limit; what hangs takes for ever."""


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie that nobody has waited for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    """The processes below this one that are alive."""
    return {child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)}


@contextlib.contextmanager
def within(seconds: float, slack: float = SLACK) -> Iterator[None]:
    """What is done inside takes no longer than this and the slack."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds + slack, f"took {took:.1f} s, allowed were {seconds:g}"
