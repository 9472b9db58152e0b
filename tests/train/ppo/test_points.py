"""Continuous actions: squashed into their bounds, explored by noise that depends on the state."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tests.train.ppo.ppo_envs import state

from shoal.core.errors import ConfigError
from shoal.maths import distributions
from shoal.train.ppo.envs import SquashedActions, unbounded
from shoal.train.ppo.networks import SDEActorCritic
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.trainer import PPOTrainer

SMALL: dict[str, Any] = {"n_envs": 2, "n_steps": 16, "batch_size": 16, "n_epochs": 2, "hidden": (6,),
                         "backend": "serial", "preset": "none"}  # fmt: skip


class Watched(gym.Env):
    """Notes the actions that it gets, which must lie in bounds that differ by dimension."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32))
    got: list[Any] = []  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        type(self).got.append(action)
        self.t += 1
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action[0]), False, self.t == 9, {}


class Whole(Watched):
    action_space = spaces.Box(0, 5, (2,), np.int64)


# --- squashing
def test_a_point_is_squashed_into_the_bounds_by_its_tanh():
    env = SquashedActions(Watched())
    got = env.action(np.array([0.5, -1e9], np.float32))
    assert got[0] == pytest.approx(-1 + 4 * (np.tanh(0.5) + 1) / 2, rel=1e-6)
    assert got[1] == 2.0
    assert env.action(np.array([1e9, 0.0], np.float32)).tolist() == [3.0, 2.25]
    assert got.dtype == np.float32


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_squashed_actions_fill_their_bounds_and_the_policy_acts_as_in_training(tmp_path, path):
    Watched.got.clear()
    with PPO(Watched, squash=True, log_std_init=0.7, path=path, **SMALL) as ppo:
        assert all(abs(metrics["first_kl"]) < 1e-6 for metrics in ppo.updates(320))
        drawn = np.array(Watched.got)
        assert drawn[:, 0].min() < -0.9
        assert drawn[:, 0].max() > 2.9
        assert 2.0 < drawn[:, 1].min() < drawn[:, 1].max() < 2.5  # clipped ones would lie on the bounds
        ppo.save(tmp_path)
        policy, seen = load_policy(tmp_path), np.array([0.3, -0.2], np.float32)
        assert policy.action_space == Watched.action_space
        mean = ppo.network.actor(torch.from_numpy(seen[None])).detach().numpy()[0]
        np.testing.assert_allclose(policy(seen), SquashedActions(Watched()).action(mean), atol=1e-6)
        assert policy.action_space.contains(policy(seen, rng=np.random.default_rng(0)))


@pytest.mark.parametrize("more", [{}, {"sde": True, "normalize_obs": True}])
def test_onnx_gives_squashed_actions_as_the_policy_does(tmp_path, more):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    with PPO(Watched, squash=True, **more, **SMALL) as ppo:
        ppo.learn(64).save(tmp_path)
    policy = load_policy(tmp_path)
    session = runtime.InferenceSession(
        str(policy.export_onnx(tmp_path / "policy.onnx")), providers=["CPUExecutionProvider"]
    )
    rows = np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32) * 3
    (got,) = session.run(None, {"observation": rows})
    np.testing.assert_allclose(got, [policy(row) for row in rows], atol=1e-6)


def test_a_squashed_run_goes_on_exactly(tmp_path):
    with PPO(Watched, squash=True, **SMALL) as ppo:
        ppo.learn(96).save(tmp_path)
        whole = state(ppo.learn(192))
    with PPO.load(tmp_path, Watched, backend="serial") as ppo:
        assert state(ppo.learn(192)) == whole


def test_what_has_no_bounds_is_not_squashed():
    with pytest.raises(
        ConfigError,
        match="squash=True needs continuous actions with finite bounds, a finite distance apart, got Discrete",
    ):
        PPO("CartPole-v1", squash=True, **SMALL)
    most = np.finfo(np.float32).max  # whose middle would be infinite, and an end NaN
    with pytest.raises(ConfigError, match=r"finite bounds, .* got Box"):
        unbounded(gym.spaces.Box(-most, most, (1,), np.float32))
    with pytest.raises(ConfigError, match=r"finite bounds, .* got Box\(0, 5, \(2,\), int64\)"):
        PPO(Whole, squash=True, **SMALL)
    with pytest.raises(ConfigError, match="PPOTrainer steps the caller's"):
        PPOTrainer(squash=True)


# --- state-dependent exploration
@pytest.mark.parametrize("seed", range(3))
def test_exploration_by_the_state_is_the_gaussian_of_its_definition(seed):
    rng = np.random.default_rng(seed)
    mean, features, log_std, noise = (
        rng.standard_normal(s).astype(np.float32) for s in ((5, 2), (5, 3), (3, 2), (5, 6))
    )
    actions, logprob = distributions.explore(mean, features, log_std, noise)
    apart = [
        [
            sum(features[b, f] * np.exp(log_std[f, a]) * noise[b, 2 * f + a] for f in range(3))
            for a in range(2)
        ]
        for b in range(5)
    ]
    np.testing.assert_allclose(actions, mean + np.array(apart), rtol=1e-5)
    normal = torch.distributions.Normal(
        torch.from_numpy(mean), torch.from_numpy(np.sqrt(features**2 @ np.exp(log_std) ** 2 + 1e-6))
    )
    expected = normal.log_prob(torch.from_numpy(actions)).sum(1)
    np.testing.assert_allclose(logprob, expected, rtol=1e-5, atol=1e-5)
    tensors = [torch.from_numpy(array) for array in (mean, features, log_std, actions)]
    scored = distributions.gsde_logprob(*tensors)
    torch.testing.assert_close(scored.logprob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored.entropy, normal.entropy().sum(1), rtol=1e-5, atol=1e-5)
    assert np.array_equal(distributions.explore(mean, features, log_std, noise, deterministic=True)[0], mean)


@pytest.mark.parametrize(("every", "blocks"), [(0, [16]), (5, [5, 5, 5, 1]), (10**18, [16])])
def test_its_noise_is_held_as_long_as_asked_and_differs_by_env(every, blocks):
    with PPO(Watched, sde=True, sde_every=every, **SMALL) as ppo:
        noise = ppo.agent.noise(16)
        assert noise.shape == (16, 2, 6 * 2)
        starts = np.cumsum([0, *blocks])
        for first, last in itertools.pairwise(starts):
            assert (noise[first:last] == noise[first]).all()
        assert len(np.unique(noise[:, 0, 0])) == len(blocks)
        assert (noise[:, 0] != noise[:, 1]).all()


def test_it_learns_with_ratio_one_at_first_every_weight_and_goes_on_exactly(tmp_path):
    settings = {**SMALL, "sde": True, "sde_every": 4, "log_std_init": -1.0}
    with PPO(Watched, **settings) as ppo:
        assert type(ppo.network) is SDEActorCritic
        assert ppo.network.log_std.shape == (6, 2)
        before = {name: value.clone() for name, value in ppo.network.state_dict().items()}
        assert all(abs(metrics["first_kl"]) < 1e-6 for metrics in ppo.updates(96))
        after = ppo.network.state_dict()
        assert [name for name in after if torch.equal(after[name], before[name])] == []
        ppo.save(tmp_path)
        first = ppo.evaluate(2, deterministic=False)
        assert first != ppo.evaluate(2)
        seen = np.array([[0.3, -0.2]], np.float32)
        mean = ppo.network.actor(torch.from_numpy(seen)).detach().numpy()
        policy = load_policy(tmp_path)
        np.testing.assert_allclose(policy(seen[0]), np.clip(mean[0], [-1, 2], [3, 2.5]), atol=1e-6)
        assert policy.action_space.contains(policy(seen[0], rng=np.random.default_rng(0)))
        whole = state(ppo.learn(192))
    with PPO.load(tmp_path, Watched, backend="serial") as ppo:
        assert state(ppo.learn(192)) == whole


def test_the_trainer_explores_by_the_state_too():
    trainer = PPOTrainer(sde=True, n_steps=16, batch_size=16, hidden=(6,))
    metrics = trainer.train_episode_vectorized(SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * 2))
    assert abs(metrics["first_kl"]) < 1e-6
    assert trainer.select_action(np.zeros(3, np.float32)).action.shape == (1,)


def test_where_it_does_not_belong_it_is_refused():
    with pytest.raises(ConfigError, match="sde=True is for continuous actions, got Discrete"):
        PPO("CartPole-v1", sde=True, **SMALL)
    with pytest.raises(ConfigError, match="not for images or recurrent policies"):
        PPO(Watched, sde=True, recurrent="gru", **SMALL)
    with pytest.raises(ConfigError, match="perceptrons only, got SDEActorCritic"):
        PPO(Watched, sde=True, path="compiled", **SMALL)
