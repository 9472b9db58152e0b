"""Keys and values of a model of `transformers`: those of a batch in the making, and those that are kept for later.

`PrefixStore` keeps what a model has computed until its weights change; a `RoomyLayer` has room for the tokens of an
answer, so that a step writes one token and copies nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from shoal.samplers.tokenizers import first_difference

Context = tuple[int, ...]
"""The tokens of a prompt and of its answer so far."""
MIN_SHARED = 8
"""Tokens below which starting from an entry saves nothing."""
SPARE = 16
"""Tokens that keys and values have room for before they are copied to a larger place."""
MOST_SCORES = 2**26
"""Numbers that are kept of what follows contexts: 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of a layer `[heads, tokens, width]` each, for the tokens of one context."""

    tokens: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    def cropped(self, length: int) -> Prefix:
        """Its first tokens (views of the same memory)."""
        layers = tuple((key[:, :length], value[:, :length]) for key, value in self.layers)
        return Prefix(self.tokens[:length], layers)


class PrefixStore:
    """What a model has computed, kept until its weights change: keys and values of contexts, and the scores after them.

    A context is found by its tokens, whichever episode they are of: that of an append prompt goes on from the turn
    before, that of a window prompt from whatever begins alike. Keys and values are the most recently used, up to a
    number of tokens, and scores the last computed, up to `MOST_SCORES`.

    Args:
        max_tokens: over all entries; 0 keeps nothing, scores neither.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"prefix_tokens must be at least 0, got {max_tokens}")
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[Context, Prefix] = OrderedDict()
        self._sorted: list[Context] = []  # those that begin most alike are neighbours
        self._scores: dict[Context, tuple[Tensor, int]] = {}  # what was computed together, and its row
        self._blocks: deque[tuple[Sequence[Context], Tensor]] = deque()  # oldest first
        self._kept_scores = 0
        self._weights: Any = None

    def valid_for(self, weights: Any) -> None:
        """Forget everything unless it was computed with these weights (any value that changes with them)."""
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._sorted.clear()
        self._scores.clear()
        self._blocks.clear()
        self.tokens = self._kept_scores = 0

    def find(self, context: Context) -> Prefix | None:
        """What is known of the beginning of `context`, at most all of it but the last token."""
        at = bisect_left(self._sorted, context)
        near = self._sorted[max(at - 1, 0) : at + 1]
        shared, entry = max(((first_difference(tokens, context), tokens) for tokens in near), default=(0, ()))
        shared = min(shared, len(context) - 1)
        if shared < MIN_SHARED:
            return None
        self._entries.move_to_end(entry)
        return self._entries[entry].cropped(shared)

    def keep(self, prefix: Prefix) -> None:
        """Keep a context, in the place of one that it begins with."""
        tokens = prefix.tokens
        at = bisect_left(self._sorted, tokens)
        if at < len(self._sorted) and self._sorted[at][: len(tokens)] == tokens:
            return self._entries.move_to_end(self._sorted[at])  # it is known, with more behind it
        if len(tokens) > self.max_tokens:
            return
        if at and self._sorted[at - 1] == tokens[: len(self._sorted[at - 1])]:
            self._drop(self._sorted[at - 1])
        self._sorted.insert(bisect_left(self._sorted, tokens), tokens)
        self._entries[tokens] = prefix
        self.tokens += len(tokens)
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, tokens: Context) -> None:
        del self._entries[tokens]
        del self._sorted[bisect_left(self._sorted, tokens)]
        self.tokens -= len(tokens)

    def scores(self, context: Context) -> Tensor | None:
        """`[V]` of the token after a context, if they are known."""
        block, row = self._scores.get(context, (None, 0))
        return None if block is None else block[row]

    def remember(self, contexts: Sequence[Context], scores: Tensor) -> None:
        """Keep the scores `[B, V]` of the token after each context."""
        if not self.max_tokens:
            return
        self._blocks.append((contexts, scores))
        self._scores.update((context, (scores, row)) for row, context in enumerate(contexts))
        self._kept_scores += scores.numel()
        while self._kept_scores > MOST_SCORES:
            contexts, scores = self._blocks.popleft()
            self._kept_scores -= scores.numel()
            for context in contexts:
                if context in self._scores and self._scores[context][0] is scores:
                    del self._scores[context]


def fill_cache(cache: Any, prefixes: Sequence[Prefix | None]) -> Tensor:
    """Put the prefixes of a batch into an empty cache, padded on the left; the mask `[B, P]` of what is real."""
    known = [prefix for prefix in prefixes if prefix is not None]
    longest = max(len(prefix.tokens) for prefix in known)
    sample = known[0].layers[0][0]
    mask = torch.zeros(len(prefixes), longest, dtype=torch.int64, device=sample.device)
    for row, prefix in enumerate(prefixes):
        if prefix is not None:
            mask[row, longest - len(prefix.tokens) :] = 1
    for layer in range(len(known[0].layers)):
        pair = []
        for side in (0, 1):
            heads, _, width = known[0].layers[layer][side].shape
            whole = sample.new_zeros(len(prefixes), heads, longest, width)
            for row, prefix in enumerate(prefixes):
                if prefix is not None:
                    whole[row, :, longest - len(prefix.tokens) :] = prefix.layers[layer][side]
            pair.append(whole)
        cache.update(*pair, layer)
    return mask


class RoomyLayer(DynamicLayer):
    """Keys and values of a layer with room behind them: a token is written there, and nothing else copied.

    Args:
        layer: what is there already.
        rows: of it, in their new order.
        room: how many rows there may be later.
    """

    def __init__(self, layer: Any, rows: Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        length = layer.keys.shape[-2]
        self._room = room
        self._memory = [self._roomy(old.index_select(0, rows), length) for old in (layer.keys, layer.values)]
        self._show(len(rows), length)

    def _roomy(self, old: Tensor, length: int) -> Tensor:
        rows, heads, _, width = old.shape
        memory = old.new_empty(self._room, heads, length + max(SPARE, length // 4), width)
        memory[:rows, :, :length] = old[:, :, :length]
        return memory

    def _show(self, rows: int, length: int) -> None:
        self.keys, self.values = (memory[:rows, :, :length] for memory in self._memory)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write further tokens; all keys and values so far."""
        rows, _, before, _ = self.keys.shape
        length = before + key_states.shape[-2]
        if length > self._memory[0].shape[-2]:
            self._memory = [self._roomy(old[:rows], before) for old in self._memory]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:rows, :, before:length] = states
        self._show(rows, length)
        return self.keys, self.values

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows, in an order of `with_few_moves`; one that is there twice is copied."""
        length = self.keys.shape[-2]
        for memory in self._memory:
            for here, there in enumerate(rows):
                if here != there:
                    memory[here, :, :length] = memory[there, :, :length]
        self._show(len(rows), length)


def with_few_moves(rows: Sequence[int]) -> list[int]:
    """An order of what goes on from these rows in which few are moved: the others fill the gaps.

    >>> rows = [0, 2, 2, 3, 5]
    >>> [rows[number] for number in with_few_moves(rows)]
    [0, 5, 2, 3, 2]
    """
    order = [-1] * len(rows)
    moved = []
    for number, row in enumerate(rows):
        if row < len(rows) and order[row] < 0:
            order[row] = number
        else:
            moved.append(number)
    return [moved.pop() if number < 0 else number for number in order]


def keep_rows(cache: Any, rows: Tensor, *, room: int = 0) -> None:
    """Only these rows of a cache, in this order; with `room` for so many, and their answers, if it is a plain one."""
    layers = getattr(cache, "layers", ())
    if room and can_be_cropped(cache):
        cache.layers = [RoomyLayer(layer, rows, room) for layer in layers]
    elif layers and all(isinstance(layer, RoomyLayer) for layer in layers):
        for layer in layers:
            layer.keep(rows.tolist())
    else:
        cache.reorder_cache(rows)


def take_row(cache: Any, row: int, mask: Tensor, tokens: tuple[int, ...]) -> Prefix:
    """Copy one row out of a cache whose real columns `mask [P]` names, for the `tokens` they hold."""
    columns = mask.nonzero()[:, 0]
    assert len(columns) == len(tokens), (len(columns), len(tokens))
    layers = tuple(
        (layer.keys[row].index_select(1, columns), layer.values[row].index_select(1, columns))
        for layer in cache.layers
    )
    return Prefix(tokens, layers)


def can_be_cropped(cache: Any) -> bool:
    """Whether every layer keeps all tokens: sliding windows and recurrent states cannot be taken apart."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(type(layer) in (DynamicLayer, RoomyLayer) for layer in layers)
