import json
from dataclasses import replace

import pytest
from tests.rollout.doubles import FakeServer

from shoal.cli.main import main
from shoal.core.configuration import read_settings
from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.train.agent.config import compose_config
from shoal.train.records.rollouts import record_rollout

SMALL = ["es_manager.train.env_groups=3", "es_manager.train.group_size=2", "agent_proxy.parallel_n_jobs=2"]
TINY = [*SMALL, "engine.width=16", "engine.layers=1", "engine.heads=2"]


def test_a_rollout_is_saved_and_replays_to_the_bit(tmp_path, capsys, prints):
    run = tmp_path / "run"
    assert main(["rollout", *TINY, f"run_dir={run}", "--iteration", "3"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["command"], summary["status"]) == ("rollout", "completed")
    assert summary["metrics"]["episodes"] == 6
    assert summary["metrics"]["rollout_workers"] == 2
    capsys.readouterr()
    assert "the same: " in prints("replay", run, "rollout:4")
    seen = []
    config = compose_config("base-parallel", [*TINY, f"run_dir={tmp_path / 'python'}"])
    found = record_rollout(config, iteration=3, progress=lambda *counts: seen.append(counts))
    of_both = [folder / "trajectories" / "rollout.jsonl" for folder in (run, tmp_path / "python")]
    assert of_both[0].read_bytes() == of_both[1].read_bytes()
    assert list(read_trajectories(of_both[0])) == found.trajectories
    assert seen == [(played, 6) for played in range(7)]
    for wrong, said in (
        (config, "holds a run already"),
        (replace(config, run_dir=None), "set run_dir=FOLDER"),
    ):
        with pytest.raises(ConfigError, match=said):
            record_rollout(wrong)


def test_a_rollout_finds_out_how_many_tokens_an_action_needs(tmp_path):
    run = tmp_path / "run"
    whole = ["agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''", "agent_proxy.max_tokens=auto"]
    assert main(["rollout", *TINY, f"run_dir={run}", *whole]) == 0
    found = read_settings(run / "config.yaml")["agent_proxy"]["max_tokens"]
    assert found == 3  # <action>, the word, </action>
    assert main(["replay", str(run), "rollout:0"]) == 0


def test_rollouts_without_a_folder_of_their_own_are_kept_apart(tmp_path, monkeypatch, prints):
    """As those of `shoal train`: the metrics of one are not added to those of another."""
    monkeypatch.chdir(tmp_path)
    for iteration in ("0", "3"):
        assert prints("rollout", *TINY, "--iteration", iteration).count("episodes: runs/rollout") == 1
    rows = [
        [
            json.loads(line)["iteration"]
            for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("rollout", "rollout-2")
    ]
    assert rows == [[0], [3]]
    assert "holds a run already" in prints("rollout", *TINY, "run_dir=runs/rollout", code=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("of somebody")
    assert "mine holds other files (notes.txt) and no run" in prints("rollout", *TINY, "run_dir=mine", code=2)


def test_comparing_prints_time_metrics_and_equality_and_a_killed_worker_changes_nothing(tmp_path, prints):
    said = prints("rollout", "--compare", *TINY, f"run_dir={tmp_path / 'run'}")
    rows = {line.strip().split("  ")[0]: line for line in said.splitlines() if "bit-equal" in line}
    assert list(rows) == ["sequential", "parallel", "a worker killed"]
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert (metrics["least_level"], metrics["episodes"]) == ("L2", 6)
    assert metrics["worker_deaths"] >= 1
    assert float(rows["sequential"].split()[1]) == pytest.approx(metrics["seconds_rollout"], abs=0.002)
    assert f"{metrics['seconds_parallel']:.3f}" in rows["parallel"]


def test_comparing_finds_what_differs(tmp_path, capsys, monkeypatch):
    from shoal.rollout.play import ParallelRolloutManager

    collect = ParallelRolloutManager.collect

    def changed(manager, iteration=0):
        first, *others = collect(manager, iteration)
        if manager.report.workers < 2:
            return [first, *others]
        turn = replace(first.turns[0], reward=first.turns[0].reward + 1)
        return [replace(first, turns=(turn, *first.turns[1:])), *others]

    monkeypatch.setattr(ParallelRolloutManager, "collect", changed)
    assert main(["rollout", "--compare", *TINY, f"run_dir={tmp_path / 'run'}"]) == 1
    assert "differs: " in capsys.readouterr().out


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
    assert capsys.readouterr().out.count("bit-equal") == 3


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
        patched.setattr("shoal.train.records.compare.compare", interrupted)
        assert main(arguments) == 130
    assert main(arguments) == 1
    assert "none of 6 episodes came to an end; the first: env_error: step(" in capsys.readouterr().err


def test_a_server_plays_by_its_messages_on_worker_processes(tmp_path, prints, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    run = tmp_path / "run"
    plain = ["agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''"]
    with FakeServer("openai") as server:
        server.say = lambda said: "<action>Down</action>"
        named = ["engine.name=openai", f"engine.server.url={server.url}", "engine.server.api_key_env=MY_KEY"]
        assert main(["rollout", *SMALL, *named, *plain, f"run_dir={run}"]) == 0
        played = list(read_trajectories(run / "trajectories" / "rollout.jsonl"))
        assert {t.status for t in played} == {"ok"}
        assert all(turn.response == "<action>Down</action>" for t in played for turn in t.turns)
        assert main(["replay", str(run), "rollout:0"]) == 0
    assert all("sesame" not in file.read_text() for file in run.rglob("*") if file.is_file())
    assert "engine.model must be a model folder" in prints(
        "train", *named, f"run_dir={tmp_path / 'train'}", code=2
    )


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
