"""One update of the weights from samples: minibatches in a named order, losses by counts of whole minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.seeding import stream
from shoal.train.agent_config import Algorithm
from shoal.train.policy import TrainableEngine
from shoal.train.samples import MicroBatch, Sample, micro_batches
from shoal.train.token_losses import clipped_token_loss, entropy_of


@dataclass
class Totals:
    """Sums over the tokens of an update, for its metrics."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    largest_gap: float = 0.0  # |log-prob now - when sampled| before the first gradient step
    grad_norm: float = 0.0
    steps: int = 0

    def metrics(self) -> dict[str, float]:
        """Means a token, and means a step for the gradient."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        return {
            "loss": self.loss / tokens,
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "kl_to_rollout": self.kl / tokens,
            "logprob_gap_max": self.largest_gap,
            "grad_norm": self.grad_norm / steps,
            "gradient_steps": self.steps,
            "trained_tokens": self.tokens,
        }


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in a fixed order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def update(
    engine: TrainableEngine,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: Algorithm,
    temperature: float,
    seed: int,
    iteration: int,
) -> dict[str, float]:
    """Train on samples; the order of minibatches depends on (seed, iteration, epoch) alone.

    Returns:
        Metrics of the update, see `docs/metrics.md`.
    """
    totals = Totals()
    for epoch in range(config.epochs):
        order = stream(seed, "minibatch", iteration, epoch).permutation(len(samples))
        for first in range(0, len(order), config.minibatch_size):
            minibatch = [samples[i] for i in order[first : first + config.minibatch_size]]
            _step(engine, optimizer, minibatch, config, temperature, totals)
    engine.weights_version += 1
    return totals.metrics()


def _step(
    engine: TrainableEngine,
    optimizer: torch.optim.Optimizer,
    minibatch: Sequence[Sample],
    config: Algorithm,
    temperature: float,
    totals: Totals,
) -> None:
    """One gradient step; its loss is a sum over tokens divided by the tokens of the whole minibatch."""
    n_tokens = sum(sample.n_trained for sample in minibatch)
    parameters = trained_parameters(engine.model)
    device = str(parameters[0].device)
    optimizer.zero_grad(set_to_none=True)
    for micro in micro_batches(minibatch, config.micro_batch_tokens, engine.pad_id, device):
        loss = token_loss(engine, micro, config, temperature, totals)
        (loss / n_tokens).backward()  # type: ignore[no-untyped-call]
    totals.grad_norm += float(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
    totals.steps += 1
    optimizer.step()


def token_loss(
    engine: TrainableEngine, micro: MicroBatch, config: Algorithm, temperature: float, totals: Totals
) -> Tensor:
    """The summed loss of the tokens of a micro-batch; adds to `totals`."""
    scores = engine.logits_at(micro.ids, micro.lengths, micro.where).float() / (temperature or 1.0)
    scores = scores.log_softmax(-1)
    logprobs = scores.gather(1, micro.targets[:, None])[:, 0]
    entropy = entropy_of(scores)
    losses = clipped_token_loss(
        logprobs, micro.old_logprobs, micro.advantages, config.clip_ratio_low, config.clip_ratio_high
    )
    loss = losses.sum() - config.entropy_coef * entropy.sum()
    with torch.no_grad():
        gap = logprobs - micro.old_logprobs
        ratio = gap.exp()
        outside = (ratio < 1 - config.clip_ratio_low) | (ratio > 1 + config.clip_ratio_high)
        totals.tokens += len(micro.targets)
        totals.loss += float(loss.detach())
        totals.entropy += float(entropy.detach().sum())
        totals.clipped += float(outside.sum())
        totals.kl += float((ratio - 1 - gap).sum())
        if totals.steps == 0:
            totals.largest_gap = max(totals.largest_gap, float(gap.abs().max()))
    return loss
