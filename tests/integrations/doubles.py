"""Envs that a random model already gets different rewards from, and some that fail."""

import threading
from dataclasses import dataclass

from gymnasium.spaces import Discrete, Text

from shoal.envs.actions import Projected, Projection
from shoal.envs.text import Outcome, TextEnv

CLOSED, COME_BACK = [], threading.Event()


@dataclass(frozen=True)
class LetterConfig:
    max_steps: int = 2


class Parity(Projection):
    """Every text is an action."""

    def __call__(self, text):
        return Projected((sum(map(ord, text)) % 2,), True)


class LetterEnv(TextEnv[LetterConfig]):
    """Pays for text whose characters add up to an odd number: any model meets both."""

    Config = LetterConfig
    projection = Parity()
    action_space = Discrete(2)
    observation_space = Text(16)
    instructions = "Write."

    def _start(self, rng):
        self._word = f"word {int(rng.integers(1000))}"

    def _advance(self, action):
        return Outcome(float(action), False)

    def observe(self):
        return self._word


class BrokenEnv(LetterEnv):
    """Raises at its second step."""

    def _start(self, rng):
        super()._start(rng)
        self._taken = 0

    def _advance(self, action):
        self._taken += 1
        if self._taken == 2:
            raise RuntimeError("the lake is frozen")
        return super()._advance(action)


class FlakyEnv(LetterEnv):
    """Raises at its second step after a first action that paid nothing: some members of a group fail, others not."""

    def _start(self, rng):
        super()._start(rng)
        self._paid = None

    def _advance(self, action):
        if self._paid == 0:
            raise RuntimeError("the lake is frozen")
        self._paid = action
        return super()._advance(action)


class OneThreadEnv(LetterEnv):
    """As envs with a database or a browser: only the thread that made it may use it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._home = threading.get_ident()

    def _at_home(self):
        if threading.get_ident() != self._home:
            raise RuntimeError("used in another thread than the one that made it")

    def _start(self, rng):
        self._at_home()
        super()._start(rng)

    def _advance(self, action):
        self._at_home()
        return super()._advance(action)

    def close(self):
        self._at_home()
        CLOSED.append(self)


class HangingEnv(LetterEnv):
    """Does not come back from its first step until somebody sets the event."""

    def _advance(self, action):
        COME_BACK.wait(60)
        return super()._advance(action)

    def close(self):
        CLOSED.append(self)


class ExitingEnv(LetterEnv):
    """Calls for the end of the process."""

    def _advance(self, action):
        raise SystemExit(3)
