"""Environments of a module of somebody's own, to be named in every way that there is."""

from dataclasses import dataclass

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv

NEEDED = {
    "gymnasium": {"id": "CartPole-v1"}, "openenv": {"url": "http://127.0.0.1:9"}, "openenv_tools": {"url": "http://127.0.0.1:9"},
    "program": {"command": ["true"]},
}  # fmt: skip
"""Settings without which an adapter cannot be made."""


class Counter(gymnasium.Env):
    """Starts at a number that the seed says and counts up by `size`, to a limit."""

    observation_space = spaces.Box(0, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, size=1, *, limit=5):
        self.size, self.limit = size, limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = self.total = int(self.np_random.integers(1000))
        return np.float32([self.total]), {}

    def step(self, action):
        self.total += self.size
        over = self.total >= self.start + self.size * self.limit
        return np.float32([self.total]), float(action), over, False, {}


class Taker(Counter):
    """Takes what it counts by out of the arguments that it is given."""

    def __init__(self, sizes, steps=(), dealt=None):
        super().__init__(sizes.pop())
        if dealt is not None:
            dealt["cards"] += steps
            self.size += int(dealt["cards"][0])


class Outer:
    class Inner(Counter):
        """A class inside a class."""


def make_counter(size=1):
    return Counter(size)


class Doubled(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return observation * 2


class PlusOne(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return observation + 1


nothing = []


@dataclass(frozen=True)
class ParrotConfig:
    word: str = "hello"
    max_steps: int = 3


class ParrotEnv(TextEnv[ParrotConfig]):
    """Says one word."""

    Config = ParrotConfig
    instructions = "Say something."
    projection = Projection(lookup={"yes": 1, "no": 2})
    action_space = spaces.Discrete(2, start=1)
    observation_space = FreeText(64)

    def _start(self, rng):
        self.number = int(rng.integers(1000))

    def _advance(self, action):
        return Outcome(1.0, valid=action != 0, effective=False)

    def observe(self):
        return f"{self.config.word} {self.number}"


if "NamedCounter-v0" not in gymnasium.registry:
    gymnasium.register("NamedCounter-v0", entry_point=Counter, kwargs={"limit": 4})
