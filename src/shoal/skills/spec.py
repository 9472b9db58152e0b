"""Skills as data: what one needs, gives, when it is done and what it pays; the plans that follow; how they are stored.

A skill speaks of `features`, the named counts that a world reports (`wood`, `table_placed`). Counters grow and
shrink and are judged relative to where the skill began; tools and achievements are judged absolutely. No code is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from shoal.core.configuration import check_fields, from_mapping, read_settings, to_mapping
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.registry import check_name

Op = Literal[">=", "<="]
MAX_HORIZON = 10_000  # env steps that one application may take
Count = Annotated[int, Meta(ge=1)]
Weight = Annotated[float, Meta(ge=-100, le=100)]


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
    count: Count = 1
    op: Op = ">="
    relative: bool | None = None  # None: relative for counters, absolute for the rest


@dataclass(frozen=True, slots=True)
class Reward:
    """What training pays: weights on the signed change of features, a bonus when done, a cost per step.

    The change is signed on purpose: if only increases paid, an agent could spend an item and earn it again.
    """

    weights: Mapping[str, Weight] = field(default_factory=dict)  # empty: 1 on the feature of `done`
    bonus: Weight = 1.0
    step_cost: Weight = 0.01


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
    horizon: Annotated[int, Meta(ge=1, le=MAX_HORIZON)] = 100  # steps that one application may take
    practice: Count = 1
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
        """The skill as plain JSON types."""
        return to_mapping(self)

    def amounts(self) -> dict[str, dict[str, int]]:
        """Requirements, consumption and gain under the names of the reference."""
        return {where: dict(getattr(self, where)) for where in ("requirements", "consumption", "gain")}


def is_relative(predicate: Predicate, features: Features) -> bool:
    """Whether a predicate counts from the start of the skill."""
    return predicate.feature in features.counters if predicate.relative is None else predicate.relative


def parse_skill(data: Mapping[str, Any]) -> Skill:
    """A skill from plain data, each value in its range; what the features allow is `check_skill`'s business."""
    try:
        return from_mapping(Skill, data)
    except ConfigError as error:
        raise ConfigError(f"skill {str(data.get('name', '?'))[:80]!r}: {error}") from error


def check_skill(skill: Skill, features: Features) -> Skill:
    """Return `skill` if it makes sense in a world with these features, else say what does not."""

    def fail(text: str) -> ConfigError:
        return ConfigError(f"skill {skill.name!r}: {text}")

    check_name("skill", skill.name)
    try:
        check_fields(skill)
    except ConfigError as error:
        raise fail(str(error)) from error
    for name in [*skill.speaks_of(), *skill.upkeep]:
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
        ConfigError: it is not plain YAML, more than 1 MiB, has unknown keys, or a skill that makes no sense.
    """
    data = read_settings(Path(path))
    if set(data) - {"world", "skills"} or not isinstance(data.get("skills"), list):
        raise ConfigError(f"{path} must hold an object with 'world' and a list 'skills'")
    world = data.get("world")
    if world is not None and str(world).lower() != features.world.lower():
        raise ConfigError(f"{path} is about {world!r}, the world is {features.world!r}")
    if not all(isinstance(item, dict) for item in data["skills"]):
        raise ConfigError(f"{path}: each skill must be an object")
    return check_skills([parse_skill(item) for item in data["skills"]], features)
