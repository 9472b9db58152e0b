"""What the vLLM sampler asks of vLLM, and makes of its answers, with a stand-in for the package."""

import asyncio
import importlib
import itertools
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.rollout.doubles import each
from tests.samplers.vllm import fake_vllm
from tests.samplers.vllm.fake_vllm import AsyncLLM

from shoal.core.errors import DataError, EngineError
from shoal.samplers.asking import SamplerClient
from shoal.samplers.registry import EngineConfig, make_engine
from shoal.samplers.sampler import Completion, Key, Request, Sampling
from shoal.samplers.tokenizers import TinyTokenizer


@pytest.fixture
def make(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    fake_vllm.install(monkeypatch)
    module = importlib.import_module("shoal.samplers.vllm")
    monkeypatch.setattr(module, "as_in_files", lambda folder, weights: weights)
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, path, note: path.write_text(str(note)))
    (tmp_path / "config.json").write_text("{}")
    made = []

    def start(**options):
        made.append(module.VllmEngine(tmp_path, tokenizer=TinyTokenizer(), **options))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    del sys.modules["shoal.samplers.vllm"]


@pytest.fixture
def engine(make):
    return make()


def ask(*ids):
    return Request(ids, Key(0, (0, 0, 0, 0)), Sampling(4))


@pytest.mark.parametrize(("visible", "first", "second"), [(None, "0", "1"), ("4,6", "4", "6")])
def test_its_gpu_and_batch_invariance_are_told_to_the_processes_of_vllm_alone(
    make, monkeypatch, tmp_path, visible, first, second
):
    names = ("CUDA_VISIBLE_DEVICES", "VLLM_BATCH_INVARIANT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv(names[0], visible)
    start, seen = AsyncLLM.from_engine_args, []

    def watched(*arguments):
        seen.append(tuple(map(os.environ.get, names)))
        return start(*arguments)

    monkeypatch.setattr(AsyncLLM, "from_engine_args", watched)
    monkeypatch.setattr(sys.modules["shoal.samplers.vllm"], "TemplateTokenizer", lambda _: None)
    for settings in ({"device": "cuda:0", "batch_invariant": True}, {"device": "cuda:1"}, {"device": "cuda"}):
        make_engine(EngineConfig(name="vllm", model=str(tmp_path), **settings)).close()
    assert seen == [(first, "1"), (second, None), (visible, None)]
    assert tuple(map(os.environ.get, names)) == (visible, None)


def test_a_slow_answer_holds_up_no_other(engine):
    slow, ended = threading.Event(), []

    async def gate(prompt):
        while prompt == [1] and not slow.is_set():
            await asyncio.sleep(0.001)

    engine.llm.gate = gate

    def answer(number):
        ended.append(engine.generate([ask(number)])[0].token_ids)

    first = threading.Thread(target=answer, args=(1,), daemon=True)
    first.start()
    while not engine.llm.under_way:
        pass
    answer(2)
    assert ended == [(3,)]
    slow.set()
    first.join(60)
    assert ended == [(3,), (2,)]


def test_vllm_is_asked_for_what_was_requested_within_the_context(engine):
    words = Request((1, 2), Key(0, (0, 0, 0, 0)), Sampling(9, 0.5, ("a", "b"), 0.8, -1, 0.1))
    few = Request((5,) * 60, Key(0, (0, 0, 0, 1)), Sampling(9, 0.0, top_k=3))
    full = Request((6,) * 64, Key(0, (0, 0, 0, 2)), Sampling(9))
    engine.tokenizer.end_ids = (7, 8)
    engine.llm.output = lambda ids: AsyncLLM.output(engine.llm, ids[:2])
    answers = engine.generate([words, full, few])
    prompts, params, names, loras = zip(*engine.llm.asked, strict=True)
    assert prompts == (
        {"type": "token", "prompt_token_ids": [1, 2]},
        {"type": "token", "prompt_token_ids": [5] * 60},
    )
    always = {
        "repetition_penalty": 1.0,
        "include_stop_str_in_output": True,
        "stop_token_ids": [7, 8],
        "logprobs": 0,
        "output_kind": fake_vllm.RequestOutputKind.FINAL_ONLY,
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
    assert len(set(names)) == 2
    assert loras == (None, None)
    assert [(a.token_ids, a.logprobs, a.finish, a.weights_version) for a in answers] == [
        ((2, 3), (-1.0, -1.0), "length", 0), ((), (), "context", 0), ((6, 6), (-1.0, -1.0), "length", 0),
    ]  # fmt: skip
    assert (engine.context, engine.vocabulary) == (64, 70)


def test_what_the_sampler_can_do_is_said_and_what_it_cannot_is_refused(engine, tmp_path):
    can = engine.capabilities
    assert engine.level == "L0"
    assert (can.token_ids, can.logprobs, can.weights, can.adapters) == (True, True, True, False)
    told = vars(engine.llm.args)
    assert told["logprobs_mode"] == "processed_logprobs"
    assert told["model"] == told["tokenizer"] == str(tmp_path)
    with pytest.raises(EngineError, match="takes no pictures: use a server with messages"):
        engine.generate([ask(1), Request((1,), Key(0, (0, 0, 0, 0)), Sampling(4), ("a.png",))])
    with pytest.raises(DataError, match="is not a model folder: it has no config.json"):
        type(engine)(tmp_path / "nothing")
    with pytest.raises(EngineError, match=r"make room for adapters first: VllmEngine\(..., enable_lora=True"):
        engine.load_adapter(tmp_path, 1)


@pytest.mark.parametrize(("finish", "logprobs"), [("abort", True), (None, True), ("stop", False)])
def test_a_response_that_was_broken_off_or_has_no_log_probabilities_is_refused(engine, finish, logprobs):
    def output(ids):
        made = AsyncLLM.output(engine.llm, ids)
        made.finish_reason = finish
        made.logprobs = made.logprobs if logprobs else None
        return made

    engine.llm.output = output
    with pytest.raises(EngineError, match=f"vLLM broke a response off: {finish}"):
        engine.generate([ask(1)])


def test_what_vllm_refuses_fails_alone(engine):
    def output(ids):
        if ids == [1]:
            raise ValueError("too long")
        return AsyncLLM.output(engine.llm, ids)

    engine.llm.output = output
    first, second = each(engine, [ask(1), ask(2)])
    assert "vLLM refused a request: ValueError: too long" in str(first)
    assert second.token_ids == (3,)


def test_a_vllm_that_died_is_restarted_once_and_its_requests_are_asked_again(engine):
    engine.llm.dead = True
    with SamplerClient(engine) as shared:
        answers = shared.generate([ask(number) for number in range(1, 5)])
        assert [answer.token_ids for answer in answers] == [(2,), (3,), (4,), (5,)]
        assert shared.statistics.restarts == 1
    assert [llm.calls for llm in AsyncLLM.made] == [["shutdown"], []]


def test_a_vllm_that_hangs_is_restarted_and_one_that_answers_others_is_not(make):
    engine = make()

    engine.llm.gate = lambda prompt: asyncio.sleep(60)
    with SamplerClient(engine, engine_timeout=0.2) as shared:
        assert [answer.token_ids for answer in shared.generate([ask(1), ask(2)])] == [(2,), (3,)]
        assert shared.statistics.restarts == 1
    assert len(AsyncLLM.made) == 2
    tries = itertools.count()
    engine.llm.gate = lambda prompt: asyncio.sleep(60 if prompt == [1] and not next(tries) else 0)
    with SamplerClient(engine, engine_timeout=2.0) as shared:
        assert [answer.token_ids for answer in shared.generate([ask(1), ask(2)])] == [(2,), (3,)]
        assert shared.statistics.restarts == 0


# --- weights
def tensor():
    """As much of a tensor as is asked for on its way to a file."""
    one = SimpleNamespace(nbytes=8)
    one.detach = one.cpu = one.clone = lambda: one
    return one


@pytest.mark.parametrize(("cpu", "tied"), [(True, True), (True, False), (False, True)])
def test_weights_are_loaded_in_place_or_by_another_start_where_they_would_stay(
    engine, tmp_path, monkeypatch, cpu, tied
):
    monkeypatch.setattr(sys.modules["shoal.samplers.vllm"].current_platform, "is_cpu", lambda: cpu)
    first, places = engine.llm, []
    for version in (3, 4):
        engine.llm.model_config.hf_text_config.tie_word_embeddings = tied
        engine.load_weights({"w": tensor()}, version)
        places.append(Path(engine._weights.name))
        assert engine.weights_version == version
        assert sorted(path.name for path in places[-1].iterdir()) == ["config.json", "model.safetensors"]
    # the last are kept, to start with them again
    assert [place.exists() for place in places] == [False, True]
    if cpu and tied:
        assert engine.llm is AsyncLLM.made[2]
        assert vars(engine.llm.args)["model"] == str(places[-1])
        assert vars(engine.llm.args)["tokenizer"] == str(tmp_path)
        assert first.calls == ["pause wait True", "shutdown"]
    else:
        assert engine.llm is first
        files = ["config.json", "model.safetensors"]
        assert first.calls == ["pause wait True", ("reload_weights", files), "resume"] * 2
        engine.restart()
        assert vars(engine.llm.args)["model"] == str(places[-1])
    last = engine.llm
    engine.close()
    assert last.calls[-1] == "shutdown"
    assert not places[-1].exists()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_vllm_did_not_take_are_not_what_it_answers_with(engine, monkeypatch, tied):
    monkeypatch.setattr(sys.modules["shoal.samplers.vllm"].current_platform, "is_cpu", lambda: tied)
    engine.load_weights({}, 3)
    taken, failures = engine._weights.name, [1]

    async def fail(*_, **options):
        raise RuntimeError("out of memory")

    def start(engine_args):
        if failures:
            failures.pop()
            raise RuntimeError("out of memory")
        return AsyncLLM(engine_args)

    with monkeypatch.context() as broken:
        broken.setattr(AsyncLLM, "collective_rpc", fail)
        if tied:
            broken.setattr(AsyncLLM, "from_engine_args", start)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.load_weights({}, 4)
    assert engine.weights_version == 3
    assert engine.generate([ask(1)])[0].weights_version == 3
    assert vars(engine.llm.args)["model"] == taken  # and not what may hold the new ones by half
    engine.load_weights({}, 4)
    assert (engine.weights_version, Path(taken).exists()) == (4, False)


def test_a_closed_sampler_starts_no_other_vllm(engine):
    """What it started would hold the GPU."""
    engine.close()
    engine.close()
    for act in (engine.restart, lambda: engine.generate([ask(1)]), lambda: engine.load_weights({}, 1)):
        with pytest.raises(EngineError, match="closed"):
            act()
    assert len(AsyncLLM.made) == 1


def test_each_adapter_has_a_number_of_its_own_and_is_left_where_whole_weights_are_loaded(make, tmp_path):
    engine = make(enable_lora=True, max_lora_rank=8)
    assert engine.capabilities.adapters
    with pytest.raises(DataError, match="is no adapter: it has no adapter_model.safetensors"):
        engine.load_adapter(tmp_path, 1)

    def used():
        version = engine.generate([ask(1)])[0].weights_version
        return engine.llm.asked[-1][3], version

    (tmp_path / "adapter").mkdir()
    numbers, paths = [], []
    for version in (5, 9, 12):
        if version == 12:
            engine.load_weights({}, 10)
            assert used() == (None, 10), "answers of base and adapter bear the version of whole weights"
        (tmp_path / "adapter" / "adapter_model.safetensors").write_text(str(version))
        engine.load_adapter(tmp_path / "adapter", version)
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()  # as a run drops old checkpoints
        lora, told = used()
        assert told == version
        assert engine.llm.calls[-2:] == [f"add {lora.lora_name}", "resume"]
        assert (Path(lora.lora_path) / "adapter_model.safetensors").read_text() == str(version)
        numbers.append(lora.lora_int_id)
        paths.append(Path(lora.lora_path))
    assert len(set(numbers)) == 3
    assert [path.exists() for path in paths] == [False, False, True]
    engine.close()
    assert not paths[-1].exists()


def test_an_adapter_that_vllm_does_not_take_is_an_error_and_the_one_before_stays(make, tmp_path, monkeypatch):
    engine = make(enable_lora=True)
    (tmp_path / "adapter_model.safetensors").touch()
    engine.load_adapter(tmp_path, 1)
    before = engine._adapter.lora

    async def refuse(self, lora_request):
        raise ValueError("rank 64 is too high")

    monkeypatch.setattr(AsyncLLM, "add_lora", refuse)
    with pytest.raises(DataError, match="vLLM does not take the adapter .*rank 64 is too high"):
        engine.load_adapter(tmp_path, 2)
    assert engine.generate([ask(1)]) == [Completion((2,), (-1.0,), "length", 1)]
    assert engine.llm.asked[-1][3] is before
