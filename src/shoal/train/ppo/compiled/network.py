"""An actor and a critic as flat arrays that the compiled kernels read and write; needs numba, not torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.core.executors import OwnThread

Array = np.ndarray
NO_MASKS = np.zeros((0, 0), np.uint8)
LEAST_WORK = 1_000_000
"""Samples of a minibatch times weights, from which on its halves take longer than another thread takes to begin."""


class UpdateStats(NamedTuple):
    """What one PPO update reports, averaged over its minibatches."""

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    grad_norm: float
    n_minibatches: int
    first_kl: float  # of the very first minibatch: 0 when rollout and update agree on the policy


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """A rollout, flattened to `B` samples, with what the losses need."""

    obs: Array  # [B, D] normalised
    actions: Array  # [B, A]
    logprobs: Array  # [B] float32
    advantages: Array  # [B] float32
    returns: Array  # [B] float32
    values: Array  # [B] float32 before the update
    masks: Array  # [B, sum(groups)] uint8, or empty [0, 0]
    orders: Array  # [E, B] int64, a permutation for each epoch; of envs, where sequences are learned from
    begins: Array | None = None  # [T, N] bool, of a recurrent policy, whose rows are all those of [T, N]
    valid: Array | None = None  # [T, N] bool, which of them are learned from
    memory: Array | None = None  # [N, S] what it remembered at the first


class UpdateRates(NamedTuple):
    """The settings of one update, after their schedules; all but the last in the order of the kernels' `settings`."""

    learning_rate: float
    clip: float
    value_clip: float
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float
    normalize_advantage: bool
    adam_eps: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """What determines the arrays of an actor-critic MLP."""

    inputs: int
    outputs: int
    hidden: tuple[int, ...]
    activation: str
    groups: tuple[int, ...]  # empty for continuous actions


def kernels_available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@contextlib.contextmanager
def when_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` at the first kernel that numba compiles while this lasts; one from its cache is not compiled."""
    from numba.core import event

    class Told(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: Any) -> None:
            if not self.told:
                self.told = True
                tell()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Told()):
        yield


class CompiledNetwork:
    """Parameters and Adam's moments in flat arrays, and the kernels bound to them."""

    def __init__(self, shape: NetworkShape) -> None:
        from shoal.train.ppo.compiled import kernels

        self.shape, self._kernels = shape, kernels
        self.count = 0  # Adam steps taken
        self.assisted = False
        """A second thread has the critic's half of large minibatches; the bytes are the same."""
        padded = [-(-units // 16) * 16 for units in self.shape.hidden]
        self.actor = np.array([self.shape.inputs, *padded, self.shape.outputs], np.int64)
        self.critic = np.array([self.shape.inputs, *padded, 1], np.int64)
        self.critic_at = n_parameters(self.actor)
        self.std_at = self.critic_at + n_parameters(self.critic)
        size = self.std_at + (0 if self.shape.groups else self.shape.outputs)
        room = -(-size // 16) * 16
        self.weights, self.first, self.second = (np.zeros(room, np.float32) for _ in range(3))
        self._gradient = np.zeros(room, np.float32)
        self._groups = np.array(self.shape.groups, np.int64)
        self._activation = kernels.TANH if self.shape.activation == "tanh" else kernels.RELU
        self._widest = int(max(padded))
        self._rows = 0
        self._make_room(256)

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write actions `[N, A]` and log-probabilities `[N]` for observations `[N, D]`."""
        self._make_room(len(obs))
        self._kernels.act(
            self.weights, self.actor, self._activation, self._groups, self.std_at, obs,
            masks if masks.size else NO_MASKS, noise, actions, logprobs, self._hidden, self._out, deterministic,
        )  # fmt: skip

    def values(self, obs: Array) -> Array:
        """The critic's values `[M]` of observations `[M, D]`."""
        out = np.empty(len(obs), np.float32)
        if len(obs):
            self._kernels.values(
                self.weights, self.critic_at, self.critic, self._activation, obs, self._hidden, out
            )
        return out

    def update(self, batch: UpdateBatch, rates: UpdateRates) -> UpdateStats:
        """All epochs of one PPO update; parameters and moments change in place."""
        self._make_room(rates.batch_size)
        kernels = self._kernels
        settings = np.array(rates[: kernels.ADAM_EPS + 1], np.float32)
        discrete = bool(self.shape.groups)
        choices = batch.actions if discrete else np.zeros((0, 0), np.int64)
        points = np.zeros((0, 0), np.float32) if discrete else batch.actions
        masks = batch.masks if batch.masks.size else NO_MASKS
        arguments = (
            self.weights, self.first, self.second, self.count, self.actor, self.critic, self.critic_at,
            self._activation, self._groups, self.std_at, batch.orders, rates.batch_size, batch.obs, choices,
            points, masks, batch.logprobs, batch.advantages, batch.returns, batch.values, settings,
            self._gradient, self._hidden, self._delta, self._below, self._transposed,
        )  # fmt: skip
        helped = self.assisted and rates.batch_size * self.weights.size >= LEAST_WORK
        result = in_two_threads(kernels, *arguments) if helped else kernels.update(*arguments)
        policy, critic, entropy, kl, clipped, norm, taken, first_kl = (float(value) for value in result)
        self.count += int(taken)
        return UpdateStats(policy, critic, entropy, kl, clipped, norm, int(taken), first_kl)

    def gae(
        self, rewards: Array, values: Array, next_values: Array, terminated: Array, done: Array,
        gamma: float, gae_lambda: float,
    ) -> Array:  # fmt: skip
        """`shoal.maths.updates.gae` in float32."""
        advantages = np.empty_like(rewards)
        self._kernels.gae(rewards, values, next_values, terminated, done, gamma, gae_lambda, advantages)
        return advantages

    def _make_room(self, rows: int) -> None:
        if rows <= self._rows:
            return
        self._rows = rows
        self._hidden = np.zeros(rows * int(self.actor[1:-1].sum()), np.float32)
        self._out = np.zeros(rows * max(self.shape.outputs, 1), np.float32)
        self._delta = np.zeros(rows * self._widest, np.float32)
        self._below = np.zeros(rows * self._widest, np.float32)
        self._transposed = np.zeros(self._widest**2, np.float32)


def in_two_threads(
    kernels: Any, weights: Array, first: Array, second: Array, count: int, actor: Array, critic: Array,
    critic_at: int, activation: int, groups: Array, std_at: int, orders: Array, batch_size: int, obs: Array,
    choices: Array, points: Array, masks: Array, old_logprobs: Array, advantages: Array, returns: Array,
    old_values: Array, settings: Array, gradient: Array, hidden: Array, delta: Array, below: Array,
    transposed: Array,
) -> Array:  # fmt: skip
    """`kernels.update`, with the critic's half of each minibatch in a thread of its own."""
    sums, one = np.zeros(8, np.float64), np.zeros(8, np.float32)
    own = [np.empty_like(room) for room in (hidden, delta, below, transposed)]
    helper = OwnThread("shoal-critic")
    try:
        for number in range(1, len(orders) * -(-orders.shape[1] // batch_size) + 1):
            rows = kernels.minibatch(orders, batch_size, number)
            one[:] = 0
            critics = helper.submit(functools.partial(
                kernels.critic_half, weights, critic_at, critic, activation, rows, obs, returns, old_values,
                settings, one, gradient, *own,
            ))  # fmt: skip
            kernels.actor_half(
                weights, actor, activation, groups, std_at, rows, obs, choices, points, masks, old_logprobs,
                advantages, settings, one, gradient, hidden, delta, below, transposed,
            )  # fmt: skip
            critics.result()
            if not kernels.step(weights, first, second, gradient, count, settings, one, sums):
                break
            count += 1
    finally:
        helper.end()
    sums[: kernels.UPDATES] /= max(sums[kernels.UPDATES], 1.0)
    return sums


def n_parameters(dims: Array) -> int:
    """How many floats a network of these (padded) sizes has."""
    return int(((dims[:-1] + 1) * dims[1:]).sum())
