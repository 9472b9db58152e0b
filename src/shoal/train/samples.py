"""From trajectories to what a gradient step sees: samples of tokens, and padded micro-batches of them.

A sample is a stretch of context in which every prompt extends the tokens before it: one turn in `window` mode,
a whole episode in `append` mode. What is known of its trained tokens stands in columns, one number a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.data import Trajectory

Column = Literal[
    "rollout_logprobs",  # under the weights and the arithmetic of the engine that sampled
    "old_logprobs",  # under the same weights in the trainer's arithmetic
    "reference_logprobs",  # under the weights that a KL penalty holds on to
    "advantages",
    "weights",  # of the token in the loss; they sum to 1 over a minibatch
    "correction",  # importance weight of trainer against engine
    "values",  # of a critic, before the update
    "returns",  # what the critic shall learn
]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """Context and responses as one row of tokens."""

    ids: tuple[int, ...]
    places: NDArray[np.int64]  # [K] where the tokens stand that the model wrote, ascending
    columns: Mapping[Column, Floats]  # [K] each

    def with_column(self, name: Column, values: Floats) -> Sample:
        """This sample with one more column."""
        return replace(self, columns={**self.columns, name: values.astype(np.float32)})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length `T`; `N` tokens of it are trained, in row-major order."""

    ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    where: Tensor  # [B, T] bool, N of them true
    targets: Tensor  # [N] int64
    rows: Tensor  # [N] int64, the row of each trained token
    columns: Mapping[Column, Tensor]  # [N] float32 each


def make_samples(trajectory: Trajectory) -> list[Sample]:
    """The samples of a trajectory, with the column `rollout_logprobs`; their trained tokens are all that it wrote."""
    samples: list[Sample] = []
    ids: tuple[int, ...] = ()
    places: list[int] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        if places and turn.prompt_ids[: len(ids)] != ids:
            samples.append(_sample(ids, places, logprobs))
            places, logprobs = [], []
        start = len(turn.prompt_ids)
        places += range(start, start + len(turn.response_ids))
        logprobs += turn.logprobs
        ids = turn.prompt_ids + turn.response_ids
    if places:
        samples.append(_sample(ids, places, logprobs))
    return samples


def _sample(ids: tuple[int, ...], places: list[int], logprobs: list[float]) -> Sample:
    return Sample(ids, np.array(places), {"rollout_logprobs": np.array(logprobs, dtype=np.float32)})


def split_tokens(samples: Sequence[Sample], flat: NDArray[np.floating]) -> list[Floats]:
    """Cut `[tokens]` values of the trained tokens of `samples`, in order, into one array a sample."""
    cuts = np.cumsum([len(sample.places) for sample in samples])[:-1]
    return np.split(np.asarray(flat, dtype=np.float32), cuts)


def micro_batches(samples: Sequence[Sample], max_tokens: int, pad: int, device: str) -> Iterator[MicroBatch]:
    """Rows of like length together, each batch at most `max_tokens` with padding (or one row)."""
    for batch, _ in _grouped(samples, max_tokens, pad, device):
        yield batch


def token_values(
    samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor], max_tokens: int, pad: int, device: str
) -> list[Floats]:
    """`compute` over all samples without gradients: per sample one number a trained token."""
    found: list[Floats] = [np.empty(0, dtype=np.float32)] * len(samples)
    with torch.no_grad():
        for batch, members in _grouped(samples, max_tokens, pad, device):
            flat = compute(batch).float().cpu().numpy()
            parts = split_tokens([samples[i] for i in members], flat)
            for i, part in zip(members, parts, strict=True):
                found[i] = part
    return found


def _grouped(
    samples: Sequence[Sample], max_tokens: int, pad: int, device: str
) -> Iterator[tuple[MicroBatch, list[int]]]:
    members: list[int] = []
    for i in sorted(range(len(samples)), key=lambda i: len(samples[i].ids)):
        if members and (len(members) + 1) * len(samples[i].ids) > max_tokens:
            yield _pad([samples[j] for j in members], pad, device), members
            members = []
        members.append(i)
    if members:
        yield _pad([samples[j] for j in members], pad, device), members


def _pad(rows: Sequence[Sample], pad: int, device: str) -> MicroBatch:
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), longest), pad, dtype=np.int64)
    where = np.zeros((len(rows), longest), dtype=bool)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        where[place, row.places] = True
    columns = {
        name: torch.from_numpy(np.concatenate([row.columns[name] for row in rows])).to(device)
        for name in rows[0].columns
    }
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.tensor([len(row.ids) for row in rows], device=device),
        where=torch.from_numpy(where).to(device),
        targets=torch.from_numpy(ids[where]).to(device),
        rows=torch.from_numpy(np.nonzero(where)[0]).to(device),
        columns=columns,
    )
