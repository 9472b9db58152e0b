"""Generalised advantage estimation, arXiv:1506.02438: per env, with the true successor's value."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

Array = np.ndarray


def gae(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    done: Array,
    *,
    gamma: float,
    gae_lambda: float,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Advantages (eq. 16); value targets are `advantages + values`.

    Args:
        rewards: `[T, N]`.
        values: `[T, N]` of the observations acted on.
        next_values: `[T, N]` of the true successors, even where the env was reset meanwhile: of the final
            observation where an episode was truncated, of the next rollout's first one at the end.
        terminated: `[T, N]`; a terminal state is worth 0, whatever `next_values` says.
        done: `[T, N]` terminated or truncated; what follows belongs to another episode.
        gamma: discount.
        gae_lambda: 0 for one-step differences, 1 for returns less values.
        dtype: in which the sum over steps is carried.

    Returns:
        `[T, N]`, in the dtype of `rewards`.
    """
    ahead = np.where(terminated, 0.0, next_values)
    deltas = rewards + gamma * ahead - values
    keep = (gamma * gae_lambda * np.logical_not(done)).astype(dtype)
    advantages = np.empty_like(rewards)
    running = np.zeros_like(deltas[0])
    for t in range(len(rewards) - 1, -1, -1):
        running = deltas[t] + keep[t] * running
        advantages[t] = running
    return advantages


def next_values_of(values: Array, truncated: Array, final_values: Array) -> Array:
    """The true successors' values `[T, N]` from values `[T + 1, N]` of a rollout's observations.

    `final_values[K]` replace the values of the reset observations where an episode was truncated, in the
    order of t, then env.
    """
    ahead = values[1:].copy()
    ahead[truncated] = final_values
    return ahead


def explained_variance(values: Array, returns: Array) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a constant one; NaN if undefined."""
    variance = float(np.var(returns)) if returns.size else 0.0
    return float("nan") if variance == 0 else float(1.0 - np.var(returns - values) / variance)
