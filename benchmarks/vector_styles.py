"""One way to drive the vector environments that `vector.py` measures, whatever their interfaces."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class GymnasiumStyle:
    """Anything with Gymnasium's vector interface."""

    def __init__(self, vec: Any, n: int) -> None:
        self.vec, self.n, self.steps = vec, n, 1

    def start(self, seed: int) -> Any:
        return self.vec.reset(seed=seed)[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        obs, rewards, terminated, _, _ = self.vec.step(actions)
        return obs, rewards, terminated

    def run(self, seconds: float) -> float:
        actions = np.zeros(self.n, dtype=np.int64)
        step, count, start = self.vec.step, 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            for _ in range(self.steps):
                step(actions)
            count += self.steps
        return count * self.n / (now - start)

    def close(self) -> None:
        self.vec.close()


class SB3Style(GymnasiumStyle):
    """Stable-Baselines3's interface; it resets at once, so it is compared up to the first end."""

    def start(self, seed: int) -> Any:
        self.vec.seed(seed)
        return self.vec.reset()

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        obs, rewards, dones, _ = self.vec.step(actions)
        return obs, rewards, dones


class PufferStyle(GymnasiumStyle):
    """PufferLib's vector environments."""

    def start(self, seed: int) -> Any:
        self.vec.async_reset(seed)
        return self.vec.recv()[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        obs, rewards, terminated, *_ = self.vec.step(actions)
        return obs, rewards, terminated

    def run(self, seconds: float) -> float:
        actions = np.zeros(self.vec.agents_per_batch, dtype=np.int64)
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            self.vec.send(actions)
            self.vec.recv()
            count += len(actions)
        return count / (now - start)


class ShoalAsync(GymnasiumStyle):
    """`send` and `recv` of whichever environments are ready first."""

    def start(self, seed: int) -> Any:
        return self.vec.reset(seed=seed)[0]

    def run(self, seconds: float) -> float:
        vec, n = self.vec, self.n
        actions = np.zeros(n, dtype=np.int64)
        vec.send(range(n), actions)
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            ready = vec.recv(max(1, n // 8))
            count += len(ready.ids)
            vec.send(ready.ids, actions[: len(ready.ids)])
        while vec.flight.ids:
            vec.recv(n)
        return count / (now - start)


class EnvPoolStyle(GymnasiumStyle):
    """EnvPool's own C++ CartPole: not the same code, so it is not compared."""

    def start(self, seed: int) -> Any:
        return self.vec.reset()[0]
