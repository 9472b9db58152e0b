"""`shoal train-ppo` and its run folder: files, resuming a killed run, what it prints and refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.train.ppo.ppo_envs import SMALL_RUN, IdentityEnv, bytes_of

from shoal.cli.main import main
from shoal.core.files import read_json, verify_folder
from shoal.train.ppo import run
from shoal.train.ppo.checkpoint import list_checkpoints, load_checkpoint
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.presets import PRESETS

REPO = Path(__file__).resolve().parents[3]
SMALL = [*SMALL_RUN, "--eval-episodes", "2"]


def train(run: Path, *more: str) -> int:
    return main(["train-ppo", *SMALL, "--run-dir", str(run), *more])


@pytest.mark.usefixtures("drawn")
def test_a_run_leaves_a_summary_a_curve_checkpoints_and_metrics(tmp_path, capsys):
    assert train(tmp_path / "run", "--total-timesteps", "1280", "--log-every", "1") == 0
    run = tmp_path / "run"
    summary = read_json(run / "summary.json")
    assert summary["command"] == "train-ppo"
    assert summary["status"] == "completed"
    metrics = summary["metrics"]
    assert metrics["steps"] == 1280
    assert metrics["eval_return_mean"] > 0
    assert metrics["eval_return_std"] >= 0
    assert metrics["steps_per_second"] > 0
    assert (run / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (run / "config.yaml").exists()
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [
        "step_000000001024", "step_000000001152", "step_000000001280"
    ]  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["steps"] == 1280
    assert sum("eval_return_mean" in row for row in rows) >= 10
    verify_folder(list_checkpoints(run / "best")[-1])
    assert load_policy(run).env == "CartPole-v1"
    out = capsys.readouterr().out
    assert "Using 2 parallel environments for training" in out
    assert "Start method: default" in out
    assert "Parallel mode: 2 environments" in out
    assert "Mean(100):" in out
    assert "n_completed_episodes:" in out


IDENTITY = ("--env", "tests.train.ppo.ppo_envs:IdentityEnv")


def test_resuming_a_run_that_reached_its_reward_changes_nothing_and_says_so(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, *IDENTITY, "--total-timesteps", "20000", "--stop-at-reward", "0") == 0
    before = (
        bytes_of(load_checkpoint(run)),
        (run / "metrics.jsonl").read_bytes(),
        list_checkpoints(run / "checkpoints"),
    )
    capsys.readouterr()
    assert main(["train-ppo", "--resume-from", str(run)]) == 0
    said = capsys.readouterr().out
    assert "nothing to train: the mean reward is " in said
    assert ", --stop-at-reward is 0\n" in said
    assert "were asked for" not in said
    assert before == (
        bytes_of(load_checkpoint(run)), (run / "metrics.jsonl").read_bytes(), list_checkpoints(run / "checkpoints")
    )  # fmt: skip
    (run / "summary.json").unlink()  # killed before its summary
    assert main(["train-ppo", "--resume-from", str(run)]) == 0
    assert before[0] == bytes_of(load_checkpoint(run))
    more = ("--stop-at-reward", "1000", "--total-timesteps", "2560")
    assert main(["train-ppo", "--resume-from", str(run), *more]) == 0
    assert read_json(run / "summary.json")["metrics"]["steps"] == 2560


def test_a_run_of_episodes_is_saved_and_evaluated_after_each_tenth_too(tmp_path):
    run = tmp_path / "run"
    assert train(run, *IDENTITY, "--num-episodes", "40", "--keep-checkpoints", "50") == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["episodes"] for row in rows if "eval_return_mean" in row] == list(range(4, 44, 4))
    assert len(list_checkpoints(run / "checkpoints")) == 10


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--total-timesteps", "0", "total_timesteps must be at least 1, got 0"),
        ("--num-episodes", "-3", "num_episodes must be at least 1, got -3"),
        ("--eval-every", "-1", "eval_every must be at least 0, got -1"),
        ("--checkpoint-every", "-1", "checkpoint_every must be at least 0, got -1"),
        ("--stop-at-reward", "nan", "stop_at_reward must be a finite number, got nan"),
        (
            "--record-video",
            "",
            "a video (--record-video, --video) needs an environment with render_mode='rgb_array'",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_folder(tmp_path, capsys, flag, value, message):
    assert train(tmp_path / "run", *IDENTITY, "--total-timesteps", "64", *filter(None, (flag, value))) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Dark(IdentityEnv):
    """Takes a render mode, and draws nothing."""

    def __init__(self, render_mode=None):
        super().__init__()


class Told(Dark):
    """Draws in words."""

    def render(self):
        return "a picture of it"


@pytest.mark.parametrize(("kind", "why"), [("Dark", "failed: NotImplementedError"), ("Told", "gave str")])
def test_a_film_of_what_draws_no_pictures_is_refused_before_anything_is_played(tmp_path, capsys, kind, why):
    words = ("--env", f"tests.train.ppo.test_run:{kind}", "--total-timesteps", "300")
    assert train(tmp_path / "run", *words, "--record-video") == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(tmp_path / "run", *words) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1", "--video"]) == 2
    told = capsys.readouterr()
    assert (why in told.err, told.out) == (True, "")


def test_num_episodes_ends_the_run_as_the_reference_has_it(tmp_path, capsys):
    assert train(tmp_path / "run", "--num-episodes", "7", "--checkpoint-dir", str(tmp_path / "saved")) == 0
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["episodes"] >= 7
    assert len(list_checkpoints(tmp_path / "saved")) == 1
    assert "Episode" in capsys.readouterr().out


def test_a_run_stops_when_the_wanted_reward_is_reached(tmp_path):
    assert train(tmp_path / "run", "--total-timesteps", "50000", "--stop-at-reward", "15") == 0
    metrics = read_json(tmp_path / "run" / "summary.json")["metrics"]
    assert metrics["steps"] < 20_000
    assert metrics["reward_mean"] >= 15


KILLED = """
import os, signal, sys, threading
from shoal.cli import train_ppo
from shoal.cli.main import main

tell = train_ppo.print_json

def print_json(event):
    tell(event)
    if event["event"] == "checkpoint" and event["step"] >= 1280:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()

train_ppo.print_json = print_json
main(sys.argv[1:])
"""


def test_a_run_killed_at_any_moment_resumes_to_the_same_weights(tmp_path):
    """kill -9 after a checkpoint was reported; the resumed run ends bit for bit where an undisturbed one does."""
    common = [*SMALL, "--total-timesteps", "12800", "--normalize-obs", "--lr-schedule", "linear",
              "--eval-every", "0", "--log-every", "1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    arguments = [sys.executable, "-c", KILLED, "train-ppo", *common, "--json-events", "--run-dir",
                 str(tmp_path / "killed")]  # fmt: skip
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert main(["train-ppo", "--resume-from", str(tmp_path / "killed")]) == 0
    assert main(["train-ppo", *common, "--run-dir", str(tmp_path / "whole")]) == 0
    assert bytes_of(load_checkpoint(tmp_path / "killed")) == bytes_of(load_checkpoint(tmp_path / "whole"))
    rows, expected = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("killed", "whole")
    )
    timeless = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    assert timeless == [{k: v for k, v in row.items() if "second" not in k} for row in expected]


def test_a_best_checkpoint_that_is_damaged_is_told_and_made_anew_when_a_run_goes_on(tmp_path, caplog):
    assert train(tmp_path / "run", "--total-timesteps", "64", "--stop-at-reward", "1000") == 0
    (best,) = list_checkpoints(tmp_path / "run" / "best")
    os.truncate(best / "weights.safetensors", 8)
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--total-timesteps", "128"]) == 0
    assert "best holds no whole checkpoint: that of the next evaluation is kept there" in caplog.text
    (best,) = list_checkpoints(tmp_path / "run" / "best")
    verify_folder(best)


@pytest.mark.parametrize("part", ["", "checkpoints", "best"])
def test_a_run_that_was_copied_or_is_named_from_elsewhere_goes_on_in_its_own_folder(
    tmp_path, monkeypatch, part
):
    monkeypatch.chdir(tmp_path)
    assert train(Path("run"), "--total-timesteps", "64") == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    shutil.copytree("run", "copy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["train-ppo", "--resume-from", str(Path("../copy", part)), "--total-timesteps", "128"]) == 0
    monkeypatch.chdir(tmp_path)
    assert list(Path("elsewhere").iterdir()) == []
    assert before == {path: path.read_bytes() for path in before}
    assert read_json(Path("copy/summary.json"))["metrics"]["steps"] == 128


def test_checkpoints_elsewhere_stay_there_when_their_folder_was_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", "--total-timesteps", "64", "--checkpoint-dir", "kept") == 0
    Path("kept").rename("moved")
    assert main(["train-ppo", "--resume-from", "moved", "--total-timesteps", "128"]) == 0
    assert [path.name for path in list_checkpoints("moved")][-1] == "step_000000000128"
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["steps"] == 128
    assert not Path("kept").exists()


def test_events_are_json_lines_after_the_data_is_safe(tmp_path, capsys):
    assert train(tmp_path / "run", "--total-timesteps", "640", "--json-events") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events][-1] == "summary"
    saved = [event for event in events if event["event"] == "checkpoint"]
    assert saved[-1]["step"] == 640
    verify_folder(Path(saved[-1]["path"]))


def test_nan_leaves_an_emergency_checkpoint_of_the_last_good_weights(tmp_path, capsys):
    broken = ["--env", "tests.train.ppo.ppo_envs:NaNLaterEnv"]
    assert train(tmp_path / "run", "--total-timesteps", "6400", "--eval-every", "64", *broken) == 1
    assert "observation must be finite, got [nan, 0.0]" in capsys.readouterr().err
    (emergency,) = list_checkpoints(tmp_path / "run" / "emergency")
    saved = load_checkpoint(emergency)
    assert all(np.isfinite(value).all() for value in saved.weights.values())
    assert "finite" in saved.training["error"]
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed"
    assert summary["metrics"]["steps"] == saved.training["n_steps"] > 0
    for kept in ("emergency", "best"):  # from either the run can go on as it was
        options, _ = run.saved_options(str(tmp_path / "run" / kept))
        assert (options.total_timesteps, options.eval_episodes) == (6400, 2)


def test_a_full_disk_does_not_hide_why_a_run_failed(tmp_path, capsys, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PPO, "save", full)
    broken = ["--env", "tests.train.ppo.ppo_envs:NaNLaterEnv", "--checkpoint-every", "0"]
    assert train(tmp_path / "run", "--total-timesteps", "6400", *broken) == 1
    assert "observation must be finite, got [nan, 0.0]" in capsys.readouterr().err
    assert "could not be saved: [Errno 28] No space left on device" in caplog.text


def test_video_and_tensorboard_are_written(tmp_path):
    pytest.importorskip("pygame")
    pytest.importorskip("tensorboard")
    assert train(tmp_path / "run", "--total-timesteps", "64", "--record-video", "--tensorboard") == 0
    assert (tmp_path / "run" / "video.gif").read_bytes()[:3] == b"GIF"
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--env", "CartPol-v1"], "Did you mean 'CartPole-v1'", 2),
        (["--n-envs", "0"], "n_envs must be at least 1, got 0", 2),
        (["--preset", "CartPole"], "no preset named 'CartPole'. Did you mean 'CartPole-v1'", 2),
        (["--resume-from", "nowhere"], "nowhere holds no checkpoint", 2),
        (["--device", "cuda:7"], "device=cuda:7 is not available here", 2),
        (["--gamma", "2"], "gamma must be at most 1, got 2.0", 2),
    ],
)
def test_mistakes_on_the_command_line_are_one_readable_line(
    tmp_path, capsys, monkeypatch, arguments, message, code
):
    monkeypatch.chdir(tmp_path)
    if "cuda:7" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    assert main(["train-ppo", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resuming_with_another_seed_or_env_is_refused(tmp_path, capsys):
    assert train(tmp_path / "run", "--total-timesteps", "64") == 0
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--seed", "9"]) == 2
    assert "made with --seed 0 --n-envs 2, got --seed 9" in capsys.readouterr().err
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--env", "Acrobot-v1"]) == 2
    assert "env: the checkpoint has 'CartPole-v1', this run 'Acrobot-v1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "was", "now"),
    [("preset", "none", "Pendulum-v1"), ("hidden", "(64, 64)", "8"),
     ("activation", "tanh", "relu"), ("normalize-obs", "False", ""),
     ("normalize-reward", "False", ""), ("recurrent", "none", "gru"), ("log-std-init", "0.0", "1.0")],
)  # fmt: skip
def test_what_a_policy_is_made_of_stays_when_its_run_goes_on(tmp_path, capsys, flag, was, now):
    assert train(tmp_path / "run", "--total-timesteps", "64") == 0
    more = ("--total-timesteps", "128", *filter(None, (f"--{flag}", now)))
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), *more]) == 2
    assert f"the checkpoint was made with --{flag} {was}, got " in capsys.readouterr().err


def test_a_discount_that_is_changed_when_a_run_goes_on_is_that_of_its_statistics_too(tmp_path):
    assert train(tmp_path / "run", "--total-timesteps", "64", "--normalize-reward") == 0
    options, config = run.saved_options(str(tmp_path / "run"))
    for _ in range(2):
        options = replace(options, total_timesteps=(options.total_timesteps or 0) + 64)
        resumed = run.PPORun(options, replace(config, gamma=0.5))
        assert resumed.ppo.agent.reward_norm.gamma == 0.5
        resumed.close()


@pytest.mark.parametrize("limit", ["total_timesteps", "num_episodes"])
@pytest.mark.parametrize("own_folder", [False, True])
def test_the_command_that_a_run_prints_at_its_end_goes_on_with_it(tmp_path, capsys, limit, own_folder):
    places = ["--checkpoint-dir", str(tmp_path / "kept")] if own_folder else []
    assert train(tmp_path / "run", f"--{limit}", "64" if limit == "total_timesteps" else "4", *places) == 0
    first = read_json(tmp_path / "run" / "summary.json")["metrics"]
    kept = str(tmp_path / "kept" if own_folder else tmp_path / "run")
    capsys.readouterr()
    assert main(["train-ppo", "--resume-from", kept]) == 0  # which is at its end
    command = capsys.readouterr().out.split("go on with:")[1].split()
    assert command[:4] == ["shoal", "train-ppo", "--resume-from", kept]
    assert main(command[1:]) == 0
    more = read_json(tmp_path / "run" / "summary.json")["metrics"]
    what = "steps" if limit == "total_timesteps" else "episodes"
    assert more[what] >= 2 * first[what]


def eval_flag(likeliest: bool) -> str:
    return "--eval-deterministic" if likeliest else "--no-eval-deterministic"


def test_an_evaluation_takes_the_likeliest_actions_or_draws_them_and_a_resumed_run_does_too(tmp_path):
    options = ("--total-timesteps", "640", eval_flag(False), "--eval-episodes", "20")
    assert train(tmp_path / "run", *options) == 0

    def found(of_run: bool) -> list[float]:
        with PPO.load(tmp_path / "run") as ppo:
            return [ppo.evaluate(20, deterministic=way).mean for way in (of_run, not of_run)]

    said = read_json(tmp_path / "run" / "summary.json")["metrics"]["eval_return_mean"]
    own, other = found(False)
    assert said == own != other
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--total-timesteps", "1280"]) == 0
    said = read_json(tmp_path / "run" / "summary.json")["metrics"]["eval_return_mean"]
    own, other = found(False)
    assert said == own != other
    again = ("--resume-from", str(tmp_path / "run"), eval_flag(True))
    assert main(["train-ppo", *again]) == 0  # nothing is left to train, and yet it is asked for something new
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["eval_return_mean"] == other


def test_a_video_shows_an_episode_of_the_actions_that_evaluations_take(tmp_path, monkeypatch):
    pytest.importorskip("pygame")
    shown = []
    monkeypatch.setattr(run, "write_video", lambda path, frames: shown.append(len(frames)))
    options = ("--total-timesteps", "640", eval_flag(False), "--record-video")
    assert train(tmp_path / "run", *options) == 0
    with PPO.load(tmp_path / "run") as ppo:
        lengths = []
        for way in (False, True):
            ppo.evaluate(1, deterministic=way, frames=(frames := []))
            lengths.append(len(frames))
    own, other = lengths
    assert shown == [own] != [other]


def test_presets_of_minigrid_and_atari_are_evaluated_with_drawn_actions_as_published(capsys):
    for env, likeliest in (("minigrid:MiniGrid-DoorKey-5x5-v0", False), ("CartPole-v1", True)):
        assert main(["train-ppo", "--env", env, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        about = said.partition("--eval-deterministic ")[2].partition("--tensorboard")[0]
        assert "takes the likeliest actions" in about
        assert ("[default: True]" in about) == likeliest  # False is said of no option


def test_help_shows_the_presets_values_as_defaults(capsys):
    assert main(["train-ppo", "--env", "Pendulum-v1", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--gamma FLOAT Discount of a reward per step. [default: 0.9]" in text
    assert "--n-envs INT Environments stepped in parallel. [default: 4]" in text
    for flag in ("--parallel-start-method", "--num-episodes", "--device", "--learning-rate", "--checkpoint-dir",
                 "--seed", "--resume-from", "--record-video", "--target-kl"):  # fmt: skip
        assert flag in text


def test_every_preset_is_a_valid_config():
    from shoal.train.ppo.config import PPOConfig

    for preset in PRESETS.values():
        PPOConfig(**preset.settings)
        assert preset.source in ("zoo", "cleanrl", "own")
