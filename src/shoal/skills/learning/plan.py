"""From requirements and gains to a plan: which skills, how often, in which order; and how worlds are led along it.

A plan is only ever returned after a simulation of it, so that capacity, consumption and order are right. Followed, the
step a lane is at decides which expert acts in it; steps already satisfied are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ConfigError, did_you_mean
from shoal.maths.distributions import sample
from shoal.skills.learning.network import Network
from shoal.skills.learning.spec import MAX_HORIZON, Features, Skill, is_relative
from shoal.skills.learning.worlds import Bank, Bools, Floats, Ints, World, make_world

MAX_STEPS = 500
MAX_LENGTH = 200_000  # env steps that a plan may take by the horizons of its skills
MAX_WORK = 20_000  # applications tried while resolving; a graph that needs more is refused


@dataclass(frozen=True, slots=True)
class Step:
    """Apply `skill` `count` times in a row."""

    skill: str
    count: int


def providers(item: str, skills: Iterable[Skill]) -> list[Skill]:
    """All skills that gain `item`, cheapest first: fewest requirements, then shortest, then in given order."""
    return sorted(
        (skill for skill in skills if skill.gain.get(item, 0) > 0),
        key=lambda skill: (sum(skill.requirements.values()), skill.horizon),
    )


def dependencies(skill: Skill, skills: Sequence[Skill]) -> list[str]:
    """Names of the skills whose experts a training of `skill` needs: those of its plan, in plan order."""
    steps = plan_for(skill.name, skills, features=None)
    return list(dict.fromkeys(step.skill for step in steps if step.skill != skill.name))


def plan_for(
    target: str,
    skills: Sequence[Skill],
    features: Features | None = None,
    times: int | None = None,
    *,
    hands: Mapping[str, int] | None = None,
) -> list[Step]:
    """The plan that starts with `hands` (empty if absent) and ends with `target` applied `times` (its practice).

    Raises:
        ConfigError: the target or a required item cannot be had; the message names it, or the cycle.
    """
    by_name = {skill.name: skill for skill in skills}
    if target not in by_name:
        raise ConfigError(f"no skill named {target!r}.{did_you_mean(target, by_name)}")
    resolver = _Resolver(skills, features, hands)
    resolver.apply(by_name[target], times or by_name[target].practice, ())
    return _merge_repeats(resolver.steps, by_name, features, hands)


def covering_plan(
    skills: Sequence[Skill], features: Features | None = None, only: Iterable[str] | None = None
) -> list[Step]:
    """A plan in which every skill (or those named in `only`) is applied at least once."""
    by_name = {skill.name: skill for skill in skills}
    resolver = _Resolver(skills, features)
    wanted = list(by_name) if only is None else list(only)
    for name in sorted(wanted, key=lambda name: len(plan_for(name, skills, features))):
        if name not in {step.skill for step in resolver.steps}:
            resolver.apply(by_name[name], 1, ())
    return _merge_repeats(resolver.steps, by_name, features)


def simulate(
    steps: Iterable[Step],
    skills: Mapping[str, Skill],
    features: Features | None = None,
    hands: Mapping[str, int] | None = None,
) -> Counter[str] | None:
    """What is in the hands after the plan, or None if a step could not start or hands would overflow."""
    hands = Counter(hands or {})
    for step in steps:
        skill = skills[step.skill]
        for item in skill.requirements:
            if hands[item] < skill.needs(item, step.count):
                return None
        for item, amount in skill.consumption.items():
            hands[item] -= amount * step.count
        for item, amount in skill.gain.items():
            total = hands[item] + amount * step.count
            limit = features.holds(item) if features else total
            if total > limit and (features is None or item in features.counters):
                return None
            hands[item] = min(total, limit)
        _walk_off(skill, hands, features)
    return hands


def _walk_off(skill: Skill, hands: Counter[str], features: Features | None) -> None:
    """A skill leaves every place that it does not speak of."""
    for place in features.places - skill.speaks_of() if features else ():
        hands[place] = 0


def check_graph(skills: Sequence[Skill], features: Features | None = None) -> None:
    """Raise if some skill can never be reached: an item nobody gains, or skills that wait for each other."""
    for skill in skills:
        plan_for(skill.name, skills, features)


class _Resolver:
    """Builds steps backwards from needs, keeping count of what is in the hands."""

    def __init__(
        self, skills: Sequence[Skill], features: Features | None, hands: Mapping[str, int] | None = None
    ) -> None:
        self.skills, self.features = skills, features
        self.steps: list[Step] = []
        self.hands: Counter[str] = Counter(hands or {})
        self.work = self.length = 0
        self.depths: dict[str, int] = {}

    def apply(self, skill: Skill, times: int, path: tuple[str, ...]) -> None:
        """Have everything `skill` needs, then apply it."""
        self.work += 1
        if self.work > MAX_WORK:
            raise ConfigError(f"the graph behind {skill.name!r} is too tangled to resolve")
        if skill.name in path:
            cycle = " -> ".join([*path[path.index(skill.name) :], skill.name])
            raise ConfigError(f"skills wait for each other: {cycle}")
        left = times
        while left:
            batch = min(left, self._fits(skill))
            for _ in range(len(skill.requirements) + 2):
                # Providing one item may use up another, so ask again until all are there together.
                if all(self.hands[item] >= skill.needs(item, batch) for item in skill.requirements):
                    break
                for item, amount in self._shopping(skill, batch):
                    self._provide(item, amount, (*path, skill.name))
            else:
                raise ConfigError(f"skill {skill.name!r}: its requirements use each other up")
            self._step(skill, batch)
            left -= batch

    def _shopping(self, skill: Skill, batch: int) -> list[tuple[str, int]]:
        """What to see to, in this order: what is only held (tools), since making it usually costs counters; what is
        used up, also by making the places that the skill asks for; and the places, since fetching leaves them.
        Where there are places, what takes longest to have comes first: having it may use up the rest.
        """  # noqa: D205
        needs = {item: skill.needs(item, batch) for item in skill.requirements}
        places = needs.keys() & self.features.places if self.features else set()
        for lost in ({place for place in places if not self.hands[place]}, places):
            wanted = dict(needs)
            for maker in (found for place in lost for found in providers(place, self.skills)[:1]):
                for item in maker.requirements.keys() - places:
                    both = needs.get(item, 0) + maker.consumption.get(item, 0)
                    wanted[item] = max(wanted.get(item, 0), both, maker.needs(item, 1))
            if all(self.hands[item] >= amount for item, amount in wanted.items() if item not in places):
                break  # nothing is to be fetched, so the places that are there stay
        depth = self._depth if places else lambda item: 0
        return sorted(
            wanted.items(), key=lambda need: (need[0] in places, -skill.held(need[0]), -depth(need[0]))
        )

    def _depth(self, item: str) -> int:
        """How many skills after one another it takes to have `item`."""
        if item not in self.depths:
            self.depths[item] = 0  # for whom a circle leads back here
            for maker in providers(item, self.skills)[:1]:
                self.depths[item] = 1 + max(map(self._depth, maker.requirements), default=0)
        return self.depths[item]

    def _fits(self, skill: Skill) -> int:
        """How many applications in a row the hands can hold the requirements for."""
        limits = [
            (self._holds(item) - skill.held(item)) // amount for item, amount in skill.consumption.items()
        ]
        return max(1, min(limits, default=MAX_STEPS))

    def _provide(self, item: str, amount: int, path: tuple[str, ...]) -> None:
        if amount > self._holds(item):
            raise ConfigError(
                f"{path[-1]!r} needs {amount} {item!r} at once, only {self._holds(item)} can be held"
            )
        while self.hands[item] < amount:
            errors = []
            saved = list(self.steps), Counter(self.hands), self.length
            for provider in providers(item, self.skills):
                missing = amount - self.hands[item]
                try:
                    self.apply(provider, -(-missing // provider.gain[item]), path)
                    break
                except ConfigError as error:
                    errors.append(str(error))
                    self.steps, self.hands, self.length = list(saved[0]), Counter(saved[1]), saved[2]
            else:
                reason = "; ".join(errors) or "no skill gains it"
                raise ConfigError(f"{path[-1]!r} requires {item!r}, which cannot be had: {reason}")

    def _step(self, skill: Skill, times: int) -> None:
        self.length += skill.horizon * times
        if self.length > MAX_LENGTH:
            raise ConfigError(f"the plan for {skill.name!r} may take more than {MAX_LENGTH:,} env steps")
        for item, amount in skill.consumption.items():
            self.hands[item] -= amount * times
        for item, amount in skill.gain.items():
            self.hands[item] = min(self.hands[item] + amount * times, self._holds(item))
        _walk_off(skill, self.hands, self.features)
        self.steps.append(Step(skill.name, times))
        if len(self.steps) > MAX_STEPS:
            raise ConfigError(f"the plan for {skill.name!r} has more than {MAX_STEPS} steps")

    def _holds(self, item: str) -> int:
        return self.features.holds(item) if self.features else 1 << 30


def _merge_repeats(
    steps: list[Step],
    skills: Mapping[str, Skill],
    features: Features | None,
    hands: Mapping[str, int] | None = None,
) -> list[Step]:
    """Do at one go what the plan does in several, where a simulation says it may: fewer ways, fewer failures."""
    merged = True
    while merged:
        merged = False
        for late in range(len(steps) - 1, 0, -1):
            early = next((i for i in range(late) if steps[i].skill == steps[late].skill), None)
            if early is None or (features and skills[steps[late].skill].gain.keys() & features.places):
                continue  # where one stands cannot be had twice
            joined = Step(steps[late].skill, steps[early].count + steps[late].count)
            trial = [*steps[:early], joined, *steps[early + 1 : late], *steps[late + 1 :]]
            if simulate(trial, skills, features, hands) is not None:
                steps, merged = trial, True
                break
    return steps


def shortened(
    steps: list[Step],
    skills: Mapping[str, Skill],
    features: Features | None = None,
    hands: Mapping[str, int] | None = None,
) -> list[Step]:
    """A plan without repeats that can be done at one go, and without what nothing after it needs any more.

    Every skill is still applied.
    """
    before: list[Step] | None = None
    while steps != before:  # what is left out may let others come together
        before = steps
        steps = _merge_repeats(steps, skills, features, hands)
        for at in range(len(steps) - 1, -1, -1):
            twice = sum(step.skill == steps[at].skill for step in steps) > 1
            for count in range(0 if twice else 1, steps[at].count):
                less = [Step(steps[at].skill, count)] if count else []
                trial = [*steps[:at], *less, *steps[at + 1 :]]
                if simulate(trial, skills, features, hands) is not None:
                    steps = trial
                    break
    return steps


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
