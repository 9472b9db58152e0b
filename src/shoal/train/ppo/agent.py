"""The heart of PPO, shared by every way to run it: act with noise from outside, improve from a rollout.

All randomness is a function of the run's seed and the iteration, so nothing of it has to be saved.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
from torch import nn

from shoal.core.errors import ConfigError, DivergedError, EnvError
from shoal.core.seeding import stream
from shoal.maths.normalizer import ObservationNormalizer, RewardNormalizer
from shoal.maths.updates import decayed, explained_variance, next_values_of
from shoal.train.ppo.arrays.spaces import AS_FLOAT32, ActionRows, ObservationRows
from shoal.train.ppo.arrays.steps import StepRollout
from shoal.train.ppo.compiled.network import UpdateBatch, UpdateRates
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.learner import RecurrentLearner, make_learner
from shoal.train.ppo.networks import build_network

Array = np.ndarray


class PPOAgent:
    """A policy that learns from rollouts of `n_envs` environments of these spaces; arguments are as `PPO` has them."""

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, config: PPOConfig, *, n_envs: int, seed: int,
        network: nn.Module | None = None, path: str = "auto", device: str = "cpu",
    ) -> None:  # fmt: skip
        self.obs_rows, self.action_rows = ObservationRows(observation_space), ActionRows(action_space)
        built = build_network(self.obs_rows, self.action_rows, config, seed=seed, network=network)
        eps = config.adam_eps
        self.learner = make_learner(built, self.action_rows, path=path, device=device, adam_eps=eps)
        self.config, self.n_envs, self.seed = config, n_envs, seed
        self.iteration = 0
        self.torn = False
        """Whether an update was ended halfway."""
        n_numbers = self.obs_rows.n_numbers if config.normalize_obs else 0
        self.obs_norm = ObservationNormalizer(n_numbers, self.obs_rows.choices) if n_numbers else None
        self.reward_norm = RewardNormalizer(n_envs, config.gamma) if config.normalize_reward else None
        self.memory: Array | None = None
        """`[N, S]` hidden state of a recurrent policy, one row for each env."""
        self.attend(n_envs)

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write actions and log-probabilities for raw observations; the normaliser's statistics stay.

        One that remembers goes on from what it remembers of these envs, and remembers this step.
        """
        seen = self._seen(obs)
        if self.memory is None:
            self.learner.act(seen, masks, noise, actions, logprobs, deterministic)
        else:
            assert isinstance(self.learner, RecurrentLearner)
            self.learner.act_on(self.memory, seen, masks, noise, actions, logprobs, deterministic)

    def value_of(self, row: Array) -> float:
        """The critic's value of one raw observation row, before it is acted on."""
        seen = self._seen(row)
        if isinstance(self.learner, RecurrentLearner):
            assert self.memory is not None
            return self.learner.value_on(self.memory, seen)
        return float(self.learner.values(seen)[0])

    def forget(self, i: int) -> None:
        """An episode begins in env `i`: its hidden state is reset."""
        if self.memory is not None:
            self.memory[i] = 0

    def go_on_with(self, config: PPOConfig) -> None:
        """Learn by other settings from now on; those of `BUILT_IN` must be the same."""
        self.config = config
        if self.reward_norm is not None:
            self.reward_norm.gamma = config.gamma

    def broken_off(self, i: int) -> None:
        """The open episode of env `i` is broken off: its hidden state and sum of rewards are reset."""
        self.forget(i)
        if self.reward_norm is not None:
            self.reward_norm.sums[i] = 0.0

    def refuse_torn(self) -> None:
        """Raise a `ConfigError` where an update ended halfway: it diverged, or a second Ctrl-C came."""
        if self.torn:
            raise ConfigError(
                "an update ended halfway (a second Ctrl-C, or it diverged): load the last checkpoint to go on"
            )

    def alone(self) -> PPOAgent:
        """The same policy for one env of its own, with a memory of its own."""
        one = copy.copy(self)
        one.reward_norm = None
        one.attend(1)
        return one

    def attend(self, n_envs: int, memory: Array | None = None, sums: Array | None = None) -> None:
        """Go on with other environments: their hidden states and sums of rewards, or None for zeros."""
        self.n_envs = n_envs
        if isinstance(self.learner, RecurrentLearner):
            self.memory = self.learner.no_memory(n_envs) if memory is None else memory
        if self.reward_norm is not None:
            self.reward_norm.sums = np.zeros(n_envs) if sums is None else sums

    @property
    def noise_size(self) -> int:
        """How many numbers of chance an action takes."""
        log_std = self.learner.network.log_std if self.config.sde else None
        return self.action_rows.size if log_std is None else log_std.numel()

    def noise(self, n_steps: int) -> Array:
        """The chance of this iteration's rollout, `[T, N, noise_size]`."""
        if self.config.sde:
            held = min(self.config.sde_every or n_steps, n_steps)
            draws = [
                self.draw(stream(self.seed, "exploration", self.iteration, k), self.n_envs)
                for k in range(-(-n_steps // held))
            ]
            return np.repeat(np.stack(draws), held, axis=0)[:n_steps]
        return self.draw(stream(self.seed, "actions", self.iteration), n_steps, self.n_envs)

    def draw(self, chance: np.random.Generator, *shape: int) -> Array:
        """Noise `[*shape, noise_size]` for actions: uniform for choices, normal for points."""
        drawn = chance.random if self.action_rows.is_discrete else chance.standard_normal
        return drawn((*shape, self.noise_size), np.float32)

    def improve(self, rollout: StepRollout, progress: float) -> dict[str, float]:
        """One PPO update; returns its metrics.

        Args:
            rollout: collected by this policy with its present weights.
            progress: finished share of the run, for the schedules.

        Raises:
            EnvError: NaN or infinity in observations or rewards; nothing was learned from them.
            DivergedError: NaN or infinity in a gradient, with which no step was made; the update ended halfway.
        """
        self.refuse_torn()
        check_finite(rollout, self.obs_rows)
        self.torn = True
        metrics = self._improve(rollout, progress)
        self.torn = False
        return metrics

    def _improve(self, rollout: StepRollout, progress: float) -> dict[str, float]:
        config, learner = self.config, self.learner
        n_steps, n_envs = rollout.rewards.shape
        done, rewards = rollout.done, rollout.rewards
        if self.reward_norm is not None:
            rewards = self.reward_norm(rewards, done, rollout.valid)
        rewards = rewards.astype(np.float32)
        obs = self._seen(rollout.obs)
        final_obs = self._seen(rollout.final_obs)
        if isinstance(learner, RecurrentLearner):
            values, finals = learner.values_along(rollout, obs, final_obs)
        else:
            values = learner.values(obs.reshape((n_steps + 1) * n_envs, -1)).reshape(n_steps + 1, n_envs)
            finals = learner.values(final_obs)
        ahead = next_values_of(values, rollout.truncated, finals)
        values = values[:-1]
        decay = config.gamma, config.gae_lambda
        advantages = learner.gae(rewards, values, ahead, rollout.terminated, done, *decay)
        returns = advantages + values
        batch = self._batch(rollout, obs[:-1], advantages, returns, values)
        rates = self._rates(progress, len(batch.logprobs))
        stats = learner.update(batch, rates)
        if not all(map(math.isfinite, stats)):
            bad = [name for name, value in stats._asdict().items() if not math.isfinite(value)]
            scaled = {"observations": config.normalize_obs or not self.obs_rows.n_numbers}
            scaled["rewards"] = config.normalize_reward
            raw = " and ".join(what for what, is_scaled in scaled.items() if not is_scaled)
            raise DivergedError(
                f"iteration {self.iteration}: {', '.join(bad)} became NaN or infinite; no step was made with "
                f"it. Go on from the last checkpoint. Lower the learning rate{f', or normalise {raw}' if raw else ''}"
            )
        if self.obs_norm is not None:
            acted_on = rollout.obs[:-1] if rollout.valid is None else rollout.obs[:-1][rollout.valid]
            self.obs_norm.update(self.obs_rows.numbers(acted_on))
        self.iteration += 1
        learned_from = slice(None) if batch.valid is None else batch.valid.reshape(-1)
        return {
            **stats._asdict(),
            "explained_variance": explained_variance(batch.values[learned_from], batch.returns[learned_from]),
            "learning_rate": rates.learning_rate,
            "clip_range": rates.clip,
            "ent_coef": rates.ent_coef,
        }

    def _seen(self, obs: Array) -> Array:
        """What the network gets of raw observation rows: their numbers normalised, their images as they are."""
        if self.obs_norm is None or self.obs_norm.moments.count == 0:
            return obs
        return self.obs_rows.with_numbers(obs, self.obs_norm(self.obs_rows.numbers(obs)))

    def _batch(
        self, rollout: StepRollout, obs: Array, advantages: Array, returns: Array, values: Array
    ) -> UpdateBatch:
        size = rollout.rewards.size
        keep: Any = slice(None)
        if rollout.valid is not None and rollout.memory is None:  # sequences keep their steps of resets
            keep = np.flatnonzero(rollout.valid)

        def flat(array: Array) -> Array:
            return np.ascontiguousarray(array.reshape(size, *array.shape[2:])[keep])

        masks = flat(rollout.masks) if rollout.masks.size else np.zeros((0, 0), np.uint8)
        kept = size if rollout.valid is None else int(rollout.valid.sum())
        more: dict[str, Array] = {}
        if rollout.memory is not None:
            kept = rollout.rewards.shape[1]
            valid = np.ones_like(rollout.terminated) if rollout.valid is None else rollout.valid
            more = {"begins": rollout.begins[:-1], "valid": valid, "memory": rollout.memory}
        shuffle = stream(self.seed, "minibatches", self.iteration)
        orders = np.stack([shuffle.permutation(kept) for _ in range(self.config.n_epochs)])
        return UpdateBatch(
            obs=flat(obs), actions=flat(rollout.actions), logprobs=flat(rollout.logprobs),
            advantages=flat(advantages), returns=flat(returns), values=flat(values), masks=masks,
            orders=orders, **more,
        )  # fmt: skip

    def _rates(self, progress: float, n_samples: int) -> UpdateRates:
        config = self.config
        return UpdateRates(
            learning_rate=decayed(config.learning_rate, config.lr_schedule, progress),
            clip=decayed(config.clip_range, config.clip_schedule, progress),
            value_clip=config.clip_range_vf,
            ent_coef=decayed(config.ent_coef, config.ent_schedule, progress),
            vf_coef=config.vf_coef,
            max_grad_norm=config.max_grad_norm or 0.0,
            target_kl=config.target_kl,
            normalize_advantage=config.normalize_advantage,
            adam_eps=config.adam_eps,
            # room is made for a minibatch, however large
            batch_size=max(1, min(config.batch_size, n_samples)),
        )

    def state(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """(weights, optimizer, statistics) as named arrays: with the config, all of the agent."""
        statistics: dict[str, Array] = {"iteration": np.array(self.iteration, np.int64)}
        for norm in (self.obs_norm, self.reward_norm):
            statistics |= norm.state() if norm is not None else {}
        return *self.learner.state(), statistics

    def load_state(
        self, weights: dict[str, Array], optimizer: dict[str, Array], statistics: dict[str, Array]
    ) -> None:
        """What `state` gave."""
        self.learner.load_state(weights, optimizer)
        for norm in (self.obs_norm, self.reward_norm):
            if norm is not None:
                norm.load_state(statistics)
        self.iteration = int(statistics["iteration"])


def check_finite(rollout: StepRollout, rows: ObservationRows) -> None:
    """Raise an `EnvError` that names the env and step of the first NaN or infinity in a rollout."""
    numbers = rows.numbers(rollout.obs)
    for what, array, told in (("reward", rollout.rewards, ""), ("observation", numbers, f" ({AS_FLOAT32})")):
        if np.isfinite(array).all():
            continue
        t, env = (int(place[0]) for place in np.nonzero(~np.isfinite(array))[:2])
        value = array[t, env].tolist()
        raise EnvError(f"env {env}, step {t} of the rollout: {what} must be finite, got {value}{told}")
    finals = rows.numbers(rollout.final_obs)
    if not np.isfinite(finals).all():
        row = int(np.nonzero(~np.isfinite(finals))[0][0])
        t, env = (int(places[row]) for places in np.nonzero(rollout.truncated))
        raise EnvError(
            f"env {env}, step {t} of the rollout: the final observation must be finite ({AS_FLOAT32})"
        )
