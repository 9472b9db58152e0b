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

from shoal.core.errors import needs_extra
from shoal.skills.spec import Features
from shoal.skills.worlds.world import Bank, Bools, Floats, Ints

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
_BLOCKS = ("tree", "stone", "coal", "iron", "water")  # what `toward_tree` and its like are about
_MORE_BLOCKS = ("path", "chest", "ladder_down")  # in Craftax, too
_MOBS = {"cow": 3, "zombie": 5}  # and their health
_FIRST_KIND = 2  # of what a cell may hold, the first two are nothing to go to
_KINDS = (
    "light", "out_of_bounds", "grass", "water", "stone", "tree", "path", "coal", "iron", "diamond", "crafting_table",
    "furnace", "sand", "lava", "plant", "ripe_plant", "wall", "darkness", "chest", "torch", "ladder_down", "ladder_up",
    "melee", "passive", "ranged", "projectile",
)  # fmt: skip
"""What the cells of the first two floors of Craftax may hold; a cell of Craftax itself tells 83 things apart."""
_AS_GOOD_AS = {
    "fountain": "water", "stalagmite": "stone", "fire_tree": "tree", "ice_shrub": "tree", "wall_moss": "wall",
}  # fmt: skip
_SHOWN = (7, 9)
"""Rows and columns of cells that an expert sees; the compass of Craftax looks as far as Craftax shows."""


class _View(NamedTuple):
    """How an observation is laid out: cells row by row, what each may hold, and behind them hands and senses."""

    rows: int
    columns: int
    channels: int  # of a cell, as an expert sees it
    behind: int
    looks: int  # the first of the four numbers of those behind that tell left, right, up, down

    @property
    def farthest(self) -> int:
        """One step farther than the longest way to what is in sight."""
        return max(self.rows // 2 + self.columns // 2 + 1, 9)

    @property
    def compass(self) -> int:
        """Numbers that `_compass` puts behind an observation."""
        return self.channels + 5 * (self.channels - _FIRST_KIND)

    @property
    def cells(self) -> int:
        """Numbers of the cells that an expert sees."""
        return _SHOWN[0] * _SHOWN[1] * self.channels


VIEWS = {"craftax-classic": _View(7, 9, 21, 22, 16), "craftax": _View(9, 11, len(_KINDS), 51, 31)}
_SENSES = {
    "craftax-classic": ("health", "calm", *(f"toward_{name}" for name in (*_BLOCKS, *_MOBS))),
    "craftax": ("health", "calm", *(f"toward_{name}" for name in (*_BLOCKS, *_MORE_BLOCKS, *_MOBS))),
}
CLASSIC_ACTIONS = (
    "noop", "left", "right", "up", "down", "do", "sleep", "place_stone", "place_table", "place_furnace", "place_plant",
    "make_wood_pickaxe", "make_stone_pickaxe", "make_iron_pickaxe", "make_wood_sword", "make_stone_sword",
    "make_iron_sword",
)  # fmt: skip
ACTIONS = (
    *CLASSIC_ACTIONS, "rest", "descend", "ascend", "make_diamond_pickaxe", "make_diamond_sword", "make_iron_armour",
    "make_diamond_armour", "shoot_arrow", "make_arrow", "cast_fireball", "cast_iceball", "place_torch",
    "drink_potion_red", "drink_potion_green", "drink_potion_blue", "drink_potion_pink", "drink_potion_cyan",
    "drink_potion_yellow", "read_book", "enchant_sword", "enchant_armour", "make_torch", "level_up_dexterity",
    "level_up_strength", "level_up_intelligence", "enchant_bow",
)  # fmt: skip
CLASSIC_ACHIEVEMENTS = (
    "collect_wood", "place_table", "eat_cow", "collect_sapling", "collect_drink", "make_wood_pickaxe",
    "make_wood_sword", "place_plant", "defeat_zombie", "collect_stone", "place_stone", "eat_plant",
    "defeat_skeleton", "make_stone_pickaxe", "make_stone_sword", "wake_up", "place_furnace", "collect_coal",
    "collect_iron", "collect_diamond", "make_iron_pickaxe", "make_iron_sword",
)  # fmt: skip
ACHIEVEMENTS = (
    *CLASSIC_ACHIEVEMENTS, "make_arrow", "make_torch", "place_torch", "make_diamond_sword", "make_iron_armour",
    "make_diamond_armour", "enter_gnomish_mines", "enter_dungeon", "enter_sewers", "enter_vault", "enter_troll_mines",
    "enter_fire_realm", "enter_ice_realm", "enter_graveyard", "defeat_gnome_warrior", "defeat_gnome_archer",
    "defeat_orc_solider", "defeat_orc_mage", "defeat_lizard", "defeat_kobold", "defeat_troll", "defeat_deep_thing",
    "defeat_pigman", "defeat_fire_elemental", "defeat_frost_troll", "defeat_ice_elemental", "damage_necromancer",
    "defeat_necromancer", "eat_bat", "eat_snail", "find_bow", "fire_bow", "collect_sapphire", "learn_fireball",
    "cast_fireball", "learn_iceball", "cast_iceball", "collect_ruby", "make_diamond_pickaxe", "open_chest",
    "drink_potion", "enchant_sword", "enchant_armour", "defeat_knight", "defeat_archer",
)  # fmt: skip
"""Of Craftax, in its order and its spelling."""


def features_of(name: str) -> Features:
    """The features of "craftax-classic" or "craftax": what is held, achievements, where one stands, needs, senses.

    `calm` is twice the distance of the nearest zombie in sight, at most 9. `toward_tree` is 8 beside a tree (9 in
    Craftax, which shows more), one less a step away, 0 where none is in sight; towards a cow or a zombie it also grows
    with each blow; on another floor they are what is there in their place. They are for rewards and upkeep: an expert
    sees the observation alone, and what `_compass` reads from it.
    """
    senses, farthest = _SENSES[name], VIEWS[name].farthest
    if name == "craftax-classic":
        return Features(
            name, (*_CLASSIC, *_TOOLS, *CLASSIC_ACHIEVEMENTS, *_PLACES, *_NEEDS, *senses),
            dict.fromkeys((*_CLASSIC, *_NEEDS, *senses), farthest), frozenset(_CLASSIC), frozenset(_PLACES),
            CLASSIC_ACTIONS,
        )  # fmt: skip
    return Features(
        name,
        (*_FULL, *_LEVELS, "potions", *ACHIEVEMENTS, *_PLACES, *_NEEDS, *senses),
        {
            **dict.fromkeys((*_FULL, "potions"), 99), **dict.fromkeys(_LEVELS, 4),
            **dict.fromkeys(senses, farthest), **dict.fromkeys((*_NEEDS, "health", "calm"), 9),
        },
        frozenset((*_FULL, "potions")), frozenset(_PLACES), ACTIONS,
    )  # fmt: skip


class _Programs(NamedTuple):
    """What all worlds of one name share, so that a process traces and loads each program once."""

    jax: Any
    fresh: Any
    look: Any
    step: Any


@functools.cache
def _programs(name: str) -> _Programs:
    with needs_extra(f"the world {name!r}", "craftax"):
        import jax
        from craftax.craftax_env import make_craftax_env_from_name
    env = make_craftax_env_from_name(ENV_NAMES[name], auto_reset=False)
    params = env.default_params
    read = _reader(features_of(name), name)
    see = _compass(name)

    def step(key: Any, state: Any, action: Any) -> Any:
        observation, state, _, done, _ = env.step(key, state, action, params)
        return see(observation), state, done, read(state)

    return _Programs(
        jax,
        jax.jit(jax.vmap(lambda key: env.reset(key, params)[1])),
        jax.jit(jax.vmap(lambda state: (see(env.get_obs(state)), read(state)))),
        jax.jit(jax.vmap(step)),
    )


class CraftaxWorld:
    """`lanes` Craftax worlds; see `shoal.skills.worlds.world.World`."""

    name = "craftax"
    features = features_of("craftax")
    training, most_lanes, extra = DEFAULTS, 64, "craftax"
    held: tuple[str, ...] = (*_FULL, *_LEVELS)  # features that stand in an observation, in its order
    fresh_is_cheap = False
    moves = (1, 2, 3, 4)
    wait = 0

    def __init__(self, lanes: int) -> None:
        self._programs, self.lanes = _programs(self.name), lanes
        view = VIEWS[self.name]
        self.action_names = self.features.actions
        self.n_actions = len(self.action_names)
        self.obs_size = view.cells + view.behind + view.compass
        # The inventory stands in front of what ends an observation: 10 numbers in Classic, 38 in Craftax
        # (of whose 16 numbers of inventory the first 13 are features).
        self.feature_columns = {feature: view.cells + number for number, feature in enumerate(self.held)}
        self.mirrors = _mirrors(view, self.n_actions)
        self._leaves: list[NDArray] = []
        self._observations: Floats = np.zeros((lanes, self.obs_size), np.float32)
        self._values: Floats = np.zeros((lanes, len(self.features.names)), np.float32)

    def _keys(self, count: int, rng: np.random.Generator) -> NDArray[np.uint32]:
        return rng.integers(0, 2**32, (count, 2), dtype=np.uint32)

    def _tree(self) -> Any:
        return self._programs.jax.tree.unflatten(self._structure, self._leaves)

    @functools.cached_property
    def _structure(self) -> Any:
        shapes = self._programs.jax.eval_shape(self._programs.fresh, np.zeros((self.lanes, 2), np.uint32))
        return self._programs.jax.tree.structure(shapes)

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """New worlds, made `lanes` at a time so that one compiled program serves any number."""
        parts = []
        for first in range(0, count, self.lanes):
            state = self._programs.fresh(self._keys(self.lanes, rng))
            leaves = [np.asarray(leaf) for leaf in self._programs.jax.tree.leaves(state)]
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
        observations, values = self._programs.look(self._tree())
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
        observations, state, died, values = self._programs.step(keys, self._tree(), actions.astype(np.int32))
        self._leaves = [np.asarray(leaf) for leaf in self._programs.jax.tree.leaves(state)]
        self._observations = np.asarray(observations, np.float32)
        self._values = np.asarray(values, np.float32)
        return np.asarray(died)

    def state_of(self, bank: Bank) -> Any:
        """The first state of a bank as Craftax knows it."""
        leaves = [bank.arrays[key][0] for key in sorted(bank.arrays)]
        return self._programs.jax.tree.unflatten(self._structure, leaves)

    @classmethod
    def picture(cls, bank: Bank) -> NDArray[np.uint8]:
        """`[height, width, 3]` of the first state of a bank, as Craftax draws it."""
        world, paint = _painter(cls.name)
        pixels = np.asarray(paint(world.state_of(bank)), np.float32)
        return np.clip(pixels * (255 if pixels.max() <= 1.0 else 1), 0, 255).astype(np.uint8)


class ClassicWorld(CraftaxWorld):
    """`lanes` worlds of Craftax-Classic."""

    name = "craftax-classic"
    features = features_of("craftax-classic")
    held = (*_CLASSIC, *_TOOLS)


@functools.cache
def _painter(name: str) -> tuple[CraftaxWorld, Any]:
    import jax

    if name == "craftax-classic":
        from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
    else:
        from craftax.craftax.renderer import make_craftax_pixel_renderer
    world = ClassicWorld(1) if name == "craftax-classic" else CraftaxWorld(1)
    return world, jax.jit(make_craftax_pixel_renderer(16))


def _bank(leaves: list[NDArray]) -> Bank:
    return Bank({f"{number:03d}": leaf for number, leaf in enumerate(leaves)})


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

    senses = _senses(name)

    def value(state: Any, feature: str) -> Any:
        if feature in blocks:
            return is_near_block(state, blocks[feature])
        if feature == "potions":  # of all colours
            return state.inventory.potions.sum()
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


def _compass(name: str) -> Any:
    """A function from an observation of Craftax to what an expert sees: the same, with a compass behind it.

    The compass says no more than the cells in front do: what the next cell in the direction that one looks in holds,
    and of each kind of block and mob the way to the nearest: left, right, up, down (0 or 1), and how near it is (1:
    here). Of Craftax an expert sees fewer cells, and of each what `_KINDS` names.
    """
    import jax.numpy as jnp

    view = VIEWS[name]
    half = np.array([view.rows, view.columns]) // 2
    down, right = (np.indices((view.rows, view.columns)) - half[:, None, None]).reshape(2, -1)
    away = np.abs(down) + np.abs(right)
    middle = int(np.flatnonzero(away == 0)[0])
    far = np.where(away > 0, away, view.farthest)[:, None]  # what one stands on is not what one goes to
    ways = [right < 0, right > 0, down < 0, down > 0, 1 - away / view.farthest]
    to = np.stack(ways, 1).astype(np.float32)
    ahead = middle + np.array([-1, 1, -view.columns, view.columns])
    shown = np.flatnonzero((np.abs(down) <= _SHOWN[0] // 2) & (np.abs(right) <= _SHOWN[1] // 2))
    kinds = None if name == "craftax-classic" else _kinds()

    def see(observation: Any) -> Any:
        cells, rest = observation[: -view.behind].reshape(len(away), -1), observation[-view.behind :]
        if kinds is not None:
            cells = cells @ kinds
        looks = rest[view.looks : view.looks + 4]
        there = cells[:, _FIRST_KIND:]
        away_from = jnp.where(there > 0, far, 2 * view.farthest)
        nearest = there * (away_from == away_from.min(0))
        found = (nearest[:, :, None] * jnp.asarray(to)[:, None, :]).max(0)
        return jnp.concatenate([cells[shown].reshape(-1), rest, looks @ cells[ahead], found.reshape(-1)])

    return see


def _kinds() -> NDArray[np.float32]:
    """`[83, kinds]` which of `_KINDS` each number of a cell of Craftax is, if any."""
    from craftax.craftax.constants import BlockType, ItemType

    mobs = [mob for mob in ("melee", "passive", "ranged", "projectile", "own projectile") for _ in range(8)]
    words = [
        *(block.name.lower() for block in BlockType),
        *(item.name.lower() for item in ItemType),
        *mobs,
        "light",
    ]
    meant = [_AS_GOOD_AS.get(word, word) for word in words]
    return np.array([[word == kind for kind in _KINDS] for word in meant], np.float32)


def _mirrors(view: _View, n_actions: int) -> tuple[tuple[Ints, Ints], ...]:
    """Left for right, up for down, and both: what observation column and what action stands for each."""
    cells = np.arange(view.cells).reshape(*_SHOWN, view.channels)
    looks, seen = view.cells + view.looks, view.cells + view.behind
    found = []
    for flipped in ((1,), (0,), (0, 1)):
        swap = np.arange(4)  # left, right, up, down
        for axis in flipped:
            swap[[2 - 2 * axis, 3 - 2 * axis]] = swap[[3 - 2 * axis, 2 - 2 * axis]]
        columns = np.arange(seen + view.compass)
        columns[: view.cells] = np.flip(cells, flipped).ravel()
        columns[looks : looks + 4] = looks + swap
        ways = columns[seen + view.channels :].reshape(-1, 5)
        ways[:, :4] = ways[:, swap]
        actions = np.arange(n_actions)
        actions[1:5] = actions[1 + swap]
        found.append((columns, actions))
    return tuple(found)


def _senses(name: str) -> Any:
    """A function from a state of Craftax to how near things in sight are."""
    import jax
    import jax.numpy as jnp

    view = VIEWS[name]
    shape = (view.rows, view.columns)
    half = np.array(shape) // 2
    steps = np.abs(np.indices(shape) - half[:, None, None]).sum(0)  # from where one stands
    edge = int(half.max())
    if name == "craftax-classic":
        from craftax.craftax_classic.constants import BlockType

        def around(state: Any) -> Any:
            return state.map, None

        def mobs(state: Any, kind: str) -> Any:
            found = getattr(state, f"{kind}s")
            return found.position, found.mask, _MOBS[kind] - found.health
    else:
        from craftax.craftax.constants import MOB_TYPE_HEALTH_MAPPING, BlockType, ItemType

        classes = {"zombie": ("melee_mobs", 1), "cow": ("passive_mobs", 0)}

        def around(state: Any) -> Any:
            return state.map[state.player_level], state.item_map[state.player_level]

        def mobs(state: Any, kind: str) -> Any:
            group, number = classes[kind]
            found = jax.tree.map(lambda leaf: leaf[state.player_level], getattr(state, group))
            blows = MOB_TYPE_HEALTH_MAPPING[found.type_id, number] - found.health
            return found.position, found.mask, blows

    def senses(state: Any) -> dict[str, Any]:
        def window(ground: Any, outside: int) -> Any:
            padded = jnp.pad(ground, edge, constant_values=outside)
            return jax.lax.dynamic_slice(padded, state.player_position + edge - half, shape)

        ground, items = around(state)
        blocks = window(ground, BlockType.OUT_OF_BOUNDS.value)
        found: dict[str, Any] = {"health": state.player_health}
        for feature in _SENSES[name]:
            kind = feature.removeprefix("toward_")
            if kind in (*_BLOCKS, *_MORE_BLOCKS):
                if kind == "ladder_down":
                    there = window(items, ItemType.NONE.value) == ItemType.LADDER_DOWN.value
                else:
                    words = [kind, *(word for word, other in _AS_GOOD_AS.items() if other == kind)]
                    numbers = [block.value for block in BlockType if block.name.lower() in words]
                    there = jnp.isin(blocks, jnp.array(numbers))
                found[feature] = jnp.max(there * (view.farthest - steps))
            elif kind in _MOBS:
                position, mask, blows = mobs(state, kind)
                away = jnp.abs(position - state.player_position)
                seen = mask & (away <= half).all(-1)
                near = view.farthest - away.sum(-1)
                found[feature] = jnp.max(seen * (near + blows))
                if kind == "zombie":
                    nearest = jnp.min(jnp.where(seen, away.sum(-1), view.farthest))
                    found["calm"] = jnp.minimum(2 * nearest, 9)
        return found

    return senses
