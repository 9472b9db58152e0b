"""Two learners with one face: torch autograd for any network, compiled kernels for perceptrons on the CPU.

Both act, judge and update from the same arrays and noise, and keep their state under the same names, so a
checkpoint of one is a checkpoint of the other.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.rollout.spaces import ActionRows
from shoal.train import distributions
from shoal.train.compiled_network import (
    CompiledNetwork,
    UpdateBatch,
    UpdateRates,
    UpdateStats,
    kernels_available,
    n_parameters,
)
from shoal.train.gae import gae
from shoal.train.policy_networks import ActorCritic, MLPActorCritic
from shoal.train.ppo_losses import clipped_policy_loss, normalized, value_loss

logger = logging.getLogger(__name__)
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


class TorchLearner:
    """PPO by autograd, for any network and device.

    Args:
        network: the policy.
        actions: what its outputs mean.
        device: where it lives.
        adam_eps: of the optimizer.
    """

    def __init__(
        self, network: ActorCritic, actions: ActionRows, device: str = "cpu", adam_eps: float = 1e-5
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device)
        self.actions = actions
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("the network has no parameters that learn")
        fused = self.device.type in ("cpu", "cuda") and all(p.is_floating_point() for p in self._parameters)
        self.optimizer = torch.optim.Adam(self._parameters, lr=1e-3, eps=adam_eps, fused=fused)

    def act(
        self,
        obs: Array,
        masks: Array,
        noise: Array,
        actions: Array,
        logprobs: Array,
        deterministic: bool = False,
    ) -> None:
        """Write actions and their log-probabilities."""
        with torch.inference_mode():
            parameters = self.network.policy(self._rows(obs)).cpu().numpy()
            if self.actions.is_discrete:
                chosen = distributions.choose(parameters, noise, self.actions.groups, masks, deterministic)
            else:
                log_std = self._log_std().cpu().numpy()
                chosen = distributions.draw(parameters, log_std, noise, deterministic)
        actions[:], logprobs[:] = chosen

    def values(self, obs: Array) -> Array:
        """The critic's values."""
        if not len(obs):
            return np.zeros(0, np.float32)
        with torch.inference_mode():
            parts = [self.network.value(self._rows(obs[i : i + 4096])) for i in range(0, len(obs), 4096)]
            return torch.cat(parts).cpu().numpy()

    def gae(
        self, rewards: Array, values: Array, next_values: Array, terminated: Array, done: Array,
        gamma: float, gae_lambda: float,
    ) -> Array:  # fmt: skip
        """Advantages."""
        return gae(rewards, values, next_values, terminated, done, gamma=gamma, gae_lambda=gae_lambda)

    def update(self, batch: UpdateBatch, rates: UpdateRates) -> UpdateStats:
        """All epochs over one rollout; nothing is read back from the device before the end."""
        data = {
            name: torch.from_numpy(getattr(batch, name)).to(self.device)
            for name in ("actions", "logprobs", "advantages", "returns", "values")
        }
        obs, masks = self._rows(batch.obs, keep_bytes=True), self._masks(batch.masks)
        orders = torch.from_numpy(batch.orders).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"], group["eps"] = rates.learning_rate, rates.adam_eps
        told: list[list[Tensor]] = []
        first_kl, stop = None, False
        limit = rates.max_grad_norm if rates.max_grad_norm > 0 else float("inf")
        for order in orders:
            shuffled = {name: value[order] for name, value in data.items()}
            shuffled_obs, shuffled_masks = obs[order], masks[order] if masks is not None else None
            for start in range(0, len(order), rates.batch_size):
                rows = slice(start, start + rates.batch_size)
                taken = {name: value[rows] for name, value in shuffled.items()}
                mask = shuffled_masks[rows] if shuffled_masks is not None else None
                loss, numbers = self._loss(shuffled_obs[rows].float(), mask, taken, rates)
                first_kl = numbers[3] if first_kl is None else first_kl
                if rates.target_kl > 0 and float(numbers[3]) > 1.5 * rates.target_kl:
                    stop = True
                    break
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                gradient = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
                self.optimizer.step()
                told.append([*numbers, gradient])
            if stop:
                break
        means = torch.tensor([0.0] * 6) if not told else torch.stack(
            [torch.stack(column).mean() for column in zip(*told, strict=True)]
        )  # fmt: skip
        policy, critic, entropy, kl, clipped, norm = means.tolist()
        first = float(first_kl) if first_kl is not None else 0.0
        return UpdateStats(policy, critic, entropy, kl, clipped, norm, len(told), first)

    def _loss(
        self, obs: Tensor, masks: Tensor | None, taken: dict[str, Tensor], rates: UpdateRates
    ) -> tuple[Tensor, list[Tensor]]:
        parameters, values = self.network(obs)
        if self.actions.is_discrete:
            judged = distributions.judge_choices(parameters, taken["actions"], self.actions.groups, masks)
        else:
            judged = distributions.judge_points(parameters, self._log_std(), taken["actions"])
        advantages = normalized(taken["advantages"]) if rates.normalize_advantage else taken["advantages"]
        policy = clipped_policy_loss(judged.logprob, taken["logprobs"], advantages, rates.clip)
        critic = value_loss(values, taken["returns"], taken["values"], rates.value_clip)
        entropy = judged.entropy.mean()
        loss = policy.loss + rates.vf_coef * critic - rates.ent_coef * entropy
        return loss, [
            policy.loss.detach(), critic.detach(), entropy.detach(), policy.approx_kl, policy.clip_fraction
        ]  # fmt: skip

    def snapshot(self) -> Any:
        """A copy of everything an update changes."""
        return self.state()

    def restore(self, snapshot: Any) -> None:
        """Undo the update since `snapshot`."""
        self.load_state(*snapshot)

    def state(self) -> tuple[Arrays, Arrays]:
        """(weights, optimizer moments) by name."""
        weights = {name: _copied(value) for name, value in self.network.state_dict().items()}
        moments: Arrays = {}
        for name, parameter in self.network.named_parameters():
            known = self.optimizer.state.get(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                moments[f"{key}.{name}"] = _copied(known[key] if known else torch.zeros_like(parameter))
            if known:
                moments["step"] = np.array(int(known["step"]), np.int64)
        moments.setdefault("step", np.array(0, np.int64))
        return weights, moments

    def load_state(self, weights: Arrays, optimizer: Arrays) -> None:
        """What `state` gave."""
        self.network.load_state_dict(
            {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        )
        self.optimizer.state.clear()
        step = int(optimizer["step"])
        for name, parameter in self.network.named_parameters():
            if step and parameter.requires_grad:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(step), dtype=torch.float32),
                    **{
                        key: torch.from_numpy(optimizer[f"{key}.{name}"].copy()).to(self.device)
                        for key in ("exp_avg", "exp_avg_sq")
                    },
                }

    def _rows(self, obs: Array, keep_bytes: bool = False) -> Tensor:
        rows = torch.from_numpy(np.ascontiguousarray(obs)).to(self.device)
        return rows if keep_bytes or rows.dtype == torch.float32 else rows.float()

    def _masks(self, masks: Array) -> Tensor | None:
        return torch.from_numpy(masks.astype(bool)).to(self.device) if masks.size else None

    def _log_std(self) -> Tensor:
        if self.network.log_std is None:
            raise ConfigError("continuous actions need a network with a parameter log_std")
        return self.network.log_std


class CompiledLearner:
    """PPO by the compiled kernels; the torch module is filled when somebody asks for `network` or `state`."""

    def __init__(self, network: MLPActorCritic) -> None:
        started = time.monotonic()
        self.compiled = CompiledNetwork(network.shape)
        self._network = network
        self._places = _places(network, self.compiled)
        self._take(self.compiled.weights, {name: _copied(p) for name, p in network.named_parameters()})
        logger.debug("kernels loaded in %.1f s", time.monotonic() - started)
        self.act, self.values = self.compiled.act, self.compiled.values
        self.gae, self.update = self.compiled.gae, self.compiled.update

    @property
    def network(self) -> MLPActorCritic:
        """The torch module with the current weights."""
        weights = {
            name: torch.from_numpy(value) for name, value in self._named(self.compiled.weights).items()
        }
        self._network.load_state_dict(weights)
        return self._network

    def snapshot(self) -> Any:
        """A copy of everything an update changes."""
        net = self.compiled
        return net.weights.copy(), net.first.copy(), net.second.copy(), net.count

    def restore(self, snapshot: Any) -> None:
        """Undo the update since `snapshot`."""
        net = self.compiled
        net.weights[:], net.first[:], net.second[:], net.count = snapshot

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


def _copied(tensor: Tensor) -> Array:
    return np.array(tensor.detach().cpu().numpy(), copy=True)


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
