"""How observations and actions of a space travel: flattened into leaf values, and rebuilt.

Batching is the same rebuilding over columns; batches look exactly like those of `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.core.data import deep_copy
from shoal.core.errors import EnvError

OBJECT = np.dtype(object)
FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
Kind = Literal["fixed", "text", "object"]


@dataclass(frozen=True)
class Leaf:
    """One component of a space; `shape` and `dtype` matter for fixed leaves only."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = OBJECT

    @property
    def nbytes(self) -> int:
        """Bytes of one value of a fixed leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        layouts = [cls.of(space) for space in {id(space): space for space in all_spaces}.values()]
        first = layouts[0]
        if all(other.leaves == first.leaves and other.node == first.node for other in layouts[1:]):
            return first
        return cls((Leaf("object"),), 0)

    def flatten(self, value: Any) -> list[Any]:
        """The leaf values of one value, in the order of `leaves`; a ValueError where it has other parts."""
        if self.is_leaf:
            return [value]
        out: list[Any] = [None] * len(self.leaves)
        _scatter(self.node, value, out)
        return out

    def rebuild(self, columns: Sequence[Any]) -> Any:
        """A value, or a batch, from one entry per leaf."""
        return columns[0] if self.is_leaf else _gather(self.node, columns)

    def map(self, change: Callable[[Any], Any], value: Any) -> Any:
        """The value, or batch, with `change` of each leaf."""
        return self.rebuild([change(leaf) for leaf in self.flatten(value)])


def refuse_loss(given: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """An `EnvError` where an observation would lose something as the numbers of its space."""
    if given.dtype == dtype:
        return
    if not np.can_cast(given.dtype, dtype, "same_kind"):
        raise EnvError(f"observation must have dtype {dtype}, got {given.dtype} ({given!r:.80})")
    if dtype.kind in "iu" and not (given.astype(dtype) == given).all():
        raise EnvError(f"observation holds numbers that {dtype} has no room for ({given!r:.80})")


def _walk(space: Space[Any], leaves: list[Leaf]) -> Node:
    if isinstance(space, spaces.Dict):
        return ("dict", tuple((key, _walk(sub, leaves)) for key, sub in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return ("tuple", tuple((i, _walk(sub, leaves)) for i, sub in enumerate(space.spaces)))
    leaves.append(_leaf(space))
    return len(leaves) - 1


def _leaf(space: Space[Any]) -> Leaf:
    if isinstance(space, FIXED):
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
    try:
        for key, child in node[1]:
            _scatter(child, value[key], out)
    except (LookupError, TypeError):
        kind, parts = node
        wanted = (
            f"a dict with the keys {[key for key, _ in parts]}"
            if kind == "dict"
            else f"a tuple of {len(parts)}"
        )
        raise ValueError(f"expected {wanted}, as its space says, got {value!r:.200}") from None


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


# --- batches that somebody else made
def check_actions(space: Space[Any], actions: Any, env_ids: Sequence[int]) -> Any:
    """A copy of one action for each of these environments, in the dtype of their space.

    Raises:
        ValueError: for another shape, dtype or index, which in a batch of C++ can end the process.
    """
    n_envs = len(env_ids)
    if not isinstance(space, FIXED):
        if not batch_space(space, n_envs).contains(actions):
            raise ValueError(f"expected {n_envs} actions of {space}, got {actions!r}")
        return deep_copy(actions)
    array, shape = np.asarray(actions), (n_envs, *(space.shape or ()))
    if array.shape != shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise ValueError(f"expected actions {shape} of {space.dtype}, got {array.shape} of {array.dtype}")
    if not isinstance(space, spaces.Box):  # Boxes clip or scale as they like
        start, end = _bounds(space)
        wrong = ((array < start) | (array >= end)).reshape(n_envs, -1).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"expected actions in {space}, got others from environments {np.array(env_ids)[wrong].tolist()}"
            )
    return array.astype(space.dtype)


def _bounds(space: Any) -> tuple[Any, Any]:
    """The first index and the one after the last of every part of an action."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n
    return (space.start, space.start + space.nvec) if isinstance(space, spaces.MultiDiscrete) else (0, 2)


def final_observations(layout: Layout, obs: Any, ended: Any) -> Any:
    """A copy of the observation of each episode that ended, as Gymnasium has them in `final_obs`; else None."""
    final = np.full(len(ended), None, dtype=object)
    for i in np.flatnonzero(ended).tolist():
        final[i] = layout.map(lambda rows, i=i: np.array(rows[i]), obs)  # type: ignore[misc]
    return final
