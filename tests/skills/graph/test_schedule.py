"""What follows from the rows: cases a table can hold; any order of events is in `test_machine.py`."""

from __future__ import annotations

from dataclasses import replace

from shoal.skills.graph.schedule import Plan, plan
from shoal.skills.graph.store import AttemptRow, SkillRow
from shoal.skills.spec import parse_skill


def skill(name: str, *needs: str, status: str = "waiting", **more) -> SkillRow:
    spec = parse_skill({"name": name, "gain": {"wood": 1}, "done": {"feature": "wood"}})
    values = {"name": name, "spec": spec, "dependencies": needs, "status": status, "reason": None, "expert": None,
              "retries": 0, "rounds": 0, "budget_total": 100, "budget_used": 0, "allotment": None, "created": 0.0,
              "started": None, "ended": None, "result": {}, "cancel": False, "fresh": True}  # fmt: skip
    return SkillRow(**{**values, **more})


def launch(number: int, name: str) -> AttemptRow:
    return AttemptRow(number, name, "x", None, None, None, 0.0, None, None, None, None, None, None)


def test_skills_on_the_longest_path_are_launched_first_and_no_more_than_slots() -> None:
    rows = [skill("alone"), skill("first"), skill("second", "first"), skill("third", "second")]
    assert plan(rows, [], slots=1).launch == ["first"]
    assert plan(rows, [], slots=3).launch == ["first", "alone"]
    rows[1] = skill("first", status="running")
    assert plan(rows, [launch(1, "first")], slots=1) == Plan()


def test_a_skill_without_budget_fails_and_one_without_limit_does_not() -> None:
    used = skill("a", budget_used=100)
    assert plan([used], []).give_up == {"a": ("failed", "its budget of 100 steps is used up")}
    assert plan([replace(used, budget_total=0)], []).launch == ["a"]
    assert plan([replace(used, allotment=5)], []).launch == ["a"]
