"""The exported check for text envs accepts shoal's own and names each broken promise."""

import itertools
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.vector import SyncVectorEnv

import shoal.envs
from shoal.envs.actions import Projection
from shoal.envs.catalogue import BUILT_IN
from shoal.envs.text import Outcome, TextEnv
from shoal.testing import check_text_env, check_vector_env


@dataclass(frozen=True)
class GuessConfig:
    max_steps: int = 4


class GuessEnv(TextEnv[GuessConfig]):
    """Guess the number 1, 2 or 3."""

    Config = GuessConfig
    instructions = "Guess the number: 1, 2 or 3."
    projection = Projection(lookup={"1": 1, "2": 2, "3": 3})
    action_space = Discrete(3, start=1)
    observation_space = Text(20, charset="abcdefghijklmnopqrstuvwxyz 0123456789")

    def _start(self, rng: np.random.Generator) -> None:
        self.secret = 1 + int(rng.integers(3))
        self.shown = "guess"

    def _advance(self, action):
        if action == 0:
            return Outcome(0.0, valid=False, effective=False)
        self.shown = "right" if action == self.secret else "wrong"
        return Outcome(float(action == self.secret), action == self.secret, action == self.secret)

    def observe(self) -> str:
        return self.shown


@pytest.mark.parametrize("name", [*BUILT_IN, None])
def test_shoals_own_envs_keep_every_promise(name):
    check_text_env(GuessEnv if name is None else lambda: shoal.envs.make(name), seeds=range(3))


class Global(GuessEnv):
    def _start(self, rng):
        super()._start(rng)
        self.secret = int(np.random.randint(1, 4))


COUNTER = itertools.count()


class Unseeded(GuessEnv):
    def _start(self, rng):
        super()._start(rng)
        self.shown = f"guess {next(COUNTER)}"


class Speechless(GuessEnv):
    def __init__(self):
        super().__init__()
        self.instructions = ""


class OtherWords(GuessEnv):
    def __init__(self):
        super().__init__()
        self.projection = Projection(lookup={"1": 1, "2": 2, "3": 3, "four": 4})


class Offers(GuessEnv):
    def available_actions(self):
        return ["one"]


class Verbose(GuessEnv):
    def observe(self):
        return super().observe() + "!" * 30


class Unstable(GuessEnv):
    def observe(self):
        self.looks = getattr(self, "looks", 0) + 1
        return f"look {self.looks}"


class Wealthy(GuessEnv):
    def _advance(self, action):
        return super()._advance(action)._replace(reward=float("nan"))


BROKEN = {
    Global: "global state",
    Unseeded: "different episodes from one seed",
    Speechless: "needs instructions",
    OtherWords: "'four' is projected to",
    Offers: "offers 'one', which the projection refuses",
    Verbose: "observation_space Text allows no '!'",
    Unstable: "observe\\(\\) must not change",
    Wealthy: r"Wealthy._advance\(\): the reward must be a finite number, got nan \(test_checks.py:\d+\)",
}


@pytest.mark.parametrize("env_class", BROKEN, ids=lambda env_class: env_class.__name__)
def test_a_broken_promise_is_named(env_class):
    with pytest.raises(AssertionError, match=BROKEN[env_class]):
        check_text_env(env_class, seeds=range(12))


@pytest.mark.parametrize("kind", ["grid", "rgb"])
def test_an_env_that_shows_arrays_keeps_its_promises_too(kind):
    check_text_env(lambda: shoal.envs.make("sokoban", observation=kind, max_steps=5), seeds=range(2))


def test_a_check_of_no_episode_is_none():
    with pytest.raises(AssertionError, match="at least one episode"):
        check_text_env(GuessEnv, seeds=())


class Unknown(gymnasium.Env):
    """Does not know one of its numbers."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.float32([0, np.nan]), {}

    def step(self, action):
        return np.float32([action, np.nan]), 0.0, False, False, {}


def test_a_number_that_no_env_knows_is_the_same_in_a_vector():
    check_vector_env(lambda fns: SyncVectorEnv(fns), Unknown)
