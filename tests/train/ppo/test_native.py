"""PPO on native batches: what is learned from, what is refused, and what a run that goes on does."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.train.ppo.ppo_envs import assert_equal, weights
from tests.vector import jax_of_numpy

from shoal.cli.main import main
from shoal.core.errors import ConfigError, UnknownNameError
from shoal.core.files import read_json
from shoal.train.ppo import ppo as ppo_module
from shoal.train.ppo.checkpoint import load_checkpoint
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.presets import PRESETS, preset_for
from shoal.vector import make_vec

SMALL = [
    "--preset", "none", "--n-envs", "4", "--n-steps", "32", "--batch-size", "32", "--no-tensorboard",
    "--eval-episodes", "1", "--total-timesteps", "256",
]  # fmt: skip
CARTPOLE: dict[str, Any] = {
    "n_envs": 4,
    "backend": "native",
    "preset": "none",
    "n_steps": 16,
    "batch_size": 32,
}


class Ramp(gymnasium.Env[Any, Any]):
    """Shows the step and pays for it; an episode has four steps, whatever the seed."""

    observation_space = gymnasium.spaces.Box(-1, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), float(self.t + action), False, self.t >= 4, {}


class Paying(SyncVectorEnv):
    """Pays for the steps in which it only resets, too."""

    pay = 0.0

    def step(self, actions: Any) -> Any:
        resets = self._autoreset_envs.copy()
        obs, rewards, *rest = super().step(actions)
        return obs, np.where(resets, self.pay, rewards), *rest


def same_step_batch(num_envs: int) -> Any:
    return SyncVectorEnv([Ramp] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def next_step_batch(num_envs: int, pay: float = 0.0) -> Any:
    batch = Paying([Ramp] * num_envs)
    batch.pay = pay
    return batch


def ramp(source: Any, **more: Any) -> PPO:
    return PPO(source, n_envs=3, n_steps=10, batch_size=24, n_epochs=2, seed=5, **more)


# ------------------------------------------------------------------ what is learned from


def test_a_batch_that_restarts_in_the_same_step_teaches_what_single_envs_teach():
    with ramp(same_step_batch, backend="native") as batch, ramp(Ramp, backend="serial") as alone:
        rows = [list(ppo.updates(90)) for ppo in (batch, alone)]
        assert_equal(weights(batch), weights(alone))
    assert rows[0][-1]["episodes"] == rows[1][-1]["episodes"] == 3 * (30 // 4)


def test_the_step_that_only_resets_is_not_learned_from():
    after, rows = [], []
    for pay in (0.0, 1e6):
        with ramp(next_step_batch, backend="native", env_kwargs={"pay": pay}) as ppo:
            rows += list(ppo.updates(48))
            after.append(weights(ppo))
    assert_equal(*after)
    # Of ten steps two are resets: 4 + 1 + 4 + 1, so an update has 3 * 8 samples, which is one minibatch an epoch.
    assert [row["steps"] for row in rows] == [24, 48] * 2
    assert [row["n_minibatches"] for row in rows] == [2] * 4
    assert [row["length"] for row in rows] == [4.0] * 4
    assert all(1 + 2 + 3 + 4 <= row["reward"] <= 2 + 3 + 4 + 5 for row in rows)


# ------------------------------------------------------------------ runs: the same twice, resumed, evaluated


def test_a_run_on_gymnasiums_own_batch_is_repeatable_and_goes_on_with_new_episodes(tmp_path, capsys):
    command = ["train-ppo", "--backend", "native", *SMALL, "--run-dir"]
    for name in ("one", "two"):
        assert main([*command, str(tmp_path / name)]) == 0
    assert "the environment's own batch" in capsys.readouterr().out
    one, two = (load_checkpoint(tmp_path / name) for name in ("one", "two"))
    for part in ("weights", "optimizer", "statistics", "episodes"):
        assert_equal(getattr(one, part), getattr(two, part))
    assert one.policy["native"] is True
    assert not any(key.startswith("actions") for key in one.episodes)  # nothing is played again
    begun = one.episodes["started"].copy()
    assert main(["train-ppo", "--resume-from", str(tmp_path / "one"), "--total-timesteps", "512"]) == 0
    assert "new episodes begin in all 4 environments" in (tmp_path / "one" / "log.txt").read_text()
    assert read_json(tmp_path / "one" / "summary.json")["metrics"]["steps"] >= 512
    later = load_checkpoint(tmp_path / "one")
    assert (later.episodes["started"] > begun).all()
    assert main(["eval", str(tmp_path / "one"), "--episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


def test_a_run_that_goes_on_does_not_see_its_first_episodes_again(tmp_path):
    with PPO("CartPole-v1", seed=3, **CARTPOLE) as ppo:
        ppo.learn(64)
        folder = ppo.save(tmp_path)
    seen = []
    for source in ("first", "resumed", "resumed"):
        again = PPO("CartPole-v1", seed=3, **CARTPOLE) if source == "first" else PPO.load(folder)
        with again as ppo:
            seen.append(ppo._experience.collect(None).obs[0])
    assert not np.isclose(seen[0], seen[1]).any()
    assert np.array_equal(seen[1], seen[2])


def test_a_checkpoint_breaks_off_no_episode_of_a_batch_and_what_goes_on_from_it_begins_new_ones(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ppo_module, "REPLAY_LIMIT", 1)
    with ramp(same_step_batch, backend="native") as ppo:
        ppo.learn(30)
        lengths = ppo.log.lengths.copy()
        assert lengths.tolist() == [2, 2, 2]
        folder = ppo.save(tmp_path)
        assert np.array_equal(ppo.log.lengths, lengths)
        assert next(ppo.updates(30))["length"] == 4.0  # all that ended, 2 of whose steps were before
    with PPO.load(folder, same_step_batch) as ppo:
        row = next(ppo.updates(30))
        assert row["length"] == 4.0  # and none that began before
        assert row["reward"] <= 2 + 3 + 4 + 5


def test_a_checkpoint_of_a_batch_goes_on_with_the_batch_alone(tmp_path):
    with PPO("CartPole-v1", **CARTPOLE) as ppo:
        folder = ppo.learn(64).save(tmp_path / "batch")
    with PPO.load(folder) as ppo:
        assert ppo.factory.native
    with pytest.raises(ConfigError, match="native: the checkpoint has True, this run None"):
        PPO.load(folder, backend="serial")
    with PPO("CartPole-v1", **{**CARTPOLE, "backend": "serial"}) as ppo:
        folder = ppo.learn(64).save(tmp_path / "alone")
    with pytest.raises(ConfigError, match="native: the checkpoint has None, this run True"):
        PPO.load(folder, backend="native")


def test_a_film_of_the_policy_is_one_of_its_batch(tmp_path):
    pytest.importorskip("pygame")
    frames: list[Any] = []
    with PPO("CartPole-v1", **CARTPOLE) as ppo:
        length = ppo.evaluate(1, frames=frames).lengths[0]
    assert len(frames) == length
    assert frames[0].ndim == 3


# ------------------------------------------------------------------ batches of other packages


def test_ales_batch_trains_the_same_twice_on_its_own_screens():
    pytest.importorskip("ale_py")
    size = {"img_height": 36, "img_width": 36, "num_threads": 1}
    small = {"n_envs": 2, "n_steps": 8, "batch_size": 16, "n_epochs": 1, "seed": 4, "env_kwargs": size}
    after = []
    for _ in range(2):
        with PPO("ale:Pong-v5", **small) as ppo:
            assert ppo.preset == "ALE/Pong-v5"
            assert (ppo.factory.atari, ppo.factory.frame_stack) == (False, 0)
            assert ppo.facts.observation_space.shape == (4, 36, 36)
            ppo.learn(32)
            after.append(weights(ppo))
    assert_equal(*after)


def test_ales_batch_clips_rewards_in_training_and_not_in_an_evaluation():
    pytest.importorskip("ale_py")
    short = {"max_num_frames_per_episode": 400, "img_height": 16, "img_width": 16, "num_threads": 1}
    with PPO(
        "ale_py:ALE/MsPacman-v5", backend="native", n_envs=2, n_steps=128, batch_size=256, n_epochs=1, env_kwargs=short,
    ) as ppo:  # fmt: skip
        row = next(ppo.updates(256))
        # A dot is worth 10 points, 1 when clipped; 400 frames are at most 100 steps.
        assert 0 < row["reward"] < 100
        assert row["n_completed_episodes"] == 2
        assert row["steps"] == 256  # no step is spent on a reset
        played = ppo.evaluate(1, deterministic=False)
        assert played.mean > 0
        assert played.mean % 10 == 0
        assert played.lengths[0] <= 100


@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_envpools_batch_trains_the_same_twice():
    pytest.importorskip("envpool")
    after = []
    for _ in range(2):
        with PPO(
            "envpool:CartPole-v1", n_envs=4, n_steps=32, batch_size=64, env_kwargs={"num_threads": 1}
        ) as ppo:
            ppo.learn(256)
            assert ppo.evaluate(2).mean > 5
            after.append(weights(ppo))
    assert_equal(*after)


def test_gymnaxs_batch_trains_and_plays():
    pytest.importorskip("gymnax")
    with PPO("jax:CartPole-v1", n_envs=4, n_steps=32, batch_size=64) as ppo:
        assert ppo.preset == "CartPole-v1"
        ppo.learn(128)
        assert ppo.evaluate(1).mean > 5


def test_a_jax_environment_is_named_by_its_class(monkeypatch):
    if importlib.util.find_spec("jax") is None:
        monkeypatch.setitem(sys.modules, "jax", jax_of_numpy)
    with PPO("jax:tests.vector.test_jax:Walk", n_envs=3, n_steps=8, batch_size=24) as ppo:
        ppo.learn(48)
        assert ppo.log.n_episodes == 3 * (16 // 4)  # a walk has four steps
        assert ppo.evaluate(2).lengths == [4, 4]
    with pytest.raises(
        ConfigError, match="the JAX environment 'tests.vector.test_jax:Wall'.*nothing of that name"
    ):
        PPO("jax:tests.vector.test_jax:Wall")


# ------------------------------------------------------------------ names, presets, refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_workers": 2}, "num_workers=2"),
        ({"start_method": "spawn"}, "start_method=spawn"),
        ({"wrappers": ["gymnasium.wrappers:TimeAwareObservation"]}, "wrappers=.*TimeAware"),
        ({"atari": True}, "atari=True"),
        ({"frame_stack": 4}, "frame_stack=4"),
        ({"squash": True}, "squash=True"),
    ],
)
def test_what_a_batch_has_no_use_for_is_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=f"{said}.*leave"):
        PPO("CartPole-v1", **{**CARTPOLE, **given})


def test_an_env_without_a_batch_is_refused():
    with pytest.raises(ConfigError, match="vector_entry_point, got 'Acrobot-v1', which has none"):
        PPO("Acrobot-v1", backend="native")


def test_the_command_takes_the_preset_without_what_the_batch_does_itself(tmp_path):
    pytest.importorskip("ale_py")
    run = tmp_path / "run"
    size = ["--env-kwargs", "img_height=36", "img_width=36", "num_threads=1", "max_num_frames_per_episode=40"]
    short = ["--total-timesteps", "16", "--n-steps", "8", "--n-envs", "2", "--eval-episodes", "1"]
    game = ["--env", "ale_py:ALE/Pong-v5", "--backend", "native", "--no-tensorboard", "--run-dir", str(run)]
    assert main(["train-ppo", *game, *short, *size]) == 0
    saved = load_checkpoint(run)
    assert saved.training["config"]["ent_coef"] == PRESETS["ALE/Pong-v5"].settings["ent_coef"]
    assert saved.training["options"]["frame_stack"] == 0


def test_the_name_of_a_batch_needs_its_backend():
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match="'ale:Pong-v5' is a native batch.*alone is 'ale_py:ALE/Pong-v5'"):
        make_vec("ale:Pong-v5", 2)
    with pytest.raises(ConfigError, match="'ale:Pong-v5' is a native batch.*backend='native'"):
        PPO("ale:Pong-v5", backend="serial")
    with pytest.raises(UnknownNameError, match="Did you mean .*ALE/Pong-v5"):
        make_vec("ale:Pnog-v5", 2, backend="native")
    with make_vec("ale:Pong-v5", 2, backend="native", env_kwargs={"num_threads": 1}) as envs:
        assert envs.reset(seed=0)[0].shape == (2, 4, 84, 84)


def test_the_preset_of_a_batch_puts_nothing_around_it():
    tuned = preset_for("ale:Pong-v5")
    assert tuned == dataclasses.replace(
        PRESETS["ALE/Pong-v5"], atari=False, frame_stack=0, name="ALE/Pong-v5"
    )
    assert preset_for("ale_py:ALE/Pong-v5", native=True) == tuned
    assert preset_for("ale_py:ALE/Pong-v5").atari
    assert preset_for("ale:Pong-v5", "none") is None
    assert preset_for("envpool:CartPole-v1").settings == PRESETS["CartPole-v1"].settings
