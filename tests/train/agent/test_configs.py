"""Every config that comes with shoal plays and learns, with a small model in the place of a large one."""

import functools
import importlib.util
import math
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.envs.tool_server import served
from tests.train.agent.algorithms.test_conflicts import read

from shoal.core.configuration import to_mapping
from shoal.core.errors import ConfigError
from shoal.envs.catalogue import names
from shoal.rollout.factory import EnvGroups, EnvMix, EnvTag, EsManager
from shoal.rollout.settings import ParallelConfig
from shoal.train.agent.config import (
    AgentConfig,
    AgentProxy,
    Algorithm,
    Critic,
    EngineConfig,
    KLPenalty,
    RewardNormalization,
    compose_config,
    config_names,
)
from shoal.train.agent.trainer import AgentTrainer

TINY = ["engine.width=16", "engine.layers=1", "engine.heads=2"]
SMALL = [
    "warmup.batch_size=4",
    "es_manager.train.env_groups=4",
    "es_manager.train.group_size=2",
    "es_manager.val.env_groups=12",
    "agent_proxy.max_turn=2",
    "agent_proxy.parallel_n_jobs=2",
    "algorithm.filter_groups.enable=false",
    "algorithm.entropy_coef=0.01",
    "algorithm.entropy_target=100",  # a gradient even where no member of a group succeeds
    "trainer.iterations=1",
    "trainer.tensorboard=false",
    "use_parallel_envs=false",
]
ENVS = names()  # before other tests register theirs
shipped = functools.cache(compose_config)
NEEDS = {name: name for name in ("reasoning_gym", "textarena", "textworld", "gem", "aviary", "pettingzoo")}


@pytest.fixture
def server_url():
    from shoal.envs import make
    from shoal.envs.adapters.openenv_server import serve

    ready: queue.Queue = queue.Queue()
    serving = threading.Thread(
        target=serve,
        args=("frozen_lake", lambda: make("frozen_lake")),
        kwargs={"port": 0, "on_ready": ready.put},
        daemon=True,
    )
    serving.start()
    return f"http://127.0.0.1:{ready.get(timeout=200)}"


@pytest.fixture
def tools_url():
    with served() as address:
        yield address


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_config_makes_an_update(name, small_model, tmp_path, request):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    config = shipped(name)
    auto = config.warmup.steps == "auto"
    steps = "auto" if auto else min(1, config.warmup.steps)
    tiny = config.engine.name == "tiny"
    real = [f"engine.model={small_model}", "engine.train_last_layers=1", "engine.threads=1"]
    most = 64 if name in ("aviary", "openenv_tools") else 16  # as a call of a tool has
    engine = [*(TINY if tiny else real), f"agent_proxy.max_tokens={most}"]
    groups = sum(config.es_manager.train.env_configs.n_groups) or 4
    engine.append(f"es_manager.train.env_groups={groups}")
    overrides = [*SMALL, *engine, f"warmup.steps={steps}", f"run_dir={tmp_path / 'run'}"]
    if config.algorithm.critic.warmup:
        overrides.append("algorithm.critic.warmup=0")  # else the policy stands still
    if name == "openenv":
        overrides.append(f"custom_envs.OpenEnv.env_config.url={request.getfixturevalue('server_url')}")
    if name == "openenv_tools":
        overrides.append(f"custom_envs.OpenEnvTools.env_config.url={request.getfixturevalue('tools_url')}")
    with AgentTrainer(compose_config(name, overrides)) as trainer:
        start, row = trainer.train()
    assert ("probe_valid_actions" in start) == auto
    assert auto or ("warmup_loss" in start) == (steps > 0)
    assert row["episodes"] == 2 * groups
    assert row["failed_episodes"] == 0
    critic = config.algorithm.adv_estimator.endswith("gae")
    assert row["grad_norm"] > 0 or (critic and row["success"] == 0)  # without any reward nothing pulls
    assert "heldout_success" in row


def test_there_is_a_config_for_every_env():
    assert set(ENVS) - {"program"} <= set(config_names())  # a program is yours


@pytest.mark.parametrize("name", [name for name in ENVS if name not in ("openenv", "program")])
def test_the_config_of_an_env_plays_that_env_on_held_out_episodes_too(name):
    config = shipped(name)
    for groups in (config.es_manager.train, config.es_manager.val):
        assert {config.custom_envs[tag].env_type for tag in groups.env_configs.tags} == {name}


def test_a_config_with_a_pretrained_model_says_how_to_get_it():
    from importlib import resources

    configs = {name: shipped(name) for name in config_names()}
    pretrained = {n: c.warmup for n, c in configs.items() if c.engine.name == "huggingface"}
    assert pretrained
    for name, warmup in pretrained.items():
        text = resources.files("shoal.configs").joinpath(f"{name}.yaml").read_text()
        assert "shoal model get smollm2" in text, name
        assert warmup.steps == "auto" or warmup.steps <= 20, (
            f"{name} is pretrained: it needs no more than the form of an answer"
        )
        assert warmup.expert == 0, name


def test_a_count_beyond_64_bits_is_named_and_a_seed_may_be():
    for path in ("engine.width", "engine.threads", "es_manager.train.group_size", "agent_proxy.max_turn"):
        with pytest.raises(ConfigError, match=f"{path.split('.')[-1]} must be a whole number of 64"):
            read(f"{path}={10**20}")
    assert read(f"seed={10**20}").seed == 10**20


MADE_IN_PYTHON = {
    "algorithm.lr_schedule must be": {"algorithm": Algorithm(lr_schedule="linaer")},
    "algorithm.kl.estimator must be": {"algorithm": Algorithm(kl=KLPenalty(0.1, "k4"))},
    "algorithm.critic.whitening must be": {"algorithm": Algorithm(critic=Critic(whitening="n"))},
    "algorithm.dual_clip must be a finite number, got inf": {"algorithm": Algorithm(dual_clip=math.inf)},
    "seed: Expected `int`": {"seed": 0.5},
    "algorithm must be Algorithm settings": {"algorithm": {"epochs": 2}},
    "custom_envs.lake must be EnvTag settings": {"custom_envs": {"lake": {"env_type": "frozen_lake"}}},
}


@pytest.mark.parametrize("message", MADE_IN_PYTHON)
def test_what_a_file_may_not_say_a_config_made_in_python_may_not_either(message):
    with pytest.raises(ConfigError, match=message):
        AgentConfig(**MADE_IN_PYTHON[message])


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ParallelConfig, {"step_timeout": math.inf}, "step_timeout must be at most"),
        (ParallelConfig, {"backend": "threads"}, "backend must be"),
        (
            AgentProxy,
            {"reward_normalization": RewardNormalization("group")},
            "reward_normalization.grouping must be",
        ),
        (EngineConfig, {"name": "huggingface", "model": "m", "dtype": "float16"}, "dtype must be"),
        (EnvTag, {"env_type": "frozen_lake", "max_actions_per_traj": 2.5}, "max_actions_per_traj: Expected"),
    ],
)
def test_parts_of_a_config_are_held_to_it_when_they_are_made(kind, given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        kind(**given)


def test_a_config_made_in_python_takes_what_numpy_counts():
    config = AgentConfig(seed=np.int64(3), algorithm=Algorithm(gamma=np.float32(0.5), epochs=np.int32(2)))
    assert config.comparable()["seed"] == 3
    assert [type(x) for x in (config.seed, config.algorithm.gamma, config.algorithm.epochs)] == [
        int,
        float,
        int,
    ]
    # what an env takes is its own
    tag = EnvTag("frozen_lake", env_config={"kind": EnvTag, "of": [1], "limit": math.inf})
    assert AgentConfig(custom_envs={"lake": tag}).custom_envs["lake"] is tag


def test_a_hydra_app_of_the_users_own_finds_itself_again(tmp_path):
    from hydra import compose, initialize_config_dir

    (tmp_path / "app.yaml").write_text("mine: 2\nrate: 1\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert compose_config("demo").engine.name == "tiny"
        with pytest.raises(ConfigError):
            compose_config("demo", ["no.such.setting=1"])
        assert dict(compose("app")) == {"mine": 2, "rate": 1}


def test_configs_are_composed_by_several_threads_at_once():
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda seed: compose_config("demo", [f"seed={seed}"]).seed, range(6)))
    assert found == list(range(6))


@pytest.mark.parametrize("base", ["base", "demo", "demo-bandit", "smollm2", "smollm2-bandit"])
def test_who_names_the_envs_of_training_alone_is_evaluated_on_them(base, tmp_path):
    lines = [
        f"defaults: [{base}, _self_]",
        "custom_envs: {Restock: {env_type: countdown}, Other: {env_type: bandit}}",
        "es_manager: {train: {env_configs: {tags: [Restock]}}}",
    ]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    followed = compose_config("mine", [], tmp_path).es_manager.val
    assert set(followed.group_tags()) == {"Restock"}
    assert followed.env_groups == shipped(base).es_manager.val.env_groups
    named = compose_config("mine", ["es_manager.val.env_configs.tags=[Other]"], tmp_path).es_manager.val
    assert set(named.group_tags()) == {"Other"}
    again = AgentConfig.read(to_mapping(compose_config("mine", [], tmp_path)))
    assert again.es_manager.val == followed


@pytest.mark.parametrize(
    ("shares", "groups", "expected"),
    [
        ((), 6, {"a": 2, "b": 2, "c": 2}),
        ((1, 1, 3), 10, {"a": 2, "b": 2, "c": 6}),
        ((), 64, {"a": 22, "b": 21, "c": 21}),
        ((1, 1, 3), 12, {"a": 3, "b": 2, "c": 7}),  # of 2.4, 2.4 and 7.2
        ((1, 1, 18), 5, {"a": 1, "b": 1, "c": 3}),  # each at least once
    ],
)
def test_held_out_kinds_have_the_proportions_of_training(shares, groups, expected):
    mix = EnvMix(("a", "b", "c"), shares)
    manager = EsManager(EnvGroups(60, 8, mix), EnvGroups(groups, 1))
    assert Counter(manager.val.group_tags()) == expected
    with pytest.raises(ConfigError, match=r"val\.env_groups=2 must be at least 3"):
        EsManager(EnvGroups(60, 8, mix), EnvGroups(2, 1))
