"""PPO as a whole: it learns, it is deterministic, and its details are right."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
import torch
from tests.train.ppo.ppo_envs import (
    FAST,
    CountingEnv,
    DictEnv,
    IdentityEnv,
    OfFour,
    TargetEnv,
    assert_equal,
    weights,
)
from torch import nn

from shoal.train.ppo.collect import workers_pay
from shoal.train.ppo.ppo import PPO


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


def test_episodes_are_counted_with_their_rewards_and_lengths():
    with PPO(
        CountingEnv, n_envs=3, env_kwargs={"length": 7}, backend="serial", n_steps=10, batch_size=30
    ) as ppo:
        rows = list(ppo.updates(90))
    assert [row["n_completed_episodes"] for row in rows] == [3, 3, 6]  # ends at 7, 14, 21 and 28 in each env
    assert ppo.log.n_episodes == 12
    assert {(e.reward, e.length) for e in ppo.log.recent} == {(7.0, 7)}
    assert rows[-1]["reward_mean"] == 7.0


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


def test_workers_are_chosen_only_where_they_pay():
    assert not workers_pay(6e-6, 128, 8, 2, compiled=True, steps=100_000)  # CartPole, a short run
    assert workers_pay(6e-6, 128, 8, 2, compiled=True, steps=10_000_000)
    assert workers_pay(2e-3, 128, 8, 2, compiled=True, steps=10_000)  # a slow env
    assert not workers_pay(
        6e-6, 128, 8, 2, compiled=False, steps=10_000_000
    )  # an exchange per step costs more
    assert not workers_pay(1.0, 128, 8, 1, compiled=True, steps=10**9)


@pytest.mark.parametrize(("free", "workers"), [(1, 0), (2, 2)])
def test_cores_that_are_busy_get_no_workers(monkeypatch, free, workers):
    class SlowEnv(TargetEnv):
        def step(self, action):
            time.sleep(0.002)
            return super().step(action)

    monkeypatch.setattr("shoal.train.ppo.collect.free_cpus", lambda: free)
    with PPO(SlowEnv, n_envs=2, path="torch", n_steps=8, batch_size=8, n_epochs=1) as ppo:
        ppo.learn(1_000_000, callback=lambda metrics: False)
        assert ppo.workers == workers


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
        for size in (16, 10**9, 10**18)
    ]
    for other in learned[1:]:
        assert all(np.array_equal(learned[0][name], other[name]) for name in other)


def test_workers_play_the_environments_of_the_run_and_no_others_and_are_counted():
    settings = {"preset": "none", "n_envs": 3, "n_steps": 16, "backend": "process", "hidden": (8,)}
    with PPO(OfFour, num_workers=2, path="compiled", **settings) as two:
        assert two.learn(96).workers == 2
    with PPO(OfFour, num_workers=1, path="compiled", **settings) as one:
        assert_equal(weights(one.learn(96)), weights(two))
    with PPO(CountingEnv, num_workers=3, path="compiled", **{**settings, "n_envs": 4}) as told:
        told.learn(64)
        assert told.workers == len(told._experience.collector.envs.stats()["workers"]) == 2
