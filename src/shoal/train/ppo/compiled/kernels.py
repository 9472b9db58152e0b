"""Compiled pieces of PPO on multilayer perceptrons: forward, backward, action heads, losses, Adam, GAE.

Plain functions over flat float32 arrays, compiled by numba on first use and cached. A network is `dims`, an
int64 array `[inputs, hidden_1, ..., hidden_L, outputs]` with hidden sizes padded to multiples of 16; its
parameters lie one after the other from an offset on: `W [in, out]` and `b [out]` for each hidden layer, then
`W [outputs, hidden_L]` and `b [outputs]`. Padded units hold zeros and keep them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from shoal.train.ppo.compiled.tiles import dot, tanh_16, tanh_slope_16, tile_1x1, tile_1x4, tile_4x1, tile_4x4

Array = np.ndarray
TANH, RELU = 0, 1
_F = np.float32


def _compiled(function: Any) -> Any:
    """`njit` with a cache on disk and C-like division, fused multiply-adds allowed and nothing reordered."""
    return njit(cache=True, error_model="numpy", fastmath={"contract", "nsz"}, nogil=True)(function)


@_compiled
def gemm(
    m: int, k: int, n: int, a: Array, a_at: int, a_row: int, a_k: int, b: Array, b_at: int,
    c: Array, c_at: int, bias: Array, bias_at: int,
) -> None:  # fmt: skip
    """`C[m, n] = A[m, k] @ B[k, n] + bias`, `n` a multiple of 16; `bias_at < 0` means no bias.

    `A` is read at `a_at + i * a_row + j * a_k`, so a transposed `A` needs no copy.
    """
    i = 0
    while i < m:
        four = i + 4 <= m
        a_from, c_from = a_at + i * a_row, c_at + i * n
        j = 0
        while j < n:
            bias_from = bias_at + j if bias_at >= 0 else -1
            if j + 64 <= n:
                if four:
                    tile_4x4(k, a, a_from, a_row, a_k, b, b_at + j, n, c, c_from + j, n, bias, bias_from)
                else:
                    tile_1x4(k, a, a_from, a_row, a_k, b, b_at + j, n, c, c_from + j, n, bias, bias_from)
                j += 64
            else:
                if four:
                    tile_4x1(k, a, a_from, a_row, a_k, b, b_at + j, n, c, c_from + j, n, bias, bias_from)
                else:
                    tile_1x1(k, a, a_from, a_row, a_k, b, b_at + j, n, c, c_from + j, n, bias, bias_from)
                j += 16
        i += 4 if four else 1


@_compiled
def forward(
    weights: Array, at: int, dims: Array, activation: int, m: int, x: Array, x_at: int,
    hidden: Array, out: Array,
) -> None:  # fmt: skip
    """Outputs `out[m, outputs]` of `m` rows of `x`; `hidden` keeps the activations for `backward`."""
    layers = dims.size - 2
    source, source_at, width, to = x, x_at, dims[0], 0
    for layer in range(layers):
        units = dims[layer + 1]
        gemm(
            m, width, units, source, source_at, width, 1, weights, at, hidden, to, weights, at + width * units
        )
        if activation == TANH:
            for i in range(to, to + m * units, 16):
                tanh_16(hidden, i)
        else:
            for i in range(to, to + m * units):
                hidden[i] = hidden[i] if hidden[i] > _F(0) or hidden[i] != hidden[i] else _F(0)
        at += width * units + units
        source, source_at, width = hidden, to, units
        to += m * units
    outputs = dims[layers + 1]
    for i in range(m):
        for j in range(outputs):
            bias = weights[at + outputs * width + j]
            out[i * outputs + j] = bias + dot(width, source, source_at + i * width, weights, at + j * width)


@_compiled
def backward(
    weights: Array, gradient: Array, at: int, dims: Array, activation: int, m: int, x: Array,
    hidden: Array, d_out: Array, delta: Array, below: Array, transposed: Array,
) -> None:  # fmt: skip
    """Gradients of all parameters from `d_out[m, outputs]`; `delta`, `below`, `transposed` are work space."""
    layers = dims.size - 2
    one = np.ones(1, np.float32)  # read again and again: a sum over rows is a product with ones
    ends = at
    for layer in range(layers):
        ends += dims[layer] * dims[layer + 1] + dims[layer + 1]
    width, outputs = dims[layers], dims[layers + 1]
    top = 0
    for layer in range(layers - 1):
        top += m * dims[layer + 1]
    gemm(outputs, m, width, d_out, 0, 1, outputs, hidden, top, gradient, ends, gradient, -1)
    for j in range(outputs):
        total = _F(0)
        for i in range(m):
            total += d_out[i * outputs + j]
        gradient[ends + outputs * width + j] = total
    gemm(m, outputs, width, d_out, 0, outputs, 1, weights, ends, delta, 0, weights, -1)
    for layer in range(layers - 1, -1, -1):
        units, width = dims[layer + 1], dims[layer]
        if activation == TANH:
            for i in range(0, m * units, 16):
                tanh_slope_16(delta, i, hidden, top + i)
        else:
            for i in range(m * units):
                delta[i] = delta[i] if hidden[top + i] > _F(0) else _F(0)
        ends -= width * units + units
        gemm(1, m, units, one, 0, 0, 0, delta, 0, gradient, ends + width * units, gradient, -1)
        if layer == 0:
            gemm(width, m, units, x, 0, 1, width, delta, 0, gradient, ends, gradient, -1)
            break
        top -= m * width
        gemm(width, m, units, hidden, top, 1, width, delta, 0, gradient, ends, gradient, -1)
        for i in range(width):
            for j in range(units):
                transposed[j * width + i] = weights[ends + i * units + j]
        gemm(m, units, width, delta, 0, units, 1, transposed, 0, below, 0, weights, -1)
        delta, below = below, delta


@_compiled
def choose(
    logits: Array, n: int, groups: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
    deterministic: bool,
) -> None:  # fmt: skip
    """One choice per group of logits: by inverse transform of `noise[n, groups]`, or the largest logit.

    `masks[n, total]` is 0 where a choice is not allowed; an empty array allows all.
    """
    total = groups.sum()
    for i in range(n):
        logprob, at, start = _F(0), i * total, 0
        for g in range(groups.size):
            best, largest = -1, -_F(np.inf)
            for j in range(groups[g]):
                if (masks.size == 0 or masks[i, start + j]) and logits[at + start + j] > largest:
                    best, largest = j, logits[at + start + j]
            best = max(best, 0)
            norm = _F(0)
            for j in range(groups[g]):
                if masks.size == 0 or masks[i, start + j]:
                    norm += math.exp(logits[at + start + j] - largest)
            if not deterministic:
                goal, reached = noise[i, g] * norm, _F(0)
                for j in range(groups[g]):
                    if masks.size == 0 or masks[i, start + j]:
                        reached += math.exp(logits[at + start + j] - largest)
                        best = j
                        if goal < reached:
                            break
            actions[i, g] = best
            logprob += logits[at + start + best] - largest - math.log(norm)
            start += groups[g]
        logprobs[i] = logprob


@_compiled
def draw(
    means: Array, n: int, log_std: Array, noise: Array, actions: Array, logprobs: Array, deterministic: bool
) -> None:
    """A diagonal Gaussian action `mean + std * noise[n, size]`, or the mean, with its log-probability."""
    size = log_std.size
    for i in range(n):
        logprob = _F(0)
        for j in range(size):
            z = _F(0) if deterministic else noise[i, j]
            actions[i, j] = means[i * size + j] + math.exp(log_std[j]) * z
            logprob -= _F(0.5) * z * z + log_std[j] + _F(0.9189385332046727)  # log(2 pi) / 2
        logprobs[i] = logprob


@_compiled
def act_choices(
    weights: Array, dims: Array, activation: int, groups: Array, obs: Array, masks: Array, noise: Array,
    actions: Array, logprobs: Array, hidden: Array, out: Array, deterministic: bool,
) -> None:  # fmt: skip
    """The actor's choices for `obs[n, inputs]`."""
    n = obs.shape[0]
    forward(weights, 0, dims, activation, n, obs.ravel(), 0, hidden, out)
    choose(out, n, groups, masks, noise, actions, logprobs, deterministic)


@_compiled
def act_points(
    weights: Array, dims: Array, activation: int, log_std: Array, obs: Array, noise: Array,
    actions: Array, logprobs: Array, hidden: Array, out: Array, deterministic: bool,
) -> None:  # fmt: skip
    """The actor's continuous actions for `obs[n, inputs]`."""
    n = obs.shape[0]
    forward(weights, 0, dims, activation, n, obs.ravel(), 0, hidden, out)
    draw(out, n, log_std, noise, actions, logprobs, deterministic)


@_compiled
def values(
    weights: Array, at: int, dims: Array, activation: int, obs: Array, hidden: Array, out: Array
) -> None:
    """The critic's value of each row of `obs[n, inputs]`, in blocks of 256 rows that fit the cache."""
    rows = obs.ravel()
    block = np.empty(256, np.float32)
    for start in range(0, obs.shape[0], 256):
        m = min(256, obs.shape[0] - start)
        forward(weights, at, dims, activation, m, rows, start * dims[0], hidden, block)
        out[start : start + m] = block[:m]


@_compiled
def gae(
    rewards: Array, value: Array, next_value: Array, terminated: Array, done: Array, gamma: float,
    gae_lambda: float, advantages: Array,
) -> None:  # fmt: skip
    """Generalised advantage estimates, arXiv:1506.02438 eq. 16, per column of `[T, N]` arrays."""
    steps, envs = rewards.shape
    discount, decay = _F(gamma), _F(gamma * gae_lambda)
    for i in range(envs):
        running = _F(0)
        for t in range(steps - 1, -1, -1):
            ahead = _F(0) if terminated[t, i] else next_value[t, i]
            delta = rewards[t, i] + discount * ahead - value[t, i]
            running = delta + (_F(0) if done[t, i] else decay * running)
            advantages[t, i] = running
