"""Promises that all text environments share, tried on every registered one."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from tests.envs.named_envs import NEEDED

import shoal.envs
from shoal import make_vec
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.bandit import BanditConfig, BanditEnv
from shoal.envs.catalogue import ADAPTERS, BUILT_IN, env_class
from shoal.envs.text import build_config

NAMES = sorted(BUILT_IN)


def play(name: str, seed: int = 0, episodes: int = 3) -> str:
    """Every byte that some episodes of random available actions show, as a digest."""
    env = shoal.envs.make(name)
    choose = random.Random(seed)
    digest = hashlib.sha256()
    for episode in range(episodes):
        observation, info = env.reset(seed=seed + episode)
        over = False
        while not over:
            words = info["available_actions"]
            word = choose.choice(words) if words else "7"
            action = env.projection(f"<action>{word}</action>").actions[0]
            observation, reward, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            digest.update(repr((observation, reward, terminated, truncated, info)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_finds_nothing_wrong(name):
    check_env(shoal.envs.make(name), skip_render_check=True)


@pytest.fixture(scope="module")
def elsewhere():
    """What each env shows in a process of its own, under another hash seed."""
    code = "import json; from tests.envs.test_text import NAMES, play"
    code += "; print(json.dumps({name: play(name) for name in NAMES}))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bytes_under_any_hash_seed(name, elsewhere):
    assert elsewhere[name] == play(name)


def test_the_same_seed_gives_the_same_bytes_in_threads():
    jobs = [(name, seed) for name in NAMES for seed in (0, 50)]
    expected = [play(*job) for job in jobs]
    assert len(set(expected)) == len(jobs)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(play, *zip(*jobs * 2, strict=True))) == expected * 2


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_is_another_episode(name):
    env = shoal.envs.make(name)
    assert len({env.reset(seed=seed)[0] for seed in range(20)}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_after_the_end_or_before_the_start_raises(name):
    env = shoal.envs.make(name)
    with pytest.raises(EnvError, match="never started"):
        env.step(env.invalid_action)
    env.reset(seed=1)
    over = False
    while not over:
        _, _, terminated, truncated, info = env.step(env.invalid_action)
        over = terminated or truncated
        assert not info["action_is_valid"]
    assert terminated != truncated
    assert info["step"] == env.config.max_steps
    with pytest.raises(EnvError, match="over"):
        env.step(env.invalid_action)


@pytest.mark.parametrize("name", NAMES)
def test_info_always_has_the_same_keys_and_reproduces_the_episode(name):
    env = shoal.envs.make(name)
    observation, info = env.reset()
    wanted = {"success", "won", "action_is_valid", "action_is_effective", "step", "seed", "available_actions"}
    assert wanted <= info.keys()
    again, _ = shoal.envs.make(name).reset(seed=info["seed"])
    assert again == observation
    _, later = env.reset()
    assert later["seed"] != info["seed"]
    step = env.step(env.invalid_action)[4]
    assert wanted <= step.keys()


@pytest.mark.parametrize("name", NAMES)
def test_an_env_survives_pickling_in_the_middle_of_an_episode(name):
    env = shoal.envs.make(name)
    env.reset(seed=5)
    twin = pickle.loads(pickle.dumps(env))
    for one in (env, twin):
        one.step(one.invalid_action)
    assert twin.observe() == env.observe()
    assert twin.anchor() == env.anchor()


@pytest.mark.parametrize("name", NAMES)
def test_actions_outside_the_space_are_refused(name):
    env = shoal.envs.make(name)
    env.reset(seed=0)
    for action in (99, -1, 1.5, None, True, [1], np.array([1, 2])):
        with pytest.raises(EnvError, match="action must be"):
            env.step(action)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_checked_by_name(name):
    with pytest.raises(ConfigError, match="Did you mean 'max_steps'"):
        shoal.envs.make(name, max_step=3)
    with pytest.raises(ConfigError, match="render_mode"):
        shoal.envs.make(name, render_mode="smell")
    config = env_class(name).Config()
    with pytest.raises(ConfigError, match="not both"):
        env_class(name)(config, max_steps=3)


@pytest.mark.parametrize("name", [*BUILT_IN, *ADAPTERS])
def test_no_setting_is_nan_infinite_or_more_than_a_reward_can_be(name):
    kind = env_class(name).Config
    needed = NEEDED.get(name, {})
    fractions = [item.name for item in dataclasses.fields(kind) if "float" in str(item.type)]
    assert "invalid_penalty" in fractions or name == "program"
    assert fractions
    for setting in fractions:
        for value in (np.nan, np.inf, -np.inf, 1e39):
            with pytest.raises(ConfigError, match=rf"\b{setting} must be"):
                build_config(kind, {**needed, setting: value})
        if setting.endswith("_seconds"):
            with pytest.raises(ConfigError, match=rf"{setting} must be above 0"):
                build_config(kind, {**needed, setting: 0.0})
    with pytest.raises(ConfigError, match="max_steps must be a whole number of at least 1, got 0"):
        build_config(kind, {**needed, "max_steps": 0})


@pytest.mark.parametrize("seed", [1.7, 2.0, "3", np.True_], ids=repr)
def test_a_seed_that_is_no_whole_number_is_refused_and_the_episode_goes_on(seed):
    env = BanditEnv()
    env.reset(seed=1)
    with pytest.raises(TypeError):
        env.reset(seed=seed)
    env.step(1)


@pytest.mark.parametrize("seed", [3, np.int64(3)], ids=repr)
def test_every_kind_of_whole_number_is_the_same_seed(seed):
    env = BanditEnv()
    assert env.reset(seed=seed) == BanditEnv().reset(seed=3)
    assert type(env.reset(seed=seed)[1]["seed"]) is int
    assert env.reset(seed=2**100)[1]["seed"] == 2**100


def test_where_no_world_could_be_made_there_is_no_episode_to_be_stepped():
    class Failing(BanditEnv):
        def _start(self, rng):
            if self._seed == 2:
                raise OSError("the cards are gone")
            super()._start(rng)

    env = Failing()
    env.reset(seed=1)
    with pytest.raises(OSError, match="cards"):
        env.reset(seed=2)
    with pytest.raises(EnvError, match=r"reset\(\) first"):
        env.step(1)


@pytest.mark.parametrize("which", ["terminated", "truncated", "success", "valid", "reward"])
def test_a_step_in_words_is_refused(which):
    class Wordy(BanditEnv):
        def _advance(self, action):
            return super()._advance(action)._replace(**{which: "False"})

    env = Wordy()
    env.reset(seed=1)
    wanted = "the reward must be a number" if which == "reward" else f"{which} must be True or False"
    with pytest.raises(EnvError, match=f"{wanted}, got 'False'"):
        env.step(1)


@pytest.mark.parametrize("name", NAMES)
def test_an_env_that_was_closed_has_no_episode_to_be_stepped(name):
    env = shoal.envs.make(name)
    env.reset(seed=0)
    env.close()
    with pytest.raises(EnvError, match=r"reset\(\) first"):
        env.step(env.invalid_action)


def test_the_config_of_another_env_is_refused():
    for config in (BanditConfig(), {"max_steps": 3}):
        with pytest.raises(ConfigError, match="config must be a CountdownConfig, got"):
            shoal.envs.make("countdown", config=config)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_the_words_that_an_env_offers_are_actions_of_its_step(backend):
    shown = []
    with contextlib.closing(make_vec("frozen_lake", 2, backend=backend)) as envs:
        for actions in (np.array([1, 4]), ["Left", " up"], np.array(["left", "Up"])):
            envs.reset(seed=0)
            observations, rewards, *_ = envs.step(actions)
            shown.append((tuple(observations), rewards.tolist()))
    assert shown == [shown[0]] * 3
    env = shoal.envs.make("bandit", hi_arm_name="dragon")
    env.reset(seed=0)
    with pytest.raises(EnvError, match="or one of .*dragon.*; got 'lion'"):
        env.step("lion")
    assert env.step("Dragon")[-1]["success"]
