"""Worlds of many lanes stepped together, whose states can be saved and restored, and how plans are followed in them.

A `Bank` is a set of world states as plain arrays, the first axis being the state. New worlds, start states of
deep skills and checkpoints are all banks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, missing_extra
from shoal.core.registry import Registry
from shoal.core.seeding import stream
from shoal.maths.distributions import sample
from shoal.skills.learning.network import Bools, Floats, Ints, Network, Shape
from shoal.skills.learning.plan import Step
from shoal.skills.learning.spec import MAX_HORIZON, Features, Skill, is_relative


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
    """Raise a `DataError` for an expert that was made for other actions or observations than a world has."""
    if (shape.inputs, shape.actions) != (world.obs_size, world.n_actions):
        raise DataError(
            f"the expert of {skill!r} was made for {shape.inputs} numbers in an observation and {shape.actions} "
            f"actions; this world shows {world.obs_size} and has {world.n_actions}. Train the skill again, or use the "
            "world that it was trained in."
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
    from shoal.skills.learning import crafting

    return WorldKind(
        crafting.CraftingWorld, lambda: crafting.CRAFTING, {"practice_horizon": 150}, picture=crafting.paint
    )


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
    start = values.copy()
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
        values = world.values()
        elapsed[who] += live
        length[who] += live
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
    return Walk(reached[:total], length[:total], bank, reached[:total] >= steps, acted)


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
