"""Draws in bulk, against numpy's own draws of the same words."""

import numpy as np
import pytest

from shoal.core.seeding import stream
from shoal.envs.dice import BulkRandom


def blocks(rng, size, count):
    """The order of the dice: block by block, each from its end."""
    return [value for _ in range(count) for value in rng.random(size).tolist()[::-1]]


@pytest.mark.parametrize("make", [np.random.default_rng, lambda seed: stream(seed, "dice")])
@pytest.mark.parametrize("size", [1, 7, 32])
def test_uniform_numbers_are_numpys_own(make, size):
    dice = BulkRandom(make(5), size)
    assert [dice.uniform() for _ in range(3 * size)] == blocks(make(5), size, 3)


def test_choices_are_fair_and_within_their_bounds():
    dice = BulkRandom(stream(1))
    counts = np.bincount([dice.between(2, 5) for _ in range(40_000)], minlength=6)
    assert counts[:2].sum() == 0
    assert (
        abs(counts[2:] - 10_000).max() < 400
    )  # four and a half standard deviations: sqrt(40000 * 3 / 16) = 87
    picked = [tuple(dice.sample("abc", 2)) for _ in range(6_000)]
    assert all(len(set(pair)) == 2 for pair in picked)
    assert min(picked.count(pair) for pair in set(picked)) > 850  # six pairs of 1000 each, deviation 29
    assert sorted(dice.sample("abc", 9)) == ["a", "b", "c"]
    assert {dice.choice("xy") for _ in range(50)} == {"x", "y"}


def test_words_and_single_draws_use_each_word_once():
    dice = BulkRandom(stream(2), 4)
    words = stream(2).bit_generator.random_raw(4).tolist()
    assert dice.words(3) == words[1:]
    assert dice.below(2**53) == words[0] >> 11
    assert dice.words(9) == stream(2).bit_generator.random_raw(13).tolist()[4:]
