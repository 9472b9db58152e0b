"""The space of free text: any characters, a bounded length."""

from __future__ import annotations

import string
from typing import Any

from gymnasium.spaces import Text


class FreeText(Text):
    """Strings of at most `max_length` characters of any alphabet.

    Gymnasium's `Text` lists the characters it holds; what models write and shops sell cannot be listed.
    Samples are drawn from printable ASCII.
    """

    def __init__(self, max_length: int, *, min_length: int = 0) -> None:
        super().__init__(max_length, min_length=min_length, charset=string.printable[:-5])

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string of a fitting length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"FreeText({self.min_length}, {self.max_length})"
