"""Whether several samples may share a row with this model: tried on the model itself, not guessed from its name.

A model with recurrent or linear-attention layers carries a state across the border of two samples, and some ignore
the mask or the positions; packed rows would then teach something else, without an error anywhere.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from shoal.core.errors import ConfigError
from shoal.train.packing import Batching
from shoal.train.policy import TrainableEngine
from shoal.train.samples import Sample, token_values
from shoal.train.update import logprobs_of

logger = logging.getLogger(__name__)

LENGTHS = (23, 14, 9)
"""Tokens of the samples of the trial: the last two share a row, behind each other."""


def safe_batching(engine: TrainableEngine, wanted: Batching) -> Batching:
    """`wanted`, or what is right for this model: `auto` becomes `bucketed` where packing would be wrong.

    Raises:
        ConfigError: `packed` is asked for, and this model does not keep samples of a row apart.
    """
    if wanted not in ("auto", "packed"):
        return wanted
    fault = packing_fault(engine)
    if fault is None:
        return wanted
    if wanted == "packed":
        raise ConfigError(
            f"algorithm.batching=packed is wrong for this model: {fault}; set bucketed (or auto)"
        )
    logger.warning("samples are not packed into rows (algorithm.batching=bucketed): %s", fault)
    return "bucketed"


def packing_fault(engine: TrainableEngine) -> str | None:
    """What goes wrong when this model gets two samples in one row, or None if nothing does.

    The second sample of a row must not change when the first does (not even by rounding: masked tokens count
    nothing), and must have the log-probabilities that it has alone.
    """
    parameter = next(engine.model.parameters())
    tolerance = 1e-3 if parameter.dtype == torch.float32 else 0.1
    samples, changed = _trial(engine, 0), _trial(engine, 7)
    changed[2] = samples[2]
    try:
        packed, other = (_logprobs(engine, each, "packed") for each in (samples, changed))
        alone = _logprobs(engine, samples, "padded")
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


def _trial(engine: TrainableEngine, start: int) -> list[Sample]:
    """Samples of arbitrary tokens that every vocabulary has (special ones count as well as any)."""
    embedding = next(p for p in engine.model.parameters() if p.dim() == 2)
    below = min(200, embedding.shape[0])
    ids = (np.arange(sum(LENGTHS)) * 37 + 11 + start) % below
    parts = np.split(ids, np.cumsum(LENGTHS)[:-1])
    return [Sample(tuple(part.tolist()), np.arange(1, len(part)), {}) for part in parts]


def _logprobs(engine: TrainableEngine, samples: list[Sample], batching: Batching) -> list[np.ndarray]:
    device = str(next(engine.model.parameters()).device)
    return list(
        token_values(
            samples, lambda micro: logprobs_of(engine, micro, 1.0)[1], 4096, engine.pad_id, device, batching
        )
    )
