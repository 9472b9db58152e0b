"""Worlds of many lanes stepped together, whose states can be saved and restored.

A `Bank` is a set of world states as plain arrays, the first axis being the state. New worlds, start states of
deep skills and checkpoints are all banks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.skills.spec import Features

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bank:
    """World states; all arrays share their first axis."""

    arrays: dict[str, NDArray]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, rows: Ints) -> Bank:
        """The states at `rows`, copied."""
        return Bank({key: array[rows] for key, array in self.arrays.items()})

    @staticmethod
    def join(banks: Sequence[Bank]) -> Bank:
        """All states of several banks."""
        return Bank({key: np.concatenate([bank.arrays[key] for bank in banks]) for key in banks[0].arrays})


class World(Protocol):
    """A batch of `lanes` worlds."""

    lanes: int

    @property
    def features(self) -> Features:
        """What the world counts."""

    @property
    def n_actions(self) -> int:
        """Actions are 0 up to this."""

    @property
    def obs_size(self) -> int:
        """Numbers in an observation."""

    @property
    def action_names(self) -> Sequence[str]:
        """A word for each action."""

    @property
    def fresh_is_cheap(self) -> bool:
        """Whether making new worlds costs little against stepping them."""

    @property
    def moves(self) -> Sequence[int]:
        """Actions that only walk and turn."""

    @property
    def wait(self) -> int:
        """The action that does nothing."""

    @property
    def feature_columns(self) -> Mapping[str, int]:
        """Where a feature stands in an observation, of those that do."""

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """`count` new worlds."""

    def load(self, bank: Bank, rows: Ints, mask: Bools) -> None:
        """Put state `rows[i]` of `bank` into lane `i` where `mask[i]`."""

    def save(self) -> Bank:
        """The states of all lanes."""

    def observe(self) -> Floats:
        """`[lanes, obs_size]`."""

    def values(self) -> Floats:
        """`[lanes, features]`, the columns of `features.names`."""

    def step(self, actions: Ints, rng: np.random.Generator) -> Bools:
        """Act in every lane; True where the agent died."""
