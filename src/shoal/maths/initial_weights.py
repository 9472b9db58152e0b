"""Orthogonal first weights (arXiv:1312.6120), on arrays and in a torch module, from named streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shoal.core.seeding import derive_seed

if TYPE_CHECKING:
    from torch import nn

Array = np.ndarray


def orthogonal(shape: tuple[int, int], gain: float, rng: np.random.Generator) -> Array:
    """A float32 matrix whose rows, or columns if those are fewer, are orthogonal and of length `gain`."""
    rows, columns = shape
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    q = q * np.sign(np.diag(r))
    return (gain * (q if rows >= columns else q.T)).astype(np.float32)


def initialize(module: nn.Module, seed: int, name: str, *, last_gain: float) -> None:
    """Orthogonal weights (gain sqrt 2, `last_gain` at the end) and zero biases, from the run's seed."""
    import torch
    from torch import nn

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a QR decomposition depend on how many threads share it
    try:
        with torch.no_grad():
            for i, layer in enumerate(layers):
                gain = last_gain if i == len(layers) - 1 else 2**0.5
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
    finally:
        torch.set_num_threads(threads)
