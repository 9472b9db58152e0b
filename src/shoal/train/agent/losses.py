"""Losses over tokens, each a pure function of log-probabilities that returns one number a token.

The caller multiplies by the weights of `aggregation_weights`, which sum to 1 over a whole minibatch, and adds up:
so no loss depends on how a minibatch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


def clipped_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with DAPO's two clips (arXiv:2503.14476).

    Args:
        logprobs: `[N]` under the weights being trained.
        old_logprobs: `[N]` under the weights that sampled the tokens.
        advantages: `[N]`.
        clip_low: how far below 1 the probability ratio still counts.
        clip_high: how far above 1.
        dual_clip: bound on the loss of a token with negative advantage, in multiples of it and above 1
            (arXiv:1912.09729); None for no bound.

    Returns:
        `[N]`.
    """
    return _clip((logprobs - old_logprobs).exp(), advantages, clip_low, clip_high, dual_clip)


def sequence_clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """GSPO (arXiv:2507.18071): the ratio of a sequence is the geometric mean of its tokens' ratios.

    Args:
        logprobs: `[N]` under the weights being trained.
        old_logprobs: `[N]` under the weights that sampled.
        advantages: `[N]`.
        rows: `[N]` which sequence each token belongs to; a sequence must not be cut between micro-batches.
        clip_low: how far below 1 the sequence's ratio still counts (the paper uses 3e-4).
        clip_high: how far above 1 (4e-4).

    Returns:
        `[N]`, equal for the tokens of a sequence with one advantage.
    """
    ratio = sequence_ratios(logprobs - old_logprobs, rows)
    return _clip(ratio, advantages, clip_low, clip_high, None)


def sequence_ratios(gaps: Tensor, rows: Tensor) -> Tensor:
    """`[N]` the ratio of each token's sequence under GSPO, from `log p - log old` of the tokens."""
    count = torch.zeros(int(rows.max()) + 1, device=rows.device).index_add(0, rows, torch.ones_like(gaps))
    mean = torch.zeros_like(count).index_add(0, rows, gaps) / count.clamp(min=1)
    return mean.exp()[rows]


def truncated_weight_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """CISPO (arXiv:2506.13585): every token keeps its gradient, its importance weight is cut at `1 + cap`."""
    weight = (logprobs - old_logprobs).detach().exp().clamp(max=1 + cap)
    return -weight * advantages * logprobs


def rollout_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float, method: Literal["truncate", "mask"]
) -> Tensor:
    """`[N]` importance weights for tokens that another engine sampled than the one that trains.

    `truncate` bounds the weight by `cap` (truncated importance sampling); `mask` gives 0 to tokens whose weight
    is above `cap` or below its inverse, and leaves the others as they are.
    """
    weight = (old_logprobs - rollout_logprobs).exp()
    if method == "truncate":
        return weight.clamp(max=cap)
    return weight * ((weight <= cap) & (weight >= 1 / cap))


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimators of KL(policy ‖ reference) from sampled tokens: `[N]` in nats.

    With `d = log p - log reference`: k1 is `d` (unbiased, can be negative), k2 is `d**2 / 2` (its gradient is that of
    the true KL), k3 is `exp(-d) - 1 + d` (unbiased, never negative).
    """
    gap = logprobs - reference_logprobs
    if estimator == "k1":
        return gap
    return gap**2 / 2 if estimator == "k2" else (-gap).exp() - 1 + gap


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half squared error of a critic, with PPO's clip around the old value: `[N]`."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2


def entropy_of(scores: Tensor) -> Tensor:
    """`[N]` entropies in nats of the distributions that `[N, V]` log-probabilities give."""
    return -(scores.exp() * scores).sum(-1)


def aggregation_weights(
    lengths: Sequence[int], how: Aggregation, constant: float = 1.0
) -> list[NDArray[np.float32]]:
    """What each trained token counts in the loss of a minibatch of sequences with these numbers of trained tokens.

    `token_mean`: every token the same (DAPO). `sequence_mean`: every sequence the same, its tokens share (GRPO's
    original). `constant`: tokens of all sequences the same, divided by `constant` tokens a sequence, so that long
    sequences are neither favoured nor held back (Dr. GRPO, arXiv:2503.20783).
    """
    n, total = len(lengths), sum(lengths)
    if how == "token_mean":
        each = [1 / max(total, 1)] * n
    elif how == "sequence_mean":
        each = [1 / (n * max(length, 1)) for length in lengths]
    else:
        each = [1 / (n * constant)] * n
    return [np.full(length, weight, dtype=np.float32) for length, weight in zip(lengths, each, strict=True)]


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
