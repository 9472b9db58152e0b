import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.test_huggingface_engine import make_engine

from shoal.rollout.engines.tiny import TinyEngine
from shoal.rollout.engines.tiny_network import TinyShape
from shoal.train.packing import cells, cost, plan_batches
from shoal.train.samples import Sample, micro_batches, token_values
from shoal.train.update import logprobs_of

BATCHINGS = ["auto", "padded", "bucketed", "packed"]
lengths_of = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def make_samples_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        places = np.sort(rng.choice(np.arange(1, length), max(1, length // 3), replace=False))
        ids = tuple(rng.integers(6, 200, length).tolist())
        samples.append(Sample(ids, places, {"advantages": np.ones(len(places), np.float32)}))
    return samples


@given(lengths_of, st.integers(1, 400), st.sampled_from(BATCHINGS))
def test_every_sample_is_in_one_row_of_one_micro_batch_that_fits(lengths, max_tokens, batching):
    plan = plan_batches(lengths, max_tokens, batching)
    assert sorted(i for batch in plan for row in batch for i in row) == list(range(len(lengths)))
    for batch in plan:
        widest = max(sum(lengths[i] for i in row) for row in batch)
        assert widest <= max(lengths)
        assert len(batch) * widest <= max_tokens or len(batch) == 1


@given(lengths_of, st.integers(60, 400))
def test_packing_never_costs_more_rows_and_auto_is_the_cheapest_of_its_plans(lengths, max_tokens):
    plans = {name: plan_batches(lengths, max_tokens, name) for name in BATCHINGS}
    rows = {name: sum(map(len, plan)) for name, plan in plans.items()}
    assert rows["packed"] <= rows["padded"] == rows["bucketed"] == len(lengths)
    assert cost(plans["auto"], lengths) == min(cost(plans[name], lengths) for name in ("bucketed", "packed"))


def test_packing_fills_the_gaps_of_long_rows():
    # rows of 10: 10 | 7 + 3 | 6 + 4 | 5 + 5, all full
    plan = plan_batches([3, 10, 7, 4, 5, 6, 5], 1000, "packed")
    assert plan == [[[1], [2, 0], [5, 3], [6, 4]]]
    assert cells(plan, [3, 10, 7, 4, 5, 6, 5]) == 40


def test_no_samples_are_no_batches():
    assert plan_batches([], 10, "auto") == []


@pytest.fixture(scope="module", params=["tiny", "huggingface"])
def engine(request):
    if request.param == "tiny":
        return TinyEngine(
            ["Up"] * 3 + ["b"] * 200, TinyShape(width=16, layers=2, heads=2, context=64), seed=1
        )
    return make_engine()


def test_packed_samples_do_not_see_each_other(engine):
    samples = make_samples_of([9, 5, 2, 7, 12, 3], seed=4)
    vocabulary = engine.logits_at(
        torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([[False, True]])
    ).shape[1]
    samples = [Sample(tuple(i % vocabulary for i in s.ids), s.places, s.columns) for s in samples]

    def ask(chosen, batching):
        return token_values(chosen, lambda m: logprobs_of(engine, m, 1.0)[1], 1000, 0, "cpu", batching)

    packed = ask(samples, "packed")
    assert any(m.begins is not None for m in micro_batches(samples, 1000, 0, "cpu", "packed"))
    for sample, found in zip(samples, packed, strict=True):
        np.testing.assert_allclose(found, ask([sample], "padded")[0], atol=1e-5)
    changed = [Sample(tuple(7 for _ in samples[0].ids), samples[0].places, samples[0].columns), *samples[1:]]
    for before, after in zip(packed[1:], ask(changed, "packed")[1:], strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)


def test_packed_gradients_of_a_transformers_model_are_those_of_single_rows():
    engine = make_engine()
    samples = make_samples_of([9, 5, 2, 7, 12, 3], seed=2)

    def gradient(batching, max_tokens):
        engine.model.zero_grad()
        for micro in micro_batches(samples, max_tokens, 0, "cpu", batching):
            logprobs_of(engine, micro, 1.0)[1].sum().backward()
        return torch.cat([p.grad.flatten() for p in engine.model.parameters()])

    alone = gradient("padded", 1)
    for batching, max_tokens in (("packed", 1000), ("packed", 24), ("bucketed", 1000)):
        torch.testing.assert_close(gradient(batching, max_tokens), alone, atol=1e-5, rtol=1e-4)
