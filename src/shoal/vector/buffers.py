"""The memory through which environments and their caller talk: one block, each env in its own rows.

The block is plain memory for environments in this process and shared memory for worker processes; the code that
reads and writes rows is the same.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from shoal.core.data import deep_copy
from shoal.core.errors import ConfigError, EnvError
from shoal.core.executors import available_memory
from shoal.vector.spaces import Layout, Leaf, one_each, refuse_loss

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""Bytes: arrays of the block share no cache line."""


class Buffers:
    """Named arrays over one block; the same arguments give the same places in every process.

    Args:
        n_envs: number of environments.
        observations: layout of one.
        actions: layout of one.
        memory: the block, or None for private memory.
    """

    rewards: Array  # [n_envs] float64
    flags: Array  # [2 * n_envs] bool: terminated, then truncated
    terminated: Array  # [n_envs] bool
    truncated: Array  # [n_envs] bool
    act: list[Any]  # per leaf of an action [n_envs, *shape], None if it has no fixed size
    obs: list[Any]  # per leaf of an observation [n_envs, *shape], None if it has no fixed size
    final: Array | None  # [n_envs, *shape]  the last of episodes that ended, where they are one array

    def __init__(self, n_envs: int, observations: Layout, actions: Layout, memory: Any = None) -> None:
        self.n_envs, self.observations, self.actions = n_envs, observations, actions
        self._size = 0
        rewards, flags = self._place("f8", (n_envs,)), self._place("?", (2 * n_envs,))
        act = [self._leaf(leaf, n_envs) for leaf in actions.leaves]
        obs = [self._leaf(leaf, n_envs) for leaf in observations.leaves]
        final = self._leaf(observations.leaves[0], n_envs) if observations.is_leaf else None
        self.nbytes = self._size
        view = memoryview(bytearray(self.nbytes) if memory is None else memory)
        self.rewards, self.flags = _array(view, rewards), _array(view, flags)
        self.terminated, self.truncated = self.flags[:n_envs], self.flags[n_envs:]
        self.act = [_array(view, place) for place in act]
        self.obs = [_array(view, place) for place in obs]
        self.final = _array(view, final)

    def _place(self, dtype: Any, shape: tuple[int, ...]) -> _Place:
        kind, offset = np.dtype(dtype), self._size
        self._size = -(-(offset + math.prod(shape) * kind.itemsize) // ALIGNMENT) * ALIGNMENT
        return offset, kind, shape

    def _leaf(self, leaf: Leaf, n_envs: int) -> _Place | None:
        return self._place(leaf.dtype, (n_envs, *leaf.shape)) if leaf.kind == "fixed" else None


_Place = tuple[int, np.dtype[Any], tuple[int, ...]]


def _array(memory: memoryview, place: _Place | None) -> Any:
    if place is None:
        return None
    offset, kind, shape = place
    return np.frombuffer(memory, kind, math.prod(shape), offset).reshape(shape)


def is_array_of(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether it is an array of this type and shape, to be copied as it is."""
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape


class RowWriter:
    """Puts values of one fixed leaf into the `rows` of a group, `[count, *shape]`."""

    def __init__(self, leaf: Leaf, rows: Array) -> None:
        # NumPy's own object for this type: unpickled ones are copies, and `is` is how the hot loop compares
        self.dtype, self.shape = np.dtype(leaf.dtype.str), leaf.shape
        self.rows = [rows[j, ...] for j in range(len(rows))]
        self.flat = rows.reshape(-1)
        self._scalars: tuple[type, ...] = ()
        if not leaf.shape:  # what needs no conversion: numbers of the space's own type, and Python's own
            self._scalars = (leaf.dtype.type, *((int,) if leaf.dtype.kind in "iu" else ()))

    def write(self, j: int, value: Any) -> None:
        """Write one value, converted if that loses nothing."""
        plain = type(value) in self._scalars or is_array_of(value, self.dtype, self.shape)
        self.rows[j][...] = value if plain else self.checked(value)

    def checked(self, value: Any) -> Array:
        """The value as an array, if it fits; else an `EnvError` says what was expected."""
        given = np.asarray(value)
        if given.shape != self.shape:
            raise EnvError(f"observation must have shape {self.shape}, got {given.shape}")
        if type(value) not in self._scalars:
            refuse_loss(given, self.dtype)
        return given


class Observations:
    """What the caller sees of the observations: leaves of fixed size in the buffers, the others as values here.

    Args:
        buffers: of the vector env.
        copy: give copies; else views that later steps overwrite.
    """

    def __init__(self, buffers: Buffers, *, copy: bool) -> None:
        self.layout, self._copy = buffers.observations, copy
        self.columns: list[Any] = [
            rows if leaf.kind == "fixed" else [None] * buffers.n_envs
            for leaf, rows in zip(self.layout.leaves, buffers.obs, strict=True)
        ]
        self._alone = self.columns[0] if self.layout.is_leaf else None

    def batch(self) -> Any:
        """The observations of all environments."""
        alone = self._alone
        if type(alone) is np.ndarray:
            return alone.copy() if self._copy else alone
        if self._copy:
            return self.layout.rebuild(self.some(slice(None)))
        return self.layout.rebuild([tuple(c) if isinstance(c, list) else c for c in self.columns])

    def some(self, which: Any) -> list[Any]:
        """For each leaf the values of some environments, as a list of ids or a slice; copies."""
        if isinstance(which, slice):
            return [
                tuple(deep_copy(column[which])) if isinstance(column, list) else column[which].copy()
                for column in self.columns
            ]
        return [
            tuple(deep_copy(column[i]) for i in which) if isinstance(column, list) else column[which]
            for column in self.columns
        ]

    def one(self, i: int) -> Any:
        """One environment's observation."""
        columns = self.some([i])
        return self.layout.rebuild(
            [leaf.of(column, 0) for leaf, column in zip(self.layout.leaves, columns, strict=True)]
        )

    def put(self, i: int, leaves: Sequence[Any]) -> None:
        """Make these leaf values the observation of one environment."""
        for column, value in zip(self.columns, leaves, strict=True):
            column[i] = value

    def take(self, ids: Sequence[int], columns: dict[int, list[Any]], but: Iterable[int] = ()) -> None:
        """Take over values that came by message, leaf by leaf, except those of the envs `but`."""
        for leaf, values in columns.items():
            if isinstance(ids, range) and not but:
                self.columns[leaf][ids.start : ids.stop] = values
                continue
            for i, value in zip(ids, values, strict=True):
                if i not in but:
                    self.columns[leaf][i] = value


# --- actions: written once into the buffers, read where the environments are stepped. What does not fit there (text,
# custom spaces, a type that the space does not have) is pickled, and reaches the env as it is.
PickledActions = dict[int, Any]
"""By leaf, an action for each env by its number; in a command by its position in the group. Leaf `WHOLE_ACTION` alone
holds the whole actions of all that are stepped."""
WHOLE_ACTION = -1
NO_PICKLED_ACTIONS: PickledActions = {}


def write_actions(buffers: Buffers, batch: Any) -> PickledActions:
    """Put a batch of actions into the buffers; returns what must go by message.

    Raises:
        ValueError: for another number of actions.
        TypeError: for a single action.
    """
    target = plain_target(buffers)
    if type(batch) is np.ndarray and target is not None and _same(batch, target):
        target[...] = batch
        return NO_PICKLED_ACTIONS
    layout, pickled = buffers.actions, PickledActions()
    for i, (leaf, part) in enumerate(zip(layout.leaves, layout.flatten(batch), strict=True)):
        column, target = _column(leaf, part, buffers.n_envs), buffers.act[i]
        if target is None or not _same(column, target):
            pickled[i] = deep_copy(column)
        else:
            target[...] = column
    return pickled


def _column(leaf: Leaf, part: Any, n: int) -> Any:
    """The actions of one leaf: an array of length n if it is fixed, else a list of n."""
    if leaf.kind != "fixed":
        return one_each(part, n)
    column = np.asarray(part)
    if column.ndim == 0:  # what can only be iterated, or a single action
        column = np.asarray(one_each(part, n))
    if len(column) != n:
        raise ValueError(
            f"expected actions of shape {(n, *leaf.shape)} for {n} environments, got {column.shape}"
        )
    return column


def _same(column: Array, target: Array) -> bool:
    if column.shape != target.shape:
        return False
    if column.dtype == target.dtype:
        return True
    integers = column.dtype.kind in "iu" and target.dtype.kind in "iu"
    return integers and bool((column.astype(target.dtype) == column).all())


def write_some(buffers: Buffers, ids: Sequence[int], actions: Sequence[Any]) -> PickledActions:
    """Put one action for each of the envs `ids` into the buffers; returns what must go by message."""
    target = plain_target(buffers)
    if target is not None and _all_fit(actions, target):
        target[ids] = actions
        return NO_PICKLED_ACTIONS
    return {WHOLE_ACTION: {i: deep_copy(action) for i, action in zip(ids, actions, strict=True)}}


def plain_target(buffers: Buffers) -> Array | None:
    """The array that a batch of the space's own type is simply copied to, if actions are one array."""
    return buffers.act[0] if buffers.actions.is_leaf else None


def _all_fit(actions: Sequence[Any], target: Array) -> bool:
    # What is not already of the space's own type (an int, say) reaches the env as it is.
    if target.ndim == 1:
        return set(map(type, actions)) == {target.dtype.type}
    return len(actions) > 0 and all(is_array_of(action, target.dtype, target.shape[1:]) for action in actions)


def reader(buffers: Buffers, first: int, count: int) -> Callable[[], list[Any]]:
    """`read` for all environments of a group whose actions are all in the buffers."""
    target = plain_target(buffers)
    if target is None:
        return lambda: read(buffers, first, range(count), {})
    rows = target[first : first + count]
    if rows.ndim == 1:
        return functools.partial(list, rows)  # of scalars, which are copies
    return lambda: list(rows.copy())


def read(buffers: Buffers, first: int, members: Sequence[int], pickled: PickledActions) -> list[Any]:
    """The actions of the envs `first + j` for each j in `members`, safe to keep."""
    if not len(members):
        return []
    layout = buffers.actions
    if WHOLE_ACTION in pickled:
        return [pickled[WHOLE_ACTION][j] for j in members]
    stop = first + members[-1] + 1
    columns: list[Any] = []
    for i in range(len(layout.leaves)):
        if i in pickled:
            columns.append([pickled[i][j] for j in members])
        else:
            rows = buffers.act[i][first:stop].copy()
            columns.append(list(rows) if len(rows) == len(members) else [rows[j] for j in members])
    if layout.is_leaf:
        actions = columns[0]
    else:  # (a space of no parts has an action, too)
        each = zip(*columns, strict=True) if columns else [()] * len(members)
        actions = [layout.rebuild(values) for values in each]
    return list(actions)


def for_worker(pickled: PickledActions, first: int, count: int) -> PickledActions:
    """The pickled actions of the envs `first … first + count - 1`, those of one worker."""
    if not pickled:
        return pickled
    stop = first + count
    return {
        leaf: {i - first: value for i, value in values.items() if first <= i < stop}
        if isinstance(values, dict)
        else values[first:stop]
        for leaf, values in pickled.items()
    }


# --- shared memory
def shared_block(nbytes: int) -> SharedMemory:
    """`nbytes` of shared memory, reserved, so that no later write can fail.

    Raises:
        ConfigError: when there is too little; it says how much, and what to do.
    """
    free, place = available_memory(), "memory"
    if os.path.isdir("/dev/shm"):
        room = shutil.disk_usage("/dev/shm").free
        if room < free:
            free, place = room, "/dev/shm"
    if nbytes > free:
        raise ConfigError(_too_little(nbytes, place, free))
    block = SharedMemory(create=True, size=max(nbytes, 1))
    try:
        path = f"/dev/shm/{block.name}"
        if hasattr(os, "posix_fallocate") and os.path.exists(path):
            descriptor = os.open(path, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, 0, block.size)
            finally:
                os.close(descriptor)
    except BaseException as error:
        block.close()
        block.unlink()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise ConfigError(_too_little(nbytes, place, free)) from error
        raise
    return block


def _too_little(nbytes: int, place: str, free: float) -> str:
    return (
        f"observations and actions need {nbytes / 2**20:.1f} MiB of shared memory, and {place} has "
        f"{free / 2**20:.1f} MiB free: use fewer environments or smaller observations, or give more (docker run "
        "--shm-size=2g)"
    )
