"""Gymnasium spaces as flat rows: what a policy network reads, and what its outputs mean to the env.

Observations become one row each: of float32, or of bytes when there are images, which stay uint8 until the network
reads them (numbers beside them are the first bytes). Actions are discrete (one integer per group) or continuous (one
float per dimension).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.core.errors import ConfigError, EnvError

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Leaf:
    """One simple part of an observation space and its place in the row."""

    path: tuple[str, ...]  # keys into nested dicts; empty for a space that is not a dict
    space: gym.Space
    start: int  # in the row, counted in numbers; of an image in bytes
    stop: int

    @property
    def picture(self) -> Picture | None:
        """How this part is a picture, or None if it is none."""
        return picture_of(self.space)

    @property
    def is_image(self) -> bool:
        """Whether this part is a uint8 picture, or a stack of them."""
        return self.picture is not None


@dataclass(frozen=True, slots=True)
class Picture:
    """A uint8 Box as `[channels, height, width]`: what its axes mean."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # the axes as (others that are channels too, channels, height, width)
    channels: int
    height: int
    width: int


LEAST_SIDE = 8
"""A table of bytes with a shorter side is no picture, if it has two dimensions."""


def picture_of(space: gym.Space) -> Picture | None:
    """A space of uint8 with two dimensions (grey), three (channels first or last), or four (a stack of such).

    The shorter of the first and the last axis of a picture are its channels, the last one if they are equal.
    """
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3, 4)):
        return None
    shape = space.shape
    if len(shape) == 2:
        return Picture(shape, (0, 1), 1, *shape) if min(shape) >= LEAST_SIDE else None
    first = len(shape) - 3
    last = first + 2
    if shape[last] <= shape[first]:
        order = (*range(first), last, first, first + 1)
    else:
        order = tuple(range(len(shape)))
    height, width = (shape[axis] for axis in order[-2:])
    return Picture(shape, order, int(np.prod(shape)) // (height * width), height, width)


AS_FLOAT32 = "as float32, which ends at 3.4e38"
"""How the numbers of observations are read, and so told where they are not finite."""


class ObservationRows:
    """Turns observations of a space into rows `[D]` of `dtype`.

    Box is flattened, Discrete and MultiDiscrete are one-hot, MultiBinary is 0/1, Dict is its parts one
    after the other. Anything else is a `ConfigError`. With images a row is bytes: those of the float32 numbers,
    if there are any, then those of the images.
    """

    def __init__(self, space: gym.Space) -> None:
        self.space = space
        leaves = _leaves(space, ())
        if not leaves:
            raise ConfigError(f"the observation space {space} is empty")
        images = any(leaf.is_image for leaf in leaves)
        self.n_numbers = sum(leaf.stop for leaf in leaves if not leaf.is_image)
        self.dtype = np.dtype(np.uint8 if images else np.float32)
        self.choices = np.zeros(self.n_numbers, bool)
        """`[n_numbers]` which numbers are 0 or 1 for a choice, and no measurements."""
        self._bytes = self.n_numbers * (4 if images else 1)
        self.leaves: list[Leaf] = []
        ends = {False: 0, True: self._bytes}  # of numbers, counted in numbers, and of the images behind them
        for leaf in leaves:
            start = ends[leaf.is_image]
            ends[leaf.is_image] += leaf.stop
            self.leaves.append(replace(leaf, start=start, stop=start + leaf.stop))
            if not isinstance(leaf.space, spaces.Box):
                self.choices[start : start + leaf.stop] = True
        self.size = ends[True]
        self.is_plain = isinstance(space, spaces.Box) and len(space.shape) == 1
        """Whether `row[:] = observation` is all there is to do."""

    def encode(self, observations: Any, rows: Array) -> None:
        """Write a batch of observations (as a vector env returns them) into `rows[N, D]`."""
        packed = self.dtype == np.uint8 and self.n_numbers > 0
        numbers = np.zeros((len(rows), self.n_numbers), np.float32) if packed else rows
        for leaf in self.leaves:
            block = rows if leaf.is_image else numbers
            try:
                value = observations
                for key in leaf.path:
                    value = value[key]
                _encode_leaf(leaf.space, np.asarray(value), block[:, leaf.start : leaf.stop])
            except EnvError:
                raise
            except Exception as error:  # a part that is missing, None, lists of different lengths
                raise _stranger(self.space, observations) from error
        if packed:
            rows[:, : self._bytes] = numbers.view(np.uint8)

    def encode_one(self, observation: Any, row: Array) -> None:
        """Write one observation into `row[D]`."""
        self.encode(_alone(observation), row[None])

    def numbers(self, rows: Array) -> Array:
        """The float32 numbers `[..., n_numbers]` of rows `[..., D]`."""
        if self.dtype == np.float32:
            return rows
        return np.ascontiguousarray(rows[..., : self._bytes]).view(np.float32)

    def with_numbers(self, rows: Array, numbers: Array) -> Array:
        """Rows of the same images beside other numbers."""
        if self.dtype == np.float32:
            return numbers
        changed = rows.copy()
        changed[..., : self._bytes] = np.ascontiguousarray(numbers, np.float32).view(np.uint8)
        return changed


def _alone(observation: Any) -> Any:
    """A batch of one observation."""
    if isinstance(observation, dict):
        return {key: _alone(value) for key, value in observation.items()}
    return observation[None] if isinstance(observation, np.ndarray) else [observation]


def _leaves(space: gym.Space, path: tuple[str, ...]) -> list[Leaf]:
    """The simple parts of a space, each as if it stood at 0."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in _leaves(part, (*path, key))]
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        size = int(np.prod(space.shape))
    elif isinstance(space, spaces.Discrete):
        size = int(space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        size = int(np.sum(space.nvec))
    else:
        place = f" at {'/'.join(path)!r}" if path else ""
        text = isinstance(space, spaces.Text)
        other = "; sokoban and frozen_lake show arrays with --env-kwargs observation=grid" if text else ""
        raise ConfigError(
            "PPO reads Box, Discrete, MultiDiscrete, MultiBinary and Dict observations, got "
            f"{'Text' if text else space}{place}; wrap the environment, for example with "
            f"gymnasium.wrappers.TransformObservation{other}"
        )
    return [Leaf(path, space, 0, size)] if size else []


def _encode_leaf(space: gym.Space, values: Array, rows: Array) -> None:
    n = len(rows)
    if values.dtype.kind == "O":
        values = np.asarray(values.tolist())
    if values.dtype.kind not in "biufO":  # text and dates would be made numbers
        raise _stranger(space, values)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        if values.size != rows.size:
            raise _stranger(space, values)
        found = values.reshape(n, -1)
        if rows.dtype == np.uint8 != found.dtype:
            with np.errstate(invalid="ignore"):
                rows[:] = found
            if (rows != found).any():  # a colour that is no byte
                raise _stranger(space, values)
        else:
            rows[:] = found
        return
    rows[:] = 0
    if isinstance(space, spaces.Discrete):
        chosen = _whole(space, values).reshape(-1) - int(space.start)
        if len(chosen) != n or (chosen < 0).any() or (chosen >= space.n).any():
            raise _stranger(space, values)
        rows[np.arange(n), chosen] = 1
    elif isinstance(space, spaces.MultiDiscrete):
        sizes = space.nvec.reshape(-1)
        if values.size != n * len(sizes):
            raise _stranger(space, values)
        parts = _whole(space, values).reshape(n, -1) - space.start.reshape(-1)
        if ((parts < 0) | (parts >= sizes)).any():  # another part's column
            raise _stranger(space, values)
        np.put_along_axis(rows, parts + np.cumsum(sizes) - sizes, 1, axis=1)


def _whole(space: gym.Space, values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if (whole != values).any():
        raise _stranger(space, values)
    return whole


def _stranger(space: gym.Space, values: Any) -> EnvError:
    found = values.tolist() if isinstance(values, np.ndarray) else values
    return EnvError(f"an observation must be of {space}, got {found!r:.200}")


class ActionRows:
    """What a policy's numbers mean to an action space.

    `groups` are the sizes of the choices to make (Discrete one group, MultiDiscrete several, MultiBinary
    pairs), or empty for Box, where an action is a point of `size` floats, clipped to the bounds on its way
    to the env.
    """

    def __init__(self, space: gym.Space) -> None:
        self.space = space
        self.groups: tuple[int, ...] = ()
        self._start: Any = 0
        if isinstance(space, spaces.Discrete):
            self.groups, self._start = (int(space.n),), int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self.groups = tuple(int(n) for n in space.nvec.reshape(-1))
            self._start = space.start.reshape(-1)
        elif isinstance(space, spaces.MultiBinary):
            self.groups = (2,) * int(np.prod(space.shape))
        elif not (isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)):
            raise ConfigError(
                f"PPO acts in Discrete, MultiDiscrete, MultiBinary and float Box spaces, got {space}; "
                "wrap the environment, for example with gymnasium.wrappers.TransformAction"
            )
        self.is_discrete = bool(self.groups)
        self.size = len(self.groups) if self.groups else int(np.prod(space.shape or (1,)))
        if not self.size:
            raise ConfigError(f"the action space {space} is empty; it must have something to choose")
        self.n_parameters = sum(self.groups) if self.groups else self.size
        self.dtype = np.dtype(np.int64 if self.groups else np.float32)

    def to_env(self, actions: Array) -> list[Any]:
        """The env's own actions for rows `[N, size]`."""
        space = self.space
        if isinstance(space, spaces.Discrete):
            # NumPy integers on purpose: Gymnasium checks them faster than Python's.
            chosen = actions[:, 0] + self._start if self._start else actions[:, 0]
            return list(chosen.astype(space.dtype, copy=False))
        return list(self.to_batch(actions))

    def to_batch(self, actions: Array) -> Array:
        """The batched action of a vector env for rows `[N, size]`."""
        space, n = self.space, len(actions)
        if isinstance(space, spaces.Box):
            clipped = np.clip(actions.reshape(n, *space.shape), space.low, space.high)
            return np.asarray(clipped, space.dtype)
        if isinstance(space, spaces.Discrete):
            return np.asarray(actions[:, 0] + self._start, space.dtype)
        return np.asarray((actions + self._start).reshape(n, *(space.shape or ())), space.dtype)

    def forbidden(self, masks: Array) -> Iterator[tuple[int, int]]:
        """(row, group) of each choice that `masks[N, sum(groups)]` leaves without any option."""
        start = 0
        for group, size in enumerate(self.groups):
            empty = ~masks[:, start : start + size].any(axis=1)
            yield from ((int(row), group) for row in np.flatnonzero(empty))
            start += size
