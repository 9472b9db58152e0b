"""How what environments give travels and is batched: observations and actions by their spaces, infos by their keys.

A `Layout` flattens a value into leaf values and rebuilds it; batching is the same rebuilding over columns. Batches of
observations and of infos look exactly like those of `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.core.data import NUMBERS
from shoal.core.errors import EnvError

OBJECT = np.dtype(object)
Info = dict[str, Any]
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


def reset_options(options: Any) -> dict[str, Any] | None:
    """The options of a reset; a `TypeError` for what is no dict, in which no `reset_mask` can be looked for."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r:.80}")
    return options  # type: ignore[return-value]


def whole(value: Any, what: str, least: int) -> int:
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


def limit(value: Any, what: str) -> Any:
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


# --- infos, and the ends of episodes
PLAIN = (int, float, bool)


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    BUFFER = "buffer"


IN_BUFFER = Where.BUFFER


class Told(NamedTuple):
    """What one environment told in one step or reset."""

    env: int
    final: Any  # the last observation of an episode that was replaced in this step, or IN_BUFFER
    final_info: Info | None  # of that last step; None where no episode was replaced
    info: Info


class StepResult(NamedTuple):
    """What one environment answered to one action."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info


class Ready(NamedTuple):
    """The environments that answered, whichever were first.

    `observations` is batched like those of `step`, with one row per entry of `ids`; `late` names the
    environments that have been at work for longer than the `timeout` of `recv`.
    """

    ids: np.ndarray[Any, Any]
    observations: Any
    rewards: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    infos: list[Info]
    late: list[int]


def by_env(told: Iterable[Told]) -> dict[int, Info]:
    """One info per environment."""
    infos: dict[int, Info] = {}
    for env, final, final_info, info in told:
        if final_info is not None:
            info = {"final_obs": final, "final_info": final_info, **info}
        infos[env] = info
    return infos


Noted = Told | tuple[Any, ...]
"""What an environment told, or its number and the numbers of its info alone."""
Schema = tuple[tuple[str, ...], tuple[type, ...]]
"""Names and types of the columns of a `Table`."""
CELLS = NUMBERS - {np.longdouble, np.complex64, np.complex128, np.clongdouble}
"""Types of numbers that fit into 8 bytes."""


@dataclass(slots=True)
class Table:
    """What consecutive environments told, where all tell numbers of the same types by the same names.

    Iterating gives what each told.
    """

    first: int
    count: int
    keys: tuple[str, ...]
    kinds: tuple[type, ...]
    columns: Sequence[Any]
    """For each key the numbers, one per env: arrays of its type, or any sequences."""

    @property
    def schema(self) -> Schema:
        """The names and types of its columns."""
        return self.keys, self.kinds

    @classmethod
    def of(cls, noted: Sequence[Noted], count: int, schema: Schema = ((), ())) -> Table | list[Told]:
        """The table of what `count` environments told; what they told, as it came, where that is none.

        Args:
            noted: of each environment what it told, or its number and those of its info.
            count: how many there are.
            schema: what the numbers of infos stand for.
        """
        if len(noted) == count and all(type(item) is tuple for item in noted):
            return cls(noted[0][0], count, *schema, list(zip(*noted, strict=True))[1:])
        told = [
            item
            if isinstance(item, Told)
            else Told(item[0], None, None, dict(zip(schema[0], item[1:], strict=True)))
            for item in noted
        ]
        if len(told) != count:
            return told
        info = told[0].info
        keys, kinds = tuple(info), tuple(map(type, info.values()))
        if not (keys and CELLS.issuperset(kinds)):
            return told
        if not all(type(key) is str for key in keys) or "final_obs" in keys:
            return told
        rows = []
        for _, _, final_info, info in told:
            row = tuple(info.values())
            if final_info is not None or tuple(info) != keys or tuple(map(type, row)) != kinds:
                return told
            rows.append(row)
        return cls(told[0].env, count, keys, kinds, list(zip(*rows, strict=True)))

    @classmethod
    def joined(cls, tables: Sequence[Table], n_envs: int) -> Table | None:
        """One table of all environments, in arrays of its own; None if their tables differ or do not cover all."""
        keys, kinds = tables[0].keys, tables[0].kinds
        if sum(table.count for table in tables) != n_envs:
            return None
        if not all(table.keys == keys and table.kinds == kinds for table in tables[1:]):
            return None
        columns: list[Any]
        try:
            if len(tables) == 1:
                columns = [
                    np.array(values, kind) for values, kind in zip(tables[0].columns, kinds, strict=True)
                ]
            else:
                columns = [np.empty(n_envs, kind) for kind in kinds]
                for table in tables:
                    rows = slice(table.first, table.first + table.count)
                    for column, values in zip(columns, table.columns, strict=True):
                        column[rows] = values
        except OverflowError:  # an int without room
            return None
        return cls(0, n_envs, keys, kinds, columns)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Told]:
        plain = [
            values.tolist() if isinstance(values, np.ndarray) and kind in PLAIN else list(values)
            for kind, values in zip(self.kinds, self.columns, strict=True)
        ]
        for i, *row in zip(range(self.first, self.first + self.count), *plain, strict=True):
            yield Told(i, None, None, dict(zip(self.keys, row, strict=True)))


def batch_infos(n_envs: int, told: Iterable[Told] | Table) -> Info:
    """Each key of any env's info becomes an array over envs, with a mask `_key` of who had it.

    Equal to what `gymnasium.vector.SyncVectorEnv` builds, key order included. Where that fails, because some tell
    a dict and others none, a number that does not fit, or a dict that holds itself, the array holds what each told as
    it is.
    """
    if isinstance(told, Table) and told.count == n_envs and isinstance(told.columns[0], np.ndarray):
        batch: Info = {}
        everyone = np.ones((len(told.keys), n_envs), dtype=np.bool_)
        for key, column, mask in zip(told.keys, told.columns, everyone, strict=True):
            batch[key], batch[f"_{key}"] = column, mask
        return batch
    told = list(told)
    if told and not any(
        item.info or item.final_info or item.final_info is None for item in told
    ):  # ends alone
        final, mask = np.full(n_envs, None), np.zeros(n_envs, dtype=np.bool_)
        for item in told:
            final[item.env], mask[item.env] = item.final, True
        return {"final_obs": final, "_final_obs": mask, "final_info": {}, "_final_info": mask.copy()}
    each = by_env(told)
    ids = sorted(each)
    return _batched_infos(n_envs, ids, [each[i] for i in ids])


def _batched_infos(n_envs: int, ids: Sequence[int], infos: Sequence[Info], *, inner: bool = False) -> Info:
    columns: dict[str, tuple[Any, Any]] = {}
    keys = set(map(tuple, infos))
    if len(keys) == 1:  # all tell the same
        rows = zip(*(info.values() for info in infos), strict=True)
        columns = {key: (ids, row) for key, row in zip(keys.pop(), rows, strict=True)}
    else:
        for i, info in zip(ids, infos, strict=True):
            for key, value in info.items():
                if key in columns:
                    columns[key][0].append(i)
                    columns[key][1].append(value)
                else:
                    columns[key] = [i], [value]
    out: Info = {}
    masked, mask = None, np.zeros(n_envs, dtype=np.bool_)
    for key, (who, values) in columns.items():
        if who is not masked:
            masked, mask = who, np.zeros(n_envs, dtype=np.bool_)
            mask[who] = True
        out[key], out[f"_{key}"] = _info_column(n_envs, key, who, values, inner), mask.copy()
    return out


def _info_column(n_envs: int, key: str, ids: Sequence[int], values: Sequence[Any], inner: bool) -> Any:
    kinds = set(map(type, values)) if key != "final_obs" else {object}
    if len(ids) == n_envs and len(kinds) == 1 and (kind := next(iter(kinds))) in NUMBERS:
        try:
            return np.array(values, dtype=kind)
        except OverflowError:  # it is told as objects
            pass
    dicts = [kind for kind in kinds if issubclass(kind, dict)]
    if len(dicts) == len(kinds):
        try:
            return _batched_infos(n_envs, ids, values, inner=True)
        except RecursionError:  # one holds itself: all of it is told as it is
            if inner:
                raise
    first, column = values[0], np.empty(n_envs, dtype=object)
    if not dicts and key != "final_obs":
        if type(first) in PLAIN or isinstance(first, np.number):
            column = np.zeros(n_envs, dtype=type(first))
        elif isinstance(first, np.ndarray):
            column = np.zeros((n_envs, *first.shape), first.dtype)
    try:
        if len(ids) > 16 and len(kinds) == 1 and column.ndim == 1 and column.dtype != object:
            column[ids] = values
            return column
        for i, value in zip(ids, values, strict=True):
            column[i] = value
    except (TypeError, ValueError, OverflowError):  # they are of different kinds: any object fits
        column = np.empty(n_envs, dtype=object)
        for i, value in zip(ids, values, strict=True):
            column[i] = value
    return column
