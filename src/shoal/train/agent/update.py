"""One update of the weights from trajectories: samples with all that the losses read, minibatches in a named order.

Losses are weighted by counts of whole minibatches, so no result depends on how a minibatch was cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.data import Trajectory
from shoal.core.errors import DivergedError
from shoal.core.seeding import derive_seed, stream
from shoal.train.agent.advantages import Array, critic_advantages, turn_advantages
from shoal.train.agent.batch import (
    MicroBatch,
    Sample,
    make_samples,
    micro_batches,
    split_tokens,
    token_values,
)
from shoal.train.agent.config import AgentProxy, Algorithm
from shoal.train.agent.distributed import ALONE, Processes
from shoal.train.agent.losses import (
    aggregation_weights,
    clipped_token_loss,
    entropy_of,
    kl_penalty,
    rollout_correction,
    sequence_clipped_loss,
    sequence_ratios,
    truncated_weight_loss,
    value_loss,
)
from shoal.train.agent.policy import (
    Critic,
    Precision,
    TrainableEngine,
    autocast,
    logprobs_of,
    trained_parameters,
    training_mode,
)
from shoal.train.agent.weights import whole


@dataclass
class Totals:
    """Sums over the tokens of an update, for its metrics."""

    tokens: int = 0
    loss: float = 0.0  # weighted, so already a mean a minibatch
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    kl_to_reference: float = 0.0
    value_loss: float = 0.0
    correction: float = 0.0
    largest_gap: float = 0.0  # |log-prob now - when sampled| before the first gradient step
    grad_norm: float = 0.0
    steps: int = 0

    def over(self, processes: Processes) -> Totals:
        """Those of all processes; what every one of them counted alike is not counted again."""
        everyone = processes.together(lambda: self)
        summed = {
            item.name: sum(getattr(one, item.name) for one in everyone)
            for item in fields(self)
            if item.name not in ("largest_gap", "grad_norm", "steps")
        }
        return replace(self, largest_gap=max(one.largest_gap for one in everyone), **summed)

    def metrics(self, config: Algorithm) -> dict[str, float]:
        """Means a token, and means a step for loss and gradient."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        row = {
            "loss": self.loss / steps,
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "kl_to_rollout": self.kl / tokens,
            "logprob_gap_max": self.largest_gap,
            "grad_norm": self.grad_norm / steps,
            "gradient_steps": self.steps,
            "trained_tokens": self.tokens,
        }
        if config.kl.coef:
            row["kl_to_reference"] = self.kl_to_reference / tokens
        if config.needs_critic:
            row["value_loss"] = self.value_loss / tokens
        if config.rollout_correction.method != "none":
            row["rollout_correction_mean"] = self.correction / tokens
        return row


def update(
    engine: TrainableEngine,
    critic: Critic | None,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: Algorithm,
    temperature: float,
    seed: int,
    iteration: int,
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Train on samples; the order of minibatches depends on (seed, iteration, epoch) alone.

    Several processes give the same samples and each work on a part of every minibatch.

    Returns:
        Metrics of the update, see `docs/metrics.md`.
    """
    totals = Totals()
    noise = derive_seed(seed, "dropout", iteration, *([processes.rank] if processes.rank else []))
    with contextlib.ExitStack() as modes:
        for model in (engine.model, *(() if critic is None else (critic.model,))):
            modes.enter_context(training_mode(model, config.gradient_checkpointing, noise))
        for epoch in range(config.epochs):
            order = stream(seed, "minibatch", iteration, epoch).permutation(len(samples))
            for first in range(0, len(order), config.minibatch_size):
                minibatch = [samples[i] for i in order[first : first + config.minibatch_size]]
                gradient_step(engine, critic, optimizer, minibatch, config, temperature, totals, processes)
    engine.weights_version += 1
    return totals.over(processes).metrics(config)


def gradient_step(
    engine: TrainableEngine,
    critic: Critic | None,
    optimizer: torch.optim.Optimizer,
    minibatch: Sequence[Sample],
    config: Algorithm,
    temperature: float,
    totals: Totals,
    processes: Processes = ALONE,
) -> None:
    """One step of the optimizer; the weights of all tokens of the minibatch sum to 1, over all processes.

    Raises:
        DivergedError: a gradient is NaN or infinite; the weights are those from before this step.
    """
    weights = aggregation_weights(
        [len(s.places) for s in minibatch], config.loss_aggregation, config.loss_constant
    )
    weighted = [s.with_column("weights", w) for s, w in zip(minibatch, weights, strict=True)]
    parameters = trained_parameters(engine.model)
    optimizer.zero_grad(set_to_none=True)
    device = str(parameters[0].device)
    own = [weighted[i] for i in processes.part([len(sample.ids) for sample in weighted])]
    stems = engine.reads_stems
    size = config.micro_batch_tokens
    micros = list(micro_batches(own, size, engine.pad_id, device, config.batching, stems))
    for micro in processes.in_step(micros):
        if micro is None:
            shortest = min(weighted, key=lambda sample: len(sample.ids))
            idle = next(micro_batches([shortest], size, engine.pad_id, device))
            loss = idle_loss(engine, critic, idle, config.precision)
        else:
            loss = token_loss(engine, micro, config, temperature, totals)
            if critic is not None:
                loss = loss + critic_loss(critic, micro, config, totals)
        loss.backward()  # type: ignore[no-untyped-call]
    processes.sum_gradients([p for group in optimizer.param_groups for p in group["params"]])
    totals.grad_norm += refuse_diverged(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm), "policy")
    if critic is not None:
        refuse_diverged(nn.utils.clip_grad_norm_(critic.parameters(), config.max_grad_norm), "critic")
    totals.steps += 1
    optimizer.step()


def refuse_diverged(norm: Tensor, of: str) -> float:
    """The norm of a gradient as a number.

    Raises:
        DivergedError: it is NaN or infinite; no step was made with it.
    """
    size = float(whole(norm))
    if not math.isfinite(size):
        raise DivergedError(
            f"the gradient of the {of} is {size} (its norm): training diverged, and the weights are those from before "
            f"it. Lower the learning rate; resume=true goes on from the last checkpoint"
        )
    return size


def token_loss(
    engine: TrainableEngine, micro: MicroBatch, config: Algorithm, temperature: float, totals: Totals
) -> Tensor:
    """The weighted sum of the policy's loss over a micro-batch; adds to `totals`."""
    scores, logprobs = logprobs_of(engine, micro, temperature, config.precision)
    columns = micro.columns
    losses = _policy_losses(logprobs, micro, config)
    if "correction" in columns:
        losses = losses * columns["correction"]
        totals.correction += float(columns["correction"].sum())
    with torch.set_grad_enabled(config.entropy_coef != 0):  # it is always told, but seldom trained
        entropy = entropy_of(scores)
    if config.entropy_coef:
        losses = losses - config.entropy_coef * entropy
    if config.kl.coef:
        kl = kl_penalty(logprobs, columns["reference_logprobs"], config.kl.estimator)
        losses = losses + config.kl.coef * kl
        totals.kl_to_reference += float(kl.detach().sum())
    loss = (losses * columns["weights"]).sum()
    with torch.no_grad():
        gap = logprobs - columns["old_logprobs"]
        ratio = gap.exp()
        bounded = sequence_ratios(gap, micro.samples) if config.policy_loss == "gspo" else ratio
        outside = bounded > 1 + config.clip_ratio_high
        if config.policy_loss != "cispo":  # which has no lower bound
            outside |= bounded < 1 - config.clip_ratio_low
        totals.tokens += len(micro.targets)
        totals.loss += float(loss)
        totals.entropy += float(entropy.sum())
        totals.clipped += float(outside.sum())
        totals.kl += float((ratio - 1 - gap).sum())
        if totals.steps == 0:
            rollout_gap = logprobs - columns["rollout_logprobs"]
            totals.largest_gap = max(totals.largest_gap, float(rollout_gap.abs().max()))
    return loss


def critic_loss(critic: Critic, micro: MicroBatch, config: Algorithm, totals: Totals) -> Tensor:
    """The weighted sum of the critic's loss over a micro-batch."""
    with autocast(critic.model, config.precision):
        values = critic(micro.ids, micro.lengths, micro.where, micro.begins)
    columns = micro.columns
    losses = value_loss(values, columns["values"], columns["returns"], config.critic.value_clip)
    totals.value_loss += float(losses.detach().sum())
    return (losses * columns["weights"]).sum()


def idle_loss(
    engine: TrainableEngine, critic: Critic | None, micro: MicroBatch, precision: Precision
) -> Tensor:
    """Zero, by way of all that is trained: the pass of a process with nothing left, while others need its shards."""
    with autocast(engine.model, precision):
        total = engine.logits_at(micro.ids, micro.lengths, micro.where, micro.begins).float().sum()
        if critic is not None:
            total = total + critic(micro.ids, micro.lengths, micro.where, micro.begins).sum()
    return 0.0 * total


def _policy_losses(logprobs: Tensor, micro: MicroBatch, config: Algorithm) -> Tensor:
    old, advantages = micro.columns["old_logprobs"], micro.columns["advantages"]
    low, high = config.clip_ratio_low, config.clip_ratio_high
    if config.policy_loss == "gspo":
        return sequence_clipped_loss(logprobs, old, advantages, micro.samples, low, high)
    if config.policy_loss == "cispo":
        return truncated_weight_loss(logprobs, old, advantages, high)
    return clipped_token_loss(logprobs, old, advantages, low, high, config.dual_clip)


def prepare_samples(
    trajectories: Sequence[Trajectory],
    engine: TrainableEngine,
    critic: Critic | None,
    reference: TrainableEngine | None,
    algorithm: Algorithm,
    proxy: AgentProxy,
    processes: Processes = ALONE,
) -> list[Sample]:
    """Samples of whole trajectories with all columns that the configured losses read.

    Networks are asked about each sample by one of the processes; all of them get all samples.
    """
    samples = [sample for trajectory in trajectories for sample in make_samples(trajectory)]
    sizes = [len(sample.ids) for sample in samples]
    shortest = min(samples, key=lambda sample: len(sample.ids), default=None)
    device = str(next(engine.model.parameters()).device)

    def ask(network: TrainableEngine | Critic) -> list[np.ndarray]:
        def compute(micro: MicroBatch) -> torch.Tensor:
            if isinstance(network, Critic):
                with autocast(network.model, algorithm.precision):
                    return network(micro.ids, micro.lengths, micro.where, micro.begins)  # type: ignore[no-any-return]
            return logprobs_of(network, micro, proxy.temperature, algorithm.precision)[1]

        def of(numbers: list[int]) -> list[np.ndarray]:
            own, size = [samples[i] for i in numbers], algorithm.micro_batch_tokens
            return token_values(  # type: ignore[return-value]
                own,
                compute,
                size,
                engine.pad_id,
                device,
                algorithm.batching,
                engine.reads_stems,
                processes.in_step,
                shortest,
            )

        return processes.spread(sizes, of)

    old = [sample.columns["rollout_logprobs"] for sample in samples]
    corrections: list[np.ndarray] | None = None
    if algorithm.rollout_correction.method != "none":
        sampled, old = old, ask(engine)
        corrections = [_correction(o, s, algorithm) for o, s in zip(old, sampled, strict=True)]
    values = ask(critic) if critic is not None else None
    held = ask(reference) if reference is not None else None
    samples = [s.with_column("old_logprobs", column) for s, column in zip(samples, old, strict=True)]
    if corrections is not None:
        samples = [
            s.with_column("correction", column) for s, column in zip(samples, corrections, strict=True)
        ]
    if held is not None:
        samples = [
            s.with_column("reference_logprobs", column) for s, column in zip(samples, held, strict=True)
        ]
    if values is None:
        turns = turn_advantages(trajectories, algorithm, proxy)
        return _with_flat(samples, "advantages", _spread(trajectories, turns))
    samples = [s.with_column("values", column) for s, column in zip(samples, values, strict=True)]
    by_turn = _by_turn(trajectories, np.concatenate(values))
    advantages, targets = critic_advantages(trajectories, by_turn, algorithm, proxy)
    samples = _with_flat(samples, "advantages", _flatten(advantages))
    return _with_flat(samples, "returns", _flatten(targets))


def _correction(old: np.ndarray, sampled: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    settings = algorithm.rollout_correction
    method = "mask" if settings.method == "mask" else "truncate"
    weights = rollout_correction(torch.from_numpy(old), torch.from_numpy(sampled), settings.cap, method)  # type: ignore[arg-type]
    return weights.numpy()


def _with_flat(samples: Sequence[Sample], name: str, flat: np.ndarray) -> list[Sample]:
    parts = split_tokens(samples, flat)
    return [s.with_column(name, part) for s, part in zip(samples, parts, strict=True)]  # type: ignore[arg-type]


def _spread(trajectories: Sequence[Trajectory], turns: Sequence[Array]) -> np.ndarray:
    """One advantage a turn, repeated for each token of its response."""
    counts = [len(turn.response_ids) for t in trajectories for turn in t.turns]
    return np.repeat(np.concatenate(turns), counts)


def _by_turn(trajectories: Sequence[Trajectory], flat: np.ndarray) -> list[list[Array]]:
    """`[tokens]` values in the order of the trajectories, cut by trajectory and turn."""
    cuts = np.cumsum([len(turn.response_ids) for t in trajectories for turn in t.turns])[:-1]
    parts = iter(np.split(flat.astype(np.float64), cuts))
    return [[next(parts) for _ in t.turns] for t in trajectories]


def _flatten(nested: Sequence[Sequence[Array]]) -> np.ndarray:
    return np.concatenate([tokens for turns in nested for tokens in turns])
