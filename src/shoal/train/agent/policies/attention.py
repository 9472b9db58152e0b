"""Attention in rows of several samples, block by block: what else is in the row costs next to nothing.

A mask would make all scores of a row and drop most: those between samples, and half of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Tokens below which parts of samples go together, through a small mask: each call costs about as much."""


class Part(NamedTuple):
    """Tokens of a sample that stand together in a row, from place `first` to before `end`."""

    first: int
    end: int
    before: list[tuple[int, int]]
    """The pieces of the row that it goes on from, likewise: each is the beginning of another part."""


class Block(NamedTuple):
    """Tokens of a row whose attention is computed together."""

    first: int
    size: int
    asked: int
    """How many of them are queries."""
    keys: list[tuple[int, int, int]]
    """What they see besides: slices of blocks before, by number."""
    mask: Tensor | None
    """`[asked, keys]` bool, own ones last; None: all queries, each sees what is before it in the block."""


class RowMask(Tensor):
    """Stands for a mask `[B, 1, Q, T]` where `scaled_dot_product_attention` is to go block by block.

    It holds no values. A network that reads some is found out by a trial.
    """

    blocks: list[list[Block]]
    """Of each row; what stands behind them is padding, which sees nothing and gets 0."""

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> RowMask:
        """The mask of rows of `lengths [B]`; `starts` as in a micro-batch, `[1 + 2 S, B, T]`."""
        rows = zip(starts.transpose(0, 1).tolist(), lengths.tolist(), strict=True)
        size = starts.shape[2]
        blocks = [list(_blocks(_parts(row, min(length, size)))) for row, length in rows]
        return cls._with(blocks, size, size)

    @classmethod
    def _with(cls, blocks: list[list[Block]], queries: int, keys: int) -> RowMask:
        made = torch.ones(1, dtype=torch.bool).expand(len(blocks), 1, queries, keys).as_subclass(cls)
        made.blocks = blocks
        return made

    def at(self, places: Tensor) -> RowMask:
        """For the queries at `places [B, K]` alone, each row up to where they no longer ascend."""
        blocks = []
        for row, each in zip(self.blocks, places.tolist(), strict=True):
            ascending = next((k for k in range(1, len(each)) if each[k] <= each[k - 1]), len(each))
            del each[ascending:]
            ends = [bisect_left(each, block.first + block.size) for block in row]
            blocks.append(
                [
                    _at(block, [place - block.first for place in each[begin:end]])
                    for block, begin, end in zip(row, [0, *ends], ends, strict=False)
                ]
            )
        return self._with(blocks, places.shape[1], self.shape[3])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            run = _attend if function is F.scaled_dot_product_attention else function
            return run(*args, **(kwargs or {}))


def _parts(row: Sequence[Sequence[int]], length: int) -> Iterator[Part]:
    starts, *spans = row
    first = 0
    while first < length:
        end = next((place for place in range(first, length) if starts[place] != first), length)
        pieces = zip(spans[::2], spans[1::2], strict=True)
        yield Part(first, end, [(begin[first], stop[first]) for begin, stop in pieces if stop[first]])
        first = end


def _blocks(parts: Iterator[Part]) -> Iterator[Block]:
    """Parts one behind the other, as many together as are fewer than `BLOCK` tokens."""
    firsts: list[int] = []  # of blocks
    together: list[Part] = []
    for part in parts:
        if together and part.end - together[0].first > BLOCK:
            yield _block(together, firsts)
            together = []
        together.append(part)
    if together:
        yield _block(together, firsts)


def _block(parts: list[Part], firsts: list[int]) -> Block:
    """One of these parts; `firsts` are where those before begin, to which it is added."""
    first, end = parts[0].first, parts[-1].end
    size = end - first
    seen = np.zeros(first, bool)
    for part in parts:
        for begin, stop in part.before:
            seen[begin:stop] = True
    edges = np.flatnonzero(np.diff(seen, prepend=False, append=False))
    keys = []
    for begin, stop in edges.reshape(-1, 2).tolist():
        number = bisect_left(firsts, begin + 1) - 1
        while begin < stop:
            until = min(stop, firsts[number + 1] if number + 1 < len(firsts) else first)
            keys.append((number, begin - firsts[number], until - firsts[number]))
            begin, number = until, number + 1
    firsts.append(first)
    if len(parts) == 1 and not keys:
        return Block(first, size, size, keys, None)
    places = np.concatenate([np.flatnonzero(seen), np.arange(first, end)])
    mask = np.zeros((size, len(places)), bool)
    for part in parts:
        own = mask[part.first - first : part.end - first]
        own[:] = (places >= part.first) & (places <= np.arange(part.first, part.end)[:, None])
        for begin, stop in part.before:
            own |= (places >= begin) & (places < stop)
    return Block(first, size, size, keys, torch.from_numpy(mask))


def _at(block: Block, places: list[int]) -> Block:
    """A block with these of its queries."""
    if block.mask is None:
        mask = torch.arange(block.size) <= torch.tensor(places)[:, None]
    else:
        mask = block.mask[places]
    return block._replace(asked=len(places), mask=mask)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: RowMask, is_causal: bool = False, **settings: Any
) -> Tensor:
    """`scaled_dot_product_attention` of `[B, heads, Q, width]`; the mask says what is causal."""
    rows = []
    for row, *all_of in zip(attn_mask.blocks, query, key, value, strict=True):
        asked, sizes = [block.asked for block in row], [block.size for block in row]
        queries, keys, values = (
            each[None].split([*counts, each.shape[1] - sum(counts)], 2)
            for each, counts in zip(all_of, (asked, sizes, sizes), strict=True)
        )
        found = []
        for own, block in enumerate(row):
            if not block.asked:
                continue
            own_keys, own_values = (
                torch.cat([*(each[n][:, :, begin:end] for n, begin, end in block.keys), each[own]], 2)
                for each in (keys, values)
            )
            allowed = {"is_causal": True} if block.mask is None else {"attn_mask": block.mask}
            found.append(
                F.scaled_dot_product_attention(queries[own], own_keys, own_values, **allowed, **settings)
            )
        rows.append(torch.cat([*found, torch.zeros_like(queries[-1])], 2))
    return torch.cat(rows)
