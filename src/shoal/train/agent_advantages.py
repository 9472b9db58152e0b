"""What each turn of a set of trajectories was worth, by the algorithm of the config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.data import Trajectory
from shoal.train.agent_config import AgentProxy, Algorithm
from shoal.train.group_advantages import (
    Array,
    anchored_step_advantages,
    discounted_returns,
    normalize_rewards,
)


def turn_advantages(
    trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> list[Array]:
    """Per trajectory one advantage a turn, shared by all tokens of that turn's response.

    The episode part is the discounted return of the task's own rewards, normalised within its grouping; GiGPO
    adds the step part. The format penalty acts on the turn that earned it, centred over the trajectories of
    the batch and not scaled by their spread.
    """
    returns = [discounted_returns([turn.reward for turn in t.turns], algorithm.gamma) for t in trajectories]
    settings = proxy.reward_normalization
    episode = normalize_rewards([r[0] for r in returns], _cells(trajectories, settings.grouping), settings.method)
    advantages = [np.full(len(r), value) for r, value in zip(returns, episode, strict=True)]
    if algorithm.adv_estimator == "gigpo":
        steps = anchored_step_advantages(
            returns,
            [[turn.anchor for turn in t.turns] for t in trajectories],
            [t.group for t in trajectories],
            scale=settings.method != "mean",
        )
        advantages = [a + algorithm.step_advantage_weight * s for a, s in zip(advantages, steps, strict=True)]
    if proxy.format_penalty:
        invalid = [np.array([not turn.action_is_valid for turn in t.turns], dtype=float) for t in trajectories]
        mean = float(np.mean(np.concatenate(invalid)))
        advantages = [a - proxy.format_penalty * (i - mean) for a, i in zip(advantages, invalid, strict=True)]
    return advantages


def _cells(trajectories: Sequence[Trajectory], grouping: str) -> list[int]:
    """The cell of each trajectory within which rewards are compared."""
    if grouping == "state":
        return [t.group for t in trajectories]
    if grouping == "inductive":
        kinds = sorted({t.env for t in trajectories})
        return [kinds.index(t.env) for t in trajectories]
    return [0] * len(trajectories)
