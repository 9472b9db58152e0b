"""Actions on their way to the environments: written once into the slots, read by whoever steps them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.vector.slots import Slots

Loose = dict[int, dict[int, Any]]
"""What does not fit in the slots: leaf -> {env: value}; leaf `WHOLE` holds whole actions."""
WHOLE = -1
NOTHING_LOOSE: Loose = {}


def write_batch(slots: Slots, batch: Any) -> Loose:
    """Put a batch of actions for all envs into the slots; returns what must go by message."""
    loose: Loose = {}
    columns = slots.actions.split(batch, slots.n_envs)
    for i, (target, column) in enumerate(zip(slots.act, columns, strict=True)):
        kind = slots.actions.leaves[i].kind
        if kind == "fixed" and _same(column, target):
            target[...] = column
        else:  # what has another type or shape than the space says reaches the envs as it is, as in a plain loop
            loose[i] = dict(enumerate(column))
    return loose


def plain_target(slots: Slots) -> np.ndarray[Any, Any] | None:
    """The array that a batch of the space's own type is simply copied to, if actions are one array."""
    return slots.act[0] if slots.actions.is_leaf and slots.actions.leaves[0].kind == "fixed" else None


def reader(slots: Slots, first: int, count: int) -> Callable[[], list[Any]]:
    """`read` for all environments of a share whose actions are all in the slots."""
    target = plain_target(slots)
    if target is None:
        members = range(count)
        return lambda: read(slots, first, members, {})
    rows = target[first : first + count]
    if rows.ndim == 1:
        return functools.partial(list, rows)  # of scalars, which are copies
    return lambda: list(rows.copy())


def write_some(slots: Slots, ids: Sequence[int], actions: Sequence[Any]) -> Loose:
    """Put one action for each of the envs `ids` into the slots; returns what must go by message."""
    loose: Loose = {}
    leaves = slots.actions.leaves
    plain = slots.actions.is_leaf and leaves[0].kind == "fixed"
    for i, action in zip(ids, actions, strict=True):
        if not plain:
            loose.setdefault(WHOLE, {})[i] = action
        elif _fits(action, leaves[0].shape, leaves[0].dtype):
            slots.act[0][i] = action
        else:
            loose.setdefault(WHOLE, {})[i] = action
    return loose


def read(
    slots: Slots, first: int, members: Sequence[int], loose: Mapping[int, Mapping[int, Any]]
) -> list[Any]:
    """The actions of the envs `first + j` for each j in `members`, safe to keep."""
    layout = slots.actions
    whole = loose.get(WHOLE)
    if whole is not None and len(whole) == len(members):
        return [whole[first + j] for j in members]
    stop = first + members[-1] + 1
    columns: list[Any] = []
    for i, leaf in enumerate(layout.leaves):
        if i in loose:
            columns.append([loose[i][first + j] for j in members])
        elif leaf.kind == "fixed":
            rows = slots.act[i][first:stop].copy()
            columns.append(list(rows) if len(rows) == len(members) else [rows[j] for j in members])
        else:
            columns.append([None] * len(members))
    actions = columns[0]
    if not layout.is_leaf:
        actions = [layout.rebuild(values) for values in zip(*columns, strict=True)]
    if whole is not None:
        actions = [whole.get(first + j, action) for j, action in zip(members, actions, strict=True)]
    return list(actions)


def _same(column: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> bool:
    if column.shape != target.shape:
        return False
    return column.dtype == target.dtype or _same_integers(column, target.dtype)


def _same_integers(column: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    return column.dtype.kind in "iu" and dtype.kind in "iu" and bool((column.astype(dtype) == column).all())


def _fits(action: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    # What is not already of the space's own type (an int, say) reaches the env as it is.
    if not isinstance(action, np.ndarray if shape else np.generic):
        return False
    return bool(action.dtype == dtype and action.shape == shape)


def for_share(loose: Loose, first: int, count: int) -> Loose:
    """The part of loose actions that concerns the envs `first … first + count - 1`."""
    if not loose:
        return loose
    stop = first + count
    return {
        leaf: {i: value for i, value in values.items() if first <= i < stop} for leaf, values in loose.items()
    }
