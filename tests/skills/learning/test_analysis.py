from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.skills.learning.corrections import correct_spec
from shoal.skills.learning.crafting import CRAFTING
from shoal.skills.learning.proposers import knowledge_base
from shoal.skills.learning.spec import load_skills

SKILLS = {skill.name: skill for skill in load_skills(knowledge_base("crafting"), CRAFTING)}
PICKAXE = SKILLS["Make Wood Pickaxe"]


def episodes(count: int = 100, **start: float) -> np.ndarray:
    values = np.zeros((count, len(CRAFTING.names)), np.float32)
    for name, amount in start.items():
        values[:, CRAFTING.index(name)] = amount
    return values


def changed(values: np.ndarray, **by: float) -> np.ndarray:
    values = values.copy()
    for name, amount in by.items():
        values[:, CRAFTING.index(name)] += amount
    return values


YES = np.ones(100, bool)


def test_a_right_spec_is_left_alone() -> None:
    start = episodes(wood=3, table=1)
    end = changed(start, wood=-1, wood_pickaxe=1)
    assert correct_spec(PICKAXE, CRAFTING, start, start, end, YES) == (PICKAXE, [])


def test_what_was_found_again_on_the_way_is_still_used_up() -> None:
    # Over the episode wood did not change, but the last action took one.
    start = episodes(wood=3, table=1)
    before = changed(start, wood=1)
    end = changed(before, wood=-1, wood_pickaxe=1)
    assert correct_spec(PICKAXE, CRAFTING, start, before, end, YES)[1] == []


def test_a_wrong_gain_is_corrected_by_what_is_seen() -> None:
    believed = replace(SKILLS["Collect Wood"], gain={"wood": 3})
    start = episodes()
    corrected, findings = correct_spec(
        believed, CRAFTING, start, changed(start, wood=3), changed(start, wood=4), YES, 4
    )
    assert corrected.gain == {"wood": 1}
    assert findings == ["gain of 'wood': 3 was believed, 1 is seen"]


def test_consumption_nobody_mentioned_is_found_and_required() -> None:
    believed = replace(PICKAXE, consumption={}, requirements={"table": 1})
    start = episodes(wood=3, table=1)
    corrected, _ = correct_spec(
        believed, CRAFTING, start, start, changed(start, wood=-2, wood_pickaxe=1), YES
    )
    assert corrected.consumption == {"wood": 2}
    assert corrected.requirements == {"table": 1, "wood": 2}


def test_what_was_thought_used_up_but_stays_is_only_held() -> None:
    start = episodes(wood=3, table=1)
    corrected, findings = correct_spec(PICKAXE, CRAFTING, start, start, changed(start, wood_pickaxe=1), YES)
    assert corrected.consumption == {}
    assert findings == ["consumption of 'wood': 1 was believed, 0 is seen"]


def test_a_requirement_that_makes_no_difference_is_dropped_and_one_that_decides_is_added() -> None:
    start = episodes(wood=3, table=1)
    start[:50, CRAFTING.index("drink")] = 1
    start[25:75, CRAFTING.index("stone_pickaxe")] = 1
    success = start[:, CRAFTING.index("stone_pickaxe")] > 0
    end = changed(start, wood=-1, wood_pickaxe=1)
    end[~success] = start[~success]
    believed = replace(PICKAXE, requirements={"wood": 1, "table": 1, "drink": 1})
    corrected, findings = correct_spec(believed, CRAFTING, start, start, end, success)
    assert corrected.requirements == {"wood": 1, "table": 1, "stone_pickaxe": 1}
    assert findings == [
        "requirements of 'drink': 1 was believed, 0 is seen",
        "requirements of 'stone_pickaxe': 0 was believed, 1 is seen",
    ]


def successes(count: int) -> np.ndarray:
    return np.arange(100) < count


def test_twenty_successes_conclude_and_nine_in_ten_must_show_a_change() -> None:
    believed = replace(PICKAXE, gain={"wood_pickaxe": 1, "sapling": 1})
    start = episodes(wood=3, table=1)
    end = changed(start, wood=-1, wood_pickaxe=1)
    assert correct_spec(believed, CRAFTING, start, start, end, successes(20))[0].gain == {"wood_pickaxe": 1}
    assert correct_spec(believed, CRAFTING, start, start, end, successes(19))[0] == believed
    for share, found in ((90, {"wood_pickaxe": 1, "drink": 1}), (89, {"wood_pickaxe": 1})):
        some = end.copy()
        some[:share, CRAFTING.index("drink")] += 1
        assert correct_spec(PICKAXE, CRAFTING, start, start, some, YES)[0].gain == found


def test_what_was_used_up_over_the_episode_is_seen_where_the_last_action_did_not_use_it() -> None:
    start = episodes(wood=6, table=1)
    before = changed(start, wood=-4)  # two applications, two wood each
    end = changed(before, wood_pickaxe=1)
    corrected, findings = correct_spec(PICKAXE, CRAFTING, start, before, end, YES, 2)
    assert corrected.consumption == {"wood": 2}
    assert corrected.requirements["wood"] == 2
    assert findings == [
        "requirements of 'wood': 1 was believed, 2 is seen",
        "consumption of 'wood': 1 was believed, 2 is seen",
    ]


def test_full_hands_teach_nothing_of_a_gain() -> None:
    wood = SKILLS["Collect Wood"]
    full = episodes(wood=9)
    assert correct_spec(wood, CRAFTING, full, full, full, YES) == (wood, [])
    room = full.copy()
    room[:20, CRAFTING.index("wood")] = 8  # one more can be held, in as many as it takes
    end = room.copy()
    end[:20, CRAFTING.index("wood")] = 9
    believed = replace(wood, gain={"wood": 2})
    assert correct_spec(believed, CRAFTING, room, room, end, YES)[0].gain == {"wood": 1}
    room[0, CRAFTING.index("wood")] = 9
    assert correct_spec(believed, CRAFTING, room, room, end, YES)[0].gain == {"wood": 2}


def test_what_is_held_besides_what_is_used_up_stays_required() -> None:
    believed = replace(PICKAXE, requirements={"wood": 4, "table": 1}, consumption={"wood": 1})
    start = episodes(wood=5, table=1)
    corrected, _ = correct_spec(
        believed, CRAFTING, start, start, changed(start, wood=-2, wood_pickaxe=1), YES
    )
    assert corrected.requirements["wood"] == 2 + 3
    unused, _ = correct_spec(believed, CRAFTING, start, start, changed(start, wood_pickaxe=1), YES)
    assert unused.requirements["wood"] == 3


@pytest.mark.parametrize(("without", "dropped"), [(82, True), (81, False)])
def test_a_requirement_is_dropped_where_nine_in_ten_succeed_without_it(without: int, dropped: bool) -> None:
    # Of 200 episodes 182 succeed, or 181: nine tenths of these rates are 0.819 and 0.8145.
    start = episodes(200, wood=3, table=1)
    start[:100, CRAFTING.index("drink")] = 1
    success = np.concatenate([np.ones(100, bool), np.arange(100) < without])
    end = changed(start, wood=-1, wood_pickaxe=1)
    believed = replace(PICKAXE, requirements={"wood": 1, "table": 1, "drink": 1})
    found = correct_spec(believed, CRAFTING, start, start, end, success)[0].requirements
    assert ("drink" not in found) == dropped


@pytest.mark.parametrize(("having", "lacking", "found"), [(50, 5, True), (49, 5, False), (50, 6, False)])
def test_what_decides_is_required(having: int, lacking: int, found: bool) -> None:
    start = episodes(200, wood=3, table=1)
    start[:100, CRAFTING.index("drink")] = 1
    success = np.concatenate([np.arange(100) < having, np.arange(100) < lacking])
    end = changed(start, wood=-1, wood_pickaxe=1)
    requirements = correct_spec(PICKAXE, CRAFTING, start, start, end, success)[0].requirements
    assert ("drink" in requirements) == found
