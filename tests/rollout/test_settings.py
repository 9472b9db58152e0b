import re

import numpy as np
import pytest
from omegaconf import OmegaConf

from shoal.core.errors import ConfigError, EnvError
from shoal.rollout.factory import (
    EnvGroups,
    EnvMix,
    EnvTag,
    VectorConfig,
    make_environments,
    make_roles,
    validate_environment_config,
)
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.settings import ParallelConfig, RolloutSettings, rollout_config
from shoal.samplers.asking import RetryPolicy
from shoal.samplers.registry import EngineConfig, ReplicaConfig, ServerConfig
from shoal.samplers.sampler import Sampling
from shoal.samplers.tiny import TinyShape

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ParallelConfig, {"step_timeout": NAN}, "step_timeout must be positive, or null, got nan"),
        (ParallelConfig, {"backend": "threaded"}, "must be 'auto', 'serial', .* or 'ray', got 'threaded'"),
        (ParallelConfig, {"schedule": "gready"}, "schedule must be 'adaptive' or 'barrier', got 'gready'"),
        (ParallelConfig, {"max_batch": 2.5}, "max_batch: Expected `int`"),
        (ParallelConfig, {"max_deaths": True}, "max_deaths: Expected `int`"),
        (RolloutSettings, {"temperature": INF}, "temperature must be a finite number, got inf"),
        (RolloutSettings, {"parallel_n_jobs": 0}, "must be -1 .as many as pay. or at least 1, got 0"),
        (RolloutSettings, {"max_tokens": "8"}, "max_tokens must be a number or 'auto', got '8'"),
        (RolloutSettings, {"max_tokens": 10**20}, "max_tokens must be a whole number of 64 bits, got 1000"),
        (VectorConfig, {"backend": "proces"}, "backend must be 'auto'"),
        (VectorConfig, {"step_timeout": np.float32("inf")}, "step_timeout must be at most"),
        (EnvMix, {"tags": "Lake"}, "tags: Expected `array`"),
        (PromptConfig, {"on_drift": "rise"}, "on_drift must be 'warn', 'raise' or 'ignore', got 'rise'"),
        (EngineConfig, {"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16', got 'float16'"),
        (ServerConfig, {"kind": "vlm"}, "kind must be 'auto', 'vllm'"),
        (Sampling, {"temperature": INF}, "temperature must be 0 .* or positive, got inf"),
    ],
)
def test_settings_made_in_python_are_checked_as_those_of_yaml_are(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_numbers_of_numpy_and_whole_seconds_will_do():
    assert ParallelConfig(max_batch=np.int64(3), step_timeout=2, make_timeout=np.float32(3)).max_batch == 3


def test_yaml_names_the_whole_key():
    with pytest.raises(ConfigError, match=r"^agent_proxy\.parallel\.step_timeout must be at most"):
        rollout_config({"agent_proxy": {"parallel": {"step_timeout": INF}}})


@pytest.mark.parametrize("parts", [False, True])
def test_a_config_of_hydras_is_read_like_a_mapping(parts):
    plain = {
        "seed": 3,
        "custom_envs": {"lake": {"env_type": "frozen_lake", "env_config": {"desc": ["SF", "FG"]}}},
        "es_manager": {
            "train": {"env_groups": 2, "group_size": 1, "env_configs": {"tags": ["lake"], "n_groups": [1]}},
            "val": "${es_manager.train}",
        },
        "agent_proxy": {"max_turn": "${seed}", "format_penalty": 0.1, "prompt": {"history": 1}},
    }
    config = OmegaConf.create(plain)
    if parts:
        config = dict(config.items())
    checked = rollout_config(config)
    assert checked.es_manager.val.group_tags() == ("lake", "lake")
    assert checked.agent_proxy.max_turn == 3
    assert validate_environment_config(config).custom_envs["lake"].env_config == {"desc": ["SF", "FG"]}
    with pytest.raises(ConfigError, match="agent_proxy must be a mapping of settings, got None"):
        rollout_config({"agent_proxy": None})


def test_a_rollout_samples_as_its_settings_say_and_greedily_where_it_is_asked_to():
    settings = RolloutSettings(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=("x",))
    assert settings.sampling() == Sampling(5, 0.5, ("x",), 0.9, 3, 0.1)
    assert settings.sampling(greedy=True) == Sampling(5, 0.0, ("x",))


@pytest.mark.parametrize(
    ("tags", "shares", "found"),
    [
        ("ab", (), "aaaabbbb"),
        ("ab", (1, 3), "aabbbbbb"),
        ("ab", (3, 5), "aaabbbbb"),
        ("ab", (1, 2), "n_groups [1, 2] must sum to env_groups=8 or to a divisor of it, got a sum of 3"),
        ("ab", (8, 8), "got a sum of 16"),
        ("ab", (8,), "a positive number for each of the tags ['a', 'b'], got [8]"),
        ("ab", (0, 8), "a positive number for each of the tags ['a', 'b'], got [0, 8]"),
        ("abc", (), "n_groups [1, 1, 1] must sum to env_groups=8"),
    ],
)
def test_groups_are_spread_over_kinds_as_is_said(tags, shares, found):
    if found.startswith("a") and " " not in found:
        assert "".join(EnvGroups(8, 2, EnvMix(tuple(tags), shares)).group_tags()) == found
    else:
        with pytest.raises(ConfigError, match=re.escape(found)):
            EnvGroups(8, 2, EnvMix(tuple(tags), shares))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_sep": ""}, "action_sep must not be empty"),
        ({"prompt": {"mode": "append"}}, "prompt.mode is one for all envs: set agent_proxy.prompt.mode"),
        ({"prompt": {"frist": "x"}}, "prompt.frist"),
        ({"max_actions_per_turn": 0}, "max_actions_per_turn must be at least 1, got 0"),
        ({"max_actions_per_traj": 0}, "max_actions_per_traj must be at least 1"),
    ],
)
def test_a_kind_of_env_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EnvTag("bandit", **settings)


def mixed(**more):
    side = {"env_groups": 2, "group_size": 1, "env_configs": {"tags": ["lake"]}}
    return {
        "custom_envs": {"lake": {"env_type": "frozen_lake"}},
        "es_manager": {"train": side, "val": side},
        **more,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            mixed(custom_envs={}),
            "es_manager.train.env_configs.tags names 'lake', which is not in custom_envs.",
        ),
        (mixed(custom_envs={"lak": {"env_type": "bandit"}}), "not in custom_envs. Did you mean 'lak'"),
        (
            mixed(es_manager={"val": mixed()["es_manager"]["val"]}),
            "es_manager.train.env_configs.tags must name at",
        ),
        (
            mixed(use_parallel_envs=False, vector={"step_timeout": 1}),
            "vector.step_timeout needs use_parallel_envs",
        ),
        (mixed(custom_envs={"lake": {"env_type": "frozen_lak"}}), "custom_envs.lake: no env"),
    ],
)
def test_envs_that_do_not_fit_together_are_refused_before_any_is_played(config, message):
    with pytest.raises(ConfigError, match=message):
        validate_environment_config(config)


def test_turns_are_limited_by_the_least_of_what_is_said_and_several_actions_are_parted():
    kinds = {
        "env": EnvTag("frozen_lake", env_config={"max_steps": 9}),
        "tag": EnvTag("frozen_lake", 7, {"max_steps": 9}, max_actions_per_turn=2, action_sep=";"),
    }
    for most, found in ((None, [9, 7]), (8, [8, 7]), (5, [5, 5])):
        roles = make_roles(kinds, ["env", "tag", "env"], most)
        assert [roles[tag].max_turns for tag in ("env", "tag")] == found
    assert roles["env"].projection("<action>up;down</action>").valid is False
    assert len(roles["tag"].projection("<action>up;down</action>").actions) == 2
    assert not roles["tag"].projection("<action>up;down;up</action>").valid


def test_a_pool_that_lives_in_workers_has_nothing_to_step():
    train, _ = make_environments(mixed(), with_pools=False)
    for act in (train.pool.reset_some, train.pool.step_some):
        with pytest.raises(
            EnvError, match="live in rollout workers .use_parallel_rollout.: there is no pool"
        ):
            act([0], [0])
    train.pool.close()


def test_a_time_limit_is_above_nothing_and_no_longer_than_can_be_waited_for():
    for seconds in (1e-9, 1e6):
        assert ParallelConfig(step_timeout=seconds).step_timeout == seconds
    for wrong, message in (
        (0, "must be positive, or null, got 0"),
        (1e6 + 1, "must be at most 1000000 seconds, or"),
    ):
        for name in ("step_timeout", "make_timeout", "episode_timeout", "engine_timeout"):
            with pytest.raises(ConfigError, match=f"{name} {message}"):
                ParallelConfig(**{name: wrong})
    with pytest.raises(ConfigError, match="timeout must be positive, got 0"):
        ServerConfig(timeout=0)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (ParallelConfig, dict.fromkeys(("engine_retries", "engine_restarts", "env_retries"), 0)),
        (ParallelConfig, {"max_batch": 1, "max_deaths": 1, "episodes_at_once": 1}),
        (ServerConfig, {"concurrency": 1, "retries": 0, "context": 1}),
        (ReplicaConfig, {"count": 1, "retries": 0}),
        (EngineConfig, dict.fromkeys(("width", "layers", "heads", "context", "threads", "max_batch"), 1)),
        (EnvGroups, {"env_groups": 1, "group_size": 1}),
        (RolloutSettings, {"max_turn": 1, "max_tool_turns": 1}),
        (TinyShape, dict.fromkeys(("width", "layers", "heads", "context"), 1)),
        (VectorConfig, {"num_workers": 1}),
        (RetryPolicy, {"retries": 0, "backoff": 0}),
    ],
)
def test_numbers_may_be_as_small_as_makes_sense_and_no_smaller(kind, least):
    assert all(getattr(kind(**least), name) == number for name, number in least.items())
    for name, number in least.items():
        with pytest.raises(ConfigError, match=f"{name} must be at least {number}.*, got {number - 1}"):
            kind(**{name: number - 1})
