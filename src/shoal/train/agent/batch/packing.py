"""Samples in rows: micro-batches that go through a network at once.

How samples share rows decides speed and memory, never results: attention stays within a sample, and every token's
weight in the loss is fixed before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.train.agent.batch.samples import Column, Floats, Sample, split_tokens

Batching = Literal["packed", "padded"]
ROW = 512
"""Tokens of a row of several samples, unless one sample is longer: attention grows with the square of a row."""
WORTH = 0.75
"""Share of the tokens below which prefixes are shared: rows with them need a mask, which costs time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples, by number, that share their first `prefix` tokens; a sample of its own has no prefix."""

    members: tuple[int, ...]
    prefix: int = 0


Row = list[Piece]
"""What stands behind each other in one row."""


def plan_rows(
    ids: Sequence[Sequence[int]], firsts: Sequence[int], max_tokens: int, batching: Batching, prefixes: bool
) -> list[list[Row]]:
    """Micro-batches of rows of pieces; each sample is in exactly one piece.

    Args:
        ids: the tokens of each sample.
        firsts: where the first trained token of each sample stands.
        max_tokens: of a micro-batch, padding included; a piece that is longer is alone in its micro-batch.
        batching: `padded` takes one sample a row, rows of like length together; `packed` as many a row as fit into
            the length of the longest piece.
        prefixes: whether the network can read samples that go on from what they share. They are shared where `packed`
            saves a quarter of the tokens by it.
    """
    lengths = [len(sample) for sample in ids]
    alone = [Piece((i,)) for i in range(len(ids))]
    if batching == "padded":
        by_length = sorted(alone, key=lambda piece: lengths[piece.members[0]])
        return _cut([[piece] for piece in by_length], lengths, max_tokens)
    pieces = share_prefixes(ids, firsts, max_tokens) if prefixes else alone
    if sum(length_of(piece, lengths) for piece in pieces) > WORTH * sum(lengths):
        pieces = alone
    return _cut(_fill_rows(pieces, lengths), lengths, max_tokens)


def share_prefixes(ids: Sequence[Sequence[int]], firsts: Sequence[int], max_tokens: int) -> list[Piece]:
    """Pieces of neighbours in the order of the tokens that have half of their tokens in common, or more."""
    lengths = [len(sample) for sample in ids]
    most = min(max_tokens, max(ROW, *lengths)) if lengths else 0
    pieces: list[Piece] = []
    for i in sorted(range(len(ids)), key=lambda i: tuple(ids[i])):
        if pieces:
            last = pieces[-1]
            joined = Piece((*last.members, i), _prefix(last, i, ids, firsts))
            half = 2 * joined.prefix >= max(lengths[member] for member in joined.members)
            if joined.prefix and half and length_of(joined, lengths) <= most:
                pieces[-1] = joined
                continue
        pieces.append(Piece((i,)))
    return pieces


def length_of(piece: Piece, lengths: Sequence[int]) -> int:
    """Tokens that go through the network for a piece.

    >>> length_of(Piece((0, 2), prefix=3), [5, 9, 4])
    6
    """
    return piece.prefix + sum(lengths[i] - piece.prefix for i in piece.members)


def _prefix(piece: Piece, i: int, ids: Sequence[Sequence[int]], firsts: Sequence[int]) -> int:
    """How many tokens `i` has in common with a piece, up to the token before its first trained one.

    That token stands in the branch itself, because what it predicts must stand behind it in the row.
    """
    first = piece.members[0]
    known = piece.prefix if len(piece.members) > 1 else firsts[first] - 1
    limit = max(0, min(known, firsts[i] - 1))
    ours, theirs = ids[i], ids[first]
    if ours[:limit] == theirs[:limit]:
        return limit
    return next(place for place in range(limit) if ours[place] != theirs[place])


def _fill_rows(pieces: Sequence[Piece], lengths: Sequence[int]) -> list[Row]:
    """Best-fit decreasing: each piece goes to the fullest row that has room for it."""
    order = sorted(pieces, key=lambda piece: -length_of(piece, lengths))
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # what is left in each row, ascending, with its number
    for piece in order:
        length = length_of(piece, lengths)
        place = bisect_left(room, (length, -1))
        if place == len(room):
            rows.append([piece])
            insort(room, (length_of(order[0], lengths) - length, len(rows) - 1))
        else:
            left, number = room.pop(place)
            rows[number].append(piece)
            insort(room, (left - length, number))
    return rows


def _cut(rows: Sequence[Row], lengths: Sequence[int], max_tokens: int) -> list[list[Row]]:
    """Rows in order, as many at once as `max_tokens` allow, padding included."""
    batches: list[list[Row]] = []
    widest = 0
    for row in rows:
        length = sum(length_of(piece, lengths) for piece in row)
        widest = max(widest, length)
        if batches and (len(batches[-1]) + 1) * widest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = length
    return batches


Plan = list[Row]  # what goes into the rows of a micro-batch


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
    """Where the sample of each token begins, `[B, T]` int64; None: each row is one sample. With prefixes `[3, B, T]`:
    where the branch of each token begins, and the first place and end of the prefix that it continues (equal: none)."""
    inputs: Mapping[str, Tensor] | None = None
    """What the network reads besides, where samples have positions of their own: `position_ids [rows, B, T]` (`[B, T]`
    of one row) and what it knows of images."""

    @property
    def read(self) -> tuple[Any, ...]:
        """What `Policy.logits` takes."""
        rest = () if self.inputs is None else (self.inputs,)
        return (self.ids, self.lengths, self.where, self.begins, *rest)


def micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "padded",
    prefixes: bool = False,
) -> Iterator[MicroBatch]:
    """Samples in rows, see `plan_rows`; each batch at most `max_tokens` with padding (or one piece)."""
    for plan in _plan(samples, max_tokens, batching, prefixes):
        yield _fill(plan, samples, pad, device)


def _plan(samples: Sequence[Sample], max_tokens: int, batching: Batching, prefixes: bool) -> list[Plan]:
    plain = all(sample.positions is None for sample in samples)  # else ids do not say all
    firsts = [int(sample.places[0]) for sample in samples]
    return plan_rows([sample.ids for sample in samples], firsts, max_tokens, batching, prefixes and plain)


def token_values(
    samples: Sequence[Sample],
    compute: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    pad: int,
    device: str,
    batching: Batching = "padded",
    prefixes: bool = False,
    in_step: Callable[[list[Plan]], Iterable[Plan | None]] = list,
    idle: Sample | None = None,
) -> list[Floats]:
    """`compute` over all samples without gradients: per sample one number a trained token.

    Where `in_step` gives None (see `Processes.in_step`), the pass is one over `idle`, and its result is dropped.
    """
    found: list[Floats] = [np.empty(0, dtype=np.float32)] * len(samples)
    with torch.no_grad():
        for plan in in_step(_plan(samples, max_tokens, batching, prefixes)):
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


def _fill(rows: Plan, samples: Sequence[Sample], pad: int, device: str) -> MicroBatch:
    """Lay pieces out behind each other in their rows: prefixes, and behind each its branches."""
    sizes = [len(sample.ids) for sample in samples]
    lengths = [sum(length_of(piece, sizes) for piece in row) for row in rows]
    ids = np.full((len(rows), max(lengths)), pad, dtype=np.int64)
    begins = np.tile(np.arange(max(lengths)), (len(rows), 1))  # padding sees itself alone
    prefixes = np.zeros((2, *ids.shape), dtype=np.int64)
    where = np.zeros(ids.shape, dtype=bool)
    members: list[Sample] = []
    for place, row in enumerate(rows):
        end = 0
        for piece in row:
            prefix, first = end, end + piece.prefix
            ids[place, prefix:first] = samples[piece.members[0]].ids[: piece.prefix]
            begins[place, prefix:first] = prefix
            end = first
            for sample in (samples[i] for i in piece.members):
                first, end = end, end + len(sample.ids) - piece.prefix
                ids[place, first:end] = sample.ids[piece.prefix :]
                begins[place, first:end] = first
                prefixes[0, place, first:end], prefixes[1, place, first:end] = prefix, prefix + piece.prefix
                where[place, first - piece.prefix + sample.places] = True
                members.append(sample)
    columns = {
        name: torch.from_numpy(np.concatenate([sample.columns[name] for sample in members])).to(device)
        for name in members[0].columns
    }
    tokens = [len(sample.places) for sample in members]
    if (prefixes[1] > prefixes[0]).any():
        begins = np.concatenate([begins[None], prefixes])
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.tensor(lengths, device=device),
        where=torch.from_numpy(where).to(device),
        targets=torch.from_numpy(ids[where]).to(device),
        samples=torch.from_numpy(np.repeat(np.arange(len(members)), tokens)).to(device),
        columns=columns,
        begins=torch.from_numpy(begins).to(device) if len(members) > len(rows) else None,
        inputs=None if members[0].positions is None else _inputs(rows, samples, max(lengths), device),
    )


def _inputs(rows: Plan, samples: Sequence[Sample], width: int, device: str) -> dict[str, Tensor]:
    """Positions of samples in rows, and what belongs to their images, in the same order."""
    placed = [[samples[i] for piece in row for i in piece.members] for row in rows]
    positions = []
    for row in placed:
        joined = np.concatenate([sample.positions for sample in row if sample.positions is not None], axis=1)
        positions.append(np.pad(joined, ((0, 0), (0, width - joined.shape[1]))))
    laid = np.stack(positions, axis=1)
    found = {"position_ids": torch.from_numpy(laid if len(laid) > 1 else laid[0]).to(device)}
    every = [sample.inputs for row in placed for sample in row]
    for name in dict.fromkeys(name for inputs in every for name in inputs):
        found[name] = torch.cat([inputs[name] for inputs in every if name in inputs]).to(device)
    return found
