"""top-p, top-k and min-p: which tokens stay, and log-probabilities of the distribution that is sampled from."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.doubles import llama_engine as make_engine
from tests.rollout.doubles import next_scores
from tests.samplers.definitions import check_answers, odds_left

from shoal.core.errors import EngineError
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import NO_NUMBERS, Key, Request, Sampling, restricted
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.policies.loading import policy_of

LIMITS = st.builds(
    Sampling,
    st.just(4),
    st.just(1.0),
    st.just(()),
    st.sampled_from([1.0, 0.99, 0.7, 0.33, 0.05, 1e-9]),
    st.sampled_from([-1, 0, 1, 2, 5, 10**9]),
    st.sampled_from([0.0, 1e-3, 0.2, 0.6, 1.0]),
)


@settings(max_examples=300)
@given(scores=st.lists(st.floats(-8, 8), min_size=1, max_size=40, unique=True), sampling=LIMITS)
def test_what_stays_is_what_the_definitions_say(scores, sampling):
    scores = np.array(scores)
    probabilities = np.exp(scores - np.log(np.exp(scores).sum()))
    if np.min(np.diff(np.sort(probabilities)), initial=1.0) < 1e-9:
        return  # as likely as each other: below
    edges = np.cumsum(np.sort(probabilities)[::-1])
    if np.any(np.abs(edges - sampling.top_p * edges[-1]) < 1e-9):
        return  # at the border itself rounding decides
    found = restricted(np.log(probabilities), sampling)
    expected = odds_left(probabilities.tolist(), sampling)
    assert set(np.flatnonzero(np.isfinite(found))) == set(expected)
    for i, p in expected.items():
        assert found[i] == pytest.approx(math.log(p), abs=1e-9)
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-12)
    assert found.max() <= 0


def test_without_limits_the_log_probabilities_are_the_same_object():
    values = np.log([0.5, 0.5])
    for plain in (Sampling(4), Sampling(4, 0.0, (), 0.5, 1, 0.5), Sampling(4, 1.0, (), 1.0, -1)):
        assert restricted(values, plain) is values


def test_tokens_as_likely_as_the_last_one_stay_together():
    values = np.log([0.4, 0.2, 0.2, 0.2])
    third = np.log([0.4, 0.2, 0.2, 0.2])
    for limit in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert np.allclose(restricted(values, Sampling(4, **limit)), third)
    one = restricted(values, Sampling(4, top_k=1))
    assert one.tolist() == [0.0, -math.inf, -math.inf, -math.inf]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_weights_that_give_no_numbers_are_told_as_such_however_tokens_are_chosen(sampling):
    for engine in (TinyEngine(["Up"]), make_engine()):
        with torch.no_grad():
            next(engine.model.parameters()).fill_(math.nan)
        prompt = engine.tokenizer.start([{"role": "user", "content": "Up"}])
        asked = Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(4, **sampling))
        with SamplerClient(engine) as shared, pytest.raises(EngineError, match=NO_NUMBERS):
            shared.generate([asked])


@pytest.mark.parametrize("stop", [("",), ("</action>", ""), "</action>"])
def test_stop_texts_that_are_empty_or_would_be_read_letter_by_letter_are_refused(stop):
    with pytest.raises(ValueError, match=r"stop must be a tuple of texts, none of them empty, got"):
        Sampling(stop=stop)


def test_limits_that_are_none_are_refused():
    for wrong in (
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"top_p": math.nan},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Sampling(4, **wrong)


def tiny():
    return TinyEngine(["Up"], TinyShape(16, 1, 2, 64), seed=3)


def mixed(n):
    """Requests of every kind, half of them without limits, some greedy."""
    rng = np.random.default_rng(5)
    asked = []
    for i in range(n):
        prompt = tuple(map(int, rng.integers(6, 90, int(rng.integers(1, 40)))))
        temperature = float(rng.choice([0.0, 0.7, 1.0, 1.5]))
        limits = [
            float(rng.choice([1.0, 0.9, 0.4])),
            int(rng.choice([0, 1, 3, 20])),
            float(rng.choice([0.0, 0.05, 0.5])),
        ]
        sampling = Sampling(1 + i % 6, temperature, (), *limits[: 3 * (i % 2)])
        asked.append(Request(prompt, Key(1, (0, i, 0, 0)), sampling))
    return asked


@pytest.mark.parametrize("make", [tiny, make_engine])
def test_an_engine_writes_what_the_definitions_write_whatever_the_batch(make):
    engine = make()
    asked = mixed(50)
    whole = engine.generate(asked)
    check_answers(engine, asked, whole)
    backwards = make().generate(asked[::-1])[::-1]
    alone = []
    for request in asked:
        if not isinstance(engine, TinyEngine):
            engine.prefixes.clear()
        alone += engine.generate([request])
    for completion, other, single in zip(whole, backwards, alone, strict=True):
        assert completion.token_ids == other.token_ids == single.token_ids
        if isinstance(engine, TinyEngine) and engine.level == "L2":
            assert completion == other == single


@pytest.mark.parametrize("make", [tiny, make_engine])
def test_training_sees_the_log_probs_of_the_rollout(make):
    engine = make()
    asked = [request for request in mixed(60) if request.sampling == Sampling(request.sampling.max_tokens)]
    answers = engine.generate(asked)
    rows = [r.prompt_ids + c.token_ids for r, c in zip(asked, answers, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + (engine.pad_id,) * (longest - len(row)) for row in rows])
    where = torch.zeros(ids.shape, dtype=torch.bool)
    for place, (request, row) in enumerate(zip(asked, rows, strict=True)):
        where[place, len(request.prompt_ids) : len(row)] = True
    scores = policy_of(engine).logits(ids, torch.tensor([len(row) for row in rows]), where).log_softmax(-1)
    seen = scores.gather(1, ids[where][:, None])[:, 0].detach().numpy()
    sampled = [logprob for answer in answers for logprob in answer.logprobs]
    np.testing.assert_allclose(seen, sampled, atol=1e-5)


def test_tokens_come_as_often_as_their_probability_says():
    engine = tiny()
    sampling = Sampling(1, 1.3, (), 0.8, 12, 0.02)
    prompt = (7, 8, 9)
    asked = [Request(prompt, Key(2, (0, i, 0, 0)), sampling) for i in range(4000)]
    counts = Counter(completion.token_ids[0] for completion in engine.generate(asked))
    expected = odds_left((next_scores(engine, list(prompt)) / 1.3).double().softmax(-1).tolist(), sampling)
    assert set(counts) <= set(expected)
    chi = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert freedom > 3
    assert chi < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations
