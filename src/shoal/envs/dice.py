"""Uniform draws in bulk: one call to numpy, then plain Python for each choice.

A generator that makes some dozens of small decisions spends most of its time in numpy's calls otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Dice:
    """Draws from `rng`, taken `block` at a time, handed out one by one."""

    __slots__ = ("_block", "_draws", "_rng")

    def __init__(self, rng: np.random.Generator, block: int = 32) -> None:
        self._rng, self._block = rng, block
        self._draws: list[float] = []

    def uniform(self) -> float:
        """A number in [0, 1)."""
        if not self._draws:
            self._draws = self._rng.random(self._block).tolist()
        return self._draws.pop()

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1."""
        return int(self.uniform() * n)

    def between(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + int(self.uniform() * (high - low + 1))

    def one(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self.uniform() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options (or all there are), in a random order."""
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(min(count, len(rest)))]
