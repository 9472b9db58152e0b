from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.jobs.store import NewVersion, Store
from shoal.skills.learning.crafting import CRAFTING
from shoal.skills.learning.merge import _wait_for_all_that_is_planned
from shoal.skills.learning.network import Network, Shape, encode
from shoal.skills.learning.scheduler import SkillScheduler
from shoal.skills.learning.spec import Skill, parse_skill
from shoal.skills.learning.training import Run, finish_training
from shoal.skills.learning.views import scheduler_state


def skill(
    name: str, gain: str, uses: dict[str, int] | None = None, holds: dict[str, int] | None = None
) -> Skill:
    return parse_skill(
        {
            "name": name,
            "gain": {gain: 1},
            "done": {"feature": gain},
            "consumption": uses or {},
            "requirements": {**(uses or {}), **(holds or {})},
        }
    )


WOOD, TABLE = skill("Collect Wood", "wood"), skill("Place Table", "table", {"wood": 2})
PICKAXE = skill("Make Wood Pickaxe", "wood_pickaxe", {"wood": 1}, {"table": 1})
WATER, SAPLING = skill("Drink Water", "drink"), skill("Collect Sapling", "sapling")


def scheduler(base: Path, launcher, **more) -> SkillScheduler:
    more = {"analyse": False, "poll_interval": 0.2, **more}
    return SkillScheduler(base, more.pop("max_parallel", 2), launcher=launcher, **more)


def test_three_skills_with_dependencies_are_trained_in_order(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher)
    for one in (PICKAXE, TABLE, WOOD):  # the order of adding must not matter
        s.add_skill(one.name, one, dependencies={"Make Wood Pickaxe": ["Collect Wood", "Place Table"],
                                                 "Place Table": ["Collect Wood"]}.get(one.name, []))  # fmt: skip
    told: list[str] = []
    s.set_callbacks(lambda name, data: told.append(name))
    assert s.run()
    assert [name for name, _ in launcher.launched] == ["Collect Wood", "Place Table", "Make Wood Pickaxe"]
    assert told == ["Collect Wood", "Place Table", "Make Wood Pickaxe"]
    assert [data["expert_idx"] for data in s.get_completed_skills().values()] == [2, 1, 0]
    state = json.loads((tmp_path / "scheduler_state.json").read_text())
    assert {name: data["status"] for name, data in state["skills"].items()} == dict.fromkeys(
        ["Make_Wood_Pickaxe", "Place_Table", "Collect_Wood"], "completed"
    )
    assert state["expert_assignments"] == {"Collect Wood": 0, "Place Table": 1, "Make Wood Pickaxe": 2}
    assert state["next_expert_idx"] == 3
    assert state["currently_running"] == []


def test_dependencies_follow_from_requirements_when_they_are_not_given(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted())
    for one in (WOOD, TABLE, PICKAXE):
        s.add_skill(one.name, one)
    assert s.store.skill("Make Wood Pickaxe").dependencies == ("Collect Wood", "Place Table")


def test_a_cheaper_way_that_is_added_later_and_not_trained_yet_is_not_waited_for(
    tmp_path: Path, scripted
) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher, max_parallel=1)
    for one in (WATER, skill("Trade Water", "wood", {"drink": 1}), TABLE, WOOD):
        s.add_skill(one.name, one)
    assert s.run(), s.get_failed_skills()
    names = [name for name, _ in launcher.launched]
    assert names == ["Drink Water", "Trade Water", "Place Table", "Collect Wood"]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_as_many_trainings_run_at_once_as_there_are_slots(tmp_path: Path, scripted, slots: int) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, max_parallel=slots)
    for one in (WOOD, WATER, SAPLING):
        s.add_skill(one.name, one)
    thread = threading.Thread(target=s.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while len(launcher.running) < slots and time.monotonic() < until:
        time.sleep(0.01)
    launcher.gate.set()
    thread.join(timeout=60)
    assert len(s.get_completed_skills()) == 3
    assert launcher.most_running == slots


def test_a_failing_training_is_launched_n_more_times_and_then_fails(tmp_path: Path, scripted) -> None:
    def fail(folder: Path, attempt: int) -> None:
        raise RuntimeError("nan loss")

    launcher = scripted(fail)
    s = scheduler(tmp_path, launcher, max_retries=2)
    failed = []
    s.set_callbacks(on_skill_failed=lambda name, data: failed.append((name, data["reason"])))
    s.add_skill(WOOD.name, WOOD)
    assert not s.run()
    assert len(launcher.launched) == 3  # one launch and two retries
    assert failed == [("Collect Wood", "nan loss")]
    assert [attempt.outcome for attempt in s.store.attempts()] == ["failed"] * 3


def test_a_retry_that_succeeds_unblocks_what_waits_for_it(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    tries = []

    def second_time(folder: Path, attempt: int) -> None:
        tries.append(attempt)
        if len(tries) == 1:
            raise RuntimeError("once")
        launcher.finish(folder, attempt)

    launcher.script = second_time
    s = scheduler(tmp_path, launcher)
    for one in (WOOD, TABLE):
        s.add_skill(one.name, one)
    assert s.run()
    assert [name for name, _ in launcher.launched] == ["Collect Wood", "Collect Wood", "Place Table"]


def test_a_failed_dependency_blocks_its_dependents_by_name_and_others_go_on(tmp_path: Path, scripted) -> None:
    launcher = scripted()

    def not_wood(folder: Path, attempt: int) -> None:
        if Run.open(folder).spec["skill"] == "Collect Wood":
            raise RuntimeError("too hard")
        launcher.finish(folder, attempt)

    launcher.script = not_wood
    s = scheduler(tmp_path, launcher, max_retries=0)
    for one in (WOOD, TABLE, PICKAXE, WATER):
        s.add_skill(one.name, one)
    assert not s.run()
    assert s.get_failed_skills() == {
        "Collect Wood": "too hard",
        "Place Table": "Collect Wood failed",
        "Make Wood Pickaxe": "Collect Wood failed; Place Table blocked",
    }
    assert list(s.get_completed_skills()) == ["Drink Water"]


def test_a_skill_needs_what_its_plan_uses_where_places_are_left_on_the_way(tmp_path: Path, scripted) -> None:
    """A plan that knows of no places makes its sword at the furnace; the world's finds one before."""
    s = scheduler(tmp_path, scripted(), world="craftax-classic")
    water, sword, furnace = "toward_water", "make_iron_sword", "near_furnace"
    for one in (
        replace(skill("Reach", water), gain={water: 2}),
        skill("Find", sword, holds={water: 3}),
        skill("Walk", furnace, holds={water: 4}),
        skill("Forge", sword, holds={water: 1, furnace: 1}),
        skill("Return", furnace, holds={sword: 1}),
    ):
        s.add_skill(one.name, one)
    assert s.store.skill("Return").dependencies == ("Reach", "Find", "Walk", "Forge")
    s.close()


def test_a_later_retry_of_the_dependency_opens_the_subtree_again(tmp_path: Path, scripted) -> None:
    from shoal.cli.main import main

    def fail(folder: Path, attempt: int) -> None:
        raise RuntimeError("no")

    s = scheduler(tmp_path, scripted(fail), max_retries=0)
    for one in (WOOD, TABLE, PICKAXE):
        s.add_skill(one.name, one)
    assert not s.run()
    assert main(["skills", "retry", "Collect_Wood", "--graph-path", str(tmp_path)]) == 0
    again = scheduler(tmp_path, scripted())
    assert [row.status for row in again.store.skills()] == ["waiting"] * 3
    assert again.run()


def test_skills_that_wait_for_each_other_are_blocked_and_the_circle_is_shown(
    tmp_path: Path, scripted
) -> None:
    s = scheduler(tmp_path, scripted())
    s.add_skill(WOOD.name, WOOD, dependencies=["Drink Water"])
    s.add_skill(WATER.name, WATER, dependencies=["Collect Wood"])
    s.add_skill(SAPLING.name, SAPLING, dependencies=["Plant Sapling"])
    assert not s.run()
    assert s.get_failed_skills() == {
        "Collect Wood": "skills wait for each other: Collect Wood -> Drink Water -> Collect Wood",
        "Drink Water": "skills wait for each other: Drink Water -> Collect Wood -> Drink Water",
        "Collect Sapling": "needs Plant Sapling, which is unknown",
    }


def test_a_process_that_exits_well_without_a_result_has_failed(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted(lambda folder, attempt: "exit status 0"), max_retries=0)
    s.add_skill(WOOD.name, WOOD)
    assert not s.run()
    assert "is not done: it has no DONE.json" in s.get_failed_skills()["Collect Wood"]


def test_the_mark_of_an_earlier_launch_does_not_make_this_one_a_success(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.script = lambda folder, attempt: launcher.finish(folder, attempt + 100)
    s = scheduler(tmp_path, launcher, max_retries=0)
    s.add_skill(WOOD.name, WOOD)
    assert not s.run()
    assert "mark of launch 101, not of launch 1" in s.get_failed_skills()["Collect Wood"]


def test_a_broken_result_is_a_failure_not_an_expert(tmp_path: Path, scripted) -> None:
    launcher = scripted()

    def tear(folder: Path, attempt: int) -> None:
        launcher.finish(folder, attempt)
        path = Run.open(folder).policies / "result.safetensors"
        path.write_bytes(path.read_bytes()[:-5])

    launcher.script = tear
    s = scheduler(tmp_path, launcher, max_retries=0)
    s.add_skill(WOOD.name, WOOD)
    assert not s.run()
    assert s.store.versions() == []


def test_a_completed_skill_can_be_continued_within_its_budget(tmp_path: Path, scripted, quick) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher, config=replace(quick, total_timesteps=2500), merge="most-frames")
    s.add_skill(WOOD.name, WOOD)
    assert s.run()
    assert s.enqueue_continuation("Collect Wood", 10_000) == 1500  # 1000 of 2500 steps are used
    assert s.run()
    head = s.store.head(0)
    assert head is not None
    assert head.frames == 2000  # 1000 before, 1000 more
    assert head.parent == 1
    assert s.store.skill("Collect Wood").budget_used == 2000
    s.add_skill(WATER.name, WATER)
    with pytest.raises(ValueError, match="only a completed skill"):
        s.enqueue_continuation("Drink Water", 5)


def test_a_run_has_nothing_to_do_the_second_time(tmp_path: Path, scripted) -> None:
    first = scheduler(tmp_path, scripted())
    first.add_skill(WOOD.name, WOOD)
    assert first.run()
    launcher = scripted()
    assert scheduler(tmp_path, launcher).run()
    assert launcher.launched == []


def test_two_schedulers_on_one_folder_the_second_refuses(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.gate.clear()
    first = scheduler(tmp_path, launcher)
    first.add_skill(WOOD.name, WOOD)
    thread = threading.Thread(target=first.run, daemon=True)
    thread.start()
    while not launcher.running:
        pass
    with pytest.raises(WorkerError, match="another scheduler .process [0-9]+. is running"):
        scheduler(tmp_path, scripted()).run()
    launcher.gate.set()
    thread.join(timeout=60)
    assert first.get_status("Collect Wood") == "completed"


def test_stop_merges_what_runs_and_launches_nothing_more(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher, max_parallel=1)
    s.set_callbacks(on_skill_complete=lambda name, data: s.stop())
    for one in (WOOD, WATER, SAPLING):
        s.add_skill(one.name, one)
    assert not s.run()
    assert [s.get_status(one.name) for one in (WOOD, WATER, SAPLING)] == ["completed", "waiting", "waiting"]
    assert (tmp_path / "skills" / "0_Collect_Wood" / "expert_0_policy" / "params.safetensors").exists()


def test_cancelling_a_running_training_ends_it_and_blocks_its_dependents(tmp_path: Path, scripted) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, max_retries=5)
    for one in (WOOD, TABLE):
        s.add_skill(one.name, one)
    thread = threading.Thread(target=s.run, daemon=True)
    thread.start()
    while not launcher.running:
        pass
    s.store.update_skill("Collect Wood", cancel=1)
    thread.join(timeout=60)
    assert launcher.killed == [1]
    assert s.get_failed_skills() == {"Collect Wood": "cancelled", "Place Table": "Collect Wood skipped"}
    assert len(launcher.launched) == 1


def test_an_error_in_the_merge_is_the_skills_failure_not_the_schedulers_end(tmp_path: Path, scripted) -> None:
    launcher = scripted()

    def odd(folder: Path, attempt: int) -> None:
        run = Run.open(folder)
        launcher.finish(folder, attempt)
        if run.spec["skill"] == "Collect Wood":
            (run.folder / "0_policies" / "remap.json").write_text('{"local_to_global": {"0": "x"}}')

    launcher.script = odd
    s = scheduler(tmp_path, launcher, max_retries=0)
    for one in (WOOD, WATER):
        s.add_skill(one.name, one)
    assert not s.run()
    assert s.get_status("Collect Wood") == "failed"
    assert s.get_status("Drink Water") == "completed"


def test_events_are_told_once_and_after_they_are_durable(tmp_path: Path, scripted) -> None:
    told = []

    def hear(event: dict) -> None:
        if event["event"] == "merge":
            other = Store(tmp_path)  # another connection sees what the event speaks of
            assert other.skill(event["skill"]).status == "completed"
            assert other.head(0) is not None
            other.close()
        told.append(event["step"])

    s = scheduler(tmp_path, scripted(), on_event=hear)
    s.add_skill(WOOD.name, WOOD)
    assert s.run()
    assert told == sorted(set(told))
    assert [event["kind"] for event in s.store.events()] == [
        "added",
        "running",
        "completed",
        "merge",
    ]


def test_who_goes_on_with_a_folder_is_told_nothing_twice(tmp_path: Path, scripted) -> None:
    told: list[list[dict]] = []
    for skills in ([WOOD], [WOOD], [WOOD, WATER]):
        told.append([])
        s = scheduler(tmp_path, scripted(), on_event=told[-1].append)
        for one in skills:
            s.add_skill(one.name, one)
        assert s.run()
        s.close()
    assert [{event["skill"] for event in events} for events in told] == [{WOOD.name}, set(), {WATER.name}]
    assert [event["event"] for event in told[2]] == [event["event"] for event in told[0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_parallel": 0}, "max_parallel must be a whole number and at least 1, got 0"),
        ({"max_parallel": "2"}, "max_parallel must be .* got '2'"),
        ({"max_parallel": 1.5}, "max_parallel must be .* got 1.5"),
        ({"max_retries": -1}, "max_retries must be a whole number and at least 0, got -1"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds, got 0"),
        ({"time_limit": "5"}, "time_limit must be .* got '5'"),
        ({"merge": "best"}, "merge must be one of"),
        ({"launcher": "locl"}, "Did you mean 'local'"),
    ],
)
def test_wrong_settings_are_refused_by_name_and_leave_no_folder(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SkillScheduler(tmp_path / "run", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_folder_belongs_to_one_world(tmp_path: Path, scripted) -> None:
    scheduler(tmp_path, scripted()).run()
    with pytest.raises(ConfigError, match="holds skills of 'crafting', not of 'craftax'"):
        scheduler(tmp_path, scripted(), world="craftax").run()


def test_a_trainer_that_counts_no_steps_of_its_expert_can_train_it_further(
    tmp_path: Path, scripted, net
) -> None:
    def finish(folder: Path, attempt: int) -> None:
        finish_training(folder, {0: net(attempt).params()}, {}, attempt=attempt, success=0.9, frames=10)

    launcher = scripted(finish)
    s = scheduler(tmp_path, launcher, merge="most-frames")
    s.add_skill(WOOD.name, WOOD)
    assert s.run()
    s.enqueue_continuation(WOOD.name, 100)
    assert s.run(), s.get_failed_skills()
    assert [attempt.outcome for attempt in s.store.attempts()] == ["merged", "merged"]
    assert [version.kind for version in s.store.versions()] == ["run", "run"]


def test_a_correction_that_no_spec_may_say_is_not_made(tmp_path: Path, scripted, net) -> None:
    """Each drink gives four, and three in a row are practised: twelve can never be held."""
    column = CRAFTING.index("drink")

    def finish(folder: Path, attempt: int) -> None:
        values = np.zeros((3, 30, len(CRAFTING.names)), np.float32)
        values[1:, :, column] = [[5], [9]]
        episodes = dict(zip(("start", "before", "end"), values, strict=True)) | {"success": np.ones(30)}
        finish_training(
            folder, {0: net(attempt).params()}, {0: 10}, attempt=attempt, success=0.9, episodes=episodes
        )

    s = scheduler(tmp_path, scripted(finish), analyse=True)
    s.add_skill("Drink", parse_skill({**WATER.as_dict(), "name": "Drink", "practice": 3}))
    assert s.run()
    assert s.store.skill("Drink").spec.gain == {"drink": 1}
    s.enqueue_continuation("Drink", 100)
    assert s.run(), s.get_failed_skills()


def test_a_skill_is_added_under_its_own_name(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted())
    with pytest.raises(ConfigError, match="skill 'Drink Water': its data names it 'Collect Wood'"):
        s.add_skill(WATER.name, WOOD)
    with pytest.raises(
        ValueError, match="the dependencies of 'Place Table' must be a list of names, got 'Collect Wood'"
    ):
        s.add_skill(TABLE.name, TABLE, dependencies="Collect Wood")
    assert s.store.skills() == []


@pytest.mark.parametrize("extra", [float("nan"), 0, -5])
def test_a_continuation_of_no_steps_is_refused(tmp_path: Path, scripted, extra: float) -> None:
    s = scheduler(tmp_path, scripted())
    s.add_skill(WOOD.name, WOOD)
    assert s.run()
    with pytest.raises(ValueError, match=f"extra_timesteps must be at least 1, got {extra}"):
        s.enqueue_continuation(WOOD.name, extra)
    assert s.get_status(WOOD.name) == "completed"


def test_a_continuation_asked_for_as_soon_as_a_skill_is_completed_keeps_its_folder(
    tmp_path: Path, scripted, quick
) -> None:
    launcher = scripted()

    def finish(folder: Path, attempt: int) -> None:
        time.sleep(0.3 * (attempt - 1))  # while the folder of the round before is removed
        launcher.finish(folder, attempt)

    launcher.script = finish
    s = scheduler(tmp_path, launcher, merge="most-frames", max_retries=0)
    s.add_skill(WOOD.name, WOOD)
    asked: list[int] = []
    s.set_callbacks(lambda name, data: None if asked else asked.append(s.enqueue_continuation(name, 1000)))
    assert s.run(), s.get_failed_skills()
    assert asked == [1000]
    assert s.store.head(0).frames == 2000  # type: ignore[union-attr]


def planned(folder: Path) -> Store:
    """A folder with four skills: one completed, one in training, one that waits for both, one alone."""
    store = Store(folder, create=True)
    store.set_setting("world", "crafting")
    for one, needs in (
        (WOOD, []),
        (TABLE, ["Collect Wood"]),
        (PICKAXE, ["Collect Wood", "Place Table"]),
        (WATER, []),
    ):
        store.add_skill(one, needs, 1000)
    made = store.begin_attempt("Collect Wood", folder / "training_runs" / "one")
    sha = store.put_blob(encode(Network(Shape(3, 2, 2)).params()))
    store.commit_training(
        made, [NewVersion(store.assign_expert("Collect Wood"), sha, None, 300, 300, "run", True)], 
        result={"success": 0.75}, frames=300,
    )  # fmt: skip
    store.assign_expert("Place Table")
    number = store.begin_attempt("Place Table", folder / "training_runs" / "two")
    store.set_handle(
        number, "tmux", {"pid": 7, "began": None, "session": "s_2", "server": "s"}, folder / "log"
    )
    return store


def test_the_state_for_people_says_of_each_skill_where_it_is_and_what_is_left(tmp_path: Path) -> None:
    store = planned(tmp_path)
    state = scheduler_state(store, 3)
    assert list(state["skills"]) == ["Collect_Wood", "Place_Table", "Make_Wood_Pickaxe", "Drink_Water"]
    wood, table, pickaxe, water = state["skills"].values()
    assert (wood["status"], wood["expert_idx"], wood["budget_total"], wood["budget_remaining"]) == (
        "completed", 0, 1000, 700,
    )  # fmt: skip
    assert (wood["run_folder"], wood["skill_folder"]) == ("training_runs/one", "skills/0_Collect_Wood")
    assert (wood["processing_results"], wood["completed_at"] >= wood["started_at"]) == (
        {"success": 0.75},
        True,
    )
    assert (table["status"], table["tmux_session"], table["pid"], table["condition"]) == (
        "running", "s_2", 7, "interrupted",
    )  # fmt: skip
    assert (pickaxe["dependencies"], pickaxe["expert_idx"], pickaxe["skill_folder"]) == (
        ["Collect Wood", "Place Table"], None, None,
    )  # fmt: skip
    assert (water["run_folder"], water["tmux_session"], water["started_at"]) == (None, None, None)
    assert pickaxe["skill_data"]["skill_with_consumption"] == {
        "requirements": {"wood": 1, "table": 1}, "consumption": {"wood": 1}, "gain": {"wood_pickaxe": 1},
    }  # fmt: skip
    assert (state["max_parallel"], state["currently_running"]) == (3, ["Place_Table"])
    assert state["expert_assignments"] == {"Collect Wood": 0, "Place Table": 1}
    assert state["next_expert_idx"] == 2
    assert scheduler_state(Store(tmp_path / "empty", create=True), 1)["next_expert_idx"] == 0
    store.close()


def test_another_budget_is_that_of_skills_that_were_given_none_of_their_own(
    tmp_path: Path, scripted, quick
) -> None:
    for total, own, found in (
        (1000, None, [1000, 1000]),
        (2000, 500, [2000, 500]),
        (3000, None, [3000, 500]),
    ):
        s = scheduler(tmp_path, scripted(), config=replace(quick, total_timesteps=total))
        if total == 1000:
            s.add_skill(WOOD.name, WOOD)
            s.add_skill(WATER.name, WATER)
        if own is not None:
            s.store.update_skill("Drink Water", budget_total=own)
        s._remember()
        assert [row.budget_total for row in s.store.skills()] == found
        assert (s.store.setting("total_timesteps"), s.store.setting("seed")) == (total, 0)
        s.close()


def test_a_continuation_ends_where_the_budget_does(tmp_path: Path, scripted, quick) -> None:
    s = scheduler(tmp_path, scripted(), config=replace(quick, total_timesteps=1000))
    s.add_skill(WOOD.name, WOOD)
    s.store.assign_expert(WOOD.name)
    s.store.update_skill(WOOD.name, status="completed", budget_used=999, retries=2)
    assert s.enqueue_continuation(WOOD.name, 1) == 1
    row = s.store.skill(WOOD.name)
    assert (row.status, row.allotment, row.left, row.rounds, row.retries, row.fresh) == (
        "waiting",
        1,
        1,
        1,
        0,
        True,
    )
    s.store.update_skill(WOOD.name, status="completed", budget_used=1000)
    with pytest.raises(ValueError, match="the budget of 'Collect Wood' is used up .1000 of 1000 steps."):
        s.enqueue_continuation(WOOD.name, 5)
    assert s.store.skill(WOOD.name).rounds == 1
    s.close()


def test_what_waits_needs_all_of_its_plan_until_it_has_begun(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted())
    for one in (WOOD, TABLE, WATER):
        s.add_skill(one.name, one, [])
    _wait_for_all_that_is_planned(s.store, CRAFTING)
    assert [row.dependencies for row in s.store.skills()] == [(), ("Collect Wood",), ()]
    s.store.update_skill("Place Table", status="running", dependencies=["Drink Water"])
    _wait_for_all_that_is_planned(s.store, CRAFTING)
    assert s.store.skill("Place Table").dependencies == ("Drink Water",)  # too late
    s.store.update_skill("Place Table", status="blocked")
    _wait_for_all_that_is_planned(s.store, CRAFTING)
    assert s.store.skill("Place Table").dependencies == ("Drink Water", "Collect Wood")
    s.close()


@pytest.mark.parametrize(
    ("analyse", "needed"), [(False, ("Drink Water",)), (True, ("Drink Water", "Collect Wood"))]
)
def test_what_a_corrected_plan_uses_is_waited_for_though_the_run_is_killed_as_soon_as_it_is_known(
    tmp_path: Path, scripted, net, analyse: bool, needed: tuple[str, ...]
) -> None:
    """Water can be drunk by those alone who have wood."""

    def finish(folder: Path, attempt: int) -> None:
        start = np.zeros((100, len(CRAFTING.names)), np.float32)
        start[:50, CRAFTING.index("wood")] = 1
        end, success = start.copy(), np.arange(100) < 50
        end[:50, CRAFTING.index("drink")] = 1
        episodes = {"start": start, "before": start, "end": end, "success": success}
        own = len(Run.open(folder).local_to_global) - 1
        finish_training(
            folder, {own: net(attempt).params()}, {own: 10}, attempt=attempt,
            episodes=episodes if attempt == 1 else None,
        )  # fmt: skip

    def make() -> SkillScheduler:
        return scheduler(tmp_path, scripted(finish), analyse=analyse, max_parallel=1, max_retries=0)

    s = make()
    for one in (WATER, skill("Collect Sapling", "sapling", holds={"drink": 1}), WOOD):
        s.add_skill(one.name, one)
    s.set_callbacks(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        s.run()
    s.close()
    s = make()
    assert s.store.skill("Drink Water").status == "completed"
    assert s.run(), s.get_failed_skills()
    assert s.store.skill("Collect Sapling").dependencies == needed
    s.close()


@pytest.mark.parametrize("name", ["mixture.safetensors", "remap.json", "../0.json"])
@pytest.mark.parametrize("left", [None, b'{"skill": "Collect Wood", "expert": 0, "seed": 0}'])  # cut, or odd
def test_a_training_whose_folder_was_damaged_is_laid_out_anew(
    tmp_path: Path, scripted, name: str, left: bytes | None
) -> None:
    launcher = scripted()

    def damaged_at_first(folder: Path, attempt: int) -> None:
        if attempt == 1:
            path = Run.open(folder).policies / name
            path.write_bytes(left or path.read_bytes()[:-3])
            raise RuntimeError("killed")
        assert Run.open(folder).mixture is not None
        launcher.finish(folder, attempt)

    launcher.script = damaged_at_first
    s = scheduler(tmp_path, launcher, max_retries=1)
    s.add_skill(WOOD.name, WOOD)
    assert s.run(), s.get_failed_skills()
