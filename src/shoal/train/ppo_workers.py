"""Workers that hold the small policy themselves: one exchange per rollout instead of one per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.processes import StartMethod
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows
from shoal.rollout.arrays.steps import StepPolicy, StepRollout
from shoal.train.compiled_network import CompiledNetwork
from shoal.train.ppo_envs import EnvFactory, EnvFacts
from shoal.train.ppo_share import ShareMaker

Array = np.ndarray


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
        # Every share has the same size; what the last one has too many of is played and ignored.
        makers = [ShareMaker(factory, k * self.share, self.share, n_steps, network.shape, facts.masked)
                  for k in range(n_shares)]  # fmt: skip
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
        more = len(self.envs.call("current_rows")) * self.share - self.n_envs
        self.envs.call("resume_share", [*episodes, *[1] * more], [*actions, *[()] * more])
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
        return np.concatenate(list(self.envs.call("current_rows")))[: self.n_envs]

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
                if k * self.share + i < self.n_envs:
                    places.append((t, k * self.share + i))
                    rows.append(experience["final_obs"][k][row])
        order = sorted(range(len(rows)), key=places.__getitem__)
        return (
            np.stack([rows[j] for j in order])
            if rows
            else np.zeros((0, self.obs_rows.size), self.obs_rows.dtype)
        )
