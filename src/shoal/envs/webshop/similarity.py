"""How alike two short texts are, whatever the order of their words, from 0 to 100.

The same numbers as `thefuzz.fuzz.token_set_ratio`, which the published reward is defined by.
"""

from __future__ import annotations

import functools
import re

_LATIN_1: dict[int, str | None] = {code: None for code in range(128, 256)}
_LATIN_1[0x130] = "i"  # its lower case would be two characters
_NOT_WORD = re.compile(r"[\W_]+")


@functools.lru_cache(maxsize=65_536)
def _tokens(text: str) -> frozenset[str]:
    return frozenset(_NOT_WORD.sub(" ", text.translate(_LATIN_1).lower()).split())


def _common(left: str, right: str) -> int:
    """Length of the longest common subsequence, by bit-parallel rows (Hyyrö, 2004)."""
    where: dict[str, int] = {}
    for position, character in enumerate(left):
        where[character] = where.get(character, 0) | 1 << position
    full = (1 << len(left)) - 1
    row = full
    for character in right:
        matches = row & where.get(character, 0)
        row = (row + matches) | (row - matches)
    return len(left) - (row & full).bit_count()


def _ratio(distance: int, length: int) -> float:
    return 100.0 * (1 - distance / length) if length else 100.0


@functools.lru_cache(maxsize=65_536)
def token_set_ratio(left: str, right: str) -> int:
    """100 when all words of one are in the other; else by the letters that the differing words share.

    >>> token_set_ratio("easy to clean", "Clean, easy"), token_set_ratio("light blue", "dark blue")
    (100, 62)
    """
    a, b = _tokens(left), _tokens(right)
    if not a or not b:
        return 0
    shared, only_a, only_b = a & b, " ".join(sorted(a - b)), " ".join(sorted(b - a))
    if shared and not (only_a and only_b):
        return 100
    joined = len(" ".join(sorted(shared)))
    gap = 1 if joined else 0
    length_a, length_b = joined + gap + len(only_a), joined + gap + len(only_b)
    distance = len(only_a) + len(only_b) - 2 * _common(only_a, only_b)
    best = _ratio(distance, length_a + length_b)
    if joined:
        best = max(
            best,
            _ratio(gap + len(only_a), joined + length_a),
            _ratio(gap + len(only_b), joined + length_b),
        )
    return round(best)
