import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.skills.jobs.store import (
    AttemptRow,
    Ended,
    Found,
    JobRow,
    Look,
    NotPrepared,
    Rows,
    decide,
    finished,
    obstacles,
    ready,
)


def row(name, *dependencies, status="waiting", **more):
    empty = dict.fromkeys(field.name for field in dataclasses.fields(JobRow))
    return JobRow(**{**empty, "name": name, "needs": dependencies, "status": status, **more})


def names(rows):
    return [r.name for r in rows]


def test_a_skill_can_start_once_all_that_it_needs_is_completed():
    wood, stone = row("wood", status="completed"), row("stone", status="running")
    assert names(ready([wood, stone, row("table", "wood"), row("pick", "wood", "stone")])) == ["table"]
    assert names(ready([row("table", "wood")])) == []


def test_what_ended_badly_blocks_its_dependents_with_its_name():
    rows = [row("wood", status="failed"), row("coal", status="skipped"), row("fire", "wood", "coal")]
    assert obstacles(rows, progress=True) == {"fire": "wood failed; coal skipped"}


def test_an_unknown_need_is_an_obstacle_only_when_nothing_may_still_add_it():
    rows = [row("wood", status="completed"), row("fire", "wood", "flint"), row("smith", "fire")]
    assert obstacles(rows, progress=True) == {"fire": None, "smith": None}
    assert obstacles(rows, progress=False) == {
        "fire": "needs flint, which is unknown",
        "smith": "fire blocked",
    }


def test_skills_that_wait_for_each_other_are_named_in_order():
    rows = [row("a", "b"), row("b", "c"), row("c", "a"), row("d", "a")]
    found = obstacles(rows, progress=False)
    assert found["a"] == "skills wait for each other: a -> b -> c -> a"
    assert found["d"] == "skills wait for each other: d -> a -> b -> c -> a"


def test_a_blocked_skill_is_free_again_when_its_need_is_completed():
    rows = [row("wood", status="completed"), row("fire", "wood", status="blocked")]
    assert obstacles(rows, progress=False) == {"fire": None}
    assert obstacles([*rows, row("smith", "fire")], progress=False) == {"fire": None, "smith": None}


@given(st.data())
def test_every_acyclic_graph_runs_to_its_end_in_an_order_that_honours_needs(data):
    n = data.draw(st.integers(1, 8))
    needs = {i: data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(n)}
    order = data.draw(st.permutations(range(n)))
    status = dict.fromkeys(order, "waiting")
    ended = []
    while len(ended) < n:
        rows = [row(str(i), *map(str, needs[i]), status=status[i]) for i in order]
        able = ready(rows)
        assert able
        assert not any(obstacles(rows, progress=True).values())
        chosen = int(data.draw(st.sampled_from(names(able))))
        assert needs[chosen] <= set(ended)
        status[chosen] = "completed"
        ended.append(chosen)


def attempt(job, number=1, **more):
    empty = dict.fromkeys(field.name for field in dataclasses.fields(AttemptRow))
    return AttemptRow(**{**empty, "id": number, "job": job, "state": "running", "started": 100.0, **more})


def rows(*jobs, running=(), **more):
    return Rows(jobs=jobs, running=running, **{"slots": 2, "max_retries": 1, "now": 110.0, **more})


def acts(state, event=None):
    """What was decided, in words: close, update, launch …"""
    told = []
    for action in decide(state, event or Look()):
        values = [value for value in dataclasses.astuple(action) if value is not None]
        told.append((type(action).__name__.lower(), *values))
    return told


RUNNING = row("wood", status="running", retries=0, budget_total=0)
SKIPPED = {"status": "skipped", "reason": "cancelled", "cancel": 0, "ended": 110.0}


@pytest.mark.parametrize(
    ("job", "how", "expected"),
    [
        ({}, {"done": True}, [("update", "wood", {"status": "merging"}), ("merge", 1)]),
        (
            {},
            {"reason": "nan"},
            [
                ("close", 1, "failed", "nan"),
                ("update", "wood", {"status": "waiting", "reason": "nan", "retries": 1}),
            ],
        ),
        (
            {"retries": 1},
            {"reason": "nan"},
            [
                ("close", 1, "failed", "nan"),
                ("update", "wood", {"status": "failed", "reason": "nan", "ended": 110.0}),
                ("tell", "wood"),
            ],
        ),
        (
            {},
            {"reason": "not learned", "final": True},
            [
                ("close", 1, "exhausted", "not learned"),
                ("update", "wood", {"status": "failed", "reason": "not learned", "ended": 110.0}),
                ("tell", "wood"),
            ],
        ),
        (
            {"cancel": True, "retries": 1},
            {"done": True},
            [("close", 1, "cancelled"), ("update", "wood", SKIPPED), ("tell", "wood")],
        ),
    ],
)
def test_the_end_of_a_launch_leads_to_a_merge_another_launch_or_the_end(job, how, expected):
    state = rows(dataclasses.replace(RUNNING, **job), running=[attempt("wood")])
    assert acts(state, Ended(attempt("wood"), **how)) == expected


def test_a_launch_that_was_stopped_costs_no_retry_and_one_over_its_time_is_not_repeated():
    stopped = attempt("wood", ending="stop")
    assert acts(rows(RUNNING, running=[stopped]), Ended(stopped, reason="killed")) == [
        ("close", 1, "stopped"),
        ("update", "wood", {"status": "waiting", "reason": "stopped"}),
    ]
    late = attempt("wood", ending="limit")
    found = acts(rows(RUNNING, running=[late], time_limit=5.0), Ended(late, reason="killed"))
    assert found[0] == ("close", 1, "limit", "ran longer than 5 s")
    assert found[1][2]["status"] == "failed"


def test_what_is_asked_for_is_done_once_and_not_to_what_is_being_committed():
    asked = dataclasses.replace(RUNNING, cancel=True)
    running = [attempt("wood")]
    assert acts(rows(asked, running=running)) == [("mark", 1, "cancel"), ("kill", 1)]
    assert acts(rows(asked, running=running, killed=frozenset({1}))) == []
    assert (
        acts(rows(dataclasses.replace(asked, status="merging"), running=running, merging=frozenset({1})))
        == []
    )
    assert acts(rows(dataclasses.replace(asked, status="completed"))) == [("update", "wood", {"cancel": 0})]
    assert acts(rows(RUNNING, running=running, phase="kill")) == [("mark", 1, "stop"), ("kill", 1)]
    assert acts(rows(RUNNING, running=running, time_limit=9.0)) == [("mark", 1, "limit"), ("kill", 1)]
    assert acts(rows(RUNNING, running=running, time_limit=11.0)) == []


def test_slots_and_resources_limit_launches_but_one_is_always_tried():
    jobs = [row(name, budget_total=0) for name in "abc"]
    assert [a[1] for a in acts(rows(*jobs))] == ["a", "b"]
    assert [a[1] for a in acts(rows(*jobs, room=0))] == ["a"]
    assert acts(rows(*jobs, running=[attempt("x")], room=0)) == []
    assert acts(rows(*jobs, phase="drain")) == []


def test_the_longest_way_goes_first():
    jobs = [
        row("alone"),
        row("root"),
        row("middle", "root"),
        row("end", "middle"),
        row("short"),
        row("leaf", "short"),
    ]
    assert names(ready(jobs)) == ["root", "short", "alone"]


def test_a_job_whose_budget_is_used_up_is_not_launched():
    spent = row("a", budget_total=10, budget_used=10)
    assert acts(rows(spent))[0][2]["reason"] == "its budget of 10 steps is used up"


def test_the_end_has_come_when_nothing_runs_and_nothing_can():
    assert finished(rows(row("a", status="completed")))
    assert not finished(rows(row("a", budget_total=0)))
    assert not finished(rows(row("a", status="completed"), growing=True))
    assert not finished(rows(RUNNING, running=[attempt("wood")], phase="drain"))
    assert finished(rows(RUNNING, running=[attempt("wood")], phase="leave"))
    assert not finished(rows(dataclasses.replace(RUNNING, status="merging"), phase="kill"))


def test_a_launch_nobody_knows_is_made_again_and_a_merge_nobody_finished_is_gone_through_again():
    lost = decide(rows(RUNNING, running=[attempt("wood")]), Found(attempt("wood"), "never"))
    assert [type(action).__name__ for action in lost] == ["Close", "Update"]
    merging = dataclasses.replace(RUNNING, status="merging")
    assert acts(rows(merging), Found(attempt("wood"), "alive")) == [("update", "wood", {"status": "running"})]


@pytest.mark.parametrize(("left", "status"), [(10, "failed"), (11, "waiting")])
def test_a_job_that_used_its_whole_budget_goes_on_only_if_that_was_raised_meanwhile(left, status):
    state = rows(dataclasses.replace(RUNNING, budget_total=left, budget_used=0), running=[attempt("wood")])
    ended = Ended(attempt("wood", budget=10), reason="not learned", final=True)
    close, update, *_ = acts(state, ended)
    assert close[2] == ("exhausted" if status == "failed" else "failed")
    assert update[2]["status"] == status


def test_a_job_that_could_not_be_set_up_is_tried_again_after_a_rest_unless_that_is_in_vain():
    waiting = row("a", retries=0, budget_total=0)
    again = NotPrepared("a", "no space", final=False)
    assert acts(rows(waiting), again) == [("update", "a", {"reason": "no space", "retries": 1})]
    assert acts(rows(waiting, resting=frozenset("a"))) == []
    failed = {"status": "failed", "reason": "no space", "ended": 110.0}
    for job, event in [
        (dataclasses.replace(waiting, retries=1), again),
        (waiting, dataclasses.replace(again, final=True)),
    ]:
        assert acts(rows(job), event) == [("update", "a", failed), ("tell", "a")]
