"""Whether this machine gives the same bits for the same update."""

from __future__ import annotations

import numpy as np
import torch

from shoal.core.seeding import stream
from shoal.samplers.registry import EngineConfig
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import make_policy
from shoal.train.agent.processes.determinism import applies, deterministic
from shoal.train.agent.update import Learner, update


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
