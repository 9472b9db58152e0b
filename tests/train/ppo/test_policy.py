"""A trained policy alone: loaded, asked for actions, written as ONNX."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.train.ppo.ppo_envs import (
    FAST,
    CountingEnv,
    DictEnv,
    IdentityEnv,
    TargetEnv,
)

from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.trainer import PPOTrainer


def trained(tmp_path, env, **settings):
    with PPO(env, n_envs=2, backend="serial", preset="none", **{**FAST, **settings}) as ppo:
        return load_policy(ppo.learn(64).save(tmp_path))


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
    policy = trained(tmp_path, IdentityEnv)
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
    policy, trainer = trained(tmp_path, TargetEnv), PPOTrainer()
    trainer.load(tmp_path)
    for act in (policy, trainer.select_action):
        for bad in (np.nan, np.inf):
            with pytest.raises(ValueError, match=f"an observation must be finite, got {bad}"):
                act(bad)
        with pytest.raises(ValueError, match="mask is for choices, and these actions are continuous"):
            act(0.5, mask=[1])


def test_a_policy_of_a_perceptron_needs_no_torch(tmp_path):
    trained(tmp_path, "CartPole-v1", normalize_obs=True)
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
    assert trained(tmp_path, Wide).observation_space == Wide.observation_space


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
    trainer = PPOTrainer(**FAST)
    trainer.train_episode(SmallNumbers(kind))
    trainer.load(trainer.save(tmp_path / "trainer"))
    trainer.train_episode(SmallNumbers(kind))


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_onnx_gives_the_policys_parameters(tmp_path, env):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy = trained(tmp_path, env, normalize_obs=env == "Pendulum-v1")
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
    policy, observation = trained(tmp_path, DictEnv, **settings), DictEnv().reset(seed=0)[0]
    row = np.zeros((1, policy.rows.size), np.uint8)
    policy.rows.encode_one(observation, row[0])
    session = runtime.InferenceSession(
        str(policy.export_onnx(tmp_path / "policy.onnx")), providers=["CPUExecutionProvider"]
    )
    told = np.concatenate([policy.rows.numbers(row)[0], observation["camera"].reshape(-1)]).astype(np.float32)
    (got,) = session.run(None, {"observation": told[None]})
    np.testing.assert_allclose(got, policy.parameters(row), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"squash": True}, {"sde": True}])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_loaded_policy_takes_batches_of_observations(tmp_path, env, settings):
    if env == "CartPole-v1" and settings:
        pytest.skip("of continuous actions")
    policy = trained(tmp_path, env, normalize_obs=True, **settings)
    with contextlib.closing(gym.make_vec(env, num_envs=3)) as envs:
        seen, _ = envs.reset(seed=1)
        actions = policy(seen)
        assert actions.shape == envs.action_space.shape
        assert actions.dtype == envs.action_space.dtype
        envs.step(actions)
    for one, action in zip(seen, actions, strict=True):
        np.testing.assert_allclose(policy(one), action, atol=1e-6)
        np.testing.assert_array_equal(policy(one[None])[0], policy(one))
    assert policy(seen, rng=np.random.default_rng(0)).shape == actions.shape


def test_a_batch_may_be_of_dicts_and_choices(tmp_path):
    env = DictEnv()
    policy = trained(tmp_path, DictEnv)
    seen = [env.reset(seed=i)[0] for i in range(4)]
    batch = {key: np.stack([one[key] for one in seen]) for key in seen[0]}
    assert policy(batch).tolist() == [policy(one).tolist() for one in seen]
    policy = trained(tmp_path / "choices", IdentityEnv)
    assert policy([0, 1, 2, 1]).tolist() == [policy(i) for i in (0, 1, 2, 1)]


def test_a_recurrent_policy_remembers_each_env_of_a_batch_and_forgets_those_that_ended(tmp_path):
    policy = trained(tmp_path, TargetEnv, recurrent="gru")
    seen = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2, 1)

    def alone(rows):
        policy.reset()
        return [float(policy(row)[0]) for row in rows]

    expected = [alone(seen[:, 0]), [*alone(seen[:2, 1]), *alone(seen[2:, 1])]]
    policy.reset()
    found = []
    for t, batch in enumerate(seen):
        if t == 2:
            policy.reset([False, True])
        found.append(policy(batch)[:, 0])
    np.testing.assert_allclose(np.transpose(found), expected, atol=1e-6)
    with pytest.raises(ValueError, match="remembers 2 envs, got observations of 1"):
        policy(seen[0, 0])


def test_a_policy_that_was_trained_with_masks_acts_with_them_alone(tmp_path):
    policy = trained(tmp_path, partial(IdentityEnv, masked=True))
    with pytest.raises(ValueError, match="trained with action masks and must act with them"):
        policy(0)
    assert policy(0, [False, False, True]) == 2
    masks = np.eye(3, dtype=np.int8)[[2, 0, 1, 1]]
    assert policy([0, 1, 2, 0], masks).tolist() == [2, 0, 1, 1]
    trainer = PPOTrainer(**FAST)
    trainer.train_episode(IdentityEnv(masked=True))
    again = PPOTrainer()
    again.load(trainer.save(tmp_path / "trainer"))
    for one in (trainer, again):
        with pytest.raises(ValueError, match="trained with action masks"):
            one.select_action(0)
        assert one.select_action(0, mask=[0, 1, 0]).action == 1


class KindEnv(TargetEnv):
    """Shows a measurement, and a kind that is 0 in all of training."""

    observation_space = spaces.Dict({"x": TargetEnv.observation_space, "kind": spaces.Discrete(2)})

    def reset(self, **more):
        point, info = super().reset(**more)
        return {"x": point, "kind": 0}, info

    def step(self, action):
        point, *rest = super().step(action)
        return {"x": point, "kind": 0}, *rest


def test_choices_reach_a_network_with_normalised_observations_as_0_and_1(tmp_path):
    policy = trained(tmp_path, KindEnv, normalize_obs=True)
    choice = next(leaf for leaf in policy.rows.leaves if leaf.path == ("kind",))
    for kind in (0, 1):
        row = np.zeros((1, policy.rows.size), np.float32)
        policy.rows.encode_one({"x": [0.5], "kind": kind}, row[0])
        seen = policy.norm(row)[0]
        assert seen[choice.start : choice.stop].tolist() == [kind == 0, kind == 1]
        assert seen[0 if choice.start else -1] != 0.5
