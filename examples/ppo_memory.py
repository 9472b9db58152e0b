"""A task that needs memory is learned by a recurrent policy, and not by one without memory.

python examples/ppo_memory.py
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

import shoal


class Recall(gym.Env):
    """Shows -1 or 1, then nothing for five steps; then the action that names it pays 1."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def _look(self) -> np.ndarray:
        return np.array([self.shown if self.t == 0 else 0.0, float(self.t == 6)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Choose what to remember."""
        super().reset(seed=seed)
        self.t, self.shown = 0, float(self.np_random.choice([-1, 1]))
        return self._look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait, and answer at the end."""
        if self.t == 6:
            return self._look(), float((action == 1) == (self.shown > 0)), True, False, {}
        self.t += 1
        return self._look(), 0.0, False, False, {}


def main() -> None:
    found = {}
    for recurrent in ("none", "gru"):
        with shoal.PPO(
            Recall, n_envs=16, seed=1, recurrent=recurrent, n_steps=32, batch_size=128, hidden=(32,),
            memory_units=32, learning_rate=3e-3, ent_coef=0.01, gamma=0.98, backend="serial",
        ) as ppo:  # fmt: skip
            found[recurrent] = ppo.learn(120_000).evaluate(100).mean
    print(f"right answers without memory {found['none']:.2f}, with a GRU {found['gru']:.2f}")
    assert found["none"] < 0.7 < 0.95 < found["gru"], "memory made no difference"


if __name__ == "__main__":
    main()
