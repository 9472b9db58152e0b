from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.registry import SAFE_NAME
from shoal.skills.learning.craftax import features_of
from shoal.skills.learning.proposers import knowledge_base
from shoal.skills.learning.spec import check_skill, check_skills, load_skills, parse_skill, slug
from shoal.skills.learning.worlds import CRAFTING

WOOD = {"name": "Collect Wood", "gain": {"wood": 1}, "done": {"feature": "wood"}}
safe_names = st.from_regex(SAFE_NAME, fullmatch=True).filter(lambda name: not name.endswith((" ", ".")))


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
        ({"done": {"feature": "wood", "op": "=="}}, "Invalid enum value"),
        ({"reward": {"weights": {"wood": 1e9}}}, "at most 100"),
        ({"reward": {"bonus": float("nan")}}, "finite"),
        ({"code": "import os"}, "unknown field `code`"),
        ({"horizn": 3}, "Did you mean 'horizon'"),
    ],
)
def test_a_skill_that_makes_no_sense_is_refused_with_the_reason(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_skill(parse_skill({**WOOD, **change}), CRAFTING)


def test_a_spec_survives_the_way_through_plain_data() -> None:
    for skill in load_skills(knowledge_base("crafting"), CRAFTING):
        assert parse_skill(skill.as_dict()) == skill


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("skills: !!python/object/apply:os.system ['touch P']", "not plain YAML"),
        ("a: &x [1]\nskills: *x", "alias"),
        ("skills: 3", "must hold an object"),
        ("skills: []\nextra: 1", "must hold an object"),
        ("skills: [3]", "each skill must be an object"),
        ("world: craftax\nskills: []", "is about 'craftax'"),
        ("x" * (1 << 20) + "x", "at most"),
        ("a: [", "not plain YAML"),
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
    assert "actions" not in parse_skill(WOOD).as_dict()
    with pytest.raises(ConfigError, match=r"no action named 'interct' in crafting\. Did you mean 'interact'"):
        check_skill(parse_skill({**WOOD, "actions": ["interct"]}), CRAFTING)
