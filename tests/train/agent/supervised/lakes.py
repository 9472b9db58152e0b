"""Envs that tests of trainers play, here so that a worker process imports them without PyTorch."""

import os
import time

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
