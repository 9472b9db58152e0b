"""One update of the weights from trajectories: samples with all that the losses read, minibatches in a named order.

Losses are weighted by counts of whole minibatches, so no result depends on how a minibatch was cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed, stream
from shoal.train.agent.algorithms.advantages import critic_advantages, teacher_advantages, turn_advantages
from shoal.train.agent.algorithms.losses import (
    LOSSES,
    KLEstimator,
    Tokens,
    aggregation_weights,
    kl_penalty,
    policy_losses,
    ratio_of,
    rollout_correction,
    value_loss,
)
from shoal.train.agent.batch.packing import MicroBatch, micro_batches, token_values
from shoal.train.agent.batch.samples import Column, Floats, Sample, by_sample, by_turn, make_samples, was_cut
from shoal.train.agent.config import AgentProxy, Algorithm
from shoal.train.agent.optimizer import MasterAdamW, shorten
from shoal.train.agent.policies.policy import Critic, Policy, autocast, score, training_mode
from shoal.train.agent.processes.distributed import ALONE, Processes

MOST = 10.0
"""Nats that a token counts at most in the KL that is compared with `kl.target`: a rare one can have hundreds."""


@dataclass
class Learner:
    """What is trained, with what, and the networks that are asked about it."""

    policy: Policy
    optimizer: MasterAdamW
    """Of the policy's parameters, and in a group of their own the critic's."""
    algorithm: Algorithm
    proxy: AgentProxy
    critic: Critic | None = None
    reference: Policy | None = None
    """What a KL penalty holds on to."""
    teacher: Policy | None = None
    """Scores tokens for distillation."""
    seed: int = 0
    processes: Processes = ALONE
    token_budget: int = 1
    """Tokens that a sample may have, for `algorithm.loss_constant=budget`."""
    log_entropy: bool = True
    """Compute the entropy also where it is not trained."""

    @property
    def device(self) -> str:
        """Where the policy's network is."""
        return str(next(self.policy.module.parameters()).device)


@dataclass
class Totals:
    """Sums over the tokens of an update, for its metrics."""

    tokens: int = 0
    loss: float = 0.0  # weighted, so already a mean a minibatch
    logprob: float = 0.0
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
        everyone = processes.all_gather(lambda: self)
        added = {item.name for item in fields(self)} - {"largest_gap", "grad_norm", "steps"}
        summed = {name: sum(getattr(one, name) for one in everyone) for name in added}
        return replace(self, largest_gap=max(one.largest_gap for one in everyone), **summed)

    def metrics(
        self,
        config: Algorithm,
        kl_coef: float | None = None,
        *,
        policy: bool = True,
        critic: bool = False,
        entropy: bool = True,
    ) -> dict[str, float]:
        """Means a token, and means a step for loss and gradient, of what was trained: `policy`, `critic` or both."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        row: dict[str, float] = {"gradient_steps": self.steps, "trained_tokens": self.tokens}
        if critic or not policy:
            row["value_loss"] = self.value_loss / tokens
        if not policy:
            return row
        row["loss"] = self.loss / steps
        row["clip_fraction"] = self.clipped / tokens
        row["kl_to_rollout"] = self.kl / tokens
        row["logprob_gap_max"] = self.largest_gap
        row["grad_norm"] = self.grad_norm / steps
        if entropy:
            row["entropy"] = self.entropy / tokens
        if kl_coef is not None:
            row["kl_to_reference"] = self.kl_to_reference / tokens
            row["kl_coef"] = kl_coef
        if config.rollout_correction.method != "none":
            row["rollout_correction_mean"] = self.correction / tokens
        return row


# --- what an update reads
def prepare_samples(trajectories: Sequence[Trajectory], learner: Learner) -> list[Sample]:
    """Samples of whole trajectories with all columns that the configured losses read; none if no token was written.

    Networks are asked about each sample by one of the processes; all of them get all samples. With
    `algorithm.overlong_filter`, episodes in which a response was cut off count in advantages and give no samples.
    """
    algorithm, proxy = learner.algorithm, learner.proxy
    owners = [(trajectory, sample) for trajectory in trajectories for sample in make_samples(trajectory)]
    samples = [sample for _, sample in owners]
    if not samples:
        return []
    sampled = [sample.columns["rollout_logprobs"] for sample in samples]
    columns: dict[Column, Sequence[Floats]] = {"old_logprobs": sampled}
    if algorithm.rollout_correction.method != "none":
        columns["old_logprobs"] = old = _ask(learner.policy, samples, learner)
        columns["correction"] = [_correction(algorithm, *pair) for pair in zip(old, sampled, strict=True)]
    penalties = None  # what each token costs
    if learner.reference is not None:
        columns["reference_logprobs"] = held = _ask(learner.reference, samples, learner)
        if algorithm.kl.place == "reward":
            coef, pairs = kl_coef(algorithm, sampled, held), zip(columns["old_logprobs"], held, strict=True)
            penalties = by_turn(trajectories, [coef * _kl(*pair, algorithm.kl.estimator) for pair in pairs])
    if learner.critic is not None:
        columns["values"] = values = _ask(learner.critic, samples, learner)
        of_turns = by_turn(trajectories, values)
        advantages, returns = critic_advantages(trajectories, of_turns, algorithm, proxy, penalties)
        columns["returns"] = by_sample(trajectories, samples, returns)
    elif learner.teacher is not None:
        known = by_turn(trajectories, columns["old_logprobs"])
        of_teacher = by_turn(trajectories, _ask(learner.teacher, samples, learner))
        advantages = teacher_advantages(known, of_teacher, algorithm)
    else:
        advantages = turn_advantages(trajectories, algorithm, proxy, penalties)
    columns["advantages"] = by_sample(trajectories, samples, advantages)
    for name, of_samples in columns.items():
        samples = [s.with_column(name, column) for s, column in zip(samples, of_samples, strict=True)]
    if not algorithm.overlong_filter:
        return samples
    closing = proxy.prompt.closing
    return [s for s, (trajectory, _) in zip(samples, owners, strict=True) if not was_cut(trajectory, closing)]


def _correction(algorithm: Algorithm, old: Floats, sampled: Floats) -> Floats:
    wanted, pair = algorithm.rollout_correction, (torch.from_numpy(old), torch.from_numpy(sampled))
    weights = rollout_correction(*pair, wanted.cap, wanted.method, level=wanted.level, floor=wanted.floor)
    return weights.numpy()  # type: ignore[no-any-return]


def _kl(logprobs: Floats, reference: Floats, estimator: KLEstimator) -> Floats:
    pair = torch.from_numpy(logprobs), torch.from_numpy(reference)
    return kl_penalty(*pair, estimator).numpy()  # type: ignore[no-any-return]


def kl_coef(algorithm: Algorithm, sampled: Sequence[Floats], reference: Sequence[Floats]) -> float:
    """The coefficient of the KL penalty in an update: with `kl.target` it grows with the square of the KL.

    It is that of log-probabilities as they were `sampled`, and of the same tokens under the `reference`.
    """
    if algorithm.kl.target is None:
        return algorithm.kl.coef
    of_tokens = _kl(np.concatenate(sampled), np.concatenate(reference), "k3")
    return algorithm.kl.coef * (float(np.minimum(of_tokens, MOST).mean()) / algorithm.kl.target) ** 2


def _ask(network: Policy | Critic, samples: list[Sample], learner: Learner) -> list[Floats]:
    """One number a trained token of each sample: a critic's values, or log-probabilities.

    Raises:
        ConfigError: a sample is longer than a teacher can read.
    """
    algorithm, policy, processes = learner.algorithm, learner.policy, learner.processes
    shortest = min(samples, key=lambda sample: len(sample.ids))
    # a critic has the policy's shape, a teacher its own
    read = policy if isinstance(network, Critic) else network
    longest = max(len(sample.ids) for sample in samples)
    if read.context is not None and longest > read.context:
        raise ConfigError(
            f"an episode has {longest} tokens together, and the {'teacher' if read is learner.teacher else 'policy'} "
            f"reads at most {read.context}: give one with a longer context"
        )

    def compute(micro: MicroBatch) -> Tensor:
        if isinstance(network, Critic):
            with autocast(network.model, algorithm.precision):
                return micro.by_token(network(micro.ids, micro.lengths, micro.where, micro.starts))
        return score(network, micro, learner.proxy.temperature, algorithm.precision).logprobs

    def of(numbers: list[int]) -> list[Floats]:
        own, size = [samples[i] for i in numbers], algorithm.micro_batch_tokens
        layout = (algorithm.batching, read.sharing)
        return token_values(
            own, compute, size, policy.pad_id, learner.device, *layout, processes.even_out, shortest
        )

    return processes.share_out([len(sample.ids) for sample in samples], of)


def advantages_of(
    played: Sequence[Trajectory], learned: Sequence[Trajectory], samples: Sequence[Sample], learner: Learner
) -> list[list[list[float]] | None]:
    """What `prepare_samples` found, by episode and turn, one number a token; None where nothing was learned from.

    Of all that was `played` it was given what is `learned`, and made `samples` of it.
    """
    overlong, closing = learner.algorithm.overlong_filter, learner.proxy.prompt.closing
    trained = [t for t in learned if samples and not (overlong and was_cut(t, closing))]
    nested = by_turn(trained, [sample.columns["advantages"] for sample in samples])
    shortest = [[list(map(float, turn.astype("float32").astype("U"))) for turn in turns] for turns in nested]
    found = {id(t): turns for t, turns in zip(trained, shortest, strict=True)}
    return [found.get(id(t)) for t in played]


# --- the update
def update(
    learner: Learner, samples: Sequence[Sample], iteration: int, *, entropy: float | None = None
) -> dict[str, float]:
    """Train on samples; the order of minibatches depends on (seed, iteration, epoch) alone.

    Several processes give the same samples and each work on a part of every minibatch. In the first
    `algorithm.critic.warmup` iterations the critic learns alone, and the policy stays exactly as it is. Where nothing
    pulls (no advantage, critic, KL penalty or entropy bonus), nothing is computed.

    Args:
        learner: what is trained.
        samples: of `prepare_samples`.
        iteration: names the order of minibatches.
        entropy: nats a token of the answers that were played, for `algorithm.entropy_target`; None leaves
            `algorithm.entropy_coef` as it is.

    Returns:
        Metrics of the update, see `docs/metrics.md`.
    """
    algorithm, seed, rank = learner.algorithm, learner.seed, learner.processes.rank
    totals, learns_policy = Totals(), iteration >= algorithm.critic.warmup
    has_signal = any(sample.columns["advantages"].any() for sample in samples)
    coef = _entropy_coef(algorithm, entropy, has_signal)
    pulls = algorithm.kl.coef and algorithm.kl.place == "loss"
    if not (has_signal or coef or pulls or learner.critic is not None):
        return {"gradient_steps": 0, "trained_tokens": 0}
    kl, is_held = algorithm.kl, learner.reference is not None
    if is_held and kl.target is not None:
        names: tuple[Column, ...] = "rollout_logprobs", "reference_logprobs"
        columns = ([sample.columns[name] for sample in samples] for name in names)
        kl = replace(kl, coef=kl_coef(algorithm, *columns))
    if coef != algorithm.entropy_coef or kl is not algorithm.kl:
        learner = replace(learner, algorithm=replace(algorithm, entropy_coef=coef, kl=kl))
    noise = None  # the losses with ratios compare log-probabilities with those of the rollout
    if not LOSSES[algorithm.policy_loss].bounds:
        noise = derive_seed(seed, "dropout", iteration, *([rank] if rank else []))
    models = [learner.policy.module, *([] if learner.critic is None else [learner.critic.model])]
    with contextlib.ExitStack() as modes:
        for model in models:
            modes.enter_context(training_mode(model, algorithm.gradient_checkpointing, noise))
        for epoch in range(algorithm.epochs):
            order = stream(seed, "minibatch", iteration, epoch).permutation(len(samples))
            for part in minibatches(order, algorithm.minibatch_size or len(order)):
                gradient_step(learner, [samples[i] for i in part], totals, learns_policy)
    critic, tells_entropy = learner.critic is not None, learner.log_entropy or bool(coef)
    summed = totals.over(learner.processes)
    told_coef = kl.coef if is_held else None
    row = summed.metrics(algorithm, told_coef, policy=learns_policy, critic=critic, entropy=tells_entropy)
    if algorithm.entropy_coef and learns_policy:
        row["entropy_bonus"] = coef
    return row


def _entropy_coef(algorithm: Algorithm, entropy: float | None, has_signal: bool) -> float:
    """The coefficient of the entropy bonus in an update after answers of this `entropy`, in nats a token.

    With a target it falls evenly from `entropy_coef` at 0 nats to 0 there: the bonus keeps a policy from becoming
    deterministic and never makes it more random than that. Skywork-OR1 (arXiv:2505.22312) also pays it below a target
    only, and moves the coefficient by fixed steps instead. Without a target there is none where no rewards differ:
    alone it would make the policy ever more random.
    """
    if entropy is not None and algorithm.entropy_target is not None:
        return algorithm.entropy_coef * max(0.0, 1 - entropy / algorithm.entropy_target)
    return algorithm.entropy_coef if has_signal else 0.0


def sampled_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Nats a token, estimated by the log-probabilities of all tokens that were sampled; 0 where there are none."""
    logprobs = [logprob for t in trajectories for call in t.calls for logprob in call.logprobs]
    return -math.fsum(logprobs) / max(1, len(logprobs))


def minibatches(order: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """`order` cut into as few parts of at most `size` as possible, of nearly equal length.

    Each part makes one step of the optimizer, so a short rest would count as much as all others.

    >>> [len(part) for part in minibatches(np.arange(257), 128)]
    [86, 86, 85]
    """
    return np.array_split(order, math.ceil(len(order) / size))


def gradient_step(
    learner: Learner, minibatch: Sequence[Sample], totals: Totals, learns_policy: bool = True, what: str = ""
) -> None:
    """One step of the optimizer; the weights of all tokens of the minibatch sum to 1, over all processes.

    Args:
        learner: what is trained.
        minibatch: samples with the columns of `prepare_samples`.
        totals: what the step was like is added to them.
        learns_policy: False trains the critic alone.
        what: names the step in an error.

    Raises:
        DivergedError: a gradient is NaN or infinite; the weights are those from before this step.
    """
    policy, critic, config, processes = learner.policy, learner.critic, learner.algorithm, learner.processes
    budget = learner.token_budget if config.loss_constant == "budget" else config.loss_constant
    lengths = [len(sample.trained) for sample in minibatch]
    weights = aggregation_weights(lengths, config.loss_aggregation, budget)
    weighted = [s.with_column("weights", w) for s, w in zip(minibatch, weights, strict=True)]
    learner.optimizer.zero_grad(set_to_none=True)
    own = [weighted[i] for i in processes.partition([len(sample.ids) for sample in weighted])[processes.rank]]
    size, layout = config.micro_batch_tokens, (config.batching, policy.sharing)
    micros = list(micro_batches(own, size, policy.pad_id, learner.device, *layout))
    for micro in processes.even_out(micros):
        counted = totals
        if micro is None:  # others still have some, and need this one's shards: a pass that counts nothing
            shortest = min(weighted, key=lambda sample: len(sample.ids))
            shortest = shortest.with_column("weights", np.zeros(len(shortest.trained), np.float32))
            micro = next(micro_batches([shortest], size, policy.pad_id, learner.device))
            counted = Totals(steps=1)
        if learns_policy:
            loss = token_loss(policy, micro, config, learner.proxy.temperature, counted, learner.log_entropy)
            if critic is not None:
                loss = loss + critic_loss(critic, micro, config, counted)
        else:
            assert critic is not None
            loss = critic_loss(critic, micro, config, counted)
            counted.tokens += len(micro.samples)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.take_gradients()
    of_policy, *of_critic = learner.optimizer.stepped
    summed = of_policy if learns_policy else []
    processes.sum_gradients([*summed, *(p for group in of_critic for p in group)])
    if learns_policy:
        totals.grad_norm += shorten(of_policy, config.max_grad_norm, f"policy{what}")
    for group in of_critic:
        shorten(group, config.max_grad_norm, "critic")
    totals.steps += 1
    learner.optimizer.step()


def token_loss(
    policy: Policy,
    micro: MicroBatch,
    config: Algorithm,
    temperature: float,
    totals: Totals,
    log_entropy: bool = True,
) -> Tensor:
    """The weighted sum of the policy's loss over a micro-batch; adds to `totals`, the entropy if it is logged."""
    how: Literal["none", "reported", "trained"] = "reported" if log_entropy else "none"
    if config.entropy_coef:
        how = "trained"
    logprobs, entropy = score(policy, micro, temperature, config.precision, how)
    columns = micro.columns
    tokens = Tokens(logprobs, columns["old_logprobs"], columns["advantages"], micro.samples)
    losses, clipped = policy_losses(tokens, config)
    if "correction" in columns:
        losses = losses * columns["correction"]
        totals.correction += float(columns["correction"].sum())
    if config.entropy_coef and entropy is not None:
        losses = losses - config.entropy_coef * entropy
    if "reference_logprobs" in columns:
        reference = columns["reference_logprobs"]
        if config.kl.place == "loss":
            losses = losses + config.kl.coef * kl_penalty(logprobs, reference, config.kl.estimator)
        known = kl_penalty(logprobs.detach(), reference, "k3")  # whose mean is the KL
        totals.kl_to_reference += float(known.sum())
    loss = (losses * columns["weights"]).sum()
    with torch.no_grad():
        gap = logprobs - columns["old_logprobs"]
        totals.tokens += len(micro.samples)
        totals.loss += float(loss)
        totals.logprob += float(logprobs.sum())
        if entropy is not None:
            totals.entropy += float(entropy.sum())
        totals.clipped += float(clipped.sum())
        totals.kl += float((ratio_of(gap) - 1 - gap).sum())
        if totals.steps == 0:
            rollout_gap = logprobs - columns["rollout_logprobs"]
            totals.largest_gap = max(totals.largest_gap, float(rollout_gap.abs().max()))
    return loss


def critic_loss(critic: Critic, micro: MicroBatch, config: Algorithm, totals: Totals) -> Tensor:
    """The weighted sum of the critic's loss over a micro-batch."""
    with autocast(critic.model, config.precision):
        values = micro.by_token(critic(micro.ids, micro.lengths, micro.where, micro.starts))
    columns = micro.columns
    losses = value_loss(values, columns["values"], columns["returns"], config.critic.value_clip)
    totals.value_loss += float(losses.detach().sum())
    return (losses * columns["weights"]).sum()
