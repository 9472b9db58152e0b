"""Workers that hold the small policy themselves: one exchange per rollout instead of one per step.

A share of the environments is a Gymnasium env whose step is a whole rollout: its action is the policy's weights and
the noise, its observation is the experience. So any vector env can run it, and how processes start, wait, fail and
end is the vector room's business alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.core.processes import StartMethod
from shoal.maths.normalizer import ObservationNormalizer
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows
from shoal.rollout.arrays.steps import EnvSlice, StepPolicy, StepRollout
from shoal.train.ppo.compiled.network import CompiledNetwork, NetworkShape
from shoal.train.ppo.envs import EnvFactory, EnvFacts

Array = np.ndarray


class SharePolicy:
    """The compiled actor inside a worker, with the normaliser's statistics of this rollout."""

    def __init__(self, shape: NetworkShape) -> None:
        self.network = CompiledNetwork(shape)
        self.norm = ObservationNormalizer(shape.inputs)
        self.normalizes = False

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write actions and log-probabilities."""
        seen = self.norm(obs) if self.normalizes else obs
        self.network.act(seen, masks, noise, actions, logprobs, deterministic)


class ShareEnv(gym.Env):
    """Envs `first .. first + n_envs` of a run; `step` plays `n_steps` of each.

    Args:
        factory: makes the environments.
        first: global index of the first one.
        n_envs: how many.
        room: for how many there is room in what it is told and tells, at least `n_envs`.
        n_steps: length of a rollout.
        shape: of the network.
        masked: whether the environments give action masks.
    """

    def __init__(
        self, factory: EnvFactory, first: int, n_envs: int, room: int, n_steps: int, shape: NetworkShape,
        masked: bool,
    ) -> None:  # fmt: skip
        self.slice = EnvSlice([factory(first + i) for i in range(n_envs)], first_index=first, masked=masked)
        self.policy = SharePolicy(shape)
        self.n_steps = n_steps
        obs, acts = self.slice.obs_rows, self.slice.action_rows
        self.observation_space = experience_space(n_steps, room, obs, acts, masked)
        self.action_space = order_space(n_steps, room, acts, self.policy.network.weights.size, obs.size)

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
        n_envs = len(self.slice.envs)
        rollout = self.slice.collect(policy, np.ascontiguousarray(action["noise"][:, :n_envs]))
        experience = self._nothing()
        for name in ("obs", "actions", "logprobs", "rewards", "terminated", "truncated", "masks"):
            if name in experience:
                experience[name][:, :n_envs] = getattr(rollout, name)
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


class WorkerSteps:
    """Collects from worker processes that each play whole rollouts of their share.

    Args:
        factory: makes the environments.
        facts: what is known of them.
        n_envs: of the run.
        n_steps: length of a rollout.
        num_workers: processes.
        network: whose weights the workers get before each rollout.
        start_method: how processes start; None for the safe default.
    """

    def __init__(
        self, factory: EnvFactory, facts: EnvFacts, *, n_envs: int, n_steps: int, num_workers: int,
        network: CompiledNetwork, start_method: StartMethod | None = None,
    ) -> None:  # fmt: skip
        from shoal.vector import make_vec

        self.network, self.n_envs, self.n_steps, self.masked = network, n_envs, n_steps, facts.masked
        self.obs_rows = ObservationRows(facts.observation_space)
        self.action_rows = ActionRows(facts.action_space)
        self.share = -(-n_envs // num_workers)
        n_shares = -(-n_envs // self.share)
        # Every share has the same room, as a vector env needs; the last one may have fewer envs.
        makers = [ShareMaker(factory, first, min(self.share, n_envs - first), self.share, n_steps,
                             network.shape, facts.masked)
                  for first in range(0, n_envs, self.share)]  # fmt: skip
        self.envs = make_vec(
            makers,
            n_shares,
            backend="process",
            num_workers=n_shares,
            start_method=start_method,
            check_nan=False,
        )

    def reset(self) -> Array:
        """Start an episode in every env."""
        self.envs.reset()
        return self._now()

    def resume(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> Array:
        """Play the episodes again that were under way."""
        self.envs.call("resume_share", list(episodes), list(actions))
        return self._now()

    def restart(self, indices: Sequence[int]) -> None:
        """Break off and start again the envs with these indices."""
        self.envs.call("restart_share", list(indices))

    def collect(self, policy: StepPolicy, noise: Array) -> StepRollout:
        """One rollout of every share. `policy` is the agent, whose normaliser the workers use too."""
        n_shares, share = self.envs.num_envs, self.share
        padded = np.zeros((self.n_steps, n_shares * share, noise.shape[2]), np.float32)
        padded[:, : self.n_envs] = noise
        norm = getattr(policy, "obs_norm", None)
        active = norm is not None and norm.moments.count > 0
        size = self.obs_rows.size
        mean, scale = np.zeros(size, np.float32), np.ones(size, np.float32)
        if norm is not None and active:
            mean, scale = norm.mean, norm.scale
        orders = {
            "weights": np.tile(self.network.weights, (n_shares, 1)),
            "noise": np.stack(np.split(padded, n_shares, axis=1)),
            "mean": np.tile(mean, (n_shares, 1)),
            "scale": np.tile(scale, (n_shares, 1)),
            "normalize": np.full((n_shares, 1), active, np.uint8),
        }
        experience = self.envs.step(orders)[0]
        return self._merge(experience)

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def _now(self) -> Array:
        return np.concatenate(list(self.envs.call("current_rows")))

    def _merge(self, experience: dict[str, Array]) -> StepRollout:
        rollout = StepRollout.empty(self.n_steps, self.n_envs, self.obs_rows, self.action_rows, self.masked)
        for name, parts in experience.items():  # [shares, T, envs of the share, ...]
            if name != "final_obs":
                whole = getattr(rollout, name)
                for k, part in enumerate(parts):
                    columns = slice(k * self.share, min((k + 1) * self.share, self.n_envs))
                    whole[:, columns] = part[:, : columns.stop - columns.start]
        rollout.final_obs = self._finals(experience)
        return rollout

    def _finals(self, experience: dict[str, Array]) -> Array:
        """Final observations of all shares in the order of t, then env."""
        rows, places = [], []
        for k, truncated in enumerate(experience["truncated"]):
            for row, (t, i) in enumerate(np.argwhere(truncated)):
                places.append((t, k * self.share + i))
                rows.append(experience["final_obs"][k][row])
        order = sorted(range(len(rows)), key=places.__getitem__)
        return (
            np.stack([rows[j] for j in order])
            if rows
            else np.zeros((0, self.obs_rows.size), self.obs_rows.dtype)
        )
