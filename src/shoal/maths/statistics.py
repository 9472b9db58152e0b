"""Shares and means with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """A share of successes, with the 95% interval of Wilson (1927)."""

    successes: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share itself."""
        return self.successes / max(1, self.trials)


def wilson(successes: int, trials: int, z: float = 1.959964) -> Rate:
    """Wilson's score interval, which holds for few trials and for rates near 0 and 1 too.

    >>> rate = wilson(0, 10)
    >>> round(rate.low, 3), round(rate.high, 3)
    (0.0, 0.278)
    """
    if trials == 0:
        return Rate(0, 0, 0.0, 1.0)
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return Rate(successes, trials, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def mean_interval(values: Sequence[float], z: float = 1.959964) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval by the normal approximation."""
    n = len(values)
    if n == 0:
        return 0.0, math.inf
    mean = sum(values) / n
    if n == 1:
        return mean, math.inf
    return mean, z * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
