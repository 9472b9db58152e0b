"""The worlds by name; what is known of one without making it stands in its class."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from shoal.core.errors import ConfigError, missing_extra, unknown_name
from shoal.core.seeding import stream
from shoal.skills.spec import Features
from shoal.skills.worlds.world import Bank, World

BUILT_IN = {
    "crafting": "shoal.skills.worlds.crafting:CraftingWorld",
    "craftax-classic": "shoal.skills.worlds.craftax:ClassicWorld",
    "craftax": "shoal.skills.worlds.craftax:CraftaxWorld",
}
_OTHER_NAMES = {"Craftax-Classic-Symbolic-v1": "craftax-classic", "Craftax-Symbolic-v1": "craftax"}


def world_of(name: str) -> str:
    """A world's name here, also from its name in Craftax; `module:Class` is a name too."""
    name = _OTHER_NAMES.get(name, name)
    world_class(name)
    return name


def world_class(name: str) -> Any:
    """The class of a world that comes with shoal, or that `module:Class` names.

    Such a class is made with the number of lanes and has `features`. It may have `training` (values of `TrainingConfig`
    that suit it), `most_lanes` (states that are worth stepping together), `picture(bank)` (`[height, width, 3]` of the
    first state) and `extra` (the package that it needs). `shoal.testing.check_world` examines it.
    """
    if ":" not in name and name not in BUILT_IN:
        raise unknown_name("world", name, BUILT_IN)
    module, _, attribute = BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no world {name!r}: {error}") from error
    if not isinstance(getattr(found, "features", None), Features):
        raise ConfigError(f"{name!r} has no features: a world's class needs `features = Features(…)`")
    return found


def check_installed(name: str) -> None:
    """Raise a `MissingExtraError` where a world cannot be made, or trained in: each launch would end with it."""
    if importlib.util.find_spec("safetensors") is None:
        raise missing_extra("training skills", "train")
    extra = getattr(world_class(name), "extra", None)
    if extra is not None and importlib.util.find_spec(extra) is None:
        raise missing_extra(f"the world {name!r}", extra)


def make_world(name: str, lanes: int) -> World:
    """A world by name; Craftax needs the extra "craftax"."""
    made: World = world_class(name)(lanes)
    return made


def batch_lanes(name: str, wanted: int) -> int:
    """How many lanes to make for `wanted` states: no more than are worth stepping together."""
    return min(wanted, getattr(world_class(name), "most_lanes", None) or wanted)


def world_features(name: str) -> Features:
    """The features of a world, without making one (Craftax is not imported)."""
    features: Features = world_class(name).features
    return features


def fresh_worlds(world: World, count: int, seed: int, *names: str | int) -> Bank:
    """`count` new worlds of the stream that `names` name."""
    return world.fresh(count, stream(seed, "worlds", *names))
