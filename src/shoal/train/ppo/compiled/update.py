"""The compiled PPO update: every epoch and minibatch of it in one call, without Python in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.train.ppo.compiled.kernels import Array, _compiled, backward, forward
from shoal.train.ppo.compiled.tiles import dot

_F = np.float32

# Where each number stands in `settings` and in the statistics that `update` returns.
LEARNING_RATE, CLIP, VALUE_CLIP, ENTROPY, VALUE, MAX_NORM, TARGET_KL, NORMALIZE, ADAM_EPS = range(9)
POLICY_LOSS, VALUE_LOSS, ENTROPY_LOSS, KL, CLIPPED, GRADIENT_NORM, UPDATES, FIRST_KL = range(8)
BETA_1, BETA_2 = 0.9, 0.999


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
    """One step of Adam (arXiv:1412.6980) on the clipped gradient; returns its global norm before."""
    norm = math.sqrt(dot(gradient.size, gradient, 0, gradient, 0))
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
def update(
    weights: Array, first: Array, second: Array, count: int, actor: Array, critic: Array, activation: int,
    groups: Array, std_at: int, orders: Array, batch_size: int, obs: Array, choices: Array, points: Array,
    masks: Array, old_logprobs: Array, advantages: Array, returns: Array, old_values: Array,
    settings: Array, gradient: Array, hidden: Array, delta: Array, below: Array, transposed: Array,
) -> Array:  # fmt: skip
    """Every epoch (`orders[epochs, B]`) and minibatch; the parameters and Adam's moments change in place."""
    critic_at = 0
    for layer in range(actor.size - 1):
        critic_at += (actor[layer] + 1) * actor[layer + 1]
    size, outputs, inputs = orders.shape[1], actor[-1], actor[0]
    gaussian = groups.size == 0
    x = np.empty(batch_size * inputs, np.float32)
    out = np.empty(batch_size * outputs, np.float32)
    d_out = np.empty(batch_size * outputs, np.float32)
    scaled = np.empty(batch_size, np.float32)
    sums, one = np.zeros(8, np.float64), np.zeros(8, np.float32)
    log_std = weights[std_at : std_at + outputs] if gaussian else weights[:0]
    d_log_std = gradient[std_at : std_at + outputs] if gaussian else gradient[:0]
    stop = False
    for epoch in range(orders.shape[0]):
        for start in range(0, size, batch_size):
            rows = orders[epoch, start : min(start + batch_size, size)]
            m = rows.size
            for i in range(m):
                for j in range(inputs):
                    x[i * inputs + j] = obs[rows[i], j]
            normalized(advantages, rows, settings[NORMALIZE] > 0, scaled)
            one[:] = 0
            for network in range(2):  # one call site each: compiled once
                dims = actor if network == 0 else critic
                at = 0 if network == 0 else critic_at
                forward(weights, at, dims, activation, m, x, 0, hidden, out)
                if network == 1:
                    value_loss(out, m, rows, returns, old_values, settings, one, d_out)
                elif gaussian:
                    points_loss(
                        out, m, rows, log_std, points, old_logprobs, scaled, settings, one, d_out, d_log_std
                    )
                else:
                    choices_loss(
                        out, m, rows, groups, choices, masks, old_logprobs, scaled, settings, one, d_out
                    )
                backward(
                    weights, gradient, at, dims, activation, m, x, hidden, d_out, delta, below, transposed
                )
            if sums[UPDATES] == 0:
                sums[FIRST_KL] = one[KL]
            stop = settings[TARGET_KL] > 0 and one[KL] > _F(1.5) * settings[TARGET_KL]
            if stop:  # the step that went too far is measured, not taken
                break
            count += 1
            one[GRADIENT_NORM] = adam(weights, first, second, gradient, count, settings)
            for k in range(UPDATES):
                sums[k] += one[k]
            sums[UPDATES] += 1
        if stop:
            break
    for k in range(UPDATES):
        sums[k] /= max(sums[UPDATES], 1.0)
    return sums
