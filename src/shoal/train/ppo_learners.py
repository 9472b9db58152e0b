"""Two learners with one face: torch autograd for any network, compiled kernels for perceptrons on the CPU.

Both act, judge and update from the same arrays and noise, and keep their state under the same names, so a
checkpoint of one is a checkpoint of the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from shoal.core.errors import ConfigError
from shoal.rollout.arrays.spaces import ActionRows
from shoal.train.compiled_learner import CompiledLearner
from shoal.train.compiled_network import (
    UpdateBatch,
    UpdateRates,
    UpdateStats,
    kernels_available,
)
from shoal.train.policy_networks import ActorCritic, MLPActorCritic
from shoal.train.torch_learner import TorchLearner

Array = np.ndarray
Arrays = dict[str, Array]


class Learner(Protocol):
    """What the PPO loop asks of the mathematics."""

    @property
    def network(self) -> ActorCritic:
        """The torch module with the current weights."""
        ...

    def act(
        self,
        obs: Array,
        masks: Array,
        noise: Array,
        actions: Array,
        logprobs: Array,
        deterministic: bool = False,
    ) -> None:
        """Write actions and their log-probabilities for normalised observations."""

    def values(self, obs: Array) -> Array:
        """The critic's values of normalised observations."""

    def gae(
        self, rewards: Array, values: Array, next_values: Array, terminated: Array, done: Array,
        gamma: float, gae_lambda: float,
    ) -> Array:  # fmt: skip
        """Advantages `[T, N]`."""

    def update(self, batch: UpdateBatch, rates: UpdateRates) -> UpdateStats:
        """All epochs over one rollout."""

    def snapshot(self) -> Any:
        """A cheap copy of everything an update changes, for `restore`."""

    def restore(self, snapshot: Any) -> None:
        """Undo the update since `snapshot`."""

    def state(self) -> tuple[Arrays, Arrays]:
        """(weights, optimizer moments) by name, copied."""

    def load_state(self, weights: Arrays, optimizer: Arrays) -> None:
        """What `state` gave."""


def fits_kernels(network: ActorCritic, device: str) -> str | None:
    """Why the compiled path cannot take this network, or None if it can."""
    if not isinstance(network, MLPActorCritic):
        return f"it knows perceptrons only, got {type(network).__name__}"
    if device != "cpu":
        return f"it runs on the CPU, got device {device!r}"
    if not kernels_available():
        return "numba is not installed (pip install numba)"
    return None


def make_learner(
    network: ActorCritic, actions: ActionRows, *, path: str, device: str, adam_eps: float
) -> Learner:
    """The learner for `path`: "compiled", "torch" or "auto" (compiled where it fits)."""
    if path not in ("auto", "compiled", "torch"):
        raise ConfigError(f"path must be 'auto', 'compiled' or 'torch', got {path!r}")
    obstacle = fits_kernels(network, device)
    if path == "compiled" and obstacle:
        raise ConfigError(f"path='compiled' is not possible: {obstacle}; use path='torch' or 'auto'")
    if path == "torch" or obstacle:
        return TorchLearner(network, actions, device, adam_eps)
    assert isinstance(network, MLPActorCritic)
    return CompiledLearner(network)
