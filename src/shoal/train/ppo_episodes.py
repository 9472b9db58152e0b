"""What happened in the episodes of a run: returns, lengths, and the actions needed to play them again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.rollout.arrays.steps import StepRollout

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    env: int
    reward: float  # undiscounted sum
    length: int
    step: int  # env steps of the run when it ended


class EpisodeLog:
    """Follows episodes across rollouts.

    Args:
        n_envs: columns of the rollouts.
        replayable: keep the actions since each env's last reset.
    """

    def __init__(self, n_envs: int, *, replayable: bool = True) -> None:
        self.n_envs = n_envs
        self.replayable = replayable
        self.recent: deque[Episode] = deque(maxlen=100)
        self.n_episodes = 0
        self.n_steps = 0
        self.started = np.ones(n_envs, np.int64)  # episodes begun in each env
        self.returns = np.zeros(n_envs)  # so far, of the episode under way
        self.lengths = np.zeros(n_envs, np.int64)
        self._actions: list[list[Array]] = [[] for _ in range(n_envs)]

    def add(self, rollout: StepRollout) -> list[Episode]:
        """Take a rollout in; returns the episodes that ended, in the order of their ends."""
        rewards, done = rollout.rewards, rollout.done
        n_steps, n_envs = rewards.shape
        valid = rollout.valid
        ended: list[Episode] = []
        begins = [0] * n_envs
        if done.any():
            for t, i in np.argwhere(done).tolist():
                length = int(self.lengths[i]) + _count(valid, begins[i], t + 1, i)
                reward = float(self.returns[i] + rewards[begins[i] : t + 1, i].sum())
                ended.append(Episode(i, reward, length, self.n_steps + (t + 1) * n_envs))
                self.returns[i], self.lengths[i] = 0.0, 0
                self.started[i] += 1
                self._actions[i].clear()
                begins[i] = t + 1
        for i in range(n_envs):
            self.lengths[i] += _count(valid, begins[i], n_steps, i)
            if self.replayable and begins[i] < n_steps:
                self._actions[i].append(rollout.actions[begins[i] :, i].copy())
        if any(begins):
            for i in range(n_envs):
                self.returns[i] += rewards[begins[i] :, i].sum()
        else:
            self.returns += rewards.sum(axis=0)
        self.n_steps += n_steps * n_envs
        self.n_episodes += len(ended)
        self.recent.extend(ended)
        return ended

    def restarted(self, indices: list[int]) -> None:
        """Forget the episodes of envs that were broken off."""
        for i in indices:
            self.returns[i], self.lengths[i] = 0.0, 0
            self.started[i] += 1
            self._actions[i].clear()

    def longer_than(self, limit: int) -> list[int]:
        """Envs whose present episode has more steps than `limit`."""
        return [int(i) for i in np.flatnonzero(self.lengths > limit)]

    def actions_since_reset(self, i: int) -> Array:
        """`[steps, A]` rows of actions of env `i` in its present episode."""
        parts = self._actions[i]
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    @property
    def mean_reward(self) -> float:
        """Over the last 100 episodes; NaN before the first."""
        return float(np.mean([episode.reward for episode in self.recent])) if self.recent else float("nan")

    @property
    def mean_length(self) -> float:
        """Over the last 100 episodes; NaN before the first."""
        return float(np.mean([episode.length for episode in self.recent])) if self.recent else float("nan")

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """(JSON values, arrays) for a checkpoint."""
        values = {
            "n_episodes": self.n_episodes,
            "n_steps": self.n_steps,
            "recent": [[e.env, e.reward, e.length, e.step] for e in self.recent],
        }
        arrays = {
            "started": self.started.copy(),
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
        }
        arrays |= {
            f"actions.{i}": self.actions_since_reset(i) for i in range(self.n_envs) if self._actions[i]
        }
        return values, arrays

    def load_state(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """What `state` gave."""
        self.n_episodes, self.n_steps = int(values["n_episodes"]), int(values["n_steps"])
        self.recent = deque(
            (Episode(int(e), float(reward), int(n), int(step)) for e, reward, n, step in values["recent"]),
            maxlen=100,
        )  # fmt: skip
        self.started, self.returns = arrays["started"].copy(), arrays["returns"].copy()
        self.lengths = arrays["lengths"].copy()
        self._actions = [
            [arrays[f"actions.{i}"]] if f"actions.{i}" in arrays else [] for i in range(self.n_envs)
        ]


def _count(valid: Array | None, start: int, stop: int, i: int) -> int:
    return stop - start if valid is None else int(valid[start:stop, i].sum())
