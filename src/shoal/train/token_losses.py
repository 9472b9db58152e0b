"""Losses over tokens, each a pure function of log-probabilities; sums are divided by counts of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped surrogate per token (arXiv:1707.06347, eq. 7), with DAPO's two clips (arXiv:2503.14476).

    Args:
        logprobs: `[N]` under the weights being trained.
        old_logprobs: `[N]` under the weights that sampled the tokens.
        advantages: `[N]`.
        clip_low: how far below 1 the probability ratio still counts.
        clip_high: how far above 1.

    Returns:
        `[N]`, to be summed and divided by the number of tokens of the whole minibatch.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def entropy_of(scores: Tensor) -> Tensor:
    """`[N]` entropies in nats of the distributions that `[N, V]` log-probabilities give."""
    return -(scores.exp() * scores).sum(-1)
