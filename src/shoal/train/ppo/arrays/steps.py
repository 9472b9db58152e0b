"""Collect experience of array policies: `n_steps` of every env, in order, nothing invented at ends.

Two collectors give the same rows: `EnvSlice` steps its own environments in a plain loop (here, or inside
a worker that holds the policy too), `VectorSteps` steps any Gymnasium vector env in any autoreset mode.
`SeededEpisodes` are environments whose episodes can be started again: seeds by (run, env, episode), never by worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.data import check_flags, check_step_result, info_of, reward_of
from shoal.core.errors import EnvError, ShoalError
from shoal.core.seeding import derive_seed
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows

Array = np.ndarray


class StepPolicy(Protocol):
    """What a collector asks of a policy; one that remembers also has `forget(i)`, for an env whose episode begins."""

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write `actions[N, A]` and `logprobs[N]` for `obs[N, D]`.

        Args:
            obs: as the policy sees them.
            masks: `[N, sum(groups)]`, 0 where a choice is not allowed; without elements all are.
            noise: `[N, A]`, from which all chance comes.
            actions: written.
            logprobs: written.
            deterministic: the likeliest actions instead of drawn ones.
        """


@dataclass(slots=True)
class StepRollout:
    """`T` steps of `N` envs. An episode that ends at `t` has its successor's first observation at `t + 1`."""

    obs: Array  # [T + 1, N, D]; the last row is where the next rollout begins
    actions: Array  # [T, N, A]
    logprobs: Array  # [T, N] of the actions, under the policy that chose them
    rewards: Array  # [T, N] float64
    terminated: Array  # [T, N] bool  the MDP ended
    truncated: Array  # [T, N] bool  we stopped watching; False where terminated
    final_obs: Array  # [K, D] the true last observations of truncated episodes, in the order of t, then env
    masks: Array  # [T, N, sum(groups)] uint8, or empty [0, 0, 0] when every action is always allowed
    valid: Array | None = None  # [T, N] bool; False where a step was spent on a reset, or nobody was there
    memory: Array | None = None  # [N, S] what a recurrent policy remembered at the first step

    @property
    def done(self) -> Array:
        """Whether the step ended its episode, either way."""
        return np.asarray(self.terminated | self.truncated)

    @property
    def begins(self) -> Array:
        """`[T + 1, N]`: whether the observation is the first of an episode that begins within the rollout."""
        before = self.done if self.valid is None else self.done | ~self.valid
        return np.concatenate([np.zeros_like(before[:1]), before])

    @staticmethod
    def empty(
        n_steps: int, n_envs: int, obs: ObservationRows, actions: ActionRows, masked: bool
    ) -> StepRollout:
        """Room for a rollout."""
        masks = (n_steps, n_envs, actions.n_parameters) if masked else (0, 0, 0)
        return StepRollout(
            obs=np.zeros((n_steps + 1, n_envs, obs.size), obs.dtype),
            actions=np.zeros((n_steps, n_envs, actions.size), actions.dtype),
            logprobs=np.zeros((n_steps, n_envs), np.float32),
            rewards=np.zeros((n_steps, n_envs)),
            terminated=np.zeros((n_steps, n_envs), bool),
            truncated=np.zeros((n_steps, n_envs), bool),
            final_obs=np.zeros((0, obs.size), obs.dtype),
            masks=np.ones(masks, np.uint8),
        )


class SeededEpisodes(gym.Wrapper):
    """Seeds each episode by the run's seed, the env's global index and the episode's number.

    So an episode is a function of those and its actions: it can be played again after a crash
    (`resume_episode`), and no number of workers can change it. An environment with a method `action_masks` or
    `action_mask` gets its result into `info["action_mask"]`.

    Args:
        env: one environment.
        seed: of the run.
        index: of this env among all of the run.
        stream: name of the stream of seeds, "env" for training.
    """

    def __init__(self, env: gym.Env, seed: int, index: int, stream: str = "env") -> None:
        super().__init__(env)
        self.seed, self.index, self.stream = seed, index, stream
        self.episode = 0  # the number of the next episode
        own = (getattr(env.unwrapped, name, None) for name in ("action_masks", "action_mask"))
        self._mask = next(filter(callable, own), None)
        if self._mask is None:
            self.step = env.step  # type: ignore[method-assign]  # one Python call less per step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode; a `seed` given by the caller is used instead of the derived one."""
        chosen = derive_seed(self.seed, self.stream, self.index, self.episode) if seed is None else seed
        self.episode += 1
        seed = chosen & 0x7FFFFFFF
        try:
            answer = self.env.reset(seed=seed, options=options)
        except ShoalError:
            raise
        except Exception as error:
            raise EnvError(
                f"{self._name} failed at the start of episode {self.episode - 1}, in reset(seed={seed}, "
                f"options={options}): {error!r}"
            ) from error
        try:
            observation, info = check_step_result(answer, "reset")
            info_of(info)
        except EnvError as error:
            raise EnvError(f"{self._name}: {error}") from error
        return observation, self._with_mask(info)

    @property
    def _name(self) -> str:
        return f"env {self.index} ({type(self.unwrapped).__name__})"

    def step(self, action: Any) -> Any:
        """One step, with the action mask in `info`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, self._with_mask(info)

    def resume_episode(
        self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]
    ) -> tuple[Any, dict[str, Any]]:
        """Play the episode again that was under way, and return its last observation and info.

        Args:
            episodes: by env index, how many episodes had been started.
            actions: by env index, the env's own actions since that episode's reset.
        """
        self.episode = int(episodes[self.index]) - 1
        observation, info = self.reset()
        for t, action in enumerate(actions[self.index]):
            try:
                observation, _, terminated, truncated, info = self.step(action)
            except Exception as error:
                raise EnvError(
                    f"{self._name} failed at step {t} of episode {self.episode - 1}, which had succeeded before it "
                    f"was replayed: {error!r}"
                ) from error
            if terminated or truncated:
                break
        return observation, info

    def restart_episode(self, indices: Sequence[int]) -> tuple[Any, dict[str, Any]] | None:
        """Break off this episode and start the next one if this env is among `indices`."""
        return self.reset() if self.index in indices else None

    def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
        if self._mask is None:
            return info
        return {**info, "action_mask": np.asarray(self._mask())}


class EnvSlice:
    """Some environments of a run, stepped one after the other in this process.

    Args:
        envs: they must derive their own seeds on `reset()` (see `SeededEpisodes`) to be reproducible.
        first_index: the global index of `envs[0]`, for messages.
        masked: whether `info["action_mask"]` says which actions are allowed.
    """

    def __init__(self, envs: Sequence[gym.Env], *, first_index: int = 0, masked: bool = False) -> None:
        self.envs = list(envs)
        self.first_index = first_index
        self.masked = masked
        self.obs_rows = ObservationRows(self.envs[0].observation_space)
        self.action_rows = ActionRows(self.envs[0].action_space)
        self.now = np.zeros((len(self.envs), self.obs_rows.size), self.obs_rows.dtype)
        self._mask = np.ones((len(self.envs), self.action_rows.n_parameters if masked else 0), np.uint8)

    def reset(self) -> Array:
        """Start an episode in every env; returns the rows of first observations."""
        for i in range(len(self.envs)):
            self._start(i)
        return self.now

    def resume(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> Array:
        """Play the episodes again that were under way (see `SeededEpisodes.resume_episode`)."""
        for i, env in enumerate(self.envs):
            observation, info = env.get_wrapper_attr("resume_episode")(episodes, actions)
            self._see(i, observation, self.now[i])
            self._note_mask(i, info)
        return self.now

    def restart(self, indices: Sequence[int]) -> None:
        """Break off the episodes of the envs with these global indices and start new ones."""
        for index in indices:
            if 0 <= index - self.first_index < len(self.envs):
                self._start(index - self.first_index)

    def collect(self, policy: StepPolicy, noise: Array, *, until_done: bool = False) -> StepRollout:
        """`len(noise)` steps of every env; `until_done` stops after the first episode that ends (one env)."""
        n_steps, n_envs = noise.shape[0], len(self.envs)
        rollout = StepRollout.empty(n_steps, n_envs, self.obs_rows, self.action_rows, self.masked)
        obs, actions, logprobs, masks = rollout.obs, rollout.actions, rollout.logprobs, rollout.masks
        steps = [env.step for env in self.envs]
        to_env, masked = self.action_rows.to_env, self.masked
        see, array = self._see, np.ndarray
        shape = (self.obs_rows.size,) if self.obs_rows.is_plain else None
        forget = getattr(policy, "forget", _nothing)
        rewards: list[Any] = []
        finals: list[Array] = []
        obs[0] = self.now
        mask = self._mask
        t = i = 0
        for t in range(n_steps):
            if masked:
                check_masks(self.action_rows, self._mask, t, self.first_index)
                masks[t] = mask
            policy.act(obs[t], mask, noise[t], actions[t], logprobs[t])
            row = obs[t + 1]
            try:
                for i, action in enumerate(to_env(actions[t])):
                    observation, reward, terminated, truncated, info = steps[i](action)
                    # an env may write its next reward into the same array
                    rewards.append(reward if type(reward) is not array else reward.copy())
                    if terminated or truncated:
                        where = f"env {self.first_index + i}, step {t} of the rollout: "
                        check_flags(terminated, truncated, where)
                        if terminated:
                            rollout.terminated[t, i] = True
                        else:
                            rollout.truncated[t, i] = True
                            final = np.zeros(self.obs_rows.size, self.obs_rows.dtype)
                            see(i, observation, final)
                            finals.append(final)
                        self._start(i)
                        forget(i)
                        row[i] = self.now[i]
                        continue
                    if (
                        type(observation) is array
                        and observation.shape == shape
                        and observation.dtype.kind in "fiub"
                    ):
                        row[i] = observation
                    else:
                        see(i, observation, row[i])
                    if masked:
                        self._note_mask(i, info)
            except ShoalError:
                raise
            except Exception as error:
                raise EnvError(
                    f"env {self.first_index + i} failed at step {t} of the rollout, action "
                    f"{actions[t, i].tolist()}: {error!r}"
                ) from error
            if until_done and (terminated or truncated):
                break
        self.now[:] = obs[t + 1]
        if until_done:
            cut(rollout, t + 1)
        rollout.rewards[:] = finite_rewards(rewards, n_envs, self.first_index)
        if finals:
            rollout.final_obs = np.stack(finals)
        return rollout

    def close(self) -> None:
        """Close every env."""
        for env in self.envs:
            env.close()

    def _start(self, i: int) -> None:
        observation, info = self.envs[i].reset()
        self._see(i, observation, self.now[i])
        self._note_mask(i, info)

    def _see(self, i: int, observation: Any, row: Array) -> None:
        try:
            self.obs_rows.encode_one(observation, row)
        except EnvError as error:
            raise EnvError(f"env {self.first_index + i}: {error}") from error

    def _note_mask(self, i: int, info: dict[str, Any]) -> None:
        if self.masked:
            self._mask[i] = mask_of(info, self._mask.shape[1], self.first_index + i)


class VectorSteps:
    """Collects from a Gymnasium vector env, whatever its autoreset mode.

    Where it says which of its slots are in play (`active`, as shoal's do), the others' steps are no experience.

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
        self._idle = np.zeros(envs.num_envs, bool)  # the coming step is none: a reset, or nobody is there

    def reset(self) -> Array:
        """Start an episode in every env; returns the rows of first observations."""
        observations, infos = self.envs.reset(seed=self.seed)  # type: ignore[arg-type]
        self.obs_rows.encode(observations, self.now)
        self._idle = self._absent()
        self._note_masks(infos)
        return self.now

    def resume(self, episodes: Sequence[int], actions: Sequence[Sequence[Any]]) -> Array:
        """Play the episodes again that were under way, after a `reset()`."""
        for i, begun in enumerate(self._call("resume_episode", episodes, actions)):
            self._note_begun(i, *begun)
        return self.now

    def restart(self, indices: Sequence[int]) -> None:
        """Break off the episodes of these envs and start new ones."""
        answers = [answer for answer in self._call("restart_episode", indices) if answer is not None]
        for i, begun in zip(indices, answers, strict=True):
            self._note_begun(i, *begun)

    def collect(self, policy: StepPolicy, noise: Array) -> StepRollout:
        """`len(noise)` steps of every env."""
        n_steps, n_envs = noise.shape[0], self.envs.num_envs
        rollout = StepRollout.empty(n_steps, n_envs, self.obs_rows, self.action_rows, self.masked)
        finals: list[Array] = []
        valid = np.ones((n_steps, n_envs), bool)
        forget = getattr(policy, "forget", _nothing)
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
            valid[t] = ~self._idle
            cut = truncated & ~terminated & valid[t]
            rollout.rewards[t] = np.where(valid[t], rewards, 0.0)
            rollout.terminated[t], rollout.truncated[t] = terminated & valid[t], cut
            done = (terminated | truncated) & valid[t]
            if done.any():
                self._note_finals(cut, row, infos, finals)
                infos = self._restart_done(done, row, infos)
            for i in np.flatnonzero(done | ~valid[t]):
                forget(int(i))
            self._idle = self._absent()
            if self.mode == AutoresetMode.NEXT_STEP:  # also of one that was replaced in its reset
                self._idle |= terminated | truncated
            self._note_masks(infos)
        if not np.isfinite(rollout.rewards).all():
            finite_rewards(rollout.rewards.ravel().tolist(), n_envs)
        self.now[:] = rollout.obs[n_steps]
        if finals:
            rollout.final_obs = np.stack(finals)
        rollout.valid = valid if self.mode == AutoresetMode.NEXT_STEP or not valid.all() else None
        return rollout

    def close(self) -> None:
        """Close the vector env."""
        self.envs.close()

    def _call(self, name: str, *arguments: Any) -> Sequence[Any]:
        return self.envs.call(name, *arguments)  # type: ignore[attr-defined,no-any-return]

    def _note_begun(self, i: int, observation: Any, info: dict[str, Any]) -> None:
        self.obs_rows.encode_one(observation, self.now[i])
        if self.masked:
            self._mask[i] = mask_of(info, self._mask.shape[1], i)

    def _absent(self) -> Array:
        """Which slots nobody is in: agents that have ended, environments that are left out."""
        active: Any = getattr(self.envs.unwrapped, "active", None)
        n = self.envs.num_envs
        return np.logical_not(active) if np.shape(active) == (n,) else np.zeros(n, bool)

    def _note_finals(self, cut: Array, row: Array, infos: dict[str, Any], finals: list[Array]) -> None:
        for i in np.flatnonzero(cut):
            final = row[i].copy()
            if self.mode == AutoresetMode.SAME_STEP:
                if "final_obs" not in infos:
                    raise EnvError(
                        f"env {i} was truncated, but the vector env gave no info['final_obs']: without "
                        "the true last observation there is no value to bootstrap; use shoal.vector.make_vec"
                    )
                self.obs_rows.encode_one(entry_of(infos["final_obs"], int(i)), final)
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
                if self._idle[i]:
                    self._mask[i] = 1  # the action is ignored
                    continue
                info = {"action_mask": infos["action_mask"][i]} if "action_mask" in infos else {}
                self._mask[i] = mask_of(info, self._mask.shape[1], i)


def finite_rewards(rewards: list[Any], n_envs: int, first_index: int = 0) -> Array:
    """The rewards of some steps, one env after the other, as `[T, N]` float64; an `EnvError` for what is no number."""
    try:
        if math.isfinite(sum(rewards)):  # text has no sum, which is sooner known than its type
            return np.asarray(rewards, np.float64).reshape(-1, n_envs)
    except (TypeError, ValueError, OverflowError):  # arrays of some size, numbers too large for a float
        pass
    for place, reward in enumerate(rewards):
        where = f"env {first_index + place % n_envs}, step {place // n_envs} of the rollout"
        try:
            paid = reward_of(reward)
        except EnvError as error:
            rest = str(error).partition(", ")[2]
            raise EnvError(f"{where}: reward must be finite, {rest}") from error
        if not math.isfinite(paid):
            raise EnvError(f"{where}: reward must be finite, got {reward!r}")
        rewards[place] = paid
    return np.asarray(rewards, np.float64).reshape(-1, n_envs)


def _nothing(_: int) -> None:
    """What a policy without memory forgets."""


def entry_of(batch: Any, i: int) -> Any:
    """Env `i`'s part of a batch that may be a dict of batches."""
    return {key: entry_of(value, i) for key, value in batch.items()} if isinstance(batch, dict) else batch[i]


def mask_of(info: dict[str, Any], size: int, index: int) -> Array:
    """The action mask in an env's info, checked; `index` names the env in errors."""
    if "action_mask" not in info:
        raise EnvError(
            f"env {index} gave info['action_mask'] before, but not this time; give it at every step"
        )
    mask = np.asarray(info["action_mask"]).reshape(-1)
    if mask.size != size:
        raise EnvError(
            f"env {index}: info['action_mask'] must have {size} entries, one per action, got {mask.size}"
        )
    return mask.astype(bool)


def check_masks(actions: ActionRows, masks: Array, t: int, first_index: int) -> None:
    """Raise where an action is needed and none is allowed."""
    if masks.all():
        return
    for env, group in actions.forbidden(masks):
        part = f", part {group} of the action" if len(actions.groups) > 1 else ""
        raise EnvError(
            f"env {first_index + env}, step {t} of the rollout{part}: the action mask allows no action"
        )


def cut(rollout: StepRollout, n_steps: int) -> None:
    """Shorten a rollout that ended early."""
    rollout.obs = rollout.obs[: n_steps + 1]
    for name in ("actions", "logprobs", "rewards", "terminated", "truncated", "masks"):
        setattr(rollout, name, getattr(rollout, name)[:n_steps])
