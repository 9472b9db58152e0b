"""Waiting for another process on a semaphore in shared memory: a bounded look first, then sleep.

The semaphores live inside the mapped block and have no name, so nothing can be left behind in `/dev/shm`.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import os
import time
from collections.abc import Callable

SLICE = 0.1
"""Seconds between two looks whether the other side still lives."""
MAX_SPIN = 200e-6
"""Seconds a wait may look at memory before it sleeps."""
_SEMAPHORE = 1
_MOST = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


def init_signal(address: int) -> None:
    """Make a semaphore at `address` in shared memory, at zero."""
    if _libc.sem_init(address, 1, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "sem_init failed: shoal.vector needs Linux semaphores in shared memory"
        )


class Signal:
    """One side of a semaphore in shared memory; both sides pass the address in their own mapping."""

    def __init__(self, address: int) -> None:
        lock = _multiprocessing.SemLock._rebuild(address, _SEMAPHORE, _MOST, None)
        self.acquire: Callable[..., bool] = lock.acquire
        self.release: Callable[[], None] = lock.release

    def drain(self) -> None:
        """Back to zero."""
        while self.acquire(False):
            pass


class Patience:
    """How long to look before sleeping: long while looking pays, rarely when it does not.

    Looking is never unbounded and yields the core each time, so that it costs little where cores are few.
    """

    def __init__(self, most: float = MAX_SPIN) -> None:
        self.most = most
        self._misses = 0
        self._skips = 0

    def look(self, acquire: Callable[..., bool]) -> bool:
        """Try to take a semaphore for a while; True when it was taken."""
        if acquire(False):
            return True
        if self.most <= 0.0:
            return False
        if self._skips:
            self._skips -= 1
            return False
        give_way, now = os.sched_yield, time.perf_counter
        end = now() + self.most
        while now() < end:
            give_way()
            if acquire(False):
                self._misses = 0
                return True
        self._misses = min(self._misses + 1, 6)
        self._skips = (1 << self._misses) - 1  # after a miss, sleep at once the next 1, 3, 7 … 63 times
        return False
