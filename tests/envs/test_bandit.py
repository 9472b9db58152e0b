from collections import Counter

import pytest

from shoal.core.errors import ConfigError, EnvError
from shoal.envs.bandit import BanditConfig, BanditEnv


def test_the_arms_pay_what_is_stated_and_stand_in_either_order():
    """Chi-square with 1 degree of freedom; 10.8 is passed by chance once in 1000, and the seeds are fixed."""
    orders, wins = Counter(), 0
    n = 4000
    env = BanditEnv()
    for seed in range(n):
        observation, _ = env.reset(seed=seed)
        high = 1 if observation.startswith("1: dragon") else 2
        orders[high] += 1
        after, reward, terminated, _, info = env.step(high)
        assert terminated
        assert info["success"]
        assert reward in (0.0, 1.0)
        assert after == f"dragon: {reward} points"
        wins += reward == 1
        env.reset(seed=seed)
        after, reward, _, _, info = env.step(3 - high)
        assert (after, reward, info["success"]) == ("phoenix: 0.1 points", 0.1, False)
    assert sum((orders[arm] - n / 2) ** 2 / (n / 2) for arm in (1, 2)) < 10.8
    assert (wins - n / 4) ** 2 / (n / 4) + (wins - n / 4) ** 2 / (3 * n / 4) < 10.8


def test_envs_that_share_a_config_do_not_rename_each_others_arms():
    config = BanditConfig()
    envs = [BanditEnv(config) for _ in range(20)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    assert len({env.observe() for env in envs}) == 2
    for env in envs:
        projected = env.projection("<action>Dragon</action>").actions[0]
        assert env.observe().split("\n")[projected - 1].endswith("dragon")
    assert config == BanditConfig()


def test_a_pull_ends_the_episode_and_so_does_having_no_steps_left():
    env = BanditEnv()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(0)
    assert (reward, terminated, truncated, info["action_is_valid"]) == (0.0, False, True, False)
    with pytest.raises(EnvError, match="reset"):
        env.step(1)
    patient = BanditEnv(max_steps=3, invalid_penalty=-0.1)
    patient.reset(seed=0)
    assert patient.step(0)[1:4] == (-0.1, False, False)
    assert patient.step(2)[2]


def test_arms_can_be_renamed_but_not_into_nonsense():
    env = BanditEnv(lo_arm_name="Trader", hi_arm_name="Librarian", hi_arm_hiscore_prob=1.0)
    assert "Trader" in env.reset(seed=0)[0]
    assert env.observation_space.contains(env.observe())
    for projection in (BanditEnv.projection, env.projection):
        assert [projection(f"<action>{arm}</action>").actions for arm in "12"] == [(1,), (2,)]
    reward = env.step(env.projection("<action>librarian</action>").actions[0])[1]
    assert reward == 1.0
    for bad in ({"lo_arm_name": "Dragon"}, {"lo_arm_name": " "}, {"hi_arm_name": "1"}):
        with pytest.raises(ConfigError):
            BanditEnv(**bad)
    with pytest.raises(ConfigError):
        BanditEnv(hi_arm_hiscore_prob=1.5)
