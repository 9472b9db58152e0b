"""Actions on their way to the environments: written once into the buffers, read by whoever steps them.

What does not fit there (text, custom spaces, another type than the space says) is loose: it goes by message and
reaches the env as it is, as in a plain loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.vector.buffers import Buffers
from shoal.vector.spaces import Layout, Leaf

Array = np.ndarray[Any, Any]
Loose = dict[int, dict[int, Any]]
"""leaf -> {env: value}; leaf `WHOLE` holds whole actions."""
WHOLE = -1
NOTHING_LOOSE: Loose = {}


def split(layout: Layout, batch: Any, n: int) -> list[Any]:
    """A batch of n actions as one entry per leaf: an array of length n if fixed, else a list of n.

    Raises:
        ValueError: for another number of actions.
        TypeError: for a single action.
    """
    return [_column(leaf, part, n) for leaf, part in zip(layout.leaves, layout.flatten(batch), strict=True)]


def _column(leaf: Leaf, part: Any, n: int) -> Any:
    if leaf.kind != "fixed":
        values = list(part)
        if len(values) != n:
            raise ValueError(f"expected one action for each of {n} environments, got {len(values)}")
        return values
    column = np.asarray(part)
    if column.ndim == 0:
        raise TypeError(f"expected one action for each of {n} environments, got the single {part!r}")
    if len(column) != n:
        raise ValueError(
            f"expected actions of shape {(n, *leaf.shape)} for {n} environments, got {column.shape}"
        )
    return column


def write_batch(buffers: Buffers, columns: Sequence[Any], rows: Array | None = None) -> Loose:
    """Put the actions of all envs, split by leaf, into the buffers (or only those of the envs `rows`)."""
    loose: Loose = {}
    for i, (target, column) in enumerate(zip(buffers.act, columns, strict=True)):
        if target is None or not _same(column, target):
            loose[i] = dict(enumerate(column))
        elif rows is None:
            target[...] = column
        else:
            target[rows] = column[rows]
    return loose


def _same(column: Array, target: Array) -> bool:
    if column.shape != target.shape:
        return False
    if column.dtype == target.dtype:
        return True
    integers = column.dtype.kind in "iu" and target.dtype.kind in "iu"
    return integers and bool((column.astype(target.dtype) == column).all())


def whole_actions(layout: Layout, columns: Sequence[Any]) -> list[Any]:
    """Every env's own action from a batch that is split by leaf; safe to keep."""
    values = [list(column.copy()) if isinstance(column, np.ndarray) else column for column in columns]
    return list(values[0]) if layout.is_leaf else [layout.rebuild(each) for each in zip(*values, strict=True)]


def write_some(buffers: Buffers, ids: Sequence[int], actions: Sequence[Any]) -> Loose:
    """Put one action for each of the envs `ids` into the buffers; returns what must go by message."""
    loose: Loose = {}
    target = plain_target(buffers)
    for i, action in zip(ids, actions, strict=True):
        if target is not None and _fits(action, target.shape[1:], target.dtype):
            target[i] = action
        else:
            loose.setdefault(WHOLE, {})[i] = action
    return loose


def plain_target(buffers: Buffers) -> Array | None:
    """The array that a batch of the space's own type is simply copied to, if actions are one array."""
    layout = buffers.actions
    return buffers.act[0] if layout.is_leaf and layout.leaves[0].kind == "fixed" else None


def _fits(action: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    # What is not already of the space's own type (an int, say) reaches the env as it is.
    if not isinstance(action, np.ndarray if shape else np.generic):
        return False
    return bool(action.dtype == dtype and action.shape == shape)


def reader(buffers: Buffers, first: int, count: int) -> Callable[[], list[Any]]:
    """`read` for all environments of a group whose actions are all in the buffers."""
    target = plain_target(buffers)
    if target is None:
        return lambda: read(buffers, first, range(count), {})
    rows = target[first : first + count]
    if rows.ndim == 1:
        return functools.partial(list, rows)  # of scalars, which are copies
    return lambda: list(rows.copy())


def read(
    buffers: Buffers, first: int, members: Sequence[int], loose: Mapping[int, Mapping[int, Any]]
) -> list[Any]:
    """The actions of the envs `first + j` for each j in `members`, safe to keep."""
    layout = buffers.actions
    whole = loose.get(WHOLE)
    if whole is not None and len(whole) == len(members):
        return [whole[first + j] for j in members]
    stop = first + members[-1] + 1
    columns: list[Any] = []
    for i, leaf in enumerate(layout.leaves):
        if i in loose:
            columns.append([loose[i][first + j] for j in members])
        elif leaf.kind == "fixed":
            rows = buffers.act[i][first:stop].copy()
            columns.append(list(rows) if len(rows) == len(members) else [rows[j] for j in members])
        else:
            columns.append([None] * len(members))
    actions = columns[0]
    if not layout.is_leaf:
        actions = [layout.rebuild(values) for values in zip(*columns, strict=True)]
    if whole is not None:
        actions = [whole.get(first + j, action) for j, action in zip(members, actions, strict=True)]
    return list(actions)


def of_group(loose: Loose, first: int, count: int) -> Loose:
    """The part of loose actions that concerns the envs `first … first + count - 1`."""
    if not loose:
        return loose
    stop = first + count
    return {
        leaf: {i: value for i, value in values.items() if first <= i < stop} for leaf, values in loose.items()
    }
