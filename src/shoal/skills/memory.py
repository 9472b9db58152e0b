"""Whether one more training fits into memory, judged by the most that trainings before it needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FIRST_GUESS = 256 << 20  # bytes, before any training has been measured
RESERVE = 0.1  # share of the available memory left alone


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        return None
    return None


def resident_memory(pid: int) -> int:
    """Bytes a process holds now; 0 if it cannot be seen."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


def fits(expected: int, running: Iterable[int], available: int | None) -> bool:
    """Whether a training that will need `expected` bytes can start.

    Args:
        expected: its measured or guessed peak.
        running: bytes that each running training holds now; they may still grow to `expected`.
        available: what the system can give; None: unknown, so yes.
    """
    if available is None:
        return True
    growth = sum(max(0, expected - held) for held in running)
    return expected + growth <= available * (1 - RESERVE)
