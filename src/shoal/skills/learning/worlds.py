"""Worlds of many lanes stepped together, whose states can be saved and put back; how they are led along a plan.

A `Bank` is a set of world states as plain arrays, the first axis being the state. New worlds, start states of
deep skills and checkpoints are all banks. The crafting world stands at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, missing_extra
from shoal.core.registry import Registry
from shoal.core.seeding import stream
from shoal.maths.distributions import sample
from shoal.skills.learning.spec import MAX_HORIZON, Features, Skill, Step, is_relative

if TYPE_CHECKING:
    from shoal.skills.learning.trainer import Network, Shape, TrainingConfig

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


def check_expert(world: World, shape: Shape, skill: str) -> None:
    """Raise a `DataError` for an expert that was made for other actions or observations than a world's, or once had.

    A world may put numbers behind its observations and tell in `former_sizes` how many there were: an expert made for
    so many does not see what came later.
    """
    sizes = (world.obs_size, *getattr(world, "former_sizes", ()))
    if shape.inputs not in sizes or shape.actions != world.n_actions:
        raise DataError(
            f"the expert of {skill!r} was made for {shape.inputs} numbers in an observation and {shape.actions} "
            f"actions; this world shows {' or '.join(map(str, sizes))} and has {world.n_actions}. Train the skill "
            "again, or use the world that it was trained in."
        )


@dataclass(frozen=True)
class WorldKind:
    """A world under its name: what is known of it without making one, and how it is made."""

    make: Callable[[int], World]  # of so many lanes
    features: Callable[[], Features]
    training: Mapping[str, Any] = field(default_factory=dict)  # settings that suit it, see `TrainingConfig`
    most_lanes: int | None = None  # states that are worth stepping together; None: any number
    picture: Callable[[Bank], NDArray[np.uint8]] | None = None  # `[height, width, 3]` of the first state
    extra: str | None = None  # that its worlds need, named as the package that it brings


def _crafting() -> WorldKind:
    return WorldKind(CraftingWorld, lambda: CRAFTING, {"practice_horizon": 150}, picture=paint_crafting)


def _craftax(name: str) -> WorldKind:
    from shoal.skills.learning import craftax

    return WorldKind(
        lambda lanes: craftax.CraftaxWorld(name, lanes), lambda: craftax.features_of(name), craftax.DEFAULTS, 64,
        lambda bank: craftax.picture(name, bank), "craftax",
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


def check_installed(name: str) -> None:
    """Raise a `MissingExtraError` where a world cannot be made, or trained in: each launch would end with it."""
    if importlib.util.find_spec("safetensors") is None:
        raise missing_extra("training skills", "train")
    extra = world_kind(name).extra
    if extra is not None and importlib.util.find_spec(extra) is None:
        raise missing_extra(f"the world {name!r}", extra)


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


# How worlds are led along a plan: the step a lane is at decides which expert acts in it; steps already satisfied are
# skipped.


class Course:
    """A plan as arrays: for each step its predicate, reward, horizon and local expert.

    Args:
        plan: its steps.
        skills: by name, at least those of the plan.
        features: of the world.
        experts: the local expert of each step.
        most: env steps that one application may take at most, whatever its horizon.
    """

    def __init__(
        self,
        plan: Sequence[Step],
        skills: Mapping[str, Skill],
        features: Features,
        experts: Sequence[int],
        most: int = MAX_HORIZON,
    ) -> None:
        self.plan = list(plan)
        chosen = [skills[step.skill] for step in plan]
        self.column = np.array([features.index(skill.done.feature) for skill in chosen])
        self.relative = np.array([is_relative(skill.done, features) for skill in chosen])
        self.sign = np.array([1.0 if skill.done.op == ">=" else -1.0 for skill in chosen], np.float32)
        self.count = np.array(
            [
                skill.done.count * (step.count if relative else 1)
                for skill, step, relative in zip(chosen, plan, self.relative, strict=True)
            ],
            np.float32,
        )
        self.most = np.array([features.holds(skill.done.feature) for skill in chosen], np.float32)
        self.horizon = np.array(
            [min(skill.horizon, most) * step.count for skill, step in zip(chosen, plan, strict=True)]
        )
        self.bonus = np.array([skill.reward.bonus for skill in chosen], np.float32)
        self.step_cost = np.array([skill.reward.step_cost for skill in chosen], np.float32)
        self.weights = np.zeros((len(chosen), len(features.names)), np.float32)
        for row, skill in enumerate(chosen):
            for name, weight in (skill.reward.weights or {skill.done.feature: 1.0}).items():
                self.weights[row, features.index(name)] = weight
        self.expert = np.array(experts)

    def __len__(self) -> int:
        return len(self.plan)

    def satisfied(self, at: Ints, values: Floats, start: Floats) -> Bools:
        """Whether step `at[i]` is done in lane `i`, `start` being the values when it began.

        What was gathered on the way counts: a step is done when the hands can hold no more of what it gains.
        """
        lane = np.arange(len(at))
        column, most = self.column[at], self.most[at]
        before, wanted = start[lane, column], self.count[at]
        gained = np.where(before <= most, np.minimum(before + wanted, most), before + wanted)
        sign = self.sign[at]
        return np.asarray(sign * values[lane, column] >= sign * np.where(self.relative[at], gained, wanted))

    def skip(self, at: Ints, values: Floats) -> Ints:
        """Move lanes past steps that are satisfied already; `len(self)` means finished."""
        at = at.copy()
        for _ in range(len(self)):
            inside = np.flatnonzero(at < len(self))
            now = at[inside]
            met = self.satisfied(now, values[inside], values[inside])
            if not met.any():
                break
            at[inside[met]] += 1
        return at


@dataclass(frozen=True)
class Walk:
    """What came of following a plan in every lane."""

    reached: Ints  # [M] steps finished
    length: Ints  # [M] env steps taken
    ends: Bank  # states of the lanes that finished the plan
    finished: Bools  # [M]
    last_start: Floats  # [M, F] values when the last entered step began
    last_before: Floats  # [M, F] values before the last action
    last_values: Floats  # [M, F] values at the end
    acted: Ints  # [steps] env steps in which each plan step's expert acted

    @property
    def success(self) -> float:
        """Share of lanes that finished the plan."""
        return float(self.finished.mean())


def walk(
    world_name: str,
    starts: Bank,
    course: Course,
    experts: Sequence[Network],
    rng: np.random.Generator,
    world: World | None = None,
) -> Walk:
    """Follow `course` from every state of `starts` until it is finished or failed.

    A world whose lanes are cheap to change is made smaller as lanes finish; `world` hands in one to use as it
    is, `world.lanes` states at a time.
    """
    if world is not None:
        return _walk_fixed(world, starts, course, experts, rng)
    lanes = len(starts)
    world = make_world(world_name, lanes)
    return _walk(world, np.arange(lanes), starts, course, experts, rng, shrink=world_name)


def _walk_fixed(
    world: World, starts: Bank, course: Course, experts: Sequence[Network], rng: np.random.Generator
) -> Walk:
    parts = []
    for first in range(0, len(starts), world.lanes):
        rows = np.arange(first, min(first + world.lanes, len(starts)))
        parts.append(_walk(world, rows, starts, course, experts, rng, shrink=None))
    joined = {
        item.name: np.concatenate([getattr(part, item.name) for part in parts])
        for item in fields(Walk)
        if item.name not in ("ends", "acted")
    }
    ends, acted = Bank.join([part.ends for part in parts]), np.sum([part.acted for part in parts], axis=0)
    return Walk(ends=ends, acted=acted, **joined)


def _walk(
    world: World,
    rows: Ints,
    starts: Bank,
    course: Course,
    experts: Sequence[Network],
    rng: np.random.Generator,
    shrink: str | None,
) -> Walk:
    """Walk `rows` of `starts`; a fixed world with more lanes than rows repeats the last one and ignores it."""
    total, steps = len(rows), len(course)
    padded = np.concatenate([rows, np.full(world.lanes - total, rows[-1])])
    world.load(starts, padded, np.ones(world.lanes, np.bool_))
    values = world.values()
    who = np.arange(world.lanes)  # the walker in each lane; those from `total` on are padding
    reached = course.skip(np.zeros(world.lanes, np.int64), values)
    start, before, latest = values.copy(), values.copy(), values.copy()
    elapsed, length = np.zeros(world.lanes, np.int64), np.zeros(world.lanes, np.int64)
    active = (reached < steps) & (who < total)
    acted = np.zeros(steps, np.int64)
    ends: list[tuple[Ints, Bank]] = []
    already = np.flatnonzero((reached >= steps) & (who < total))
    if len(already):
        ends.append((already, world.save().take(already)))
    while active[who].any():
        if shrink and active[who].sum() * 2 < len(who) and len(who) > 64:
            keep = np.flatnonzero(active[who])
            state = world.save()
            world, who = make_world(shrink, len(keep)), who[keep]
            world.load(state, keep, np.ones(len(keep), np.bool_))
        live = active[who]
        at = np.minimum(reached[who], steps - 1)
        actions = act(world.observe(), course.expert[at], experts, rng.random(len(who), np.float32), live)
        died = world.step(actions, rng)
        acted += np.bincount(at[live], minlength=steps)
        before[who[live]] = latest[who[live]]
        values = world.values()
        elapsed[who] += live
        length[who] += live
        latest[who[live]] = values[live]
        done = live & course.satisfied(at, values, start[who]) & ~died
        failed = live & ~done & (died | (elapsed[who] >= course.horizon[at]))
        active[who[failed]] = False
        moved = np.flatnonzero(done)
        if len(moved):
            reached[who[moved]] = course.skip(at[moved] + 1, values[moved])
            elapsed[who[moved]] = 0
            finished = moved[reached[who[moved]] >= steps]
            going = moved[reached[who[moved]] < steps]
            start[who[going]] = values[going]
            active[who[finished]] = False
            if len(finished):
                ends.append((who[finished], world.save().take(finished)))
    # In the order of the lanes, so that a bank does not depend on who finished first.
    if ends:
        order = np.argsort(np.concatenate([index for index, _ in ends]), kind="stable")
        bank = Bank.join([states for _, states in ends]).take(order)
    else:
        bank = world.save().take(np.arange(0))
    return Walk(
        reached[:total], length[:total], bank, reached[:total] >= steps, start[:total], before[:total],
        latest[:total], acted,
    )  # fmt: skip


def act(
    observations: Floats,
    expert: Ints,
    experts: Sequence[Network],
    uniforms: Floats,
    live: Bools | None = None,
) -> Ints:
    """An action for every lane, from the expert that lane is routed to; lanes not `live` get action 0."""
    actions = np.zeros(len(observations), np.int64)
    for index in np.unique(expert if live is None else expert[live]):
        lanes = np.flatnonzero(expert == index if live is None else live & (expert == index))
        everyone = len(lanes) == len(observations)
        logprobs, _ = experts[index].forward(observations if everyone else observations[lanes])
        actions[lanes] = sample(logprobs, uniforms[lanes])
    return actions


# A small crafting world in NumPy, stepped by the hundred: trees, a quarry with iron, water, and tools to make.
#
# Every world can be finished: it has trees, stone, iron and water. The agent sees 7x7 cells around it, what it
# holds, where it looks and where it is.

GRASS, TREE, STONE, IRON, WATER, TABLE, PLANT, EDGE = range(8)
KINDS = 8
SIZE = 16
REACH = 3  # cells seen in each direction
HANDS = 9  # most of any counter
SAPLING_CHANCE = 0.25

COUNTERS = ("wood", "stone", "iron", "sapling", "drink")
TOOLS = ("table", "wood_pickaxe", "stone_pickaxe", "wood_sword", "plant")
CRAFTING_ACTIONS = (
    "left", "right", "up", "down", "interact", "place_table", "make_wood_pickaxe", "make_stone_pickaxe",
    "make_wood_sword", "plant_sapling", "wait",
)  # fmt: skip
CRAFTING = Features(
    world="crafting", names=(*COUNTERS, *TOOLS), capacity={name: HANDS for name in COUNTERS},
    counters=frozenset(COUNTERS), actions=CRAFTING_ACTIONS,
)  # fmt: skip
WOOD, STONES, IRONS, SAPLING, DRINK, HAS_TABLE, PICKAXE, STONE_PICKAXE, SWORD, HAS_PLANT = range(10)
MOVES = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])
VIEW = (2 * REACH + 1) ** 2
_STATE = ("cells", "place", "look", "hands")
OBS_SIZE = VIEW * KINDS + len(CRAFTING.names) + 4 + 2


class CraftingWorld:
    """`lanes` crafting worlds; see `shoal.skills.learning.worlds.World`."""

    features = CRAFTING
    n_actions = len(CRAFTING_ACTIONS)
    obs_size = OBS_SIZE
    action_names = CRAFTING_ACTIONS
    fresh_is_cheap = True
    moves = (0, 1, 2, 3)
    wait = CRAFTING_ACTIONS.index("wait")
    feature_columns = MappingProxyType({name: VIEW * KINDS + i for i, name in enumerate(CRAFTING.names)})

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        side = SIZE + 2 * REACH
        self.cells = np.full((lanes, side, side), EDGE, np.uint8)
        self.place = np.full((lanes, 2), REACH, np.int64)
        self.look = np.zeros(lanes, np.int64)
        self.hands = np.zeros((lanes, len(CRAFTING.names)), np.float32)
        self._lane = np.arange(lanes)
        offsets = np.arange(-REACH, REACH + 1)
        self._window = (offsets[:, None] * side + offsets).reshape(-1)  # flat offsets of the cells seen
        self._one_hot = np.eye(KINDS, dtype=np.float32)
        self._looks = np.eye(4, dtype=np.float32)

    def fresh(self, count: int, rng: np.random.Generator) -> Bank:
        """New worlds: grass with scattered trees, a quarry holding iron, a pond."""
        side = SIZE + 2 * REACH
        kinds = np.where(rng.random((count, SIZE, SIZE)) < 0.08, TREE, GRASS).astype(np.uint8)
        row, column = np.mgrid[:SIZE, :SIZE]

        def distance(centre: NDArray) -> NDArray:
            steps: NDArray = np.abs(row - centre[:, :1, None]) + np.abs(column - centre[:, 1:, None])
            return steps

        quarry = rng.integers(3, SIZE - 3, (count, 2))
        pond = (quarry + rng.integers(6, SIZE - 6, (count, 2))) % SIZE
        ore = rng.random((count, SIZE, SIZE)) < 0.12
        kinds = np.where(distance(pond) <= 2, WATER, kinds)
        kinds = np.where(distance(quarry) <= 3, np.where(ore, IRON, STONE), kinds).astype(np.uint8)
        every = np.arange(count)
        kinds[every, quarry[:, 0], quarry[:, 1]] = IRON
        grove = rng.integers(0, SIZE, (count, 2))  # at least one tree
        grove = np.where(
            distance(quarry)[every, grove[:, 0], grove[:, 1]][:, None] <= 3, (quarry + 8) % SIZE, grove
        )
        kinds[every, grove[:, 0], grove[:, 1]] = TREE
        # Start on a cell that is grass: the largest of random numbers that are zero elsewhere.
        score = rng.random((count, SIZE, SIZE)) * (kinds == GRASS)
        start = score.reshape(count, -1).argmax(1)
        cells = np.full((count, side, side), EDGE, np.uint8)
        cells[:, REACH:-REACH, REACH:-REACH] = kinds
        place = np.stack([start // SIZE, start % SIZE], 1) + REACH
        hands = np.zeros((count, len(CRAFTING.names)), np.float32)
        state = cells, place.astype(np.int64), rng.integers(0, 4, count), hands
        return Bank(dict(zip(_STATE, state, strict=True)))

    def load(self, bank: Bank, rows: Ints, mask: Bools) -> None:
        """Put state `rows[i]` of `bank` into lane `i` where `mask[i]`."""
        chosen = rows[mask]
        for name in _STATE:
            getattr(self, name)[mask] = bank.arrays[name][chosen]

    def save(self) -> Bank:
        """The states of all lanes, copied."""
        return Bank({name: getattr(self, name).copy() for name in _STATE})

    def _seen(self) -> NDArray[np.uint8]:
        side = self.cells.shape[1]
        flat = (self._lane * side + self.place[:, 0]) * side + self.place[:, 1]
        return self.cells.reshape(-1)[flat[:, None] + self._window]

    def observe(self) -> Floats:
        """`[lanes, obs_size]`: one-hot cells, hands, look, place."""
        out = np.empty((self.lanes, OBS_SIZE), np.float32)
        out[:, : VIEW * KINDS] = self._one_hot[self._seen()].reshape(self.lanes, -1)
        rest = out[:, VIEW * KINDS :]
        held = len(CRAFTING.names)
        np.multiply(self.hands, 1 / 3, out=rest[:, :held])
        rest[:, held : held + 4] = self._looks[self.look]
        rest[:, held + 4 :] = (self.place - REACH) / (SIZE / 2) - 1
        return out

    def values(self) -> Floats:
        """`[lanes, features]`, copied."""
        return self.hands.copy()

    def step(self, actions: Ints, rng: np.random.Generator) -> Bools:
        """Act in every lane; nobody dies here."""
        lane, hands = self._lane, self.hands
        moving = actions < 4
        self.look = np.where(moving, actions, self.look)
        ahead = self.place + MOVES[self.look]
        kind = self.cells[lane, ahead[:, 0], ahead[:, 1]]
        self.place = np.where((moving & (kind == GRASS))[:, None], ahead, self.place)
        interact = actions == CRAFTING_ACTIONS.index("interact")
        luck = rng.random(self.lanes) < SAPLING_CHANCE
        self._collect(interact & (kind == TREE), WOOD)
        self._collect(interact & (kind == WATER), DRINK)
        self._collect(interact & (kind == GRASS) & luck, SAPLING)
        stone = interact & (kind == STONE) & (hands[:, PICKAXE] > 0) & (hands[:, STONES] < HANDS)
        iron = interact & (kind == IRON) & (hands[:, STONE_PICKAXE] > 0) & (hands[:, IRONS] < HANDS)
        self._collect(stone, STONES)
        self._collect(iron, IRONS)
        self._put(stone | iron, ahead, GRASS)
        table = (actions == CRAFTING_ACTIONS.index("place_table")) & (kind == GRASS) & (hands[:, WOOD] >= 2)
        hands[table, WOOD] -= 2
        hands[table, HAS_TABLE] = 1
        self._put(table, ahead, TABLE)
        plant = (
            (actions == CRAFTING_ACTIONS.index("plant_sapling")) & (kind == GRASS) & (hands[:, SAPLING] >= 1)
        )
        hands[plant, SAPLING] -= 1
        hands[plant, HAS_PLANT] = 1
        self._put(plant, ahead, PLANT)
        crafting = np.flatnonzero((actions >= 6) & (actions <= 8) & (hands[:, WOOD] >= 1))
        if len(crafting):
            self._craft(crafting, actions[crafting])
        return np.zeros(self.lanes, np.bool_)

    def _collect(self, who: Bools, item: int) -> None:
        self.hands[:, item] = np.minimum(self.hands[:, item] + who, HANDS)

    def _put(self, who: Bools, where: Ints, kind: int) -> None:
        index = np.flatnonzero(who)
        self.cells[index, where[index, 0], where[index, 1]] = kind

    def _craft(self, who: Ints, actions: Ints) -> None:
        """Make tools in lanes `who`, which have wood; a table must stand in the eight cells around."""
        around = self._seen()[who].reshape(len(who), 2 * REACH + 1, 2 * REACH + 1)
        near = (around[:, REACH - 1 : REACH + 2, REACH - 1 : REACH + 2] == TABLE).any((1, 2))
        for action, tool in ((6, PICKAXE), (7, STONE_PICKAXE), (8, SWORD)):
            able = who[near & (actions == action) & (self.hands[who, tool] == 0)]
            if tool == STONE_PICKAXE:
                able = able[self.hands[able, STONES] >= 1]
                self.hands[able, STONES] -= 1
            self.hands[able, WOOD] -= 1
            self.hands[able, tool] = 1


def paint_crafting(bank: Bank, cell: int = 14) -> NDArray[np.uint8]:
    """`[height, width, 3]` of the first state of a bank: cells, the agent, what it holds."""
    palette = np.array(
        [
            [176, 214, 140], [46, 110, 52], [140, 140, 140], [214, 150, 90],
            [90, 150, 220], [150, 96, 48], [120, 220, 90], [40, 40, 40],
        ],
        np.uint8,
    )  # fmt: skip
    cells = bank.arrays["cells"][0][REACH - 1 : -REACH + 1, REACH - 1 : -REACH + 1]
    image = np.kron(palette[cells], np.ones((cell, cell, 1), np.uint8))
    row, column = (bank.arrays["place"][0] - REACH + 1) * cell
    image[row + 2 : row + cell - 2, column + 2 : column + cell - 2] = (200, 40, 40)
    nose = np.array([row, column]) + cell // 2 + MOVES[int(bank.arrays["look"][0])] * (cell // 2 - 3)
    image[nose[0] - 1 : nose[0] + 2, nose[1] - 1 : nose[1] + 2] = (255, 255, 255)
    bar = np.full((cell, image.shape[1], 3), 255, np.uint8)
    shades = np.linspace(40, 220, len(CRAFTING.names)).astype(np.uint8)
    for number, amount in enumerate(bank.arrays["hands"][0].astype(int)):
        left = number * (image.shape[1] // len(CRAFTING.names)) + 2
        height = min(amount, 9) * (cell - 2) // 9 + (amount > 0)
        bar[cell - height :, left : left + 12] = (shades[number], 90, 255 - shades[number])
    return np.concatenate([image, bar])
