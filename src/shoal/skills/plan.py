"""From requirements and gains to a plan: which skills, how often, in which order.

A plan is returned only after it was simulated, so that capacity, consumption and order are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ConfigError, did_you_mean
from shoal.skills.spec import Features, Skill

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


def dependencies(skill: Skill, skills: Sequence[Skill], features: Features) -> list[str]:
    """Names of the skills whose experts a training of `skill` needs: those of its plan, in plan order."""
    steps = plan_for(skill.name, skills, features)
    return list(dict.fromkeys(step.skill for step in steps if step.skill != skill.name))


def plan_for(
    target: str,
    skills: Sequence[Skill],
    features: Features,
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
    try:
        resolver.apply(by_name[target], times or by_name[target].practice, ())
    except RecursionError:
        raise ConfigError(
            f"too many skills follow one after another to {target!r}; join some of them"
        ) from None
    return _merge_repeats(resolver.steps, by_name, features, hands)


def covering_plan(
    skills: Sequence[Skill], features: Features, only: Iterable[str] | None = None
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
    features: Features,
    hands: Mapping[str, int] | None = None,
) -> Counter[str] | None:
    """What is in the hands after the plan, or None if a step could not start or hands would overflow."""
    hands = Counter(hands or {})
    for step in steps:
        skill = skills[step.skill]
        for item in skill.requirements:
            if hands[item] < skill.needs(item, step.count):
                return None
        if _apply(skill, step.count, hands, features) & features.counters:
            return None
    return hands


def _apply(skill: Skill, times: int, hands: Counter[str], features: Features) -> set[str]:
    """Change what is in the hands as the skill does, which leaves every place that it does not speak of.

    Returns:
        What there is more of than can be held.
    """
    spilt = set()
    for item, amount in skill.consumption.items():
        hands[item] -= amount * times
    for item, amount in skill.gain.items():
        hands[item] += amount * times
        if hands[item] > features.holds(item):
            hands[item] = features.holds(item)
            spilt.add(item)
    for place in features.places - skill.speaks_of():
        hands[place] = 0
    return spilt


class _Resolver:
    """Builds steps backwards from needs, keeping count of what is in the hands."""

    def __init__(
        self, skills: Sequence[Skill], features: Features, hands: Mapping[str, int] | None = None
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
        places = needs.keys() & self.features.places
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
            (self.features.holds(item) - skill.held(item)) // amount
            for item, amount in skill.consumption.items()
        ]
        return max(1, min(limits, default=MAX_STEPS))

    def _provide(self, item: str, amount: int, path: tuple[str, ...]) -> None:
        if amount > (most := self.features.holds(item)):
            raise ConfigError(f"{path[-1]!r} needs {amount} {item!r} at once, only {most} can be held")
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
        _apply(skill, times, self.hands, self.features)
        self.steps.append(Step(skill.name, times))
        if len(self.steps) > MAX_STEPS:
            raise ConfigError(f"the plan for {skill.name!r} has more than {MAX_STEPS} steps")


def _merge_repeats(
    steps: list[Step],
    skills: Mapping[str, Skill],
    features: Features,
    hands: Mapping[str, int] | None = None,
) -> list[Step]:
    """Do at one go what the plan does in several, where a simulation says it may: fewer ways, fewer failures."""
    merged = True
    while merged:
        merged = False
        for late in range(len(steps) - 1, 0, -1):
            early = next((i for i in range(late) if steps[i].skill == steps[late].skill), None)
            if early is None or skills[steps[late].skill].gain.keys() & features.places:
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
    features: Features,
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
