"""An env that pays for any word, so that a fresh model has something to learn from at once."""

import time
from dataclasses import dataclass

from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv


@dataclass
class WordsConfig:
    nap: float = 0.0


def number(text):
    return sum(map(ord, str(text))) % 5


class Words(TextEnv):
    Config = WordsConfig
    instructions = "Say a word."
    projection = Projection(parse=str)
    observation_space = FreeText(16)
    max_steps = 2

    def _start(self, rng):
        self.wanted = int(rng.integers(5))

    def _advance(self, action):
        time.sleep(self.config.nap)
        near = number(action) == self.wanted
        self.wanted = (self.wanted + 2) % 5
        return Outcome(1.0 if near else 0.0, success=near)

    def observe(self):
        return f"{self.wanted}"
