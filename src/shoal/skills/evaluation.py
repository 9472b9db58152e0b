"""How good the skills are on worlds that no training, no bank and no merge has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.seeding import stream
from shoal.skills.chain import Course, fresh_worlds, walk
from shoal.skills.plan import Step, covering_plan
from shoal.skills.processing import load_experts
from shoal.skills.store import Store
from shoal.skills.worlds import Bank, World, batch_lanes, make_world, world_features


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
        from shoal.skills.plan import plan_for

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
    lanes = batch_lanes(world_name, lanes if world_name == "crafting" else 64)
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
