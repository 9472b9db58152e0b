"""What the trainer asks of a world: many lanes stepped together, states that can be saved and put back.

A `Bank` is a set of world states as plain arrays, the first axis being the state. New worlds, start states of
deep skills and checkpoints are all banks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import unknown_name
from shoal.skills.learning.spec import Features

if TYPE_CHECKING:
    from shoal.skills.learning.trainer import TrainingConfig

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


WORLDS = ("crafting", "craftax-classic", "craftax")
_OTHER_NAMES = {"Craftax-Classic-Symbolic-v1": "craftax-classic", "Craftax-Symbolic-v1": "craftax"}


def world_of(name: str) -> str:
    """A world's name here, also from its name in Craftax."""
    name = _OTHER_NAMES.get(name, name)
    if name not in WORLDS:
        raise unknown_name("world", name, WORLDS)
    return name


def default_config(world: str) -> TrainingConfig:
    """Training settings that suit a world."""
    from shoal.skills.learning.trainer import TrainingConfig

    if world == "crafting":
        return TrainingConfig()
    from shoal.skills.learning.craftax import DEFAULTS

    return TrainingConfig(**DEFAULTS)


def make_world(name: str, lanes: int) -> World:
    """A world by name; Craftax needs the extra "craftax"."""
    if name == "crafting":
        from shoal.skills.learning.crafting import CraftingWorld

        return CraftingWorld(lanes)
    if name in ("craftax-classic", "craftax"):
        from shoal.skills.learning.craftax import CraftaxWorld

        return CraftaxWorld(name, lanes)
    raise unknown_name("world", name, WORLDS)


def batch_lanes(name: str, wanted: int) -> int:
    """How many lanes to make for `wanted` states: for Craftax no more than one compiled program serves."""
    return wanted if name == "crafting" else min(wanted, 64)


def world_features(name: str) -> Features:
    """The features of a world, without making one (Craftax is not imported)."""
    if name == "crafting":
        from shoal.skills.learning.crafting import FEATURES

        return FEATURES
    if name in ("craftax-classic", "craftax"):
        from shoal.skills.learning.craftax import features_of

        return features_of(name)
    raise unknown_name("world", name, WORLDS)
