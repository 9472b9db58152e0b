"""Craftax-Classic and Craftax (JAX) as worlds for skills: the same specs and the same code as the crafting world.

The states live as NumPy arrays between jitted steps, so a bank or a checkpoint is a copy and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import missing_extra
from shoal.skills.learning.spec import Features
from shoal.skills.learning.worlds import Bank, Bools, Floats, Ints

ENV_NAMES = {"craftax-classic": "Craftax-Classic-Symbolic-v1", "craftax": "Craftax-Symbolic-v1"}
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_envs": 64,
        "num_steps": 32,
        "update_epochs": 2,
        "lr": 1e-3,
        "gamma": 0.98,
        "layer_size": 128,
        "anneal_frames": 4e5,
        "success_state_rate": 0.95,
        "patience_frames": 8e4,
        "evaluation_episodes": 128,
        "bank_worlds": 256,
        "stroll": 8,
        "evaluate_every": 8,
        "evaluate_from": 0.88,
    }
)  # fmt: skip
_TOOLS = ("wood_pickaxe", "stone_pickaxe", "iron_pickaxe", "wood_sword", "stone_sword", "iron_sword")
_CLASSIC = ("wood", "stone", "coal", "iron", "diamond", "sapling")
_FULL = (
    "wood", "stone", "coal", "iron", "diamond", "sapphire", "ruby", "sapling", "torches", "arrows", "books",
)  # fmt: skip
_LEVELS = ("pickaxe", "sword")  # in Craftax, how good the tool is: 0 to 4
_PLACES = ("near_table", "near_furnace")
_NEEDS = ("food", "drink", "energy")
_BLOCKS = ("tree", "stone", "coal", "iron", "water")  # of Classic: what `toward_tree` and its like are about
_MOBS = {"cow": 3, "zombie": 5}  # of Classic, and their health
_FARTHEST = 9
CHANNELS, _FIRST_KIND = 21, 2
"""Of a cell in sight in Classic: 17 kinds of blocks, of which the first two are none, and 4 of mobs."""
COMPASS = CHANNELS + 5 * (CHANNELS - _FIRST_KIND)
"""Numbers that stand behind an observation of Classic, see `_compass`."""
_SENSES = ("health", "calm", *(f"toward_{name}" for name in (*_BLOCKS, *_MOBS)))
CLASSIC_ACTIONS = (
    "noop", "left", "right", "up", "down", "do", "sleep", "place_stone", "place_table", "place_furnace", "place_plant",
    "make_wood_pickaxe", "make_stone_pickaxe", "make_iron_pickaxe", "make_wood_sword", "make_stone_sword",
    "make_iron_sword",
)  # fmt: skip
CLASSIC_ACHIEVEMENTS = (
    "collect_wood", "place_table", "eat_cow", "collect_sapling", "collect_drink", "make_wood_pickaxe",
    "make_wood_sword", "place_plant", "defeat_zombie", "collect_stone", "place_stone", "eat_plant",
    "defeat_skeleton", "make_stone_pickaxe", "make_stone_sword", "wake_up", "place_furnace", "collect_coal",
    "collect_iron", "collect_diamond", "make_iron_pickaxe", "make_iron_sword",
)  # fmt: skip
_MORE_ACHIEVEMENTS = (
    "make_arrow", "make_torch", "place_torch", "make_diamond_sword", "make_iron_armour", "make_diamond_armour",
    "enter_gnomish_mines", "enter_dungeon",
)  # fmt: skip


def features_of(name: str) -> Features:
    """The features of "craftax-classic" or "craftax": what is held, achievements of the overworld, where one stands.

    Classic has needs and senses too: `calm` is twice the distance of the nearest zombie in sight, at most 9.
    `toward_tree` is 8 beside a tree, one less a step away, 0 where none is in sight; towards a cow or a zombie it also
    grows with each blow. They are for rewards and upkeep: an expert sees the observation alone, and what `_compass`
    reads from it.
    """
    if name == "craftax-classic":
        return Features(
            name, (*_CLASSIC, *_TOOLS, *CLASSIC_ACHIEVEMENTS, *_PLACES, *_NEEDS, *_SENSES),
            dict.fromkeys((*_CLASSIC, *_NEEDS, *_SENSES), _FARTHEST), frozenset(_CLASSIC), frozenset(_PLACES),
            CLASSIC_ACTIONS,
        )  # fmt: skip
    return Features(
        name,
        (*_FULL, *_LEVELS, *CLASSIC_ACHIEVEMENTS, *_MORE_ACHIEVEMENTS),
        {**dict.fromkeys(_FULL, 99), **dict.fromkeys(_LEVELS, 4)},
        frozenset(_FULL),
    )


class _Programs(NamedTuple):
    """What all worlds of one name share, so that a process traces and loads each program once."""

    jax: Any
    env: Any
    read: Any
    fresh: Any
    look: Any
    step: Any


@functools.cache
def _programs(name: str) -> _Programs:
    try:
        import jax
        from craftax.craftax_env import make_craftax_env_from_name
    except ImportError as error:
        raise missing_extra(f"the world {name!r}", "craftax") from error
    env = make_craftax_env_from_name(ENV_NAMES[name], auto_reset=False)
    params = env.default_params
    read = _reader(features_of(name), name)
    see = _compass() if name == "craftax-classic" else lambda observation: observation

    def step(key: Any, state: Any, action: Any) -> Any:
        observation, state, _, done, _ = env.step(key, state, action, params)
        return see(observation), state, done, read(state)

    return _Programs(
        jax,
        env,
        read,
        jax.jit(jax.vmap(lambda key: env.reset(key, params)[1])),
        jax.jit(jax.vmap(lambda state: (see(env.get_obs(state)), read(state)))),
        jax.jit(jax.vmap(step)),
    )


class CraftaxWorld:
    """`lanes` Craftax worlds; see `shoal.skills.learning.worlds.World`."""

    fresh_is_cheap = False
    moves = (1, 2, 3, 4)
    wait = 0

    def __init__(self, name: str, lanes: int) -> None:
        programs = _programs(name)
        self._jax, env, params = programs.jax, programs.env, programs.env.default_params
        self._read, self._fresh, self._look, self._step = (
            programs.read, programs.fresh, programs.look, programs.step,
        )  # fmt: skip
        self.name, self.lanes = name, lanes
        self.features = features_of(name)
        self.n_actions = int(env.action_space(params).n)
        seen = int(env.observation_space(params).shape[0])
        self.obs_size = seen + (COMPASS if name == "craftax-classic" else 0)
        self.former_sizes = (seen,) if name == "craftax-classic" else ()
        held = [*_CLASSIC, *_TOOLS] if name == "craftax-classic" else [*_FULL, *_LEVELS]
        # The inventory stands in front of what ends an observation: 10 numbers in Classic, 38 in Craftax
        # (of whose 16 numbers of inventory the first 13 are features).
        first = seen - (22 if name == "craftax-classic" else 51)
        self.feature_columns = {feature: first + number for number, feature in enumerate(held)}
        self.action_names = _action_names(name)
        self.mirrors = _mirrors(self.action_names, seen) if name == "craftax-classic" else ()
        self._leaves: list[NDArray] = []
        self._observations: Floats = np.zeros((lanes, self.obs_size), np.float32)
        self._values: Floats = np.zeros((lanes, len(self.features.names)), np.float32)

    def _keys(self, count: int, rng: np.random.Generator) -> NDArray[np.uint32]:
        return rng.integers(0, 2**32, (count, 2), dtype=np.uint32)

    def _tree(self) -> Any:
        return self._jax.tree.unflatten(self._structure, self._leaves)

    @functools.cached_property
    def _structure(self) -> Any:
        shapes = self._jax.eval_shape(self._fresh, np.zeros((self.lanes, 2), np.uint32))
        return self._jax.tree.structure(shapes)

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """New worlds, made `lanes` at a time so that one compiled program serves any number."""
        parts = []
        for first in range(0, count, self.lanes):
            state = self._fresh(self._keys(self.lanes, rng))
            leaves = [np.asarray(leaf) for leaf in self._jax.tree.leaves(state)]
            parts.append(_bank(leaves).take(np.arange(min(self.lanes, count - first))))
        return Bank.join(parts)

    def load(self, bank: Bank, rows: Ints, mask: Bools) -> None:
        """Put state `rows[i]` of `bank` into lane `i` where `mask[i]`."""
        if not self._leaves:
            self._leaves = [bank.arrays[key][rows] for key in sorted(bank.arrays)]
        chosen = rows[mask]
        for number, key in enumerate(sorted(bank.arrays)):
            leaf = np.array(self._leaves[number])
            leaf[mask] = bank.arrays[key][chosen]
            self._leaves[number] = leaf
        observations, values = self._look(self._tree())
        self._observations = np.asarray(observations, np.float32)
        self._values = np.asarray(values, np.float32)

    def save(self) -> Bank:
        """The states of all lanes, copied."""
        return _bank([np.array(leaf) for leaf in self._leaves])

    def observe(self) -> Floats:
        """`[lanes, obs_size]`."""
        return self._observations

    def values(self) -> Floats:
        """`[lanes, features]`, copied."""
        return self._values.copy()

    def step(self, actions: Ints, rng: np.random.Generator) -> Bools:
        """Act in every lane; True where the agent died."""
        keys = self._keys(self.lanes, rng)
        observations, state, died, values = self._step(keys, self._tree(), actions.astype(np.int32))
        self._leaves = [np.asarray(leaf) for leaf in self._jax.tree.leaves(state)]
        self._observations = np.asarray(observations, np.float32)
        self._values = np.asarray(values, np.float32)
        return np.asarray(died)

    def state_of(self, bank: Bank) -> Any:
        """The first state of a bank as Craftax knows it."""
        leaves = [bank.arrays[key][0] for key in sorted(bank.arrays)]
        return self._jax.tree.unflatten(self._structure, leaves)


def picture(name: str, bank: Bank) -> NDArray[np.uint8]:
    """`[height, width, 3]` of the first state of a bank, as Craftax draws it."""
    import jax

    if name not in _PAINTERS:
        world = CraftaxWorld(name, 1)
        if name == "craftax-classic":
            from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
        else:
            from craftax.craftax.renderer import make_craftax_pixel_renderer
        _PAINTERS[name] = (world, jax.jit(make_craftax_pixel_renderer(16)))
    world, paint = _PAINTERS[name]
    pixels = np.asarray(paint(world.state_of(bank)), np.float32)
    return np.clip(pixels * (255 if pixels.max() <= 1.0 else 1), 0, 255).astype(np.uint8)


_PAINTERS: dict[str, tuple[CraftaxWorld, Any]] = {}


def _bank(leaves: list[NDArray]) -> Bank:
    return Bank({f"{number:03d}": leaf for number, leaf in enumerate(leaves)})


def _action_names(name: str) -> tuple[str, ...]:
    if name == "craftax-classic":
        from craftax.craftax_classic.constants import Action
    else:
        from craftax.craftax.constants import Action
    return tuple(action.name.lower() for action in Action)


def _reader(features: Features, name: str) -> Any:
    """A function from a Craftax state to the values of the features."""
    import jax.numpy as jnp

    if name == "craftax-classic":
        from craftax.craftax_classic.constants import Achievement, BlockType
        from craftax.craftax_classic.game_logic import is_near_block
    else:
        from craftax.craftax.constants import Achievement, BlockType
        from craftax.craftax.game_logic import is_near_block
    blocks = {"near_table": BlockType.CRAFTING_TABLE.value, "near_furnace": BlockType.FURNACE.value}
    numbers = {achievement.name.lower(): achievement.value for achievement in Achievement}

    senses = _senses() if name == "craftax-classic" else lambda state: {}

    def value(state: Any, feature: str) -> Any:
        if feature in blocks:
            return is_near_block(state, blocks[feature])
        if feature in _NEEDS:
            return getattr(state, f"player_{feature}")
        return (
            state.achievements[numbers[feature]] if feature in numbers else getattr(state.inventory, feature)
        )

    def read(state: Any) -> Any:
        sensed = senses(state)
        values = [
            sensed[feature] if feature in sensed else value(state, feature) for feature in features.names
        ]
        return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])

    return read


def _compass() -> Any:
    """A function from an observation of Craftax-Classic to the same with `COMPASS` numbers behind it.

    They say no more than the 7 x 9 cells in front do: what the next cell in the direction that one looks in holds, and
    of each kind of block and mob the way to the nearest: left, right, up, down (0 or 1), and how near it is (1: here).
    """
    import jax.numpy as jnp
    from craftax.craftax_classic.constants import OBS_DIM

    half = np.array(OBS_DIM) // 2
    down, right = (np.indices(OBS_DIM) - half[:, None, None]).reshape(2, -1)
    away = np.abs(down) + np.abs(right)
    middle = int(np.flatnonzero(away == 0)[0])
    far = np.where(away > 0, away, _FARTHEST)[:, None]  # what one stands on is not what one goes to
    ways = np.stack([right < 0, right > 0, down < 0, down > 0, 1 - away / _FARTHEST], 1).astype(np.float32)
    ahead = middle + np.array([-1, 1, -OBS_DIM[1], OBS_DIM[1]])

    def see(observation: Any) -> Any:
        cells = observation[: len(away) * CHANNELS].reshape(len(away), CHANNELS)
        looks = observation[-6:-2]
        shown = cells[:, _FIRST_KIND:]
        away_from = jnp.where(shown > 0, far, 2 * _FARTHEST)
        nearest = shown * (away_from == away_from.min(0))
        found = (nearest[:, :, None] * jnp.asarray(ways)[:, None, :]).max(0)
        return jnp.concatenate([observation, looks @ cells[ahead], found.reshape(-1)])

    return see


def _mirrors(action_names: tuple[str, ...], seen: int) -> tuple[tuple[Ints, Ints], ...]:
    """Of Classic left for right, up for down, and both: what observation column and what action stands for each."""
    from craftax.craftax_classic.constants import OBS_DIM

    cells = np.arange(seen - 22).reshape(*OBS_DIM, CHANNELS)
    found = []
    for flipped in ((1,), (0,), (0, 1)):
        swap = np.arange(4)  # left, right, up, down
        for axis in flipped:
            swap[[2 - 2 * axis, 3 - 2 * axis]] = swap[[3 - 2 * axis, 2 - 2 * axis]]
        ways = seen + CHANNELS + np.arange(COMPASS - CHANNELS).reshape(-1, 5)
        columns = [
            np.flip(cells, flipped).ravel(), np.arange(seen - 22, seen - 6), seen - 6 + swap,
            np.arange(seen - 2, seen + CHANNELS), ways[:, [*swap, 4]].ravel(),
        ]  # fmt: skip
        actions = np.arange(len(action_names))
        actions[1:5] = actions[1 + swap]
        found.append((np.concatenate(columns), actions))
    return tuple(found)


def _senses() -> Any:
    """A function from a state of Craftax-Classic to how near things in sight are."""
    import jax
    import jax.numpy as jnp
    from craftax.craftax_classic.constants import OBS_DIM, BlockType

    half = np.array(OBS_DIM) // 2
    steps = np.abs(np.indices(OBS_DIM) - half[:, None, None]).sum(0)  # [7, 9] from where one stands
    edge = int(half.max())

    def senses(state: Any) -> dict[str, Any]:
        ground = jnp.pad(state.map, edge, constant_values=BlockType.OUT_OF_BOUNDS.value)
        view = jax.lax.dynamic_slice(ground, state.player_position + edge - half, OBS_DIM)
        found: dict[str, Any] = {"health": state.player_health}
        for name in _BLOCKS:
            found[f"toward_{name}"] = jnp.max((view == BlockType[name.upper()].value) * (_FARTHEST - steps))
        for name, health in _MOBS.items():
            mobs = getattr(state, f"{name}s")
            away = jnp.abs(mobs.position - state.player_position)
            seen = mobs.mask & (away <= half).all(-1)
            near = _FARTHEST - away.sum(-1)
            found[f"toward_{name}"] = jnp.max(seen * (near + health - mobs.health))
            if name == "zombie":
                found["calm"] = jnp.minimum(2 * (_FARTHEST - jnp.max(seen * near)), _FARTHEST)
        return found

    return senses
