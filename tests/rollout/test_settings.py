import numpy as np
import pytest
from omegaconf import OmegaConf

from shoal.core.errors import ConfigError
from shoal.rollout.factory import EnvGroups, EnvMix, EnvTag, VectorConfig, validate_environment_config
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.samplers.http import Patience
from shoal.rollout.samplers.sampler import Sampling
from shoal.rollout.samplers.settings import EngineConfig, ReplicaConfig, ServerConfig
from shoal.rollout.settings import ParallelConfig, RolloutSettings, rollout_config

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ParallelConfig, {"step_timeout": NAN}, "step_timeout must be positive, or null, got nan"),
        (ParallelConfig, {"request_timeout": INF}, "must be at most 1000000 seconds, or null, got inf"),
        (ParallelConfig, {"engine_timeout": 1e12}, "must be at most 1000000 seconds"),
        (
            ParallelConfig,
            {"backend": "thread"},
            "backend must be 'auto', 'serial', .* or 'ray', got 'thread'",
        ),
        (ParallelConfig, {"schedule": "gready"}, "schedule must be 'adaptive', 'greedy' or 'barrier'"),
        (ParallelConfig, {"max_batch": 2.5}, "max_batch: Expected `int`"),
        (ParallelConfig, {"max_deaths": True}, "max_deaths: Expected `int`"),
        (RolloutSettings, {"temperature": INF}, "temperature must be a finite number, got inf"),
        (RolloutSettings, {"max_turn": 0}, "max_turn must be at least 1, or null, got 0"),
        (RolloutSettings, {"max_tokens": "8"}, "max_tokens: Expected `int`"),
        (VectorConfig, {"backend": "proces"}, "backend must be 'auto'"),
        (VectorConfig, {"step_timeout": np.float32("inf")}, "step_timeout must be at most"),
        (EnvGroups, {"group_size": None}, "group_size: Expected `int`"),
        (EnvMix, {"tags": "Lake"}, "tags: Expected `array`"),
        (
            EnvTag,
            {"env_type": "bandit", "max_actions_per_traj": 0},
            "max_actions_per_traj must be at least 1",
        ),
        (PromptConfig, {"on_drift": "rise"}, "on_drift must be 'warn', 'raise' or 'ignore', got 'rise'"),
        (EngineConfig, {"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16', got 'float16'"),
        (ServerConfig, {"kind": "vlm"}, "kind must be 'auto', 'vllm'"),
        (ServerConfig, {"timeout": NAN}, "timeout must be positive, got nan"),
        (ReplicaConfig, {"retries": -1}, "retries must be at least 0, got -1"),
        (Patience, {"timeout": INF}, "timeout must be at most"),
        (Patience, {"max_backoff": NAN}, "max_backoff"),
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
