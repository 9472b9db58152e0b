import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.data import Trajectory, Turn
from shoal.rollout.engines.tiny import TinyEngine
from shoal.rollout.engines.tiny_network import TinyShape
from shoal.train.agent_config import Algorithm
from shoal.train.samples import Sample, Span, make_samples, micro_batches
from shoal.train.token_losses import clipped_token_loss, entropy_of
from shoal.train.update import Totals, token_loss, update

ENGINE = TinyEngine(["Up"], TinyShape(width=16, layers=1, heads=2, context=64), seed=1)


def random_samples(n, seed):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(n):
        length = int(rng.integers(4, 20))
        split = int(rng.integers(1, length - 1))
        spans = [
            Span(split, tuple(rng.normal(-1, 0.3, (length - split + 1) // 2).tolist()), float(rng.normal()))
        ]
        samples.append(Sample(tuple(rng.integers(6, 60, length).tolist()), tuple(spans)))
    return samples


def gradient(samples, max_tokens):
    ENGINE.model.zero_grad()
    n_tokens, totals = sum(s.n_trained for s in samples), Totals()
    for micro in micro_batches(samples, max_tokens, ENGINE.pad_id, "cpu"):
        (token_loss(ENGINE, micro, Algorithm(), 1.0, totals) / n_tokens).backward()
    return torch.cat([p.grad.flatten() for p in ENGINE.model.parameters()]), totals


@given(st.integers(1, 12), st.integers(1, 300), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_gradient_does_not_depend_on_micro_batches_order_or_padding(n, max_tokens, seed):
    samples = random_samples(n, seed)
    whole, totals = gradient(samples, 10**9)
    order = np.random.default_rng(seed).permutation(n)
    split, split_totals = gradient([samples[i] for i in order], max_tokens)
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)
    assert split_totals.tokens == totals.tokens == sum(s.n_trained for s in samples)
    assert split_totals.loss == pytest.approx(totals.loss, abs=1e-4)


def test_the_clipped_loss_by_hand():
    # ratio = exp(log p - log q); advantage 1: min(r, 1.28); advantage -1: -min(-r, -clip(r)) = max(r, 0.8)
    new = torch.log(torch.tensor([2.0, 1.1, 0.5, 0.5, 2.0]))
    loss = clipped_token_loss(new, torch.zeros(5), torch.tensor([1.0, 1, 1, -1, -1]), 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, -1.1, -0.5, 0.8, 2.0]))


def test_a_clipped_token_has_no_gradient():
    new = torch.log(torch.tensor([2.0, 0.5, 1.0])).requires_grad_()
    clipped_token_loss(new, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2).sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, -1.0]))


def test_entropy_by_hand():
    scores = torch.log(torch.tensor([[0.5, 0.5], [1.0, 1e-30]]))
    torch.testing.assert_close(entropy_of(scores), torch.tensor([np.log(2), 0.0]), check_dtype=False)


def test_the_loss_of_tokens_is_that_of_a_loop_over_them():
    samples = random_samples(5, 3)
    expected = 0.0
    for sample in samples:
        hidden = ENGINE.model.hidden(torch.tensor([sample.ids]), torch.zeros(1, dtype=torch.int64))
        scores = ENGINE.model.head(hidden)[0].log_softmax(-1).detach()
        for span in sample.spans:
            for offset, old in enumerate(span.logprobs):
                row = scores[span.start + offset - 1]
                ratio = float(torch.exp(row[sample.ids[span.start + offset]] - old))
                clipped = min(max(ratio, 0.8), 1.28)
                expected -= min(ratio * span.advantage, clipped * span.advantage)
                expected -= 0.02 * float(-(row.exp() * row).sum())
    _, totals = gradient(samples, 64)
    assert totals.loss == pytest.approx(expected, rel=1e-5)


def turn(prompt, response):
    return Turn("", prompt, response, (-1.0,) * len(response), "", None, True, 0.0, "")


def test_turns_that_extend_each_other_are_one_sample_and_others_are_their_own():
    turns = (turn((1, 2), (3,)), turn((1, 2, 3, 4), (5, 6)), turn((9,), (7,)))
    samples = make_samples(Trajectory("e", 0, 0, 0, 0, turns, False, True, False), [0.1, 0.2, 0.3])
    assert samples == [
        Sample((1, 2, 3, 4, 5, 6), (Span(2, (-1.0,), 0.1), Span(4, (-1.0, -1.0), 0.2))),
        Sample((9, 7), (Span(1, (-1.0,), 0.3),)),
    ]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=6), st.booleans())
def test_every_token_that_was_written_is_learned_from_exactly_once(lengths, append):
    written, turns, context = 0, [], (7,)
    for episode in lengths:
        for n in episode:
            response = tuple(range(100 + written, 100 + written + n))
            turns.append(turn(context, response))
            context = context + response + (8,) if append else (7,)
            written += n
    trajectory = Trajectory("e", 0, 0, 0, 0, tuple(turns), False, True, False)
    samples = make_samples(trajectory, [0.0] * len(turns))
    seen = [s.ids[span.start + i] for s in samples for span in s.spans for i in range(len(span.logprobs))]
    assert seen == list(range(100, 100 + written))


def test_an_update_moves_towards_what_was_good():
    engine = TinyEngine(["Up"], TinyShape(width=16, layers=1, heads=2, context=64), seed=2)
    good, bad = Sample((7, 8, 9), (Span(2, (-4.0,), 1.0),)), Sample((7, 8, 10), (Span(2, (-4.0,), -1.0),))

    def preference():
        scores = engine.logits_at(
            torch.tensor([[7, 8, 9]]), torch.tensor([3]), torch.tensor([[False, False, True]])
        )
        return float((scores[0, 9] - scores[0, 10]).detach())

    before = preference()
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=0.01)
    metrics = update(engine, optimizer, [good, bad], Algorithm(clip_ratio_high=9.0), 1.0, 0, 0)
    assert preference() > before
    assert metrics["trained_tokens"] == 2
    assert engine.weights_version == 1
