import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.samplers.huggingface.test_huggingface import make_engine

from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.batch.packing import (
    BY_BLOCKS,
    BY_MASK,
    Segment,
    length_of,
    micro_batches,
    plan_rows,
    share_prefixes,
    token_values,
)
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import score

BATCHINGS = ["padded", "packed"]
lengths_of = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def make_samples_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        places = np.sort(rng.choice(np.arange(1, length), max(1, length // 3), replace=False))
        ids = tuple(rng.integers(6, 200, length).tolist())
        samples.append(Sample(ids, places, {"advantages": np.ones(len(places), np.float32)}))
    return samples


def numbers_of(lengths, max_tokens, batching):
    """The rows of samples that have nothing in common, as numbers."""
    ids = [tuple(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths)]
    plan = plan_rows(ids, max_tokens, batching, BY_MASK)
    return [[[i for segment in row for i in segment.members] for row in batch] for batch in plan]


@given(lengths_of, st.integers(1, 400), st.sampled_from(BATCHINGS))
def test_every_sample_is_in_one_row_of_one_micro_batch_that_fits(lengths, max_tokens, batching):
    plan = numbers_of(lengths, max_tokens, batching)
    assert sorted(i for batch in plan for row in batch for i in row) == list(range(len(lengths)))
    for batch in plan:
        widest = max(sum(lengths[i] for i in row) for row in batch)
        assert widest <= max(lengths)
        assert len(batch) * widest <= max_tokens or len(batch) == 1


@given(lengths_of, st.integers(60, 400))
def test_packing_never_costs_more_rows_and_padded_rows_of_like_length_lie_together(lengths, max_tokens):
    packed, padded = (numbers_of(lengths, max_tokens, name) for name in ("packed", "padded"))
    assert sum(map(len, packed)) <= sum(map(len, padded)) == len(lengths)
    in_order = [lengths[i] for batch in padded for (i,) in batch]
    assert in_order == sorted(lengths)


def test_packing_fills_the_gaps_of_long_rows():
    # rows of 10: 10 | 7 + 3 | 6 + 4 | 5 + 5, all full
    assert numbers_of([3, 10, 7, 4, 5, 6, 5], 1000, "packed") == [[[1], [2, 0], [5, 3], [4, 6]]]


def test_no_samples_are_no_batches():
    assert numbers_of([], 10, "packed") == numbers_of([], 10, "padded") == []


@pytest.fixture(scope="module", params=["tiny", "huggingface"])
def engine(request):
    if request.param == "tiny":
        shape = TinyShape(width=16, layers=2, heads=2, context=64)
        return policy_of(TinyEngine(["Up"] * 3 + ["b"] * 200, shape, seed=1))
    return policy_of(make_engine())


def test_packed_samples_do_not_see_each_other(engine):
    samples = make_samples_of([9, 5, 2, 7, 12, 3], seed=4)
    vocabulary = engine.logits(
        torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([[False, True]])
    ).shape[1]
    samples = [Sample(tuple(i % vocabulary for i in s.ids), s.trained, s.columns) for s in samples]

    def ask(chosen, batching):
        return token_values(chosen, lambda m: score(engine, m, 1.0).logprobs, 1000, 0, "cpu", batching)

    packed = ask(samples, "packed")
    starts = [m.starts for m in micro_batches(samples, 1000, 0, "cpu", "packed", sharing=BY_MASK)]
    assert all(b is not None and b.ndim == 2 for b in starts)
    for sample, found in zip(samples, packed, strict=True):
        np.testing.assert_allclose(found, ask([sample], "padded")[0], atol=1e-5)
    changed = [Sample(tuple(7 for _ in samples[0].ids), samples[0].trained, samples[0].columns), *samples[1:]]
    for before, after in zip(packed[1:], ask(changed, "packed")[1:], strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)


def make_families(families, seed=0):
    """Per family: how many tokens its members share, and how many each has for itself; (shared, trained from)."""
    rng = np.random.default_rng(seed)
    samples = []
    for shared, own in families:
        prefix = tuple(rng.integers(6, 200, shared).tolist())
        for length in own:
            ids = prefix + tuple(rng.integers(6, 200, length).tolist())
            first = int(rng.integers(max(1, shared - 1), len(ids)))
            places = np.unique([first, *rng.integers(first, len(ids), 3).tolist()])
            samples.append(Sample(ids, places, {"advantages": np.ones(len(places), np.float32)}))
    return [samples[i] for i in rng.permutation(len(samples))]


families = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 8), min_size=1, max_size=5)), min_size=1, max_size=5
)


@given(families, st.integers(1, 200), st.integers(0, 9))
def test_pieces_share_what_they_begin_with(families, max_tokens, seed):
    ids = [sample.ids for sample in make_families(families, seed)]
    ids += ids[::3]  # and some are there twice
    lengths = [len(i) for i in ids]
    segments = share_prefixes(ids, max_tokens)
    assert sorted(i for segment in segments for i in segment.members) == list(range(len(ids)))
    for segment in segments:
        for last, i, shared in zip(segment.members, segment.members[1:], segment.shared[1:], strict=False):
            assert ids[i][:shared] == ids[last][:shared]
            assert lengths[i] <= 4 * shared
            assert shared == lengths[i] or ids[i] != ids[last]
        assert segment.shared[0] == 0
        assert len(segment.shared) == len(segment.members)
        assert len(segment.members) == 1 or length_of(segment, lengths) <= max(max_tokens, *lengths)
    plan = plan_rows(ids, max_tokens, "packed", BY_BLOCKS)
    assert sorted(i for b in plan for row in b for p in row for i in p.members) == list(range(len(ids)))
    for batching, sharing in (("padded", BY_MASK), ("packed", None)):
        rows = [row for batch in plan_rows(ids, max_tokens, batching, sharing) for row in batch]
        assert not any(any(segment.shared) for row in rows for segment in row)


def test_members_of_a_group_are_one_piece_of_half_the_tokens():
    prompt = tuple(range(10, 60))
    ids = [(*prompt, 100 + i, 7) for i in range(4)] + [(1, 2)]
    segments = share_prefixes(ids, 1000)
    assert segments == [Segment((4,)), Segment((0, 1, 2, 3), (0, 50, 50, 50))]
    assert length_of(segments[1], [52, 52, 52, 52, 2]) == 50 + 4 * 2


def test_a_prefix_of_less_than_a_quarter_of_a_sample_is_not_shared_and_few_tokens_are_not_worth_a_mask():
    short = [(*range(10, 32), *range(i, i + 68)) for i in (200, 400)]
    assert share_prefixes(short, 1000) == [Segment((0,)), Segment((1,))]
    rest = [tuple(range(1000 * i, 1000 * i + 90)) for i in range(2, 9)]
    pair = [(*range(10, 60), *range(i, i + 40)) for i in (200, 400)]
    assert share_prefixes(pair + rest, 1000)[0] == Segment((0, 1), (0, 50))
    for sharing, saved in ((BY_MASK, 0), (BY_BLOCKS, 50)):  # of 810 tokens
        rows = [row for batch in plan_rows(pair + rest, 1000, "packed", sharing) for row in batch]
        assert sum(sum(segment.shared) for row in rows for segment in row) == saved


def test_long_answers_to_one_prompt_share_it_too():
    """Two groups of eight; the prompt is less than half of a sample."""
    prompts = [tuple(range(begin, begin + 60)) for begin in (100, 300)]
    ids = [(*prompt, *range(1000 * i, 1000 * i + 90)) for prompt in prompts for i in range(1, 9)]
    # Four samples fit into a row of 512: twelve of sixteen leave out the prompt. Where attention goes by blocks, a row
    # takes a whole group.
    for sharing, left_out in ((BY_MASK, 12), (BY_BLOCKS, 14)):
        rows = [row for batch in plan_rows(ids, 8192, "packed", sharing) for row in batch]
        assert (
            sum(length_of(segment, [150] * 16) for row in rows for segment in row) == 16 * 150 - left_out * 60
        )


def test_prompts_that_begin_alike_share_instructions_and_equal_ones_all_of_it():
    """Turns of their own: the same instructions, then what is seen, then a question that all end in, and an answer."""
    begin, ask = tuple(range(100, 140)), (1, 2, 3, 4, 5)
    ids = [(*begin, *range(seen, seen + 8), *ask, said) for seen in (20, 40, 60) for said in (70, 71, 72)]
    (segment,) = share_prefixes(ids, 1000)
    assert segment.shared == (0, 53, 53, 40, 53, 53, 40, 53, 53)
    # instructions once, what is seen and the question thrice, and 9 answers
    assert length_of(segment, [len(one) for one in ids]) == 40 + 3 * (8 + 5) + 9


def test_equal_prompts_with_one_token_of_answer_each_are_read_once():
    prompts = [(*range(100, 120), seen) for seen in (1, 2)]
    samples = [
        Sample((*prompt, said), np.array([21]), {"advantages": np.float32([said])})
        for said in (7, 8, 7, 9)
        for prompt in prompts
    ]
    (micro,) = micro_batches(samples, 1000, 0, "cpu", "packed", BY_BLOCKS)
    assert micro.lengths.tolist() == [20 + 2]
    assert micro.ids.shape == (1, 20 + 2 + 1)
    assert micro.where.nonzero()[:, 1].tolist() == [21, 22]  # behind the last token of each prompt
    assert micro.places.tolist() == [0] * 4 + [1] * 4
    assert micro.targets.tolist() == micro.columns["advantages"].tolist() == [7, 8, 7, 9] * 2
    values = token_values(samples, lambda m: m.targets.float(), 1000, 0, "cpu", "packed", BY_BLOCKS)
    assert [float(one[0]) for one in values] == [sample.ids[-1] for sample in samples]


def test_rows_of_shared_samples_are_of_like_length():
    rng = np.random.default_rng(0)
    begin = tuple(range(100, 140))
    ids = [(*begin, *rng.integers(0, 90, 30).tolist()) for _ in range(20)]  # 40 + 20 * 30: more than a row
    rows = [row for batch in plan_rows(ids, 8192, "packed", BY_MASK) for row in batch]
    sizes = sorted(sum(length_of(segment, [70] * 20) for segment in row) for row in rows)
    assert len(sizes) == 2
    assert sum(sizes) <= 2 * 40 + 20 * 30  # less where two happen to go on alike
    assert sizes[1] - sizes[0] <= 2 * 30


def test_a_path_has_at_most_so_many_pieces():
    """A comb: each sample goes on from the tooth before, a little further than that one."""
    stem = [*range(100, 400)]
    ids = [(*stem[: 100 + 10 * i], i, *range(20)) for i in range(9)]
    (segment,) = share_prefixes(ids, 100_000)
    assert segment.members == tuple(range(9))
    samples = [Sample((*one, 1), np.array([len(one)]), {}) for one in ids]
    (micro,) = micro_batches(samples, 100_000, 0, "cpu", "packed", sharing=BY_MASK)
    assert micro.starts.shape[0] == 1 + 2 * 3
    assert segment.shared == (0, 100, 110, 120, 120, 120, 120, 120, 120)


@pytest.mark.parametrize("at_once", [100, 3])
def test_samples_that_share_a_stem_are_to_the_network_as_if_they_were_alone(engine, at_once, monkeypatch):
    """Also where scores are made of few places at once."""
    assert engine.sharing is not None
    samples = make_families([(20, [3, 5, 1, 4]), (9, [2, 2]), (1, [6])], seed=3)
    vocabulary = engine.logits(
        torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([[False, True]])
    ).shape[1]
    monkeypatch.setattr("shoal.train.agent.policies.policy.SCORES", at_once * vocabulary)
    samples = [Sample(tuple(i % vocabulary for i in s.ids), s.trained, s.columns) for s in samples]
    rng = np.random.default_rng(5)
    stem = tuple(rng.integers(0, vocabulary, 20).tolist())
    for depth in (15, 17, 18, 19, 18, 16):  # they leave each other ever later
        own = tuple(rng.integers(0, vocabulary, 4).tolist())
        samples.append(
            Sample(stem[:depth] + own, np.array([depth + 2]), {"advantages": np.ones(1, np.float32)})
        )
    # written twice
    samples += [s.with_column("advantages", -0.3 * s.columns["advantages"]) for s in samples[::2]]
    again = samples[3]  # the same tokens, others of them trained
    samples.append(Sample(again.ids, again.trained[-1:], {"advantages": np.ones(1, np.float32)}))
    micros = list(micro_batches(samples, 1000, 0, "cpu", "packed", sharing=BY_MASK))
    assert any(m.starts is not None and m.starts.ndim == 3 for m in micros)
    assert sum(m.ids.numel() for m in micros) < sum(len(s.ids) for s in samples)
    assert sum(len(m.samples) for m in micros) == sum(len(s.trained) for s in samples)
    assert sorted({int(n) for m in micros for n in m.samples}) == list(range(len(samples))), "one micro-batch"

    def ask(batching, max_tokens, sharing):
        def compute(micro):
            return score(engine, micro, 1.0).logprobs

        engine.module.zero_grad()
        for micro in micro_batches(samples, max_tokens, 0, "cpu", batching, sharing):
            (compute(micro) * micro.columns["advantages"]).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in engine.module.parameters()])
        return token_values(samples, compute, max_tokens, 0, "cpu", batching, sharing), gradient

    values, gradient = ask("padded", 1, None)
    for max_tokens in (1000, 45):
        found, shared_gradient = ask("packed", max_tokens, engine.sharing)
        for one, other in zip(found, values, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        torch.testing.assert_close(shared_gradient, gradient, atol=1e-4, rtol=1e-4)
