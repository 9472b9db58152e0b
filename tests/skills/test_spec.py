from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.registry import SAFE_NAME
from shoal.skills.proposers import knowledge_base
from shoal.skills.spec import check_skill, check_skills, is_relative, load_skills, parse_skill, slug
from shoal.skills.worlds.craftax import features_of
from shoal.skills.worlds.crafting import CRAFTING

WOOD = {"name": "Collect Wood", "gain": {"wood": 1}, "done": {"feature": "wood"}}
safe_names = st.text("aZf028 _.()-", min_size=1, max_size=8).filter(
    lambda name: SAFE_NAME.fullmatch(name) and not name.endswith((" ", "."))
)


@pytest.mark.parametrize("world", ["crafting", "craftax-classic", "craftax"])
def test_every_knowledge_base_that_comes_with_shoal_is_valid(world: str) -> None:
    features = CRAFTING if world == "crafting" else features_of(world)
    assert len(load_skills(knowledge_base(world), features)) >= 4


@pytest.mark.parametrize(
    "name",
    ["x; touch P #", "$(touch P)", "`id`", "a|b", "a&b", "../up", "/etc/passwd", "a/../../b", "..", "a\0b", "a\nb",
     "x" * 300, "", " lead", "trail ", "dot.", "-x", "é"],
)  # fmt: skip
def test_names_that_a_shell_or_a_path_could_misread_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must be"):
        slug(name)
    with pytest.raises(ValueError, match="name must be"):
        check_skill(parse_skill({**WOOD, "name": name}), CRAFTING)


@given(safe_names, safe_names)
def test_different_names_have_different_slugs_that_are_safe(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)
    assert "/" not in slug(one)
    assert " " not in slug(one)
    assert not slug(one).startswith((".", "-"))


def test_names_that_older_cleaners_would_make_equal_stay_apart() -> None:
    names = ["Make Pickaxe", "Make_Pickaxe", "Make (Pickaxe)", "Make.Pickaxe", "Make-Pickaxe"]
    assert len({slug(name) for name in names}) == len(names)
    skills = [parse_skill({**WOOD, "name": name}) for name in names]
    assert len(check_skills(skills, CRAFTING)) == len(names)


def test_two_skills_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two skills are named 'Collect Wood'"):
        check_skills([parse_skill(WOOD), parse_skill(WOOD)], CRAFTING)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gain": {"gold": 1}}, "no feature named 'gold' in crafting"),
        ({"done": {"feature": "wod"}}, "Did you mean 'wood'"),
        ({"gain": {}}, "gain is empty"),
        ({"gain": {"wood": 10}}, "must be in 1..9"),
        ({"gain": {"wood": -1}}, "must be in 1..9"),
        ({"requirements": {"table": 2}}, "must be in 1..1"),
        ({"consumption": {"stone": 1}}, "consumes 1 'stone' but requires 0"),
        ({"horizon": 0}, "at least 1"),
        ({"practice": 10}, "more 'wood' than can be held"),
        ({"done": {"feature": "wood", "op": "=="}}, "done.op must be '>=' or '<=', got '=='"),
        ({"reward": {"weights": {"wood": 1e9}}}, "at most 100"),
        ({"reward": {"bonus": float("nan")}}, "reward.bonus must be at least -100, got nan"),
        ({"code": "import os"}, "unknown key 'code'"),
        ({"horizn": 3}, "unknown key 'horizn'. Did you mean 'horizon'"),
        ({"done": {"feature": "wood", "cout": 2}}, "unknown key 'done.cout'. Did you mean 'done.count'"),
        ({"reward": {"bonas": 2}}, "unknown key 'reward.bonas'. Did you mean 'reward.bonus'"),
        ({"horizon": 10_001}, "horizon must be at most 10000, got 10001"),
        ({"practice": 0}, "practice must be at least 1, got 0"),
        ({"done": {"feature": "wood", "count": 0}}, "done.count must be at least 1, got 0"),
        ({"done": {"feature": "wood", "count": 10}}, "10 'wood', 1 times in a row, are more than the 9 "),
        (
            {"done": {"feature": "wood", "count": 5}, "practice": 2},
            "5 'wood', 2 times in a row, are more than",
        ),
        (
            {"done": {"feature": "table", "count": 2}},
            "never done: 2 'table', 1 times in a row, are more than the 1 ",
        ),
        ({"done": {"feature": "wood", "op": "<="}}, "done before it begins: 'wood' <= 1 always holds"),
        ({"done": {"feature": "table", "op": "<="}}, "done before it begins: 'table' <= 1 always holds"),
        ({"requirements": {"wood": 2}, "consumption": {"wood": 3}}, "consumes 3 'wood' but requires 2"),
        ({"requirements": {"wood": 0}}, "requirements 'wood' must be in 1..9 (what can be held), got 0"),
        ({"reward": {"weights": {"wood": -101}}}, "reward.weights must be at least -100, got"),
        ({"reward": {"step_cost": 100.5}}, "reward.step_cost must be at most 100, got 100.5"),
        ({"name": "x" * 99, "code": 1}, f"skill {'x' * 80!r}: unknown"),
        ({"done": {}}, "done.feature is missing"),
    ],
)
def test_a_skill_that_makes_no_sense_is_refused_with_the_reason(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_skill(parse_skill({**WOOD, **change}), CRAFTING)


@pytest.mark.parametrize(
    "change",
    [
        {"gain": {"wood": 9}},
        {"requirements": {"wood": 9, "table": 1}, "consumption": {"wood": 9}},
        {"practice": 9},
        {"practice": 4, "done": {"feature": "wood", "count": 2}},
        {"practice": 9, "done": {"feature": "wood", "count": 9, "relative": False}},
        {"horizon": 1},
        {"horizon": 10_000},
        {"done": {"feature": "wood", "count": 9}},
        {"done": {"feature": "wood", "count": 8, "op": "<=", "relative": False}},
        {"upkeep": {"drink": 0, "wood": 8}},
        {"reward": {"weights": {"wood": -100, "stone": 100}, "bonus": -100, "step_cost": 100}},
    ],
)
def test_a_skill_at_the_edge_of_what_makes_sense_is_taken(change: dict[str, object]) -> None:
    assert check_skill(parse_skill({**WOOD, **change}), CRAFTING).name == "Collect Wood"


def test_a_skill_that_says_little_has_the_rest_by_default() -> None:
    skill = parse_skill(WOOD)
    assert (skill.horizon, skill.practice, skill.description, skill.upkeep, skill.actions) == (
        100,
        1,
        "",
        {},
        (),
    )
    assert (skill.done.count, skill.done.op, skill.done.relative) == (1, ">=", None)
    assert (skill.reward.weights, skill.reward.bonus, skill.reward.step_cost) == ({}, 1.0, 0.01)
    assert (CRAFTING.holds("wood"), CRAFTING.holds("table")) == (9, 1)


def test_a_counter_is_judged_from_where_it_began_unless_the_skill_says_otherwise() -> None:
    for done, relative in (
        ({"feature": "wood"}, True), ({"feature": "table"}, False),
        ({"feature": "wood", "relative": False}, False), ({"feature": "table", "relative": True}, True),
    ):  # fmt: skip
        assert is_relative(parse_skill({**WOOD, "done": done}).done, CRAFTING) == relative


def test_what_a_skill_holds_needs_and_speaks_of_follows_from_its_amounts() -> None:
    amounts = {"requirements": {"wood": 3, "table": 1}, "consumption": {"wood": 2}, "gain": {"sapling": 1}}
    skill = parse_skill({**WOOD, **amounts, "reward": {"weights": {"drink": 1}}})
    assert (skill.held("wood"), skill.held("table"), skill.held("iron")) == (1, 1, 0)
    assert (skill.needs("wood", 1), skill.needs("wood", 3), skill.needs("table", 3)) == (3, 7, 1)
    assert skill.speaks_of() == {"wood", "table", "sapling", "drink"}


def test_a_knowledge_base_may_have_as_many_bytes_as_are_read(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "skills.yaml"
    monkeypatch.setattr("shoal.core.configuration.MOST_BYTES", 64)
    path.write_text("skills: [] #".ljust(64, "x"))
    assert load_skills(path, CRAFTING) == []
    path.write_text("skills: [] #".ljust(65, "x"))
    with pytest.raises(ConfigError, match="must be at most 64 bytes, got 65"):
        load_skills(path, CRAFTING)
    path.write_text("world: Crafting\nskills: []")  # as it is written elsewhere
    assert load_skills(path, CRAFTING) == []


def test_a_spec_survives_the_way_through_plain_data() -> None:
    for skill in load_skills(knowledge_base("crafting"), CRAFTING):
        assert parse_skill(skill.as_dict()) == skill


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("skills: !!python/object/apply:os.system ['touch P']", "is not YAML"),
        (
            "a: &a [1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
            "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
            "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
            "e: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d]",
            "at most 20000 values",
        ),
        ("skills: 3", "must hold an object"),
        ("skills: []\nextra: 1", "must hold an object"),
        ("skills: [3]", "each skill must be an object"),
        ("world: craftax\nskills: []", "is about 'craftax'"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_knowledge_base_is_data_and_nothing_else(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "skills.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_skills(path, CRAFTING)


def test_upkeep_that_could_never_end_is_refused() -> None:
    base = {"name": "Drink", "gain": {"drink": 1}, "done": {"feature": "drink"}}
    assert check_skill(parse_skill({**base, "upkeep": {"wood": 3}}), CRAFTING).upkeep == {"wood": 3}
    with pytest.raises(
        ConfigError, match=r"upkeep 'wood' must be in 0\.\.8 \(less than can be held\), got 9"
    ):
        check_skill(parse_skill({**base, "upkeep": {"wood": 9}}), CRAFTING)
    with pytest.raises(ConfigError, match="no feature named 'wod'"):
        check_skill(parse_skill({**base, "upkeep": {"wod": 3}}), CRAFTING)


def test_the_actions_of_a_skill_are_those_of_its_world() -> None:
    skill = check_skill(parse_skill({**WOOD, "actions": ["left", "interact"]}), CRAFTING)
    assert skill.actions == ("left", "interact")
    assert parse_skill(skill.as_dict()) == skill
    with pytest.raises(ConfigError, match=r"no action named 'interct' in crafting\. Did you mean 'interact'"):
        check_skill(parse_skill({**WOOD, "actions": ["interct"]}), CRAFTING)
