"""What a scheduler trains, in which order, what becomes of failures, and what people ask of it: cancel, stop, retry."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.skills.conftest import skill, wait_for

from shoal.cli.main import main
from shoal.core.errors import ConfigError, WorkerError
from shoal.skills.graph.launchers import LOST, start_time
from shoal.skills.graph.process import NotLearnedError
from shoal.skills.graph.requests import ask_to_cancel, ask_to_stop, reopen
from shoal.skills.graph.store import Store
from shoal.skills.graph.views import condition
from shoal.skills.learning.training import Run, finish_training, prepare_training_run
from shoal.skills.proposers import KnowledgeBase, knowledge_base
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.spec import Skill
from shoal.skills.worlds.crafting import CRAFTING

WOOD, TABLE = skill("Collect Wood", "wood"), skill("Place Table", "table", {"wood": 2})
PICKAXE = skill("Make Wood Pickaxe", "wood_pickaxe", {"wood": 1}, {"table": 1})
WATER, SAPLING = skill("Drink Water", "drink"), skill("Collect Sapling", "sapling")


def scheduler(base: Path, launcher, *skills: Skill, **more) -> SkillScheduler:
    s = SkillScheduler(base, more.pop("max_parallel", 2), launcher=launcher, **more)
    for one in skills:
        s.add_skill(one.name, one)
    return s


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


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
    s = scheduler(tmp_path, scripted(), WOOD, TABLE, PICKAXE)
    assert s.store.skill("Make Wood Pickaxe").dependencies == ("Collect Wood", "Place Table")


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


def test_a_cheaper_way_that_is_added_later_and_not_trained_yet_is_not_waited_for(
    tmp_path: Path, scripted
) -> None:
    launcher = scripted()
    s = scheduler(
        tmp_path, launcher, WATER, skill("Trade Water", "wood", {"drink": 1}), TABLE, WOOD, max_parallel=1
    )
    assert s.run(), s.get_failed_skills()
    names = [name for name, _ in launcher.launched]
    assert names == ["Drink Water", "Trade Water", "Place Table", "Collect Wood"]


@pytest.mark.parametrize("slots", [1, 3])
def test_as_many_trainings_run_at_once_as_there_are_slots(tmp_path: Path, scripted, slots: int) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, WOOD, WATER, SAPLING, max_parallel=slots)
    thread = in_thread(s.run)
    wait_for(lambda: len(launcher.running) == slots)
    launcher.gate.set()
    thread.join(timeout=60)
    assert len(s.get_completed_skills()) == 3
    assert launcher.most_running == slots


def test_a_failing_training_is_launched_n_more_times_and_then_fails(tmp_path: Path, scripted) -> None:
    def fail(folder: Path, attempt: int) -> None:
        raise RuntimeError("nan loss")

    launcher = scripted(fail)
    s = scheduler(tmp_path, launcher, WOOD, max_retries=2)
    failed = []
    s.set_callbacks(on_skill_failed=lambda name, data: failed.append((name, data["reason"])))
    assert not s.run()
    assert len(launcher.launched) == 3  # one launch and two retries
    assert failed == [("Collect Wood", "nan loss")]
    assert [attempt.outcome for attempt in s.store.attempts()] == ["failed"] * 3


def test_a_training_that_is_lost_with_its_machine_uses_up_no_retry(tmp_path: Path, scripted) -> None:
    launcher = scripted(lambda folder, attempt: LOST if attempt < 4 else launcher.finish(folder, attempt))
    s = scheduler(tmp_path, launcher, WOOD, max_retries=0)
    assert s.run(), s.get_failed_skills()
    assert [attempt.outcome for attempt in s.store.attempts()] == ["lost"] * 3 + ["merged"]


def test_a_failed_dependency_blocks_its_dependents_by_name_and_others_go_on(tmp_path: Path, scripted) -> None:
    launcher = scripted()

    def not_wood(folder: Path, attempt: int) -> None:
        if Run.open(folder).spec["skill"] == "Collect Wood":
            raise RuntimeError("too hard")
        launcher.finish(folder, attempt)

    launcher.script = not_wood
    s = scheduler(tmp_path, launcher, WOOD, TABLE, PICKAXE, WATER, max_retries=0)
    assert not s.run()
    assert s.get_failed_skills() == {
        "Collect Wood": "too hard",
        "Place Table": "Collect Wood failed",
        "Make Wood Pickaxe": "Collect Wood failed; Place Table blocked",
    }
    assert list(s.get_completed_skills()) == ["Drink Water"]


def test_a_later_retry_of_the_dependency_opens_the_subtree_again(tmp_path: Path, scripted) -> None:
    def fail(folder: Path, attempt: int) -> None:
        raise RuntimeError("no")

    s = scheduler(tmp_path, scripted(fail), WOOD, TABLE, PICKAXE, max_retries=0)
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


def without_a_mark(folder: Path) -> None:
    (folder / "DONE.json").unlink()


def of_another_launch(folder: Path) -> None:
    mark = folder / "DONE.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "attempt": 101}))


def altered(folder: Path) -> None:
    path = Run.open(folder).policies / "result.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def odd_mark(folder: Path) -> None:
    (folder / "DONE.json").write_text('{"attempt": 1, "id": "x", "sha256": 3, "acted_frames": null}')


def odd_remap(folder: Path) -> None:
    (Run.open(folder).policies / "remap.json").write_text('{"local_to_global": {"0": "x"}}')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_a_mark, "is not done: it has no DONE.json"),
        (of_another_launch, "mark of launch 101, not of launch 1"),
        (altered, "result.safetensors is not the file that DONE.json speaks of"),
        (odd_mark, "DONE.json"),
        (odd_remap, "invalid literal for int"),
    ],
)
def test_what_is_no_result_is_the_failure_of_its_skill_and_not_the_end_of_the_run(
    tmp_path: Path, scripted, spoil, reason: str
) -> None:
    launcher = scripted()

    def spoiled(folder: Path, attempt: int) -> None:
        launcher.finish(folder, attempt)
        if Run.open(folder).spec["skill"] == WOOD.name:
            spoil(folder)

    launcher.script = spoiled
    s = scheduler(tmp_path, launcher, WOOD, WATER, max_retries=0, max_parallel=1)
    assert not s.run()
    assert list(s.get_failed_skills()) == [WOOD.name]
    assert reason in s.get_failed_skills()[WOOD.name]
    assert list(s.get_completed_skills()) == [WATER.name]
    assert [version.expert for version in s.store.versions()] == [1]


@pytest.mark.parametrize(
    ("error", "launches", "reason"),
    [
        (OSError(5, "Input/output error"), 2, None),
        (RuntimeError("tmux new-session failed"), 2, None),
        (ConfigError("it makes no sense"), 1, "cannot be launched: it makes no sense"),
    ],
)
def test_a_launch_that_cannot_be_made_is_tried_again_unless_it_makes_no_sense(
    tmp_path: Path, scripted, error: Exception, launches: int, reason: str | None
) -> None:
    class Fails(scripted):  # type: ignore[misc,valid-type]
        def launch(self, command, session, env, log):
            if session == "shoal_e0_Collect_Wood_1":
                raise error
            return super().launch(command, session, env, log)

    s = scheduler(tmp_path, Fails(), WOOD, WATER, max_retries=1)
    assert s.run() == (reason is None)
    assert s.get_failed_skills() == ({} if reason is None else {"Collect Wood": reason})
    assert s.get_status("Drink Water") == "completed"
    assert len(s.store.attempts("Collect Wood")) == launches


def test_a_full_disk_ends_the_run_uses_up_no_retry_and_the_next_run_goes_on(tmp_path: Path, scripted) -> None:
    no_room = OSError(errno.ENOSPC, "No space left on device")
    launcher = scripted()
    launch = launcher.launch

    def cannot(*arguments):
        launcher.launch = launch
        raise no_room

    def fails(folder: Path, attempt: int) -> None:
        launcher.script = launcher.finish
        raise no_room

    launcher.launch, launcher.script = cannot, fails  # first no launch can be made, then no result be written
    for launches in (1, 2):
        s = scheduler(tmp_path, launcher, WOOD, max_retries=0)
        with pytest.raises(OSError, match="No space left on device"):
            s.run()
        row = s.store.skill("Collect Wood")
        assert (row.status, row.retries, row.reason) == ("waiting", 0, "the disk is full")
        assert [attempt.outcome for attempt in s.store.attempts()] == ["stopped"] * launches
        s.close()
    assert scheduler(tmp_path, launcher, max_retries=0).run()


def test_what_ended_without_a_word_while_no_scheduler_watched_is_launched_again(
    tmp_path: Path, scripted
) -> None:
    s = scheduler(tmp_path, scripted(), WOOD, max_retries=0)
    folder, _, _ = prepare_training_run(WOOD.name, WOOD, s.store.assign_expert(WOOD.name), [], {}, tmp_path)
    number = s.store.begin_attempt(WOOD.name, folder)
    s.store.set_handle(number, "local", {"pid": 1, "began": "long ago"}, folder / "log")
    assert s.run()
    assert [attempt.outcome for attempt in s.store.attempts()] == ["lost", "merged"]


def test_a_folder_that_cannot_be_written_is_the_failure_of_its_skill(tmp_path: Path, scripted) -> None:
    (tmp_path / "training_runs").mkdir()
    (tmp_path / "training_runs" / "skill_0_Collect_Wood").write_text("a file where the folder goes")
    s = scheduler(tmp_path, scripted(), WOOD, WATER, max_parallel=1)
    assert not s.run()
    assert "cannot be launched: NotADirectoryError" in s.get_failed_skills()["Collect Wood"]
    assert s.get_status("Drink Water") == "completed"


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
    s = scheduler(tmp_path, launcher, WOOD, max_retries=1)
    assert s.run(), s.get_failed_skills()


def test_a_completed_skill_can_be_continued_within_its_budget(tmp_path: Path, scripted, quick) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher, WOOD, config=replace(quick, total_timesteps=2500))
    assert s.run()
    assert s.enqueue_continuation("Collect Wood", 10_000) == 1500  # 1000 of 2500 steps are used
    assert s.run()
    head = s.store.head(0)
    assert head is not None
    assert head.frames == 2000  # 1000 before, 1000 more
    assert head.parent == 1
    assert s.store.skill("Collect Wood").budget_used == 2000
    s.store.update_skill("Collect Wood", budget_total=2000)
    with pytest.raises(ValueError, match="the budget of 'Collect Wood' is used up .2000 of 2000 steps."):
        s.enqueue_continuation("Collect Wood", 5)
    with pytest.raises(ValueError, match="extra_timesteps must be at least 1, got nan"):
        s.enqueue_continuation("Collect Wood", float("nan"))
    s.add_skill(WATER.name, WATER)
    with pytest.raises(ValueError, match="only a completed skill"):
        s.enqueue_continuation("Drink Water", 5)


def test_a_trainer_that_counts_no_steps_of_its_expert_can_train_it_further(
    tmp_path: Path, scripted, net
) -> None:
    def finish(folder: Path, attempt: int) -> None:
        finish_training(folder, {0: net(attempt).params()}, {}, attempt=attempt, success=0.9, frames=10)

    launcher = scripted(finish)
    s = scheduler(tmp_path, launcher, WOOD)
    assert s.run()
    s.enqueue_continuation(WOOD.name, 100)
    assert s.run(), s.get_failed_skills()
    assert [attempt.outcome for attempt in s.store.attempts()] == ["merged", "merged"]
    assert [version.accepted for version in s.store.versions()] == [True, False]  # the head keeps ties


def test_a_resumed_run_trains_with_the_budget_it_is_given_unless_a_skill_has_its_own(
    tmp_path: Path, scripted, quick
) -> None:
    def fail(folder: Path, attempt: int) -> None:
        budgets.append(Run.open(folder).spec["config"]["total_timesteps"])
        raise RuntimeError("no")

    budgets: list[float] = []
    for total, own in ((1000, None), (2000, 500), (3000, None)):
        with_budget = replace(quick, total_timesteps=total)
        s = scheduler(
            tmp_path, scripted(fail), WOOD, WATER, config=with_budget, max_retries=0, max_parallel=1
        )
        if own is not None:
            s.store.update_skill("Drink Water", budget_total=own)
        for one in (WOOD, WATER):
            s.store.update_skill(one.name, status="waiting")
        assert not s.run()
        s.close()
    assert budgets == [1000, 1000, 2000, 500, 3000, 500]


def test_what_used_its_whole_budget_is_not_tried_again_until_it_gets_more(
    tmp_path: Path, scripted, quick, prints
) -> None:
    def exhausted(folder: Path, attempt: int) -> None:
        budgets.append(Run.open(folder).spec["config"]["total_timesteps"])
        raise NotLearnedError("not learned")

    budgets: list[float] = []
    launcher = scripted(exhausted)
    s = scheduler(tmp_path, launcher, WOOD, config=replace(quick, total_timesteps=1000), max_retries=5)
    assert not s.run()
    assert budgets == [1000]  # five more of the same would have ended the same
    at = ["--graph-path", str(tmp_path)]
    assert "give it more than 1,000 steps with --budget" in prints(
        "skills", "retry", "Collect Wood", *at, code=2
    )
    assert main(["skills", "retry", "Collect Wood", "--budget", "4000", *at]) == 0
    s.run()
    assert budgets == [1000, 4000]
    reopen(s.store, "Collect Wood", fresh=True)  # other random numbers are another matter
    s.run()
    assert len(budgets) == 3
    assert Run.open(tmp_path / "training_runs/skill_0_Collect_Wood").spec["seed"] != 0


def test_a_budget_raised_while_a_training_runs_is_used_when_it_ends(tmp_path: Path, scripted, quick) -> None:
    def exhausted(folder: Path, attempt: int) -> None:
        if attempt == 1:
            reopen(Store(tmp_path), "Collect Wood", budget=9000)
            raise NotLearnedError("not learned")
        launcher.finish(folder, attempt)

    launcher = scripted(exhausted)
    s = scheduler(tmp_path, launcher, WOOD, config=replace(quick, total_timesteps=1000), max_retries=0)
    assert s.run()
    assert [a.budget for a in s.store.attempts()] == [1000, 9000]


def test_a_training_over_its_time_is_ended_and_failed_with_that_reason(tmp_path: Path, scripted) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, WOOD, TABLE, time_limit=0.3, max_retries=5)
    assert not s.run()
    assert launcher.killed == [1]
    assert s.get_failed_skills() == {
        "Collect Wood": "ran longer than 0.3 s",
        "Place Table": "Collect Wood failed",
    }


def test_stop_merges_what_runs_and_launches_nothing_more(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    s = scheduler(tmp_path, launcher, WOOD, WATER, SAPLING, max_parallel=1)
    s.set_callbacks(on_skill_complete=lambda name, data: s.stop())
    assert not s.run()
    assert [s.get_status(one.name) for one in (WOOD, WATER, SAPLING)] == ["completed", "waiting", "waiting"]
    assert (tmp_path / "skills" / "0_Collect_Wood" / "expert_0_policy" / "params.safetensors").exists()


def test_cancelling_a_running_training_ends_it_and_blocks_its_dependents(tmp_path: Path, scripted) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, WOOD, TABLE, max_retries=5)
    thread = in_thread(s.run)
    wait_for(lambda: launcher.running)
    s.store.update_skill("Collect Wood", cancel=1)
    thread.join(timeout=60)
    assert launcher.killed == [1]
    assert s.get_failed_skills() == {"Collect Wood": "cancelled", "Place Table": "Collect Wood skipped"}
    assert len(launcher.launched) == 1


def test_who_does_not_wait_for_trainings_is_not_kept_by_one_who_does(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, WOOD)
    run = in_thread(s.run)
    wait_for(lambda: launcher.running)
    other = Store(tmp_path)
    waits = in_thread(lambda: ask_to_stop(other, wait=True))
    wait_for(lambda: s.store.setting("stop") == "drain")
    assert ask_to_stop(Store(tmp_path), wait=False)
    run.join(timeout=60)
    waits.join(timeout=60)
    assert launcher.killed == [1]
    s.close()


def test_stop_ends_the_trainings_and_a_resumed_run_goes_on_from_their_checkpoints(
    tmp_path: Path, quick, stand_still
) -> None:
    stand_still()
    config = replace(
        quick, total_timesteps=8_000, success_state_rate=2.0, patience_frames=1e9, evaluate_every=10
    )
    s = scheduler(tmp_path, "local", WOOD, config=config, max_retries=0)
    thread = in_thread(s.run)
    run = tmp_path / "training_runs" / "skill_0_Collect_Wood"
    wait_for(lambda: len(list(run.glob("0_policies/checkpoint-*"))) > 1)
    assert ask_to_stop(Store(tmp_path), wait=False)
    thread.join(timeout=60)
    assert s.stopped
    assert [a.outcome for a in s.store.attempts()] == ["stopped"]
    assert s.get_status("Collect Wood") == "waiting"
    last = sorted(run.glob("0_policies/checkpoint-*"))[-1].name
    assert s.run()  # no retry was used up
    rows = (tmp_path / "skills/0_Collect_Wood/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["update"] for row in rows] == list(range(1, len(rows) + 1))
    assert int(last.split("-")[1]) < len(rows)
    assert s.store.skill("Collect Wood").budget_used == s.store.skill("Collect Wood").result["frames"]


def test_cancel_without_a_scheduler_ends_what_runs_and_leaves_the_rest_alone(
    tmp_path: Path, quick, capsys: pytest.CaptureFixture[str], prints
) -> None:
    config = replace(quick, total_timesteps=5e6, success_state_rate=2.0, patience_frames=1e9)
    s = scheduler(tmp_path, "local", WOOD, WATER, config=config)
    thread = in_thread(s.run)
    wait_for(lambda: len([a for a in s.store.attempts() if a.handle]) == 2)
    s.stop(wait=False)
    thread.join(timeout=60)
    handles = {attempt.skill: attempt.handle for attempt in s.store.attempts()}
    assert main(["skills", "cancel", "Collect Wood", "--graph-path", str(tmp_path)]) == 0
    assert start_time(handles["Collect Wood"]["pid"]) != handles["Collect Wood"]["began"]
    assert start_time(handles["Drink Water"]["pid"]) == handles["Drink Water"]["began"]
    assert [row.status for row in s.store.skills()] == ["skipped", "running"]
    capsys.readouterr()
    told = json.loads(prints("skills", "status", "--json", "--graph-path", tmp_path))["skills"]
    assert told["Drink_Water"]["condition"] == "running, no scheduler"
    assert f"no scheduler runs {tmp_path}, so nobody would merge" in prints(
        "skills", "stop", "--wait", "--graph-path", tmp_path, code=2
    )
    os.kill(handles["Drink Water"]["pid"], signal.SIGKILL)
    wait_for(lambda: start_time(handles["Drink Water"]["pid"]) is None)
    assert condition(s.store, s.store.skill("Drink Water"), held=False) == "interrupted"
    assert main(["skills", "stop", "--graph-path", str(tmp_path)]) == 0
    assert [row.status for row in s.store.skills()] == ["skipped", "waiting"]


def test_trainings_of_a_world_that_is_not_found_from_here_can_be_ended(
    tmp_path: Path, scripted, prints
) -> None:
    s = scheduler(tmp_path, scripted(), WOOD, WATER)
    s.store.set_setting("world", "elsewhere:World")
    s.store.begin_attempt("Drink Water", tmp_path / "training_runs" / "gone")
    for words in (["cancel", "Collect Wood"], ["stop"]):
        assert main(["skills", *words, "--graph-path", str(tmp_path)]) == 0
    assert [row.status for row in s.store.skills()] == ["skipped", "waiting"]
    s.store.set_setting("world", 5)
    assert "no world named '5'" in prints("skills", "eval", "--graph-path", tmp_path, code=2)
    s.close()


@pytest.mark.parametrize("kill", [True, False])
def test_a_result_waits_for_who_trains_when_other_trainings_are_ended(
    tmp_path: Path, scripted, net, kill: bool
) -> None:
    s = scheduler(tmp_path, scripted(), WOOD, SAPLING)
    folders = [
        prepare_training_run(one.name, one, s.store.assign_expert(one.name), [], {}, tmp_path)[0]
        for one in (WOOD, SAPLING)
    ]
    done, going = (
        s.store.begin_attempt(one.name, folder) for one, folder in zip((WOOD, SAPLING), folders, strict=True)
    )
    finish_training(folders[0], {0: net("wood").params()}, {0: 1000}, attempt=done)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    handle = {"pid": process.pid, "began": start_time(process.pid)}
    s.store.set_handle(done, "local", {"pid": process.pid, "began": "long ago"}, folders[0] / "log")
    s.store.set_handle(going, "local", handle, folders[1] / "log")
    if not kill:
        ask_to_cancel(s.store, "Collect Sapling")
    s.settle(kill=kill)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert s.store.attempt(done).outcome is None  # this scheduler may know other rules than its own
    assert not s.store.versions()
    assert s.get_status("Collect Sapling") == ("waiting" if kill else "skipped")
    assert s.run() is kill
    assert s.store.attempt(done).outcome == "merged"


@pytest.mark.parametrize("foresees", [True, False])
def test_a_skill_cancelled_while_the_next_proposal_waits_for_it_ends_the_run(
    tmp_path: Path, scripted, foresees: bool
) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher)
    proposer = KnowledgeBase(knowledge_base("crafting"), CRAFTING, 3)
    proposer.foresees = foresees
    thread = in_thread(lambda: s.run(proposer, 3))
    wait_for(lambda: launcher.running)
    ask_to_cancel(Store(tmp_path), "Collect Wood")  # as another process would
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert s.get_status("Collect Wood") == "skipped"


def test_a_second_scheduler_is_refused_before_it_changes_anything(
    tmp_path: Path, scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    first = scheduler(tmp_path, scripted())
    first.take()
    (tmp_path / "config.yaml").write_text("seed: 7\nconfig: {}\n")
    second = scheduler(tmp_path, scripted())
    with pytest.raises(WorkerError, match="another scheduler"):
        second.run(KnowledgeBase(knowledge_base("crafting"), CRAFTING, 3))
    assert main(["skills", "train", "--resume", "--max_nodes", "2", "--graph-path", str(tmp_path)]) != 0
    assert "another scheduler" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "seed: 7\nconfig: {}\n"
    assert Store(tmp_path).skills() == []
    assert Store(tmp_path).events() == []
    first.close()


def test_a_scheduler_is_run_by_one_thread_at_a_time(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, WOOD)
    thread = in_thread(s.run)
    wait_for(lambda: launcher.running)
    for again in (s.run, s.settle):
        with pytest.raises(WorkerError, match="another thread of this process is running"):
            again()
    launcher.gate.set()
    thread.join(timeout=60)
    assert [row.outcome for row in s.store.attempts()] == ["merged"]
    assert s.run()  # one after the other is no fault


def test_events_are_told_once_and_after_they_are_durable(tmp_path: Path, scripted) -> None:
    told = []

    def hear(event: dict) -> None:
        if event["event"] == "merge":
            other = Store(tmp_path)  # another connection sees what the event speaks of
            assert other.skill(event["skill"]).status == "completed"
            assert other.head(0) is not None
            other.close()
        told.append(event["step"])

    s = scheduler(tmp_path, scripted(), WOOD, on_event=hear)
    assert s.run()
    assert told == sorted(set(told))
    assert [event["kind"] for event in s.store.events()] == ["added", "running", "completed", "merge"]


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


def test_a_skill_is_added_under_its_own_name(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted())
    with pytest.raises(ConfigError, match="skill 'Drink Water': its data names it 'Collect Wood'"):
        s.add_skill(WATER.name, WOOD)
    with pytest.raises(
        ValueError, match="the dependencies of 'Place Table' must be a list of names, got 'Collect Wood'"
    ):
        s.add_skill(TABLE.name, TABLE, dependencies="Collect Wood")
    assert s.store.skills() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_parallel": 0}, "max_parallel must be a whole number and at least 1, got 0"),
        ({"max_parallel": "2"}, "max_parallel must be .* got '2'"),
        ({"max_parallel": 1.5}, "max_parallel must be .* got 1.5"),
        ({"max_retries": -1}, "max_retries must be a whole number and at least 0, got -1"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds, got 0"),
        ({"time_limit": "5"}, "time_limit must be .* got '5'"),
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


def test_a_training_that_leaves_its_result_and_then_fails_is_completed_and_that_is_said(
    tmp_path: Path, scripted, caplog
) -> None:
    def finishes_and_fails(folder: Path, attempt: int) -> str:
        launcher.finish(folder, attempt)
        return "exit status 3"

    launcher = scripted(finishes_and_fails)
    assert scheduler(tmp_path, launcher, WOOD).run()
    assert "'Collect Wood': launch 1 left its result, and then ended: exit status 3" in caplog.text
