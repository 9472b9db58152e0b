"""The same update gives the same bits: PyTorch's deterministic algorithms while a network is trained.

On a GPU some kernels add up in the order in which they happen to end: the backward pass of attention in float32, of
`gather` and of an index that repeats. On a CPU with one thread of arithmetic there are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch

from shoal.core.errors import ConfigError
from shoal.core.seeding import stream
from shoal.samplers.registry import EngineConfig
from shoal.train.agent.batch import Sample
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty
from shoal.train.agent.networks import split_optimizer
from shoal.train.agent.policy import make_policy, trained_parameters
from shoal.train.agent.update import Learner, update


def applies(chosen: bool | Literal["auto"], device: str) -> bool:
    """Whether a network on this device is trained by deterministic algorithms; ask before the device computes anything.

    cuBLAS reads `CUBLAS_WORKSPACE_CONFIG` when it begins, which is set here for a GPU unless it is set already.

    Args:
        chosen: `engine.deterministic`.
        device: such as "cuda:0".
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


def updated_twice(device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights of a tiny model after two updates, and those of the same once more: equal to the bit if all is well.

    Args:
        device: where it computes.
    """
    config, on = EngineConfig(width=32, device=device), applies("auto", device)
    return _updated(config, on), _updated(config, on)


def _updated(config: EngineConfig, on: bool) -> list[torch.Tensor]:
    policy, _ = make_policy(config, ["Left", "Right"], 0)
    vocabulary = next(policy.module.parameters()).shape[0]
    samples = []
    for i in range(32):  # in groups of eight that begin alike
        alike, own = stream(0, "twice", i // 8), stream(0, "twice-own", i)
        ids = [*alike.integers(0, vocabulary, 48), *own.integers(0, vocabulary, 32)]
        places = np.arange(48, 80)
        columns = {"old_logprobs": np.full(32, -3.0), "advantages": np.full(32, (-1.0) ** i)}
        columns["rollout_logprobs"] = columns["old_logprobs"]
        sample = Sample(tuple(map(int, ids)), places, {})
        for name, column in columns.items():
            sample = sample.with_column(name, column)  # type: ignore[arg-type]
        samples.append(sample)
    optimizer = split_optimizer(trained_parameters(policy.module), None, 1e-3, 1e-3, 0.0)
    learner = Learner(policy, optimizer, Algorithm(minibatch_size=16, kl=KLPenalty(0.0)), AgentProxy())
    with deterministic(on):
        for iteration in range(2):
            update(learner, samples, iteration)
    return [parameter.detach().cpu() for parameter in policy.module.parameters()]
