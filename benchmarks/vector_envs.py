"""The environments that `vector.py` measures with: each stresses another part of a vector environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODE = 100


class Ticking(gymnasium.Env[Any, Any]):
    """Episodes of fixed length, reward 1, and whatever `work` costs."""

    action_space = spaces.Discrete(2)
    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self) -> None:
        self.t = 0
        self.zero = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Back to the start."""
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do the work."""
        self.t += 1
        self.work()
        return self.observe(), 1.0, self.t >= EPISODE, False, {}

    def observe(self) -> Any:
        """What the agent sees."""
        return self.zero

    def work(self) -> None:
        """What a step costs."""


def burn(n: int) -> int:
    """A loop that keeps one core busy."""
    x = 0
    for i in range(n):
        x += i * i
    return x


def rounds_for(seconds: float) -> int:
    """How many rounds of `burn` take so long here."""
    best = min(_time(lambda: burn(4000)) for _ in range(50))
    return int(4000 * seconds / best)


def _time(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Burning(Ticking):
    """A CPU-bound step."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def work(self) -> None:
        """Compute."""
        burn(self.rounds)


def latency(rng: np.random.Generator) -> float:
    """Seconds of waiting: lognormal around 3.5 ms with a heavy tail, within 1 to 20 ms."""
    return float(min(max(rng.lognormal(np.log(0.0035), 0.9), 0.001), 0.020))


class Waiting(Ticking):
    """A step that waits for something else, as for a browser or a server."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin a stream of latencies from the seed."""
        if seed is not None:
            self.latencies = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def work(self) -> None:
        """Wait."""
        time.sleep(latency(self.latencies))


class Images(Ticking):
    """84x84x3 frames, almost for free."""

    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def __init__(self) -> None:
        super().__init__()
        self.frames = np.random.default_rng(0).integers(0, 255, (4, 84, 84, 3), dtype=np.uint8)

    def observe(self) -> Any:
        """One of four frames."""
        return self.frames[self.t & 3]


PAGE = " ".join(f"item {i % 37} costs {i} coins and" for i in range(40))[:480]


class Text(Ticking):
    """500 characters of text, almost for free."""

    observation_space = spaces.Text(max_length=1000, charset="".join(map(chr, range(32, 127))))

    def observe(self) -> Any:
        """A page that names the step."""
        return f"step {self.t:04d}: {PAGE}"


def cartpole() -> Any:
    """Gymnasium's CartPole: about 5 microseconds a step."""
    return gymnasium.make("CartPole-v1")
