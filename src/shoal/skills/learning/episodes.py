"""Play trained experts in unseen worlds: a plan with all skills, its film, and whole episodes.

A fixed plan ends where one of its skills fails. In a whole episode each lane plans again from what it holds, tries
another goal when a skill runs out of time, and sees to its `upkeep`, until the agent dies or every skill was done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, MissingExtraError, did_you_mean, needs_extra
from shoal.core.files import write_bytes
from shoal.core.seeding import stream
from shoal.skills.graph.store import Store
from shoal.skills.learning.network import Network, check_expert, decode
from shoal.skills.plan import Step, covering_plan, plan_for, shortened, simulate
from shoal.skills.spec import Features, Skill, is_relative
from shoal.skills.worlds.course import Course, act, walk
from shoal.skills.worlds.registry import batch_lanes, fresh_worlds, make_world, world_class, world_features
from shoal.skills.worlds.world import Bank, Floats, Ints, World

MOST_STEPS = 10_000  # env steps of an episode
AHEAD = 5  # goals that one way leads to, so that what they need is fetched at one go


@dataclass(frozen=True)
class ChainReport:
    """Success of a plan on unseen worlds."""

    plan: list[Step]
    reached: list[float]  # share of worlds in which each step was finished
    skills: dict[str, float]  # success of each skill where its step was entered; NaN if it never was
    success: float  # of the whole plan
    mean_steps: float  # env steps of the successful ones
    episodes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def evaluate_chain(
    store: Store,
    episodes: int = 512,
    seed: int = 0,
    target: str | None = None,
    only: Sequence[str] | None = None,
) -> ChainReport:
    """Play the plan that applies every completed skill (or `only` some, or up to `target`) in new worlds."""
    _check_episodes(episodes)
    world_name, plan = plan_of(store, target, only)
    world = make_world(world_name, batch_lanes(world_name, episodes))
    course, experts = _course(store, plan, world)
    starts = fresh_worlds(world, episodes, seed, "unseen")
    fixed = None if world.fresh_is_cheap else world
    result = walk(world_name, starts, course, experts, stream(seed, "unseen"), fixed)
    reached = [float((result.reached > at).mean()) for at in range(len(plan))]
    entered = [1.0, *reached[:-1]]
    passed: dict[str, list[float]] = {}
    for step, before, after in zip(plan, entered, reached, strict=True):
        passed.setdefault(step.skill, []).extend([after / before] if before else [])
    lengths = result.length[result.finished]
    return ChainReport(
        plan, reached, {name: sum(rates) / len(rates) if rates else math.nan for name, rates in passed.items()},
        result.success, float(lengths.mean()) if len(lengths) else 0.0, episodes,
    )  # fmt: skip


def _course(store: Store, plan: Sequence[Step], world: World) -> tuple[Course, list[Network]]:
    """A plan to be followed in a world, and the experts that do."""
    names = list(dict.fromkeys(step.skill for step in plan))
    skills = {row.name: row.spec for row in store.skills()}
    course = Course(plan, skills, world.features, [names.index(step.skill) for step in plan])
    return course, load_experts(store, names, world)


def _check_episodes(episodes: int) -> None:
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")


def plan_of(
    store: Store, target: str | None = None, only: Sequence[str] | None = None
) -> tuple[str, list[Step]]:
    """The world of a store and the plan over its completed skills."""
    if store.setting("world") is None:
        raise ConfigError(f"{store.root} has not been trained in: it names no world")
    world_name = str(store.setting("world"))
    features = world_features(world_name)
    rows = [row for row in store.skills() if row.expert is not None and store.head(row.expert) is not None]
    if not rows:
        raise ConfigError(f"{store.root} holds no trained skill yet")
    specs = [row.spec for row in rows]
    if target is not None:
        return world_name, plan_for(store.skill(target).name, specs, features)
    return world_name, covering_plan(specs, features, only=only or None)


def record_chain(store: Store, seed: int = 0) -> tuple[list[Bank], list[Step], list[int], bool]:
    """States of one unseen world while the whole plan is played in it, with the plan step at each.

    Of 32 worlds (or `most_lanes`) the one that finishes first is taken, or the one that got furthest.
    """
    world_name, plan = plan_of(store)
    lanes = getattr(world_class(world_name), "most_lanes", None) or 32
    world = make_world(world_name, lanes)
    course, experts = _course(store, plan, world)
    states: list[Bank] = []
    steps: list[Ints] = []

    def watch(world: World, reached: Ints) -> None:
        states.append(world.save())
        steps.append(np.minimum(reached, len(plan) - 1))

    starts = fresh_worlds(world, lanes, seed, "film")
    result = walk(world_name, starts, course, experts, stream(seed, "film"), world, watch)
    best = min(range(lanes), key=lambda i: (-int(result.reached[i]), int(result.length[i])))
    last = int(result.length[best]) + 1
    film = [bank.take(np.array([best])) for bank in states[:last]]
    return film, plan, [int(at[best]) for at in steps[:last]], bool(result.finished[best])


def load_experts(store: Store, names: Sequence[str], world: World) -> list[Network]:
    """The heads of the experts of some skills, which can act in a world."""
    nets = []
    for name in names:
        row = store.skill(name)
        head = store.head(row.expert) if row.expert is not None else None
        if head is None:
            raise DataError(f"skill {name!r} has no expert yet: it is {row.status}")
        nets.append(
            Network.from_params(decode(store.get_blob(head.sha256), name)[0], f"the expert of {name!r}")
        )
        check_expert(world, nets[-1], name)
    return nets


@dataclass(frozen=True)
class EpisodesReport:
    """What whole episodes in unseen worlds came to."""

    had: dict[str, float]  # share of episodes in which a feature was ever more than 0
    applied: dict[str, float]  # share of episodes in which a skill was done at least once
    lengths: Ints  # [E] env steps
    died: float  # share of episodes; the others did all there was to do, or came to their last step

    def reward(self, names: Iterable[str]) -> float:
        """The arithmetic mean of some features' shares."""
        return float(np.mean([self.had[name] for name in names]))

    def score(self, names: Iterable[str]) -> float:
        """Their geometric mean as Crafter takes it (arXiv:2109.06780, eq. 1), between 0 and 1."""
        return float(np.expm1(np.mean([np.log1p(100 * self.had[name]) for name in names])) / 100)


def play_episodes(
    store: Store,
    episodes: int = 256,
    seed: int = 0,
    *,
    most_steps: int = MOST_STEPS,
    worth: Mapping[str, float] | None = None,
) -> EpisodesReport:
    """Play `episodes` new worlds from their start, each until death, `most_steps`, or until every skill was done.

    `worth` says what it is worth to have done a skill once, by its name; absent: each as much as any other. Skills that
    it does not name are applied where others or their upkeep need them, and an episode does not wait for them.
    """
    _check_episodes(episodes)
    world_name, _ = plan_of(store)
    rows = [row for row in store.skills() if row.expert is not None and store.head(row.expert) is not None]
    skills = [row.spec for row in rows]
    world = make_world(world_name, batch_lanes(world_name, episodes))
    experts = load_experts(store, [row.name for row in rows], world)
    starts = fresh_worlds(world, episodes, seed, "unseen")
    rng = stream(seed, "unseen episodes")
    measured = "steps_an_application"
    took = {row.name: row.result[measured] for row in rows if measured in (row.result or {})}
    chooser = Chooser(skills, world_features(world_name), took, worth)
    parts = []
    for first in range(0, episodes, world.lanes):
        rows_of = np.minimum(np.arange(first, first + world.lanes), episodes - 1)
        world.load(starts, rows_of, np.ones(world.lanes, np.bool_))
        part = _play(world, chooser, experts, rng, most_steps)
        parts.append([array[: episodes - first] for array in part])
    had, applied, lengths, died = (np.concatenate(column) for column in zip(*parts, strict=True))
    return EpisodesReport(
        dict(zip(world.features.names, had.mean(0).tolist(), strict=True)),
        dict(zip([skill.name for skill in skills], applied.mean(0).tolist(), strict=True)),
        lengths,
        float(died.mean()),
    )


@dataclass
class Memory:
    """What one lane remembers of its episode."""

    applied: np.ndarray  # [skills] done at least once
    late: np.ndarray  # [skills] how often in a row it ran out of time
    plan: list[int] = field(default_factory=list)  # skills to apply next, the one that is applied among them


@dataclass
class Chooser:
    """Chooses the next skill of a lane: the first of a plan to its upkeep, else of a plan to its next goals."""

    skills: Sequence[Skill]
    features: Features
    took: Mapping[str, float] = field(default_factory=dict)  # env steps an application; else the horizon
    worth: Mapping[str, float] | None = None  # of a goal; 0 if it is not named; absent: 1 for each
    _plans_to: dict[tuple[Any, ...], list[Step] | None] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [skill.name for skill in self.skills]
        self.by_name = {skill.name: skill for skill in self.skills}
        worth = dict.fromkeys(self.names, 1.0) if self.worth is None else self.worth
        for name, each in worth.items():
            if name not in self.by_name:
                raise ConfigError(f"worth names no trained skill: {name!r}.{did_you_mean(name, self.names)}")
            if not each >= 0:
                raise ConfigError(f"the worth of {name!r} must be at least 0, got {each}")
        self.worths = [worth.get(name, 0.0) for name in self.names]
        self.upkeep = [
            (index, self.features.index(item), amount)
            for index, skill in enumerate(self.skills)
            for item, amount in skill.upkeep.items()
        ]
        # Upkeep of a feature is seen to when all but one are there that can be, and more than it was asked for at.
        self.full = np.array([self.features.holds(name) - 1 for name in self.features.names])
        for _, column, amount in self.upkeep:
            self.full[column] = max(self.full[column], amount + 1)
        self.asked = sorted(
            {self.features.index(item) for skill in self.skills for item in skill.requirements}
        )
        self.items = [self.features.names[column] for column in self.asked]
        self.columns: list[int | None] = []
        for skill in self.skills:
            absolute = not is_relative(skill.done, self.features) and skill.done.op == ">="
            lasts = absolute and not skill.gain.keys() & self.features.places
            self.columns.append(self.features.index(skill.done.feature) if lasts else None)

    def pressing(self, values: Floats) -> tuple[Ints, Ints]:
        """`[lanes]` the skill whose upkeep condition holds (of several the last listed), and what it is short of.

        Both are -1 where none holds.
        """
        chosen, short = np.full(len(values), -1), np.full(len(values), -1)
        for index, column, amount in self.upkeep:
            wanting = values[:, column] <= amount
            chosen[wanting], short[wanting] = index, column
        return chosen, short

    def toward(self, goal: int, values: Floats) -> int | None:
        """The first skill of the plan to a goal; None if there is no plan. `values` are those of one lane."""
        way = self._plan_to(goal, self._hands(values))
        return self.names.index(way[0].skill) if way else None

    def choose(self, values: Floats, memory: Memory) -> int | None:
        """The skill to apply now; None if all were done. `values` are those of one lane, `[features]`.

        A lane follows a plan to its next goals, and makes another when it has ended, failed, or was left for upkeep.
        """
        if not memory.plan:
            hands = self._hands(values)
            goals = tuple(
                goal
                for goal, (column, skill) in enumerate(zip(self.columns, self.skills, strict=True))
                if self.worths[goal]
                and not memory.applied[goal]
                and (column is None or values[column] < skill.done.count)
            )
            memory.plan = list(self.plan(hands, goals, tuple(memory.late.tolist())))
        return memory.plan[0] if memory.plan else None

    def plan(self, hands: tuple[int, ...], goals: tuple[int, ...], late: tuple[int, ...]) -> tuple[int, ...]:
        """The skills that lead to the goals that come next, one application each.

        What ran out of time less often comes first, then what takes fewer env steps for what it is worth. What several
        goals need is fetched at one go.
        """
        key = hands, goals, late
        if key not in self._plans:
            held, steps = self._held(hands), list[Step]()
            at, left = hands, list(goals)
            for _ in range(AHEAD):
                longer: dict[int, tuple[list[Step], tuple[int, ...]]] = {}
                for goal in left:
                    if (way := self._plan_to(goal, at)) is not None:
                        trial = shortened([*steps, *way], self.by_name, self.features, held)
                        if (ends := simulate(trial, self.by_name, self.features, held)) is not None:
                            longer[goal] = trial, tuple(int(ends[name]) for name in self.items)
                if not longer:
                    break
                so_far = self._length(steps)
                rank = {
                    goal: (
                        sum(late[self.names.index(step.skill)] for step in trial),
                        (self._length(trial) - so_far) / self.worths[goal],
                        self.skills[goal].requirements.keys().isdisjoint(self.features.places),  # soon left
                        goal,
                    )
                    for goal, (trial, _) in longer.items()
                }
                steps, at = longer[min(rank, key=rank.__getitem__)]
                done = {step.skill for step in steps}
                left = [goal for goal in left if self.names[goal] not in done]
            if not steps:  # hands that are full of what a goal gains: to apply it is to have done it
                ways = [way for goal in goals if (way := self._plan_to(goal, hands))]
                steps = min(ways, key=self._length, default=[])
            self._plans[key] = tuple(
                self.names.index(step.skill) for step in steps for _ in range(step.count)
            )
        return self._plans[key]

    def _length(self, steps: Sequence[Step]) -> float:
        return sum(self.took.get(step.skill, self.by_name[step.skill].horizon) * step.count for step in steps)

    def _hands(self, values: Floats) -> tuple[int, ...]:
        return tuple(int(values[column]) for column in self.asked)

    def _held(self, hands: tuple[int, ...]) -> dict[str, int]:
        return {item: amount for item, amount in zip(self.items, hands, strict=True) if amount > 0}

    def _plan_to(self, goal: int, hands: tuple[int, ...]) -> list[Step] | None:
        """The plan to a goal; None if there is none."""
        key = (goal, hands)
        if key not in self._plans_to:
            try:
                self._plans_to[key] = plan_for(
                    self.names[goal], self.skills, self.features, 1, hands=self._held(hands)
                )
            except ConfigError:
                self._plans_to[key] = None
        return self._plans_to[key]


def _play(
    world: World, chooser: Chooser, experts: Sequence[Network], rng: np.random.Generator, most_steps: int
) -> tuple[np.ndarray, np.ndarray, Ints, np.ndarray]:
    """Had `[lanes, features]`, applied `[lanes, skills]`, length `[lanes]` and died `[lanes]`."""
    lanes, skills = world.lanes, chooser.skills
    steps = [Step(name, 1) for name in chooser.names]
    course = Course(steps, chooser.by_name, chooser.features, range(len(skills)))
    memories = [
        Memory(np.zeros(len(skills), np.bool_), np.zeros(len(skills), np.int64)) for _ in range(lanes)
    ]
    values = world.values()
    had = values > 0
    live, died = np.ones(lanes, np.bool_), np.zeros(lanes, np.bool_)
    at, elapsed, length = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    serving = np.full(lanes, -1)  # the skill whose upkeep it sees to, or plans to
    keeping = np.full(lanes, -1)  # the feature that this skill is applied for until it is full
    start = values.copy()
    free = live.copy()  # lanes that choose now
    for _ in range(most_steps):
        pressing, short = chooser.pressing(values)
        for lane in np.flatnonzero(live & (free | (pressing > serving))):
            memory, wants = memories[lane], int(pressing[lane])
            chosen = chooser.toward(wants, values[lane]) if wants >= 0 else None
            if chosen is not None and not memory.late[[wants, chosen]].any():
                serving[lane], keeping[lane] = wants, short[lane] if chosen == wants else -1
                memory.plan.clear()  # it walks off
            elif not free[lane]:
                continue
            elif (chosen := chooser.choose(values[lane], memory)) is not None:
                serving[lane] = keeping[lane] = -1
            else:
                live[lane] = False
                continue
            at[lane], elapsed[lane], start[lane] = chosen, 0, values[lane]
        if not live.any():
            break
        actions = act(world.observe(), at, experts, rng.random(lanes, np.float32), live)
        dead = world.step(actions, rng) & live
        values = world.values()
        had[live] |= values[live] > 0
        length += live
        elapsed += 1
        filled = values[np.arange(lanes), keeping] >= chooser.full[keeping]
        done = live & ~dead & np.where(keeping >= 0, filled, course.satisfied(at, values, start))
        late = live & ~done & (elapsed >= course.horizon[at])
        for lane in np.flatnonzero(done):
            memories[lane].applied[at[lane]] = True
            memories[lane].late[:] = np.maximum(memories[lane].late - 1, 0)
            memories[lane].late[at[lane]] = 0
            memories[lane].plan[:1] = []
        for lane in np.flatnonzero(late):
            memories[lane].late[at[lane]] += 1
            memories[lane].plan.clear()
        free = done | late
        serving[free] = keeping[free] = -1
        died |= dead
        live &= ~dead
    applied = np.stack([memory.applied for memory in memories])
    return had, applied, length, died


MOST_FRAMES = 400


def draw_chain(store: Store, path: Path, seed: int = 0) -> bool:
    """A GIF of the whole plan played in one unseen world; True if the plan was finished in it."""
    with needs_extra("chain.gif", "vision"):
        from PIL import Image, ImageDraw
    film, plan, steps, finished = record_chain(store, seed)
    world_name = str(store.setting("world"))
    every = max(1, -(-len(film) // MOST_FRAMES))
    images = []
    for bank, step in list(zip(film, steps, strict=True))[::every]:
        picture = Image.fromarray(picture_of(world_name, bank))
        canvas = Image.new("RGB", (picture.width, picture.height + 16), "white")
        canvas.paste(picture, (0, 16))
        ImageDraw.Draw(canvas).text((3, 2), f"{step + 1}/{len(plan)} {plan[step].skill}", fill="black")
        images.append(canvas)
    out = BytesIO()
    durations = [90] * (len(images) - 1) + [1500]
    images[0].save(out, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    write_bytes(path, out.getvalue())
    return finished


def picture_of(world_name: str, bank: Bank) -> NDArray[np.uint8]:
    """`[height, width, 3]` of the first state of a bank."""
    world = world_class(world_name)
    if not hasattr(world, "picture"):
        raise MissingExtraError(f"the world {world_name!r} draws no pictures of itself")
    picture: NDArray[np.uint8] = world.picture(bank)
    return picture
