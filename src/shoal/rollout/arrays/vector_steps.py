"""Collect experience of array policies from any Gymnasium vector env; the rows are those of `EnvSlice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.errors import EnvError
from shoal.rollout.arrays.spaces import ActionRows, ObservationRows
from shoal.rollout.arrays.steps import Array, StepPolicy, StepRollout, check_masks, mask_of


class VectorSteps:
    """Collects from a Gymnasium vector env, whatever its autoreset mode.

    Args:
        envs: reset by `reset()` of this class, never by the caller during a rollout.
        masked: whether `info["action_mask"]` says which actions are allowed.
        seed: given to the first reset, for vector envs that do not seed themselves.
    """

    def __init__(self, envs: VectorEnv, *, masked: bool = False, seed: int | list[int] | None = None) -> None:
        self.envs = envs
        self.masked = masked
        self.seed = seed
        self.obs_rows = ObservationRows(envs.single_observation_space)
        self.action_rows = ActionRows(envs.single_action_space)
        mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.mode = AutoresetMode(mode) if not isinstance(mode, AutoresetMode) else mode
        self.now = np.zeros((envs.num_envs, self.obs_rows.size), self.obs_rows.dtype)
        self._mask = np.ones((envs.num_envs, self.action_rows.n_parameters if masked else 0), np.uint8)
        self._resetting = np.zeros(envs.num_envs, bool)  # NEXT_STEP: the coming step is a reset

    def reset(self) -> Array:
        """Start an episode in every env; returns the rows of first observations."""
        observations, infos = self.envs.reset(seed=self.seed)  # type: ignore[arg-type]
        self.obs_rows.encode(observations, self.now)
        self._note_masks(infos)
        self._resetting[:] = False
        return self.now

    def resume(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> Array:
        """Play the episodes again that were under way, after a `reset()`."""
        for i, (observation, info) in enumerate(self._call("resume_episode", episodes, actions)):
            self.obs_rows.encode_one(observation, self.now[i])
            if self.masked:
                self._mask[i] = mask_of(info, self._mask.shape[1], i)
        return self.now

    def restart(self, indices: Sequence[int]) -> None:
        """Break off the episodes of these envs and start new ones."""
        for i, answer in zip(indices, _those(self._call("restart_episode", indices)), strict=True):
            observation, info = answer
            self.obs_rows.encode_one(observation, self.now[i])
            if self.masked:
                self._mask[i] = mask_of(info, self._mask.shape[1], i)

    def collect(self, policy: StepPolicy, noise: Array) -> StepRollout:
        """`len(noise)` steps of every env."""
        n_steps, n_envs = noise.shape[0], self.envs.num_envs
        rollout = StepRollout.empty(n_steps, n_envs, self.obs_rows, self.action_rows, self.masked)
        finals: list[Array] = []
        valid = np.ones((n_steps, n_envs), bool)
        rollout.obs[0] = self.now
        for t in range(n_steps):
            if self.masked:
                check_masks(self.action_rows, self._mask, t, 0)
                rollout.masks[t] = self._mask
            policy.act(rollout.obs[t], self._mask, noise[t], rollout.actions[t], rollout.logprobs[t])
            batch = self.action_rows.to_batch(rollout.actions[t])
            observations, rewards, terminated, truncated, infos = self.envs.step(batch)
            row = rollout.obs[t + 1]
            self.obs_rows.encode(observations, row)
            valid[t] = ~self._resetting
            cut = truncated & ~terminated & valid[t]
            rollout.rewards[t] = np.where(valid[t], rewards, 0.0)
            rollout.terminated[t], rollout.truncated[t] = terminated & valid[t], cut
            done = (terminated | truncated) & valid[t]
            if done.any():
                self._note_finals(cut, rollout.obs[t], row, infos, finals)
                infos = self._restart_done(done, row, infos)
            self._resetting = done if self.mode == AutoresetMode.NEXT_STEP else self._resetting
            self._note_masks(infos)
        self.now[:] = rollout.obs[n_steps]
        if finals:
            rollout.final_obs = np.stack(finals)
        rollout.valid = valid if self.mode == AutoresetMode.NEXT_STEP else None
        return rollout

    def close(self) -> None:
        """Close the vector env."""
        self.envs.close()

    def _call(self, name: str, *arguments: Any) -> Sequence[Any]:
        return self.envs.call(name, *arguments)  # type: ignore[attr-defined,no-any-return]

    def _note_finals(
        self, cut: Array, before: Array, row: Array, infos: dict[str, Any], finals: list[Array]
    ) -> None:
        restarted = infos.get("worker_restarted", np.zeros(len(cut), bool))
        for i in np.flatnonzero(cut):
            final = row[i].copy()
            if restarted[i]:  # its worker died with the last observation: the one before is all there is
                final = before[i].copy()
            elif self.mode == AutoresetMode.SAME_STEP:
                if "final_obs" not in infos:
                    raise EnvError(
                        f"env {i} was truncated, but the vector env gave no info['final_obs']: without "
                        "the true last observation there is no value to bootstrap; use shoal.vector.make_vec"
                    )
                self.obs_rows.encode_one(_entry(infos["final_obs"], int(i)), final)
            finals.append(final)

    def _restart_done(self, done: Array, row: Array, infos: dict[str, Any]) -> dict[str, Any]:
        """With autoreset disabled, start the next episodes now; returns the infos to read masks from."""
        if self.mode != AutoresetMode.DISABLED:
            return infos
        observations, fresh = self.envs.reset(options={"reset_mask": done.copy()})
        started = np.zeros_like(row)
        self.obs_rows.encode(observations, started)
        row[done] = started[done]
        if self.masked:
            both = np.array(infos["action_mask"], copy=True)
            both[done] = fresh["action_mask"][done]
            return {"action_mask": both}
        return infos

    def _note_masks(self, infos: dict[str, Any]) -> None:
        if self.masked:
            for i in range(len(self._mask)):
                if not self._resetting[i]:
                    self._mask[i] = mask_of(
                        {"action_mask": infos["action_mask"][i]} if "action_mask" in infos else {},
                        self._mask.shape[1],
                        i,
                    )
                else:
                    self._mask[i] = 1  # the action is ignored


def _those(answers: Sequence[Any]) -> list[Any]:
    return [answer for answer in answers if answer is not None]


def _entry(batch: Any, i: int) -> Any:
    """Env `i`'s part of a batch that may be a dict of batches."""
    return {key: _entry(value, i) for key, value in batch.items()} if isinstance(batch, dict) else batch[i]
