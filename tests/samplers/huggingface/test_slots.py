"""Slots of a static cache write what rows write, whoever enters and leaves between two steps; here without graphs."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.rollout.doubles import byte_tokenizer, llama_engine, llama_requests
from transformers import AutoModelForCausalLM, GPTNeoConfig, Qwen2Config

from shoal.core.errors import EngineError
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.huggingface.invariant import make_invariant
from shoal.samplers.huggingface.slots import Draw, Row, within_limits
from shoal.samplers.sampler import Key, Request, Sampling, restricted

ROOMY = 8192


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.finish, a.weights_version) == (b.token_ids, b.finish, b.weights_version)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
@pytest.mark.parametrize("prefix_tokens", [0, 16_384])
def test_slots_write_what_rows_write(max_batch, prefix_tokens):
    settings = {"max_batch": max_batch, "prefix_tokens": prefix_tokens}
    rows, slots = llama_engine(**settings), llama_engine(**settings, cache_tokens=ROOMY)
    for n in (40, 5):  # the second time with what is known of the first
        same(slots.generate(llama_requests(slots, n)), rows.generate(llama_requests(rows, n)))


def test_another_family_is_decoded_in_slots_too():
    tokenizer = byte_tokenizer()
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=200,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    slots, rows = HuggingFaceEngine(model, tokenizer, cache_tokens=ROOMY), HuggingFaceEngine(model, tokenizer)
    same(slots.generate(llama_requests(slots, 30)), rows.generate(llama_requests(rows, 30)))


def longer(engine, lengths):
    """Requests that write so many tokens each, as nothing ends them before."""
    asked = llama_requests(engine, len(lengths))
    return [structs.replace(r, sampling=Sampling(n, 1.0)) for r, n in zip(asked, lengths, strict=True)]


def test_answers_of_any_length_share_slots_that_grow_close_up_and_are_taken_again():
    rows, slots = llama_engine(max_batch=8), llama_engine(max_batch=8, cache_tokens=1024)
    lengths = [1, 30, 2, 90, 60, 3, 3, 3, 80, 1, 1, 1, 1, 45, 2, 2, 2, 2, 2, 2, 2, 90, 1, 64]
    same(slots.generate(longer(slots, lengths)), rows.generate(longer(rows, lengths)))


# --- limits of what may be sampled
LIMITS = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.02}, {"top_p": 0.9, "top_k": 9, "min_p": 0.001}, {}]


@pytest.mark.parametrize("seed", range(4))
def test_a_device_limits_what_is_sampled_as_the_arrays_do(seed):
    rng = np.random.default_rng(seed)
    samplings = [Sampling(4, **LIMITS[n % len(LIMITS)]) for n in range(10)] + [Sampling(4, 0.0, top_k=3)]
    scores = rng.normal(size=(len(samplings), 50)).astype(np.float32) * 3
    scores[:, 7] = scores[:, 3] = scores.max(1)  # who is as likely as the last that stays stays too
    logprobs = torch.from_numpy(scores).log_softmax(-1)
    rows = [Row(Request((1,), Key(0, (n,)), sampling), None, 4) for n, sampling in enumerate(samplings)]
    found = within_limits(logprobs, Draw.of(rows, "cpu").limits).numpy()
    for one, array, sampling in zip(found, logprobs.numpy(), samplings, strict=True):
        expected = restricted(array, sampling)
        assert np.array_equal(np.isinf(one), np.isinf(expected))
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-12)


def test_what_fits_no_cache_is_refused_by_name_and_others_are_answered():
    engine = llama_engine(max_batch=4, cache_tokens=64)
    short, long = longer(engine, [3, 120])
    assert len(engine.generate([short])[0].token_ids) <= 3
    with pytest.raises(EngineError, match=r"do not fit engine\.cache_tokens=64.*engine\.max_batch \(4\)"):
        engine.generate([long])
    spoiled = structs.replace(short, prompt_ids=(5, 10**6))
    with pytest.raises(EngineError, match="the prompt has token 1000000"):
        engine.generate([spoiled])
    assert len(engine.generate([short])[0].token_ids) <= 3


def test_limits_of_sampling_and_texts_that_end_an_answer_hold_in_slots():
    rows, slots = llama_engine(), llama_engine(cache_tokens=ROOMY)
    kinds = [
        Sampling(8, 1.0, top_k=3),
        Sampling(8, 0.9, tuple("abcdefghijklmnopqrstuvwxyz0123456789")),
        Sampling(8, 1.0, top_p=0.5),
        Sampling(8),
    ]
    asked = [structs.replace(r, sampling=kinds[i % 4]) for i, r in enumerate(llama_requests(rows, 40))]
    found = slots.generate(asked)
    same(found, rows.generate(asked))
    assert any(answer.finish == "stop" for answer in found)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.99}])
def test_a_request_enters_while_others_are_under_way_and_no_long_answer_holds_it_up(limits):
    """Within limits an answer was decoded by rows, up to its end, while all others waited."""
    rows, slots = llama_engine(), llama_engine(cache_tokens=ROOMY)
    asked = longer(slots, [120] + [2] * 12)
    long, *short = (structs.replace(r, sampling=replace(r.sampling, **limits)) for r in asked)
    ended = []

    async def play():
        async def ask(request):
            answer = await slots.sample(request)
            ended.append(request)
            return answer

        first = asyncio.create_task(ask(long))
        found = []
        for request in short:  # one after the other, each when the one before was answered
            found.append(await ask(request))
        return [await first, *found]

    same(asyncio.run(play()), rows.generate([long, *short]))
    assert ended[-1] is long


def test_new_weights_wait_for_the_answers_under_way():
    rows, slots = llama_engine(), llama_engine(cache_tokens=ROOMY)
    weights = {name: value * 0.5 for name, value in slots.model.state_dict().items()}
    asked = longer(slots, [100, 40])
    before = rows.generate(asked)
    started = threading.Event()
    slots.model.register_forward_pre_hook(lambda *_: started.set())
    found = []
    asking = threading.Thread(target=lambda: found.extend(slots.generate(asked)))
    asking.start()
    assert started.wait(60)
    slots.load_weights(weights, 3)
    asking.join(60)
    same(found, before)
    rows.load_weights(weights, 3)
    same(slots.generate(asked), rows.generate(asked))


def test_an_error_of_the_device_ends_what_is_under_way_and_the_next_answers_come():
    engine = llama_engine(cache_tokens=ROOMY)
    asked = longer(engine, [20, 20, 5])
    right = engine.generate(asked)
    engine.prefixes.clear()
    steps = []

    def breaks(*_):
        steps.append(1)
        if len(steps) == 4:
            raise RuntimeError("an illegal memory access")

    hook = engine.model.register_forward_pre_hook(breaks)
    with pytest.raises(EngineError, match="the sampler failed: RuntimeError: an illegal memory access"):
        engine.generate(asked)
    hook.remove()
    same(engine.generate(asked), right)


def test_a_model_that_slots_cannot_hold_is_decoded_by_rows_and_that_is_logged(caplog):
    tokenizer = byte_tokenizer()
    shape = GPTNeoConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=4, window_size=8, max_position_embeddings=200, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    engine = HuggingFaceEngine(AutoModelForCausalLM.from_config(shape), tokenizer, cache_tokens=ROOMY)
    assert (
        "GPTNeoForCausalLM is decoded without CUDA graphs: its layers do not keep all tokens" in caplog.text
    )
    assert not hasattr(engine, "sample")
    assert engine.generate(llama_requests(engine, 3))


def test_a_batch_invariant_network_says_the_same_bits_in_slots_and_rows():
    tokenizer = byte_tokenizer()
    model = llama_engine().model
    make_invariant(model)
    rows, slots = HuggingFaceEngine(model, tokenizer), HuggingFaceEngine(model, tokenizer, cache_tokens=ROOMY)
    asked = longer(rows, [30, 2, 60, 5, 5, 40, 3, 8])
    assert slots.generate(asked) == rows.generate(asked)
