"""Gymnasium spaces as flat rows: what a policy network reads, and what its outputs mean to the env.

Observations become one row of numbers each (float32; uint8 when the space is an image), actions are discrete
(one integer per group) or continuous (one float per dimension).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.core.errors import ConfigError

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Leaf:
    """One simple part of an observation space and its place in the row."""

    path: tuple[str, ...]  # keys into nested dicts; empty for a space that is not a dict
    space: gym.Space
    start: int
    stop: int

    @property
    def is_image(self) -> bool:
        """Whether this part is a uint8 picture."""
        return (
            isinstance(self.space, spaces.Box) and self.space.dtype == np.uint8 and len(self.space.shape) == 3
        )


class ObservationRows:
    """Turns observations of a space into rows `[D]` of `dtype`.

    Box is flattened, Discrete and MultiDiscrete are one-hot, MultiBinary is 0/1, Dict is its parts one
    after the other. Anything else is a `ConfigError`.
    """

    def __init__(self, space: gym.Space) -> None:
        self.space = space
        self.leaves = _leaves(space, (), 0)
        self.size = self.leaves[-1].stop if self.leaves else 0
        if self.size == 0:
            raise ConfigError(f"the observation space {space} is empty")
        only_images = all(leaf.is_image for leaf in self.leaves)
        self.dtype = np.dtype(np.uint8 if only_images else np.float32)
        self.is_plain = isinstance(space, spaces.Box) and len(space.shape) == 1
        """Whether `row[:] = observation` is all there is to do."""

    def encode(self, observations: Any, rows: Array) -> None:
        """Write a batch of observations (as a vector env returns them) into `rows[N, D]`."""
        for leaf in self.leaves:
            value = observations
            for key in leaf.path:
                value = value[key]
            _encode_leaf(leaf.space, np.asarray(value), rows[:, leaf.start : leaf.stop])

    def encode_one(self, observation: Any, row: Array) -> None:
        """Write one observation into `row[D]`."""
        if self.is_plain:
            row[:] = observation
            return
        for leaf in self.leaves:
            value = observation
            for key in leaf.path:
                value = value[key]
            _encode_leaf(leaf.space, np.asarray(value)[None], row[None, leaf.start : leaf.stop])


def _leaves(space: gym.Space, path: tuple[str, ...], start: int) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        found: list[Leaf] = []
        for key, part in space.spaces.items():
            found += _leaves(part, (*path, key), found[-1].stop if found else start)
        return found
    if isinstance(space, spaces.Box):
        size = int(np.prod(space.shape))
    elif isinstance(space, spaces.Discrete):
        size = int(space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        size = int(np.sum(space.nvec))
    elif isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
    else:
        place = f" at {'/'.join(path)!r}" if path else ""
        raise ConfigError(
            f"PPO reads Box, Discrete, MultiDiscrete, MultiBinary and Dict observations, got {space}{place}; "
            "wrap the environment, for example with gymnasium.wrappers.TransformObservation"
        )
    return [Leaf(path, space, start, start + size)]


def _encode_leaf(space: gym.Space, values: Array, rows: Array) -> None:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        rows[:] = values.reshape(len(rows), -1)
        return
    rows[:] = 0
    if isinstance(space, spaces.Discrete):
        rows[np.arange(len(rows)), values.reshape(-1).astype(np.int64) - int(space.start)] = 1
    elif isinstance(space, spaces.MultiDiscrete):
        nvec = space.nvec.reshape(-1)
        offsets = np.concatenate([[0], np.cumsum(nvec)[:-1]]) - space.start.reshape(-1)
        columns = values.reshape(len(rows), -1).astype(np.int64) + offsets
        np.put_along_axis(rows, columns, 1, axis=1)


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
        self.n_parameters = sum(self.groups) if self.groups else self.size
        self.dtype = np.dtype(np.int64 if self.groups else np.float32)

    def to_env(self, actions: Array) -> list[Any]:
        """The env's own actions for rows `[N, size]`."""
        space = self.space
        if isinstance(space, spaces.Discrete):
            # NumPy integers on purpose: Gymnasium checks them faster than Python's.
            return list(actions[:, 0] + self._start if self._start else actions[:, 0])
        return list(self.to_batch(actions))

    def to_batch(self, actions: Array) -> Array:
        """The batched action of a vector env for rows `[N, size]`."""
        space, n = self.space, len(actions)
        if isinstance(space, spaces.Box):
            clipped = np.clip(actions.reshape(n, *space.shape), space.low, space.high)
            return np.asarray(clipped, space.dtype)
        if isinstance(space, spaces.Discrete):
            return np.asarray(actions[:, 0] + self._start)
        return np.asarray((actions + self._start).reshape(n, *(space.shape or ())), space.dtype)

    def forbidden(self, masks: Array) -> Iterator[tuple[int, int]]:
        """(row, group) of each choice that `masks[N, sum(groups)]` leaves without any option."""
        start = 0
        for group, size in enumerate(self.groups):
            empty = ~masks[:, start : start + size].any(axis=1)
            yield from ((int(row), group) for row in np.flatnonzero(empty))
            start += size
