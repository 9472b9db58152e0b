"""What the trainer asks of a world: many lanes stepped together, states that can be saved and put back.

A `Bank` is a set of world states as plain arrays, the first axis being the state. New worlds, start states of
deep skills and checkpoints are all banks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import Registry
from shoal.core.seeding import stream
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


def check_inputs(world: World, inputs: int, skill: str) -> None:
    """Raise a `DataError` for an expert that was made for other observations than a world's, or than it once had.

    A world may put numbers behind its observations and tell in `former_sizes` how many there were: an expert made for
    so many does not see what came later.
    """
    sizes = (world.obs_size, *getattr(world, "former_sizes", ()))
    if inputs not in sizes:
        raise DataError(
            f"the expert of {skill!r} was made for {inputs} numbers in an observation; this world shows "
            f"{' or '.join(map(str, sizes))}. Train the skill again, or use the world that it was trained in."
        )


@dataclass(frozen=True)
class WorldKind:
    """A world under its name: what is known of it without making one, and how it is made."""

    make: Callable[[int], World]  # of so many lanes
    features: Callable[[], Features]
    training: Mapping[str, Any] = field(default_factory=dict)  # settings that suit it, see `TrainingConfig`
    most_lanes: int | None = None  # states that are worth stepping together; None: any number
    picture: Callable[[Bank], NDArray[np.uint8]] | None = None  # `[height, width, 3]` of the first state


def _crafting() -> WorldKind:
    from shoal.skills.learning import crafting

    return WorldKind(
        crafting.CraftingWorld, lambda: crafting.FEATURES, {"practice_horizon": 150}, picture=crafting.picture
    )


def _craftax(name: str) -> WorldKind:
    from shoal.skills.learning import craftax

    return WorldKind(
        lambda lanes: craftax.CraftaxWorld(name, lanes), lambda: craftax.features_of(name), craftax.DEFAULTS, 64,
        lambda bank: craftax.picture(name, bank),
    )  # fmt: skip


worlds: Registry[Callable[[], WorldKind]] = Registry("world")
worlds.register("crafting", _crafting)
worlds.register("craftax-classic", lambda: _craftax("craftax-classic"))
worlds.register("craftax", lambda: _craftax("craftax"))
_OTHER_NAMES = {"Craftax-Classic-Symbolic-v1": "craftax-classic", "Craftax-Symbolic-v1": "craftax"}


def world_of(name: str) -> str:
    """A world's name here, also from its name in Craftax; `module:Class` is a name too."""
    name = _OTHER_NAMES.get(name, name)
    world_kind(name)
    return name


def world_kind(name: str) -> WorldKind:
    """A registered world, or the class that `module:Class` names.

    Such a class is made with the number of lanes and has `features`; it may have `training`, `most_lanes` and
    `picture` as `WorldKind` has them. `shoal.testing.check_world` examines it.
    """
    if ":" not in name:
        return worlds[name]()
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no world {name!r}: {error}") from error
    if not isinstance(getattr(made, "features", None), Features):
        raise ConfigError(f"{name!r} has no features: a world's class needs `features = Features(…)`")
    picture = getattr(made, "picture", None)
    return WorldKind(
        made, lambda: made.features, getattr(made, "training", {}), getattr(made, "most_lanes", None), picture
    )


def default_config(world: str) -> TrainingConfig:
    """Training settings that suit a world."""
    from shoal.skills.learning.trainer import TrainingConfig

    return TrainingConfig(**world_kind(world).training)


def make_world(name: str, lanes: int) -> World:
    """A world by name; Craftax needs the extra "craftax"."""
    return world_kind(name).make(lanes)


def batch_lanes(name: str, wanted: int) -> int:
    """How many lanes to make for `wanted` states: no more than are worth stepping together."""
    most = world_kind(name).most_lanes
    return wanted if most is None else min(wanted, most)


def world_features(name: str) -> Features:
    """The features of a world, without making one (Craftax is not imported)."""
    return world_kind(name).features()


def fresh_worlds(world: World, count: int, seed: int, *names: str | int) -> Bank:
    """`count` new worlds of the stream that `names` name."""
    return world.fresh(count, stream(seed, "worlds", *names))
