"""Small environments whose right answers are known, and what tests of PPO share.

Workers import this module with their environments, so it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.core.seeding import derive_seed

if TYPE_CHECKING:
    from shoal.train.ppo.checkpoint import Checkpoint
    from shoal.train.ppo.ppo import PPO

FAST = {"n_steps": 32, "batch_size": 64, "n_epochs": 4, "learning_rate": 3e-3, "gamma": 0.5}
SMALL_RUN = [
    "--preset", "none", "--n-envs", "2", "--n-steps", "32", "--batch-size", "32", "--backend", "serial",
    "--no-tensorboard",
]  # fmt: skip
"""Options of a run that takes a moment."""


def state(ppo: PPO) -> dict[str, bytes]:
    """All that a checkpoint of this run would hold."""
    return bytes_of(ppo.checkpoint())


def bytes_of(saved: Checkpoint) -> dict[str, bytes]:
    """The arrays of a checkpoint."""
    parts = (saved.weights, saved.optimizer, saved.statistics, saved.episodes)
    return {f"{k}.{name}": a.tobytes() for k, part in enumerate(parts) for name, a in part.items()}


def weights(ppo: PPO) -> dict[str, np.ndarray]:
    """All that learns, by name."""
    state, optimizer, statistics = ppo.agent.state()
    return {**state, **optimizer, **statistics}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The same names, the same bytes."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


class IdentityEnv(gym.Env):
    """Shows a number; naming it pays 1. Episodes last `length` steps and are truncated."""

    def __init__(self, n: int = 3, length: int = 16, masked: bool = False) -> None:
        self.observation_space, self.action_space = spaces.Discrete(n), spaces.Discrete(n)
        self.length, self.masked = length, masked

    def _info(self) -> dict[str, Any]:
        mask = np.ones(self.action_space.n, np.int8)
        mask[(self.state + 1) % self.action_space.n] = 0
        return {"action_mask": mask} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.state = 0, int(self.np_random.integers(self.action_space.n))
        return self.state, self._info()

    def step(self, action: Any) -> Any:
        if self.masked:
            assert action != (self.state + 1) % self.action_space.n, "a forbidden action was taken"
        reward = float(action == self.state)
        self.t, self.state = self.t + 1, int(self.np_random.integers(self.action_space.n))
        return self.state, reward, False, self.t >= self.length, self._info()


class TargetEnv(gym.Env):
    """Shows a point in [-1, 1]; acting there pays 0, elsewhere minus the squared distance."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.state = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.state, {}

    def step(self, action: Any) -> Any:
        reward = -float((action[0] - self.state[0]) ** 2)
        self.t += 1
        self.state = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.state, reward, self.t % 7 == 0, self.t % 5 == 0, {}


class CountingEnv(gym.Env):
    """Shows how many actions this episode really took, and its episode's number: a step that ignores its
    action would show. Ends by termination or truncation after `length` steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)

    def __init__(self, length: int = 5, terminates: bool = False) -> None:
        self.length, self.terminates, self.episode = length, terminates, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([0.0, self.episode], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= self.length
        observation = np.array([self.t, self.episode], np.float32)
        return observation, 1.0, over and self.terminates, over and not self.terminates, {}


class BrokenEnv(CountingEnv):
    """Gives something bad at its 12th step in all: `what` is "observation", "reward" or "error"."""

    def __init__(self, what: str) -> None:
        super().__init__(100)
        self.what = what

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t == 90 and self.what == "late error":
            raise RuntimeError("the plug was pulled")
        if self.t == 12:
            if self.what == "error":
                raise RuntimeError("the plug was pulled")
            if self.what == "observation":
                observation = np.array([np.nan, 0], np.float32)
            if self.what == "reward":
                reward = float("inf")
            if self.what == "mask":
                info = {"action_mask": np.zeros(2, np.int8)}
        if self.what == "mask":
            info.setdefault("action_mask", np.ones(2, np.int8))
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation, {"action_mask": np.ones(2, np.int8)} if self.what == "mask" else info


class DictEnv(gym.Env):
    """Dict of image, vector and number; MultiDiscrete or MultiBinary actions."""

    def __init__(self, binary: bool = False) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "speed": spaces.Box(-1, 1, (2,), np.float64),
                "mode": spaces.Discrete(3, start=5),
            }
        )
        self.action_space = spaces.MultiBinary(3) if binary else spaces.MultiDiscrete([2, 3])

    def _look(self) -> Any:
        return {
            "camera": self.np_random.integers(0, 256, (8, 8, 3), np.uint8),
            "speed": self.np_random.uniform(-1, 1, 2),
            "mode": int(self.np_random.integers(5, 8)),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.t += 1
        return self._look(), float(np.sum(action)), self.t >= 9, False, {}


class NaNLaterEnv(CountingEnv):
    """Counts, and shows NaN at the 100th step of its life."""

    def __init__(self) -> None:
        super().__init__(7)
        self.life = 0

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        self.life += 1
        if self.life == 100:
            observation = np.array([np.nan, 0], np.float32)
        return observation, *rest


class RecallEnv(gym.Env):
    """Shows which of two it will ask for, then nothing for a while; naming it at the end pays 1.

    With `masked` there is a third action, the only one that is allowed while it waits, and forbidden when it asks. A
    wrong answer ends by termination too, or with `forgives` by truncation: then what might have come after it counts.
    """

    def __init__(self, length: int = 4, masked: bool = False, forgives: bool = True) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(3 if masked else 2)
        self.length, self.masked, self.forgives = length, masked, forgives

    def _look(self) -> Any:
        return np.array([self.cue if self.t == 0 else 0.0, float(self.t == self.length)], np.float32)

    def _info(self) -> dict[str, Any]:
        if not self.masked:
            return {}
        asks = self.t == self.length
        return {"action_mask": np.array([asks, asks, not asks], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.cue = 0, float(self.np_random.choice([-1, 1]))
        return self._look(), self._info()

    def step(self, action: Any) -> Any:
        if self.t < self.length:
            assert not self.masked or action == 2, "a forbidden action was taken"
            self.t += 1
            return self._look(), 0.0, False, False, self._info()
        right = (action == 1) == (self.cue > 0)
        ends = bool(right) or not self.forgives
        return self._look(), float(right), ends, not ends, self._info()


class OfFour(CountingEnv):
    """Of a run of three environments, for which there is no fourth: it cannot be stepped."""

    def reset(self, *, seed=None, options=None):
        self.fails = seed in FOURTH
        return super().reset(seed=seed)

    def step(self, action):
        if self.fails:
            raise RuntimeError("there is no fourth")
        return super().step(action)


FOURTH = {derive_seed(0, "env", 3, episode) & 0x7FFFFFFF for episode in range(20)}


class Screen(gym.Env):
    """Random pictures of a shape; the action decides the reward by the first pixel."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (84, 84), dtype: Any = np.uint8) -> None:
        self.observation_space = spaces.Box(0, 255, shape, dtype)

    def _look(self) -> Any:
        return self.np_random.integers(0, 256, self.observation_space.shape).astype(
            self.observation_space.dtype
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._look(), float(action), False, self.t >= 5, {}
