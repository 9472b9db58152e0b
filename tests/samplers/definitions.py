"""What an engine has to write, by definition: the whole context through the network for every token, nothing cached."""

import math

import numpy as np
from tests.rollout.doubles import next_scores

from shoal.samplers.noise import Noise


def odds_left(probabilities, sampling):
    """The tokens that may be sampled with what is left of their probability, one token after another."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    stay = [i for i in order if probabilities[i] >= sampling.min_p * probabilities[order[0]]]
    if sampling.top_k > 0:
        stay = stay[: sampling.top_k]
    whole = math.fsum(probabilities[i] for i in stay)
    nucleus, mass = [], 0.0
    for i in stay:
        nucleus.append(i)
        mass += probabilities[i]
        if mass >= sampling.top_p * whole:
            break
    left = math.fsum(probabilities[i] for i in nucleus)
    return {i: probabilities[i] / left for i in nucleus}


def by_definition(engine, request):
    """The tokens of an answer and their log-probabilities; greedy ones are at temperature 1, without limits."""
    ids, sampling, noise = list(request.prompt_ids), request.sampling, Noise(request.key)
    room = sampling.max_tokens if engine.context is None else engine.context - len(ids)
    written, logprobs = [], []
    for _ in range(min(room, sampling.max_tokens)):
        odds = (next_scores(engine, ids) / (sampling.temperature or 1.0)).double().softmax(-1).tolist()
        if sampling.temperature:
            odds, gumbel = odds_left(odds, sampling), noise.rows(1, len(odds))[0]
            token = max(odds, key=lambda i, odds=odds, gumbel=gumbel: math.log(odds[i]) + gumbel[i])
        else:
            token = odds.index(max(odds))
        written.append(token)
        logprobs.append(math.log(odds[token]))
        ids.append(token)
        if token in engine.tokenizer.end_ids:
            break
    return tuple(written), logprobs


def check_answers(engine, asked, answers, atol=2e-5):
    """That answers have the tokens of the definition, and its log-probabilities."""
    for request, answer in zip(asked, answers, strict=True):
        written, logprobs = by_definition(engine, request)
        assert answer.token_ids == written
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=atol)
