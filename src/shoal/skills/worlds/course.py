"""Worlds led along a plan: the step a lane is at decides which expert acts in it; satisfied steps are skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from shoal.maths.distributions import sample
from shoal.skills.plan import Step
from shoal.skills.spec import MAX_HORIZON, Features, Skill, is_relative
from shoal.skills.worlds.registry import make_world
from shoal.skills.worlds.world import Bank, Bools, Floats, Ints, World

Watch = Callable[[World, Ints], None]
"""Sees a world after each step, and how many steps of the plan each lane has finished."""


class Expert(Protocol):
    """What acts in a world."""

    def forward(self, observations: Floats) -> tuple[Floats, Floats]:
        """`[B, actions]` log-probabilities and `[B]` values."""


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
    experts: Sequence[Expert],
    rng: np.random.Generator,
    world: World | None = None,
    watch: Watch | None = None,
) -> Walk:
    """Follow `course` from every state of `starts` until it is finished or failed.

    A world whose lanes are cheap to change is made smaller as lanes finish; `world` hands in one to use as it
    is, `world.lanes` states at a time. Of such a one `watch` is called with each state.
    """
    shrink = world_name if world is None else None
    world = world or make_world(world_name, len(starts))
    parts = []
    for first in range(0, len(starts), world.lanes):
        rows = np.arange(first, min(first + world.lanes, len(starts)))
        parts.append(_walk(world, rows, starts, course, experts, rng, shrink, watch))
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
    experts: Sequence[Expert],
    rng: np.random.Generator,
    shrink: str | None,
    watch: Watch | None,
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
    if watch is not None:
        watch(world, reached)
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
        if watch is not None:
            watch(world, reached)
    # In the order of the lanes, so that a bank does not depend on who finished first.
    if ends:
        order = np.argsort(np.concatenate([index for index, _ in ends]), kind="stable")
        bank = Bank.join([states for _, states in ends]).take(order)
    else:
        bank = world.save().take(np.arange(0))
    return Walk(reached[:total], length[:total], bank, reached[:total] >= steps, acted)


def act(observations: Floats, expert: Ints, experts: Sequence[Expert], uniforms: Floats, live: Bools) -> Ints:
    """An action for every lane, from the expert that lane is routed to; lanes not `live` get action 0."""
    actions = np.zeros(len(observations), np.int64)
    for index in np.unique(expert[live]):
        lanes = np.flatnonzero(live & (expert == index))
        everyone = len(lanes) == len(observations)
        logprobs, _ = experts[index].forward(observations if everyone else observations[lanes])
        actions[lanes] = sample(logprobs, uniforms[lanes])
    return actions
