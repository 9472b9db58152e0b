"""From trajectories to what a gradient step sees: samples of tokens, and micro-batches of them.

A sample is a stretch of context in which every prompt extends the tokens before it: one turn in `window` mode,
a whole episode in `append` mode. What is known of its trained tokens stands in columns, one number a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.data import Trajectory
from shoal.train.packing import Batching
from shoal.train.stems import Piece, PieceRow, length_of, plan_pieces

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
Plan = list[PieceRow]  # what goes into the rows of a micro-batch


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
    lengths: Tensor  # [B] int64, without the padding
    where: Tensor  # [B, T] bool, N of them true
    targets: Tensor  # [N] int64
    samples: Tensor  # [N] int64, which sample each trained token is of
    columns: Mapping[Column, Tensor]  # [N] float32 each
    begins: Tensor | None = None
    """Where the sample of each token begins, `[B, T]` int64; None: each row is one sample. With stems `[3, B, T]`:
    where the branch of each token begins, and the first place and end of the stem that it continues (equal: none)."""


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


def micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "bucketed",
    stems: bool = False,
) -> Iterator[MicroBatch]:
    """Samples in rows, see `plan_pieces`; each batch at most `max_tokens` with padding (or one sample)."""
    for plan in _plan(samples, max_tokens, batching, stems):
        yield _fill(plan, samples, pad, device)


def _plan(samples: Sequence[Sample], max_tokens: int, batching: Batching, stems: bool) -> list[Plan]:
    firsts = [int(sample.places[0]) for sample in samples]
    return plan_pieces([sample.ids for sample in samples], firsts, max_tokens, batching, stems)


def token_values(
    samples: Sequence[Sample],
    compute: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "bucketed",
    stems: bool = False,
    in_step: Callable[[list[Plan]], Iterable[Plan | None]] = list,
    idle: Sample | None = None,
) -> list[Floats]:
    """`compute` over all samples without gradients: per sample one number a trained token.

    Where `in_step` gives None (see `Processes.in_step`), the pass is one over `idle`, and its result is dropped.
    """
    found: list[Floats] = [np.empty(0, dtype=np.float32)] * len(samples)
    with torch.no_grad():
        for plan in in_step(_plan(samples, max_tokens, batching, stems)):
            if plan is None:
                if idle is not None:
                    compute(_fill([[Piece((0,))]], [idle], pad, device))
                continue
            flat = compute(_fill(plan, samples, pad, device))
            members = [i for row in plan for piece in row for i in piece.members]
            parts = split_tokens([samples[i] for i in members], flat.float().cpu().numpy())
            for i, part in zip(members, parts, strict=True):
                found[i] = part
    return found


def _fill(rows: Sequence[PieceRow], samples: Sequence[Sample], pad: int, device: str) -> MicroBatch:
    """Lay pieces out behind each other in their rows: stems, and behind each its branches."""
    sizes = [len(sample.ids) for sample in samples]
    lengths = [sum(length_of(piece, sizes) for piece in row) for row in rows]
    ids = np.full((len(rows), max(lengths)), pad, dtype=np.int64)
    begins = np.tile(np.arange(max(lengths)), (len(rows), 1))  # padding sees itself alone
    stems = np.zeros((2, *ids.shape), dtype=np.int64)
    where = np.zeros(ids.shape, dtype=bool)
    members: list[Sample] = []
    for place, row in enumerate(rows):
        end = 0
        for piece in row:
            stem, first = end, end + piece.stem
            ids[place, stem:first] = samples[piece.members[0]].ids[: piece.stem]
            begins[place, stem:first] = stem
            end = first
            for sample in (samples[i] for i in piece.members):
                first, end = end, end + len(sample.ids) - piece.stem
                ids[place, first:end] = sample.ids[piece.stem :]
                begins[place, first:end] = first
                stems[0, place, first:end], stems[1, place, first:end] = stem, stem + piece.stem
                where[place, first - piece.stem + sample.places] = True
                members.append(sample)
    columns = {
        name: torch.from_numpy(np.concatenate([sample.columns[name] for sample in members])).to(device)
        for name in members[0].columns
    }
    trained = [len(sample.places) for sample in members]
    if (stems[1] > stems[0]).any():
        begins = np.concatenate([begins[None], stems])
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.tensor(lengths, device=device),
        where=torch.from_numpy(where).to(device),
        targets=torch.from_numpy(ids[where]).to(device),
        samples=torch.from_numpy(np.repeat(np.arange(len(members)), trained)).to(device),
        columns=columns,
        begins=torch.from_numpy(begins).to(device) if len(members) > len(rows) else None,
    )
