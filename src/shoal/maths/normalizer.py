"""Running statistics that scale observations and rewards; they change between rollouts, never within."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
CLIP = 10.0


class RunningMoments:
    """Mean and variance of all rows seen, by the parallel update of Chan et al. (1979), in float64."""

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(size)
        self.square = np.zeros(size)  # sum of squared deviations

    @property
    def variance(self) -> Array:
        """Population variance; ones before the first row."""
        return self.square / self.count if self.count else np.ones_like(self.square)

    def add(self, rows: Array) -> None:
        """Take `[B, size]` rows in."""
        if not len(rows):
            return
        rows = rows.astype(np.float64, copy=False)
        n = len(rows)
        mean = rows.mean(axis=0)
        total = self.count + n
        apart = mean - self.mean
        self.square = self.square + ((rows - mean) ** 2).sum(axis=0) + apart**2 * (self.count * n / total)
        self.mean = self.mean + apart * (n / total)
        self.count = total

    def state(self, name: str) -> dict[str, Array]:
        """Copies by name, for a checkpoint."""
        return {
            f"{name}.count": np.array(self.count),
            f"{name}.mean": self.mean.copy(),
            f"{name}.square": self.square.copy(),
        }

    def load_state(self, name: str, state: Mapping[str, Array]) -> None:
        """What `state` gave."""
        self.count = float(state[f"{name}.count"])
        self.mean, self.square = state[f"{name}.mean"].copy(), state[f"{name}.square"].copy()


class ObservationNormalizer:
    """Observations to mean 0 and deviation 1, clipped to 10. Before the first rollout it changes nothing.

    Args:
        size: numbers of an observation.
        left: `[size]` bool, numbers that stay as they are, such as choices (0 or 1).
    """

    def __init__(self, size: int, left: Array | None = None) -> None:
        self.moments = RunningMoments(size)
        self.left = np.zeros(size, bool) if left is None else left
        self.refresh()

    def __call__(self, rows: Array) -> Array:
        """Normalised float32 rows; the statistics do not move."""
        if self.moments.count == 0:
            return rows
        scaled = (rows - self.mean) * self.scale
        return np.clip(scaled, -CLIP, CLIP, out=scaled)

    def update(self, rows: Array) -> None:
        """Take the raw observations `[..., size]` that a finished rollout acted on in."""
        self.moments.add(rows.reshape(-1, rows.shape[-1]))
        self.refresh()

    def state(self) -> dict[str, Array]:
        """Copies by name, for a checkpoint."""
        return self.moments.state("obs")

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over what `state` gave."""
        self.moments.load_state("obs", state)
        self.refresh()

    def refresh(self) -> None:
        """Take over what `moments` says."""
        mean, scale = self.moments.mean, 1.0 / np.sqrt(self.moments.variance + 1e-8)
        self.mean = np.where(self.left, 0.0, mean).astype(np.float32)
        self.scale = np.where(self.left, 1.0, scale).astype(np.float32)


class RewardNormalizer:
    """Rewards divided by the deviation of their discounted running sum, per env, clipped to 10."""

    def __init__(self, n_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self.sums = np.zeros(n_envs)

    def __call__(self, rewards: Array, done: Array, valid: Array | None = None) -> Array:
        """Take `[T, N]` rewards in, then scale them; a step that is not `valid` was spent on a reset."""
        history = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.sums = self.sums * self.gamma + rewards[t]
            history[t] = self.sums
            self.sums = np.where(done[t], 0.0, self.sums)
        self.moments.add((history if valid is None else history[valid]).reshape(-1, 1))
        scaled = rewards / np.sqrt(self.moments.variance + 1e-8)
        return np.clip(scaled, -CLIP, CLIP)

    def state(self) -> dict[str, Array]:
        """Copies by name, for a checkpoint."""
        return {**self.moments.state("reward"), "reward.sums": self.sums.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """What `state` gave."""
        self.moments.load_state("reward", state)
        self.sums = state["reward.sums"].copy()
