"""Envs that tests of trainers play, here so that a worker process imports them without PyTorch."""

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from shoal.envs.frozen_lake import FrozenLakeConfig
from shoal.envs.frozen_lake import FrozenLakeEnv as FrozenLake


class Endless(FrozenLake):
    """An env without end, whose observations grow a prompt by ever more."""

    def __init__(self):
        super().__init__(desc="4x4")

    def step(self, action):
        _, _, _, _, info = super().step(action)
        self.reset(seed=0)
        return "S F H G " * 3, 0.0, False, False, {**info, "success": False}


class Told(Endless):
    """Its expert knows one word, in every other turn; what lot draws is another."""

    def __init__(self):
        super().__init__()
        self.turns = 0

    def expert_action(self):
        return "Up" if self.turns % 2 == 0 else None

    def random_action(self, rng):
        return "Left"

    def step(self, action):
        self.turns += 1
        return super().step(action)


class Bad(FrozenLake):
    """In one of eight episodes its second step hangs, or ends its process."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def step(self, action):
        answer = super().step(action)
        if self._steps == 2 and self._seed % 8 == 0:
            if self.fault == "hang":
                time.sleep(1000)
            os._exit(3)
        return answer


@dataclass(frozen=True)
class NotingConfig(FrozenLakeConfig):
    """Settings of `NotingLake`."""

    folder: str = ""
    """Where each reset and each end of an env leaves a file."""


class NotingLake(FrozenLake):
    """Notes what is done to it, for whoever looks from another process."""

    Config = NotingConfig

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        self._note("made")

    def _note(self, what):
        (Path(self.config.folder) / f"{what} {uuid.uuid4().hex}").touch()

    def reset(self, *, seed=None, options=None):
        told = super().reset(seed=seed, options=options)
        self._note(f"reset {seed}")
        return told

    def close(self):
        super().close()
        self._note("closed")
