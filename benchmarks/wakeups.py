"""What it costs to wake another process: a semaphore in shared memory, a futex through ctypes, an eventfd.

    python benchmarks/wakeups.py [--trips 1000] [--rounds 15] [--work 0] [--cores free|same|apart]

Two processes wake each other in turns; the second works for `--work` microseconds before it answers. Every round has
every way: "sleeps" at once; "yields" looks for up to 200 us before it sleeps and gives its core away after each look;
"spins" looks without giving it away. (The kernel tells the CPU time of a process that never gives its core away only
every few milliseconds: take many trips there.)
"""

from __future__ import annotations

import _multiprocessing
import _thread
import argparse
import ctypes
import functools
import mmap
import multiprocessing
import os
import select
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

LOOK, SLICE = 200e-6, 0.1
SYS_FUTEX, WAIT, WAKE = 202, 0, 1  # x86-64
_libc, _held = ctypes.CDLL(None), ctypes.PyDLL(None)  # the second keeps the interpreter: for what never waits
_long, _address, _word = ctypes.c_long, ctypes.c_void_p, ctypes.c_uint32
for _library in (_libc, _held):
    _library.syscall.argtypes = (_long, _address, ctypes.c_int, _word, _address, _address, _word)


class Futex:
    """A word in shared memory that counts releases: one process releases, one other acquires.

    Without atomic instructions no word may have two writers: the releaser counts in the first, the acquirer says in
    the second whether it sleeps. With `flag` the releaser wakes only then. Its store of the count must be seen before
    it loads the flag, and x86 reorders just that; so it takes and gives back a lock between them, whose atomic
    instruction is a full fence (on x86). The acquirer needs none: the kernel compares again before it sleeps.
    """

    def __init__(self, block: mmap.mmap, place: int, *, flag: bool) -> None:
        self.words, self.address = memoryview(block)[place : place + 8].cast("I"), address_of(block) + place
        self.span = ctypes.byref((ctypes.c_long * 2)(0, int(SLICE * 1e9)))
        self.taken, self.flag, self.fence = 0, flag, _thread.allocate_lock()

    def release(self) -> None:
        self.words[0] += 1
        if self.flag:
            self.fence.acquire()
            self.fence.release()
            if not self.words[1]:
                return
        _held.syscall(SYS_FUTEX, self.address, WAKE, 1, None, None, 0)

    def acquire(self, blocking: bool = True, timeout: float = SLICE) -> bool:
        words, taken = self.words, self.taken
        if words[0] == taken and blocking:
            words[1] = 1
            _libc.syscall(SYS_FUTEX, self.address, WAIT, taken, self.span, None, 0)
            words[1] = 0
        if words[0] == taken:
            return False
        self.taken = taken + 1
        return True

    def look(self, pause: Callable[[], None]) -> bool:
        words, taken, now = self.words, self.taken, time.perf_counter
        end = now() + LOOK
        while now() < end:
            pause()
            if words[0] != taken:
                return self.acquire(False)
        return False


class Semaphore:
    """An unnamed POSIX semaphore."""

    def __init__(self, block: mmap.mmap, place: int) -> None:
        _libc.sem_init(ctypes.c_void_p(address_of(block) + place), 1, 0)
        lock = _multiprocessing.SemLock._rebuild(address_of(block) + place, 1, 2**31 - 1, None)  # type: ignore
        self.acquire, self.release = lock.acquire, lock.release

    def look(self, pause: Callable[[], None]) -> bool:
        acquire, now = self.acquire, time.perf_counter
        end = now() + LOOK
        while now() < end:
            pause()
            if acquire(False):
                return True
        return False


class EventFd(Semaphore):
    """A descriptor: `poll` for the time limit, then read."""

    def __init__(self, block: mmap.mmap, place: int) -> None:
        fd, poll = os.eventfd(0), select.poll()
        poll.register(fd, select.POLLIN)
        weakref.finalize(self, os.close, fd)
        self.release = lambda: os.eventfd_write(fd, 1)
        self.acquire = lambda blocking=True, timeout=SLICE: bool(
            poll.poll(1000 * timeout if blocking else 0) and os.eventfd_read(fd)
        )


def address_of(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


WAYS: dict[str, Callable[[mmap.mmap, int], Any]] = {
    "semaphore": Semaphore,
    "futex, always wakes": functools.partial(Futex, flag=False),
    "futex, waiter flag": functools.partial(Futex, flag=True),
    "eventfd": EventFd,
}
LOOKS = {"sleeps": None, "yields": os.sched_yield, "spins": lambda: None}


def wait(signal: Any, pause: Callable[[], None] | None) -> None:
    if pause is None or not signal.look(pause):
        while not signal.acquire(True, SLICE):
            pass


def echo(there: Any, back: Any, pause: Any, core: set[int], args: argparse.Namespace) -> None:
    os.sched_setaffinity(0, core)
    for _ in range(args.trips):
        wait(there, pause)
        end = time.perf_counter() + args.work * 1e-6
        while time.perf_counter() < end:
            pass
        back.release()


def measure(
    way: str, pause: Any, cores: tuple[set[int], set[int]], args: argparse.Namespace
) -> tuple[float, ...]:
    """Microseconds of a round trip, and of CPU of both processes in one."""
    block = mmap.mmap(-1, 4096)
    there, back = WAYS[way](block, 0), WAYS[way](block, 1024)
    os.sched_setaffinity(0, cores[0])
    fork = multiprocessing.get_context("fork").Process
    other = fork(target=echo, args=(there, back, pause, cores[1], args), daemon=True)
    other.start()
    moments, clock = [], ((~other.pid) << 3) | 2
    for trip in range(args.trips):
        if trip in (args.trips // 10, args.trips - 1):  # after a warm-up, and while the other still lives
            moments.append((time.perf_counter(), time.process_time() + time.clock_gettime(clock)))
        there.release()
        wait(back, pause)
    other.join()
    return tuple(1e6 * (b - a) / (args.trips - 1 - args.trips // 10) for a, b in zip(*moments, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trips", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", type=float, default=0.0, help="microseconds")
    parser.add_argument("--cores", choices=("free", "same", "apart"), default="free")
    args = parser.parse_args()
    every = os.sched_getaffinity(0)
    cores = {"free": (every, every), "same": ({min(every)},) * 2, "apart": ({min(every)}, {max(every)})}[
        args.cores
    ]
    for look, pause in LOOKS.items():
        found = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, values in found.items():
                values.append(measure(way, pause, cores, args))
        for way, pairs in found.items():
            (low, middle, high), cpu = (
                statistics.quantiles([wall for wall, _ in pairs], n=4),
                [c for _, c in pairs],
            )
            share = statistics.median(a[0] / b[0] for a, b in zip(pairs, found["semaphore"], strict=True))
            print(
                f"{look:7} {way:20} least {min(pairs)[0]:6.1f}, quartiles {low:6.1f} {middle:6.1f} {high:6.1f} us, "
                f"CPU {statistics.median(cpu):6.1f} us, of the semaphore's {share:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
