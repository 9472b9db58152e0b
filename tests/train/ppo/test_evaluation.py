"""Evaluations: apart from training, and as strict about the environment."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from tests.train.ppo.ppo_envs import (
    FAST,
    BrokenEnv,
    CountingEnv,
    IdentityEnv,
    TargetEnv,
    assert_equal,
    weights,
)

from shoal.core.errors import ConfigError, EnvError
from shoal.train.ppo.ppo import PPO


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


class MaskedLate(IdentityEnv):
    """Gives the masks of `at`, by step of the episode; None gives none."""

    at: ClassVar[dict] = {}

    def _info(self):
        mask = self.at.get(self.t, np.ones(3, bool))
        return {} if mask is None else {"action_mask": np.asarray(mask)}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([0, 0, 0], "evaluation episode 0, step 2: the action mask allows no action"),
        ([1, 0], "must have 3 entries, one per action, got 2"),
        (None, "but not this time; give it at every step"),
    ],
)
def test_an_evaluation_examines_masks_as_a_rollout_does(monkeypatch, mask, message):
    with PPO(MaskedLate, n_envs=2, backend="serial", **FAST) as ppo:
        assert ppo.evaluate(1).lengths == [16]
        monkeypatch.setattr(MaskedLate, "at", {2: mask})
        with pytest.raises(EnvError, match=message):
            ppo.evaluate(1)


def test_an_env_that_fails_in_evaluation_is_named_as_in_a_rollout():
    with PPO(BrokenEnv, env_kwargs={"what": "late error"}, n_envs=2, backend="serial", **FAST) as ppo:
        with pytest.raises(
            EnvError, match="evaluation failed in episode 0, step 89, action .*the plug was pulled"
        ):
            ppo.evaluate(1)
        for episodes, message in ((2.5, "a whole number, got 2.5"), (0, "at least 1, got 0")):
            with pytest.raises(ConfigError, match=f"episodes must be {message}"):
                ppo.evaluate(episodes)


class PaysArrays(CountingEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


def test_a_reward_may_be_an_array_of_one_number_in_evaluation_too():
    with PPO(PaysArrays, n_envs=2, backend="serial", **FAST) as ppo:
        assert ppo.learn(64).evaluate(1).mean == ppo.log.mean_reward == 5.0


class InWords(CountingEnv):
    """Pays, or ends, in words."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        observation, reward, *_, info = super().step(action)
        ends = self.what == "end"
        return observation, reward if ends else str(reward), "False" if ends else False, False, info


@pytest.mark.parametrize(
    ("what", "message"),
    [("reward", "reward must be .*, got '1.0'"), ("end", "terminated must be True or False, got 'False'")],
)
def test_rewards_and_ends_in_words_are_refused_in_evaluation_as_in_a_rollout(what, message):
    with PPO(partial(InWords, what), preset="none", n_envs=2, backend="serial", **FAST) as ppo:
        for play in (partial(ppo.learn, 64), partial(ppo.evaluate, 1)):
            with pytest.raises(EnvError, match=message):
                play()


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_an_evaluation_examines_numbers_as_a_rollout_does(what):
    env = partial(BrokenEnv, what)
    ppo = PPO(env, preset="none", n_envs=2, backend="serial", **FAST)
    with ppo, pytest.raises(EnvError, match=f"evaluation episode 0, step 1[12].*{what} must be finite"):
        ppo.evaluate(1)


def test_masks_that_begin_after_the_reset_are_refused(monkeypatch):
    monkeypatch.setattr(MaskedLate, "at", {0: None})
    with pytest.raises(ConfigError, match="at a step, but not at the reset before"):
        PPO(MaskedLate, n_envs=2, backend="serial", **FAST)
