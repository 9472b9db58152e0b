import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.rollout.doubles import TEMPLATE, FakeServer, HashEngine, byte_tokenizer
from tests.rollout.doubles import llama_engine as make_llama

from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.registry import (
    SAMPLERS,
    EngineConfig,
    ReplicaConfig,
    ServerConfig,
    close_engine,
    load_tokenizer,
    make_engine,
    sampler,
)
from shoal.samplers.sampler import Key, Request, Sampling, capabilities_of
from shoal.samplers.tiny import TinyEngine
from shoal.testing import check_engine
from shoal.train.agent.config import compose_config
from shoal.train.agent.policies.loading import load_engine, make_policy, policy_of
from shoal.train.agent.policies.policy import TinyPolicy


@pytest.fixture
def server():
    with FakeServer("openai") as server:
        yield server


def openai(server, **settings):
    return EngineConfig(name="openai", server=ServerConfig(url=server.url + "/v1", **settings))


def ask(engine, n=6):
    start = engine.tokenizer.start
    return [
        Request(start([{"role": "user", "content": f"say {i}"}]), Key(0, (0, i, 0, 0)), Sampling(5))
        for i in range(n)
    ]


def test_a_config_names_a_server_with_its_key_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    engine = make_engine(openai(server, api_key_env="MY_KEY", concurrency=3))
    assert engine.model == "m"
    answer = engine.generate(ask(engine, 1))[0]
    assert engine.tokenizer.decode(answer.token_ids) == "you said say 0"
    assert server.seen[-1][2]["Authorization"] == "Bearer sesame"
    assert not capabilities_of(engine).trainable
    close_engine(engine)


def test_what_a_config_of_an_engine_lacks_is_said_and_an_unknown_engine_by_the_nearest_name(
    server, monkeypatch
):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY, which is not set: export MY_KEY"):
        make_engine(openai(server, api_key_env="MY_KEY"))
    with pytest.raises(ConfigError, match=r"engine\.server\.url=http://"):
        make_engine(EngineConfig(name="openai"))
    for name in ("huggingface", "vllm", "ray"):
        with pytest.raises(ConfigError, match="engine.model must be a model folder.*got none"):
            make_engine(EngineConfig(name=name))
    with pytest.raises(ConfigError, match="no engine named 'hugingface'. Did you mean 'huggingface'"):
        EngineConfig(name="hugingface")


def test_a_sampler_is_registered_by_name_and_made_from_the_settings_of_a_run():
    @sampler("test_hash")
    def make(settings, words, seed):
        engine = HashEngine()
        engine.made_of = settings.context, tuple(words), seed
        return engine

    try:
        assert make_engine(EngineConfig(name="test_hash", context=9), ["Up"], 4).made_of == (9, ("Up",), 4)
        with pytest.raises(ValueError, match="registered already"):
            sampler("test_hash")(lambda settings, words, seed: HashEngine())
        assert sampler("test_hash", replace=True)(make) is make
    finally:
        del SAMPLERS._items["test_hash"]


def test_the_example_of_contributing_keeps_its_promises_and_plays(tmp_path):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@sampler" in b]
    assert len(code.split("\n\n\n")[1].strip().splitlines()) < 20
    (tmp_path / "mine.py").write_text(code)
    overrides = [
        f"imports=[{tmp_path / 'mine.py'}]",
        "engine.name=first-word",
        "es_manager.train.env_groups=2",
    ]
    words = ["Left", "Down", "Right", "Up"]
    try:
        config = compose_config("demo", overrides)
        check_engine(lambda: make_engine(config.engine, words, 0))
        with ParallelRolloutManager(
            config, make_engine(config.engine, words, 0), backend="serial"
        ) as manager:
            played = manager.collect(0)
    finally:
        SAMPLERS._items.pop("first-word", None)
    assert {turn.action for t in played for turn in t.turns} == {"Left"}


def test_a_sampler_from_outside_writes_for_a_model_that_trains_here(monkeypatch):
    class Follows(HashEngine):
        def load_weights(self, weights, version):
            self.weights_version = version

    @sampler("test_follows")
    def make(settings, words, seed):
        return Follows()

    monkeypatch.setitem(SAMPLERS._items, "huggingface", lambda *_: TinyEngine(["Up"]))
    try:
        policy, follower = make_policy(EngineConfig(name="test_follows", model="somewhere"), (), 0)
        assert isinstance(policy, TinyPolicy)
        assert isinstance(follower, Follows)
    finally:
        del SAMPLERS._items["test_follows"]


@pytest.mark.parametrize("local", ["smollm2", "a folder"])
def test_a_model_of_this_machine_is_no_name_for_the_model_of_a_server(server, local, tmp_path, caplog):
    """As when `engine.name=openai` is said beside a config that trains `smollm2`."""
    model = str(tmp_path) if local == "a folder" else local
    engine = make_engine(replace(openai(server), model=model))
    assert engine.model == "m"
    assert f"engine.model={model} is a model of this machine" in caplog.text
    close_engine(engine)
    with pytest.raises(EngineError, match="has no model 'other'"):
        make_engine(replace(openai(server), model="other"))
    with pytest.raises(EngineError, match="has no model 'n'. Did you mean 'm'|has no model 'n'. Known: m"):
        make_engine(replace(openai(server, model="n"), model=model))
    caplog.clear()
    engine = make_engine(replace(openai(server, model="m"), model=model))
    assert (engine.model, "of this machine" in caplog.text) == ("m", False)
    close_engine(engine)


def test_rows_at_once_and_the_settings_of_the_template_come_from_the_config(tmp_path):
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n{{ thinking }}{% endif %}")
    policy_of(make_llama(byte_tokenizer(template))).save(tmp_path)
    settings = EngineConfig(
        name="huggingface", model=str(tmp_path), max_batch=3, template={"thinking": "<no>"}
    )
    engine = make_engine(settings)
    assert engine.max_batch == 3
    prompt = engine.tokenizer.start([{"role": "user", "content": "x"}])
    assert engine.tokenizer.spell(prompt).endswith("<no>")
    checkpointed = load_engine(tmp_path, config=settings)
    assert (checkpointed.max_batch, checkpointed.tokenizer.start([{"role": "user", "content": "x"}])) == (
        3,
        prompt,
    )
    there = load_tokenizer(str(tmp_path), **settings.template)
    assert there.start([{"role": "user", "content": "x"}]) == prompt


def test_a_server_samples_for_a_model_that_is_trained_here_and_must_take_its_weights(server, tmp_path):
    with pytest.raises(ConfigError, match="engine.model must be a model folder .* for engine.name=openai"):
        make_policy(openai(server), (), 0)
    (tmp_path / "model").mkdir()
    policy_of(make_llama(byte_tokenizer())).save(tmp_path / "model")
    settings = replace(openai(server, weights=str(tmp_path / "w")), model=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="OpenAIEngine is for evaluation only"):  # without a tokenizer
        make_policy(settings, (), 0)
    for kind, taken in (("llama.cpp", False), ("vllm", True)):
        exact = replace(settings.server, kind=kind, tokenizer=settings.model)
        sampler = make_engine(replace(settings, server=exact))
        assert capabilities_of(sampler).weights is taken
        sampler.close()


def test_an_engine_that_cannot_follow_the_weights_is_refused_for_training(monkeypatch):
    closed = []
    sampler = HashEngine()
    sampler.close = lambda: closed.append(True)
    monkeypatch.setitem(SAMPLERS._items, "ray", lambda *_: sampler)
    settings = EngineConfig(name="ray", replicas=ReplicaConfig("tiny"))
    with pytest.raises(ConfigError, match="HashEngine cannot take over weights between batches"):
        make_policy(settings, (), 0)
    assert closed


def test_replicas_use_the_gpu_that_ray_gives_them_whatever_the_trainer_is_on(monkeypatch):
    """A trainer on `cuda:1` has replicas in processes that see a GPU of their own, number 0 there."""
    pytest.importorskip("ray")
    made = []
    monkeypatch.setattr("shoal.core.executors.connect_ray", lambda: None)
    monkeypatch.setattr("shoal.samplers.ray.RayEngine", lambda make, count, **_: make)
    for device in ("cuda:1", "cpu"):
        replica = make_engine(EngineConfig("ray", device=device, replicas=ReplicaConfig("tiny")), ["Up"])
        with monkeypatch.context() as there:
            there.setattr("shoal.samplers.registry.make_engine", lambda config, *_: made.append(config))
            replica()
    assert [(config.name, config.device) for config in made] == [("tiny", "cuda"), ("tiny", "cpu")]
