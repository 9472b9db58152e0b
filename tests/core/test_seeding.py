import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.seeding import derive_seed, stream, stream_key

NAMES = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8)), max_size=4)


@given(st.integers(), NAMES)
def test_a_stream_is_a_function_of_seed_and_names(seed, names):
    assert stream(seed, *names).bytes(8) == stream(seed, *names).bytes(8)
    assert 0 <= derive_seed(seed, *names) < 2**63


@given(NAMES, NAMES)
def test_different_names_give_different_streams(left, right):
    if [(type(n), n) for n in left] != [(type(n), n) for n in right]:
        assert stream_key(0, *left) != stream_key(0, *right)


def test_streams_never_change_between_versions():
    # Recorded once: a change here would silently change every seeded result in the field.
    assert derive_seed(0) == 5614996097567854355
    assert derive_seed(7, "env", 3, 1) == 154216778471508157
    assert stream(7, "env", 3, 1).integers(2**32, size=3).tolist() == [2905875878, 3211240923, 3922039305]


def test_neighbouring_streams_are_uncorrelated():
    draws = np.stack([stream(0, "env", i).random(256) for i in range(64)])
    correlation = np.corrcoef(draws)[np.triu_indices(64, 1)]
    assert abs(correlation).max() < 5 / np.sqrt(256)  # 2016 pairs: 5 sigma


@pytest.mark.parametrize("name", [1.0, None, True, b"x"])
def test_names_that_are_neither_text_nor_integer_are_refused(name):
    with pytest.raises(TypeError, match="must be int or str"):
        derive_seed(0, name)


def test_numpy_integers_are_the_same_names_as_integers():
    assert derive_seed(0, np.int64(5)) == derive_seed(0, 5)


def test_global_random_state_is_left_alone():
    before = random.getstate(), np.random.get_state()[1].tolist()
    stream(1, "a").random(10)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_stream_is_philox_under_its_key_and_survives_pickling():
    for seed in range(20):
        key = np.array(stream_key(seed, "env", seed), dtype=np.uint64)
        expected = np.random.Generator(np.random.Philox(key=key)).normal(size=5)
        fresh = stream(seed, "env", seed)
        sent = pickle.loads(pickle.dumps(fresh))
        assert np.array_equal(fresh.normal(size=5), expected)
        assert np.array_equal(sent.normal(size=5), expected)
