"""What an environment or a setting may not be, and what is said then."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from tests.train.ppo.ppo_envs import (
    FAST,
    BrokenEnv,
    CountingEnv,
    IdentityEnv,
    TargetEnv,
    assert_equal,
    weights,
)

from shoal.core.errors import ConfigError, DivergedError, EnvError, UnknownNameError
from shoal.train.ppo.checkpoint import list_checkpoints
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.run import PPORun, RunOptions
from shoal.train.ppo.trainer import PPOTrainer


def test_a_killed_worker_costs_time_and_nothing_else():
    settings = {**FAST, "n_steps": 16}

    def run(kill: bool) -> dict[str, np.ndarray]:
        with PPO("CartPole-v1", n_envs=4, seed=1, backend="process", num_workers=2, **settings) as ppo:
            for i, _ in enumerate(ppo.updates(64 * 8)):
                if kill and i == 3:
                    os.kill(ppo._experience.collector.envs.stats()["workers"][1]["pid"], signal.SIGKILL)
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
def test_an_update_that_diverges_makes_no_step_with_what_is_no_number_and_is_not_gone_on_with(path, tmp_path):
    with PPO(TargetEnv, n_envs=2, path=path, backend="serial", **{**FAST, "learning_rate": 1e30}) as ppo:
        with pytest.raises(DivergedError, match=r"iteration 0: .* NaN or infinite; no step was made with it"):
            ppo.learn(64)
        assert all(np.isfinite(value).all() for value in weights(ppo).values())
        for go_on in (lambda: ppo.learn(64), lambda: ppo.save(tmp_path)):
            with pytest.raises(ConfigError, match="an update ended halfway .* load the last checkpoint"):
                go_on()


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_envs": 0}, "n_envs must be at least 1, got 0"),
        ({"n_envs": 2.5}, "n_envs must be a whole number, got 2.5"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"backend": "proces"}, "no backend named 'proces'. Did you mean 'process'"),
        ({"start_method": "teleport"}, "no start method 'teleport'"),
        ({"memory_units": 32}, "memory_units=32 needs a core: recurrent='lstm' or 'gru'"),
        ({"sde_every": 4}, "sde_every=4 needs sde=True"),
        ({"learning_rat": 1}, "no PPO setting named 'learning_rat'. Did you mean 'learning_rate'"),
        ({"gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
        ({"device": "tpu"}, "device must be cpu, cuda, mps or auto, got 'tpu'"),
        ({"path": "magic"}, "path must be 'auto', 'compiled' or 'torch', got 'magic'"),
        ({"backend": "process", "num_workers": 0}, "needs at least one worker"),
        ({"backend": "serial", "num_workers": 2}, "'serial' has no workers, got num_workers=2"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"n_envs": True}, "n_envs must be a whole number, got True"),
        ({"n_steps": 16.0}, "n_steps: Expected `int`, got 16.0"),
        ({"hidden": (8.0,)}, r"hidden: Expected `int`, .*got \(8.0,\)"),
        ({"hidden": ()}, "hidden: Expected `array` of length >= 1"),
        ({"n_envs": 10**10}, "n_envs must be at most 2147483647, got 10000000000"),
        ({"frame_stack": 10**10}, "frame_stack must be at most 2147483647, got 10000000000"),
        ({"num_workers": 10**10}, "num_workers must be at most 2147483647, got 10000000000"),
        ({"lr_schedule": "liner"}, "lr_schedule must be 'constant', 'linear' or 'cosine', got 'liner'"),
        ({"activation": "gelu"}, "activation must be 'tanh' or 'relu', got 'gelu'"),
        ({"recurrent": "LSTM"}, "recurrent must be 'none', 'lstm' or 'gru', got 'LSTM'"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite number, got inf"),
        ({"log_std_init": float("nan")}, "log_std_init must be a finite number, got nan"),
        ({"adam_eps": -1e-5}, "adam_eps must be at least .*, got -1e-05"),
        ({"adam_eps": 1e-320}, "adam_eps must be at least 1.17.*e-38, got 1e-320"),
        ({"log_std_init": -1e300}, r"log_std_init must be at least -3.4.*e\+38, got -1e\+300"),
        ({"normalize_obs": "False"}, "normalize_obs: Expected `bool`, got 'False'"),
        ({"ent_coef": None}, "ent_coef: Expected `float`, got None"),
        ({"learning_rate": True}, "learning_rate: Expected `float`, got True"),
        ({"n_steps": 10**20}, "n_steps must be at most 2147483647, got 1000"),
        ({"hidden": (64, 10**10)}, "hidden must be at most 2147483647"),
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


def test_what_makes_no_env_is_refused():
    with pytest.raises(ConfigError, match=r"must make a gymnasium.Env, got int"):
        PPO(lambda: 3)


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
        (spaces.Box(-1, 1, (4,)), 1.0),
        (spaces.Box(-1, 1, (2, 2)), np.ones((1, 1))),
        (spaces.Discrete(3), 3),
    ],
)
def test_an_observation_that_is_not_of_the_space_is_refused(space, shown):
    expected = "env 0: an observation must be of " + re.escape(str(space))
    with pytest.raises(EnvError, match=expected):
        PPO(partial(Mistold, space, shown), preset="none", n_envs=1, n_steps=16, backend="serial").learn(16)
    with pytest.raises(EnvError, match=expected):
        PPOTrainer().train_episode(Mistold(space, shown))


@pytest.mark.parametrize("shown", [1.0, [1.0], np.ones(1), np.ones((1, 1))])
def test_the_one_number_of_an_observation_may_come_in_any_shape(shown):
    env = partial(Mistold, spaces.Box(-1, 1, (1,)), shown)
    assert PPO(env, preset="none", n_envs=1, n_steps=16, backend="serial").learn(16).log.n_episodes == 3


def test_an_environment_object_is_refused_with_the_remedy():
    with pytest.raises(
        TypeError, match=r"got the object .*: pass a function, such as lambda: gymnasium.make"
    ):
        PPO(gym.make("CartPole-v1"))
    with pytest.raises(
        ConfigError, match=r"PPO takes one argument without a name, .*PPO\('CartPole-v1'\), got"
    ):
        PPO("MlpPolicy", "CartPole-v1")


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_function_that_returns_one_env_for_all_is_refused(n_envs, backend):
    if backend == "process" and n_envs == 1:
        pytest.skip("the worker has a copy of its own")
    one = CountingEnv()
    workers = 1 if backend == "process" else None
    ppo = PPO(lambda: one, n_envs=n_envs, backend=backend, num_workers=workers, preset="none", **FAST)
    with ppo, pytest.raises((ConfigError, EnvError), match="returned the same environment object twice"):
        ppo.learn(32)


def test_a_name_that_a_module_has_not_is_told_apart_from_a_module_that_is_missing():
    here = "tests.train.ppo.ppo_envs"
    with pytest.raises(UnknownNameError, match=f"{here} was imported and has no Nope; it has .*IdentityEnv"):
        PPO(f"{here}:Nope")
    with pytest.raises(ConfigError, match="cannot import the environment 'nowhere:Env'"):
        PPO("nowhere:Env")
