"""Checkpoints: a run goes on exactly, and one that does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.train.ppo.ppo_envs import (
    FAST,
    CountingEnv,
    IdentityEnv,
    TargetEnv,
    assert_equal,
    weights,
)
from torch import nn

from shoal.core.errors import ConfigError, DataError, EnvError
from shoal.train.ppo import ppo as ppo_module
from shoal.train.ppo.checkpoint import list_checkpoints
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_train_2n_is_train_n_saved_and_resumed_n(tmp_path, path, env):
    settings = {
        **FAST, "normalize_obs": True, "normalize_reward": True, "lr_schedule": "linear", "ent_schedule":
        "linear", "ent_coef": 0.01,
    }  # fmt: skip
    total = 3 * 32 * 14
    whole = PPO(env, n_envs=3, seed=5, path=path, backend="serial", **settings)
    seen = list(whole.updates(total))
    part = PPO(env, n_envs=3, seed=5, path=path, backend="serial", **settings)
    for metrics in part.updates(total):
        if metrics["steps"] >= total // 2:
            break
    folder = part.save(tmp_path)
    places = {"backend": "process", "num_workers": 2} if env == "CartPole-v1" else {"backend": "serial"}
    resumed = PPO.load(tmp_path, path=path, **places)
    rows = list(resumed.updates(total // 2))
    assert len(rows) == len(seen) // 2
    timeless = [key for key in seen[-1] if "second" not in key]
    assert [rows[-1][k] for k in timeless] == pytest.approx(
        [seen[-1][k] for k in timeless], nan_ok=True, rel=0, abs=0
    )
    assert_equal(weights(resumed), weights(whole))
    assert list(resumed.log.recent) == list(whole.log.recent)
    for ppo in (whole, part, resumed):
        ppo.close()
    assert folder.name == f"step_{total // 2:012d}"


def test_saving_does_not_change_the_run(tmp_path):
    with PPO(TargetEnv, n_envs=2, backend="serial", **FAST) as plain:
        expected = weights(plain.learn(64 * 6))
    with PPO(TargetEnv, n_envs=2, backend="serial", **FAST) as saving:
        for _ in saving.updates(64 * 6):
            saving.save(tmp_path)
        assert_equal(weights(saving), expected)


def test_very_long_episodes_are_broken_off_at_checkpoints_in_both_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_module, "REPLAY_LIMIT", 40)

    def start() -> PPO:
        return PPO(CountingEnv, n_envs=2, env_kwargs={"length": 100_000}, backend="serial", **FAST)

    whole, part = start(), start()
    for i, _ in enumerate(whole.updates(64 * 6)):
        if i == 2:
            whole.save(tmp_path / "whole")
    for i, _ in enumerate(part.updates(64 * 6)):
        if i == 2:
            break
    part.save(tmp_path / "part")
    resumed = PPO.load(tmp_path / "part", CountingEnv, env_kwargs={"length": 100_000}, backend="serial")
    resumed.learn(64 * 3)
    assert_equal(weights(resumed), weights(whole))
    assert whole.log.lengths.tolist() == [96, 96]  # 3 rollouts of 32 since the checkpoint


def test_an_env_that_cannot_be_played_again_begins_a_new_episode_loudly(tmp_path, caplog):
    calls = iter(range(10**6))

    class Drifting(CountingEnv):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed, options=options)
            self.offset = next(calls)
            return observation, info

        def step(self, action):
            observation, *rest = super().step(action)
            return observation + self.offset, *rest

    with PPO(lambda: Drifting(1000), n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64)
        ppo.save(tmp_path)
    resumed = PPO.load(tmp_path, lambda: Drifting(1000), backend="serial")
    resumed.factory = dataclasses.replace(resumed.factory)
    resumed.learn(64)
    assert "did not come back to its state" in caplog.text
    assert resumed.log.lengths.tolist() == [32, 32]


def test_an_env_that_fails_as_its_episode_is_played_again_is_named(tmp_path):
    class Tired(CountingEnv):
        fails = False

        def step(self, action):
            if Tired.fails and self.t == 4:
                raise ValueError("the simulator is gone")
            return super().step(action)

    with PPO(lambda: Tired(1000), n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64).save(tmp_path)
    resumed = PPO.load(tmp_path, lambda: Tired(1000), backend="serial")
    Tired.fails = True
    with pytest.raises(
        EnvError, match=r"env 0 \(Tired\) failed at step 4 of episode 0, .*the simulator is gone"
    ):
        resumed.learn(128)


def test_a_checkpoint_of_one_path_is_a_checkpoint_of_the_other(tmp_path):
    with PPO("CartPole-v1", n_envs=2, path="compiled", backend="serial", **FAST) as ppo:
        ppo.learn(256)
        ppo.save(tmp_path)
    with PPO.load(tmp_path, path="torch", backend="serial") as other:
        assert_equal(weights(other), weights(ppo))
        other.learn(320)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with PPO("CartPole-v1", n_envs=2, backend="serial", **FAST) as ppo:
        for _ in ppo.updates(192):
            ppo.save(tmp_path)
    return tmp_path


def test_a_checkpoint_of_another_env_or_network_is_refused(saved):
    with pytest.raises(ConfigError, match="env: the checkpoint has 'CartPole-v1', this run 'Acrobot-v1'"):
        PPO.load(saved, "Acrobot-v1")

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)[:, :2], self.layer(x)[:, 2]

    with pytest.raises(ConfigError, match="network: the checkpoint has 'MLPActorCritic', this run 'Other'"):
        PPO.load(saved, network=Other())


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_broken_checkpoint_is_named_and_the_intact_one_before_offered(saved, damage):
    newest, before = list_checkpoints(saved)[-1], list_checkpoints(saved)[-2]
    victim = newest / "weights.safetensors"
    data = victim.read_bytes()
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data[:100] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataError, match=rf"weights.safetensors.* an intact one is {before}"):
        PPO.load(saved)
    assert PPO.load(before).log.n_steps == 128


def test_a_folder_without_checkpoints_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "summary.json").write_text('{"command": "train", "metrics": {}}')
    for name, got in (
        ("nowhere", "nothing: there is no such folder"),
        ("file", "a file"),
        ("empty", "an empty folder"),
        ("agent", "a run of shoal train"),
        ("", "a folder with agent, empty, file"),
    ):
        for load in (PPO.load, load_policy):
            with pytest.raises(DataError, match=rf"expected a run folder of shoal train-ppo, .*; got {got};"):
                load(tmp_path / name)


class SizedEnv(IdentityEnv):
    """Takes arguments of any kind, and keeps them."""

    def __init__(self, size=(1, 2), pays=float):
        super().__init__()
        self.given = (tuple(size), pays)


def test_arguments_of_an_env_come_back_as_they_were_or_are_asked_for(tmp_path):
    for name, kwargs in (("plain", {"size": (5, 5)}), ("more", {"size": (5, 5), "pays": int})):
        with PPO(SizedEnv, n_envs=2, backend="serial", env_kwargs=kwargs, **FAST) as ppo:
            ppo.learn(64)
            ppo.save(tmp_path / name)
    with PPO.load(tmp_path / "plain", SizedEnv) as again:
        assert again.factory(0).unwrapped.given == ((5, 5), float)
    with pytest.raises(ConfigError, match="this run's pays had others; give them again: env_kwargs"):
        PPO.load(tmp_path / "more", SizedEnv)
    with PPO.load(tmp_path / "more", SizedEnv, env_kwargs=kwargs) as again:
        assert again.factory(0).unwrapped.given == ((5, 5), int)


def test_numbers_of_numpy_are_saved_as_others_are(tmp_path):
    settings = {**FAST, "learning_rate": np.float32(0.25), "n_steps": np.int64(8), "normalize_obs": np.True_,
                "hidden": np.array([8, 4])}  # fmt: skip
    with PPO(IdentityEnv, n_envs=np.int64(2), seed=np.int64(3), backend="serial", **settings) as ppo:
        ppo.learn(16)
        ppo.save(tmp_path)
    with PPO.load(tmp_path, IdentityEnv) as again:
        assert again.config == ppo.config
        assert (again.seed, again.n_envs, again.config.learning_rate) == (3, 2, 0.25)
        assert again.config.hidden == (8, 4)
