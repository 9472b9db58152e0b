"""Attention block by block, beside one through a mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.rollout.doubles import llama_engine

from shoal.train.agent.batch.packing import BY_BLOCKS, BY_MASK, micro_batches
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.attention import RowMask
from shoal.train.agent.policies.huggingface import HuggingFacePolicy
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import score, training_mode

# Three rows of 9 tokens: two samples and padding; a stem, a branch of all of it and one of its first two tokens,
# which goes on from that branch's first as well; one sample.
STARTS = [[0, 0, 0, 3, 3, 3, 3, 7, 8], [0, 0, 0, 3, 3, 3, 6, 6, 8], [0] * 9]
LENGTHS = [7, 8, 9]
NONE = [0] * 9
FIRST = [NONE, [0] * 9, NONE], [NONE, [0, 0, 0, 3, 3, 3, 2, 2, 0], NONE]
SECOND = [NONE, [0, 0, 0, 0, 0, 0, 3, 3, 0], NONE], [NONE, [0, 0, 0, 0, 0, 0, 4, 4, 0], NONE]
SEES = [
    ["100000000", "110000000", "111000000", "000100000", "000110000", "000111000", "000111100"],
    ["100000000", "110000000", "111000000", "111100000", "111110000", "111111000", "110100100", "110100110"],
    ["1" * (i + 1) + "0" * (8 - i) for i in range(9)],
]


def mask_of():
    """What `SEES` says, as numbers; padding sees itself."""
    mask = torch.eye(9, dtype=torch.bool).repeat(3, 1, 1, 1)
    for row, lines in zip(mask, SEES, strict=True):
        for i, line in enumerate(lines):
            row[0, i] = torch.tensor([place == "1" for place in line])
    return mask


def test_attention_in_blocks_is_that_through_the_mask_with_its_gradients():
    draw = torch.Generator().manual_seed(0)
    mask, starts = mask_of(), torch.tensor([STARTS, *FIRST, *SECOND])
    query, key, value, weight = torch.randn(4, 3, 2, 9, 4, generator=draw, dtype=torch.float64).unbind()
    weight *= torch.tensor([[place < length for place in range(9)] for length in LENGTHS])[:, None, :, None]
    parts = RowMask.of(starts, torch.tensor(LENGTHS))
    found = []
    for given in (mask, parts):
        inputs = [each.clone().requires_grad_() for each in (query, key, value)]
        answer = F.scaled_dot_product_attention(*inputs, attn_mask=given, scale=0.3)
        assert type(answer) is torch.Tensor
        (answer * weight).sum().backward()
        found.append([answer * (weight != 0), *(each.grad for each in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert type(parts[:, :, 1:]) is torch.Tensor
    assert parts.shape == mask.shape


def test_queries_may_be_few_of_the_tokens():
    draw = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 3, 2, 9, 4, generator=draw, dtype=torch.float64).unbind()
    parts = RowMask.of(torch.tensor([STARTS, *FIRST, *SECOND]), torch.tensor(LENGTHS))
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_of())
    # Those behind the first that does not ascend do not count.
    places = torch.tensor([[1, 4, 6, 0], [0, 5, 7, 1], [8, 0, 1, 2]])
    few = query.gather(2, places[:, None, :, None].expand(-1, 2, -1, 4))
    found = F.scaled_dot_product_attention(few, key, value, attn_mask=parts.at(places))
    for row, asked in enumerate(([1, 4, 6], [0, 5, 7], [8])):
        torch.testing.assert_close(found[row, :, : len(asked)], whole[row][:, asked])
    assert not found[:, :, 3].any()


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_many_blocks_are_read_as_their_definition_says(seed):
    """Branches of branches, some shorter and some longer than a block."""
    rng = np.random.default_rng(seed)
    stems, samples = [()], []
    for _ in range(40):
        stem = stems[rng.integers(len(stems))]
        stem = stem[: rng.integers(len(stem) + 1)]
        ids = stem + tuple(rng.integers(0, 9, rng.integers(2, 150 if rng.random() < 0.2 else 20)).tolist())
        stems.append(ids[:-1])
        samples.append(Sample(ids, np.arange(max(1, len(stem)), len(ids)), {}))
    for micro in micro_batches(samples, 1500, 0, "cpu", "packed", BY_BLOCKS):
        starts = micro.starts if micro.starts.ndim == 3 else micro.starts[None]
        batch, length = micro.ids.shape
        first, *spans = starts[..., None]
        place = torch.arange(length)
        mask = (place <= place[:, None]) & (place >= first)
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            mask |= (place >= begin) & (place < end)
        draw = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, batch, 1, length, 2, generator=draw, dtype=torch.float64).unbind()
        parts = RowMask.of(starts, micro.lengths)
        assert max(map(len, parts.blocks)) > 1
        real = place < micro.lengths[:, None]
        whole = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])[:, 0]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=parts)[:, 0]
        torch.testing.assert_close(found[real], whole[real])
        predicting = micro.where.roll(-1, 1)
        asked = predicting.byte().argsort(dim=1, descending=True, stable=True)
        asked = asked[:, : int(predicting.sum(1).max())]
        counts = torch.arange(asked.shape[1]) < predicting.sum(1)[:, None]
        few = query.gather(2, asked[:, None, :, None].expand(-1, 1, -1, 2))
        found = F.scaled_dot_product_attention(few, key, value, attn_mask=parts.at(asked))[:, 0]
        torch.testing.assert_close(found[counts], whole[predicting])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_reads_packed_rows_in_blocks(checkpointing, monkeypatch):
    """Log-probs and gradients are those of a mask, also where layers are computed again."""
    policy, rng = policy_of(llama_engine()), np.random.default_rng(4)
    stem = tuple(rng.integers(6, 200, 20).tolist())
    samples = [
        Sample(
            stem[:shared] + tuple(rng.integers(6, 200, own).tolist()), np.arange(shared + 1, shared + own), {}
        )
        for shared, own in ((0, 9), (20, 7), (20, 5), (18, 6), (0, 30), (12, 8))
    ]
    assert policy.sharing is BY_BLOCKS
    found = []
    for sharing in (BY_BLOCKS, BY_MASK):
        monkeypatch.setattr(HuggingFacePolicy, "sharing", sharing)
        policy.module.zero_grad()
        said = []
        with training_mode(policy.module, checkpointing):
            for micro in micro_batches(samples, 70, policy.pad_id, "cpu", "packed", BY_BLOCKS):
                assert micro.starts is not None
                logprobs = score(policy, micro, 1.0).logprobs
                logprobs.square().sum().backward()
                said.append(logprobs.detach())
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.module.parameters()])
        found.append((torch.cat(said), gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_model_that_reads_the_values_of_a_mask_gets_them():
    policy = policy_of(llama_engine())

    def changed(layer, args, settings):
        mask = settings["attention_mask"]
        return args, settings | {"attention_mask": None if mask is None else mask[:, :, :, :]}

    for layer in policy.module.get_decoder().layers:
        layer.register_forward_pre_hook(changed, with_kwargs=True)
    assert policy.sharing is BY_MASK
