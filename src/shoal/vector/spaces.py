"""How observations and actions of a space travel, and what callers may pass: seeds, masks, indices, time limits.

Values are flattened into leaf values, and rebuilt. Batching is the same rebuilding over columns; batches look exactly
like those of `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.core.errors import EnvError
from shoal.core.seeding import derive_seed

OBJECT = np.dtype(object)
FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
Kind = Literal["fixed", "text", "object"]


@dataclass(frozen=True)
class Leaf:
    """One component of a space; what follows `kind` matters for fixed leaves only."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = OBJECT
    is_array: bool = False
    """One value is an array even where it has no dimensions."""

    def of(self, column: Any, i: int) -> Any:
        """The value of one environment in a column of them."""
        return column[i, ...] if self.is_array else column[i]


Node = int | tuple[str, tuple[tuple[Any, Any], ...]]
"""A leaf's number, or ("dict" | "tuple", ((key, node), …))."""


class Layout:
    """The leaves of a space and the way back from them."""

    def __init__(self, leaves: tuple[Leaf, ...], node: Node) -> None:
        self.leaves = leaves
        self.node = node
        self.is_leaf = isinstance(node, int)
        self.fixed = [i for i, leaf in enumerate(leaves) if leaf.kind == "fixed"]

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
        return Leaf("fixed", tuple(space.shape), np.dtype(space.dtype), isinstance(space, spaces.Box))
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


# --- what callers pass beside values of spaces
Seeds = int | Sequence[int | None] | None


def check_options(options: Any) -> dict[str, Any] | None:
    """The options of a reset; a `TypeError` for what is no dict, in which no `reset_mask` can be looked for."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r:.80}")
    return options  # type: ignore[return-value]


def check_whole(value: Any, what: str, least: int) -> int:
    """An int of a whole number of any kind.

    Raises:
        TypeError: for anything else, truth values included: as indices they would name other environments.
        ValueError: if it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, got {value!r:.80}")
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


def check_limit(value: Any, what: str) -> Any:
    """A number (infinity is one), or None for no limit, as it came.

    Raises:
        TypeError: for anything else.
        ValueError: for NaN, which would never be reached.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{what} must be a number or None, got {value!r:.80}")
    if value is not None and value != value:
        raise ValueError(f"{what} must be a number or None, got {value}")
    return value


def one_each(given: Any, n: int, word: str = "actions") -> list[Any]:
    """A list of n actions, or whatever the `word` says.

    Raises:
        ValueError: for another number of them.
        TypeError: for a number, text, dict or set: as many letters, or keys in any order, as environments are no batch.
    """
    try:
        each = None if isinstance(given, str | bytes | dict | set | frozenset) else list(given)
    except TypeError:  # a number
        each = None
    if each is None:
        raise TypeError(
            f"expected one {word[:-1]} for each of {n} environments, got the single {given!r:.80}"
        )
    if len(each) != n:
        raise ValueError(f"expected {n} {word}, one for each environment, got {len(each)}")
    return each


def groups(seed: int, n_groups: int, group_size: int, *, iteration: int = 0) -> list[int]:
    """Seeds for `reset` in which the environments of a group start alike and groups differ.

    Group g holds environments `g * group_size … (g + 1) * group_size - 1`.

    >>> a, b, c, d = groups(7, n_groups=2, group_size=2)
    >>> a == b, c == d, a == c
    (True, True, False)
    """
    if n_groups < 1 or group_size < 1:
        raise ValueError(f"n_groups and group_size must be at least 1, got {n_groups} and {group_size}")
    return [derive_seed(seed, "env", iteration, g) for g in range(n_groups) for _ in range(group_size)]


def plain_seed(seed: Any) -> int | None:
    """A seed as environments take it, whatever kind of whole number it is."""
    try:
        return None if seed is None else operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed must be a whole number or None, got {seed!r:.80}") from None


def seeds_per_env(seed: Seeds, n_envs: int) -> list[int | None]:
    """One seed per environment: of an int `seed + i`, of a sequence its own."""
    if not isinstance(seed, Iterable) or isinstance(seed, bytes | dict | set | frozenset):
        first = plain_seed(seed)
        return [None if first is None else first + i for i in range(n_envs)]
    seeds = [plain_seed(item) for item in seed]
    if len(seeds) != n_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={n_envs} but got "
            f"length={len(seeds)}."
        )
    return seeds


def check_mask(mask: Any, n_envs: int) -> Any:
    """`options["reset_mask"]` as Gymnasium wants it."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (n_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({n_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(  # (its users look for Gymnasium's words)
            "`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return mask
