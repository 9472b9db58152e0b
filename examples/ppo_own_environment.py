"""Your own environment is learned in seconds, and the policy then runs on NumPy alone.

python examples/ppo_own_environment.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium as gym
import numpy as np

import shoal


class Thermostat(gym.Env):
    """Keep a room at 21 degrees by heating or not; masks forbid heating an overheated room."""

    observation_space = gym.spaces.Box(-5.0, 5.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def _look(self) -> tuple[np.ndarray, dict[str, Any]]:
        mask = np.array([True, self.degrees < 25.0])
        return np.array([(self.degrees - 21.0) / 5.0, self.outside], np.float32), {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """A new day."""
        super().reset(seed=seed)
        self.t, self.degrees = 0, float(self.np_random.uniform(15, 27))
        self.outside = float(self.np_random.uniform(-1, 1))
        return self._look()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Heat (1) or wait (0)."""
        self.t += 1
        self.degrees += 0.8 * float(action) - 0.3 + 0.2 * self.outside
        observation, info = self._look()
        return observation, -abs(self.degrees - 21.0), False, self.t >= 50, info


def main() -> None:
    with shoal.PPO(Thermostat, n_envs=8, seed=0, n_steps=64, learning_rate=1e-3, gamma=0.95) as ppo:
        before = ppo.evaluate(20).mean
        ppo.learn(60_000)
        after = ppo.evaluate(20).mean
        with tempfile.TemporaryDirectory() as folder:
            policy = shoal.load_policy(ppo.save(folder))
    print(f"mean return before {before:.1f}, after {after:.1f}")
    print("a cold room:", "heat" if policy(np.array([-1.0, 0.0], np.float32), mask=[1, 1]) else "wait")
    assert after > -60 > before, "the thermostat was not learned"


if __name__ == "__main__":
    main()
