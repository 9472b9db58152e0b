"""How an update computes: precision, layers computed twice to save memory, and the noise of dropout.

None of it touches global state for longer than an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Precision = Literal["float32", "bfloat16"]


def autocast(model: nn.Module, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in bfloat16 if asked for; sums that need it stay in float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


def can_checkpoint(model: nn.Module) -> bool:
    """Whether layers of this model can be computed again in the backward pass."""
    return bool(_layers(model))


def _layers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]


@contextlib.contextmanager
def training_mode(model: nn.Module, checkpointing: bool, seed: int) -> Iterator[None]:
    """The layers of `model` are computed again in the backward pass if asked for, and adapters drop out by `seed`.

    The model itself stays in evaluation mode: what it computes is what the engine computed.
    """
    layers = _layers(model) if checkpointing else []
    drops = [
        part
        for name, part in model.named_modules()
        if "lora_dropout" in name and isinstance(part, nn.Dropout) and part.p > 0
    ]
    before = [part.gradient_checkpointing for part in layers]
    for (
        part
    ) in layers:  # set here, since the methods of transformers that do it change names between versions
        part.gradient_checkpointing = True  # type: ignore[assignment]
        part._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
    switched = [*layers, *drops]
    for part in switched:
        part.training = True  # of this module alone: its parts keep their mode
    device = next(model.parameters()).device
    noise = (
        torch.random.fork_rng([device] if device.type == "cuda" else [])
        if drops
        else contextlib.nullcontext()
    )
    try:
        with noise:
            if drops:
                torch.manual_seed(seed % 2**63)
            yield
    finally:
        for part in switched:
            part.training = False
        for part, was in zip(layers, before, strict=True):
            part.gradient_checkpointing = was
