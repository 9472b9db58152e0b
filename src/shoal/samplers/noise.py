"""Keyed Gumbel noise: which token a response draws depends on its key and its place, and on nothing else.

Words come from Philox 4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so the
noise of any token is computed by itself. Numba makes them in memory, PyTorch where a network computes: the words are
equal bit for bit, the two logarithms after them as far as those of the machine are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.errors import needs_extra
from shoal.core.seeding import stream_key

with needs_extra("sampling tokens", "train"):
    import torch
    from numba import njit
    from torch import Tensor

if TYPE_CHECKING:
    from shoal.samplers.sampler import Key

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF
NEAR = 8.0
"""Noise above this is rare: one token in 3,000 has it."""
RARE = int(np.exp(-np.exp(-NEAR)) * 2**32) - 1
"""Words above this may give noise above `NEAR`; those below do not."""


class Noise:
    """The noise of one response, token after token."""

    __slots__ = ("token", "words")

    def __init__(self, key: Key) -> None:
        self.words = key_words(key)
        """`[4]` uint32: two key Philox and two are the upper half of its counter."""
        self.token = 0
        """How many tokens have drawn."""

    def rows(self, n_tokens: int, vocabulary: int) -> np.ndarray:
        """`[n_tokens, vocabulary]` float64 for the next tokens of the response."""
        noise = np.empty((n_tokens, vocabulary))
        _rows(self.words, self.token, noise)
        self.token += n_tokens
        return noise

    def pick(self, logprobs: np.ndarray) -> int:
        """Where `[V]` log-probabilities and the next token's noise are largest: `(logprobs + rows(1, V)[0]).argmax()`.

        Logarithms are taken of the few that can win: the others have neither noise nor a log-probability near the best.
        """
        self.token += 1
        return int(_pick(self.words, self.token - 1, logprobs))


def key_words(key: Key) -> np.ndarray:
    """`[4]` uint32 that name the noise of a response."""
    return np.array(stream_key(key.seed, "sampling", *key.path), dtype="<u8").view("<u4").astype(np.uint32)


# --- in memory
def compiled(function: Any) -> Any:
    """A function that numba compiles at its first call, and keeps compiled on disk."""
    return njit(cache=True, error_model="numpy", nogil=True)(function)


@compiled
def _words(key: np.ndarray, token: int, out: np.ndarray) -> None:
    """Fill `out [4 n]` with the words of one token: those of the blocks 0 to n."""
    for block in range(len(out) // 4):
        a, b, c, d = np.uint32(block), np.uint32(token), key[2], key[3]
        k, m = key[0], key[1]
        for _ in range(ROUNDS):
            p = np.uint64(a) * np.uint64(MULTIPLIERS[0])
            q = np.uint64(c) * np.uint64(MULTIPLIERS[1])
            a = np.uint32(q >> np.uint64(32)) ^ b ^ k
            c = np.uint32(p >> np.uint64(32)) ^ d ^ m
            b, d = np.uint32(q), np.uint32(p)
            k, m = np.uint32(k + np.uint32(WEYL[0])), np.uint32(m + np.uint32(WEYL[1]))
        out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3] = a, b, c, d


@compiled
def _gumbel(word: int) -> float:
    noise: float = -np.log(-np.log((np.float64(word) + 0.5) * 2.0**-32))
    return noise


@compiled
def _rows(key: np.ndarray, token: int, noise: np.ndarray) -> None:
    vocabulary = noise.shape[1]
    words = np.empty((vocabulary + 3) // 4 * 4, np.uint32)
    for row in range(noise.shape[0]):
        _words(key, token + row, words)
        for i in range(vocabulary):
            noise[row, i] = _gumbel(words[i])


@compiled
def _pick(key: np.ndarray, token: int, logprobs: np.ndarray) -> int:
    likeliest = 0
    for i in range(len(logprobs)):
        if np.isnan(logprobs[i]):  # of spoiled weights: this answer is refused
            return i
        if logprobs[i] > logprobs[likeliest]:
            likeliest = i
    words = np.empty((len(logprobs) + 3) // 4 * 4, np.uint32)
    _words(key, token, words)
    best, winner = logprobs[likeliest] + _gumbel(words[likeliest]), likeliest
    for i in range(len(logprobs)):
        if words[i] > RARE or logprobs[i] >= best - NEAR:
            noisy = logprobs[i] + _gumbel(words[i])
            if noisy > best or (noisy == best and i < winner):
                best, winner = noisy, i
    return winner


# --- on a device
def gumbel(keys: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """`[B, V]` float64: the noise of a token of each row, computed where the keys are.

    Args:
        keys: `[B, 4]` int64, the words of `key_words`.
        tokens: `[B]` int64, how many tokens each row's response has already.
        vocabulary: how many tokens there are.
    """
    return -(-((words(keys, tokens, vocabulary).double() + 0.5) * 2.0**-32).log()).log()


def words(keys: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """`[B, V]` int64, each below 2**32: what the noise of a token is made of.

    Words of 32 bits lie in int64, so that a product is one multiplication, whatever the device.
    """
    a = torch.arange((vocabulary + 3) // 4, device=keys.device).expand(len(keys), -1)
    b, c, d = (column[:, None].expand_as(a) for column in (tokens, keys[:, 2], keys[:, 3]))
    k, m = keys[:, :1], keys[:, 1:2]
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = ((q >> 32) & LOW) ^ b ^ k, q & LOW, ((p >> 32) & LOW) ^ d ^ m, p & LOW
        k, m = (k + WEYL[0]) & LOW, (m + WEYL[1]) & LOW
    return torch.stack([a, b, c, d], -1).flatten(1)[:, :vocabulary]
