"""How long steps take: a histogram per environment in the slots, filled by a sample of the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BUCKETS = 128
PER_OCTAVE = 4
SHORTEST = 1e-7
"""Seconds of the first bucket; four buckets to a doubling, so the last one is beyond seven minutes."""
EVERY = 17
"""One step in so many is timed, where steps are short; a prime, to fall out of step with the episodes."""
LONG = 100e-6
"""Seconds from which the clock costs nothing in comparison: then every step is timed."""

Step = Callable[[Any], Any]


class StepClock:
    """Times the steps of a share, now and then.

    Args:
        rows: one histogram per environment, `[count, BUCKETS]`.
    """

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self._rows = [memoryview(row) for row in rows]
        self._timed: list[Step] = []
        self._rest = 0
        self._longest = 0.0

    def wrap(self, steps: list[Step]) -> None:
        """Take these as the step functions."""
        self._timed = [self._wrapped(row, step) for row, step in zip(self._rows, steps, strict=True)]

    def turn(self, steps: list[Step]) -> list[Step]:
        """The functions to step with this time: `steps`, or the timed ones."""
        if self._rest:
            self._rest -= 1
            return steps
        self._rest = 0 if self._longest > LONG else EVERY - 1
        self._longest = 0.0
        return self._timed

    def _wrapped(self, row: memoryview, step: Step) -> Step:
        now = time.perf_counter

        def timed(action: Any) -> Any:
            start = now()
            result = step(action)
            seconds = now() - start
            row[bucket_of(seconds)] += 1
            if seconds > self._longest:
                self._longest = seconds
            return result

        return timed


def turn_over(rounds: int) -> None:
    """Keep this core busy: the stand-in for environments whose steps must not be taken."""
    for _ in range(rounds):
        pass


def bucket_of(seconds: float) -> int:
    """The bucket of a duration.

    >>> bucket_of(0.0), bucket_of(1e-7), bucket_of(2.1e-7), bucket_of(1e9)
    (0, 0, 4, 127)
    """
    if seconds <= SHORTEST:
        return 0
    return min(BUCKETS - 1, int(PER_OCTAVE * math.log2(seconds / SHORTEST)))


def quantiles(rows: np.ndarray[Any, Any], *shares: float) -> list[list[float]]:
    """For each share (0.5 is the median) the seconds of every row; NaN where nothing was timed."""
    counts = rows.astype(np.int64).cumsum(axis=1)
    total = counts[:, -1:]
    middles = SHORTEST * 2 ** ((np.arange(BUCKETS) + 0.5) / PER_OCTAVE)
    found = []
    for share in shares:
        at = (counts < np.maximum(np.ceil(share * total), 1)).sum(axis=1)
        values = middles[np.minimum(at, BUCKETS - 1)]
        found.append(np.where(total[:, 0] > 0, values, np.nan).tolist())
    return found
