"""Compiled pieces of PPO on multilayer perceptrons: forward, backward, action heads, losses, Adam, GAE.

Plain functions over flat float32 arrays, compiled by numba on first use and cached. The few inner loops that a
plain loop leaves slow are LLVM vectors of 16 floats, which LLVM maps on whatever the CPU has (AVX-512, AVX2,
NEON), with fused multiply-adds in a fixed order: a row's result never depends on the rows computed beside it. A
network is `dims`, an int64 array `[inputs, hidden_1, ..., hidden_L, outputs]` with hidden sizes padded to
multiples of 16; its parameters lie one after the other from an offset on: `W [in, out]` and `b [out]` for each
hidden layer, then `W [outputs, hidden_L]` and `b [outputs]`. Padded units hold zeros and keep them.

An update is one call: every epoch and minibatch of it, without Python in between. The halves of a minibatch, the
actor's and the critic's, meet in nothing but Adam: two threads can have one each, and the bytes are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

Array = np.ndarray
TANH, RELU = 0, 1
_F = np.float32
_N, _NS, _ROW = types.int64, types.int64[::1], types.float32[::1]

# Where each number stands in `settings` and in the statistics that `update` returns.
LEARNING_RATE, CLIP, VALUE_CLIP, ENTROPY, VALUE, MAX_NORM, TARGET_KL, NORMALIZE, ADAM_EPS = range(9)
POLICY_LOSS, VALUE_LOSS, ENTROPY_LOSS, KL, CLIPPED, GRADIENT_NORM, UPDATES, FIRST_KL = range(8)
BETA_1, BETA_2 = 0.9, 0.999

LANES = 16
_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    """One float in all lanes."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _intrinsic(builder: Any, name: str, count: int) -> Any:
    """The LLVM vector function `name` with `count` vector arguments."""
    full = f"llvm.{name}.v{LANES}f32"
    known = builder.module.globals.get(full)
    return known or ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * count), full)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(_intrinsic(builder, "fma", 3), [a, b, c])


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _make_tile(rows: int, vectors: int) -> Callable[..., Any]:
    """A `rows x 16*vectors` block of `C = A @ B (+ C)`, kept in registers over the whole sum."""

    @intrinsic
    def tile(
        typing: Any, k: Any, a: Any, a_at: Any, a_row: Any, a_k: Any, b: Any, b_at: Any, b_row: Any,
        c: Any, c_at: Any, c_row: Any, bias: Any, bias_at: Any,
    ) -> Any:  # fmt: skip
        index = types.int64
        signature = types.void(
            index, a, index, index, index, b, index, index, c, index, index, bias, index
        )  # fmt: skip

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            n_k, a_, a_at_, a_row_, a_k_, b_, b_at_, b_row_, c_, c_at_, c_row_, bias_, bias_at_ = args
            kinds = signature.args
            a_base = _pointer(context, builder, kinds[1], a_, a_at_)
            b_base = _pointer(context, builder, kinds[5], b_, b_at_)
            c_base = _pointer(context, builder, kinds[8], c_, c_at_)
            bias_base = _pointer(context, builder, kinds[11], bias_, bias_at_)
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)]
            lanes = [_INT(LANES * j) for j in range(vectors)]
            with builder.if_else(builder.icmp_signed(">=", bias_at_, _INT(0))) as (biased, plain):
                with biased:
                    for j, lane in enumerate(lanes):
                        given = _load(builder, builder.gep(bias_base, [lane]))
                        for row in sums:
                            builder.store(given, row[j])
                with plain:
                    for place in itertools.chain(*sums):
                        builder.store(_constant(0.0), place)
            with cgutils.for_range(builder, n_k) as loop:
                b_line = builder.gep(b_base, [builder.mul(loop.index, b_row_)])
                b_values = [_load(builder, builder.gep(b_line, [lane])) for lane in lanes]
                a_column = builder.gep(a_base, [builder.mul(loop.index, a_k_)])
                for r, row in enumerate(sums):
                    at = builder.gep(a_column, [builder.mul(_INT(r), a_row_)])
                    value = _splat(builder, builder.load(at))
                    for place, b_value in zip(row, b_values, strict=True):
                        builder.store(_fma(builder, value, b_value, builder.load(place)), place)
            for r, row in enumerate(sums):
                c_line = builder.gep(c_base, [builder.mul(_INT(r), c_row_)])
                for place, lane in zip(row, lanes, strict=True):
                    _store(builder, builder.load(place), builder.gep(c_line, [lane]))
            return context.get_dummy_value()

        return signature, generate

    return cast(Callable[..., Any], tile)


tile_4x4 = _make_tile(4, 4)
tile_1x4 = _make_tile(1, 4)
tile_4x1 = _make_tile(4, 1)
tile_1x1 = _make_tile(1, 1)

# tanh(x) = x P(x^2) / Q(x^2) on [-8.2, 8.2], constant outside: our own fit, relative error 4e-7 in float32.
# Highest power first.
_TANH_LIMIT = 8.2
_TANH_P = (1.48406130015e-08, 2.1637314836e-05, 0.00355668876783, 0.134321250055, 0.99999999175)
_TANH_Q = (8.3706266301e-07, 0.000338644509531, 0.0261083078553, 0.46765450748, 1.0)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fma(builder, value, x, _constant(coefficient))
    return value


@intrinsic
def tanh_16(typing: Any, x: Any, at: Any) -> Any:
    """Replace 16 floats of `x` from `at` on by their hyperbolic tangent; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        value = _load(builder, pointer)
        for sign, limit in ((">", _TANH_LIMIT), ("<", -_TANH_LIMIT)):
            bound = _constant(limit)
            value = builder.select(builder.fcmp_ordered(sign, value, bound), bound, value)
        square = builder.fmul(value, value)
        over = builder.fmul(value, _polynomial(builder, square, _TANH_P))
        _store(builder, builder.fdiv(over, _polynomial(builder, square, _TANH_Q)), pointer)
        return context.get_dummy_value()

    return types.void(x, types.int64), generate


@intrinsic
def tanh_slope_16(typing: Any, delta: Any, at: Any, hidden: Any, hidden_at: Any) -> Any:
    """Multiply 16 floats of `delta` by the derivative `1 - h^2` of the tanh whose values `hidden` holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        value = _load(builder, _pointer(context, builder, signature.args[2], args[2], args[3]))
        slope = _fma(builder, builder.fneg(value), value, _constant(1.0))
        _store(builder, builder.fmul(_load(builder, pointer), slope), pointer)
        return context.get_dummy_value()

    return types.void(delta, types.int64, hidden, types.int64), generate


@intrinsic
def dot(typing: Any, n: Any, a: Any, a_at: Any, b: Any, b_at: Any) -> Any:
    """The inner product of `n` floats (a multiple of 16): lane by lane, then the lanes in a fixed tree."""
    signature = types.float32(types.int64, a, types.int64, b, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, a_, a_at_, b_, b_at_ = args
        a_base = _pointer(context, builder, signature.args[1], a_, a_at_)
        b_base = _pointer(context, builder, signature.args[3], b_, b_at_)
        total = cgutils.alloca_once_value(builder, _constant(0.0))
        with cgutils.for_range_slice(builder, _INT(0), count, _INT(LANES)) as (step, _):
            left, right = (_load(builder, builder.gep(base, [step])) for base in (a_base, b_base))
            builder.store(_fma(builder, left, right, builder.load(total)), total)
        value, width = builder.load(total), LANES
        while width > 1:
            width //= 2
            lanes = [(i + width) % LANES for i in range(LANES)]
            other = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_INDEX, LANES), lanes))
            value = builder.fadd(value, other)
        return builder.extract_element(value, _INDEX(0))

    return signature, generate


def _compiled(function: Any, signature: Any = None) -> Any:
    """`njit` with a cache on disk and C-like division, fused multiply-adds allowed and nothing reordered."""
    options = {"cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}, "nogil": True}
    return njit(signature, **options)(function)


def _compiled_for(*arguments: Any) -> Callable[[Any], Any]:
    """`_compiled` for these types alone; else numba compiles anew for each constant that a caller writes."""
    return partial(_compiled, signature=types.void(*arguments))


@_compiled_for(_N, _N, _N, _ROW, _N, _N, _N, _ROW, _N, _ROW, _N, _ROW, _N)
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


@_compiled_for(_ROW, _N, _NS, _N, _N, _ROW, _N, _ROW, _ROW)
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


@_compiled_for(_ROW, _ROW, _N, _NS, _N, _N, _ROW, _ROW, _ROW, _ROW, _ROW, _ROW)
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
def act(
    weights: Array, dims: Array, activation: int, groups: Array, std_at: int, obs: Array, masks: Array,
    noise: Array, actions: Array, logprobs: Array, hidden: Array, out: Array, deterministic: bool,
) -> None:  # fmt: skip
    """The actor's choices, or without `groups` its points, for `obs[n, inputs]`."""
    n = obs.shape[0]
    forward(weights, 0, dims, activation, n, obs.ravel(), 0, hidden, out)
    if groups.size:
        choose(out, n, groups, masks, noise, actions, logprobs, deterministic)
    else:
        draw(out, n, weights[std_at : std_at + dims[-1]], noise, actions, logprobs, deterministic)


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


@_compiled
def choices_loss(
    logits: Array, m: int, rows: Array, groups: Array, actions: Array, masks: Array, old: Array,
    advantages: Array, settings: Array, stats: Array, d_out: Array,
) -> None:  # fmt: skip
    """Clipped policy loss and entropy of categorical choices, and their gradient by the logits."""
    total, clip, scale = groups.sum(), settings[CLIP], _F(1.0 / m)
    probability = np.empty(total, np.float32)
    log_probability = np.empty(total, np.float32)
    for i in range(m):
        row = rows[i]
        logprob, entropy, start = _F(0), _F(0), 0
        for g in range(groups.size):
            largest, norm = -_F(np.inf), _F(0)
            for j in range(start, start + groups[g]):
                if (masks.size == 0 or masks[row, j]) and logits[i * total + j] > largest:
                    largest = logits[i * total + j]
            for j in range(start, start + groups[g]):
                probability[j] = _F(0)
                if masks.size == 0 or masks[row, j]:
                    probability[j] = math.exp(logits[i * total + j] - largest)
                    norm += probability[j]
            log_norm = math.log(norm)
            for j in range(start, start + groups[g]):
                if masks.size == 0 or masks[row, j]:
                    probability[j] /= norm
                    log_probability[j] = logits[i * total + j] - largest - log_norm
                    entropy -= probability[j] * log_probability[j]
            logprob += log_probability[start + actions[row, g]]
            start += groups[g]
        d_logprob = _policy_term(logprob - old[row], advantages[i], clip, scale, stats)
        stats[ENTROPY_LOSS] += entropy * scale
        start = 0
        for g in range(groups.size):
            own = _F(0)
            for j in range(start, start + groups[g]):
                if probability[j] > _F(0):
                    own -= probability[j] * log_probability[j]
            for j in range(start, start + groups[g]):
                chosen = _F(1) if j - start == actions[row, g] else _F(0)
                slope = d_logprob * (chosen - probability[j])
                if probability[j] > _F(0):
                    slope += settings[ENTROPY] * scale * probability[j] * (log_probability[j] + own)
                allowed = masks.size == 0 or masks[row, j]
                d_out[i * total + j] = slope if allowed else _F(0)
            start += groups[g]


@_compiled
def points_loss(
    means: Array, m: int, rows: Array, log_std: Array, actions: Array, old: Array, advantages: Array,
    settings: Array, stats: Array, d_out: Array, d_log_std: Array,
) -> None:  # fmt: skip
    """The same for a diagonal Gaussian; its entropy depends on `log_std` only."""
    size, clip, scale = log_std.size, settings[CLIP], _F(1.0 / m)
    entropy = _F(0)
    inverse = np.empty(size, np.float32)
    for j in range(size):
        entropy += log_std[j] + _F(1.4189385332046727)  # (1 + log 2 pi) / 2
        inverse[j] = math.exp(-log_std[j])
        d_log_std[j] = -settings[ENTROPY]
    stats[ENTROPY_LOSS] += entropy
    for i in range(m):
        row = rows[i]
        logprob = _F(0)
        for j in range(size):
            z = (actions[row, j] - means[i * size + j]) * inverse[j]
            logprob -= _F(0.5) * z * z + log_std[j] + _F(0.9189385332046727)
        d_logprob = _policy_term(logprob - old[row], advantages[i], clip, scale, stats)
        for j in range(size):
            z = (actions[row, j] - means[i * size + j]) * inverse[j]
            d_out[i * size + j] = d_logprob * z * inverse[j]
            d_log_std[j] += d_logprob * (z * z - _F(1))


@_compiled
def _policy_term(log_ratio: Any, advantage: Any, clip: Any, scale: Any, stats: Array) -> Any:
    """Add one sample of the clipped surrogate (arXiv:1707.06347 eq. 7); returns d loss / d logprob."""
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, _F(1) - clip), _F(1) + clip)
    free, held = advantage * ratio, advantage * bounded
    stats[KL] += (ratio - _F(1) - log_ratio) * scale
    if abs(ratio - _F(1)) > clip:
        stats[CLIPPED] += scale
    if free <= held:
        stats[POLICY_LOSS] -= free * scale
        return -free * scale
    if held < free:
        stats[POLICY_LOSS] -= held * scale
        return _F(0)
    stats[POLICY_LOSS] += free  # NaN: let it show in the loss
    return free


@_compiled
def value_loss(
    predicted: Array, m: int, rows: Array, returns: Array, old: Array, settings: Array, stats: Array,
    d_out: Array,
) -> None:  # fmt: skip
    """Mean squared error of the values, with PPO's optional clipping around the old value."""
    clip, scale = settings[VALUE_CLIP], _F(1.0 / m)
    for i in range(m):
        error = predicted[i] - returns[rows[i]]
        loss, slope = error * error, _F(2) * error
        if clip > _F(0):
            moved = predicted[i] - old[rows[i]]
            held = old[rows[i]] + min(max(moved, -clip), clip) - returns[rows[i]]
            if held * held > loss:
                loss = held * held
                slope = _F(2) * held if abs(moved) <= clip else _F(0)
        stats[VALUE_LOSS] += loss * scale
        d_out[i] = settings[VALUE] * slope * scale


@_compiled
def adam(weights: Array, first: Array, second: Array, gradient: Array, count: int, settings: Array) -> float:
    """One step of Adam (arXiv:1412.6980) on the clipped gradient; returns its global norm before.

    There is no step where the norm is not finite.
    """
    norm = math.sqrt(dot(gradient.size, gradient, 0, gradient, 0))
    if not math.isfinite(norm):
        return norm
    factor = _F(1)
    if settings[MAX_NORM] > _F(0):
        factor = min(_F(1), settings[MAX_NORM] / (norm + _F(1e-6)))
    rate = _F(settings[LEARNING_RATE] / (1.0 - BETA_1**count))
    correction = _F(1.0 / math.sqrt(1.0 - BETA_2**count))
    keep_1, keep_2 = _F(BETA_1), _F(BETA_2)
    add_1, add_2, eps = _F(1.0 - BETA_1), _F(1.0 - BETA_2), _F(settings[ADAM_EPS])
    for i in range(weights.size):
        g = gradient[i] * factor
        first[i] = keep_1 * first[i] + add_1 * g
        second[i] = keep_2 * second[i] + add_2 * g * g
        weights[i] -= rate * first[i] / (math.sqrt(second[i]) * correction + eps)
    return norm


@_compiled
def normalized(advantages: Array, rows: Array, normalize: bool, out: Array) -> None:
    """The advantages of a minibatch, to mean 0 and deviation 1 (unbiased) if asked and if it has two rows."""
    m = rows.size
    mean, spread = 0.0, 1.0
    if normalize and m > 1:
        for i in range(m):
            mean += advantages[rows[i]]
        mean /= m
        square = 0.0
        for i in range(m):
            square += (advantages[rows[i]] - mean) ** 2
        spread = math.sqrt(square / (m - 1)) + 1e-8
    for i in range(m):
        out[i] = _F((advantages[rows[i]] - mean) / spread)


@_compiled
def gather(obs: Array, rows: Array, x: Array) -> None:
    """The observations of a minibatch, one after the other."""
    inputs = obs.shape[1]
    for i in range(rows.size):
        for j in range(inputs):
            x[i * inputs + j] = obs[rows[i], j]


@_compiled
def minibatch(orders: Array, batch_size: int, number: int) -> Array:
    """The rows of minibatch `number`, counted from 1 through all epochs."""
    size = orders.shape[1]
    a_pass = (size + batch_size - 1) // batch_size
    start = (number - 1) % a_pass * batch_size
    return orders[(number - 1) // a_pass, start : min(start + batch_size, size)]


@_compiled
def actor_half(
    weights: Array, dims: Array, activation: int, groups: Array, std_at: int, rows: Array, obs: Array,
    choices: Array, points: Array, masks: Array, old_logprobs: Array, advantages: Array, settings: Array,
    stats: Array, gradient: Array, hidden: Array, delta: Array, below: Array, transposed: Array,
) -> None:  # fmt: skip
    """The loss of the policy on the rows of a minibatch, and the gradient of its parameters."""
    m, outputs = rows.size, dims[-1]
    x, scaled = np.empty(m * dims[0], np.float32), np.empty(m, np.float32)
    out, d_out = np.empty(m * outputs, np.float32), np.empty(m * outputs, np.float32)
    gather(obs, rows, x)
    normalized(advantages, rows, settings[NORMALIZE] > 0, scaled)
    forward(weights, 0, dims, activation, m, x, 0, hidden, out)
    if groups.size == 0:
        log_std, d_log_std = weights[std_at : std_at + outputs], gradient[std_at : std_at + outputs]
        points_loss(out, m, rows, log_std, points, old_logprobs, scaled, settings, stats, d_out, d_log_std)
    else:
        choices_loss(out, m, rows, groups, choices, masks, old_logprobs, scaled, settings, stats, d_out)
    backward(weights, gradient, 0, dims, activation, m, x, hidden, d_out, delta, below, transposed)


@_compiled
def critic_half(
    weights: Array, at: int, dims: Array, activation: int, rows: Array, obs: Array, returns: Array,
    old_values: Array, settings: Array, stats: Array, gradient: Array, hidden: Array, delta: Array, below: Array,
    transposed: Array,
) -> None:  # fmt: skip
    """The loss of the critic on the rows of a minibatch, and the gradient of its parameters."""
    m = rows.size
    x, out, d_out = np.empty(m * dims[0], np.float32), np.empty(m, np.float32), np.empty(m, np.float32)
    gather(obs, rows, x)
    forward(weights, at, dims, activation, m, x, 0, hidden, out)
    value_loss(out, m, rows, returns, old_values, settings, stats, d_out)
    backward(weights, gradient, at, dims, activation, m, x, hidden, d_out, delta, below, transposed)


@_compiled
def step(
    weights: Array, first: Array, second: Array, gradient: Array, count: int, settings: Array, one: Array,
    sums: Array,
) -> bool:  # fmt: skip
    """Adam's step after the halves of a minibatch; False where it is the last one, or was not taken at all."""
    if sums[UPDATES] == 0:
        sums[FIRST_KL] = one[KL]
    if settings[TARGET_KL] > 0 and one[KL] > _F(1.5) * settings[TARGET_KL]:
        return False  # the step that went too far is measured, not taken
    one[GRADIENT_NORM] = adam(weights, first, second, gradient, count + 1, settings)
    for k in range(UPDATES):
        sums[k] += one[k]
    sums[UPDATES] += 1
    return math.isfinite(one[GRADIENT_NORM])


@_compiled
def update(
    weights: Array, first: Array, second: Array, count: int, actor: Array, critic: Array, critic_at: int,
    activation: int, groups: Array, std_at: int, orders: Array, batch_size: int, obs: Array, choices: Array,
    points: Array, masks: Array, old_logprobs: Array, advantages: Array, returns: Array, old_values: Array,
    settings: Array, gradient: Array, hidden: Array, delta: Array, below: Array, transposed: Array,
) -> Array:  # fmt: skip
    """Every epoch (`orders[epochs, B]`) and minibatch; the parameters and Adam's moments change in place."""
    sums, one = np.zeros(8, np.float64), np.zeros(8, np.float32)
    for number in range(1, orders.shape[0] * ((orders.shape[1] + batch_size - 1) // batch_size) + 1):
        rows = minibatch(orders, batch_size, number)
        one[:] = 0
        actor_half(
            weights, actor, activation, groups, std_at, rows, obs, choices, points, masks, old_logprobs,
            advantages, settings, one, gradient, hidden, delta, below, transposed,
        )  # fmt: skip
        critic_half(
            weights, critic_at, critic, activation, rows, obs, returns, old_values, settings, one, gradient,
            hidden, delta, below, transposed,
        )  # fmt: skip
        if not step(weights, first, second, gradient, count, settings, one, sums):
            break
        count += 1
    for k in range(UPDATES):
        sums[k] /= max(sums[UPDATES], 1.0)
    return sums
