"""Skills as data: what one needs, gives, when it is done and what it pays; the plans that follow; how they are stored.

A skill speaks of `features`, the named counts that a world reports (`wood`, `table_placed`). Counters grow and
shrink and are judged relative to where the skill began; tools and achievements are judged absolutely. No code is run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.registry import check_name

Op = Literal[">=", "<="]
MAX_SPEC_BYTES = 1 << 20
MAX_HORIZON = 10_000  # env steps that one application may take


def slug(name: str) -> str:
    """A folder and session name for a skill's name; different names have different slugs.

    Letters, digits and `-` stay, a space becomes `_`, anything else `~` and its code, so it can be undone.

    >>> slug("Collect Wood"), slug("Make (Iron) Pickaxe")
    ('Collect_Wood', 'Make_~28Iron~29_Pickaxe')
    """
    check_name("skill", name)
    return "".join(c if c.isalnum() or c == "-" else "_" if c == " " else f"~{ord(c):02x}" for c in name)


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a world, and how far its counters go."""

    world: str
    names: tuple[str, ...]
    capacity: Mapping[str, int]  # of counters; what is absent holds at most one
    counters: frozenset[str]  # judged relative to the start of a skill; the others absolutely
    places: frozenset[str] = frozenset()  # where one stands: lost by each skill that does not speak of them
    actions: tuple[str, ...] = ()  # the words for the actions, where they are known without making a world

    def index(self, name: str) -> int:
        """The column of a feature."""
        return self.names.index(name)

    def holds(self, name: str) -> int:
        """How many of `name` can be had at once."""
        return self.capacity.get(name, 1)


@dataclass(frozen=True, slots=True)
class Predicate:
    """When one application of a skill is done: `feature op count`, relative to its start or absolute."""

    feature: str
    count: int = 1
    op: Op = ">="
    relative: bool | None = None  # None: relative for counters, absolute for the rest


@dataclass(frozen=True, slots=True)
class Reward:
    """What training pays: weights on the signed change of features, a bonus when done, a cost per step.

    The change is signed on purpose: if only increases paid, an agent could spend an item and earn it again.
    """

    weights: Mapping[str, float] = field(default_factory=dict)  # empty: 1 on the feature of `done`
    bonus: float = 1.0
    step_cost: float = 0.01


@dataclass(frozen=True, slots=True)
class Skill:
    """One node of the graph. Amounts are per application.

    `requirements` must be there when the skill starts, what it consumes included; `practice` is how many
    applications in a row one training episode asks for, so that an expert knows full hands too.
    """

    name: str
    done: Predicate
    requirements: Mapping[str, int] = field(default_factory=dict)
    consumption: Mapping[str, int] = field(default_factory=dict)
    gain: Mapping[str, int] = field(default_factory=dict)
    reward: Reward = field(default_factory=Reward)
    horizon: int = 100  # steps that one application may take
    practice: int = 1
    description: str = ""
    upkeep: Mapping[str, int] = field(default_factory=dict)  # playing on, apply it when no more are left
    actions: tuple[str, ...] = ()  # the only ones that a new expert of it takes; empty: any

    def held(self, item: str) -> int:
        """How many of `item` must be there without being used up."""
        return self.requirements.get(item, 0) - self.consumption.get(item, 0)

    def needs(self, item: str, times: int) -> int:
        """How many of `item` must be there to apply the skill `times` in a row."""
        return self.held(item) + times * self.consumption.get(item, 0)

    def speaks_of(self) -> frozenset[str]:
        """Every feature that the skill names."""
        return frozenset(
            [*self.requirements, *self.consumption, *self.gain, *self.reward.weights, self.done.feature]
        )

    def as_dict(self) -> dict[str, Any]:
        """The skill as plain JSON types; without upkeep or actions it is as it was before there were any."""
        data = asdict(self)
        data["actions"] = list(self.actions)
        for later in ("upkeep", "actions"):
            if not data[later]:
                del data[later]
        return data


def is_relative(predicate: Predicate, features: Features) -> bool:
    """Whether a predicate counts from the start of the skill."""
    return predicate.feature in features.counters if predicate.relative is None else predicate.relative


def parse_skill(data: Mapping[str, Any]) -> Skill:
    """A skill from plain data, shape checked; what the features allow is `check_skill`'s business."""
    label = repr(str(data.get("name", "?"))[:80])
    for kind, where, part in (
        (Skill, "", data),
        (Predicate, " in `done`", data.get("done")),
        (Reward, " in `reward`", data.get("reward")),
    ):
        known = [item.name for item in fields(kind)]
        for key in part if isinstance(part, Mapping) else ():
            if key not in known:
                raise ConfigError(
                    f"skill {label}: unknown field `{key}`{where}.{did_you_mean(str(key), known)}"
                )
    try:
        return msgspec.convert(dict(data), Skill)
    except msgspec.ValidationError as error:
        raise ConfigError(f"skill {label}: {error}") from error


def check_skill(skill: Skill, features: Features) -> Skill:
    """Return `skill` if it makes sense in a world with these features, else say what does not."""

    def fail(text: str) -> ConfigError:
        return ConfigError(f"skill {skill.name!r}: {text}")

    check_name("skill", skill.name)
    named = [*skill.speaks_of(), *skill.upkeep]
    for name in named:
        if name not in features.names:
            raise fail(f"no feature named {name!r} in {features.world}.{did_you_mean(name, features.names)}")
    for action in skill.actions if features.actions else ():
        if action not in features.actions:
            raise fail(
                f"no action named {action!r} in {features.world}.{did_you_mean(action, features.actions)}"
            )
    for where in ("requirements", "consumption", "gain"):
        for item, amount in getattr(skill, where).items():
            if not 1 <= amount <= features.holds(item):
                raise fail(
                    f"{where} {item!r} must be in 1..{features.holds(item)} (what can be held), got {amount}"
                )
    for item, amount in skill.upkeep.items():
        if not 0 <= amount < features.holds(item):
            raise fail(
                f"upkeep {item!r} must be in 0..{features.holds(item) - 1} (less than can be held), got {amount}"
            )
    for item, amount in skill.consumption.items():
        if skill.requirements.get(item, 0) < amount:
            raise fail(f"consumes {amount} {item!r} but requires {skill.requirements.get(item, 0)}")
    if not skill.gain:
        raise fail("gain is empty: nothing could ever need this skill or see it done")
    done = skill.done
    if done.count < 1 or skill.practice < 1 or not 1 <= skill.horizon <= MAX_HORIZON:
        raise fail(
            f"done.count and practice must be at least 1, horizon in 1..{MAX_HORIZON:,}, got {done.count}, "
            f"{skill.practice} and {skill.horizon}"
        )
    for item in skill.gain:
        if skill.practice * skill.gain[item] > features.holds(item):
            raise fail(
                f"practice {skill.practice} would gain more {item!r} than can be held ({features.holds(item)})"
            )
    most = features.holds(done.feature)
    if done.op == ">=" and done.count * (skill.practice if is_relative(done, features) else 1) > most:
        raise fail(
            f"is never done: {done.count} {done.feature!r}, {skill.practice} times in a row, are more than the {most} "
            f"that can be held"
        )
    if done.op == "<=" and (is_relative(done, features) or done.count >= most):
        raise fail(f"is done before it begins: {done.feature!r} <= {done.count} always holds at its start")
    values = [*skill.reward.weights.values(), skill.reward.bonus, skill.reward.step_cost]
    if not all(math.isfinite(value) and abs(value) <= 100 for value in values):
        raise fail(
            f"reward weights, bonus and step_cost must be finite and at most 100 in size, got {values}"
        )
    return skill


def check_skills(skills: Iterable[Skill], features: Features) -> list[Skill]:
    """Check each skill, and that no two share a name or a folder name."""
    checked: list[Skill] = []
    seen: dict[str, str] = {}
    for skill in skills:
        check_skill(skill, features)
        if slug(skill.name) in seen:
            raise ConfigError(f"two skills are named {skill.name!r}")
        seen[slug(skill.name)] = skill.name
        checked.append(skill)
    return checked


def load_skills(path: Path | str, features: Features) -> list[Skill]:
    """The skills of a YAML knowledge base, in its order, checked.

    Raises:
        ConfigError: aliases, tags, more than 1 MiB, unknown keys, or a skill that makes no sense.
    """
    data = read_yaml(Path(path))
    if (
        not isinstance(data, dict)
        or set(data) - {"world", "skills"}
        or not isinstance(data.get("skills"), list)
    ):
        raise ConfigError(f"{path} must hold an object with 'world' and a list 'skills'")
    world = data.get("world")
    if world is not None and str(world).lower() != features.world.lower():
        raise ConfigError(f"{path} is about {world!r}, the world is {features.world!r}")
    if not all(isinstance(item, dict) for item in data["skills"]):
        raise ConfigError(f"{path}: each skill must be an object")
    return check_skills([parse_skill(item) for item in data["skills"]], features)


def read_yaml(path: Path) -> Any:
    """Plain YAML data: no tags that make objects, no aliases (a few bytes could become gigabytes)."""
    import yaml

    text = path.read_bytes()
    if len(text) > MAX_SPEC_BYTES:
        raise ConfigError(f"{path} has {len(text)} bytes, at most {MAX_SPEC_BYTES} are read")
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError(f"{path} uses a YAML alias (*name); write the value out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from error


# From requirements and gains to a plan: which skills, how often, in which order. A plan is only ever returned after a
# simulation of it, so that capacity, consumption and order are right.

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


def dependencies(skill: Skill, skills: Sequence[Skill], features: Features | None = None) -> list[str]:
    """Names of the skills whose experts a training of `skill` needs: those of its plan, in plan order."""
    steps = plan_for(skill.name, skills, features)
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
    try:
        resolver.apply(by_name[target], times or by_name[target].practice, ())
    except RecursionError:
        raise ConfigError(
            f"too many skills follow one after another to {target!r}; join some of them"
        ) from None
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
        if _apply(skill, step.count, hands, features) & (features.counters if features else set()):
            return None
    return hands


def _apply(skill: Skill, times: int, hands: Counter[str], features: Features | None) -> set[str]:
    """Change what is in the hands as the skill does, which leaves every place that it does not speak of.

    Returns:
        What there is more of than can be held.
    """
    spilt = set()
    for item, amount in skill.consumption.items():
        hands[item] -= amount * times
    for item, amount in skill.gain.items():
        hands[item] += amount * times
        if features and hands[item] > features.holds(item):
            hands[item] = features.holds(item)
            spilt.add(item)
    for place in features.places - skill.speaks_of() if features else ():
        hands[place] = 0
    return spilt


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
        _apply(skill, times, self.hands, self.features)
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
