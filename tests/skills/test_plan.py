from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.skills.conftest import skill

from shoal.core.errors import ConfigError
from shoal.skills.plan import (
    Step,
    covering_plan,
    dependencies,
    plan_for,
    providers,
    shortened,
    simulate,
)
from shoal.skills.proposers import knowledge_base
from shoal.skills.spec import Features, Skill, load_skills
from shoal.skills.worlds.craftax import features_of
from shoal.skills.worlds.crafting import CRAFTING

SKILLS = load_skills(knowledge_base("crafting"), CRAFTING)


def told(plan: list[Step]) -> str:
    return ", ".join(step.skill + (f" x{step.count}" if step.count > 1 else "") for step in plan)


def test_the_stone_pickaxe_takes_four_wood_in_one_go() -> None:
    # 2 for the table, 1 for the wood pickaxe, 1 for the stone pickaxe: 4, collected at once.
    assert (
        told(plan_for("Make Stone Pickaxe", SKILLS, CRAFTING))
        == "Collect Wood x4, Place Table, Make Wood Pickaxe, Collect Stone, Make Stone Pickaxe"
    )


def test_every_plan_of_the_crafting_world_can_be_carried_out() -> None:
    by_name = {s.name: s for s in SKILLS}
    for s in SKILLS:
        assert replay(plan_for(s.name, SKILLS, CRAFTING), by_name, CRAFTING)[s.done.feature] >= 1
    covered = covering_plan(SKILLS, CRAFTING)
    assert {step.skill for step in covered} == set(by_name)
    replay(covered, by_name, CRAFTING)


class Boundless(dict[str, int]):
    def get(self, name: str, default: int | None = None) -> int:
        return 1 << 30


ANY = Features("any", (), Boundless(), frozenset())  # of which as much can be held as anybody wants
CLASSIC = features_of("craftax-classic")
CLASSIC_SKILLS = load_skills(knowledge_base("craftax-classic"), CLASSIC)


def test_a_place_that_was_left_is_made_again_where_it_is_needed() -> None:
    # 2 + 1 wood for the first table and the wood pickaxe, 2 + 1 for the second table and the stone pickaxe.
    assert (
        told(plan_for("Make Stone Pickaxe", CLASSIC_SKILLS, CLASSIC))
        == "Collect Wood x6, Place Table, Make Wood Pickaxe, Collect Stone, Place Table, Make Stone Pickaxe"
    )
    once = [
        Step("Collect Wood", 6),
        *(Step(name, 1) for name in ("Place Table", "Make Wood Pickaxe", "Collect Stone")),
    ]
    by_name = {s.name: s for s in CLASSIC_SKILLS}
    assert simulate([*once, Step("Make Stone Pickaxe", 1)], by_name, CLASSIC) is None
    assert (
        simulate([*once, Step("Place Table", 1), Step("Make Stone Pickaxe", 1)], by_name, CLASSIC) is not None
    )


@pytest.mark.parametrize("world", ["craftax-classic", "craftax"])
def test_every_plan_of_craftax_can_be_carried_out_where_fetching_leaves_the_table(world: str) -> None:
    features = features_of(world)
    skills = load_skills(knowledge_base(world), features)
    by_name = {s.name: s for s in skills}
    for s in skills:
        plan = plan_for(s.name, skills, features)
        assert replay(plan, by_name, features)[s.done.feature] >= 1
        assert simulate(plan, by_name, features) is not None
    covered = covering_plan(skills, features)
    assert {step.skill for step in covered} == set(by_name)
    replay(covered, by_name, features)


def test_the_dungeon_of_craftax_is_entered_with_a_stone_and_its_chests_are_opened_there() -> None:
    features = features_of("craftax")
    skills = load_skills(knowledge_base("craftax"), features)
    assert (
        told(plan_for("Open Chest", skills, features))
        == "Collect Wood x3, Place Table, Make Wood Pickaxe, Collect Stone, Enter Dungeon, Open Chest"
    )


def test_a_plan_goes_on_from_what_the_hands_hold() -> None:
    hands = {"stone_pickaxe": 1, "wood": 1, "stone": 2, "coal": 1, "iron": 1, "near_table": 1}
    makes = "Place Furnace, Make Iron Pickaxe"
    assert told(plan_for("Make Iron Pickaxe", CLASSIC_SKILLS, CLASSIC, hands=hands)) == makes
    away = {**hands, "wood": 3, "near_table": 0}
    assert told(plan_for("Make Iron Pickaxe", CLASSIC_SKILLS, CLASSIC, hands=away)) == f"Place Table, {makes}"


@given(st.permutations(CLASSIC_SKILLS), st.integers(1, 6))
@settings(max_examples=60)
def test_a_shortened_plan_still_applies_every_skill_and_takes_no_longer(
    order: list[Skill], goals: int
) -> None:
    by_name = {s.name: s for s in CLASSIC_SKILLS}
    steps: list[Step] = []
    for goal in order[:goals]:
        hands = simulate(steps, by_name, CLASSIC)
        assert hands is not None
        way = plan_for(goal.name, CLASSIC_SKILLS, CLASSIC, 1, hands=hands)
        if simulate([*steps, *way], by_name, CLASSIC) is not None:  # else the hands are full
            steps += way
    short = shortened(steps, by_name, CLASSIC)
    replay(short, by_name, CLASSIC)
    assert {step.skill for step in short} == {step.skill for step in steps}
    applied, before = ([sum(step.count for step in plan)] for plan in (short, steps))
    assert applied <= before
    assert simulate(short, by_name, CLASSIC) is not None
    assert shortened(short, by_name, CLASSIC) == short


def test_nothing_is_made_twice_in_a_plan_to_several_goals() -> None:
    by_name = {s.name: s for s in CLASSIC_SKILLS}
    ways = [plan_for(name, CLASSIC_SKILLS, CLASSIC, 1) for name in ("Make Wood Pickaxe", "Make Wood Sword")]
    assert (
        told(shortened([step for way in ways for step in way], by_name, CLASSIC))
        == "Collect Wood x4, Place Table, Make Wood Pickaxe, Make Wood Sword"
    )


def replay(plan: list[Step], skills: dict[str, Skill], features: Features) -> Counter[str]:
    """The plan carried out one application at a time, from the definition; asserts that each may start."""
    hands: Counter[str] = Counter()
    for step in plan:
        for _ in range(step.count):
            s = skills[step.skill]
            assert all(hands[item] >= amount for item, amount in s.requirements.items()), (step, hands)
            for item, amount in s.consumption.items():
                hands[item] -= amount
            for item, amount in s.gain.items():
                hands[item] += amount
                if item in features.counters:
                    assert hands[item] <= features.holds(item), (step, hands)
            for place in features.places:
                if place not in {*s.requirements, *s.gain}:
                    hands[place] = 0
    return hands


@st.composite
def graphs(draw: st.DrawFn) -> list[Skill]:
    """Skills i0, i1, … where each item is made from earlier ones only, so that all can be reached."""
    count = draw(st.integers(1, 7))
    made = []
    for number in range(count):
        uses = draw(
            st.dictionaries(st.integers(0, max(number - 1, 0)), st.integers(1, 3), max_size=min(number, 2))
        )
        holds = draw(
            st.dictionaries(st.integers(0, max(number - 1, 0)), st.integers(1, 2), max_size=min(number, 2))
        )
        uses = {f"i{n}": a for n, a in uses.items() if n < number}
        extra = {f"i{n}": uses.get(f"i{n}", 0) + a for n, a in holds.items() if n < number}
        made.append(skill(f"S{number}", f"i{number}", uses, {**uses, **extra}, draw(st.integers(1, 3))))
    return made


@given(graphs())
@settings(max_examples=60)
def test_a_plan_for_any_reachable_graph_can_be_carried_out_step_by_step(made: list[Skill]) -> None:
    by_name = {s.name: s for s in made}
    for target in made:
        plan = plan_for(target.name, made, ANY)
        hands = replay(plan, by_name, ANY)
        assert hands[target.done.feature] >= target.gain[target.done.feature]
        assert plan[-1].skill == target.name or target.name in {step.skill for step in plan}
        assert simulate(plan, by_name, ANY) == hands


def test_capacity_splits_what_hands_cannot_hold_at_once() -> None:
    features = Features("w", ("ore", "bar", "key"), {"ore": 2, "bar": 9}, frozenset({"ore", "bar"}))
    made = [
        skill("Dig", "ore"),
        skill("Smelt", "bar", uses={"ore": 2}),
        skill("Forge", "key", uses={"bar": 3}),
    ]
    plan = plan_for("Forge", made, features)
    assert Counter({s: sum(p.count for p in plan if p.skill == s) for s in ("Dig", "Smelt")}) == {
        "Dig": 6,
        "Smelt": 3,
    }
    replay(plan, {s.name: s for s in made}, features)


def test_a_circle_is_an_error_that_shows_the_way_around() -> None:
    made = [skill("A", "a", uses={"c": 1}), skill("B", "b", uses={"a": 1}), skill("C", "c", uses={"b": 1})]
    with pytest.raises(ConfigError, match="A -> C -> B -> A"):
        plan_for("A", made, ANY)


def test_an_item_that_nobody_gains_is_named() -> None:
    with pytest.raises(ConfigError, match="'Make' requires 'gold', which cannot be had: no skill gains it"):
        plan_for("Make", [skill("Make", "ring", uses={"gold": 1})], ANY)


def test_an_unknown_target_is_guessed() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'Collect Iron'"):
        plan_for("Colect Iron", SKILLS, CRAFTING)


def test_another_provider_is_taken_when_the_first_cannot_be_reached() -> None:
    made = [
        skill("Trade", "wood", uses={"gold": 1}, horizon=1),
        skill("Chop", "wood", uses={}, holds={"axe": 1}),
        skill("Find Axe", "axe"),
        skill("Build", "hut", uses={"wood": 2}),
    ]
    assert [s.name for s in providers("wood", made)] == ["Trade", "Chop"]
    assert [step.skill for step in plan_for("Build", made, ANY)] == ["Find Axe", "Chop", "Build"]


def test_dependencies_are_all_skills_of_the_plan_in_its_order() -> None:
    by_name = {s.name: s for s in SKILLS}
    assert dependencies(by_name["Collect Stone"], SKILLS, CRAFTING) == [
        "Collect Wood",
        "Place Table",
        "Make Wood Pickaxe",
    ]
    assert dependencies(by_name["Drink Water"], SKILLS, CRAFTING) == []


def test_requirements_that_use_each_other_up_are_provided_until_both_are_there() -> None:
    # The pick costs wood, and making the sword needs wood and the pick at once: wood twice, then both.
    made = [
        skill("Chop", "wood"),
        skill("Pick", "pick", uses={"wood": 1}),
        skill("Sword", "sword", uses={"wood": 1}, holds={"pick": 1}),
    ]
    plan = plan_for("Sword", made, ANY)
    assert plan == [Step("Chop", 2), Step("Pick", 1), Step("Sword", 1)]


def test_a_plan_that_is_too_long_to_be_of_use_is_refused() -> None:
    features = Features("w", ("ore", "bar"), {"ore": 1, "bar": 999}, frozenset({"ore", "bar"}))
    pair = [skill("Dig", "ore", horizon=1), skill("Smelt", "bar", uses={"ore": 1}, horizon=1)]
    assert len(plan_for("Smelt", pair, features, 250)) == 500  # one ore at a time can be held
    with pytest.raises(ConfigError, match="the plan for 'Dig' has more than 500 steps"):
        plan_for("Smelt", pair, features, 251)
    slow = skill("Dig", "ore", horizon=10_000)
    assert plan_for("Dig", [slow], ANY, times=20) == [Step("Dig", 20)]
    with pytest.raises(ConfigError, match="the plan for 'Dig' may take more than 200,000 env steps"):
        plan_for("Dig", [slow], ANY, times=21)


def test_a_graph_with_ever_more_ways_that_lead_nowhere_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.skills.plan.MAX_WORK", 2000)
    made = [skill("Start 0", "a0", uses={"nothing": 1})]
    for level in range(1, 14):
        made += [skill(f"Way {level} {way}", f"a{level}", uses={f"a{level - 1}": 1}) for way in range(2)]
    with pytest.raises(ConfigError, match="is too tangled to resolve"):
        plan_for("Way 13 0", made, ANY)


def test_two_places_at_once_cannot_be_had() -> None:
    features = Features("w", ("here", "there", "key"), {}, frozenset(), frozenset({"here", "there"}))
    made = [skill("Go", "here"), skill("Leave", "there"), skill("Both", "key", holds={"here": 1, "there": 1})]
    with pytest.raises(ConfigError, match="skill 'Both': its requirements use each other up"):
        plan_for("Both", made, features)
    near = skill("Leave", "there", holds={"here": 1})  # it stays near
    assert [step.skill for step in plan_for("Both", [made[0], near, made[2]], features)] == [
        "Go",
        "Leave",
        "Both",
    ]


def test_more_than_can_be_held_is_refused_with_both_numbers_and_just_as_much_is_not() -> None:
    features = Features("w", ("ore", "key"), {"ore": 2}, frozenset({"ore"}))
    dig = skill("Dig", "ore")
    assert plan_for("Big", [dig, skill("Big", "key", holds={"ore": 2})], features)[0] == Step("Dig", 2)
    with pytest.raises(ConfigError, match="'Big' needs 3 'ore' at once, only 2 can be held"):
        plan_for("Big", [dig, skill("Big", "key", holds={"ore": 3})], features)


def test_a_simulation_says_what_is_held_in_the_end_or_that_it_cannot_be_done() -> None:
    features = Features("w", ("ore", "key", "here"), {"ore": 2}, frozenset({"ore"}), frozenset({"here"}))
    made = {
        one.name: one
        for one in (
            skill("Dig", "ore"),
            skill("Forge", "key", uses={"ore": 1}, holds={"here": 1}),
            skill("Go", "here"),
        )
    }
    dig, go, forge = Step("Dig", 2), Step("Go", 1), Step("Forge", 1)
    assert simulate([dig, go, forge], made, features) == {"ore": 1, "key": 1, "here": 1}
    assert simulate([go, dig, forge], made, features) is None  # digging leaves the place
    assert simulate([go, dig, forge], made, ANY) == {"ore": 1, "key": 1, "here": 1}
    assert simulate([Step("Dig", 3)], made, features) is None  # more than can be held
    assert simulate([dig], made, features, {"ore": 1}) is None
    assert simulate([go, forge, forge], made, features, {"ore": 2}) == {"ore": 0, "key": 1, "here": 1}
    assert simulate([go, Step("Forge", 3)], made, features, {"ore": 2}) is None
