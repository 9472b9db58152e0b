"""The space of free text, and how each env gets spaces of its own.

Gymnasium's vector envs share memory with the envs of other processes; what they ask of a space for that is
registered here for free text, which travels as code points.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Text, flatten, flatten_space, unflatten
from gymnasium.vector.utils import read_from_shared_memory
from numpy.typing import NDArray

S = TypeVar("S")

NO_CHARACTER = 0x110000
"""Stands behind the end of a text in an array of code points."""


class FreeText(Text):
    """Strings of at most `max_length` characters of any alphabet.

    Gymnasium's `Text` lists the characters it holds; what models write and shops sell cannot be listed.
    Samples are drawn from printable ASCII. Flattened it is `max_length` code points, as in shared memory.
    """

    def __init__(self, max_length: int, *, min_length: int = 0) -> None:
        super().__init__(max_length, min_length=min_length, charset=string.printable[:-5])

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string of a fitting length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FreeText)
            and self.min_length == other.min_length
            and self.max_length == other.max_length
        )

    __hash__ = None  # type: ignore[assignment]  # as all of Gymnasium's spaces

    def __repr__(self) -> str:
        return f"FreeText({self.min_length}, {self.max_length})"


ANY_TEXT = 65_536
"""Characters of an observation for which there is room where an env does not say more."""
_LETTERS = Text(1).character_set


def free_text(space: Text) -> Text:
    """The space with room for any text, if it is a plain `Text(n)`; one with characters of its own is left as it is.

    A plain `Text` holds letters and digits only, no space and no comma, which is hardly ever meant.
    """
    plain = type(space) is Text and space.character_set == _LETTERS
    return FreeText(max(ANY_TEXT, space.max_length)) if plain else space


def why_not_in(space: Text, text: str) -> str:
    """What is wrong with a text that a space does not hold, and what to do."""
    name = "observation_space" if isinstance(space, FreeText) else f"observation_space {type(space).__name__}"
    strange = sorted({repr(one) for one in text if one not in space.character_set})
    if not isinstance(space, FreeText) and strange:
        characters = " and ".join(filter(None, [", ".join(strange[:5][:-1]), strange[:5][-1]]))
        return f"{name} allows no {characters}: use shoal.envs.spaces.FreeText({space.max_length})"
    limits = f"{space.min_length} to {space.max_length} characters"
    return f"{name} allows {limits}, and it has {len(text)}: allow more there"


def own_space(value: S) -> S:
    """A copy of a space, and of the spaces in it, with random generators of its own.

    All envs of a class share the spaces that it states; a generator must belong to one env. Whatever is no
    space, or holds none, is returned as it is.
    """
    if isinstance(value, Space):
        twin = copy.copy(value)
        for name, part in vars(value).items():
            setattr(twin, name, own_space(part))
        twin._np_random = None  # type: ignore[assignment]
        return twin
    if isinstance(value, tuple | list) and any(isinstance(part, Space) for part in value):
        return type(value)(map(own_space, value))  # type: ignore[return-value]
    if isinstance(value, dict) and any(isinstance(part, Space) for part in value.values()):
        return type(value)((name, own_space(part)) for name, part in value.items())  # type: ignore[return-value]
    return value


@flatten.register(FreeText)
def _flatten(space: FreeText, x: str) -> NDArray[np.int32]:  # type: ignore[misc]
    codes = np.frombuffer(x.encode("utf-32-le", "surrogatepass"), np.int32)
    if len(codes) > space.max_length:
        raise ValueError(f"expected at most {space.max_length} characters, got {len(codes)}")
    padded = np.full(space.max_length, NO_CHARACTER, np.int32)
    padded[: len(codes)] = codes
    return padded


@unflatten.register(FreeText)
def _unflatten(space: FreeText, x: NDArray[np.int32]) -> str:  # type: ignore[misc]
    return x[x < NO_CHARACTER].astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")


@flatten_space.register(FreeText)
def _flatten_space(space: FreeText) -> Box:
    return Box(0, NO_CHARACTER, (space.max_length,), np.int32)


@read_from_shared_memory.register(FreeText)
def _read(space: FreeText, shared_memory: Any, n: int = 1) -> Sequence[str]:
    codes = np.frombuffer(shared_memory.get_obj(), np.int32).reshape(n, space.max_length)
    return _SharedTexts(space, codes)


class _SharedTexts(Sequence[str]):
    """The texts that stand in shared memory now.

    Gymnasium reads the memory once, before anything is in it, and copies what it got after each step: arrays
    see the change, and so does this; a copy is a tuple of strings.
    """

    def __init__(self, space: FreeText, codes: NDArray[np.int32]) -> None:
        self._space, self._codes = space, codes

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return _unflatten(self._space, self._codes[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)
