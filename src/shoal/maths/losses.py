"""The losses of PPO (arXiv:1707.06347): on tensors for autograd, on arrays with the slope beside the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # tensors bring their own arithmetic: torch is not needed to read this module
    from torch import Tensor

Array = np.ndarray


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
