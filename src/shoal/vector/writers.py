"""Putting observations into the rows of the slots, and refusing those that do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shoal.core.errors import EnvError
from shoal.vector.spaces import Leaf


class Writer:
    """Puts values of one fixed leaf into rows.

    Args:
        leaf: which values fit.
        rows: one row per environment.
        count: how many.
    """

    def __init__(self, leaf: Leaf, rows: np.ndarray[Any, Any], count: int) -> None:
        self.dtype, self.shape = leaf.dtype, leaf.shape
        self.array = rows
        self.rows = [rows[j, ...] for j in range(count)]
        self.flat = rows.reshape(-1)
        self._scalars: tuple[type, ...] = ()
        if not leaf.shape:  # what needs no conversion: numbers of the space's own type, and Python's own
            self._scalars = (leaf.dtype.type, *((int,) if leaf.dtype.kind in "iu" else ()))

    def write(self, j: int, value: Any) -> None:
        """Write one value."""
        if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
            self.rows[j][...] = value
        else:
            self.convert(j, value)

    def convert(self, j: int, value: Any) -> None:
        """Write a value that is not an array of exactly the right kind, if it can be one."""
        if type(value) in self._scalars:
            self.rows[j][...] = value
            return
        array = np.asarray(value)
        if array.shape != self.shape:
            raise EnvError(f"observation must have shape {self.shape}, got {array.shape}")
        if array.dtype != self.dtype and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise EnvError(f"observation must have dtype {self.dtype}, got {array.dtype} ({value!r:.80})")
        self.rows[j][...] = array

    def detach(self) -> None:
        """Write to copies from now on."""
        self.rows = [row.copy() for row in self.rows]


def refuse_unless_text(value: Any) -> None:
    """Raise for what a Text space cannot hold."""
    if not isinstance(value, str):
        raise EnvError(f"observation must be str in a Text space, got {type(value).__name__}")


def members_of(mask: Iterable[bool]) -> list[int]:
    """Positions where a mask is set."""
    return [j for j, on in enumerate(mask) if on]
