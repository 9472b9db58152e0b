"""A model that answers in the wrong form is warmed up without being asked to, and one that answers well is not."""

import logging

import pytest
from safetensors.numpy import load_file

from shoal.core.errors import ConfigError, DataError
from shoal.train.agent.config import compose_config
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer

SMALL = [
    "engine.train_last_layers=1", "engine.threads=1", "warmup.batch_size=4", "trainer.iterations=1",
    "trainer.tensorboard=false", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "agent_proxy.max_turn=3", "use_parallel_envs=false",
]  # fmt: skip


def start(folder, model, *overrides, name="smollm2"):
    """Row 0 of a run, and the bytes of its first checkpoint."""
    config = compose_config(name, [*SMALL, f"engine.model={model}", f"run_dir={folder}", *overrides])
    with AgentTrainer(config) as trainer:
        row = next(iter(trainer.train()))
    row = {name: value for name, value in row.items() if name not in ("seconds", "cpu_seconds")}
    return row, (list_checkpoints(folder / "checkpoints")[-1] / "engine" / "model.safetensors").read_bytes()


def probes(caplog):
    return [record.getMessage() for record in caplog.records if "probe:" in record.getMessage()]


def test_a_model_that_hardly_ever_names_an_action_is_warmed_up_and_the_run_says_so(
    small_model, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        row, weights = start(tmp_path / "one", small_model)
    assert row["probe_valid_actions"] < 0.5
    assert row["warmup_loss"] > 0
    (told,) = probes(caplog)
    assert "answers held an action" in told
    assert "warming up 20 steps" in told
    assert "warmup.steps=0 switches it off" in told
    again = start(
        tmp_path / "two",
        small_model,
        "agent_proxy.use_parallel_rollout=true",
        "agent_proxy.parallel.backend=thread",
    )
    assert again == (row, weights)


def test_the_warm_up_can_be_switched_off(small_model, tmp_path, caplog):
    row, _ = start(tmp_path / "run", small_model, "warmup.steps=0")
    assert not {"probe_valid_actions", "warmup_loss"} & row.keys()
    assert probes(caplog) == []
    before = load_file(small_model / "model.safetensors")
    after = load_file(list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "engine" / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)


def test_free_text_that_no_env_can_draw_is_not_warmed_up_and_one_warning_says_so(
    small_model, tmp_path, caplog
):
    row, _ = start(tmp_path / "run", small_model, "agent_proxy.max_tokens=4", name="metamathqa")
    assert row["probe_valid_actions"] < 0.5
    assert "warmup_loss" not in row
    (told,) = probes(caplog)
    assert "no warm-up" in told
    assert "free text" in told


def test_a_model_that_names_actions_is_left_as_it_is(tmp_path, caplog):
    base = [
        "trainer.tensorboard=false", "trainer.iterations=1", "es_manager.val.env_groups=2", "engine.width=16",
        "use_parallel_envs=false", "es_manager.train.env_groups=2", "es_manager.train.group_size=4",
    ]  # fmt: skip
    taught = compose_config(
        "demo", [*base, f"run_dir={tmp_path / 'taught'}", "warmup.steps=60", "warmup.learning_rate=0.01"]
    )
    with AgentTrainer(taught) as trainer:
        next(iter(trainer.train()))
        policy, sampler = trainer.policy, trainer.sampler
    config = compose_config("demo", [*base, f"run_dir={tmp_path / 'run'}", "warmup.steps=auto"])
    with AgentTrainer(config, policy=policy, sampler=sampler) as trainer:
        row = next(iter(trainer.train()))
    assert row["probe_valid_actions"] > 0.5
    assert "warmup_loss" not in row
    assert probes(caplog) == []


def test_after_the_warm_up_answers_come_from_the_warmed_up_weights(small_model, tmp_path):
    """The probe asks the same prompts before; what was kept of them must not be used again."""
    config = compose_config(
        "smollm2",
        [*SMALL, f"engine.model={small_model}", f"run_dir={tmp_path / 'run'}", "warmup.learning_rate=0.01"],
    )
    with AgentTrainer(config) as trainer:
        start, row = (next(rows) for rows in [trainer.train()] for _ in range(2))
    assert start["warmup_loss"] > 0
    assert row["logprob_gap_max"] < 1e-3


def free_text(folder, name, *overrides):
    env = f"+custom_envs.Free={{env_type: 'tests.envs.test_plain_gymnasium:{name}'}}"
    tags = "es_manager.train.env_configs.tags=[Free]"
    words = [env, tags, "es_manager.val.env_groups=2", "use_parallel_envs=false", "trainer.tensorboard=false"]
    return compose_config("base", [*words, f"run_dir={folder}", *overrides])


def test_a_plain_gymnasium_class_of_free_text_is_warmed_up_on_its_random_action(tmp_path):
    small = [
        "engine.width=16",
        "engine.layers=1",
        "engine.heads=2",
        "warmup.steps=3",
        "agent_proxy.max_tokens=9",
    ]
    with AgentTrainer(free_text(tmp_path / "run", "Drawn", *small)) as trainer:
        assert next(iter(trainer.train()))["warmup_loss"] > 0


NO_MODEL = ("engine.name=huggingface", "engine.model=/no/such/model")
"""Who looks for it first says that it is not there."""


def test_a_warm_up_without_random_actions_is_refused_before_the_model_is_loaded(tmp_path):
    config = free_text(tmp_path / "run", "Spelling", *NO_MODEL, "warmup.steps=20")
    with pytest.raises(ConfigError, match=r"'Free' takes free text.*random_action\(rng\).*warmup\.steps=0"):
        AgentTrainer(config)


def test_a_folder_that_cannot_be_used_is_refused_before_the_model_is_loaded(small_model, tmp_path):
    run = tmp_path / "run"
    start(run, small_model, "warmup.steps=0")
    settings = [*SMALL, f"run_dir={run}", "warmup.steps=0", *NO_MODEL]
    with pytest.raises(ConfigError, match="holds a run already"):
        AgentTrainer(compose_config("smollm2", settings))
    with pytest.raises(DataError, match=r"run with other settings: engine\.model was .* is '?/no/such/model"):
        AgentTrainer(compose_config("smollm2", [*settings, "resume=true"]))
