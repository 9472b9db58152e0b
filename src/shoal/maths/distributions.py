"""Action distributions without classes: sampled on arrays; log-probability and entropy on tensors.

Choices are one categorical per group of logits, with optional masks; points are a diagonal Gaussian. Chance
comes in from outside as noise, so the same noise gives the same actions on every path.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # tensors bring their own arithmetic: torch is not needed to read this module
    from torch import Tensor

Array = np.ndarray

_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
EXPLORED_LEAST = 1e-6
"""Variance of an action whose features are all 0."""


class LogProbEntropy(NamedTuple):
    """Log-probability and entropy of actions under a distribution."""

    logprob: Tensor  # [B]
    entropy: Tensor  # [B]


def masked_logits(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Logits `[B, total]` with the forbidden ones so low that their probability is exactly 0."""
    return logits if masks is None else logits.masked_fill(~masks, -1e30)


def categorical_logprob(
    logits: Tensor, actions: Tensor, groups: tuple[int, ...], masks: Tensor | None = None
) -> LogProbEntropy:
    """Log-probability and entropy of choices `[B, len(groups)]` under logits `[B, sum(groups)]`.

    The entropy is over the allowed choices only.
    """
    logits = masked_logits(logits, masks)
    scored: LogProbEntropy | None = None
    for g, part in enumerate(logits.split(groups, dim=1) if len(groups) > 1 else (logits,)):
        logs = part.log_softmax(dim=1)
        logprob = logs.gather(1, actions[:, g : g + 1]).squeeze(1)
        entropy = -(logs.exp() * logs).sum(dim=1)
        scored = (
            LogProbEntropy(logprob, entropy)
            if scored is None
            else LogProbEntropy(scored[0] + logprob, scored[1] + entropy)
        )
    assert scored is not None
    return scored


def gaussian_logprob(mean: Tensor, log_std: Tensor, actions: Tensor) -> LogProbEntropy:
    """Log-density and entropy of points `[B, A]` under a Gaussian with these means and one deviation each."""
    z = (actions - mean) * (-log_std).exp()
    logprob = (-0.5 * z * z - log_std - _LOG_ROOT_2PI).sum(dim=1)
    entropy = (log_std + 0.5 + _LOG_ROOT_2PI).sum().expand(len(mean))
    return LogProbEntropy(logprob, entropy)


def gsde_logprob(mean: Tensor, features: Tensor, log_std: Tensor, actions: Tensor) -> LogProbEntropy:
    """The same under state-dependent exploration, arXiv:2005.05719: the deviation grows with the features `[B, F]`.

    `log_std[F, A]` is of the weights by which noise is made of features; those learn nothing here.
    """
    variance = (features.detach() ** 2) @ (2 * log_std).exp() + EXPLORED_LEAST
    log_deviation = 0.5 * variance.log()
    logprob = (-0.5 * (actions - mean) ** 2 / variance - log_deviation - _LOG_ROOT_2PI).sum(dim=1)
    return LogProbEntropy(logprob, (log_deviation + 0.5 + _LOG_ROOT_2PI).sum(dim=1))


def explore(
    mean: Array, features: Array, log_std: Array, noise: Array, deterministic: bool = False
) -> tuple[Array, Array]:
    """Points `[B, A]` and log-densities under state-dependent exploration, from normal `noise[B, F * A]`.

    The same noise at every step of an env explores smoothly: it is a function of the state.
    """
    weights = np.exp(log_std)[None] * noise.reshape(len(mean), *log_std.shape)
    apart = np.zeros_like(mean) if deterministic else np.einsum("bf,bfa->ba", features, weights)
    variance = features**2 @ np.exp(2 * log_std) + np.float32(EXPLORED_LEAST)
    logprob = -0.5 * apart**2 / variance - 0.5 * np.log(variance) - np.float32(_LOG_ROOT_2PI)
    return mean + apart, logprob.sum(axis=1)


def choose(
    logits: Array, noise: Array, groups: tuple[int, ...], masks: Array, deterministic: bool = False
) -> tuple[Array, Array]:
    """Choices `[B, len(groups)]` (by inverse transform of noise, or the likeliest) and log-probabilities.

    The noise is uniform; `masks` may be empty. In NumPy, far faster than torch for few rows.
    """
    rows = np.arange(len(logits))
    picks, logprob, start = (
        np.empty((len(logits), len(groups)), np.int64),
        np.zeros(len(logits), np.float32),
        0,
    )
    for g, size in enumerate(groups):
        part = logits[:, start : start + size]
        if masks.size:
            part = np.where(masks[:, start : start + size] != 0, part, np.float32(-np.inf))
        weight = np.exp(part - part.max(axis=1, keepdims=True))
        reached = weight.cumsum(axis=1)
        if deterministic:
            pick = part.argmax(axis=1)
        else:
            pick = (reached <= noise[:, g : g + 1] * reached[:, -1:]).sum(axis=1)
            if pick.max() == size or masks.size:  # rounding at the very end: the last one that is possible
                pick = np.minimum(pick, size - 1 - (weight[:, ::-1] > 0).argmax(axis=1))
        picks[:, g] = pick
        logprob += np.log(weight[rows, pick] / reached[:, -1])
        start += size
    return picks, logprob


def draw(mean: Array, log_std: Array, noise: Array, deterministic: bool = False) -> tuple[Array, Array]:
    """Points `[B, A]`, mean plus deviation times standard normal noise, or the mean, and log-densities."""
    z = np.zeros_like(noise) if deterministic else noise
    logprob = (np.float32(-0.5) * z * z - log_std - np.float32(_LOG_ROOT_2PI)).sum(axis=1)
    return mean + np.exp(log_std) * z, logprob


def log_softmax(logits: Array) -> Array:
    """Log-probabilities `[B, n]` of logits."""
    shifted = logits - logits.max(1, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return out


def sample(logprobs: Array, uniforms: Array) -> Array:
    """One choice `[B]` per row of log-probabilities, by inverting the cumulative sum at `uniforms` in [0, 1)."""
    cumulative = np.cumsum(np.exp(logprobs), axis=1)
    chosen: Array = np.minimum((cumulative < uniforms[:, None]).sum(1), logprobs.shape[1] - 1)
    return chosen
