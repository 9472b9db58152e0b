"""What people ask of a graph whose scheduler lives, died, or is another one's: cancel, stop, retry, budgets, status."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shoal.skills.jobs.runner import Runner
from tests.skills.conftest import some_net

from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError, WorkerError
from shoal.core.files import read_json, write_json
from shoal.skills.jobs.launchers import TmuxLauncher, server_of, start_time
from shoal.skills.jobs.process import ExhaustedError, write_failure
from shoal.skills.jobs.requests import ask_to_cancel, ask_to_stop, condition, reopen
from shoal.skills.jobs.store import Store
from shoal.skills.learning import merge as learning_merge
from shoal.skills.learning.crafting import CRAFTING
from shoal.skills.learning.frontier import Frontier
from shoal.skills.learning.merge import process_completed_training
from shoal.skills.learning.proposers import KnowledgeBase, knowledge_base
from shoal.skills.learning.scheduler import SkillScheduler
from shoal.skills.learning.spec import check_skill, load_skills, parse_skill
from shoal.skills.learning.training import Run, finish_training, prepare_training_run, read_outcome

LOADED = load_skills(knowledge_base("crafting"), CRAFTING)
SKILLS = {skill.name: replace(skill, horizon=100) for skill in LOADED}
AMOUNTS = {"skill_with_consumption": {"requirements": {}, "consumption": {}, "gain": {"wood": 1}}}


def scheduler(base: Path, launcher, *names: str, **more) -> SkillScheduler:
    s = SkillScheduler(base, more.pop("max_parallel", 2), launcher=launcher, **{"analyse": False, **more})
    for name in names:
        s.add_skill(name, SKILLS[name])
    return s


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_for(condition, seconds: float = 100) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def frontier(s: SkillScheduler, foresees: bool) -> Frontier:
    proposer = KnowledgeBase(knowledge_base("crafting"), CRAFTING, 3)
    proposer.foresees = foresees
    return Frontier(s, proposer, 3)


@pytest.mark.parametrize("foresees", [True, False])
def test_a_skill_cancelled_while_the_next_proposal_waits_for_it_ends_the_run(
    tmp_path: Path, scripted, foresees: bool
) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher)
    thread = in_thread(frontier(s, foresees).run)
    wait_for(lambda: launcher.running)
    ask_to_cancel(Store(tmp_path), "Collect Wood")  # as another process would
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert s.get_status("Collect Wood") == "skipped"


def test_a_frontier_ends_with_its_scheduler_whatever_ended_it(
    tmp_path: Path, scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scheduler(tmp_path, scripted())
    grow = frontier(s, False)
    monkeypatch.setattr(s.runner, "_loop", lambda: 1 / 0)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        grow.run()
    wait_for(lambda: "frontier" not in [t.name for t in threading.enumerate()])
    assert threading.active_count() <= before + 2
    s.take()  # the folder is free again
    s.close()


def test_a_second_scheduler_is_refused_before_it_changes_anything(
    tmp_path: Path, scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    first = scheduler(tmp_path, scripted())
    first.take()
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    second = scheduler(tmp_path, scripted())
    with pytest.raises(WorkerError, match="another scheduler"):
        frontier(second, True).run()
    assert main(["skills", "train", "--resume", "--max_nodes", "2", "--graph-path", str(tmp_path)]) != 0
    assert "another scheduler" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "seed: 7\n"
    assert Store(tmp_path).skills() == []
    assert Store(tmp_path).events() == []
    first.close()


def test_cancel_without_a_scheduler_ends_what_runs_and_leaves_the_rest_alone(
    tmp_path: Path, quick, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(quick, total_timesteps=5e6, success_state_rate=2.0, patience_frames=1e9)
    s = scheduler(tmp_path, "local", "Collect Wood", "Drink Water", config=config)
    thread = in_thread(s.run)
    wait_for(lambda: len([a for a in s.store.attempts() if a.handle]) == 2)
    s.stop(wait=False)
    thread.join(timeout=60)
    handles = {attempt.job: attempt.handle for attempt in s.store.attempts()}
    assert main(["skills", "cancel", "Collect Wood", "--graph-path", str(tmp_path)]) == 0
    assert start_time(handles["Collect Wood"]["pid"]) != handles["Collect Wood"]["began"]
    assert start_time(handles["Drink Water"]["pid"]) == handles["Drink Water"]["began"]
    assert [row.status for row in s.store.skills()] == ["skipped", "running"]
    capsys.readouterr()
    assert main(["skills", "status", "--json", "--graph-path", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)["skills"]
    assert told["Drink_Water"]["condition"] == "running, no scheduler"
    assert main(["skills", "stop", "--wait", "--graph-path", str(tmp_path)]) == 2
    assert f"no scheduler runs {tmp_path}, so nobody would merge" in capsys.readouterr().err
    os.kill(handles["Drink Water"]["pid"], signal.SIGKILL)
    wait_for(lambda: start_time(handles["Drink Water"]["pid"]) is None)
    assert condition(s.store, s.store.skill("Drink Water"), held=False) == "interrupted"
    assert main(["skills", "stop", "--graph-path", str(tmp_path)]) == 0
    assert [row.status for row in s.store.skills()] == ["skipped", "waiting"]


def test_trainings_of_a_world_that_is_not_found_from_here_can_be_ended(
    tmp_path: Path, scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood", "Drink Water")
    s.store.set_setting("world", "elsewhere:World")
    s.store.begin_attempt("Drink Water", tmp_path / "training_runs" / "gone")
    for words in (["cancel", "Collect Wood"], ["stop"]):
        assert main(["skills", *words, "--graph-path", str(tmp_path)]) == 0
    assert [row.status for row in s.store.skills()] == ["skipped", "waiting"]
    s.store.set_setting("world", 5)
    assert main(["skills", "eval", "--graph-path", str(tmp_path)]) == 2
    assert "no world named '5'" in capsys.readouterr().err
    s.close()


@pytest.mark.parametrize("words", [("cancel", "Collect Sapling"), ("stop",)], ids=["cancel", "stop"])
def test_what_is_asked_for_while_another_skill_is_being_cancelled_is_done(
    tmp_path: Path, scripted, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood", "Collect Sapling")
    folder = s.prepare(s.store.job("Collect Sapling"), resume=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    attempt = s.store.begin_attempt("Collect Sapling", folder)
    handle = {"pid": process.pid, "began": start_time(process.pid)}
    s.store.set_handle(attempt, "local", handle, folder / "log")
    told, flush = [], Runner._flush

    def other_asks(runner: Runner) -> None:
        monkeypatch.setattr(Runner, "_flush", flush)
        before = s.store.changes()
        told.append(in_thread(lambda: main(["skills", *words, "--graph-path", str(tmp_path)])))
        wait_for(lambda: s.store.changes() != before)
        flush(runner)

    monkeypatch.setattr(Runner, "_flush", other_asks)
    try:
        assert main(["skills", "cancel", "Collect Wood", "--graph-path", str(tmp_path)]) == 0
        told[0].join(timeout=60)
        assert not told[0].is_alive()
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()
    assert [row.status for row in s.store.skills()] == [
        "skipped",
        "skipped" if words[0] == "cancel" else "waiting",
    ]
    s.close()


def test_who_does_not_wait_for_trainings_is_not_kept_by_one_who_does(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, "Collect Wood")
    run = in_thread(s.run)
    wait_for(lambda: launcher.running)
    other = Store(tmp_path)
    waits = in_thread(lambda: ask_to_stop(other, wait=True))
    wait_for(lambda: s.store.setting("stop") == "drain")
    assert ask_to_stop(Store(tmp_path), wait=False, patience=20)
    run.join(timeout=60)
    waits.join(timeout=60)
    assert launcher.killed == [1]
    s.close()


def test_stop_ends_the_trainings_and_a_resumed_run_goes_on_from_their_checkpoints(
    tmp_path: Path, quick, stand_still
) -> None:
    stand_still()
    config = replace(
        quick, total_timesteps=30_000, success_state_rate=2.0, patience_frames=1e9, evaluate_every=10
    )
    s = scheduler(tmp_path, "local", "Collect Wood", config=config, max_retries=0)
    thread = in_thread(s.run)
    run = tmp_path / "training_runs" / "skill_0_Collect_Wood"
    wait_for(lambda: len(list(run.glob("0_policies/checkpoint-*"))) > 1)
    assert ask_to_stop(Store(tmp_path), wait=False)
    thread.join(timeout=60)
    assert s.runner.stopped
    assert [a.outcome for a in s.store.attempts()] == ["stopped"]
    assert s.get_status("Collect Wood") == "waiting"
    last = sorted(run.glob("0_policies/checkpoint-*"))[-1].name
    assert s.run()  # no retry was used up
    rows = (tmp_path / "skills/0_Collect_Wood/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["update"] for row in rows] == list(range(1, len(rows) + 1))
    assert int(last.split("-")[1]) < len(rows)
    assert s.store.skill("Collect Wood").budget_used == s.store.skill("Collect Wood").result["frames"]


def test_a_resumed_run_trains_with_the_budget_it_is_given(tmp_path: Path, scripted, quick) -> None:
    def fail(folder: Path, attempt: int) -> None:
        budgets.append(Run.open(folder).spec["config"]["total_timesteps"])
        raise RuntimeError("no")

    budgets: list[float] = []
    for budget in (1e5, 1e8):
        s = scheduler(tmp_path, scripted(fail), config=replace(quick, total_timesteps=budget), max_retries=0)
        s.add_skill("Collect Wood", SKILLS["Collect Wood"])
        s.store.update_skill("Collect Wood", status="waiting")
        assert not s.run()
        s.close()
    assert budgets == [1e5, 1e8]


def test_what_used_its_whole_budget_is_not_tried_again_until_it_gets_more(
    tmp_path: Path, scripted, quick, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(folder: Path, attempt: int) -> str:
        budgets.append(Run.open(folder).spec["config"]["total_timesteps"])
        write_failure(folder, attempt, ExhaustedError("not learned"))
        return "exit status 1"

    budgets: list[float] = []
    launcher = scripted(exhausted)
    s = scheduler(
        tmp_path, launcher, "Collect Wood", config=replace(quick, total_timesteps=1000), max_retries=5
    )
    assert not s.run()
    assert budgets == [1000]  # five more of the same would have ended the same
    at = ["--graph-path", str(tmp_path)]
    assert main(["skills", "retry", "Collect Wood", *at]) == 2
    assert "used its whole budget of 1,000 steps" in capsys.readouterr().err
    assert main(["skills", "retry", "Collect Wood", "--budget", "4000", *at]) == 0
    s.run()
    assert budgets == [1000, 4000]
    reopen(s.store, "Collect Wood", fresh=True)  # other random numbers are another matter
    s.run()
    assert len(budgets) == 3
    assert Run.open(tmp_path / "training_runs/skill_0_Collect_Wood").spec["seed"] != 0


def test_a_budget_raised_while_a_training_runs_is_used_when_it_ends(tmp_path: Path, scripted, quick) -> None:
    def exhausted(folder: Path, attempt: int) -> str:
        if attempt == 1:
            reopen(Store(tmp_path), "Collect Wood", budget=9000)
            write_failure(folder, attempt, ExhaustedError("not learned"))
            return "exit status 1"
        launcher.finish(folder, attempt)
        return "exit status 0"

    launcher = scripted(exhausted)
    s = scheduler(
        tmp_path, launcher, "Collect Wood", config=replace(quick, total_timesteps=1000), max_retries=0
    )
    assert s.run()
    assert [a.budget for a in s.store.attempts()] == [1000, 9000]


def test_a_training_over_its_time_is_ended_and_failed_with_that_reason(tmp_path: Path, scripted) -> None:
    launcher = scripted(lambda folder, attempt: "killed by signal 9")
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, "Collect Wood", "Place Table", time_limit=0.3, max_retries=5)
    assert not s.run()
    assert launcher.killed == [1]
    assert s.get_failed_skills() == {
        "Collect Wood": "ran longer than 0.3 s",
        "Place Table": "Collect Wood failed",
    }


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_ends_no_training(tmp_path: Path, scripted, monkeypatch, jump: float) -> None:
    launcher, real = scripted(), time.time
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, "Collect Wood", time_limit=600.0, max_retries=0)
    thread = in_thread(s.run)
    while not launcher.running:
        time.sleep(0.01)
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    s.add_skill("Drink Water", SKILLS["Drink Water"])  # begun when the clock is set, and set back then
    while "Drink Water" not in launcher.running and not launcher.killed:
        time.sleep(0.01)
    monkeypatch.setattr(time, "time", real)
    time.sleep(1.0)
    launcher.gate.set()
    thread.join(60)
    assert launcher.killed == []
    assert set(s.get_completed_skills()) == {"Collect Wood", "Drink Water"}


def test_a_folder_that_cannot_be_written_is_the_skills_failure_not_the_runs_end(
    tmp_path: Path, scripted
) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood", "Drink Water", max_parallel=1)
    (tmp_path / "training_runs").mkdir()
    (tmp_path / "training_runs" / "skill_0_Collect_Wood").write_text("a file where the folder goes")
    (tmp_path / "training_runs" / "skill_1_Collect_Wood").write_text("a file where the folder goes")
    assert not s.run()
    assert "cannot be set up: NotADirectoryError" in s.get_failed_skills()["Collect Wood"]
    assert s.get_status("Drink Water") == "completed"


@pytest.mark.parametrize(
    ("error", "tries", "status"),
    [
        (OSError(28, "No space left on device"), 2, "completed"),
        (ConfigError("it makes no sense"), 1, "failed"),
    ],
)
def test_what_keeps_a_training_from_being_set_up_may_pass(
    tmp_path: Path, scripted, monkeypatch, error: Exception, tries: int, status: str
) -> None:
    tried: list[float] = []

    def prepare(*args, **kwargs):
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise error
        return prepare_training_run(*args, **kwargs)

    monkeypatch.setattr("shoal.skills.learning.scheduler.prepare_training_run", prepare)
    monkeypatch.setattr("shoal.skills.jobs.runner.REST", 0.3)
    s = scheduler(tmp_path, scripted(), "Collect Wood", max_retries=1)
    assert s.run() == (status == "completed")
    assert s.get_status("Collect Wood") == status
    assert len(tried) == tries
    assert tried[-1] - tried[0] >= (0.3 if tries > 1 else 0)
    assert len(s.store.attempts("Collect Wood")) == tries - 1


@pytest.mark.parametrize(
    "done", ["[]", "null", '{"attempt": %d, "id": "x", "sha256": 3, "acted_frames": null}']
)
def test_an_odd_mark_is_the_trainings_failure_not_the_runs_end(tmp_path: Path, scripted, done: str) -> None:
    launcher = scripted()

    def odd(folder: Path, attempt: int) -> None:
        launcher.finish(folder, attempt)
        if Run.open(folder).spec["skill"] == "Collect Wood":
            (folder / "DONE.json").write_text(done)

    launcher.script = odd
    s = scheduler(tmp_path, launcher, "Collect Wood", "Drink Water", max_retries=1)
    assert not s.run()
    assert set(s.get_failed_skills()) == {"Collect Wood"}
    assert s.get_status("Drink Water") == "completed"


def test_a_launch_that_cannot_be_made_is_the_skills_failure_not_the_runs_end(
    tmp_path: Path, scripted
) -> None:
    class Broken(scripted):  # type: ignore[misc,valid-type]
        def launch(self, command, session, env, log):
            if "Wood" in session:
                raise RuntimeError("tmux new-session failed: no space")
            return super().launch(command, session, env, log)

    s = scheduler(tmp_path, Broken(), "Collect Wood", "Drink Water", max_retries=1)
    assert not s.run()
    assert "could not be launched: RuntimeError: tmux" in s.get_failed_skills()["Collect Wood"]
    assert s.get_status("Drink Water") == "completed"
    assert len(s.store.attempts("Collect Wood")) == 2


def test_a_launcher_that_knows_its_cluster_is_not_held_back_by_this_machines_memory(
    tmp_path: Path, scripted
) -> None:
    class Cluster(scripted):  # type: ignore[misc,valid-type]
        def room(self, running: int, slots: int) -> int:
            return 3 - running

    launcher = Cluster()
    launcher.gate.clear()
    names = ("Collect Wood", "Drink Water", "Collect Sapling", "Plant Sapling")
    s = scheduler(tmp_path, launcher, max_parallel=64, available_memory=lambda: 1)
    for name in names:
        s.add_skill(name, SKILLS[name], dependencies=[])
    thread = in_thread(s.run)
    wait_for(lambda: len(launcher.running) == 3)
    launcher.gate.set()
    thread.join(timeout=60)
    assert launcher.most_running == 3


def test_a_script_can_be_run_again_after_its_specs_were_corrected(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood")
    corrected = replace(SKILLS["Collect Wood"], requirements={"iron": 1})
    s.store.update_skill("Collect Wood", spec=corrected.as_dict())
    s.add_skill("Collect Wood", SKILLS["Collect Wood"])
    s.add_skill("Collect Wood", corrected)
    assert s.store.skill("Collect Wood").spec == corrected
    with pytest.raises(ValueError, match="another skill named 'Collect Wood'"):
        s.add_skill("Collect Wood", replace(corrected, horizon=9))


def test_what_people_do_to_the_files_they_are_shown_does_not_reach_the_store(
    tmp_path: Path, scripted
) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood")
    assert s.run()
    shown = tmp_path / "skills/0_Collect_Wood/expert_0_policy/params.safetensors"
    head = s.store.head(0)
    assert head is not None
    with shown.open("r+b") as file:
        file.write(b"\0" * 100)
    assert s.store.get_blob(head.sha256)
    s.show()
    assert shown.read_bytes() == s.store.get_blob(head.sha256)


def test_what_a_scheduler_is_writing_is_not_exported_and_not_missed(tmp_path: Path, scripted) -> None:
    s = scheduler(tmp_path / "run", scripted(), "Collect Wood")
    assert s.run()
    shown = s.base_dir / "skills" / "0_Collect_Wood"
    (shown / ".metadata.json.0123abcd.tmp").symlink_to("gone")  # what was listed, and then took its place
    assert main(["skills", "export", str(tmp_path / "out"), "--graph-path", str(s.base_dir)]) == 0
    there = [path.name for path in (tmp_path / "out" / "skills" / "0_Collect_Wood").iterdir()]
    assert sorted(there) == ["expert_0_policy", "metadata.json", "metrics.json"]
    s.close()


def test_a_folder_that_was_prepared_by_hand_is_processed_without_more_ado(tmp_path: Path, net) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 3, [], {}, tmp_path)
    with pytest.raises(DataError, match="is not done"):
        process_completed_training(folder, "Collect Wood", 3, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})
    for wrong in (("Collect Wood", 4), ("Collect Stone", 3)):
        with pytest.raises(ConfigError, match="is the training of 'Collect Wood' as expert 3"):
            process_completed_training(folder, *wrong, tmp_path)
    result = process_completed_training(folder, "Collect Wood", 3, tmp_path)
    assert result["new_expert"] == {"global_idx": 3, "frames": 10}
    row = Store(tmp_path).skill("Collect Wood")
    assert (row.status, row.expert, row.budget_used) == ("completed", 3, 10)
    other, _, _ = prepare_training_run(
        "Drink", {"skill_with_consumption": {"gain": {"drink": 1}}}, 3, [], {}, tmp_path
    )
    finish_training(other, {0: net("own").params()}, {0: 10})
    with pytest.raises(ConfigError, match="expert 3 belongs to 'Collect Wood'"):
        process_completed_training(other, "Drink", 3, tmp_path)


GOOD = some_net("own").params()


@pytest.mark.parametrize(
    ("experts", "acted", "message"),
    [
        ({}, {}, "has no parameters of the expert that was trained, local 0"),
        (
            {0: {**GOOD, "critic/bias": np.array([np.nan], np.float32)}},
            {0: 10},
            "expert 0: 'critic/bias' has numbers that are not finite",
        ),
        (
            {0: {**GOOD, "critic/bias": np.array([1e300])}},
            {0: 10},
            "'critic/bias' has numbers that are not finite",
        ),
        (
            {0: {**GOOD, "critic/bias": np.array([1])}},
            {0: 10},
            "must hold numbers as float32 does, got int64",
        ),
        (
            {0: {**GOOD, "critic/bias": np.ones(2, np.float32)}},
            {0: 10},
            r"must have shape \(1,\), got \(2,\)",
        ),
        (
            {0: {"only": np.ones(2)}},
            {0: 10},
            "expert 0 must have exactly the arrays torso/0/weight, .*wrong: .*only",
        ),
        ({0: GOOD, 1: GOOD}, {0: 10}, r"numbered \[0\] here, got 1"),
        ({0: GOOD}, {7: 10}, r"numbered \[0\] here, got 7"),
        ({0: GOOD}, {0: -3}, "acted_frames of expert 0 must be a whole number of steps, at least 0"),
    ],
)
def test_a_result_of_no_use_is_refused_before_it_is_anybodys_expert(
    tmp_path: Path, experts, acted, message
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    with pytest.raises(DataError, match=message):
        finish_training(folder, experts, acted)
    with pytest.raises(DataError, match="is not done"):
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert not Store(tmp_path).versions()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success": "good"}, r"Expected `float \| null`, got `str` - at `\$.success`"),
        ({"frames": -1}, r"Expected `int` >= 0 - at `\$.frames`"),
        ({"acted_frames": {"own": 5}}, r"Expected `int`, got `str`"),
        (
            {"numbers": {"peak_memory": "3 GB"}},
            r"Expected `int \| null`, got `str` - at `\$.numbers.peak_memory`",
        ),
        ({"numbers": {"seconds": "12 s"}}, r"Expected `float \| null`, got `str` - at `\$.numbers.seconds`"),
    ],
)
def test_a_mark_of_another_trainer_that_says_something_else_is_refused_by_name(
    tmp_path: Path, change, message: str
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    done = finish_training(folder, {0: GOOD}, {0: 10})
    write_json(done, {**read_json(done), **change})
    with pytest.raises(DataError, match=f"DONE.json is no mark of a training .*{message}"):
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert not Store(tmp_path).versions()


def test_a_result_counts_once_however_often_and_by_whomever_it_is_processed(tmp_path: Path, net) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})
    one = process_completed_training(folder, "Collect Wood", 0, tmp_path, keep_run=True)
    two = process_completed_training(folder, "Collect Wood", 0, tmp_path, keep_run=True)
    assert "already_merged" not in one
    assert two["already_merged"]
    store = Store(tmp_path)
    assert len(store.versions()) == 1
    assert store.skill("Collect Wood").budget_used == 10
    finish_training(folder, {0: net("own").params()}, {0: 10})  # another result, though of the same bytes
    process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert store.skill("Collect Wood").budget_used == 20
    assert process_completed_training(folder, "Collect Wood", 0, tmp_path)["already_merged"]


@pytest.mark.parametrize("until", ["mark_of", "read_outcome", "put_blob"])
def test_a_result_that_two_process_at_once_counts_once_and_neither_fails(
    tmp_path: Path, net, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})
    place = Store if until == "put_blob" else learning_merge
    real = getattr(place, until)

    def other_is_faster(*arguments):
        monkeypatch.setattr(place, until, real)
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
        return real(*arguments)

    monkeypatch.setattr(place, until, other_is_faster)
    process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert process_completed_training(folder, "Collect Wood", 0, tmp_path)["already_merged"]
    store = Store(tmp_path)
    assert len(store.versions()) == 1
    row = store.skill("Collect Wood")
    assert (row.status, row.budget_used) == ("completed", 10)
    assert not [*folder.parent.iterdir()]
    store.close()


def test_who_is_killed_where_another_has_just_committed_the_same_leaves_no_launch_behind(
    tmp_path: Path, net, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def other_is_faster(*arguments):
        patch.undo()
        process_completed_training(folder, "Collect Wood", 0, tmp_path, keep_run=True)
        patch.setattr(learning_merge, "_merge_and_commit", killed)
        return read_outcome(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(learning_merge, "read_outcome", other_is_faster)
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert process_completed_training(folder, "Collect Wood", 0, tmp_path)["already_merged"]
    with contextlib.closing(Store(tmp_path)) as store:
        assert [attempt.outcome for attempt in store.attempts()] == ["merged"]
        assert store.skill("Collect Wood").status == "completed"


def test_what_was_trained_by_hand_and_killed_within_its_commit_is_committed_and_not_trained_again(
    tmp_path: Path, net, scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(learning_merge, "_merge_and_commit", killed)
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    launcher = scripted()
    with contextlib.closing(SkillScheduler(tmp_path, launcher=launcher)) as s:
        assert s.run()
        assert not launcher.launched
        assert [attempt.outcome for attempt in s.store.attempts()] == ["merged"]
        assert s.store.skill("Collect Wood").budget_used == 10


def test_a_result_whose_folder_was_being_removed_by_a_killed_process_is_not_missed(
    tmp_path: Path, net, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", AMOUNTS, 0, [], {}, tmp_path)
    finish_training(folder, {0: net("own").params()}, {0: 10})

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            (path / "DONE.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert process_completed_training(folder, "Collect Wood", 0, tmp_path)["already_merged"]
    assert not [*folder.parent.iterdir()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": 10**12}, "horizon in 1..10,000"),
        ({"done": {"feature": "wood", "count": 500}}, "are more than the 9 that can be held"),
        (
            {"done": {"feature": "wood", "count": 3}, "practice": 4, "gain": {"wood": 1}},
            "3 'wood', 4 times in a row",
        ),
        ({"done": {"feature": "table", "count": 2}}, "are more than the 1 that can be held"),
        ({"done": {"feature": "wood", "op": "<="}}, "is done before it begins"),
        (
            {"done": {"feature": "wood", "op": "<=", "count": 9, "relative": False}},
            "is done before it begins",
        ),
    ],
)
def test_what_can_never_be_done_or_never_ends_is_refused(change: dict, message: str) -> None:
    spec = {"name": "Odd", "gain": {"wood": 1}, "done": {"feature": "wood"}, **change}
    with pytest.raises(ConfigError, match=message):
        check_skill(parse_skill(spec), CRAFTING)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_graphs_in_two_folders_do_not_end_each_others_tmux_sessions(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    assert len({server_of(folder) for folder in folders}) == 2
    assert server_of(folders[0]) == server_of(tmp_path / "two" / ".." / "one")
    launchers = [TmuxLauncher(server_of(folder)) for folder in folders]
    try:
        handles = [
            launcher.launch(
                [sys.executable, "-c", "import time; time.sleep(600)"], "same", {}, tmp_path / "log"
            )
            for launcher in launchers
        ]
        assert all(start_time(handle["pid"]) == handle["began"] for handle in handles)
        launchers[0].kill(handles[0])
        wait_for(lambda: start_time(handles[0]["pid"]) != handles[0]["began"])
        assert start_time(handles[1]["pid"]) == handles[1]["began"]
    finally:
        for launcher in launchers:
            launcher._tmux("kill-server", check=False)


def test_a_scheduler_is_run_by_one_thread_at_a_time(tmp_path: Path, scripted) -> None:
    launcher = scripted()
    launcher.gate.clear()
    s = scheduler(tmp_path, launcher, "Collect Wood")
    thread = in_thread(s.run)
    wait_for(lambda: launcher.running)
    for again in (s.run, s.settle, Frontier(s, SimpleNamespace(), 1).run):
        with pytest.raises(WorkerError, match="another thread of this process is running"):
            again()
    launcher.gate.set()
    thread.join(timeout=60)
    assert [row.outcome for row in s.store.attempts()] == ["merged"]
    assert s.run()  # one after the other is no fault


@pytest.mark.parametrize("kill", [True, False])
def test_a_result_waits_for_who_trains_when_other_trainings_are_ended(
    tmp_path: Path, scripted, net, kill: bool
) -> None:
    s = scheduler(tmp_path, scripted(), "Collect Wood", "Collect Sapling")
    folders = [s.prepare(s.store.job(name), resume=False) for name in ("Collect Wood", "Collect Sapling")]
    done, going = (s.store.begin_attempt(name, folder)
                   for name, folder in zip(("Collect Wood", "Collect Sapling"), folders, strict=True))  # fmt: skip
    finish_training(folders[0], {0: net("wood").params()}, {0: 1000}, attempt=done)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    handle = {"pid": process.pid, "began": start_time(process.pid)}
    s.store.set_handle(done, "local", {"pid": process.pid, "began": "long ago"}, folders[0] / "log")
    s.store.set_handle(going, "local", handle, folders[1] / "log")
    if not kill:
        ask_to_cancel(s.store, "Collect Sapling")
    s.settle(kill=kill)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert s.store.attempt(done).state == "running"  # this scheduler may know other rules than its own
    assert not s.store.versions()
    assert s.get_status("Collect Sapling") == ("waiting" if kill else "skipped")
    assert s.run() is kill
    assert s.store.attempt(done).outcome == "merged"
