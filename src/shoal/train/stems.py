"""Samples that begin alike, such as the members of a group, share what they begin with: it is computed once.

A stem and the branches that continue it stand in one row; each branch sees the stem and itself. Results are those of
the samples on their own, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.train.packing import Batching, cost, plan_batches, row_cost

WORTH = 0.9
"""Share of the cost below which stems are used: they need a mask, which attention without them does not."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples, by number, that share their first `stem` tokens; a sample of its own has no stem."""

    members: tuple[int, ...]
    stem: int = 0


PieceRow = list[Piece]


def plan_pieces(
    ids: Sequence[Sequence[int]], firsts: Sequence[int], max_tokens: int, batching: Batching, stems: bool
) -> list[list[PieceRow]]:
    """Micro-batches of rows of pieces; each sample is in exactly one piece.

    Args:
        ids: the tokens of each sample.
        firsts: where the first trained token of each sample stands.
        max_tokens: of a micro-batch, see `plan_batches`.
        batching: see `plan_batches`.
        stems: whether the network can read them. They are used where `batching` is `auto` and they save time.
    """
    alone = [Piece((i,)) for i in range(len(ids))]
    lengths = [len(sample) for sample in ids]
    plan = plan_batches(lengths, max_tokens, batching)
    pieces = alone
    if stems and batching == "auto":
        shared = share_stems(ids, firsts, max_tokens)
        shared_lengths = [length_of(piece, lengths) for piece in shared]
        shared_plan = plan_batches(shared_lengths, max_tokens, batching)
        if cost(shared_plan, shared_lengths) < WORTH * cost(plan, lengths):
            plan, pieces = shared_plan, shared
    return [[[pieces[i] for i in row] for row in batch] for batch in plan]


def share_stems(ids: Sequence[Sequence[int]], firsts: Sequence[int], max_tokens: int) -> list[Piece]:
    """Pieces that together cost less than their samples, found among neighbours in the order of the tokens."""
    lengths = [len(sample) for sample in ids]
    pieces: list[Piece] = []
    for i in sorted(range(len(ids)), key=lambda i: tuple(ids[i])):
        if pieces:
            last = pieces[-1]
            joined = Piece((*last.members, i), _stem(last, i, ids, firsts))
            together = length_of(joined, lengths)
            apart = row_cost(length_of(last, lengths)) + row_cost(lengths[i])
            if joined.stem and together <= max_tokens and row_cost(together) < apart:
                pieces[-1] = joined
                continue
        pieces.append(Piece((i,)))
    return pieces


def length_of(piece: Piece, lengths: Sequence[int]) -> int:
    """Tokens that go through the network for a piece.

    >>> length_of(Piece((0, 2), stem=3), [5, 9, 4])
    6
    """
    return piece.stem + sum(lengths[i] - piece.stem for i in piece.members)


def _stem(piece: Piece, i: int, ids: Sequence[Sequence[int]], firsts: Sequence[int]) -> int:
    """How many tokens `i` has in common with a piece, up to the token before its first trained one.

    That token stands in the branch itself, because what it predicts must stand behind it in the row.
    """
    first = piece.members[0]
    known = piece.stem if len(piece.members) > 1 else firsts[first] - 1
    limit = max(0, min(known, firsts[i] - 1))
    ours, theirs = ids[i], ids[first]
    if ours[:limit] == theirs[:limit]:
        return limit
    return next(place for place in range(limit) if ours[place] != theirs[place])
