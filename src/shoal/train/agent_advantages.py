"""What each token of a set of trajectories was worth, by the algorithm of the config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.data import Trajectory
from shoal.train.agent_config import AgentProxy, Algorithm
from shoal.train.group_advantages import (
    Array,
    anchored_step_advantages,
    batch_normalized,
    discounted_returns,
    group_relative,
    leave_one_out,
    normalize_rewards,
)
from shoal.train.token_gae import bi_level_gae, token_gae, turn_gae


def turn_advantages(
    trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> list[Array]:
    """Per trajectory one advantage a turn, shared by all tokens of that turn's response; for estimators without critic.

    The episode part is the discounted return of the task's own rewards, normalised within its grouping; GiGPO
    adds the step part. The format penalty acts on the turn that earned it, see `format_shaping`.
    """
    returns = [discounted_returns([turn.reward for turn in t.turns], algorithm.gamma) for t in trajectories]
    episode = _episode_advantages([r[0] for r in returns], trajectories, algorithm, proxy)
    advantages = [np.full(len(r), value) for r, value in zip(returns, episode, strict=True)]
    if algorithm.adv_estimator == "gigpo":
        steps = anchored_step_advantages(
            returns,
            [[turn.anchor for turn in t.turns] for t in trajectories],
            [t.group for t in trajectories],
            scale=proxy.reward_normalization.method != "mean",
        )
        advantages = [a + algorithm.step_advantage_weight * s for a, s in zip(advantages, steps, strict=True)]
    shaping = format_shaping(trajectories, proxy.format_penalty)
    return [a + s for a, s in zip(advantages, shaping, strict=True)]


def critic_advantages(
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[Array]],
    algorithm: Algorithm,
    proxy: AgentProxy,
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Advantages and critic targets, per trajectory and turn `[tokens]`, from values of the same shape.

    Advantages are normalised over all tokens of the batch; targets are in the task's own reward.
    """
    critic = algorithm.critic
    advantages, targets = [], []
    for trajectory, known in zip(trajectories, values, strict=True):
        rewards = [turn.reward for turn in trajectory.turns]
        if algorithm.adv_estimator == "gae":
            found = token_gae(rewards, known, algorithm.gamma, critic.gae_lambda)
        elif algorithm.adv_estimator == "turn_gae":
            found = turn_gae(rewards, known, algorithm.gamma, critic.gae_lambda)
        else:
            found = bi_level_gae(rewards, known, algorithm.gamma, critic.gae_lambda, critic.token_lambda)
        advantages.append(found[0])
        targets.append(found[1])
    every = np.concatenate([tokens for turns in advantages for tokens in turns])
    mean, spread = every.mean(), every.std() + 1e-8
    shaping = format_shaping(trajectories, proxy.format_penalty)
    shaped = [
        [(tokens - mean) / spread + bonus for tokens, bonus in zip(turns, bonuses, strict=True)]
        for turns, bonuses in zip(advantages, shaping, strict=True)
    ]
    return shaped, targets


def format_shaping(trajectories: Sequence[Trajectory], penalty: float) -> list[Array]:
    """Per trajectory one number a turn: `-penalty` for turns without a valid action, centred over the batch."""
    invalid = [
        np.array([not turn.action_is_valid for turn in t.turns], dtype=np.float64) for t in trajectories
    ]
    if not penalty:
        return [np.zeros(len(turns)) for turns in invalid]
    mean = float(np.concatenate(invalid).mean())
    return [-penalty * (turns - mean) for turns in invalid]


def _episode_advantages(
    rewards: Sequence[float], trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> Array:
    """`[B]` from the discounted return of each trajectory."""
    settings = proxy.reward_normalization
    cells = _cells(trajectories, settings.grouping)
    estimator = algorithm.adv_estimator
    if estimator == "dr_grpo":
        return group_relative(rewards, cells, scale=False)
    if estimator == "rloo":
        return leave_one_out(rewards, cells)
    if estimator == "reinforce":
        return np.asarray(rewards, dtype=np.float64)
    if estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        return batch_normalized(rewards, cells, baseline=estimator == "reinforce_pp_baseline")
    return normalize_rewards(rewards, cells, settings.method)


def _cells(trajectories: Sequence[Trajectory], grouping: str) -> list[int]:
    """The cell of each trajectory within which rewards are compared."""
    if grouping == "state":
        return [t.group for t in trajectories]
    if grouping == "inductive":
        kinds = sorted({t.env for t in trajectories})
        return [kinds.index(t.env) for t in trajectories]
    return [0] * len(trajectories)
