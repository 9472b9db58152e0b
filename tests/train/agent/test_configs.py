"""Every config that comes with shoal plays and learns, with a small model in the place of a large one."""

import importlib.util
import queue
import threading

import pytest
from tests.train.agent.tiny_model import write_tiny_model

from shoal.core.errors import ConfigError
from shoal.envs.catalogue import names
from shoal.train.agent.config import AgentConfig, compose_config, config_names
from shoal.train.agent.trainer import AgentTrainer

TINY = ["engine.width=16", "engine.layers=1", "engine.heads=2"]
SMALL = [
    "warmup.batch_size=4",
    "es_manager.train.env_groups=4",
    "es_manager.train.group_size=2",
    "es_manager.val.env_groups=12",
    "agent_proxy.max_turn=2",
    "agent_proxy.max_tokens=4",
    "agent_proxy.parallel_n_jobs=2",
    "algorithm.filter_groups.enable=false",
    "algorithm.entropy_coef=0.01",  # a gradient even where no member of a group succeeds
    "trainer.iterations=1",
    "trainer.tensorboard=false",
    "use_parallel_envs=false",
]
ENVS = names()  # before other tests register theirs
NEEDS = {"reasoning_gym": "reasoning_gym", "textarena": "textarena", "textworld": "textworld"}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_model(folder)
    return folder


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
    return f"http://127.0.0.1:{ready.get(timeout=30)}"


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_config_makes_an_update(name, small_model, tmp_path, request):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    config = compose_config(name)
    steps = min(1, config.warmup.steps)
    tiny = config.engine.name == "tiny"
    engine = (
        TINY if tiny else [f"engine.model={small_model}", "engine.train_last_layers=1", "engine.threads=1"]
    )
    overrides = [*SMALL, *engine, f"warmup.steps={steps}", f"run_dir={tmp_path / 'run'}"]
    if name == "openenv":
        overrides.append(f"custom_envs.OpenEnv.env_config.url={request.getfixturevalue('server_url')}")
    with AgentTrainer(compose_config(name, overrides)) as trainer:
        start, row = trainer.train()
    assert ("warmup_loss" in start) == (config.warmup.steps > 0)
    assert row["episodes"] == 8
    assert row["failed_episodes"] == 0
    assert row["grad_norm"] > 0
    assert "heldout_success" in row


def test_there_is_a_config_for_every_env():
    assert set(ENVS) <= set(config_names())


@pytest.mark.parametrize("name", [name for name in ENVS if name != "openenv"])
def test_the_config_of_an_env_plays_that_env_on_held_out_episodes_too(name):
    config = compose_config(name)
    for groups in (config.es_manager.train, config.es_manager.val):
        assert {config.custom_envs[tag].env_type for tag in groups.env_configs.tags} == {name}


@pytest.mark.parametrize(
    "name", [n for n in config_names() if compose_config(n).engine.name == "huggingface"]
)
def test_a_config_with_a_pretrained_model_says_how_to_get_it(name):
    from importlib import resources

    text = resources.files("shoal.configs").joinpath(f"{name}.yaml").read_text()
    assert "shoal model get smollm2" in text
    warmup = compose_config(name).warmup
    assert warmup.steps <= 20, "pretrained: it needs no more than the form of an answer"
    assert warmup.expert == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_of_step_advantages_is_a_number(value):
    settings = {"algorithm": {"adv_estimator": "gigpo", "step_advantage_weight": value}}
    with pytest.raises(ConfigError, match="step_advantage_weight must be a finite number"):
        AgentConfig.read(settings)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_a_replica_is_given_some_time(value):
    with pytest.raises(ConfigError, match="timeout must be positive, or null"):
        AgentConfig.read({"engine": {"name": "ray", "replicas": {"timeout": value}}})
