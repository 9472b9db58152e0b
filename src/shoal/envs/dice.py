"""Draws in bulk: one call to numpy for a block of raw words, then plain Python for each choice.

A generator that makes some dozens of small decisions spends most of its time in numpy's calls otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class BulkRandom:
    """Draws from the 64-bit words of `rng`, taken `block` at a time, handed out one by one."""

    __slots__ = ("_block", "_raw", "_words")

    def __init__(self, rng: np.random.Generator, block: int = 32) -> None:
        self._raw, self._block = rng.bit_generator.random_raw, block
        self._words: list[int] = []

    def words(self, n: int) -> list[int]:
        """`n` raw words, for a loop that takes several decisions from the bits of one."""
        if len(self._words) < n:
            self._words += self._raw(max(self._block, n)).tolist()
        taken = self._words[-n:]
        del self._words[-n:]
        return taken

    def uniform(self) -> float:
        """A number in [0, 1), as `rng.random` makes it of a word."""
        if not self._words:
            self._words = self._raw(self._block).tolist()
        return (self._words.pop() >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1."""
        if not self._words:
            self._words = self._raw(self._block).tolist()
        return ((self._words.pop() >> 11) * n) >> 53

    def between(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options (or all there are), in a random order."""
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(min(count, len(rest)))]
