"""What must not go wrong with a PPO run: calls that are repeated, cancelled, or made by two at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from tests.train.ppo.ppo_envs import SMALL_RUN, CountingEnv, bytes_of, state

from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json
from shoal.core.run_folder import RunFolder
from shoal.train.ppo.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.ppo import PPO, Evaluation
from shoal.train.ppo.run import PPORun, RunOptions
from shoal.train.ppo.trainer import PPOTrainer

REPO = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO / "src")}
SMALL = [*SMALL_RUN, "--eval-episodes", "1", "--eval-every", "0", "--log-every", "1"]
SETTINGS = {
    "preset": "none",
    "n_envs": 2,
    "n_steps": 32,
    "batch_size": 32,
    "backend": "serial",
    "hidden": (8,),
}


def train(run: Path, *more: str) -> int:
    return main(["train-ppo", *SMALL, "--run-dir", str(run), *more])


def last(root: Path) -> dict[str, bytes]:
    return bytes_of(load_checkpoint(root))


def everything(run: Path) -> dict[str, bytes]:
    kept = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in kept}


# --- a run that is at its end
def test_resuming_with_fewer_steps_than_there_are_says_so_and_rewrites_nothing(tmp_path, capsys):
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    before = everything(tmp_path / "run")
    capsys.readouterr()
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--total-timesteps", "320"]) == 0
    assert "640 steps are done already, 320 were asked for" in capsys.readouterr().out
    assert everything(tmp_path / "run") == before


def test_a_finished_run_is_evaluated_longer_when_asked_to(tmp_path):
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    before = everything(tmp_path / "run")
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run"), "--eval-episodes", "3"]) == 0
    after = everything(tmp_path / "run")
    changed = {name for name in after if after[name] != before.get(name)}
    assert "summary.json" in changed
    assert changed <= {"log.txt", "summary.json", "config.yaml", "curves.png"} | {
        n for n in changed if n.startswith("best/")
    }


def test_a_run_killed_before_its_summary_gets_one_from_a_resume_at_the_end(tmp_path):
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run")]) == 0
    again = read_json(tmp_path / "run" / "summary.json")
    timeless = ("steps", "episodes", "iteration", "eval_return_mean", "reward_mean", "length_mean")
    assert {k: again["metrics"][k] for k in timeless} == {k: summary["metrics"][k] for k in timeless}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 11))


def test_a_loaded_run_that_is_saved_untouched_still_goes_on_exactly(tmp_path):
    with PPO("CartPole-v1", **SETTINGS) as ppo:
        ppo.learn(640).save(tmp_path / "one")
        whole = state(ppo.learn(1280))
    with PPO.load(tmp_path / "one", backend="serial") as ppo:
        ppo.save(tmp_path / "two")
    with PPO.load(tmp_path / "two", backend="serial") as ppo:
        assert state(ppo.learn(1280)) == whole


def test_a_checkpoint_of_another_program_or_version_is_named_though_its_files_are_whole(tmp_path):
    with PPO("CartPole-v1", **SETTINGS) as ppo:
        ppo.learn(64)
        ppo.save(tmp_path)
        known = ppo.checkpoint()
        for part, name, value in (
            ("policy", "env_kwargs", None), ("training", "seed", None), ("training", "recent", [[1]]),
            ("training", "n_envs", "2"), ("optimizer", "step", None), ("statistics", "iteration", None),
            ("episodes", "started", None),
        ):  # fmt: skip
            told = {key: kept for key, kept in getattr(known, part).items() if key != name}
            other = dataclasses.replace(known, **{part: told if value is None else told | {name: value}})
            folder = save_checkpoint(tmp_path / "other", other)
            said = f"{folder} is no checkpoint that this version of shoal can go on from \\("
            with pytest.raises(DataError, match=said):
                PPO.load(folder, backend="serial").close()


# --- interrupted
class ShortEnv(CountingEnv):
    """Shows the step of the episode alone, so that it is a function of seed and actions."""

    def reset(self, *, seed=None, options=None):
        self.episode = -1
        return super().reset(seed=seed, options=options)


class CtrlCAtStep(ShortEnv):
    """Ctrl-C comes `times` in the 150th step of its life; the ends of episodes depend on the actions."""

    life, times = 0, 0

    def step(self, action):
        type(self).life += 1
        if type(self).life == 150:
            for _ in range(type(self).times):
                ctrl_c()
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + action, terminated or bool(action and self.t == 3), truncated, info


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def after_ctrl_c(call, times=1):
    """The same function, at whose first call Ctrl-C comes."""
    left = [ctrl_c] * times

    def interrupted(*args, **more):
        while left:
            left.pop()()
        return call(*args, **more)

    return interrupted


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_ctrl_c_waits_for_the_update_a_second_one_does_not_and_learning_goes_on_exactly(recurrent):
    ends, seen = [], []
    for times in (0, 1, 2):
        CtrlCAtStep.life, CtrlCAtStep.times = 0, times
        with PPO(CtrlCAtStep, **SETTINGS, recurrent=recurrent) as ppo:
            if times:
                with pytest.raises(KeyboardInterrupt):
                    ppo.learn(640)
                seen.append(ppo.log.n_steps)
            ends.append(state(ppo.learn(640 - ppo.log.n_steps)))
    assert seen == [128, 64]  # the second rollout has steps 65 to 128; 64 steps were taken to try the env
    assert ends[0] == ends[1] == ends[2]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_an_update_that_a_second_ctrl_c_ends_halfway_is_not_saved(monkeypatch, tmp_path, path):
    with PPO("CartPole-v1", **SETTINGS, path=path) as ppo:
        saved, before = ppo.learn(64).save(tmp_path), state(ppo)
        monkeypatch.setattr(ppo.agent.learner, "update", after_ctrl_c(ppo.agent.learner.update, 2))
        with pytest.raises(KeyboardInterrupt):
            ppo.learn(128)
        for go_on in (lambda: ppo.save(tmp_path), lambda: ppo.learn(128)):
            with pytest.raises(ConfigError, match="load the last checkpoint to go on"):
                go_on()
    with PPO.load(saved, backend="serial", path=path) as ppo:
        assert state(ppo) == before


def test_ctrl_c_in_the_update_of_a_trainer_waits_for_it_and_a_second_one_leaves_the_checkpoint(
    monkeypatch, tmp_path
):
    def now():
        return [{name: array.tobytes() for name, array in part.items()} for part in trainer.agent.state()]

    settings, env = {"n_steps": 32, "batch_size": 32, "hidden": (8,)}, gym.make("CartPole-v1")
    trainer = PPOTrainer(**settings)
    for _ in range(2):
        trainer.train_episode(env)
    whole = now()
    trainer, env = PPOTrainer(**settings), gym.make("CartPole-v1")
    trainer.train_episode(env)
    update = trainer.agent.learner.update
    monkeypatch.setattr(trainer.agent.learner, "update", after_ctrl_c(update))
    with pytest.raises(KeyboardInterrupt):
        trainer.train_episode(env)
    assert (now(), trainer.num_episodes) == (whole, 2)
    saved = trainer.save(tmp_path)
    monkeypatch.setattr(trainer.agent.learner, "update", after_ctrl_c(update, 2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train_episode(env)
    seen = env.observation_space.sample()
    for refused in (
        lambda: trainer.save(tmp_path),
        lambda: trainer.train_episode(env),
        lambda: trainer.select_action(seen),
    ):
        with pytest.raises(ConfigError, match="load the last checkpoint to go on"):
            refused()
    trainer.load(saved)
    assert now() == whole
    assert trainer.train_episode(env)["episodes"] == 3


def rows_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.mark.parametrize("moment", ["rollout", "evaluation", "saving"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_ctrl_c_ends_is_saved_after_its_update_and_goes_on_exactly(
    monkeypatch, tmp_path, moment, times
):
    """A second Ctrl-C leaves the checkpoint before."""
    options = RunOptions(total_timesteps=640, n_envs=2, backend="serial", tensorboard=False, eval_every=320,
                         eval_episodes=2, log_every=2, checkpoint_every=64)  # fmt: skip
    config = PPOConfig(n_steps=32, batch_size=32)
    with contextlib.closing(PPORun(replace(options, run_dir=str(tmp_path / "whole")), config)) as run:
        list(run.rows())
    with contextlib.closing(PPORun(replace(options, run_dir=str(tmp_path / "run")), config)) as run:
        place, name = {
            "rollout": (run.ppo.agent, "noise"),
            "evaluation": (run.ppo, "evaluate"),
            "saving": (run.ppo, "save"),
        }[moment]
        rows = run.rows()
        while next(rows)["steps"] < 256:
            pass
        monkeypatch.setattr(place, name, after_ctrl_c(getattr(place, name), times))
        with pytest.raises(KeyboardInterrupt):
            list(rows)
        monkeypatch.undo()
    kept = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name
    assert kept == f"step_{320 if times == 1 else 256:012d}"
    summary = tmp_path / "run" / "summary.json"
    assert times == 2 or read_json(summary)["status"] == "interrupted"
    assert main(["train-ppo", "--resume-from", str(tmp_path / "run")]) == 0
    assert read_json(summary)["status"] == "completed"
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    for part in ("checkpoints", "best"):
        assert last(tmp_path / "run" / part) == last(tmp_path / "whole" / part)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_says_how_to_go_on_after_ctrl_c(tmp_path, number, code):
    command = [sys.executable, "-m", "shoal", "train-ppo", *SMALL, "--total-timesteps", "100000000", "--run-dir",
               str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while said[-1] and "Episode" not in said[-1]:
        said.append(process.stdout.readline())
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    assert f"shoal train-ppo --resume-from {tmp_path / 'run'}" in out
    assert "press Ctrl-C again to end at once" in error
    steps = read_json(tmp_path / "run" / "summary.json")["metrics"]["steps"]
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step_{steps:012d}"


def test_the_best_checkpoint_is_of_the_run_that_went_on_not_of_one_that_was_lost(monkeypatch, tmp_path):
    """The run is killed after its best evaluation, and goes on from before with another learning rate."""
    options = RunOptions(run_dir=str(tmp_path / "run"), total_timesteps=256, n_envs=2, backend="serial",
                         tensorboard=False, eval_every=64, checkpoint_every=64)  # fmt: skip
    scores = {64: 1.0, 128: 5.0, 192: 7.0}
    monkeypatch.setattr(PPO, "evaluate", lambda ppo, *_, **__: Evaluation([scores[ppo.log.n_steps]], [1]))
    first = PPORun(options, PPOConfig(n_steps=32, batch_size=32))
    with contextlib.closing(first), contextlib.closing(first.rows()) as rows:
        while next(rows)["steps"] < 192:
            pass
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    for folder in list_checkpoints(tmp_path / "killed" / "checkpoints")[1:]:
        shutil.rmtree(folder)
    scores |= {128: 3.0, 192: 2.0, 256: 2.5}
    killed = str(tmp_path / "killed")
    options = dataclasses.replace(options, run_dir=killed, resume_from=killed)
    with contextlib.closing(PPORun(options, PPOConfig(n_steps=32, batch_size=32, learning_rate=1e-2))) as run:
        list(run.rows())
    assert load_checkpoint(tmp_path / "killed" / "best").training["eval_return_mean"] == 3.0


class FailsOnce(ShortEnv):
    """Its worker dies while the episode under way is played again."""

    def step(self, action):
        here = os.environ["SHOAL_TEST_PID"] == str(os.getpid())
        if self.t == 1 and not here:
            with contextlib.suppress(FileNotFoundError):
                Path(os.environ["SHOAL_TEST_DIE"]).unlink()  # one of the workers does
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
def test_a_worker_that_dies_while_episodes_are_played_again_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_TEST_DIE", str(tmp_path / "die"))
    monkeypatch.setenv("SHOAL_TEST_PID", str(os.getpid()))
    settings = {**SETTINGS, "backend": "process", "num_workers": 2, "n_steps": 32}
    with PPO(FailsOnce, **settings) as ppo:
        ppo.learn(64).save(tmp_path / "saved")
        whole = state(ppo.learn(128))
    (tmp_path / "die").touch()
    with PPO.load(tmp_path / "saved", FailsOnce, backend="process", num_workers=2) as ppo:
        with pytest.warns(RuntimeWarning, match="a worker failed"):
            ppo.learn(128)
        assert not (tmp_path / "die").exists()
        assert state(ppo) == whole


# --- two at a time, and what others left
def test_a_second_run_in_the_same_folder_is_refused_before_it_reads_or_writes(tmp_path, capsys):
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    before = everything(tmp_path / "run")
    with RunFolder(tmp_path / "run", "train-ppo", 0):
        for more in (["--resume-from", str(tmp_path / "run"), "--total-timesteps", "1280"],
                     [*SMALL, "--run-dir", str(tmp_path / "run"), "--total-timesteps", "640"]):  # fmt: skip
            assert main(["train-ppo", *more]) == 1
            assert "is running on" in capsys.readouterr().err
    assert everything(tmp_path / "run") == before


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path, capsys):
    kept = ["--checkpoint-dir", str(tmp_path / "kept")]
    with RunFolder(tmp_path / "kept", "train-ppo", 0):
        assert train(tmp_path / "run", "--total-timesteps", "64", *kept) == 1
    assert "is running on" in capsys.readouterr().err
    assert train(tmp_path / "run", "--total-timesteps", "64", *kept) == 0


@pytest.mark.parametrize("where", ["", "checkpoints", "best", "emergency", "outside"])
def test_what_killed_writers_left_is_swept_by_the_next_run(tmp_path, where):
    run, outside = tmp_path / "run", tmp_path / "kept"
    folder = outside if where == "outside" else run / where
    places = ["--checkpoint-dir", str(outside)] if where == "outside" else []
    assert train(run, "--total-timesteps", "64", *places) == 0
    folder.mkdir(exist_ok=True)
    left = folder / ".step_000000000064.abcdefgh.tmp"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    assert (
        main(["train-ppo", "--resume-from", str(outside if places else run), "--total-timesteps", "128"]) == 0
    )
    assert not left.exists()


def test_a_new_run_in_the_folder_of_another_is_refused(tmp_path, capsys):
    """Its checkpoints would stand beside later ones of the other, and be taken for old."""
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    before = everything(tmp_path / "run")
    assert train(tmp_path / "run", "--total-timesteps", "640", "--seed", "1") == 2
    assert "holds a run of 640 steps: go on with it by --resume-from" in capsys.readouterr().err
    assert everything(tmp_path / "run") == before


def test_going_on_from_an_earlier_checkpoint_needs_a_folder_of_its_own_unless_the_later_ones_are_broken(
    tmp_path, capsys
):
    assert train(tmp_path / "run", "--total-timesteps", "640") == 0
    earlier, later = list_checkpoints(tmp_path / "run" / "checkpoints")[-2:]
    whole = last(later)
    assert main(["train-ppo", "--resume-from", str(earlier)]) == 2
    assert f"{later.name} is later" in capsys.readouterr().err
    assert main(["train-ppo", "--resume-from", str(earlier), "--run-dir", str(tmp_path / "branch")]) == 0
    assert last(tmp_path / "branch") == whole
    (later / "weights.safetensors").write_bytes(b"broken")
    assert main(["train-ppo", "--resume-from", str(earlier)]) == 0
    assert last(tmp_path / "run") == whole
    assert (later.parent / f"broken-{later.name}" / "weights.safetensors").read_bytes() == b"broken"


# --- a GPU
@pytest.mark.gpu
def test_a_run_on_cuda_is_saved_loaded_and_trained_on(tmp_path):
    with PPO("CartPole-v1", **SETTINGS, device="cuda") as ppo:
        ppo.learn(320).save(tmp_path)
    with PPO.load(tmp_path, backend="serial", device="cuda") as ppo:
        ppo.learn(640)
        assert all(np.isfinite(a).all() for a in ppo.checkpoint().weights.values())


# --- what is printed
def test_a_block_tells_of_all_episodes_since_the_last_one_and_of_losses_however_small():
    from shoal.cli.train_ppo import Since, _block

    run = type("Run", (), {"options": RunOptions(num_episodes=5)})()
    row = {
        "n_envs": 2, "episodes": 7, "steps": 640, "steps_per_second": 10.0, "reward_mean": 3.0, "policy_loss": 0.1,
        "value_loss": 3.2e-6, "entropy": 0.1, "approx_kl": 0.0, "clip_fraction": 0.0, "explained_variance": np.nan,
    }  # fmt: skip
    since = Since()
    for reward, length, n in ((2.0, 4.0, 1), (np.nan, np.nan, 0), (5.0, 10.0, 2), (np.nan, np.nan, 0)):
        since.add({"reward": reward, "length": length, "n_completed_episodes": n})
    text = _block(row, run, since)
    assert "Reward: 4.00  |  Length: 8" in text  # (2 + 5 + 5) / 3, (4 + 10 + 10) / 3
    assert "n_completed_episodes: 3" in text
    assert "value loss 3.2e-06" in text
    assert "Episode 7  (" in text  # not 7/5
    assert "no episode has ended" in _block(row, run, Since())


def test_a_reader_that_goes_away_ends_the_training_quietly(tmp_path):
    more = ["--out", str(tmp_path / "run"), "--checkpoint-every", "64"]
    command = [sys.executable, "-m", "shoal", "train-ppo", *SMALL, "--total-timesteps", "640", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1, said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "more", [[], ["--recurrent", "lstm", "--memory-units", "8"]], ids=["plain", "recurrent"]
)
def test_runs_killed_thirty_times_end_as_undisturbed_ones(tmp_path, more):
    """By kill -9 or Ctrl-C, at moments drawn from the time that a run takes to start and make some checkpoints."""
    steps = "96000" if more else "400000"
    common = [*SMALL, "--total-timesteps", steps, "--normalize-obs", "--normalize-reward",
              "--checkpoint-every", "640", *more]  # fmt: skip
    chance, kills, ended = np.random.default_rng(0), 0, 0
    arguments = [*common, "--run-dir", str(tmp_path / "killed")]
    while True:
        command = [sys.executable, "-m", "shoal", "train-ppo", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        if kills < 30:
            time.sleep(chance.uniform(0.0, 0.4))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if chance.random() < 0.7 else signal.SIGINT)
                kills += 1
        process.communicate(timeout=300)
        if process.returncode == 0:
            ended += 1
            if ended == 2:  # the second time there was nothing to do
                break
        if list_checkpoints(tmp_path / "killed" / "checkpoints"):
            arguments = ["--resume-from", str(tmp_path / "killed")]
    assert kills >= 15
    assert main(["train-ppo", *common, "--run-dir", str(tmp_path / "whole")]) == 0
    assert last(tmp_path / "killed") == last(tmp_path / "whole")
