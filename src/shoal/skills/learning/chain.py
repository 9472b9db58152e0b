"""Follow a plan: the step a lane is at decides which expert acts in it; steps already satisfied are skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.core.seeding import stream
from shoal.maths.distributions import sample
from shoal.skills.learning.network import Network, decode
from shoal.skills.learning.plan import Step, covering_plan
from shoal.skills.learning.spec import Features, Skill, is_relative
from shoal.skills.learning.store import Store
from shoal.skills.learning.worlds import (
    Bank,
    Bools,
    Floats,
    Ints,
    World,
    batch_lanes,
    make_world,
    world_features,
    world_kind,
)


class Course:
    """A plan as arrays: for each step its predicate, reward, horizon and local expert."""

    def __init__(
        self, plan: Sequence[Step], skills: Mapping[str, Skill], features: Features, experts: Sequence[int]
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
        self.horizon = np.array(
            [skill.horizon * step.count for skill, step in zip(chosen, plan, strict=True)]
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
        """Whether step `at[i]` is done in lane `i`, `start` being the values when it began."""
        lane = np.arange(len(at))
        column = self.column[at]
        value = values[lane, column] - np.where(self.relative[at], start[lane, column], 0)
        sign = self.sign[at]
        return np.asarray(sign * value >= sign * self.count[at])

    def skip(self, at: Ints, values: Floats) -> Ints:
        """Move lanes past absolute steps that are satisfied already; `len(self)` means finished."""
        at = at.copy()
        for _ in range(len(self)):
            inside = np.flatnonzero(at < len(self))
            now = at[inside]
            met = self.satisfied(now, values[inside], values[inside]) & ~self.relative[now]
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
    return Walk(
        np.concatenate([part.reached for part in parts]),
        np.concatenate([part.length for part in parts]),
        Bank.join([part.ends for part in parts]),
        np.concatenate([part.finished for part in parts]),
        np.concatenate([part.last_start for part in parts]),
        np.concatenate([part.last_before for part in parts]),
        np.concatenate([part.last_values for part in parts]),
        np.sum([part.acted for part in parts], axis=0),
    )


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
        bank = starts.take(np.arange(0))
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


def fresh_worlds(world: World, count: int, seed: int, *names: str | int) -> Bank:
    """`count` new worlds of the stream that `names` name."""
    return world.fresh(count, stream(seed, "worlds", *names))


@dataclass(frozen=True)
class ChainReport:
    """Success of a plan on unseen worlds."""

    plan: list[Step]
    reached: list[float]  # share of worlds in which each step was finished
    skills: dict[str, float]  # success of each skill where its step was entered
    success: float  # of the whole plan
    mean_steps: float  # env steps of the successful ones
    episodes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "plan": [{"skill": step.skill, "count": step.count} for step in self.plan],
            "reached": self.reached,
            "skills": self.skills,
            "success": self.success,
            "mean_steps": self.mean_steps,
            "episodes": self.episodes,
        }


def evaluate_chain(
    store: Store,
    episodes: int = 512,
    seed: int = 0,
    target: str | None = None,
    only: Sequence[str] | None = None,
) -> ChainReport:
    """Play the plan that applies every completed skill (or `only` some, or up to `target`) in new worlds."""
    world_name, plan = plan_of(store, target, only)
    features = world_features(world_name)
    names = list(dict.fromkeys(step.skill for step in plan))
    experts = load_experts(store, names)
    skills = {row.name: row.spec for row in store.skills()}
    world = make_world(world_name, batch_lanes(world_name, episodes))
    starts = fresh_worlds(world, episodes, seed, "unseen")
    course = Course(plan, skills, features, [names.index(step.skill) for step in plan])
    fixed = None if world.fresh_is_cheap else world
    result = walk(world_name, starts, course, experts, stream(seed, "unseen"), fixed)
    reached = [float((result.reached > at).mean()) for at in range(len(plan))]
    entered = [1.0, *reached[:-1]]
    passed: dict[str, list[float]] = {}
    for step, before, after in zip(plan, entered, reached, strict=True):
        passed.setdefault(step.skill, []).append(after / before if before else 0.0)
    lengths = result.length[result.finished]
    return ChainReport(
        plan, reached, {name: sum(rates) / len(rates) for name, rates in passed.items()}, result.success,
        float(lengths.mean()) if len(lengths) else 0.0, episodes,
    )  # fmt: skip


def plan_of(
    store: Store, target: str | None = None, only: Sequence[str] | None = None
) -> tuple[str, list[Step]]:
    """The world of a store and the plan over its completed skills."""
    world_name = store.setting("world")
    if world_name is None:
        raise ConfigError(f"{store.root} has not been trained in: it names no world")
    features = world_features(world_name)
    rows = [row for row in store.skills() if row.expert is not None and store.head(row.expert) is not None]
    if not rows:
        raise ConfigError(f"{store.root} holds no trained skill yet")
    specs = [row.spec for row in rows]
    names = [row.name for row in rows]
    if target is not None:
        from shoal.skills.learning.plan import plan_for

        return world_name, plan_for(store.skill(target).name, specs, features)
    return world_name, covering_plan(specs, features, only=only or names)


def record_chain(
    store: Store, seed: int = 0, lanes: int = 32
) -> tuple[list[Bank], list[Step], list[int], bool]:
    """States of one unseen world while the whole plan is played in it, with the plan step at each.

    Of `lanes` worlds the one that finishes first is taken, or the one that got furthest.
    """
    world_name, plan = plan_of(store)
    features = world_features(world_name)
    names = list(dict.fromkeys(step.skill for step in plan))
    experts = load_experts(store, names)
    course = Course(
        plan, {row.name: row.spec for row in store.skills()}, features, [names.index(s.skill) for s in plan]
    )
    lanes = world_kind(world_name).most_lanes or lanes
    world: World = make_world(world_name, lanes)
    frames: list[Bank] = []
    at_frames: list[Any] = []
    recorder = _Recorder(world, frames)
    starts = fresh_worlds(world, lanes, seed, "film")
    result = walk(world_name, starts, course, experts, stream(seed, "film"), recorder)
    order = sorted(range(lanes), key=lambda i: (-int(result.reached[i]), int(result.length[i])))
    best = order[0]
    import numpy as np

    film = [bank.take(np.array([best])) for bank in frames[: int(result.length[best]) + 1]]
    at_frames = _steps_of(film, world, course)
    return film, plan, at_frames, bool(result.finished[best])


def _steps_of(film: list[Bank], world: World, course: Course) -> list[int]:
    """The plan step that each state of a film belongs to, by the same rules as `walk`."""
    import numpy as np

    every = np.ones(world.lanes, np.bool_)
    rows = np.zeros(world.lanes, np.int64)
    at = np.zeros(1, np.int64)
    steps: list[int] = []
    start = None
    for bank in film:
        world.load(bank, rows, every)
        values = world.values()[:1]
        if start is None:
            at, start = course.skip(at, values), values
        elif at[0] < len(course) and course.satisfied(at, values, start)[0]:
            at, start = course.skip(at + 1, values), values
        steps.append(int(min(at[0], len(course) - 1)))
    return steps


class _Recorder:
    """A world that keeps the states of its lanes after every step."""

    def __init__(self, world: World, frames: list[Bank]) -> None:
        self._world, self._frames = world, frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def load(self, *arguments: Any) -> None:
        """Load and keep the start."""
        self._world.load(*arguments)
        self._frames.append(self._world.save())

    def step(self, *arguments: Any) -> Any:
        """Step and keep the state."""
        died = self._world.step(*arguments)
        self._frames.append(self._world.save())
        return died


def load_experts(store: Store, names: Sequence[str]) -> list[Network]:
    """The heads of the experts of some skills."""
    nets = []
    for name in names:
        row = store.skill(name)
        head = store.head(row.expert) if row.expert is not None else None
        if head is None:
            raise DataError(f"skill {name!r} has no expert yet: it is {row.status}")
        nets.append(Network.from_params(decode(store.get_blob(head.sha256), name)[0]))
    return nets
