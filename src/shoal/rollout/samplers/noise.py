"""Picking tokens by keyed Gumbel noise where the network is, as `sampler.Noise` gives it in memory.

The noise of a token is a place in a Philox stream; NumPy reads it in order, and here any place is computed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
LOW = 0xFFFFFFFF
TINY = float(np.finfo(np.float64).tiny)


def picks(logprobs: Tensor, keys: Sequence[tuple[int, int]], tokens: Sequence[int]) -> Tensor:
    """`[B]` where each row's log-probabilities and noise are largest, computed where they lie.

    Args:
        logprobs: `[B, V]`.
        keys: two words a row that key its stream (`shoal.core.seeding.stream_key`).
        tokens: how many tokens each row's response has already.
    """
    uniform = uniforms(keys, tokens, logprobs.shape[1], logprobs.device)
    noise = -(-uniform.clamp(min=TINY).log()).log()
    return (logprobs + noise).argmax(1)


def uniforms(
    keys: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    vocabulary: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`[B, V]` float64 in [0, 1): bit for bit what NumPy's Philox generator of each key gives for that token."""
    skipped = [token * vocabulary for token in tokens]
    blocks = vocabulary // 4 + 2  # of four words; a row may begin and end within one
    first = torch.tensor([words // 4 for words in skipped], device=device)
    # NumPy counts up before it computes a block.
    counter = first[:, None] + torch.arange(1, blocks + 1, device=device)
    words = philox(counter, torch.tensor([[_signed(word) for word in key] for key in keys], device=device))
    inside = torch.tensor([words % 4 for words in skipped], device=device)
    chosen = words.flatten(1).gather(1, inside[:, None] + torch.arange(vocabulary, device=device))
    return ((chosen >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def philox(counter: Tensor, keys: Tensor) -> Tensor:
    """Philox 4x64 with ten rounds (Salmon et al. 2011): `[B, N, 4]` words of the counters `[B, N]` below 2**63.

    Words are the bits of int64, since not every device computes with unsigned ones.
    """
    zero = torch.zeros_like(counter)
    a, b, c, d = counter, zero, zero, zero
    k, m = keys[:, :1], keys[:, 1:]
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, MULTIPLIERS[0])
        high_c, low_c = _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = k + _signed(WEYL[0]), m + _signed(WEYL[1])
    return torch.stack([a, b, c, d], -1)


def _product(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of an unsigned product, from halves of 32 bits."""
    high, low = factor >> 32, factor & LOW
    a_high, a_low = (a >> 32) & LOW, a & LOW
    lowest = a_low * low
    middle = a_high * low + ((lowest >> 32) & LOW)
    other = a_low * high + (middle & LOW)
    return a_high * high + ((middle >> 32) & LOW) + ((other >> 32) & LOW), a * _signed(factor)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
