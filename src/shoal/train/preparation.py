"""Trajectories into samples with everything a gradient step needs: advantages, and what other networks say of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.core.data import Trajectory
from shoal.train.agent_advantages import critic_advantages, turn_advantages
from shoal.train.agent_config import AgentProxy, Algorithm
from shoal.train.arithmetic import autocast
from shoal.train.critic import Critic
from shoal.train.group_advantages import Array
from shoal.train.policy import TrainableEngine
from shoal.train.processes import ALONE, Processes
from shoal.train.samples import MicroBatch, Sample, make_samples, split_tokens, token_values
from shoal.train.token_losses import rollout_correction
from shoal.train.update import logprobs_of


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
