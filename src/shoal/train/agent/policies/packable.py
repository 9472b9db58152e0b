"""Whether a model may get several samples in one row: it is tried on the model itself."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from shoal.train.agent.batch.packing import Batching, MicroBatch, token_values
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.policy import Policy, score

logger = logging.getLogger(__name__)

LENGTHS = (23, 14, 9)
"""Tokens of the samples of the trial: the last two share a row, behind each other."""


def safe_batching(policy: Policy, wanted: Batching, model: str = "this model", rows: int = 0) -> Batching:
    """`wanted`, or `padded` where packing would be wrong for a `model`, which is warned of.

    Args:
        policy: the model.
        wanted: how samples are to share rows.
        model: what it is called.
        rows: of positions that samples have of their own; 0 where they are counted.
    """
    if wanted == "padded" or (fault := packing_fault(policy, rows)) is None:
        return wanted
    logger.warning("samples are not packed into rows (algorithm.batching=padded) by %s: %s", model, fault)
    return "padded"


def packing_fault(policy: Policy, rows: int = 0) -> str | None:
    """What goes wrong when this model gets two samples in one row, or None if nothing does.

    The second sample of a row must not change when the first does (not even by rounding: masked tokens count
    nothing), and must have the log-probabilities that it has alone.
    """
    parameter = next(policy.module.parameters())
    tolerance = 1e-3 if parameter.dtype == torch.float32 else 0.1
    samples, changed = _trial(policy, 0, rows), _trial(policy, 7, rows)
    changed[2] = samples[2]
    try:
        packed, other = (_logprobs(policy, each, "packed") for each in (samples, changed))
        alone = _logprobs(policy, samples, "padded")
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        lines = str(error).strip().splitlines() or [""]
        return f"it does not take packed rows ({type(error).__name__}: {lines[0]})"
    leak = float(np.abs(packed[2] - other[2]).max())
    if not leak <= 1e-6:
        return (
            f"a sample's log-probs change by {leak:.2g} with the sample before it in the row (recurrent or "
            f"linear-attention layers, or a mask that is ignored)"
        )
    gap = max(float(np.abs(a - b).max()) for a, b in zip(packed, alone, strict=True))
    if not gap <= tolerance:
        return f"log-probs in a packed row differ by {gap:.2g} from those alone (positions that do not start anew)"
    return None


def _trial(policy: Policy, start: int, rows: int) -> list[Sample]:
    """Samples of arbitrary tokens that every vocabulary has (special ones count as well as any)."""
    embedding = next(p for p in policy.module.parameters() if p.dim() == 2)
    below = min(200, embedding.shape[0])
    ids = (np.arange(sum(LENGTHS)) * 37 + 11 + start) % below
    parts = np.split(ids, np.cumsum(LENGTHS)[:-1])
    counted = [np.tile(np.arange(len(part)), (rows, 1)) if rows else None for part in parts]
    pairs = zip(parts, counted, strict=True)
    return [Sample(tuple(part.tolist()), np.arange(1, len(part)), {}, places) for part, places in pairs]


def _logprobs(policy: Policy, samples: list[Sample], batching: Batching) -> list[np.ndarray]:
    def compute(micro: MicroBatch) -> Tensor:
        return score(policy, micro, 1.0).logprobs

    device = str(next(policy.module.parameters()).device)
    return list(token_values(samples, compute, 4096, policy.pad_id, device, batching))
