"""Workers that hold the small policy themselves: one exchange per rollout instead of one per step.

A share of the environments is a Gymnasium env whose step is a whole rollout: its action is the policy's weights and
the noise, its observation is the experience. So any vector env can run it, and how processes start, wait, fail and
end is the vector room's business alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.core.workers import StartMethod
from shoal.maths.normalizer import ObservationNormalizer
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows
from shoal.train.ppo.arrays.steps import EnvSlice, StepPolicy, StepRollout
from shoal.train.ppo.compiled.network import CompiledNetwork, NetworkShape
from shoal.train.ppo.envs import EnvFactory, EnvFacts, make_envs

Array = np.ndarray


class ShareEnv(gym.Env):
    """Envs `first .. first + n_envs` of a run; `step` plays `n_steps` of each.

    There is room for `room` envs, at least `n_envs`, in what it is told and tells.
    """

    def __init__(
        self, factory: EnvFactory, first: int, n_envs: int, room: int, n_steps: int, shape: NetworkShape,
        masked: bool,
    ) -> None:  # fmt: skip
        self.slice = EnvSlice(make_envs(factory, first, n_envs), first_index=first, masked=masked)
        self.network = CompiledNetwork(shape)
        self.norm: ObservationNormalizer | None = None
        # what is asked of it by name, between two steps
        self.resume_share, self.restart_share = self.slice.resume, self.slice.restart
        self.current_rows = self.slice.now
        obs, acts = self.slice.obs_rows, self.slice.action_rows
        masks = {"masks": _box((n_steps, room, acts.n_parameters), np.uint8)} if masked else {}
        self.observation_space = spaces.Dict({
            "obs": _box((n_steps + 1, room, obs.size), obs.dtype),
            "actions": _box((n_steps, room, acts.size), acts.dtype),
            "logprobs": _box((n_steps, room), np.float32),
            "rewards": _box((n_steps, room), np.float64),
            "terminated": _box((n_steps, room), np.uint8),
            "truncated": _box((n_steps, room), np.uint8),
            "final_obs": _box((n_steps * room, obs.size), obs.dtype),  # for every step being truncated
            **masks,
        })  # fmt: skip
        self.action_space = spaces.Dict({
            "weights": _box((self.network.weights.size,), np.float32),
            "noise": _box((n_steps, room, acts.size), np.float32),
            "mean": _box((obs.size,), np.float32),
            "scale": _box((obs.size,), np.float32),
            "normalize": _box((1,), np.uint8),
        })  # fmt: skip

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start all episodes; the seeds are derived, so `seed` is not used."""
        self.slice.reset()
        return self._nothing(), {}

    def step(self, action: dict[str, Array]) -> Any:
        """One rollout."""
        self.network.weights[:] = action["weights"]
        self.norm = None
        if action["normalize"][0]:
            self.norm = ObservationNormalizer(self.slice.obs_rows.size)
            self.norm.moments.count = 1.0
            self.norm.mean, self.norm.scale = action["mean"], action["scale"]
        n_envs = len(self.slice.envs)
        rollout = self.slice.collect(self, np.ascontiguousarray(action["noise"][:, :n_envs]))
        experience = self._nothing()
        for name, room in experience.items():
            if name != "final_obs":
                room[:, :n_envs] = getattr(rollout, name)
        experience["final_obs"][: len(rollout.final_obs)] = rollout.final_obs
        return experience, 0.0, False, False, {}

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write actions and log-probabilities, as the agent does."""
        seen = obs if self.norm is None else self.norm(obs)
        self.network.act(seen, masks, noise, actions, logprobs, deterministic)

    def close(self) -> None:
        """Close the environments."""
        self.slice.close()

    def _nothing(self) -> dict[str, Array]:
        parts = self.observation_space.spaces  # type: ignore[attr-defined]
        return {name: np.zeros(space.shape, space.dtype) for name, space in parts.items()}


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    if np.issubdtype(dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    info = np.iinfo(dtype)
    return spaces.Box(info.min, info.max, shape, dtype)


class WorkerSteps:
    """Collects from worker processes that each play whole rollouts of their share, by the weights of `network`."""

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
        makers = [partial(ShareEnv, factory, first, min(self.share, n_envs - first), self.share, n_steps,
                          network.shape, facts.masked)
                  for first in range(0, n_envs, self.share)]  # fmt: skip
        self.envs = make_vec(
            makers, n_shares, backend="process", num_workers=n_shares, start_method=start_method, check_nan=False
        )  # fmt: skip

    def reset(self) -> Array:
        """Start an episode in every env."""
        self.envs.reset()
        return np.concatenate(self.envs.call("current_rows"))

    def resume(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> Array:
        """Play the episodes again that were under way."""
        return np.concatenate(self.envs.call("resume_share", list(episodes), list(actions)))

    def restart(self, indices: Sequence[int]) -> None:
        """Break off and start again the envs with these indices."""
        self.envs.call("restart_share", list(indices))

    def collect(self, policy: StepPolicy, noise: Array) -> StepRollout:
        """One rollout of every share. `policy` is the agent, whose normaliser the workers use too."""
        n_shares, share = self.envs.num_envs, self.share
        padded = np.zeros((self.n_steps, n_shares * share, noise.shape[2]), np.float32)
        padded[:, : self.n_envs] = noise
        norm = getattr(policy, "obs_norm", None)
        active = norm if norm is not None and norm.moments.count > 0 else None
        size = self.obs_rows.size
        mean, scale = (active.mean, active.scale) if active else (np.zeros(size, np.float32),) * 2
        orders = {
            "weights": np.tile(self.network.weights, (n_shares, 1)),
            "noise": np.stack(np.split(padded, n_shares, axis=1)),
            "mean": np.tile(mean, (n_shares, 1)),
            "scale": np.tile(scale, (n_shares, 1)),
            "normalize": np.full((n_shares, 1), active is not None, np.uint8),
        }
        return self._merge(self.envs.step(orders)[0])

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def _merge(self, experience: dict[str, Array]) -> StepRollout:
        rollout = StepRollout.empty(self.n_steps, self.n_envs, self.obs_rows, self.action_rows, self.masked)
        for name, parts in experience.items():  # [shares, T, envs of the share, ...]
            if name != "final_obs":
                whole = getattr(rollout, name)
                for k, part in enumerate(parts):
                    columns = slice(k * self.share, min((k + 1) * self.share, self.n_envs))
                    whole[:, columns] = part[:, : columns.stop - columns.start]
        finals = [iter(rows) for rows in experience["final_obs"]]  # in the order of t, then env
        if ends := np.nonzero(rollout.truncated)[1].tolist():
            rollout.final_obs = np.stack([next(finals[i // self.share]) for i in ends])
        return rollout
