"""What a PPO worker runs: a Gymnasium env whose step is a whole rollout of its share of the environments.

Its action is the policy's weights and the noise, its observation is the experience. So any vector env can run it, and
how processes start, wait, fail and end is the vector room's business alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.maths.normalizer import ObservationNormalizer
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows
from shoal.rollout.arrays.steps import EnvSlice
from shoal.train.compiled_network import CompiledNetwork, NetworkShape
from shoal.train.ppo_envs import EnvFactory

Array = np.ndarray


class SharePolicy:
    """The compiled actor inside a worker, with the normaliser's statistics of this rollout."""

    def __init__(self, shape: NetworkShape) -> None:
        self.network = CompiledNetwork(shape)
        self.norm = ObservationNormalizer(shape.inputs)
        self.normalizes = False

    def act(self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array) -> None:
        """Write actions and log-probabilities."""
        seen = self.norm(obs) if self.normalizes else obs
        self.network.act(seen, masks, noise, actions, logprobs)


class ShareEnv(gym.Env):
    """Envs `first .. first + n_envs` of a run; `step` plays `n_steps` of each.

    Args:
        factory: makes the environments.
        first: global index of the first one.
        n_envs: how many.
        n_steps: length of a rollout.
        shape: of the network.
        masked: whether the environments give action masks.
    """

    def __init__(
        self, factory: EnvFactory, first: int, n_envs: int, n_steps: int, shape: NetworkShape, masked: bool
    ) -> None:
        self.slice = EnvSlice([factory(first + i) for i in range(n_envs)], first_index=first, masked=masked)
        self.policy = SharePolicy(shape)
        self.n_steps = n_steps
        obs, acts = self.slice.obs_rows, self.slice.action_rows
        self.observation_space = experience_space(n_steps, n_envs, obs, acts, masked)
        self.action_space = order_space(n_steps, n_envs, acts, self.policy.network.weights.size, obs.size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start all episodes; the seeds are derived, so `seed` is not used."""
        self.slice.reset()
        return self._nothing(), {}

    def step(self, action: dict[str, Array]) -> Any:
        """One rollout."""
        policy = self.policy
        policy.network.weights[:] = action["weights"]
        policy.normalizes = bool(action["normalize"][0])
        policy.norm.moments.count = 1.0 if policy.normalizes else 0.0
        policy.norm.mean, policy.norm.scale = action["mean"], action["scale"]
        rollout = self.slice.collect(policy, np.ascontiguousarray(action["noise"]))
        experience = self._nothing()
        for name in ("obs", "actions", "logprobs", "rewards", "terminated", "truncated", "masks"):
            if name in experience:
                experience[name] = getattr(rollout, name)
        experience["final_obs"][: len(rollout.final_obs)] = rollout.final_obs
        return experience, 0.0, False, False, {}

    def resume_share(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> None:
        """Play the episodes again that were under way."""
        self.slice.resume(episodes, actions)

    def restart_share(self, indices: Sequence[int]) -> None:
        """Break off and start again the envs with these global indices."""
        self.slice.restart(indices)

    def current_rows(self) -> Array:
        """The observation rows at which the next rollout begins."""
        return self.slice.now.copy()

    def process_id(self) -> int:
        """Of the process that plays this share."""
        return os.getpid()

    def close(self) -> None:
        """Close the environments."""
        self.slice.close()

    def _nothing(self) -> dict[str, Array]:
        parts = self.observation_space.spaces  # type: ignore[attr-defined]
        return {name: np.zeros(space.shape, space.dtype) for name, space in parts.items()}


def experience_space(
    n_steps: int, n_envs: int, obs: ObservationRows, actions: ActionRows, masked: bool
) -> spaces.Dict:
    """The space of a share's rollout; `final_obs` has room for every step being truncated."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "obs": ((n_steps + 1, n_envs, obs.size), obs.dtype),
        "actions": ((n_steps, n_envs, actions.size), actions.dtype),
        "logprobs": ((n_steps, n_envs), np.float32),
        "rewards": ((n_steps, n_envs), np.float64),
        "terminated": ((n_steps, n_envs), np.uint8),
        "truncated": ((n_steps, n_envs), np.uint8),
        "final_obs": ((n_steps * n_envs, obs.size), obs.dtype),
    }
    if masked:
        shapes["masks"] = ((n_steps, n_envs, actions.n_parameters), np.uint8)
    return spaces.Dict({name: _box(shape, dtype) for name, (shape, dtype) in shapes.items()})


def order_space(n_steps: int, n_envs: int, actions: ActionRows, n_weights: int, n_inputs: int) -> spaces.Dict:
    """The space of what a share is told: weights, noise and the normaliser's statistics."""
    return spaces.Dict(
        {
            "weights": _box((n_weights,), np.float32),
            "noise": _box((n_steps, n_envs, actions.size), np.float32),
            "mean": _box((n_inputs,), np.float32),
            "scale": _box((n_inputs,), np.float32),
            "normalize": _box((1,), np.uint8),
        }
    )


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    if np.issubdtype(dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    info = np.iinfo(dtype)
    return spaces.Box(info.min, info.max, shape, dtype)


class ShareMaker:
    """A picklable function that makes a `ShareEnv` in its worker."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __call__(self) -> ShareEnv:
        """The env, made where it runs."""
        return ShareEnv(*self.arguments)
