"""Losses over tokens, each a pure function of log-probabilities that returns one number a token.

The caller multiplies by the weights of `aggregation_weights`, which sum to 1 over a whole minibatch, and adds up:
so no loss depends on how a minibatch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.registry import Registry

if TYPE_CHECKING:
    from shoal.train.agent.config import Algorithm


F = TypeVar("F", bound=Callable[..., Any])
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
BOUNDS = ("clip_ratio_low", "clip_ratio_high", "dual_clip")
"""The settings that bound how far a ratio counts."""
FURTHEST = 20.0
"""Bound on log-ratios before `exp`, as in verl: beyond some 88 it is infinite, and infinity times 0 is NaN."""


# --- the registry
class Tokens(NamedTuple):
    """What a policy loss is given, of `N` trained tokens."""

    logprobs: Tensor  # [N] under the weights being trained, with gradients
    old_logprobs: Tensor  # [N] under the weights that sampled the tokens
    advantages: Tensor  # [N]
    rows: Tensor  # [N] which sample each token is of; no sample is cut between micro-batches


class PolicyLoss(NamedTuple):
    """What a policy loss gives."""

    losses: Tensor  # [N]
    clipped: Tensor  # [N] bool: where the ratio is beyond its bounds


@dataclass(frozen=True)
class Loss:
    """A policy loss, and what is known of it."""

    compute: Callable[[Tokens, Algorithm], PolicyLoss]
    bounds: tuple[str, ...] = BOUNDS
    """The settings of bounds that it reads; none for a loss without ratios, which tell how far several steps moved."""


LOSSES: Registry[Loss] = Registry("policy loss")


def policy_loss(name: str, *, replace: bool = False, **about: Any) -> Callable[[F], F]:
    """Register a function of `Tokens` and the settings that gives a `PolicyLoss`; `about` are fields of `Loss`.

    Args:
        name: what `algorithm.policy_loss` takes.
        replace: a loss of that name.
        about: `bounds`.

    It must be pure, as an estimator of `advantage`.
    """

    def register(function: F) -> F:
        LOSSES.register(name, Loss(function, **about), replace=replace)
        return function

    return register


def unread_bounds(config: Algorithm) -> Iterator[str]:
    """A sentence for each bound that has no effect with the loss of a config."""
    for name in BOUNDS:
        value = getattr(config, name)
        if value != getattr(type(config), name) and name not in LOSSES[config.policy_loss].bounds:
            readers = " or ".join(loss for loss in LOSSES if name in LOSSES[loss].bounds)
            yield (
                f"algorithm.{name}={value} has no effect with policy_loss={config.policy_loss}, which does not read "
                f"it: leave it out, or use {readers}"
            )


def policy_losses(tokens: Tokens, config: Algorithm) -> PolicyLoss:
    """What the loss of the config says of these tokens.

    Raises:
        ValueError: a registered one gives something else than one number a token: it would be spread over others; or
            numbers without gradients, from which nothing would be learned.
    """
    found = LOSSES[config.policy_loss].compute(tokens, config)
    shapes = [getattr(part, "shape", part) for part in found] if isinstance(found, tuple) else found
    if shapes != [tokens.logprobs.shape] * 2:
        raise ValueError(
            f"policy_loss={config.policy_loss} must give PolicyLoss(losses, clipped), each of one number a token, "
            f"{list(tokens.logprobs.shape)}, got {shapes!r:.200}"
        )
    if tokens.logprobs.requires_grad and not getattr(found[0], "requires_grad", False):
        raise ValueError(
            f"policy_loss={config.policy_loss} must give losses with the gradients of tokens.logprobs, got none: leave "
            "out detach, item and numpy"
        )
    return PolicyLoss(*found)


@policy_loss("clip")
def _clip_loss(tokens: Tokens, config: Algorithm) -> PolicyLoss:
    return _clipped(ratio_of(tokens.logprobs - tokens.old_logprobs), tokens, config)


@policy_loss("gspo", bounds=("clip_ratio_low", "clip_ratio_high"))
def _gspo_loss(tokens: Tokens, config: Algorithm) -> PolicyLoss:
    """GSPO (arXiv:2507.18071): equal for the tokens of a sequence with one advantage."""
    return _clipped(sequence_ratios(tokens.logprobs - tokens.old_logprobs, tokens.rows), tokens, config)


@policy_loss("cispo", bounds=("clip_ratio_high",))
def _cispo_loss(tokens: Tokens, config: Algorithm) -> PolicyLoss:
    """CISPO (arXiv:2506.13585, eq. 4): every token keeps its gradient, its importance weight is cut from above."""
    ratio, most = (tokens.logprobs - tokens.old_logprobs).detach().exp(), 1 + config.clip_ratio_high
    return PolicyLoss(-ratio.clamp(max=most) * tokens.advantages * tokens.logprobs, ratio > most)


@policy_loss("likelihood", bounds=())
def _likelihood_loss(tokens: Tokens, config: Algorithm) -> PolicyLoss:
    """REINFORCE without ratios; with advantages of 1 the cross-entropy of supervised learning."""
    losses = -tokens.advantages * tokens.logprobs
    return PolicyLoss(losses, torch.zeros_like(losses, dtype=torch.bool))


def _clipped(ratio: Tensor, tokens: Tokens, config: Algorithm) -> PolicyLoss:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    losses = clipped_surrogate(ratio, tokens.advantages, low, high, config.dual_clip)
    return PolicyLoss(losses, (ratio > 1 + high) | (ratio < 1 - low))


# --- the mathematics
def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with DAPO's two clips (arXiv:2503.14476): `[N]`.

    Args:
        ratio: `[N]` of probabilities: under the weights being trained against those that sampled, see `ratio_of`.
        advantages: `[N]`.
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1.
        dual_clip: bound on the loss of a token with negative advantage, in multiples of it and above 1
            (arXiv:1912.09729); None for no bound.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def sequence_ratios(gaps: Tensor, rows: Tensor) -> Tensor:
    """`[N]` GSPO's ratio of each token's sequence: the geometric mean of its tokens', from their `log p - log old`.

    `rows` `[N]` tells the sequence of each token; no sequence must be cut between micro-batches.
    """
    zeros = gaps.new_zeros(int(rows.max()) + 1)
    count = zeros.index_add(0, rows, torch.ones_like(gaps))
    mean = zeros.index_add(0, rows, gaps) / count.clamp(min=1)
    return ratio_of(mean)[rows]


def ratio_of(gaps: Tensor) -> Tensor:
    """Ratios of probabilities from `log p - log old`, at most `exp(FURTHEST)`; without gradient where bounded."""
    return gaps.clamp(max=FURTHEST).exp()


def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    cap: float,
    method: str,
    *,
    level: Literal["token", "sequence"] = "token",
    floor: float = 0.0,
) -> Tensor:
    """`[N]` importance weights for the tokens of one sample, which another engine sampled than the one that trains.

    Args:
        old_logprobs: `[N]` in the trainer's arithmetic.
        rollout_logprobs: `[N]` in the engine's.
        cap: the largest weight.
        method: `truncate` bounds weights by `cap` (truncated importance sampling, TIS); `mask` gives 0 to what has a
            larger weight, or a smaller one than `floor`, and leaves others as they are (masked, MIS).
        level: `token`, each has its own weight; `sequence`, all have the product of them.
        floor: the smallest weight that `mask` leaves.
    """
    gap = old_logprobs - rollout_logprobs
    weight = (gap.sum().expand_as(gap) if level == "sequence" else gap).exp()
    if method == "truncate":
        return weight.clamp(max=cap)
    return weight.where((weight <= cap) & (weight >= floor), 0.0)  # infinity times 0 is none


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimators of KL(policy ‖ reference) from sampled tokens: `[N]` in nats.

    With `d = log p - log reference`: k1 is `d` (unbiased, can be negative), k2 is `d**2 / 2` (its gradient is that of
    the true KL), k3 is `exp(-d) - 1 + d` (unbiased, never negative; `d` is at
    least `-FURTHEST` there).
    """
    gap = logprobs - reference_logprobs
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap**2 / 2
    gap = gap.clamp(min=-FURTHEST)
    return (-gap).exp() - 1 + gap


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
