"""PPO as a whole: it learns, it is deterministic, it resumes exactly, it says what is wrong."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.train.ppo.ppo_envs import BrokenEnv, CountingEnv, DictEnv, IdentityEnv, TargetEnv
from torch import nn

from shoal.core.errors import ConfigError, DataError, DivergedError, EnvError, UnknownNameError
from shoal.core.seeding import derive_seed
from shoal.train.ppo import ppo as ppo_module
from shoal.train.ppo.checkpoint import list_checkpoints, save_checkpoint
from shoal.train.ppo.collect import workers_pay
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.run import PPORun, RunOptions
from shoal.train.ppo.trainer import PPOTrainer

FAST = {"n_steps": 32, "batch_size": 64, "n_epochs": 4, "learning_rate": 3e-3, "gamma": 0.5}


def weights(ppo: PPO) -> dict[str, np.ndarray]:
    state, optimizer, statistics = ppo.agent.state()
    return {**state, **optimizer, **statistics}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


# --- it learns


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_it_learns_to_name_what_it_sees(path):
    with PPO(IdentityEnv, n_envs=4, seed=0, path=path, backend="serial", **FAST) as ppo:
        ppo.learn(6_000)
        assert ppo.log.mean_reward > 14.0  # of 16; chance is 5.3
        assert ppo.evaluate(5).mean == 16.0


@pytest.mark.parametrize("path", ["compiled", pytest.param("torch", marks=pytest.mark.slow)])
def test_it_learns_to_point_at_what_it_sees(path):
    settings = {**FAST, "log_std_init": -0.5, "n_epochs": 8}
    with PPO(TargetEnv, n_envs=4, seed=0, path=path, backend="serial", **settings) as ppo:
        before = ppo.evaluate(20).mean
        ppo.learn(12_000)
        assert ppo.evaluate(20).mean > -0.1 > before


def test_masked_actions_are_never_taken_and_learning_goes_on():
    with PPO(IdentityEnv, n_envs=4, env_kwargs={"masked": True}, backend="serial", **FAST) as ppo:
        ppo.learn(6_000)  # the env itself refuses forbidden actions
        assert ppo.facts.masked
        assert ppo.evaluate(5).mean == 16.0


@pytest.mark.parametrize("binary", [False, True])
def test_dict_observations_with_images_and_many_part_actions_train(binary):
    settings = {**FAST, "n_steps": 8, "batch_size": 16, "n_epochs": 2}
    with PPO(DictEnv, n_envs=2, env_kwargs={"binary": binary}, backend="serial", **settings) as ppo:
        before = weights(ppo)
        for metrics in ppo.updates(48):
            assert abs(metrics["first_kl"]) < 1e-6
        assert ppo.path == "torch"
        changed = [
            name for name, value in ppo.agent.state()[0].items() if not np.array_equal(value, before[name])
        ]
        assert set(changed) == set(ppo.agent.state()[0])  # every part of the network learns


def test_images_of_atari_size_use_the_nature_network():
    class Screen(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (84, 84, 1), np.uint8)
        action_space = gym.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.low, {}

        def step(self, action):
            return self.observation_space.high, 1.0, False, False, {}

    with PPO(Screen, n_envs=2, backend="serial", n_steps=4, batch_size=8, n_epochs=1) as ppo:
        assert ppo.obs_rows.dtype == np.uint8  # kept as bytes in the rollout
        metrics = list(ppo.updates(8))[-1]
        assert np.isfinite(metrics["policy_loss"])
        assert ppo.network.state_dict()["towers.0.0.weight"].shape == (32, 1, 8, 8)


def test_any_module_of_the_user_is_trained():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.GRUCell(3, 8)
            self.heads = nn.Linear(8, 4)

        def forward(self, observation):
            both = self.heads(self.body(observation))
            return both[:, :3], both[:, 3]

    module = Mine()
    before = module.body.weight_ih.detach().clone()
    with PPO(IdentityEnv, n_envs=2, network=module, backend="serial", **FAST) as ppo:
        ppo.learn(128)
        assert ppo.path == "torch"
    assert not torch.equal(before, module.body.weight_ih)


def test_a_module_of_the_wrong_shape_is_told_what_was_expected():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, observation):
            return self.layer(observation), observation[:, 0]

    ppo = PPO(IdentityEnv, n_envs=2, network=Wrong(), backend="serial", **FAST)
    with ppo, pytest.raises(ValueError, match=r"shape \[batch, 3\] for this action space, got \[2, 5\]"):
        ppo.learn(64)


# --- the details


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("env", [IdentityEnv, TargetEnv])
def test_the_first_minibatch_has_ratio_one(path, env):
    """Rollout and update agree on the policy, normaliser included: KL is 0 before the first step."""
    with PPO(env, n_envs=3, path=path, backend="serial", normalize_obs=env is TargetEnv, **FAST) as ppo:
        for metrics in ppo.updates(800):
            assert abs(metrics["first_kl"]) < 1e-7


def test_schedules_follow_progress():
    settings = {
        **FAST,
        "lr_schedule": "linear",
        "clip_schedule": "linear",
        "ent_coef": 0.1,
        "ent_schedule": "cosine",
    }
    with PPO(IdentityEnv, n_envs=2, backend="serial", **settings) as ppo:
        rows = list(ppo.updates(64 * 4))
    assert [row["learning_rate"] for row in rows] == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])
    assert [row["clip_range"] for row in rows] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert rows[2]["ent_coef"] == pytest.approx(0.05)


def test_a_truncated_world_is_worth_what_an_endless_one_is():
    """Reward 1 for ever, cut every 5 steps: the critic must reach 1 / (1 - gamma) = 2, not the cut sum."""
    settings = {**FAST, "learning_rate": 1e-2, "gae_lambda": 0.9}
    for terminates, expected in ((False, 2.0), (True, 1.0)):
        kwargs = {"length": 5, "terminates": terminates}
        with PPO(_Blind, n_envs=4, env_kwargs=kwargs, backend="serial", **settings) as ppo:
            ppo.learn(20_000)
            value = float(ppo.agent.learner.values(np.zeros((1, 2), np.float32))[0])
        if terminates:
            assert value < 1.9  # mean of 1.94, 1.875, 1.75, 1.5, 1 is 1.61
            assert value > expected
        else:
            assert value == pytest.approx(expected, abs=0.05)


class _Blind(CountingEnv):
    """Shows nothing, so that one value must serve all steps."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation * 0, info

    def step(self, action):
        observation, *rest = super().step(action)
        return observation * 0, *rest


def test_evaluation_changes_nothing_in_training():
    def run(evaluations: int) -> dict[str, np.ndarray]:
        with PPO(TargetEnv, n_envs=2, backend="serial", normalize_obs=True, **FAST) as ppo:
            for _ in ppo.updates(64 * 6):
                for _ in range(evaluations):
                    ppo.evaluate(2)
            return weights(ppo)

    assert_equal(run(0), run(2))


def test_evaluation_episodes_are_the_same_whenever_they_are_played():
    with PPO(TargetEnv, n_envs=2, backend="serial", **FAST) as ppo:
        assert ppo.evaluate(3) == ppo.evaluate(3)
        assert ppo.evaluate(3, deterministic=False) == ppo.evaluate(3, deterministic=False)


def test_episodes_are_counted_with_their_rewards_and_lengths():
    with PPO(
        CountingEnv, n_envs=3, env_kwargs={"length": 7}, backend="serial", n_steps=10, batch_size=30
    ) as ppo:
        rows = list(ppo.updates(90))
    assert [row["n_completed_episodes"] for row in rows] == [3, 3, 6]  # ends at 7, 14, 21 and 28 in each env
    assert ppo.log.n_episodes == 12
    assert {(e.reward, e.length) for e in ppo.log.recent} == {(7.0, 7)}
    assert rows[-1]["reward_mean"] == 7.0


# --- the same seed gives the same weights


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_weights_do_not_depend_on_backend_or_workers(path):
    """Bit for bit, with a number of workers that does not divide the envs, and both normalisers."""
    settings = {**FAST, "n_steps": 16, "normalize_obs": True, "normalize_reward": True}

    def run(backend: str, workers: int | None) -> dict[str, np.ndarray]:
        with PPO(
            "Pendulum-v1", n_envs=5, seed=3, path=path, backend=backend, num_workers=workers, **settings
        ) as ppo:
            ppo.learn(5 * 16 * 15)
            share = -(-5 // workers) if path == "compiled" and workers else 1  # of equal shares
            assert ppo.workers == min(workers or 0, -(-5 // share))
            return {**weights(ppo), "returns": np.array([e.reward for e in ppo.log.recent])}

    serial = run("serial", None)
    for workers in (1, 2, 4):
        assert_equal(run("process", workers), serial)


def test_another_seed_gives_other_weights():
    def run(seed: int) -> dict[str, np.ndarray]:
        with PPO(IdentityEnv, n_envs=2, seed=seed, backend="serial", **FAST) as ppo:
            return weights(ppo.learn(64))

    assert_equal(run(1), run(1))
    assert not np.array_equal(run(1)["actor.0.weight"], run(2)["actor.0.weight"])


def test_global_random_state_is_neither_used_nor_touched():
    import random

    def run() -> dict[str, np.ndarray]:
        with PPO(TargetEnv, n_envs=2, path="torch", backend="serial", **FAST) as ppo:
            return weights(ppo.learn(128))

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = run()
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    torch.manual_seed(99)
    torch.set_num_threads(2)
    assert_equal(run(), first)
    assert torch.get_num_threads() == 2


# --- exact resume


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
    resumed = PPO.load(
        tmp_path,
        path=path,
        backend="process" if env == "CartPole-v1" else "serial",
        num_workers=2 if env == "CartPole-v1" else None,
    )
    rows = list(resumed.updates(total))
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
    resumed.learn(64 * 6)
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
    resumed.learn(128)
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


# --- faults


def test_a_killed_worker_costs_time_and_nothing_else():
    settings = {**FAST, "n_steps": 16}

    def run(kill: bool) -> dict[str, np.ndarray]:
        with PPO("CartPole-v1", n_envs=4, seed=1, backend="process", num_workers=2, **settings) as ppo:
            for i, _ in enumerate(ppo.updates(64 * 8)):
                if kill and i == 3:
                    victim = ppo._experience.collector.envs.call("process_id")[1]
                    os.kill(victim, signal.SIGKILL)
            return weights(ppo)

    with pytest.warns(RuntimeWarning, match="workers are started again and the rollout is repeated"):
        after = run(kill=True)
    assert_equal(after, run(kill=False))


@pytest.mark.parametrize(
    ("what", "message"),
    [("observation", "observation must be finite, got .nan"), ("reward", "reward must be finite, got inf")],
)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_nan_from_an_env_stops_with_env_and_step_and_learns_nothing_from_it(what, message, backend):
    kwargs = {"what": what}
    workers = 2 if backend == "process" else None
    with PPO(
        BrokenEnv, n_envs=2, env_kwargs=kwargs, backend=backend, num_workers=workers, n_steps=8, batch_size=16
    ) as ppo:
        rows = ppo.updates(64)
        next(rows)
        good = weights(ppo)
        step = (
            4 if what == "observation" else 3
        )  # the 12th step is step 3 of the second rollout; its result is seen at 4
        with pytest.raises(EnvError, match=f"env 0, step {step} of the rollout: {message}"):
            next(rows)
        assert_equal(weights(ppo), good)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_diverged_loss_stops_and_keeps_the_last_good_weights(path):
    with PPO(TargetEnv, n_envs=2, path=path, backend="serial", **{**FAST, "learning_rate": 1e38}) as ppo:
        good = weights(ppo)
        with pytest.raises(DivergedError, match=r"iteration 0: .* NaN or infinite; the update was undone"):
            ppo.learn(64)
        assert_equal(weights(ppo), good)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "Lower the learning rate, or normalise observations and rewards$"),
        ({"normalize_obs": True}, "Lower the learning rate, or normalise rewards$"),
        ({"normalize_obs": True, "normalize_reward": True}, "Lower the learning rate$"),
    ],
)
def test_a_diverged_loss_advises_only_what_is_not_done_already(settings, advice):
    more = {**FAST, "learning_rate": 1e38, **settings}
    with (
        PPO(TargetEnv, n_envs=2, backend="serial", **more) as ppo,
        pytest.raises(DivergedError, match=advice),
    ):
        ppo.learn(64)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_an_observation_that_is_infinite_as_float32_alone_is_told_so():
    class Large(IdentityEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)

        def reset(self, **more):
            return np.full(1, 1e300), super().reset(**more)[1]

    with (
        PPO(Large, n_envs=1, backend="serial", n_steps=8, batch_size=8, preset="none") as ppo,
        pytest.raises(EnvError, match=r"must be finite, got \[inf\] \(as float32, which ends at 3.4e38\)"),
    ):
        ppo.learn(8)


# --- bad input


def test_an_unknown_env_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="Did you mean 'CartPole-v1'"):
        PPO("CartPol-v1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_envs": 0}, "n_envs must be at least 1, got 0"),
        ({"n_envs": 2.5}, "n_envs must be a whole number, got 2.5"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"backend": "proces"}, "no backend named 'proces'. Did you mean 'process'"),
        ({"start_method": "teleport"}, "no start method 'teleport'"),
        ({"learning_rat": 1}, "no PPO setting named 'learning_rat'. Did you mean 'learning_rate'"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
        ({"device": "tpu"}, "device must be cpu, cuda, mps or auto, got 'tpu'"),
        ({"path": "magic"}, "path must be 'auto', 'compiled' or 'torch', got 'magic'"),
        ({"backend": "process", "num_workers": 0}, "needs at least one worker"),
        ({"backend": "serial", "num_workers": 2}, "'serial' has no workers, got num_workers=2"),
        ({"num_workers": -1}, "num_workers must not be negative, got -1"),
        ({"num_workers": "2"}, "num_workers must be a whole number, got '2'"),
        ({"n_envs": True}, "n_envs must be a whole number, got True"),
        ({"n_steps": 16.0}, "n_steps must be of whole numbers, got 16.0"),
        ({"hidden": (8.0,)}, "hidden must be of whole numbers, got 8.0"),
        ({"hidden": 8}, "hidden must be a tuple of units, one for each layer, got 8"),
        ({"hidden": ()}, "hidden must name at least one layer"),
    ],
)
def test_impossible_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PPO("CartPole-v1", **arguments)


def test_learning_needs_an_end():
    with (
        PPO(IdentityEnv, backend="serial") as ppo,
        pytest.raises(ConfigError, match="total_timesteps or num_episodes"),
    ):
        ppo.learn()
    limits = [
        ({"total_timesteps": float("nan")}, "total_timesteps must be at least 1, got nan"),
        ({"total_timesteps": -5, "num_episodes": 3}, "total_timesteps must be at least 1, got -5"),
        ({"num_episodes": 0}, "num_episodes must be at least 1, got 0"),
    ]
    for given, message in limits:
        with PPO(IdentityEnv, backend="serial") as ppo, pytest.raises(ConfigError, match=message):
            ppo.learn(**given)


def test_an_own_env_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match="cannot import the environment 'nowhere:Env'"):
        PPO("nowhere:Env")
    with pytest.raises(ConfigError, match=r"must make a gymnasium.Env, got int"):
        PPO(lambda: 3)


def test_an_own_env_is_found_by_module_and_class():
    with PPO("tests.train.ppo.ppo_envs:IdentityEnv", n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64)


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
    with pytest.raises(DataError, match="holds no checkpoint"):
        PPO.load(tmp_path)


# --- choosing where environments run


def test_workers_are_chosen_only_where_they_pay():
    assert not workers_pay(6e-6, 128, 8, 2, compiled=True, steps=100_000)  # CartPole, a short run
    assert workers_pay(6e-6, 128, 8, 2, compiled=True, steps=10_000_000)
    assert workers_pay(2e-3, 128, 8, 2, compiled=True, steps=10_000)  # a slow env
    assert not workers_pay(
        6e-6, 128, 8, 2, compiled=False, steps=10_000_000
    )  # an exchange per step costs more
    assert not workers_pay(1.0, 128, 8, 1, compiled=True, steps=10**9)


# --- PPOTrainer


def test_trainer_learns_episode_by_episode():
    trainer = PPOTrainer(seed=0, **{**FAST, "batch_size": 16})
    env = IdentityEnv()
    for _ in range(250):
        metrics = trainer.train_episode(env)
        assert metrics["n_completed_episodes"] == 1
        assert metrics["length"] == 16
    assert trainer.num_episodes == 250
    assert metrics["reward_mean"] > 13
    chosen = [trainer.select_action(state, deterministic=True).action for state in range(3)]
    assert chosen == [0, 1, 2]


def test_trainer_learns_from_a_vector_env_with_one_generator_the_same_for_the_same_seed():
    def rewards():
        trainer = PPOTrainer(None, seed=3)
        envs = gym.make_vec("CartPole-v1", num_envs=4)  # of one piece: takes one number as its seed
        return [trainer.train_episode_vectorized(envs)["reward"] for _ in range(2)]

    assert rewards() == rewards()


def test_a_trainer_goes_on_in_each_env_and_keeps_none_that_nobody_else_has():
    class Seeds(IdentityEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    seeds = []
    trainer = PPOTrainer(seed=5, **FAST)
    env, envs = Seeds(), SyncVectorEnv([IdentityEnv] * 2)
    for _ in range(3):
        trainer.train_episode(env)
        trainer.train_episode_vectorized(envs)
    assert seeds == [derive_seed(5, "env", 0, episode) & 0x7FFFFFFF for episode in (0, 0, 1, 2, 3)]
    left = [weakref.ref(env), weakref.ref(env.unwrapped), weakref.ref(envs)]
    del env, envs
    gc.collect()
    assert [one() for one in left] == [None] * 3
    trainer.train_episode(Seeds())


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_trainer_learns_from_vector_envs_of_every_autoreset_mode(mode):
    trainer = PPOTrainer(seed=0, **FAST)
    envs = SyncVectorEnv([IdentityEnv] * 4, autoreset_mode=mode)
    for _ in range(45):
        metrics = trainer.train_episode_vectorized(envs)
        assert metrics["n_envs"] == 4
        assert abs(metrics["first_kl"]) < 1e-7
    assert metrics["reward_mean"] > 13
    assert {e.length for e in trainer.log.recent} == {16}


def test_trainer_learns_from_parallel_env():
    ParallelEnv = pytest.importorskip("shoal.vector.parallel_env").ParallelEnv

    def play(make):
        trainer = PPOTrainer(seed=0, **FAST)
        with make([IdentityEnv] * 4) as envs:
            for _ in range(4):
                metrics = trainer.train_episode_vectorized(envs)
        assert metrics["n_completed_episodes"] == 8  # 32 steps, episodes of 16, 4 envs
        return trainer.agent.state()[0]

    class Sync(SyncVectorEnv):
        def __init__(self, fns):
            super().__init__(fns, autoreset_mode=AutoresetMode.SAME_STEP)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.close()

    assert_equal(play(lambda fns: ParallelEnv(fns, num_workers=2)), play(Sync))


def test_an_env_that_raises_when_it_is_tried_is_named():
    with pytest.raises(EnvError, match=r"BrokenEnv failed when it was tried .*the plug was pulled"):
        PPO(BrokenEnv, env_kwargs={"what": "error"})


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_an_env_that_raises_in_a_worker_stops_the_run_with_its_name(path):
    ppo = PPO(
        BrokenEnv, n_envs=2, env_kwargs={"what": "late error"}, path=path, backend="process", num_workers=2, n_steps=8,
        batch_size=16,
    )  # fmt: skip
    with ppo, pytest.raises(EnvError, match=r"env [01] .*failed .*the plug was pulled"):
        ppo.learn(640)


def test_trainer_state_is_saved_and_loaded(tmp_path):
    trainer = PPOTrainer(seed=4, num_episodes=100, lr_schedule="linear", **FAST)
    for _ in range(3):
        trainer.train_episode(TargetEnv())
    trainer.save(tmp_path)
    other = PPOTrainer()
    other.load(tmp_path)
    for env in (TargetEnv, None):
        with pytest.raises(ConfigError, match="is of a PPOTrainer, which steps its caller's envs"):
            PPO.load(tmp_path, env)
    assert other.num_episodes == trainer.num_episodes > 0
    assert other.progress == trainer.progress
    for one, two in zip(trainer.agent.state(), other.agent.state(), strict=True):
        assert_equal(one, two)
    observation = np.array([0.3], np.float32)
    assert other.select_action(observation) == trainer.select_action(observation)
    assert load_policy(tmp_path)(observation) == pytest.approx(
        trainer.select_action(observation, deterministic=True).action, abs=1e-5
    )


def test_a_trainer_that_loads_has_the_settings_of_the_checkpoint(tmp_path):
    settings = {"activation": "relu", "hidden": (16,), "normalize_obs": True, "normalize_reward": True}
    trainer = PPOTrainer(seed=4, **{**FAST, **settings})
    for _ in range(3):
        last = trainer.train_episode(TargetEnv())
    trainer.save(tmp_path)
    observation = np.array([0.3], np.float32)
    for other in (PPOTrainer(), PPOTrainer(normalize_obs=True), PPOTrainer(seed=4, **FAST)):
        other.load(tmp_path)
        assert other.select_action(observation) == trainer.select_action(observation)
        for one, two in zip(trainer.agent.state(), other.agent.state(), strict=True):
            assert_equal(one, two)
        assert other.log.mean_reward == last["reward_mean"]  # of all three episodes
    plain = PPOTrainer(**FAST)
    plain.train_episode(TargetEnv())
    plain.save(tmp_path / "plain")
    other.load(tmp_path / "plain")  # back again
    assert other.select_action(observation) == plain.select_action(observation)


def test_a_trainer_does_not_load_a_policy_whose_actions_are_squashed(tmp_path):
    with PPO(TargetEnv, n_envs=2, backend="serial", squash=True, **FAST) as ppo:
        ppo.learn(64)
        ppo.save(tmp_path)
    with pytest.raises(ConfigError, match="squash=True wraps environments"):
        PPOTrainer().load(tmp_path)


def test_trainer_without_spaces_and_with_other_spaces_says_so():
    trainer = PPOTrainer()
    with pytest.raises(ConfigError, match="knows no spaces yet"):
        trainer.select_action(0)
    trainer.train_episode(IdentityEnv())
    with pytest.raises(ConfigError, match="this trainer learns"):
        trainer.train_episode(TargetEnv())
    with pytest.raises(ValueError, match="allows no action"):
        trainer.select_action(0, mask=[0, 0, 0])


# --- the policy alone


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_loaded_policy_acts_as_the_trainer_does(tmp_path, env):
    settings = {**FAST, "normalize_obs": True}
    with PPO(env, n_envs=2, backend="serial", **settings) as ppo:
        ppo.learn(640)
        ppo.save(tmp_path)
        policy = load_policy(tmp_path)
        rng = np.random.default_rng(0)
        obs = rng.standard_normal((50, ppo.obs_rows.size)).astype(np.float32)
        actions = np.zeros((50, ppo.action_rows.size), ppo.action_rows.dtype)
        noise = np.zeros((50, ppo.action_rows.size), np.float32)
        ppo.agent.act(obs, np.zeros((0, 0), np.uint8), noise, actions, np.zeros(50, np.float32), True)
        for row, action in zip(obs, ppo.action_rows.to_env(actions), strict=True):
            np.testing.assert_allclose(policy(row), action, atol=1e-5)
        assert policy.action_space.contains(policy(obs[0], rng=rng))


def test_a_loaded_policy_respects_masks_and_draws(tmp_path):
    with PPO(IdentityEnv, n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64)
        ppo.save(tmp_path)
    policy = load_policy(tmp_path)
    assert policy(0, mask=[False, False, True]) == 2
    for mask in ([1], [1, 0, 1, 1], 1):
        with pytest.raises(ValueError, match="mask must have 3 entries, one per action, got"):
            policy(0, mask=mask)
    drawn = {int(policy(0, rng=np.random.default_rng(i))) for i in range(60)}
    assert drawn == {0, 1, 2}
    with pytest.raises(ValueError, match="allows no action"):
        policy(0, mask=[0, 0, 0])


class PairsEnv(TargetEnv):
    """Shows a dict whose parts do not stand in the order of the alphabet."""

    observation_space = spaces.Dict(
        [(key, spaces.Box(-1.0, 1.0, (n,), np.float32)) for key, n in (("b", 2), ("a", 1))]
    )

    def reset(self, **more):
        point, info = super().reset(**more)
        return {"a": point, "b": np.array([1.0, -1.0], np.float32)}, info

    def step(self, action):
        point, *rest = super().step(action)
        return {"a": point, "b": np.array([1.0, -1.0], np.float32)}, *rest


def test_a_loaded_policy_reads_the_parts_of_an_observation_in_the_order_of_the_env(tmp_path):
    with PPO(PairsEnv, n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(256)
        ppo.save(tmp_path)
    policy, observation = load_policy(tmp_path), PairsEnv().reset(seed=0)[0]
    row = np.concatenate([observation["b"], observation["a"]])
    with torch.no_grad():
        mean = ppo.network.policy(torch.from_numpy(row[None]))[0].numpy()
    np.testing.assert_allclose(policy(observation), np.clip(mean, -2.0, 2.0), atol=1e-5)


def test_what_is_no_observation_has_no_action(tmp_path):
    with PPO(TargetEnv, n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64).save(tmp_path)
    policy, trainer = load_policy(tmp_path), PPOTrainer()
    trainer.load(tmp_path)
    for act in (policy, trainer.select_action):
        for bad in (np.nan, np.inf):
            with pytest.raises(ValueError, match=f"an observation must be finite, got {bad}"):
                act(bad)
        with pytest.raises(ValueError, match="mask is for choices, and these actions are continuous"):
            act(0.5, mask=[1])


def test_a_policy_of_a_perceptron_needs_no_torch(tmp_path):
    with PPO("CartPole-v1", n_envs=2, backend="serial", normalize_obs=True, **FAST) as ppo:
        ppo.learn(64).save(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; import numpy, shoal; "
        "print(shoal.load_policy(sys.argv[1])(numpy.ones(4)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert said.stdout.strip() in ("0", "1"), said.stderr


class Wide(CountingEnv):
    """Shows whole numbers that may be as large as they come."""

    observation_space = spaces.Box(0, np.iinfo(np.int64).max, (2,), np.int64)

    def reset(self, **given):
        observation, info = super().reset(**given)
        return observation.astype(np.int64), info

    def step(self, action):
        observation, *rest = super().step(action)
        return observation.astype(np.int64), *rest


def test_a_policy_is_loaded_with_the_bounds_of_its_env(tmp_path):
    with PPO(Wide, n_envs=2, backend="serial", **FAST) as ppo:
        ppo.learn(64).save(tmp_path)
    assert load_policy(tmp_path).observation_space == Wide.observation_space


SMALL = {
    "choice": spaces.Discrete(3, start=1, dtype=np.int32),
    "choices": spaces.MultiDiscrete([2, 3], dtype=np.int8),
}


class SmallNumbers(IdentityEnv):
    """Takes actions of its own dtype alone, and shows observations of one."""

    def __init__(self, kind):
        super().__init__()
        self.action_space = SMALL[kind]
        self.observation_space = spaces.Dict({"x": SMALL["choices"]})

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        return {"x": np.zeros(2, np.int8)}, {}

    def step(self, action):
        assert np.asarray(action).dtype == self.action_space.dtype
        assert self.action_space.contains(action)
        return {"x": np.ones(2, np.int8)}, 1.0, True, False, {}


@pytest.mark.parametrize("kind", SMALL)
def test_actions_have_the_dtype_of_their_space_also_where_it_comes_from_a_checkpoint(tmp_path, kind):
    with PPO(SmallNumbers, n_envs=2, backend="serial", env_kwargs={"kind": kind}, **FAST) as ppo:
        saved = ppo.learn(64).save(tmp_path / "run")
    SmallNumbers(kind).step(load_policy(saved)({"x": np.zeros(2, np.int8)}))
    with PPO.load(saved, SmallNumbers, backend="serial") as ppo:
        ppo.learn(128)
        before = ppo.checkpoint()
    for space in (before.policy["action_space"], before.policy["observation_space"]["spaces"]["x"]):
        del space["dtype"]  # earlier checkpoints did not tell it
    with PPO.load(save_checkpoint(tmp_path / "before", before), SmallNumbers, backend="serial") as ppo:
        ppo.learn(192)
    trainer = PPOTrainer(**FAST)
    trainer.train_episode(SmallNumbers(kind))
    trainer.load(trainer.save(tmp_path / "trainer"))
    trainer.train_episode(SmallNumbers(kind))


def test_an_image_policy_loads_through_torch(tmp_path):
    with PPO(DictEnv, n_envs=2, backend="serial", n_steps=8, batch_size=16, n_epochs=1) as ppo:
        ppo.learn(16)
        ppo.save(tmp_path)
        env = DictEnv()
        observation, _ = env.reset(seed=0)
        assert env.action_space.contains(load_policy(tmp_path)(observation))


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_onnx_gives_the_policys_parameters(tmp_path, env):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    with PPO(env, n_envs=2, backend="serial", normalize_obs=env == "Pendulum-v1", **FAST) as ppo:
        ppo.learn(128)
        ppo.save(tmp_path)
    policy = load_policy(tmp_path)
    file = policy.export_onnx(tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((7, policy.rows.size)).astype(np.float32)
    (got,) = session.run(None, {"observation": rows})
    np.testing.assert_allclose(got, policy.parameters(rows), atol=1e-5)


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_onnx_reads_numbers_beside_pictures(tmp_path, normalize_obs):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    settings = {"n_steps": 8, "batch_size": 16, "n_epochs": 1, "normalize_obs": normalize_obs}
    with PPO(DictEnv, n_envs=2, backend="serial", **settings) as ppo:
        ppo.learn(32)
        ppo.save(tmp_path)
    policy, observation = load_policy(tmp_path), DictEnv().reset(seed=0)[0]
    row = np.zeros((1, policy.rows.size), np.uint8)
    policy.rows.encode_one(observation, row[0])
    session = runtime.InferenceSession(
        str(policy.export_onnx(tmp_path / "policy.onnx")), providers=["CPUExecutionProvider"]
    )
    told = np.concatenate([policy.rows.numbers(row)[0], observation["camera"].reshape(-1)]).astype(np.float32)
    (got,) = session.run(None, {"observation": told[None]})
    np.testing.assert_allclose(got, policy.parameters(row), atol=1e-5)


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


def test_the_default_config_is_valid_and_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr_schedule": "liner"}, "lr_schedule must be one of constant, linear, cosine, got 'liner'"),
        ({"ent_schedule": "Linear"}, "ent_schedule must be one of constant"),
        ({"activation": "gelu"}, "activation must be one of tanh, relu, got 'gelu'"),
        ({"recurrent": "LSTM"}, "recurrent must be one of none, lstm, gru, got 'LSTM'"),
        ({"precision": "bf16"}, "precision must be one of float32, bfloat16, got 'bf16'"),
        ({"cnn": "Nature"}, "cnn must be one of auto, nature, impala, small, got 'Nature'"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be finite, got inf; 0 is off"),
        ({"log_std_init": float("nan")}, "log_std_init must be finite, got nan"),
        ({"adam_eps": -1e-5}, "adam_eps must be positive, got -1e-05"),
        (
            {"adam_eps": 1e-320},
            r"adam_eps must lie between 1.2e-38 and 3.4e\+38 in size \(float32\), got 1e-320",
        ),
        ({"log_std_init": -1e300}, r"log_std_init must lie .* \(float32\), got -1e\+300"),
        ({"normalize_obs": "False"}, "normalize_obs must be True or False, got 'False'"),
        ({"gamma": "0.9"}, "gamma must be a number, got '0.9'"),
        ({"ent_coef": None}, "ent_coef must be a number, got None"),
        ({"learning_rate": True}, "learning_rate must be a number, got True"),
        ({"n_epochs": True}, "n_epochs must be of whole numbers, got True"),
        ({"sde_every": 1.5}, "sde_every must be of whole numbers, got 1.5"),
        ({"hidden": None}, "hidden must be a tuple of units, one for each layer, got None"),
        ({"n_steps": 10**20}, "n_steps must be at most 2147483647, got 1000"),
        ({"n_epochs": 10**10}, "n_epochs must be at most"),
        ({"memory_units": 10**10}, "memory_units must be at most"),
        ({"hidden": (64, 10**10)}, "hidden must be at most"),
    ],
)
def test_a_setting_that_would_be_taken_for_another_or_could_not_be_saved_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**setting)


@pytest.mark.parametrize(
    ("name", "more"), [("n_envs", {}), ("frame_stack", {}), ("num_workers", {"backend": "process"})]
)
def test_more_than_any_memory_holds_is_refused_by_its_name(name, more):
    with pytest.raises(ConfigError, match=f"{name} must be at most 2147483647, got 10000000000"):
        PPO(TargetEnv, **{name: 10**10}, **more)


class MaskedLate(IdentityEnv):
    """Gives the masks of `at`, by step of the episode; None gives none."""

    at: ClassVar[dict] = {}

    def _info(self):
        mask = self.at.get(self.t, np.ones(3, bool))
        return {} if mask is None else {"action_mask": np.asarray(mask)}


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([0, 0, 0], "evaluation episode 0, step 2: the action mask allows no action"),
        ([1, 0], "must have 3 entries, one per action, got 2"),
        (None, "but not this time; give it at every step"),
    ],
)
def test_an_evaluation_examines_masks_as_a_rollout_does(monkeypatch, path, mask, message):
    with PPO(MaskedLate, n_envs=2, backend="serial", path=path, **FAST) as ppo:
        assert ppo.evaluate(1).lengths == [16]
        monkeypatch.setattr(MaskedLate, "at", {2: mask})
        with pytest.raises(EnvError, match=message):
            ppo.evaluate(1)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_an_env_that_fails_in_evaluation_is_named_as_in_a_rollout(path):
    with PPO(
        BrokenEnv, env_kwargs={"what": "late error"}, n_envs=2, backend="serial", path=path, **FAST
    ) as ppo:
        with pytest.raises(
            EnvError, match="evaluation failed in episode 0, step 89, action .*the plug was pulled"
        ):
            ppo.evaluate(1)
        with pytest.raises(ConfigError, match="episodes must be a whole number, got 2.5"):
            ppo.evaluate(2.5)


class PaysArrays(CountingEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


def test_a_reward_may_be_an_array_of_one_number_in_evaluation_too():
    with PPO(PaysArrays, n_envs=2, backend="serial", **FAST) as ppo:
        assert ppo.learn(64).evaluate(1).mean == ppo.log.mean_reward == 5.0


class PaysText(CountingEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, str(reward), *rest


def test_a_reward_in_words_is_refused_in_evaluation_as_in_a_rollout():
    with PPO(PaysText, n_envs=2, backend="serial", **FAST) as ppo:
        with pytest.raises(EnvError, match="reward must be"):
            ppo.learn(64)
        with pytest.raises(EnvError, match="the reward must be a number, got '1.0'"):
            ppo.evaluate(1)


class EndsInWords(CountingEnv):
    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, "False", False, info


def test_an_end_in_words_is_refused_in_evaluation_as_in_a_rollout():
    with PPO(EndsInWords, n_envs=2, backend="serial", **FAST) as ppo:
        for play in (partial(ppo.learn, 64), partial(ppo.evaluate, 1)):
            with pytest.raises(EnvError, match="terminated must be True or False, got 'False'"):
                play()


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_an_evaluation_examines_numbers_as_a_rollout_does(path, what):
    env = partial(BrokenEnv, what)
    ppo = PPO(env, preset="none", n_envs=2, backend="serial", path=path, **FAST)
    with ppo, pytest.raises(EnvError, match=f"evaluation episode 0, step 1[12].*{what} must be finite"):
        ppo.evaluate(1)


def test_masks_that_begin_after_the_reset_are_refused(monkeypatch):
    monkeypatch.setattr(MaskedLate, "at", {0: None})
    with pytest.raises(ConfigError, match="at a step, but not at the reset before"):
        PPO(MaskedLate, n_envs=2, backend="serial", **FAST)


def test_a_trainer_is_told_what_it_takes():
    with pytest.raises(
        ConfigError, match="takes one gymnasium.Env, got SyncVectorEnv; a vector env goes into"
    ):
        PPOTrainer().train_episode(SyncVectorEnv([IdentityEnv]))
    with pytest.raises(
        ConfigError, match="takes a vector env, got IdentityEnv; a single environment goes into"
    ):
        PPOTrainer().train_episode_vectorized(IdentityEnv())
    with pytest.raises(ConfigError, match="give both observation_space and action_space, or none"):
        PPOTrainer(observation_space=spaces.Discrete(3))
    for given in ({"seed": 0.5}, {"num_episodes": 0}, {"num_episodes": 2.5}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} must be"):
            PPOTrainer(**given)


def test_a_trainer_saves_numbers_of_numpy(tmp_path):
    trainer = PPOTrainer(seed=np.int64(4), num_episodes=np.int64(9), hidden=(4,))
    trainer.train_episode(IdentityEnv())
    trainer.save(tmp_path)
    again = PPOTrainer()
    again.load(tmp_path)
    assert (again.seed, again.total_episodes) == (4, 9)


def test_a_mask_of_another_length_is_refused_by_the_trainer():
    trainer = PPOTrainer(observation_space=spaces.Discrete(3), action_space=spaces.Discrete(3))
    for mask in ([], [1, 0], [1, 0, 0, 1]):
        with pytest.raises(ValueError, match=f"mask must have 3 entries, one per action, got {len(mask)}"):
            trainer.select_action(0, mask=mask)


def test_numbers_of_numpy_are_saved_as_others_are(tmp_path):
    settings = {**FAST, "learning_rate": np.float32(0.25), "n_steps": np.int64(8), "normalize_obs": np.True_}
    with PPO(IdentityEnv, n_envs=np.int64(2), seed=np.int64(3), backend="serial", **settings) as ppo:
        ppo.learn(16)
        ppo.save(tmp_path)
    with PPO.load(tmp_path, IdentityEnv) as again:
        assert again.config == ppo.config
        assert (again.seed, again.n_envs, again.config.learning_rate) == (3, 2, 0.25)


# --- slow: the real thing


@pytest.mark.slow
@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_cartpole_reaches_475(path):
    from shoal.train.ppo.presets import PRESETS

    preset = PRESETS["CartPole-v1"]
    for seed in (1, 2, 3):  # the seeds of the benchmark
        with PPO(
            "CartPole-v1", n_envs=preset.n_envs, seed=seed, path=path, backend="serial", **preset.settings
        ) as ppo:
            for metrics in ppo.updates(preset.total_timesteps):
                if len(ppo.log.recent) == 100 and metrics["reward_mean"] >= 475:
                    break
            assert metrics["reward_mean"] >= 475
            assert ppo.evaluate(10).mean >= 475


def test_no_warning_is_needed_for_a_plain_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with PPO("CartPole-v1", n_envs=2, backend="serial", **FAST) as ppo:
            ppo.learn(64)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_minibatch_larger_than_the_rollout_is_the_whole_rollout(path):
    learned = [
        PPO(IdentityEnv, preset="none", n_envs=2, n_steps=8, batch_size=size, backend="serial", path=path)
        .learn(32)
        .agent.state()[0]
        for size in (16, 10**9, 10**30)
    ]
    for other in learned[1:]:
        assert all(np.array_equal(learned[0][name], other[name]) for name in other)


class FailsOnce(CountingEnv):
    """Fails, or pays NaN, in its third step in all; an episode is five steps."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.steps = what, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and self.what == "error":
            raise OSError("the simulator is busy")
        observation, reward, *ends = super().step(action)
        return observation, float("nan") if self.steps == 3 and self.what == "nan" else reward, *ends


@pytest.mark.parametrize("what", ["error", "nan"])
@pytest.mark.parametrize("vectorized", [False, True])
def test_after_a_failure_a_trainer_counts_whole_episodes_from_their_first_observation(vectorized, what):
    trainer = PPOTrainer(n_steps=2)
    if vectorized:
        env = SyncVectorEnv([lambda: FailsOnce(what)], autoreset_mode=AutoresetMode.SAME_STEP)
        learn = partial(trainer.train_episode_vectorized, env)
    else:
        learn = partial(trainer.train_episode, FailsOnce(what))
    failures, ended, collected = 0, [], []
    update = trainer.update
    trainer.update = lambda rollout: collected.append(rollout) or update(rollout)
    for _ in range(8):
        try:
            metrics = learn()
        except (EnvError, OSError):
            failures += 1
            collected.clear()
        else:
            ended += [metrics["reward"], metrics["length"]] if metrics["n_completed_episodes"] else []
    assert failures == 1
    assert collected[0].obs[0, 0, 0] == 0  # the first observation of an episode
    assert collected[0].obs[1, 0, 0] == 1
    assert set(ended) == {5.0}


class Seedless(CountingEnv):
    def reset(self):
        return super().reset()


class OldStyle(CountingEnv):
    def reset(self, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OutOfLevels(CountingEnv):
    levels: ClassVar[int] = 100

    def reset(self, **given):
        if self.episode == self.levels - 1:
            raise KeyError("level 3 is missing")
        return super().reset(**given)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            Seedless,
            r"env 0 \(Seedless\) failed at the start of episode 0, in reset\(seed=\d+, options=None\).*'seed'",
        ),
        (OldStyle, r"env 0 \(OldStyle\): reset must return \(observation, info\).*got ndarray"),
    ],
)
def test_an_env_that_resets_in_another_way_is_told_what_is_expected(env, message):
    with pytest.raises(EnvError, match=message):
        PPO(env, preset="none", n_envs=1, backend="serial")
    with pytest.raises(EnvError, match=message):
        PPOTrainer().train_episode(env())


def test_an_env_that_cannot_begin_an_episode_is_named_and_the_last_good_weights_are_kept(
    tmp_path, monkeypatch
):
    options = RunOptions(
        env=f"{__name__}:OutOfLevels", n_envs=2, total_timesteps=64, run_dir=str(tmp_path / "run"),
        tensorboard=False, backend="serial", eval_episodes=4, eval_every=16,
    )  # fmt: skip
    run = PPORun(options, PPOConfig(n_steps=4, batch_size=8))
    monkeypatch.setattr(OutOfLevels, "levels", 3)
    with pytest.raises(EnvError, match=r"env 0 .* episode 3, in reset.*level 3 is missing"):
        list(run.rows())
    run.close()
    assert len(list_checkpoints(tmp_path / "run" / "emergency")) == 1


class Mistold(CountingEnv):
    """Of `space`, and shows `shown` at its third step."""

    t = 0

    def __init__(self, space, shown) -> None:
        super().__init__()
        self.observation_space, self.shown = space, shown

    def seen(self):
        space = self.observation_space
        return np.zeros(space.shape, space.dtype) if self.t < 3 else self.shown

    def reset(self, **given):
        _, info = super().reset(**given)
        return self.seen(), info

    def step(self, action):
        told = super().step(action)
        return self.seen(), *told[1:]


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (spaces.Box(-1, 1, (4,)), np.ones(1, np.float32)),
        (spaces.Box(-1, 1, (4,)), 1.0),
        (spaces.Box(-1, 1, (2, 2)), np.ones((1, 1))),
        (spaces.MultiBinary(3), [1]),
        (spaces.Discrete(3), -1),
        (spaces.Discrete(3), 3),
        (spaces.MultiDiscrete([3, 3]), [4, 0]),
        (spaces.MultiDiscrete([3, 3]), [0, -1]),
        (spaces.MultiDiscrete([3, 3]), [0]),
    ],
)
def test_an_observation_that_is_not_of_the_space_is_refused(space, shown):
    expected = "an observation must be of " + re.escape(str(space))
    with pytest.raises(EnvError, match=expected):
        PPO(partial(Mistold, space, shown), preset="none", n_envs=1, n_steps=16, backend="serial").learn(16)
    with pytest.raises(EnvError, match=expected):
        PPOTrainer().train_episode(Mistold(space, shown))


@pytest.mark.parametrize("shown", [1.0, [1.0], np.ones(1), np.ones((1, 1))])
def test_the_one_number_of_an_observation_may_come_in_any_shape(shown):
    env = partial(Mistold, spaces.Box(-1, 1, (1,)), shown)
    assert PPO(env, preset="none", n_envs=1, n_steps=16, backend="serial").learn(16).log.n_episodes == 3


class OfFour(CountingEnv):
    """Of a run of three environments, for which there is no fourth: it cannot be stepped."""

    def reset(self, *, seed=None, options=None):
        self.fails = seed in FOURTH
        return super().reset(seed=seed)

    def step(self, action):
        if self.fails:
            raise RuntimeError("there is no fourth")
        return super().step(action)


FOURTH = {derive_seed(0, "env", 3, episode) & 0x7FFFFFFF for episode in range(20)}


def test_workers_play_the_environments_of_the_run_and_no_others_and_are_counted():
    settings = {"preset": "none", "n_envs": 3, "n_steps": 16, "backend": "process", "hidden": (8,)}
    with PPO(OfFour, num_workers=2, path="compiled", **settings) as two:
        assert two.learn(96).workers == 2
    with PPO(OfFour, num_workers=1, path="compiled", **settings) as one:
        assert_equal(weights(one.learn(96)), weights(two))
    with PPO(CountingEnv, num_workers=3, path="compiled", **{**settings, "n_envs": 4}) as told:
        told.learn(64)
        assert told.workers == len({*told._experience.collector.envs.call("process_id")}) == 2


def test_units_of_numpy_are_saved_as_others_are(tmp_path):
    ppo = PPO(CountingEnv, preset="none", hidden=np.array([8, 4]), backend="serial")
    assert PPO.load(ppo.save(tmp_path), CountingEnv).config == PPOConfig(hidden=(8, 4))


def test_steps_spent_on_resets_count_nowhere():
    trainer = PPOTrainer(normalize_reward=True, normalize_obs=True, n_steps=12, gamma=0.5, hidden=(4,))
    envs = SyncVectorEnv([partial(CountingEnv, 3)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    assert (
        trainer.train_episode_vectorized(envs)["steps"] == 18
    )  # of 24: each third step is followed by a reset
    assert {e.step for e in trainer.log.recent} == {0 + 6, 6 + 6, 12 + 6}
    rewards, seen = trainer.agent.reward_norm.moments, trainer.agent.obs_norm.moments
    assert (rewards.count, rewards.mean) == (18, pytest.approx((1 + 1.5 + 1.75) / 3))
    assert (seen.count, seen.mean[0]) == (18, pytest.approx((0 + 1 + 2) / 3))


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_rollout_of_nothing_but_resets_changes_nothing(path):
    trainer = PPOTrainer(n_steps=1, hidden=(4,), path=path, normalize_reward=True, normalize_obs=True)
    envs = SyncVectorEnv([partial(CountingEnv, 1)], autoreset_mode=AutoresetMode.NEXT_STEP)
    assert trainer.train_episode_vectorized(envs)["n_minibatches"] == 4
    before = trainer.agent.state()
    metrics = trainer.train_episode_vectorized(envs)
    assert (metrics["n_minibatches"], metrics["steps"], metrics["n_completed_episodes"]) == (0, 1, 0)
    for one, two in zip(before[:2], trainer.agent.state()[:2], strict=True):
        assert_equal(one, two)


def test_the_sums_of_rewards_are_those_of_the_episodes_under_way(tmp_path, monkeypatch):
    trainer = PPOTrainer(normalize_reward=True, n_steps=2, gamma=0.5, hidden=(4,))
    for envs in [SyncVectorEnv([CountingEnv] * 2) for _ in range(2)]:  # each in the middle of its episodes
        trainer.train_episode_vectorized(envs)
    assert trainer.agent.reward_norm.moments.mean == pytest.approx((1 + 1.5) / 2)
    monkeypatch.setattr(ppo_module, "REPLAY_LIMIT", 3)
    with PPO(CountingEnv, n_envs=2, backend="serial", normalize_reward=True, n_steps=4, batch_size=8) as ppo:
        ppo.learn(8)
        assert (ppo.agent.reward_norm.sums > 0).all()
        ppo.save(tmp_path)  # breaks off the episodes
        assert (ppo.agent.reward_norm.sums == 0).all()


def test_an_evaluation_of_no_episodes_is_refused():
    with pytest.raises(ConfigError, match="episodes must be at least 1, got 0"):
        PPO(CountingEnv, preset="none", backend="serial").evaluate(0)
