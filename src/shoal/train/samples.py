"""From trajectories to what a gradient step sees: samples of tokens, and padded micro-batches of them.

A sample is a stretch of context in which every prompt extends the tokens before it: one turn in `window` mode,
a whole episode in `append` mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.data import Trajectory


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that the model wrote in one turn, and what they are worth."""

    start: int  # place of the first of them in the sample
    logprobs: tuple[float, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Context and responses as one row of tokens."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def n_trained(self) -> int:
        """Tokens that carry loss."""
        return sum(len(span.logprobs) for span in self.spans)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length `T`; `N` tokens of it carry loss, in row-major order."""

    ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    where: Tensor  # [B, T] bool, N of them true
    targets: Tensor  # [N] int64
    old_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32


def make_samples(trajectory: Trajectory, advantages: Sequence[float]) -> list[Sample]:
    """The samples of a trajectory.

    Args:
        trajectory: with token ids in every turn.
        advantages: one a turn, for all tokens of its response.
    """
    samples: list[Sample] = []
    ids: tuple[int, ...] = ()
    spans: list[Span] = []
    for turn, advantage in zip(trajectory.turns, advantages, strict=True):
        if spans and turn.prompt_ids[: len(ids)] != ids:
            samples.append(Sample(ids, tuple(spans)))
            spans = []
        spans.append(Span(len(turn.prompt_ids), turn.logprobs, float(advantage)))
        ids = turn.prompt_ids + turn.response_ids
    if spans:
        samples.append(Sample(ids, tuple(spans)))
    return samples


def micro_batches(samples: Sequence[Sample], max_tokens: int, pad: int, device: str) -> Iterator[MicroBatch]:
    """Rows of like length together, each batch at most `max_tokens` with padding (or one row)."""
    rows: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if rows and (len(rows) + 1) * len(sample.ids) > max_tokens:
            yield _pad(rows, pad, device)
            rows = []
        rows.append(sample)
    if rows:
        yield _pad(rows, pad, device)


def _pad(rows: Sequence[Sample], pad: int, device: str) -> MicroBatch:
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), longest), pad, dtype=np.int64)
    where = np.zeros((len(rows), longest), dtype=bool)
    old: list[float] = []
    advantages: list[float] = []
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        for span in row.spans:
            where[place, span.start : span.start + len(span.logprobs)] = True
            old += span.logprobs
            advantages += [span.advantage] * len(span.logprobs)
    lengths = [len(row.ids) for row in rows]
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.tensor(lengths, device=device),
        where=torch.from_numpy(where).to(device),
        targets=torch.from_numpy(ids[where]).to(device),
        old_logprobs=torch.tensor(old, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
    )
