"""What the vLLM engine asks of vLLM, and makes of its answers, with a stand-in for the package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shoal.core.errors import DataError, EngineError
from shoal.rollout.samplers.sampler import Completion, Key, Request, Sampling
from shoal.rollout.samplers.tokenizers import TinyTokenizer


class FakeLLM:
    """Answers each token by the next one, and with the answers of unfinished requests first, as vLLM does."""

    def __init__(self, **options):
        network = SimpleNamespace(vocab_size=70, tie_word_embeddings=True)
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64, hf_text_config=network))
        core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
        self.unfinished, self.break_off = [], False
        self.made_of, self.asked, self.calls = options, [], []

    def collective_rpc(self, name, kwargs):
        self.calls.append((name, sorted(path.name for path in Path(kwargs["weights_path"]).iterdir())))

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, params, **options):
        self.asked.append((prompts, params, options))
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
    sys.modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: True)
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "shoal.rollout.samplers.vllm", raising=False)
    module = importlib.import_module("shoal.rollout.samplers.vllm")
    (tmp_path / "config.json").write_text("{}")
    yield module.VllmEngine(tmp_path, tokenizer=TinyTokenizer())
    del sys.modules["shoal.rollout.samplers.vllm"]


def ask(*ids):
    return Request(ids, Key(0, (0, 0, 0, 0)), Sampling(4))


def test_answers_of_a_call_that_was_broken_off_are_given_to_nobody(engine):
    engine.llm.break_off = True
    with pytest.raises(KeyboardInterrupt):
        engine.generate([ask(1, 2), ask(3, 4)])
    assert [c.token_ids for c in engine.generate([ask(5), ask(6, 7)])] == [(6,), (7, 8)]


def test_an_answer_to_another_request_is_refused(engine):
    engine.llm.output = lambda ids: FakeLLM.output(engine.llm, [9])
    with pytest.raises(EngineError, match="the answer to another request"):
        engine.generate([ask(1)])


@pytest.mark.parametrize("outputs", [[], [([1], [2], 1)], [([1], [2], 1), ([3], [4], 0)]])
def test_answers_that_are_missing_or_short_of_log_probabilities_are_an_engine_error(engine, outputs):
    engine.llm.generate = lambda *_, **options: [
        SimpleNamespace(
            prompt_token_ids=prompt,
            outputs=[
                SimpleNamespace(
                    token_ids=written,
                    logprobs=[{written[0]: SimpleNamespace(logprob=-1.0)}] * told,
                    finish_reason="length",
                )
            ],
        )
        for prompt, written, told in outputs
    ]
    with pytest.raises(EngineError, match="without an answer|0 log-probabilities for 1 tokens"):
        engine.generate([ask(1), ask(3)])


def test_vllm_is_asked_for_what_was_requested_within_the_context(engine):
    words = Request((1, 2), Key(0, (0, 0, 0, 0)), Sampling(9, 0.5, ("a", "b"), 0.8, -1, 0.1))
    few = Request((5,) * 60, Key(0, (0, 0, 0, 1)), Sampling(9, 0.0, top_k=3))
    full = Request((6,) * 64, Key(0, (0, 0, 0, 2)), Sampling(9))
    engine.tokenizer.end_ids = (7, 8)
    answers = engine.generate([words, full, few])
    ((prompts, params, options),) = engine.llm.asked
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [5] * 60}]
    always = {
        "repetition_penalty": 1.0,
        "include_stop_str_in_output": True,
        "stop_token_ids": [7, 8],
        "logprobs": 0,
    }
    assert [vars(one) for one in params] == [
        {
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.8,
            "top_k": 0,
            "min_p": 0.1,
            "stop": ["a", "b"],
            **always,
        },
        {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "top_k": 3, "min_p": 0.0, "stop": None, **always},
    ]
    assert options == {"use_tqdm": False, "lora_request": None}
    assert [(a.token_ids, a.logprobs, a.finish, a.weights_version) for a in answers] == [
        ((2, 3), (-1.0, -1.0), "length", 0), ((), (), "context", 0), ((6,) * 60, (-1.0,) * 60, "length", 0),
    ]  # fmt: skip
    engine.weights_version = 4
    assert engine.generate([full, full])[1] == Completion((), (), "context", 4)
    assert len(engine.llm.asked) == 1  # nobody is asked for nothing
    assert (engine.context, engine.vocabulary) == (64, 70)


def test_what_the_engine_can_do_is_said_and_what_it_cannot_is_refused(engine, tmp_path):
    can = engine.capabilities
    assert (engine.level, can.level, can.token_ids, can.logprobs, can.weights) == (
        "L0",
        "L0",
        True,
        True,
        True,
    )
    assert (can.adapters, can.images, can.gradients) == (False, False, False)
    assert engine.llm.made_of["logprobs_mode"] == "processed_logprobs"
    assert engine.llm.made_of["model"] == engine.llm.made_of["tokenizer"] == str(tmp_path)
    with pytest.raises(EngineError, match="this engine takes no pictures: use a server with messages"):
        engine.generate([ask(1), Request((1,), Key(0, (0, 0, 0, 0)), Sampling(4), ("a.png",))])
    with pytest.raises(DataError, match="is not a model folder: it has no config.json"):
        type(engine)(tmp_path / "nothing")
    with pytest.raises(EngineError, match=r"make room for adapters first: VllmEngine\(..., adapters=True\)"):
        engine.load_adapter(tmp_path, 1)


@pytest.mark.parametrize(("finish", "logprobs"), [("abort", True), (None, True), ("stop", False)])
def test_a_response_that_was_broken_off_or_has_no_log_probabilities_is_refused(engine, finish, logprobs):
    def output(ids):
        made = FakeLLM.output(engine.llm, ids)
        made.outputs[0].finish_reason = finish
        made.outputs[0].logprobs = made.outputs[0].logprobs if logprobs else None
        return made

    engine.llm.output = output
    with pytest.raises(EngineError, match=f"vLLM broke a response off: {finish}"):
        engine.generate([ask(1)])


def test_what_vllm_refuses_is_the_requests_failure(engine):
    def refuse(*_, **__):
        raise ValueError("too long")

    engine.llm.generate = refuse
    with pytest.raises(EngineError, match="vLLM refused a request: too long"):
        engine.generate([ask(1)])


class Tensor:
    """As much of a tensor as is asked for on its way to a file."""

    def detach(self):
        return self

    cpu = clone = detach


@pytest.mark.parametrize(("cpu", "tied"), [(True, True), (True, False), (False, True)])
def test_weights_are_taken_over_in_place_or_by_another_start_where_they_would_stay(
    engine, tmp_path, monkeypatch, cpu, tied
):
    module = sys.modules["shoal.rollout.samplers.vllm"]
    monkeypatch.setattr(module, "as_in_files", lambda folder, weights: weights)
    monkeypatch.setattr(module.current_platform, "is_cpu", lambda: cpu)
    monkeypatch.setattr(
        "safetensors.torch.save_file",
        lambda tensors, path, note: path.write_text(f"{sorted(tensors)} {note}"),
    )
    first, places = engine.llm, []
    first.llm_engine.vllm_config.model_config.hf_text_config.tie_word_embeddings = tied
    for version in (3, 4):
        engine.load_weights({"w": Tensor()}, version)
        places.append(Path(engine._weights.name))
        assert engine.weights_version == version
        assert sorted(path.name for path in places[-1].iterdir()) == ["config.json", "model.safetensors"]
        assert (places[-1] / "model.safetensors").read_text() == "['w'] {'format': 'pt'}"
    assert [place.exists() for place in places] == [
        False,
        True,
    ]  # the last are kept, to start with them again
    if cpu and tied:
        assert engine.llm is not first
        assert engine.llm.made_of["model"] == str(places[-1])
        assert engine.llm.made_of["tokenizer"] == str(tmp_path)
        assert first.calls == ["shutdown"]
    else:
        assert engine.llm is first
        assert first.calls == [("reload_weights", ["config.json", "model.safetensors"]), "reset"] * 2
        engine.restart()
        assert engine.llm.made_of["model"] == str(places[-1])
    last = engine.llm
    engine.close()
    assert last.calls[-1] == "shutdown"
    assert not places[-1].exists()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_vllm_did_not_take_are_not_what_it_starts_with_again(engine, monkeypatch, tied):
    """Completions of the new ones were marked with the version of the old."""
    module = sys.modules["shoal.rollout.samplers.vllm"]
    monkeypatch.setattr(module, "as_in_files", lambda folder, weights: weights)
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, path, note: path.touch())
    monkeypatch.setattr(module.current_platform, "is_cpu", lambda: tied)
    engine.load_weights({}, 3)
    taken = engine._weights.name

    def fail(*_, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(engine.llm, "collective_rpc", fail)
        broken.setattr(module, "LLM", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.load_weights({}, 4)
    assert engine.weights_version == 3
    assert engine.generate([ask(1)])[0].weights_version == 3
    assert engine.llm.made_of["model"] == taken  # and not what may hold the new ones by half
    with monkeypatch.context() as broken:  # a second time, it cannot begin again either
        broken.setattr(engine.llm, "collective_rpc", fail)
        broken.setattr(module, "LLM", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.load_weights({}, 4)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([ask(1)])
    assert engine.generate([ask(1)])[0].weights_version == 3
    assert Path(taken).exists()
    engine.load_weights({}, 4)
    assert (engine.weights_version, Path(taken).exists()) == (4, False)
    engine.close()


def test_a_closed_engine_starts_no_other_vllm_whoever_still_asks_for_one(engine, monkeypatch):
    """The thread of a rollout that was left behind when vLLM hung, say: what it started held the GPU."""
    module, started = sys.modules["shoal.rollout.samplers.vllm"], []

    def starting(**options):
        engine.close()  # meanwhile, by another thread
        started.append(FakeLLM(**options))
        return started[-1]

    monkeypatch.setattr(module, "LLM", starting)
    for act in (
        engine.restart,
        engine.restart,
        lambda: engine.generate([ask(1)]),
        lambda: engine.load_weights({}, 1),
    ):
        with pytest.raises(EngineError, match="vLLM has ended: this engine was closed"):
            act()
        assert [llm.calls for llm in started] == [["shutdown"]]
    assert not engine.llm.asked
    engine.close()


def test_each_adapter_has_a_number_of_its_own_and_is_left_where_whole_weights_are_taken(
    engine, tmp_path, monkeypatch
):
    module = sys.modules["shoal.rollout.samplers.vllm"]
    monkeypatch.setattr(module, "as_in_files", lambda folder, weights: weights)
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, path, note: path.touch())
    engine = type(engine)(tmp_path, tokenizer=TinyTokenizer(), adapters=True)
    assert engine.llm.made_of["enable_lora"]
    module.LoRARequest = lambda name, number, path: SimpleNamespace(name=name, lora_int_id=number, path=path)
    with pytest.raises(DataError, match="is no adapter: it has no adapter_model.safetensors"):
        engine.load_adapter(tmp_path, 1)

    def used():
        version = engine.generate([ask(1)])[0].weights_version
        return engine.llm.asked[-1][2]["lora_request"], version

    (tmp_path / "adapter").mkdir()
    for version, number in ((5, 1), (9, 2), (12, 3)):
        if number == 3:
            engine.load_weights({}, 10)
            assert used() == (None, 10), "answers of base and adapter bear the version of whole weights"
        (tmp_path / "adapter" / "adapter_model.safetensors").write_text(str(version))
        engine.load_adapter(tmp_path / "adapter", version)
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()  # as a run drops old checkpoints
        lora, told = used()
        assert (lora.name, lora.lora_int_id, told) == (f"shoal-{number}", number, version)
        assert (Path(lora.path) / "adapter_model.safetensors").read_text() == str(version)
    engine.close()
    assert not Path(lora.path).exists()
