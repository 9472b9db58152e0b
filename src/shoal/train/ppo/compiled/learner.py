"""PPO's mathematics by compiled kernels, for perceptrons on the CPU, and where their weights are in torch's module."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from shoal.train.ppo.compiled.network import (
    CompiledNetwork,
    n_parameters,
)
from shoal.train.ppo.networks import MLPActorCritic, copied

logger = logging.getLogger(__name__)
Array = np.ndarray
Arrays = dict[str, Array]


class CompiledLearner:
    """PPO by the compiled kernels; the torch module is filled when somebody asks for `network` or `state`."""

    def __init__(self, network: MLPActorCritic) -> None:
        started = time.monotonic()
        self.compiled = CompiledNetwork(network.shape)
        self._network = network
        self._places = _places(network, self.compiled)
        self._take(self.compiled.weights, {name: copied(p) for name, p in network.named_parameters()})
        logger.debug("kernels loaded in %.1f s", time.monotonic() - started)
        self.act, self.values = self.compiled.act, self.compiled.values
        self.gae, self.update = self.compiled.gae, self.compiled.update
        self.snapshot, self.restore = self.compiled.snapshot, self.compiled.restore

    @property
    def network(self) -> MLPActorCritic:
        """The torch module with the current weights."""
        weights = {
            name: torch.from_numpy(value) for name, value in self._named(self.compiled.weights).items()
        }
        self._network.load_state_dict(weights)
        return self._network

    def state(self) -> tuple[Arrays, Arrays]:
        """(weights, optimizer moments) by name, as `TorchLearner` has them."""
        moments = {f"exp_avg.{name}": value for name, value in self._named(self.compiled.first).items()}
        moments |= {f"exp_avg_sq.{name}": value for name, value in self._named(self.compiled.second).items()}
        return self._named(self.compiled.weights), {
            **moments,
            "step": np.array(self.compiled.count, np.int64),
        }

    def load_state(self, weights: Arrays, optimizer: Arrays) -> None:
        """What `state` gave."""
        self._take(self.compiled.weights, weights)
        for key, flat in (("exp_avg", self.compiled.first), ("exp_avg_sq", self.compiled.second)):
            self._take(flat, {name: optimizer[f"{key}.{name}"] for name in weights})
        self.compiled.count = int(optimizer["step"])

    def _named(self, flat: Array) -> Arrays:
        return {name: view(flat).copy() for name, view in self._places.items()}

    def _take(self, flat: Array, named: Arrays) -> None:
        for name, view in self._places.items():
            view(flat)[...] = named[name]


def _places(network: MLPActorCritic, compiled: CompiledNetwork) -> dict[str, Any]:
    """For each parameter of the module, a function from a flat array to its view there, in torch's shape."""
    places: dict[str, Any] = {}
    for part, dims, at in (("actor", compiled.actor, 0), ("critic", compiled.critic, compiled.critic_at)):
        linear = [layer for layer in getattr(network, part) if hasattr(layer, "weight")]
        for i, layer in enumerate(linear):
            units, inputs = layer.weight.shape
            padded_in, padded_out = int(dims[i]), int(dims[i + 1])
            name = f"{part}.{2 * i}"
            last = i == len(linear) - 1
            places[f"{name}.weight"] = _weight_view(at, padded_in, padded_out, inputs, units, last)
            bias_at = at + padded_in * padded_out
            places[f"{name}.bias"] = lambda flat, a=bias_at, n=units: flat[a : a + n]
            at += n_parameters(np.array([padded_in, padded_out]))
    if network.log_std is not None:
        size = network.log_std.numel()
        places["log_std"] = lambda flat, a=compiled.std_at, n=size: flat[a : a + n]
    return places


def _weight_view(at: int, padded_in: int, padded_out: int, inputs: int, units: int, last: bool) -> Any:
    end = at + padded_in * padded_out
    if last:  # stored as [outputs, inputs]
        return lambda flat: flat[at:end].reshape(padded_out, padded_in)[:units, :inputs]
    return lambda flat: flat[at:end].reshape(padded_in, padded_out)[:inputs, :units].T
