"""Tokens are picked by the same noise in memory and on a device, and what is equal is computed once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.rollout.doubles import llama_engine as make_engine
from tests.rollout.doubles import llama_requests as requests

from shoal.samplers.noise import Noise, gumbel, key_words, words
from shoal.samplers.sampler import Key, Sampling


def by_the_paper(counter, key):
    """Philox 4x32-10 as Salmon et al. (2011) write it down, in Python's integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def test_the_oracle_gives_the_known_answers_of_philox():
    """Of the authors' own tests (Random123, kat_vectors)."""
    assert by_the_paper((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert by_the_paper((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert by_the_paper(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("vocabulary", [1, 4, 5, 258, 1001])
def test_noise_is_made_of_philox_words_in_memory_and_on_a_device(vocabulary):
    keys = [Key(7, (3,)), Key(7, (0, 1, 2, 3))]
    tokens = [5, 2]
    both = np.stack([key_words(key) for key in keys]).astype(np.int64)
    device = torch.from_numpy(both), torch.tensor(tokens), vocabulary
    for row, (key, token) in enumerate(zip(keys, tokens, strict=True)):
        k, m, c, d = key_words(key).tolist()
        blocks = [by_the_paper((block, token, c, d), (k, m)) for block in range(-(-vocabulary // 4))]
        right = np.array(blocks).flatten()[:vocabulary]
        assert words(*device)[row].tolist() == right.tolist()
        noise = -np.log(-np.log((right + 0.5) / 2**32))
        np.testing.assert_allclose(Noise(key).rows(token + 1, vocabulary)[token], noise, rtol=1e-12)
        np.testing.assert_allclose(gumbel(*device)[row], noise, rtol=1e-12)


def test_noise_is_that_of_gumbels_distribution():
    """Its mean is Euler's constant and its variance a sixth of pi squared; 2 million draws, five standard errors."""
    noise = Noise(Key(1, (2,))).rows(40, 50_000)
    assert abs(noise.mean() - 0.5772156649) < 5 * 1.2825 / noise.size**0.5
    assert abs(noise.var() - np.pi**2 / 6) < 5 * 3.5 / noise.size**0.5
    assert len(np.unique(noise)) > 0.999 * noise.size


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 3.0, 12.0]), st.integers(1, 400))
def test_the_few_tokens_that_noise_is_made_of_hold_the_one_that_wins(seed, spread, vocabulary):
    """Flat and sharp distributions, with tokens that are ruled out, beside the sum over the whole vocabulary."""
    rng = np.random.default_rng(seed)
    logprobs = (rng.normal(size=vocabulary) * spread).astype(np.float32)
    logprobs -= np.log(np.exp(logprobs).sum())
    logprobs[rng.random(vocabulary) < 0.2] = -np.inf
    logprobs[rng.integers(vocabulary)] = -1.0
    key = Key(seed, (0, 1, 2, 3))
    noise = Noise(key)
    found = [noise.pick(logprobs) for _ in range(3)]
    assert found == (logprobs + Noise(key).rows(3, vocabulary)).argmax(1).tolist()


# --- keys and values
def test_answers_are_computed_once_until_they_part():
    """Groups of one prompt, at two temperatures: each writes what it writes alone, for less."""
    engine, alone = make_engine(max_batch=64), make_engine(max_batch=1, prefix_tokens=0)
    asked = [
        structs.replace(first, key=Key(0, (0, group, member, 0)), sampling=Sampling(8, temperature))
        for group, first in enumerate(requests(engine, 3))
        for member, temperature in enumerate([0.3] * 8 + [0.0] * 8)
    ]
    for a, b in zip(engine.generate(asked), alone.generate(asked), strict=True):
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert engine.decoded_tokens < 0.7 * alone.decoded_tokens


def test_what_all_prompts_begin_with_is_computed_once():
    sharing, alone = make_engine(), make_engine(prefix_tokens=0)
    start = tuple(range(60, 80))
    asked = [structs.replace(r, prompt_ids=start + r.prompt_ids) for r in requests(sharing, 60)]
    own = {request.prompt_ids for request in asked}
    for a, b in zip(sharing.generate(asked), alone.generate(asked), strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    batches = -(-len(asked) // sharing.max_batch)
    assert alone.computed_tokens >= sum(map(len, own))
    assert sharing.computed_tokens <= alone.computed_tokens - len(start) * (len(own) - batches)
