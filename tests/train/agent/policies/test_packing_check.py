"""Packing is tried on the model itself: models that mix the samples of a row are caught before the first update."""

import logging

import numpy as np
import pytest
import torch
import transformers
from tests.rollout.doubles import byte_tokenizer
from tests.rollout.doubles import llama_engine as make_engine

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.batch.packing import BY_BLOCKS, BY_MASK, token_values
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.huggingface import HuggingFacePolicy, packing_fault, safe_batching
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import score

SHAPE = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def engine_of(config):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return policy_of(HuggingFaceEngine(model, byte_tokenizer()))


MIXING = {
    "a state space": lambda: transformers.MambaConfig(**SHAPE, state_size=4),
    "linear attention in every other layer": lambda: transformers.Qwen3NextConfig(
        **SHAPE, **HEADS, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, num_experts=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
OPT = transformers.OPTConfig(
    vocab_size=258, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
)  # fmt: skip


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_the_samples_of_a_row_is_caught(kind, caplog):
    engine = engine_of(MIXING[kind]())
    assert "change by" in packing_fault(engine)
    with caplog.at_level(logging.WARNING, "shoal.train.agent.policies.huggingface"):
        assert safe_batching(engine, "packed") == "padded"
    assert "samples are not packed" in caplog.text
    assert safe_batching(engine, "padded") == "padded"
    assert engine.sharing is None


def test_a_model_that_makes_a_mask_of_its_own_is_caught_unless_it_takes_ours(monkeypatch):
    assert packing_fault(engine_of(OPT)) is None
    monkeypatch.setattr(HuggingFacePolicy, "sharing", BY_MASK)  # as on a GPU: ours is for prefixes alone
    assert "change by" in packing_fault(engine_of(OPT))


def test_models_with_causal_attention_pass():
    engines = [
        policy_of(make_engine()),
        engine_of(transformers.GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4)),
        engine_of(OPT),
        engine_of(transformers.Gemma3TextConfig(**SHAPE, **HEADS, head_dim=8, sliding_window=8)),
        policy_of(TinyEngine(["Up"] * 3, TinyShape(width=16, layers=2, heads=2, context=64), seed=1)),
    ]
    # not where a window slides
    assert [engine.sharing for engine in engines] == [BY_BLOCKS, BY_BLOCKS, BY_BLOCKS, None, BY_BLOCKS]
    for engine in engines:
        assert packing_fault(engine) is None
        assert safe_batching(engine, "packed") == "packed"


def test_positions_that_run_on_through_a_row_are_caught():
    class RunsOn:
        head = None

        def __init__(self, engine):
            self.module, self.pad_id, self._engine = engine.module, engine.pad_id, engine

        def logits(self, ids, lengths, where, starts=None):
            if starts is None:
                return self._engine.logits(ids, lengths, where)
            places = torch.arange(ids.shape[1] - 1)[None]
            apart = starts[:, :-1, None] == starts[:, None, :-1]
            mask = (apart & (places[0][:, None] >= places[0][None, :]))[:, None]
            out = self.module(input_ids=ids[:, :-1], attention_mask=mask, position_ids=places)
            return out.logits[where[:, 1:]]

    engine = RunsOn(engine_of(transformers.GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4)))
    assert "do not start anew" in packing_fault(engine)


def test_a_model_that_refuses_packed_rows_is_caught():
    class Refuses:
        def __init__(self, engine):
            self.module, self.pad_id, self._engine = engine.module, engine.pad_id, engine

        def logits(self, ids, lengths, where, starts=None):
            if starts is not None:
                raise TypeError("forward() got an unexpected keyword argument 'position_ids'")
            return self._engine.logits(ids, lengths, where)

    assert "does not take packed rows" in packing_fault(Refuses(policy_of(make_engine())))


OWN_WAYS = {
    "a window in every layer": lambda: transformers.MistralConfig(**SHAPE, **HEADS, sliding_window=8),
    "a window in every other layer": lambda: transformers.GPTNeoConfig(
        vocab_size=258, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=64,
    ),
    "scaled scores, and none after padding": lambda: transformers.GraniteConfig(
        **SHAPE, **HEADS, logits_scaling=8.0, pad_token_id=byte_tokenizer().pad_token_id
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", OWN_WAYS)
def test_samples_of_a_group_have_the_log_probs_that_the_model_itself_gives_each(way):
    """Also samples that are longer than a window."""
    engine = engine_of(OWN_WAYS[way]())
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(4)
    begin = np.arange(20) * 37 % 200
    samples = [
        Sample((*begin, *range(first, first + 6)), np.arange(20, 26), {}) for first in range(30, 70, 10)
    ]
    with torch.no_grad():
        found = token_values(
            samples,
            lambda micro: score(engine, micro, 1.0).logprobs,
            4096,
            engine.pad_id,
            "cpu",
            "packed",
            engine.sharing,
        )
        for sample, logprobs in zip(samples, found, strict=True):
            said = engine.module(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
            own = [said[place - 1, sample.ids[place]].item() for place in sample.trained]
            np.testing.assert_allclose(logprobs, own, atol=1e-4)
