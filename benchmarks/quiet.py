"""Turns that are kept when nothing else took the machine: the same work is timed on each core before and after."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

import vector_envs

T = TypeVar("T")
CORES = sorted(os.sched_getaffinity(0))


def calibrate(n: int = 1_000_000) -> dict[int, float]:
    """Seconds of the same work on each core, best of three; this thread may be on any core afterwards."""
    found = {}
    for core in CORES:
        os.sched_setaffinity(0, {core})
        found[core] = vector_envs.calibrate(n)
    os.sched_setaffinity(0, CORES)
    return found


class Quiet:
    """A case's turns, kept when the same work took no longer before and after them than at a core's best time.

    Args:
        work: rounds of it.
        tries: after which the quietest turn is kept.
        patience: seconds that a turn waits for a calm moment.
    """

    def __init__(self, work: int = 1_000_000, tries: int = 5, patience: float = 20.0) -> None:
        self.work, self.tries, self.patience = work, tries, patience
        self.kept, self.best = list[float](), dict.fromkeys(CORES, math.inf)
        self._last, self._at = dict[int, float](), -math.inf

    def turn(self, play: Callable[[], T], one_core: bool = False) -> T:
        """What `play` gives in a quiet turn, or in the quietest; with `one_core` it is kept on the calmer one."""
        found = []
        for _ in range(self.tries):
            deadline = time.perf_counter() + self.patience
            while True:
                before = self._look(fresh=0.05)
                cores = [min(before, key=lambda core: before[core])] if one_core else CORES
                if self.spread(before, cores) < 5 or time.perf_counter() > deadline:
                    break
            os.sched_setaffinity(0, cores)
            value = play()
            found.append((max(self.spread(work, cores) for work in (self._look(), before)), value))
            if found[-1][0] < 5:
                break
        spread, value = min(found, key=lambda one: one[0])
        self.kept.append(spread)
        return value

    def _look(self, fresh: float = 0.0) -> dict[int, float]:
        """How long the work takes now, or took less than `fresh` seconds ago."""
        if time.perf_counter() - self._at > fresh:
            self._last, self._at = calibrate(self.work), time.perf_counter()
        return self._last

    def spread(self, work: dict[int, float], cores: list[int]) -> float:
        """How much longer, in percent, the work took on one of `cores` than at best, at most."""
        self.best = {core: min(best, work[core]) for core, best in self.best.items()}
        return 100 * (max(work[core] / self.best[core] for core in cores) - 1)
