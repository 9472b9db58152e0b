"""Spaces of text: each env has its own, and Gymnasium's tools take free text."""

import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim
from hypothesis import given
from hypothesis import strategies as st
from tests.envs.named_envs import NEEDED

import shoal.envs
from shoal.envs.actions import Projection
from shoal.envs.catalogue import ADAPTERS, BUILT_IN
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv

PACKAGES = ("reasoning_gym", "textarena", "textworld", "gem", "aviary")


def make(name):
    if name in PACKAGES:
        pytest.importorskip(name)
    return shoal.envs.make(name, **NEEDED.get(name, {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["action_space", "observation_space"])
@pytest.mark.parametrize("name", sorted({**BUILT_IN, **ADAPTERS}))
def test_seeding_and_sampling_one_env_changes_no_other(name, which):
    one, two = getattr(make(name), which), getattr(make(name), which)
    one.seed(5)
    expected = one.np_random.integers(2**60, size=3).tolist()
    one.seed(5)
    two.seed(5)
    two.np_random.integers(2**60, size=50)
    assert one.np_random.integers(2**60, size=3).tolist() == expected
    assert one == two
    assert two in [one]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({**BUILT_IN, **ADAPTERS}))
def test_text_is_seen_through_a_space_of_text(name):
    env = make(name)
    assert isinstance(env.observation_space, spaces.Text)
    assert 0 < env.observation_space.max_length <= 2**18  # a megabyte of code points for each env


class Composite(TextEnv):
    """An env of a user whose class-level spaces hold spaces."""

    from shoal.envs.bandit import BanditConfig as Config

    instructions = "Go."
    projection = Projection(parse=str)
    action_space = spaces.Dict(
        {"a": spaces.Discrete(5), "b": spaces.Tuple((spaces.Discrete(9), spaces.Box(0, 1)))}
    )
    observation_space = spaces.Sequence(spaces.Discrete(7))

    def _start(self, rng):
        pass

    def _advance(self, action):
        return Outcome(0.0)

    def observe(self):
        return ""


def test_spaces_inside_spaces_are_ones_own_too():
    Composite.action_space.seed(1)
    Composite.observation_space.seed(1)
    one, two = Composite(), Composite()
    for which in ("action_space", "observation_space"):
        both = [getattr(env, which) for env in (one, two)]
        assert both[0] == both[1] == getattr(Composite, which)
        drawn = []
        for space in both:
            space.seed(4)
            drawn.append([space.sample() for _ in range(5)])
        assert drawn[0] == drawn[1]
        both[0].seed(4)
        [space.sample() for space in (both[1], getattr(Composite, which)) for _ in range(5)]
        assert [both[0].sample() for _ in range(5)] == drawn[0]


# --- free text


def test_free_text_is_equal_to_free_text_of_the_same_lengths_only():
    plain = spaces.Text(8, min_length=0, charset=FreeText(8).character_set)
    assert FreeText(8) == FreeText(8) == pickle.loads(pickle.dumps(FreeText(8)))
    assert FreeText(8) != FreeText(9)
    assert FreeText(8) != FreeText(8, min_length=1)
    assert FreeText(8) != plain
    assert plain != FreeText(8)
    assert "é" in FreeText(8)
    assert "é" not in plain


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=20))
def test_any_text_can_be_flattened_and_read_back(text):
    space = FreeText(20)
    flat = spaces.flatten(space, text)
    assert flat.shape == (flatdim(space),)
    assert flat.tolist() == [*map(ord, text), *[0x110000] * (20 - len(text))]
    assert flat in spaces.flatten_space(space)
    assert spaces.unflatten(space, flat) == text


def test_text_that_does_not_fit_is_refused_and_not_cut():
    with pytest.raises(ValueError, match="at most 3 characters, got 4"):
        spaces.flatten(FreeText(3), "abcd")


def test_samples_are_strings_of_the_space():
    space = FreeText(5)
    space.seed(0)
    drawn = [space.sample() for _ in range(200)]
    assert all(text in space and text.isascii() for text in drawn)
    assert {len(text) for text in drawn} == set(range(6))


@pytest.mark.parametrize(("name", "copied"), [("countdown", True), ("webshop", False)])
def test_gymnasiums_own_vector_env_shares_memory_for_free_text(name, copied):
    settings = {"num_products": 40} if name == "webshop" else {"max_steps": 3}
    makers = [partial(shoal.envs.make, name, **settings)] * 2
    expected = gymnasium.vector.SyncVectorEnv(makers)
    shared = gymnasium.vector.AsyncVectorEnv(makers, shared_memory=True, copy=copied, context="forkserver")
    try:
        start, start_expected = shared.reset(seed=[3, 4])[0], tuple(expected.reset(seed=[3, 4])[0])
        assert tuple(start) == start_expected
        assert start[:2] == start_expected
        for actions in (("search[red — “shoe”]", "1+1"), ("7", "é"), ("x", "y")):
            mine, theirs = shared.step(actions), expected.step(actions)
            assert tuple(mine[0]) == tuple(theirs[0])
            assert np.array_equal(mine[1], theirs[1])
        # a copy is what it was, without copies it is what stands in the memory now
        assert tuple(start) == (start_expected if copied else tuple(mine[0]))
        assert start_expected != tuple(mine[0])
    finally:
        shared.close()
        expected.close()
