"""The losses of PPO (arXiv:1707.06347) in torch, one function each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """The clipped surrogate and what it says about the size of the step."""

    loss: Tensor
    approx_kl: Tensor  # Schulman's estimator (r - 1) - log r, never negative
    clip_fraction: Tensor


def clipped_policy_loss(logprob: Tensor, old_logprob: Tensor, advantages: Tensor, clip: float) -> PolicyLoss:
    """Mean of eq. 7, negated, over `[B]` samples."""
    log_ratio = logprob - old_logprob
    ratio = torch.exp(log_ratio)
    loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1.0 - clip, 1.0 + clip)).mean()
    with torch.no_grad():
        approx_kl = (ratio - 1.0 - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > clip).float().mean()
    return PolicyLoss(loss, approx_kl, clip_fraction)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float = 0.0) -> Tensor:
    """Mean squared error; with `clip` the larger of it and that of the value moved by at most `clip`."""
    loss = (values - returns) ** 2
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (held - returns) ** 2)
    return loss.mean()


def normalized(advantages: Tensor) -> Tensor:
    """To mean 0 and unbiased deviation 1; a single sample is returned as it is."""
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
