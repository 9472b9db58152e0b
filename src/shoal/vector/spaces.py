"""How values of a Gymnasium space travel: fixed-size leaves in arrays, text in byte strips, the rest by message.

A `Layout` flattens a value into leaf values and rebuilds it; batching is the same rebuilding over columns, so
observations look exactly like those of `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

OBJECT = np.dtype(object)
Kind = Literal["fixed", "text", "object"]


@dataclass(frozen=True)
class Leaf:
    """One component of a space; `shape` and `dtype` matter for fixed leaves only."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = OBJECT

    def __post_init__(self) -> None:
        # NumPy's own object for this type: unpickled ones are copies, and `is` is how the hot loops compare
        own = np.dtype(self.dtype.type) if self.dtype.kind in "biufc" else self.dtype
        if own == self.dtype:
            object.__setattr__(self, "dtype", own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def nbytes(self) -> int:
        """Bytes of one value of a fixed leaf."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Node = int | tuple[str, tuple[tuple[Any, Any], ...]]
"""A leaf's number, or ("dict" | "tuple", ((key, node), …))."""


class Layout:
    """The leaves of a space and the way back from them."""

    def __init__(self, leaves: tuple[Leaf, ...], node: Node) -> None:
        self.leaves = leaves
        self.node = node
        self.is_leaf = isinstance(node, int)
        self.fixed = [i for i, leaf in enumerate(leaves) if leaf.kind == "fixed"]
        self.text = [i for i, leaf in enumerate(leaves) if leaf.kind == "text"]
        self.objects = [i for i, leaf in enumerate(leaves) if leaf.kind == "object"]

    @classmethod
    def of(cls, space: Space[Any]) -> Layout:
        """The layout of one environment's space."""
        leaves: list[Leaf] = []
        node = _walk(space, leaves)
        return cls(tuple(leaves), node)

    @classmethod
    def shared(cls, all_spaces: Sequence[Space[Any]]) -> Layout:
        """The layout of several environments: that of each if they agree, else whole values by message."""
        layouts = [cls.of(space) for space in _distinct(all_spaces)]
        first = layouts[0]
        if all(other.leaves == first.leaves and other.node == first.node for other in layouts[1:]):
            return first
        return cls((Leaf("object"),), 0)

    def flatten(self, value: Any) -> list[Any]:
        """The leaf values of one value, in the order of `leaves`."""
        if self.is_leaf:
            return [value]
        out: list[Any] = [None] * len(self.leaves)
        _scatter(self.node, value, out)
        return out

    def rebuild(self, columns: Sequence[Any]) -> Any:
        """A value, or a batch, from one entry per leaf."""
        return columns[0] if self.is_leaf else _gather(self.node, columns)


def _distinct(all_spaces: Sequence[Space[Any]]) -> list[Space[Any]]:
    kept: list[Space[Any]] = []
    for space in all_spaces:
        if not any(space is other for other in kept):
            kept.append(space)
    return kept


def _walk(space: Space[Any], leaves: list[Leaf]) -> Node:
    if isinstance(space, spaces.Dict):
        return ("dict", tuple((key, _walk(sub, leaves)) for key, sub in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return ("tuple", tuple((i, _walk(sub, leaves)) for i, sub in enumerate(space.spaces)))
    leaves.append(_leaf(space))
    return len(leaves) - 1


def _leaf(space: Space[Any]) -> Leaf:
    # Exact types only: a user's subclass of Box may mean something else by its values. Of Text it is still str.
    if type(space) in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary):
        assert space.shape is not None
        assert space.dtype is not None
        return Leaf("fixed", tuple(space.shape), np.dtype(space.dtype))
    if isinstance(space, spaces.Text):
        return Leaf("text")
    return Leaf("object")


def _scatter(node: Node, value: Any, out: list[Any]) -> None:
    if isinstance(node, int):
        out[node] = value
        return
    for key, child in node[1]:
        _scatter(child, value[key], out)


def _gather(node: Node, columns: Sequence[Any]) -> Any:
    if isinstance(node, int):
        return columns[node]
    kind, children = node
    if kind == "dict":
        return {key: _gather(child, columns) for key, child in children}
    return tuple(_gather(child, columns) for _, child in children)


def batched(all_spaces: Sequence[Space[Any]]) -> Space[Any]:
    """The space of a batch of values, one of each of these spaces, equal or not."""
    first = all_spaces[0]
    if all(space is first or space == first for space in all_spaces):
        return batch_space(first, len(all_spaces))
    if len(Layout.shared(all_spaces).leaves) == len(Layout.of(first).leaves):
        try:
            return batch_differing_spaces(list(all_spaces))
        except (TypeError, ValueError):
            pass
    return spaces.Tuple(tuple(all_spaces))
