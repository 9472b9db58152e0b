"""Which samples go through the network together: rows and micro-batches of them, by their lengths alone.

A plan decides speed and memory, never results: attention stays within a sample, and every token's weight in the
loss is fixed before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

Batching = Literal["auto", "padded", "bucketed", "packed"]
Row = list[int]
"""The samples of one row, by number."""
LONG_ROW = 400
"""Width at which attention, which grows with its square, costs as much as all the rest (`auto` weighs by it)."""
BATCH_COST = 256
"""What starting a micro-batch costs, in tokens."""
ENOUGH = 1024
"""Tokens from which on a micro-batch of rows of like length ends rather than take on more padding."""


def plan_batches(lengths: Sequence[int], max_tokens: int, batching: Batching) -> list[list[Row]]:
    """Micro-batches of rows of samples; each sample is in exactly one.

    Args:
        lengths: tokens of each sample.
        max_tokens: of a micro-batch, padding included; a sample that is longer is alone in its micro-batch.
        batching: `padded` takes one sample a row in the given order, `bucketed` one a row with rows of like
            length together, `packed` as many a row as fit into the length of the longest; `auto` is the cheaper
            one of the latter two, see `cost`.
    """
    if not lengths:
        return []
    if batching == "padded":
        return _cut([[i] for i in range(len(lengths))], lengths, max_tokens)
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
    plans = []
    if batching != "packed":
        plans.append(_cut([[i] for i in by_length], lengths, max_tokens, padding=0.1))
    if batching != "bucketed":
        plans.append(_cut(_fill_rows(by_length[::-1], lengths), lengths, max_tokens))
    return min(plans, key=lambda plan: cost(plan, lengths))


def cost(plan: Sequence[Sequence[Row]], lengths: Sequence[int]) -> float:
    """About how long a plan takes, in tokens of short rows."""
    total = 0.0
    for batch in plan:
        width = max(_filled(row, lengths) for row in batch)
        total += len(batch) * row_cost(width) + BATCH_COST
    return total


def row_cost(width: int) -> float:
    """About how long a row of `width` tokens takes, in tokens of short rows."""
    return width * (1 + width / LONG_ROW)


def cells(plan: Sequence[Sequence[Row]], lengths: Sequence[int]) -> int:
    """Tokens that go through the network under a plan, padding included.

    >>> cells([[[0], [1]], [[2]]], [3, 5, 4])
    14
    """
    return sum(len(batch) * max(_filled(row, lengths) for row in batch) for batch in plan)


def _filled(row: Row, lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in row)


def _fill_rows(order: Sequence[int], lengths: Sequence[int]) -> list[Row]:
    """Best-fit decreasing: each sample goes to the fullest row that has room for it."""
    capacity = lengths[order[0]]
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # what is left in each row, ascending, with its number
    for i in order:
        place = bisect_left(room, (lengths[i], -1))
        if place == len(room):
            rows.append([i])
            insort(room, (capacity - lengths[i], len(rows) - 1))
        else:
            left, number = room.pop(place)
            rows[number].append(i)
            insort(room, (left - lengths[i], number))
    return rows


def _cut(
    rows: Sequence[Row], lengths: Sequence[int], max_tokens: int, padding: float = 1.0
) -> list[list[Row]]:
    """Rows in order, as many at once as `max_tokens` and, beyond `ENOUGH` tokens, a share of `padding` allow."""
    batches: list[list[Row]] = []
    widest = filled = 0
    for row in rows:
        length = _filled(row, lengths)
        widest, filled = max(widest, length), filled + length
        size = (len(batches[-1]) + 1) * widest if batches else 0
        if batches and size <= max_tokens and (filled - length < ENOUGH or size - filled <= padding * size):
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = filled = length
    return batches
