"""Action distributions in torch, without classes: log-probability and entropy of choices and of points.

Choices are one categorical per group of logits, with optional masks; points are a diagonal Gaussian. Chance comes
in from outside as noise, so the same noise gives the same actions on every path.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)


class Judged(NamedTuple):
    """What a distribution says of actions."""

    logprob: Tensor  # [B]
    entropy: Tensor  # [B]


def masked_logits(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Logits `[B, total]` with the forbidden ones so low that their probability is exactly 0."""
    return logits if masks is None else logits.masked_fill(~masks, -1e30)


def judge_choices(
    logits: Tensor, actions: Tensor, groups: tuple[int, ...], masks: Tensor | None = None
) -> Judged:
    """Log-probability and entropy of choices `[B, len(groups)]` under logits `[B, sum(groups)]`.

    The entropy is over the allowed choices only.
    """
    logprob, entropy = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
    logits = masked_logits(logits, masks)
    for g, part in enumerate(logits.split(groups, dim=1)):
        logs = torch.log_softmax(part, dim=1)
        logprob = logprob + logs.gather(1, actions[:, g : g + 1]).squeeze(1)
        entropy = entropy - (logs.exp() * logs).sum(dim=1)
    return Judged(logprob, entropy)


def judge_points(mean: Tensor, log_std: Tensor, actions: Tensor) -> Judged:
    """Log-density and entropy of points `[B, A]` under a Gaussian with these means and one deviation each."""
    z = (actions - mean) * torch.exp(-log_std)
    logprob = (-0.5 * z * z - log_std - _LOG_ROOT_2PI).sum(dim=1)
    entropy = (log_std + 0.5 + _LOG_ROOT_2PI).sum().expand(len(mean))
    return Judged(logprob, entropy)


def sample_choices(
    logits: Tensor, noise: Tensor, groups: tuple[int, ...], masks: Tensor | None, deterministic: bool = False
) -> Tensor:
    """Choices `[B, len(groups)]` by inverse transform of uniform noise, or the likeliest ones."""
    picks = []
    for g, part in enumerate(masked_logits(logits, masks).split(groups, dim=1)):
        if deterministic:
            picks.append(part.argmax(dim=1))
            continue
        weight = torch.exp(part - part.amax(dim=1, keepdim=True))
        reached = weight.cumsum(dim=1)
        goal = noise[:, g : g + 1] * reached[:, -1:]
        last = weight.shape[1] - 1 - (weight.flip(1) > 0).to(torch.int64).argmax(dim=1)
        picks.append(torch.minimum((reached <= goal).sum(dim=1), last))
    return torch.stack(picks, dim=1)


def sample_points(mean: Tensor, log_std: Tensor, noise: Tensor, deterministic: bool = False) -> Tensor:
    """Points `[B, A]`: the mean plus deviation times standard normal noise, or the mean."""
    return mean if deterministic else mean + torch.exp(log_std) * noise
