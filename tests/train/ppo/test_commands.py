"""`shoal eval`, `export` and `show` of PPO runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.train.ppo.ppo_envs import SMALL_RUN

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.core.files import read_json
from shoal.core.run_folder import RunFolder
from shoal.train.ppo.checkpoint import checkpoint_step, list_checkpoints
from shoal.train.ppo.ppo import PPO


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("ppo") / "run"
    words = [*SMALL_RUN, "--eval-episodes", "2", "--total-timesteps", "640"]
    assert main(["train-ppo", *words, "--run-dir", str(place)]) == 0
    return place


def evaluated(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_plays_and_scores_a_run_as_its_policy_does(run, tmp_path, capsys):
    told = evaluated(capsys, str(run), "--episodes", "5", "--seed", "3", "--out", str(tmp_path / "out"))
    with PPO.load(run, backend="serial") as ppo:
        played = ppo.evaluate(5, seed=3)
        assert played != ppo.evaluate(5)  # the seed counts
    assert (told["returns"], told["eval_return_mean"]) == (played.returns, played.mean)
    summary = read_json(tmp_path / "out" / "summary.json")
    assert (summary["command"], summary["metrics"]["eval_return_mean"]) == ("eval", played.mean)
    assert shoal.evaluate(run, episodes=5, seed=3).metrics == told
    with pytest.raises(ConfigError, match="env does nothing with a PPO run"):
        shoal.evaluate(run, "frozen_lake")
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


def test_eval_takes_the_checkpoint_that_is_asked_for_and_draws_actions_when_asked_to(run, capsys):
    steps = [checkpoint_step(folder) for folder in list_checkpoints(run / "checkpoints")]
    for wanted, step in (("newest", 640), (str(steps[0]), steps[0])):
        assert evaluated(capsys, str(run), "--episodes", "1", "--checkpoint", wanted)["steps"] == step
    best = evaluated(capsys, str(run), "--episodes", "1", "--checkpoint", "best")["steps"]
    assert best == checkpoint_step(list_checkpoints(run / "best")[0])
    alone = evaluated(capsys, str(run / "checkpoints" / "step_000000000640"), "--episodes", "4")
    drawn = evaluated(capsys, str(run), "--episodes", "4", "--temperature", "1")
    assert (alone["deterministic"], drawn["deterministic"]) == (True, False)
    assert alone["returns"] != drawn["returns"]


def test_filming_without_a_screen_says_nothing_but_the_result(run, tmp_path):
    pytest.importorskip("pygame")
    screens = (
        "DISPLAY",
        "WAYLAND_DISPLAY",
        "XDG_RUNTIME_DIR",
        "SDL_VIDEODRIVER",
        "PYGAME_HIDE_SUPPORT_PROMPT",
    )
    env = {key: value for key, value in os.environ.items() if key not in screens}
    words = ["eval", str(run), "--episodes", "1", "--video", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words], env=env, capture_output=True, text=True, check=True
    )
    assert [line for line in done.stderr.splitlines() if not line.startswith("… playing")] == []
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["return", "length", "episodes", "video"]
    assert (tmp_path / "out" / "video.gif").read_bytes()[:3] == b"GIF"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "7"], "has no checkpoint after 7 steps; it has newest, best, "),
        (["--panel", "core"], "--panel does nothing with a PPO run"),
        (["--temperature", "0.5"], "--temperature of a PPO run must be 0 or 1, got 0.5"),
        (["--episodes", "0"], "--episodes must be at least 1, got 0"),
    ],
)
def test_eval_refuses_what_a_run_has_not(run, capsys, words, message):
    assert main(["eval", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_export_of_a_run_says_how_its_policy_is_used(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is a PPO run" in said
    assert "shoal.load_policy(" in said
    assert "has no checkpoint" not in said
    assert not (tmp_path / "out").exists()


def test_show_of_a_run_that_is_going_on_shows_its_numbers(tmp_path, capsys):
    with RunFolder(tmp_path / "run", "train-ppo", 0) as folder:
        for steps, reward in ((64, 10.0), (128, 12.5)):
            row = {"steps": steps, "reward_mean": reward, "steps_per_second": 1000.0, "reward": np.nan}
            folder.append_metrics(row)
        assert main(["show", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("running now", "reward_mean 12.5", "steps 128", "steps_per_second 1,000"):
        assert part in said
