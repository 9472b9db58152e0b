import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from shoal.skills.jobs.decide import launchable, obstacles
from shoal.skills.jobs.records import SkillRow


def row(name, *dependencies, status="waiting"):
    empty = dict.fromkeys(field.name for field in dataclasses.fields(SkillRow))
    return SkillRow(**{**empty, "name": name, "dependencies": dependencies, "status": status})


def names(rows):
    return [r.name for r in rows]


def test_a_skill_can_start_once_all_that_it_needs_is_completed():
    wood, stone = row("wood", status="completed"), row("stone", status="running")
    assert names(launchable([wood, stone, row("table", "wood"), row("pick", "wood", "stone")])) == ["table"]
    assert names(launchable([row("table", "wood")])) == []


def test_what_ended_badly_blocks_its_dependents_with_its_name():
    rows = [row("wood", status="failed"), row("coal", status="skipped"), row("fire", "wood", "coal")]
    assert obstacles(rows, progress=True) == {"fire": "wood failed; coal skipped"}


def test_an_unknown_need_is_an_obstacle_only_when_nothing_may_still_add_it():
    rows = [row("wood", status="completed"), row("fire", "wood", "flint")]
    assert obstacles(rows, progress=True) == {"fire": None}
    assert obstacles(rows, progress=False) == {"fire": "needs flint, which is unknown"}


def test_skills_that_wait_for_each_other_are_named_in_order():
    rows = [row("a", "b"), row("b", "c"), row("c", "a"), row("d", "a")]
    found = obstacles(rows, progress=False)
    assert found["a"] == "skills wait for each other: a -> b -> c -> a"
    assert found["d"] == "skills wait for each other: d -> a -> b -> c -> a"


def test_a_blocked_skill_is_free_again_when_its_need_is_completed():
    rows = [row("wood", status="completed"), row("fire", "wood", status="blocked")]
    assert obstacles(rows, progress=False) == {"fire": None}


@given(st.data())
def test_every_acyclic_graph_runs_to_its_end_in_an_order_that_honours_needs(data):
    n = data.draw(st.integers(1, 8))
    needs = {i: data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(n)}
    order = data.draw(st.permutations(range(n)))
    status = dict.fromkeys(order, "waiting")
    ended = []
    while len(ended) < n:
        rows = [row(str(i), *map(str, needs[i]), status=status[i]) for i in order]
        ready = launchable(rows)
        assert ready
        assert not any(obstacles(rows, progress=True).values())
        chosen = int(data.draw(st.sampled_from(names(ready))))
        assert needs[chosen] <= set(ended)
        status[chosen] = "completed"
        ended.append(chosen)
