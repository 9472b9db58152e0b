import json
import threading

import pytest
from tests.records import with_call
from tests.rollout.doubles import FakeServer

from shoal.cli import grammar
from shoal.cli.main import main
from shoal.core.configuration import read_settings
from shoal.core.data import read_trajectories, write_trajectories
from shoal.envs.frozen_lake import FrozenLakeEnv

SMALL = ["es_manager.train.env_groups=3", "es_manager.train.group_size=2", "agent_proxy.parallel_n_jobs=2"]
TINY = [*SMALL, "engine.width=16", "engine.layers=1", "engine.heads=2"]


def test_a_rollout_is_saved_and_replays_to_the_bit(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    assert main(["rollout", *TINY, f"run_dir={run}", "--iteration", "3"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["command"], summary["status"]) == ("rollout", "completed")
    assert summary["metrics"]["episodes"] == 6
    assert summary["metrics"]["rollout_workers"] == 2
    told, say, reset = threading.Event(), grammar.Progress.say, FrozenLakeEnv.reset
    monkeypatch.setattr(grammar, "FIRST_HEARTBEAT", 0.05)
    monkeypatch.setattr(grammar.Progress, "say", lambda self, line: (say(self, line), told.set()))
    monkeypatch.setattr(FrozenLakeEnv, "reset", lambda env, **how: told.wait(60) and reset(env, **how))
    assert main(["rollout", "--verify", str(run)]) == 0
    said, meanwhile = capsys.readouterr()
    assert "promised L2, held L2: 6 of 6 episodes" in said
    assert "… playing rollout.jsonl again, " in meanwhile


def test_a_rollout_finds_out_how_many_tokens_an_action_needs(tmp_path, capsys):
    run = tmp_path / "run"
    whole = ["agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''", "agent_proxy.max_tokens=auto"]
    assert main(["rollout", *TINY, f"run_dir={run}", *whole]) == 0
    found = read_settings(run / "config.yaml")["agent_proxy"]["max_tokens"]
    assert found == 3  # <action>, the word, </action>
    assert main(["rollout", "--verify", str(run)]) == 0
    assert "held L2: 6 of 6 episodes" in capsys.readouterr().out


def test_rollouts_without_a_folder_of_their_own_are_kept_apart(tmp_path, monkeypatch, capsys):
    """As those of `shoal train`: the metrics of one are not added to those of another."""
    monkeypatch.chdir(tmp_path)
    for iteration in ("0", "3"):
        assert main(["rollout", *TINY, "--iteration", iteration]) == 0
        assert capsys.readouterr().out.count("episodes: runs/rollout") == 1
    rows = [
        [
            json.loads(line)["iteration"]
            for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("rollout", "rollout-2")
    ]
    assert rows == [[0], [3]]
    assert main(["rollout", *TINY, "run_dir=runs/rollout"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_changed_record_is_found(tmp_path, capsys):
    from dataclasses import replace

    run = tmp_path / "run"
    main(["rollout", *TINY, f"run_dir={run}"])
    file = run / "trajectories" / "rollout.jsonl"
    saved = list(read_trajectories(file))
    turn = saved[4].turns[2]
    first, *others = saved[4].calls[2].logprobs
    better = replace(turn, reward=turn.reward + 1)
    for changed, level, code in (
        (with_call(saved[4], 2, logprobs=(first - 1e-9, *others)), "L1", 0),
        (replace(saved[4], turns=(*saved[4].turns[:2], better, *saved[4].turns[3:])), "L0", 1),
    ):
        write_trajectories(file, [*saved[:4], changed, *saved[5:]])
        assert main(["rollout", "--verify", str(run)]) == code
        said = capsys.readouterr().out
        assert f"held {level}" in said
        assert ("group 2, member 0, turn 3: reward is" in said) == (level == "L0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    settings = [
        "trainer.iterations=3",
        "trainer.eval_every=1",
        "trainer.save_every=1",
        "trainer.keep_checkpoints=2",
        "trainer.save_trajectories_every=1",
        "warmup.steps=30",
        "es_manager.train.env_groups=3",
        "es_manager.train.group_size=4",
        "es_manager.val.env_groups=4",
        "algorithm.filter_groups.enable=false",
        "algorithm.entropy_target=100",  # the bonus makes a step in each iteration
    ]
    assert main(["train", *settings, f"run_dir={run}"]) == 0
    return run


def test_what_a_training_run_saved_replays_with_its_checkpoints(trained, capsys):
    assert main(["rollout", "--verify", str(trained)]) == 0
    said = capsys.readouterr().out
    # the two checkpoints that were kept, with their held-out episodes and what was sampled for the next update
    for pair in (
        "heldout-000002.jsonl with step-000002",
        "train-000003.jsonl with step-000002",
        "heldout-000003.jsonl with step-000003",
    ):
        assert pair in said
    assert said.count("promised L2, held L2") == 3


def test_other_weights_than_those_that_wrote_the_episodes_are_found(trained, tmp_path, capsys):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    later, earlier = run / "trajectories" / "train-000003.jsonl", run / "trajectories" / "train-000002.jsonl"
    assert later.read_bytes() != earlier.read_bytes()
    shutil.copy(earlier, later)
    assert main(["rollout", "--verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert said.count("promised L2, held L2") == 2
    assert "train-000003.jsonl with step-000002, promised L2, held L0" in said


def test_comparing_says_that_everything_is_equal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grammar, "FIRST_HEARTBEAT", 0.05)
    assert main(["rollout", "--compare", *TINY, f"run_dir={tmp_path / 'run'}"]) == 0
    said, meanwhile = capsys.readouterr()
    assert "… playing workers, own pace: " in meanwhile
    assert said.count("bit-equal") == 4
    for row in ("one by one", "lockstep alone", "workers, lockstep", "a worker killed"):
        assert row in said
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert (
        tmp_path / "run" / "engine" / "manifest.json"
    ).exists()  # the folder came whole, as a checkpoint does
    assert metrics["least_level"] == "L2"
    assert metrics["worker_deaths"] >= 1
    assert 1 <= metrics["replayed_episodes"] <= 6
    killed = next(line for line in said.splitlines() if "a worker killed" in line and "bit-equal" in line)
    assert int(killed.split()[-2]) == metrics["worker_deaths"]


class LostLake(FrozenLakeEnv):
    """Some episodes fail, each time at the same step."""

    def step(self, action):
        answer = super().step(action)
        if self._seed % 2 and self._steps == 2:
            raise ValueError("lost")
        return answer


@pytest.mark.slow
def test_episodes_that_fail_alike_are_equal_whoever_played_them_and_says_so(tmp_path, capsys):
    lost = f"custom_envs.FrozenLakeEnv.env_type={__name__}:LostLake"
    assert main(["rollout", "--compare", *TINY, lost, f"run_dir={tmp_path / 'run'}"]) == 0
    failed = {t.error for t in read_trajectories(tmp_path / "run" / "trajectories" / "rollout.jsonl")} - {
        None
    }
    assert failed
    assert capsys.readouterr().out.count("bit-equal") == 4


class NoLake(FrozenLakeEnv):
    """Cannot be stepped."""

    def step(self, action):
        raise ValueError("no lake")


def test_a_comparison_that_was_broken_off_begins_anew_and_one_of_no_whole_episode_is_no_proof(
    tmp_path, capsys, monkeypatch
):
    none = f"custom_envs.FrozenLakeEnv.env_type={__name__}:NoLake"
    alone = ["--backend", "serial", "agent_proxy.parallel.env_retries=0"]
    arguments = ["rollout", "--compare", *alone, *SMALL, none, f"run_dir={tmp_path / 'run'}"]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shoal.cli.rollout.compare", interrupted)
        assert main(arguments) == 130
    assert main(arguments) == 1
    assert "none of 6 episodes came to an end; the first: env_error: step(" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_in_which_no_worker_died_is_no_proof(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shoal.cli.rollout.os.kill", lambda pid, signal: None)
    assert main(["rollout", "--compare", *TINY, f"run_dir={tmp_path / 'run'}"]) == 1
    assert "none died" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_said(tmp_path, capsys):
    assert main(["rollout", "--verify", str(tmp_path)]) == 2
    assert "is not the folder of a saved rollout" in capsys.readouterr().err
    run = tmp_path / "run"
    main(["rollout", *TINY, f"run_dir={run}"])
    assert main(["rollout", *TINY, f"run_dir={run}"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_help_tells_how(capsys):
    assert main(["rollout", "--help"]) == 0
    assert "--compare" in capsys.readouterr().out


def test_a_server_plays_by_its_messages_on_worker_processes(tmp_path, capsys, monkeypatch):
    server = FakeServer("openai")
    server.say = lambda said: "<action>Down</action>"
    monkeypatch.setenv("MY_KEY", "sesame")
    run = tmp_path / "run"
    named = ["engine.name=openai", f"engine.server.url={server.url}", "engine.server.api_key_env=MY_KEY"]
    plain = ["agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''"]
    try:
        assert main(["rollout", *SMALL, *named, *plain, f"run_dir={run}"]) == 0
        played = list(read_trajectories(run / "trajectories" / "rollout.jsonl"))
        assert {t.status for t in played} == {"ok"}
        assert all(turn.response == "<action>Down</action>" for t in played for turn in t.turns)
        assert main(["rollout", "--verify", str(run)]) == 0
        assert "promised L0" in capsys.readouterr().out
    finally:
        server.shutdown()
        server.server_close()
    assert all("sesame" not in file.read_text() for file in run.rglob("*") if file.is_file())
    assert main(["train", *named, f"run_dir={tmp_path / 'train'}"]) == 2
    assert "engine.name=openai is for rollouts and evaluation" in capsys.readouterr().err


def test_what_was_compared_is_told_to_programs_and_nothing_is_not_called_equal(tmp_path, capsys):
    from dataclasses import replace

    run = tmp_path / "run"
    main(["rollout", *TINY, f"run_dir={run}"])
    capsys.readouterr()
    assert main(["rollout", "--verify", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["files"][0]["episodes"], told["files"][0]["held"]) == (True, 6, "L2")
    file = run / "trajectories" / "rollout.jsonl"
    write_trajectories(file, [replace(one, status="env_error", error="x") for one in read_trajectories(file)])
    assert main(["rollout", "--verify", str(run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["files"][0]["left_out"], told["files"][0]["held"]) == (False, 6, None)


def test_a_rollout_in_which_every_episode_failed_is_saved_and_told_as_a_failure(
    tmp_path, monkeypatch, capsys
):
    def broken(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(FrozenLakeEnv, "reset", broken)
    assert main(["rollout", *TINY, f"run_dir={tmp_path / 'run'}", "--backend", "serial"]) == 1
    said = "none of 6 episodes came to an end; the first: env_error: reset failed: RuntimeError: out of order"
    assert said in capsys.readouterr().err
    saved = list(read_trajectories(tmp_path / "run" / "trajectories" / "rollout.jsonl"))
    assert [t.status for t in saved] == ["env_error"] * 6
