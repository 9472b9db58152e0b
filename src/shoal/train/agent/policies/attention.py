"""Attention in rows of several samples, one part of a sample after another: what else is in the row costs nothing.

A mask would make all scores of a row and drop most: those between samples, and half of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Part(NamedTuple):
    """Tokens of a sample that stand together in a row, from place `first` to before `end`."""

    first: int
    end: int
    before: list[tuple[int, int]]
    """What it goes on from: parts of the row by number, and how many of their first tokens."""


class RowMask(Tensor):
    """Which tokens see which, `[B, 1, T, T]` bool, for `scaled_dot_product_attention` in parts.

    Any other function takes it as the plain mask that it is.
    """

    parts: list[list[Part]]
    """Of each row; what stands behind them is padding, which sees nothing and gets 0."""
    used = False
    """Whether attention in parts has met it."""

    @classmethod
    def of(cls, mask: Tensor, starts: Tensor, lengths: Tensor) -> RowMask:
        """This mask of rows of `lengths [B]`; `starts` as in a micro-batch, `[1 + 2 S, B, T]`."""
        made = mask.as_subclass(cls)
        rows = zip(starts.transpose(0, 1).tolist(), lengths.tolist(), strict=True)
        made.parts = [_parts(row, min(length, mask.shape[-1])) for row, length in rows]
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            run = _attend if function is F.scaled_dot_product_attention else function
            return run(*args, **(kwargs or {}))


def _parts(row: Sequence[Sequence[int]], length: int) -> list[Part]:
    starts, *spans = row
    parts: list[Part] = []
    numbers: dict[int, int] = {}  # of parts, by their first place
    first = 0
    while first < length:
        end = next((place for place in range(first, length) if starts[place] != first), length)
        pieces = zip(spans[::2], spans[1::2], strict=True)
        before = [
            (numbers[begin[first]], stop[first] - begin[first]) for begin, stop in pieces if stop[first]
        ]
        numbers[first] = len(parts)
        parts.append(Part(first, end, before))
        first = end
    return parts


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: RowMask, is_causal: bool = False, **settings: Any
) -> Tensor:
    """`scaled_dot_product_attention` of `[B, heads, T, width]`; the mask says what is causal."""
    attn_mask.used = True
    rows = []
    for row, *all_of in zip(attn_mask.parts, query, key, value, strict=True):
        sizes = [part.end - part.first for part in row]
        sizes.append(query.shape[2] - sum(sizes))
        queries, keys, values = (each[None].split(sizes, 2) for each in all_of)
        found = []
        for own, part in enumerate(row):
            read, seen = (
                torch.cat([*(each[number][:, :, :count] for number, count in part.before), each[own]], 2)
                for each in (keys, values)
            )
            allowed: dict[str, Any] = {"is_causal": True}
            if part.before:
                width = read.shape[2]
                mask = torch.ones(sizes[own], width, dtype=torch.bool, device=query.device)
                allowed = {"attn_mask": mask.tril(width - sizes[own])}
            found.append(F.scaled_dot_product_attention(queries[own], read, seen, **allowed, **settings))
        found.append(torch.zeros_like(queries[-1]))
        rows.append(torch.cat(found, 2))
    return torch.cat(rows)
