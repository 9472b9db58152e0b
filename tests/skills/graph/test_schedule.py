"""What follows from the rows: cases a table can hold; any order of events is in `test_machine.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.skills.graph.schedule import Plan, finished, plan
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


def test_what_was_cancelled_is_ended_or_skipped_before_anything_is_launched() -> None:
    rows = [skill("a", status="running", cancel=True), skill("b", cancel=True), skill("c")]
    assert plan(rows, [launch(1, "a")], slots=5) == Plan(
        kill={1: "cancelled"}, give_up={"b": ("skipped", "cancelled")}
    )


@pytest.mark.parametrize(("phase", "kill"), [("drain", {}), ("leave", {}), ("kill", {1: "stopped"})])
def test_nothing_is_launched_in_the_end(phase, kill) -> None:
    rows, running = [skill("a", status="running"), skill("b")], [launch(1, "a")]
    assert plan(rows, running, slots=5, phase=phase) == Plan(kill=kill)
    assert finished(rows, running, phase=phase, growing=True) == (phase == "leave")
    assert finished(rows[1:], [], phase=phase, growing=True)


def test_what_runs_too_long_is_ended() -> None:
    rows = [skill("a", status="running")]
    assert plan(rows, [launch(7, "a")], overdue=[7]).kill == {7: "limit"}


def test_what_can_never_start_is_blocked_with_the_reason_and_freed_when_that_is_gone() -> None:
    rows = [skill("a", status="failed"), skill("b", "a"), skill("c", "b")]
    assert plan(rows, []).give_up == {"b": ("blocked", "a failed"), "c": ("blocked", "b blocked")}
    rows = [skill("a", status="completed"), skill("b", "a", status="blocked", reason="a failed")]
    assert plan(rows, []).give_up == {"b": ("waiting", None)}


def test_circles_and_unknown_needs_are_named_once_nothing_more_can_come() -> None:
    rows = [skill("a", "b"), skill("b", "a"), skill("c", "x")]
    assert plan(rows, [], growing=True) == Plan()
    assert not finished(rows, [], phase="run", growing=True)
    assert {name: reason for name, (_, reason) in plan(rows, []).give_up.items()} == {
        "a": "skills wait for each other: a -> b -> a", "b": "skills wait for each other: b -> a -> b",
        "c": "needs x, which is unknown",
    }  # fmt: skip


def test_a_skill_without_budget_fails_and_one_without_limit_does_not() -> None:
    used = skill("a", budget_used=100)
    assert plan([used], []).give_up == {"a": ("failed", "its budget of 100 steps is used up")}
    assert plan([replace(used, budget_total=0)], []).launch == ["a"]
    assert plan([replace(used, allotment=5)], []).launch == ["a"]
