"""What vLLM answers after a call that was broken off, with a stand-in for the package."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Key, Request, Sampling
from shoal.rollout.samplers.tokenizers import TinyTokenizer


class FakeLLM:
    """Answers each token by the next one, and with the answers of unfinished requests first, as vLLM does."""

    def __init__(self, **options):
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
        self.unfinished, self.break_off = [], False

    def generate(self, prompts, params, **options):
        self.unfinished += [prompt["prompt_token_ids"] for prompt in prompts]
        if self.break_off:
            self.break_off = False
            raise KeyboardInterrupt
        asked, self.unfinished = self.unfinished, []
        return [self.output(ids) for ids in asked]

    def output(self, ids):
        written = [i + 1 for i in ids]
        logprobs = [{i: SimpleNamespace(logprob=-1.0)} for i in written]
        said = SimpleNamespace(token_ids=written, logprobs=logprobs, finish_reason="length")
        return SimpleNamespace(prompt_token_ids=ids, outputs=[said])


@pytest.fixture
def engine(monkeypatch, tmp_path):
    for name in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].LLM, sys.modules["vllm"].SamplingParams = FakeLLM, SimpleNamespace
    sys.modules["vllm.lora.request"].LoRARequest = SimpleNamespace
    sys.modules["vllm.platforms"].current_platform = None
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "shoal.rollout.samplers.vllm", raising=False)
    module = importlib.import_module("shoal.rollout.samplers.vllm")
    (tmp_path / "config.json").write_text("{}")
    yield module.VllmEngine(tmp_path, tokenizer=TinyTokenizer())
    del sys.modules["shoal.rollout.samplers.vllm"]


def ask(*ids):
    return Request(ids, Key(0, 0, 0, 0, 0), Sampling(4))


def test_answers_of_a_call_that_was_broken_off_are_given_to_nobody(engine):
    engine.llm.break_off = True
    with pytest.raises(KeyboardInterrupt):
        engine.generate([ask(1, 2), ask(3, 4)])
    assert [c.token_ids for c in engine.generate([ask(5), ask(6, 7)])] == [(6,), (7, 8)]


def test_an_answer_to_another_request_is_refused(engine):
    engine.llm.output = lambda ids: FakeLLM.output(engine.llm, [9])
    with pytest.raises(EngineError, match="the answer to another request"):
        engine.generate([ask(1)])
