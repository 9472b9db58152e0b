"""What a model has computed of each episode, kept between turns: a prompt that continues one starts from there.

An entry is found by the episode and cropped to the tokens that the new prompt shares with it, so it is right for
append and window prompts alike. Changed weights empty the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.rollout.samplers.sampler import Key

Episode = tuple[int, int, int, int]
MIN_SHARED = 8
"""Tokens below which starting from an entry saves nothing."""


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
    """The most recently used entries, up to a number of tokens in all.

    Args:
        max_tokens: over all entries; 0 keeps nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"prefix_tokens must be at least 0, got {max_tokens}")
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[Episode, Prefix] = OrderedDict()
        self._weights: Any = None

    def valid_for(self, weights: Any) -> None:
        """Forget everything unless it was computed with these weights (any value that changes with them)."""
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.tokens = 0

    def find(self, key: Key, prompt: tuple[int, ...]) -> Prefix | None:
        """What is known of the beginning of `prompt`, at most all of it but the last token."""
        entry = self._entries.get(_episode(key))
        if entry is None:
            return None
        self._entries.move_to_end(_episode(key))
        shared = min(shared_length(entry.tokens, prompt), len(prompt) - 1)
        return entry.cropped(shared) if shared >= MIN_SHARED else None

    def keep(self, key: Key, prefix: Prefix) -> None:
        """Keep the context of an episode in the place of the one before."""
        episode = _episode(key)
        before = self._entries.pop(episode, None)
        self.tokens -= len(before.tokens) if before else 0
        if len(prefix.tokens) > self.max_tokens:
            return
        self._entries[episode] = prefix
        self.tokens += len(prefix.tokens)
        while self.tokens > self.max_tokens:
            _, dropped = self._entries.popitem(last=False)
            self.tokens -= len(dropped.tokens)


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # tuple comparison is fast, so halve the interval instead of walking
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
    return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)


def _episode(key: Key) -> Episode:
    return key.seed, key.iteration, key.group, key.member
