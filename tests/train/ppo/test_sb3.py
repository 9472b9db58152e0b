"""Stable-Baselines3's own archives, made here by itself, act in shoal as they do there; hostile ones run nothing."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.train.ppo.sb3 import load_sb3_policy

sb3 = pytest.importorskip("stable_baselines3")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
Logger = pytest.importorskip("stable_baselines3.common.logger").Logger


def saved(tmp_path, env_id, normalize=False, **kwargs):
    venv = vec_env.DummyVecEnv([lambda: gym.make(env_id)])
    venv = vec_env.VecNormalize(venv) if normalize else venv
    sizes = {"n_steps": 32, "batch_size": 32, "n_epochs": 1}
    model = sb3.PPO("MlpPolicy", venv, device="cpu", seed=0, policy_kwargs=kwargs or None, **sizes)
    model.set_logger(Logger(None, []))  # its own one makes a folder beside those of others, and leaves it
    model.learn(64)
    model.save(tmp_path / "model.zip")
    return model, venv, tmp_path / "model.zip"


def observations(env, n=50):
    env.observation_space.seed(0)
    return [np.clip(env.observation_space.sample(), -5, 5) for _ in range(n)]


@pytest.mark.parametrize(("env_id", "kwargs"), [
    ("CartPole-v1", {}), ("Pendulum-v1", {}),
    ("CartPole-v1", {"activation_fn": torch.nn.ReLU, "net_arch": [32, 16, 8]}),
])  # fmt: skip
def test_a_policy_acts_as_it_did_there(tmp_path, env_id, kwargs):
    model, _, path = saved(tmp_path, env_id, **kwargs)
    env = gym.make(env_id)
    policy = load_sb3_policy(path, env)
    for seen in observations(env):
        np.testing.assert_allclose(policy(seen), model.predict(seen, deterministic=True)[0], atol=1e-5)
    assert policy.env == env_id
    rows = torch.from_numpy(np.stack(observations(env)))
    values = model.policy.predict_values(rows).detach()[:, 0]
    torch.testing.assert_close(policy.module().value(rows).detach(), values, rtol=1e-5, atol=1e-5)


def test_one_trained_under_vec_normalize_needs_its_statistics(tmp_path):
    model, venv, path = saved(tmp_path, "Pendulum-v1", normalize=True)
    env = gym.make("Pendulum-v1")
    with pytest.raises(ConfigError, match="was trained under VecNormalize: give its statistics"):
        load_sb3_policy(path, env)
    np.savez(tmp_path / "statistics.npz", mean=venv.obs_rms.mean, var=venv.obs_rms.var)
    policy = load_sb3_policy(path, env, statistics=tmp_path / "statistics.npz")
    for seen in observations(env):
        expected = model.predict(venv.normalize_obs(seen), deterministic=True)[0]
        np.testing.assert_allclose(policy(seen), expected, atol=1e-5)
    np.savez(tmp_path / "short.npz", mean=np.zeros(2), var=np.ones(2))
    with pytest.raises(DataError, match="must have 3 numbers in mean and var, got 2 and 2"):
        load_sb3_policy(path, env, statistics=tmp_path / "short.npz")
    np.savez(tmp_path / "objects.npz", mean=np.array([{}], object), var=np.ones(3))
    with pytest.raises(DataError, match="must be an npz with mean and var"):
        load_sb3_policy(path, env, statistics=tmp_path / "objects.npz")


def test_policies_of_other_kinds_and_environments_are_refused(tmp_path):
    _, _, path = saved(tmp_path, "CartPole-v1")
    with pytest.raises(
        ConfigError, match="reads 4 numbers and gives 2; this environment shows 3 and takes 1"
    ):
        load_sb3_policy(path, gym.make("Pendulum-v1"))
    _, _, path = saved(tmp_path, "CartPole-v1", activation_fn=torch.nn.GELU)
    with pytest.raises(ConfigError, match=r"activations must be one of Tanh, ReLU, got .*GELU"):
        load_sb3_policy(path, gym.make("CartPole-v1"))
    _, _, path = saved(tmp_path, "CartPole-v1", net_arch={"pi": [8], "vf": [16]})
    with pytest.raises(ConfigError, match="actor and critic must have layers of the same sizes"):
        load_sb3_policy(path, gym.make("CartPole-v1"))


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["policy", "data"])
def test_a_pickle_in_the_archive_is_not_run(tmp_path, where):
    harm = pickle.dumps(Harm(tmp_path / "harmed"))
    buffer = io.BytesIO()
    torch.save({"action_net.weight": torch.zeros(2, 4)}, buffer)
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps({}) if where == "policy" else harm)
        archive.writestr("policy.pth", harm if where == "policy" else buffer.getvalue())
    with pytest.raises(DataError):
        load_sb3_policy(tmp_path / "model.zip", gym.make("CartPole-v1"))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("damage", ["empty", "text", "no policy"])
def test_what_is_no_archive_is_named(tmp_path, damage):
    path = tmp_path / "model.zip"
    if damage == "no policy":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data", "{}")
    else:
        path.write_bytes(b"" if damage == "empty" else b"nonsense")
    with pytest.raises(DataError, match=r"model.zip is no model that Stable-Baselines3 saved"):
        load_sb3_policy(path, gym.make("CartPole-v1"))
