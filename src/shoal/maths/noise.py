"""Torch's global generators, lent to one thread at a time and given back as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALONE = threading.RLock()


@contextmanager
def torch_noise(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """What draws from torch's global noise here (dropout, the first weights of its layers) changes none of it.

    All threads draw from the same generators, so a second one that asks for them waits for the first.

    Args:
        seed: of what is drawn; without one it is for nothing that is kept.
        device: whose generator is lent too, if it is a GPU.
    """
    import torch

    devices = [device] if device is not None and device.type == "cuda" else []
    with _ALONE, torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed % 2**63)
        yield
