"""What an update of a policy is made of: advantages, the losses of PPO, and settings that decay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

if TYPE_CHECKING:  # tensors bring their own arithmetic: torch is not needed to read this module
    from torch import Tensor

Array = np.ndarray
Decay = Literal["constant", "linear", "cosine"]


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
    """Generalised advantages (arXiv:1506.02438 eq. 16), per env; value targets are `advantages + values`.

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


class PolicyLoss(NamedTuple):
    """The clipped surrogate and what it says about the size of the step."""

    loss: Tensor
    approx_kl: Tensor  # Schulman's estimator (r - 1) - log r, never negative
    clip_fraction: Tensor


def clipped_policy_loss(logprob: Tensor, old_logprob: Tensor, advantages: Tensor, clip: float) -> PolicyLoss:
    """Mean of eq. 7, negated, over `[B]` samples."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    loss = -(advantages * ratio).minimum(advantages * ratio.clamp(1.0 - clip, 1.0 + clip)).mean()
    moved, log_moved = ratio.detach(), log_ratio.detach()
    approx_kl = (moved - 1.0 - log_moved).mean()
    clip_fraction = ((moved - 1.0).abs() > clip).float().mean()
    return PolicyLoss(loss, approx_kl, clip_fraction)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float = 0.0) -> Tensor:
    """Mean squared error; with `clip` the larger of it and that of the value moved by at most `clip`."""
    loss = (values - returns) ** 2
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        loss = loss.maximum((held - returns) ** 2)
    return loss.mean()


def normalized(advantages: Tensor) -> Tensor:
    """To mean 0 and unbiased deviation 1; a single sample is returned as it is."""
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


class Surrogate(NamedTuple):
    """Eq. 7 for arrays: the objective of each sample, and its slope by the sample's log-probability."""

    value: Array  # [B]
    slope: Array  # [B]


def clipped_surrogate(logprob: Array, old_logprob: Array, advantages: Array, clip: float) -> Surrogate:
    """The twin of `clipped_policy_loss` on `[B]` arrays, to be made large."""
    ratio = np.exp(logprob - old_logprob)
    # The minimum of the two has a slope only where the unclipped one is the smaller.
    free = np.where(advantages >= 0, ratio <= 1 + clip, ratio >= 1 - clip)
    value = np.minimum(ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages)
    return Surrogate(value, free * advantages * ratio)


def decayed(value: float, decay: Decay, progress: float) -> float:
    """`value` at `progress`, the finished share of the run in [0, 1].

    >>> decayed(3.0, "linear", 0.25)
    2.25
    >>> round(decayed(1.0, "cosine", 0.5), 6)
    0.5
    """
    progress = min(max(progress, 0.0), 1.0)
    if decay == "linear":
        return value * (1.0 - progress)
    if decay == "cosine":
        return value * 0.5 * (1.0 + math.cos(math.pi * progress))
    return value
