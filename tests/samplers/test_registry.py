import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.rollout.doubles import TEMPLATE, CounterEnv, FakeServer, HashEngine, byte_tokenizer, config
from tests.rollout.doubles import llama_engine as make_llama
from tests.samplers.vllm import fake_vllm

from shoal import envs
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


def test_what_a_config_of_an_engine_lacks_is_said(server, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY, which is not set: export MY_KEY"):
        make_engine(openai(server, api_key_env="MY_KEY"))
    with pytest.raises(ConfigError, match=r"engine\.server\.url=http://"):
        make_engine(EngineConfig(name="openai"))
    for name in ("huggingface", "vllm", "ray"):
        with pytest.raises(ConfigError, match="engine.model must be a model folder.*got none"):
            make_engine(EngineConfig(name=name))
    with pytest.raises(ConfigError, match="concurrency must be at least 1, got 0"):
        ServerConfig(concurrency=0)
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        ReplicaConfig(count=0)


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no engine named 'hugingface'. Did you mean 'huggingface'"):
        EngineConfig(name="hugingface")
    for name in ("width", "layers", "heads", "context", "threads", "max_batch"):
        with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got 0"):
            EngineConfig(**{name: 0})
    with pytest.raises(ConfigError, match="context must be at least 1, or null, got 0"):
        ServerConfig(context=0)


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


class Restarted(HashEngine):
    """Crashes or hangs once, until it is restarted."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.restarts = fault, 0

    def generate(self, requests):
        if not self.restarts and len(self.batches) == 3:
            if self.fault == "hang":
                time.sleep(3)
            raise RuntimeError("the engine's process died")
        return super().generate(requests)

    def restart(self):
        self.restarts += 1


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.flaky(reruns=2)
def test_an_engine_is_restarted_in_the_middle_of_a_rollout_and_nothing_changes(fault):
    envs.register("test_counter", CounterEnv, replace=True)
    with ParallelRolloutManager(config(), HashEngine(), backend="serial") as manager:
        calm = manager.collect(2)
    engine = Restarted(fault)
    with ParallelRolloutManager(
        config(parallel={"engine_timeout": 0.5}), engine, backend="thread"
    ) as manager:
        assert manager.collect(2) == calm
        assert manager.inference.statistics.restarts == engine.restarts == 1


def test_an_engine_is_not_restarted_more_often_than_allowed():
    envs.register("test_counter", CounterEnv, replace=True)
    engine = Restarted("crash")
    settings = config(parallel={"engine_restarts": 0, "engine_retries": 0})
    with ParallelRolloutManager(settings, engine, backend="thread") as manager:
        played = manager.collect(2)
    assert engine.restarts == 0
    assert any(t.status == "engine_error" for t in played)
    with pytest.raises(ConfigError, match="engine_restarts must be at least 0"):
        ParallelRolloutManager(config(parallel={"engine_restarts": -1}), engine)


def test_a_request_that_a_server_rejects_ends_its_episode_alone_and_is_asked_once(server):
    envs.register("test_counter", CounterEnv, replace=True)
    server.say = lambda said: "<action>one</action>"
    engine = make_engine(replace(openai(server), server=ServerConfig(server.url)))
    server.faults = [None] * 5 + [400] + [None] * 1000
    with ParallelRolloutManager(config(n_jobs=1), engine, backend="thread") as manager:
        played = manager.collect(0)
        assert manager.inference.statistics.failures == 1
    assert sorted(t.status for t in played) == ["engine_error"] + ["ok"] * 15
    turns = sum(len(t.turns) for t in played)
    assert len([path for path, _, _ in server.seen if path.endswith("completions")]) == turns + 1
    close_engine(engine)


def test_a_server_that_is_down_is_asked_as_often_as_its_setting_says_and_no_more(server):
    """One rule for each request: it was asked by the client, and all that again by the rollout, 10 times by default."""
    envs.register("test_counter", CounterEnv, replace=True)
    engine = make_engine(replace(openai(server), server=ServerConfig(server.url, retries=2)))
    server.faults = [503] * 1000
    with ParallelRolloutManager(config(groups=1, members=1), engine, backend="thread") as manager:
        (played,) = manager.collect(0)
    assert (played.status, played.turns) == ("engine_error", ())
    assert re.search("no answer in 3 attempts over .* HTTP 503: fault 503", played.error)
    assert len([path for path, _, _ in server.seen if path.endswith("completions")]) == 3
    close_engine(engine)


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


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("4,6", "6")])
def test_the_vllm_of_a_process_sees_the_gpu_of_that_process_alone(monkeypatch, tmp_path, visible, seen):
    fake_vllm.install(monkeypatch)
    told = []

    def started(args):
        told.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return fake_vllm.AsyncLLM(args)

    monkeypatch.setattr(fake_vllm.AsyncLLM, "from_engine_args", started)
    monkeypatch.setattr("shoal.samplers.tokenizers.TemplateTokenizer", lambda _: None)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "config.json").write_text("{}")
    for device in ("cuda:1", "cuda", "cpu"):
        make_engine(EngineConfig(name="vllm", model=str(tmp_path), device=device)).close()
    assert told == [seen, visible, visible]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    monkeypatch.delitem(sys.modules, "shoal.samplers.vllm")
