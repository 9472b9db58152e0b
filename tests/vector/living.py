"""Which processes live, asked of a table that changes while it is read."""

from __future__ import annotations

import psutil


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie that nobody has waited for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    """The processes below this one that are alive."""
    return {child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)}
