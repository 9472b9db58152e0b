"""The same update gives the same bits: PyTorch's deterministic algorithms while a network is trained.

On a GPU some kernels add up in the order in which they happen to end: the backward pass of attention in float32, of
`gather` and of an index that repeats. On a CPU with one thread of arithmetic there are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch

from shoal.core.errors import ConfigError


def applies(chosen: bool | Literal["auto"], device: str) -> bool:
    """Whether a network on this device is trained by deterministic algorithms, with `engine.deterministic` as chosen.

    Ask before the device computes anything: cuBLAS reads `CUBLAS_WORKSPACE_CONFIG` when it begins, which is set here
    for a GPU unless it is set already.
    """
    on_gpu = device.startswith("cuda")
    if chosen and on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return on_gpu if chosen == "auto" else bool(chosen)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms, in the whole process, for as long as this lasts.

    Without `warn_only`, with which attention keeps its other kernels.

    Raises:
        ConfigError: an operation has none.
    """
    if not on:
        yield
        return
    before, memory = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        raise ConfigError(
            f"the same seed cannot give the same weights here: {str(error).split(', but')[0]}. Set "
            f"engine.deterministic=false: runs of one seed then differ by rounding, and so does a resumed one"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch's arithmetic in this process, for as long as this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
