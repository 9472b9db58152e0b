"""`PPOTrainer`: PPO in the caller's loop."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.train.ppo.ppo_envs import (
    FAST,
    CountingEnv,
    IdentityEnv,
    TargetEnv,
    assert_equal,
)

from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import derive_seed
from shoal.train.ppo import ppo as ppo_module
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO
from shoal.train.ppo.trainer import PPOTrainer
from shoal.vector import ParallelEnv


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
    def play(made):
        trainer = PPOTrainer(seed=0, **FAST)
        with contextlib.closing(made) as envs:
            for _ in range(4):
                metrics = trainer.train_episode_vectorized(envs)
        assert metrics["n_completed_episodes"] == 8  # 32 steps, episodes of 16, 4 envs
        return trainer.agent.state()[0]

    fns = [IdentityEnv] * 4
    alone = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    assert_equal(play(ParallelEnv(fns, num_workers=2)), play(alone))


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
