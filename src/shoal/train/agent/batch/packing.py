"""Samples in rows: micro-batches that go through a network at once.

How samples share rows decides speed and memory, never results: attention stays within a sample, and every token's
weight in the loss is fixed before. The last token of a sample is predicted and not read, and what samples begin with
is read once: equal prompts with one token of answer each are one prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.train.agent.batch.samples import Column, Floats, Sample, split_tokens

Batching = Literal["packed", "padded"]
SPANS = 3
"""Pieces of a row that a sample may go on from, one behind the other."""


class Sharing(NamedTuple):
    """When samples of a row go on from what they share."""

    row: float  # most tokens of a row of several samples, unless one sample is longer
    worth: float  # share of the tokens below which it is done


BY_MASK = Sharing(512, 0.75)
"""Attention makes all scores of a row: it grows with the square of a row, and a mask costs time."""
BY_BLOCKS = Sharing(float("inf"), 1.0)
"""Attention looks at no other sample."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples, by number, of which each but the first goes on from tokens of the one before, or of some before that."""

    members: tuple[int, ...]
    shared: tuple[int, ...] = (0,)
    """How many of its first tokens each member has in common with the one before, and leaves out."""


Row = list[Segment]
"""What stands behind each other in one row; a list of rows is a micro-batch."""


def plan_rows(
    ids: Sequence[Sequence[int]],
    max_tokens: int,
    batching: Batching,
    sharing: Sharing | None,
) -> list[list[Row]]:
    """Micro-batches of rows of segments; each sample is in exactly one segment.

    Args:
        ids: the tokens of each sample that are read.
        max_tokens: of a micro-batch, padding included; a segment that is longer is alone in its micro-batch.
        batching: `padded` takes one sample a row, rows of like length together; `packed` as many a row as fit into
            the length of the longest segment.
        sharing: when `packed` samples go on from what they share; None: the network cannot read such rows.
    """
    lengths = [len(sample) for sample in ids]
    alone = [Segment((i,)) for i in range(len(ids))]
    if batching == "padded":
        by_length = sorted(alone, key=lambda segment: lengths[segment.members[0]])
        return _cut([[segment] for segment in by_length], lengths, max_tokens)
    plain = _fill_rows(alone, lengths)
    if sharing is None or len(ids) < 2:
        return _cut(plain, lengths, max_tokens)
    most = min(max_tokens, max(sharing.row, *lengths))
    segments = share_prefixes(ids, most)
    shared = _fill_rows(segments, lengths)
    if len(shared) > 1:  # as many rows, of like length
        joined = [s for s in segments if len(s.members) > 1]
        own = [lengths[i] - n for s in joined for i, n in zip(s.members[1:], s.shared[1:], strict=True)]
        even = -(-_tokens(shared, lengths) // len(shared)) + max(own, default=0)
        segments = share_prefixes(ids, min(most, even))
        shared = min(shared, _fill_rows(segments, lengths), key=partial(_padded, lengths))
    pays = _tokens(shared, lengths) <= sharing.worth * sum(lengths)
    return _cut(shared if pays else plain, lengths, max_tokens)


def share_prefixes(ids: Sequence[Sequence[int]], most: float) -> list[Segment]:
    """Neighbours in the order of the tokens that go on from each other, at most so many tokens together.

    A sample shares a quarter of its tokens or more; an equal one shares all.
    """
    segments: list[Segment] = []
    spans: list[int] = []  # tokens of the last sample at which it leaves the one before
    length = 0
    last: Sequence[int] = ()
    for i in sorted(range(len(ids)), key=lambda i: tuple(ids[i])):
        own = ids[i]
        common = _common(last, own)
        path = [place for place in spans if place < common]
        if common < len(own):
            path.append(common)
            if len(path) > SPANS:
                common, path = path[SPANS - 1], path[:SPANS]
        if segments and common and 4 * common >= len(own) and length + len(own) - common <= most:
            segments[-1] = Segment((*segments[-1].members, i), (*segments[-1].shared, common))
            length += len(own) - common
        else:
            segments.append(Segment((i,)))
            path, length = [], len(own)
        spans, last = path, own
    return segments


def length_of(segment: Segment, lengths: Sequence[int]) -> int:
    """Tokens that go through the network for a segment.

    >>> length_of(Segment((0, 2), (0, 3)), [5, 9, 4])
    6
    """
    return sum(lengths[i] for i in segment.members) - sum(segment.shared)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two samples begin with alike."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(place for place in range(limit) if one[place] != other[place])


def _tokens(rows: Sequence[Row], lengths: Sequence[int]) -> int:
    """Tokens of rows without their padding."""
    return sum(length_of(segment, lengths) for row in rows for segment in row)


def _padded(lengths: Sequence[int], rows: Sequence[Row]) -> int:
    """Tokens of rows that are padded to one length."""
    return len(rows) * max(_tokens([row], lengths) for row in rows)


def _fill_rows(segments: Sequence[Segment], lengths: Sequence[int]) -> list[Row]:
    """Best-fit decreasing: each segment goes to the fullest row that has room for it."""
    order = sorted(segments, key=lambda segment: -length_of(segment, lengths))
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # what is left in each row, ascending, with its number
    for segment in order:
        length = length_of(segment, lengths)
        place = bisect_left(room, (length, -1))
        if place == len(room):
            rows.append([segment])
            insort(room, (length_of(order[0], lengths) - length, len(rows) - 1))
        else:
            left, number = room.pop(place)
            rows[number].append(segment)
            insort(room, (left - length, number))
    return rows


def _cut(rows: Sequence[Row], lengths: Sequence[int], max_tokens: int) -> list[list[Row]]:
    """Rows in order, as many at once as `max_tokens` allow, padding included."""
    batches: list[list[Row]] = []
    widest = 0
    for row in rows:
        length = sum(length_of(segment, lengths) for segment in row)
        widest = max(widest, length)
        if batches and (len(batches[-1]) + 1) * widest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = length
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length `T`, by one at least; `N` tokens are trained, each at the place before."""

    ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64, without the padding
    where: Tensor  # [B, T] bool, true behind each place that predicts trained tokens
    targets: Tensor  # [N] int64
    samples: Tensor  # [N] int64, which sample each trained token is of
    columns: Mapping[Column, Tensor]  # [N] float32 each
    places: Tensor | None = None
    """Which of the true places of `where` each trained token has, `[N]` int64, ascending; None: each one of its own."""
    starts: Tensor | None = None
    """Where the sample of each token starts, `[B, T]` int64; None: each row is one sample. With prefixes
    `[1 + 2 S, B, T]`: where the branch of each token starts, and the first place and end of each of the up to S pieces
    of the row, beginnings of other branches, that it goes on from (both 0: none)."""
    inputs: Mapping[str, Tensor] | None = None
    """What the network reads besides, where samples have positions of their own: `position_ids [rows, B, T]` (`[B, T]`
    of one row) and what it knows of images."""

    def by_token(self, values: Tensor) -> Tensor:
        """`[N]` values of the trained tokens, of those of places."""
        return values if self.places is None else values.gather(0, self.places)

    @property
    def read(self) -> tuple[Any, ...]:
        """What `Policy.logits` takes."""
        rest = () if self.inputs is None else (self.inputs,)
        return (self.ids, self.lengths, self.where, self.starts, *rest)


def micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "padded",
    sharing: Sharing | None = None,
) -> Iterator[MicroBatch]:
    """Samples in rows, see `plan_rows`; each batch at most `max_tokens` with padding (or one segment)."""
    for plan in _plan(samples, max_tokens, batching, sharing):
        yield _fill(plan, samples, pad, device)


def _plan(
    samples: Sequence[Sample], max_tokens: int, batching: Batching, sharing: Sharing | None
) -> list[list[Row]]:
    plain = all(sample.positions is None for sample in samples)  # else ids do not say all
    return plan_rows(
        [sample.ids[:-1] for sample in samples], max_tokens, batching, sharing if plain else None
    )


def token_values(
    samples: Sequence[Sample],
    compute: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "padded",
    sharing: Sharing | None = None,
    even_out: Callable[[list[list[Row]]], Iterable[list[Row] | None]] = list,
    idle: Sample | None = None,
) -> list[Floats]:
    """`compute` over all samples without gradients: per sample one number a trained token.

    Where `even_out` gives None (see `Processes.even_out`), the pass is one over `idle`, and its result is dropped.
    """
    found: list[Floats] = [np.empty(0, dtype=np.float32)] * len(samples)
    with torch.no_grad():
        for plan in even_out(_plan(samples, max_tokens, batching, sharing)):
            if plan is None:
                if idle is not None:
                    compute(_fill([[Segment((0,))]], [idle], pad, device))
                continue
            micro = _fill(plan, samples, pad, device)
            flat = compute(micro)[micro.samples.argsort(stable=True)]
            members = [i for row in plan for segment in row for i in segment.members]
            parts = split_tokens([samples[i] for i in members], flat.float().cpu().numpy())
            for i, part in zip(members, parts, strict=True):
                found[i] = part
    return found


def _fill(rows: list[Row], samples: Sequence[Sample], pad: int, device: str) -> MicroBatch:
    """Lay segments out behind each other in their rows; what a member shares stands with those before it."""
    sizes = [len(sample.ids) - 1 for sample in samples]
    lengths = [_tokens([row], sizes) for row in rows]
    width = max(lengths) + 1
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    starts = np.tile(np.arange(width), (len(rows), 1))  # padding sees itself alone
    pieces = np.zeros((SPANS, 2, *ids.shape), dtype=np.int64)
    members: list[Sample] = []
    predicting: list[NDArray[np.int64]] = []  # of each trained token, by number in the whole batch
    for place, row in enumerate(rows):
        end = 0
        for segment in row:
            path: list[tuple[int, int]] = []  # the pieces of the row that hold the sample before
            for number, common in zip(segment.members, segment.shared, strict=True):
                sample = samples[number]
                path = _first_tokens(path, common)
                first, end = end, end + sizes[number] - common
                ids[place, first:end] = sample.ids[common:-1]
                starts[place, first:end] = first
                for span, (begin, stop) in zip(pieces, path, strict=False):
                    span[0, place, first:end], span[1, place, first:end] = begin, stop
                if end > first:
                    path = [*path, (first, end)]
                reads = np.concatenate([np.arange(*piece) for piece in path])
                predicting.append(place * width + reads[sample.trained - 1])
                members.append(sample)
    at = np.concatenate(predicting)
    order = at.argsort(kind="stable")
    distinct, places = np.unique(at[order], return_inverse=True)
    where = np.zeros(ids.size, dtype=bool)
    where[distinct + 1] = True
    tokens = [len(sample.trained) for sample in members]

    def column(of_samples: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(of_samples)[order]).to(device)

    used = int((pieces[:, 1] > pieces[:, 0]).any((1, 2)).sum())
    if used:
        starts = np.concatenate([starts[None], *pieces[:used]])
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.tensor(lengths, device=device),
        where=torch.from_numpy(where.reshape(ids.shape)).to(device),
        targets=column([np.asarray(sample.ids)[sample.trained] for sample in members]),
        samples=column([np.repeat(np.arange(len(members)), tokens)]),
        columns={name: column([sample.columns[name] for sample in members]) for name in members[0].columns},
        places=torch.from_numpy(places).to(device) if len(distinct) < len(at) else None,
        starts=torch.from_numpy(starts).to(device) if len(members) > len(rows) else None,
        inputs=None if members[0].positions is None else _inputs(rows, samples, width, device),
    )


def _first_tokens(path: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The pieces of a row that hold the first tokens of a path."""
    found: list[tuple[int, int]] = []
    for begin, end in path:
        if count <= 0:
            break
        found.append((begin, min(end, begin + count)))
        count -= end - begin
    return found


def _inputs(rows: list[Row], samples: Sequence[Sample], width: int, device: str) -> dict[str, Tensor]:
    """Positions of samples in rows, and what belongs to their images, in the same order."""
    placed = [[samples[i] for segment in row for i in segment.members] for row in rows]
    positions = []
    for row in placed:
        read = [sample.positions[:, :-1] for sample in row if sample.positions is not None]
        joined = np.concatenate(read, axis=1)
        positions.append(np.pad(joined, ((0, 0), (0, width - joined.shape[1]))))
    laid = np.stack(positions, axis=1)
    found = {"position_ids": torch.from_numpy(laid if len(laid) > 1 else laid[0]).to(device)}
    every = [sample.inputs for row in placed for sample in row]
    for name in dict.fromkeys(name for inputs in every for name in inputs):
        found[name] = torch.cat([inputs[name] for inputs in every if name in inputs]).to(device)
    return found
