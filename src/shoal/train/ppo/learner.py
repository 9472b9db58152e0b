"""PPO's mathematics behind one face: by torch autograd for any network and device, by kernels where those fit.

Both act, judge and update from the same arrays and noise, and keep their state under the same names, so a
checkpoint of one is a checkpoint of the other.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.maths import distributions
from shoal.maths.gae import gae
from shoal.maths.losses import clipped_policy_loss, normalized, value_loss
from shoal.rollout.arrays.spaces import ActionRows
from shoal.train.ppo.compiled.learner import CompiledLearner
from shoal.train.ppo.compiled.network import (
    UpdateBatch,
    UpdateRates,
    UpdateStats,
    kernels_available,
)
from shoal.train.ppo.networks import ActorCritic, MLPActorCritic, copied

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
        weights = {name: copied(value) for name, value in self.network.state_dict().items()}
        moments: Arrays = {}
        for name, parameter in self.network.named_parameters():
            known = self.optimizer.state.get(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                moments[f"{key}.{name}"] = copied(known[key] if known else torch.zeros_like(parameter))
            if known:
                moments["step"] = np.array(int(known["step"]), np.int64)
        moments.setdefault("step", np.array(0, np.int64))
        return weights, moments

    def load_state(self, weights: Arrays, optimizer: Arrays) -> None:
        """What `state` gave."""
        self.network.load_state_dict(
            {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        )
        self.load_moments(optimizer)

    def load_moments(self, optimizer: Arrays) -> None:
        """The part of a state that is the optimizer's; torch puts each number on the device that reads it."""
        step = int(optimizer["step"])
        names = [name for name, p in self.network.named_parameters() if p.requires_grad] if step else []
        moments = {
            i: {
                "step": torch.tensor(float(step)),
                **{
                    key: torch.from_numpy(optimizer[f"{key}.{name}"].copy())
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }
            for i, name in enumerate(names)
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _rows(self, obs: Array, keep_bytes: bool = False) -> Tensor:
        rows = torch.from_numpy(np.ascontiguousarray(obs)).to(self.device)
        return rows if keep_bytes or rows.dtype == torch.float32 else rows.float()

    def _masks(self, masks: Array) -> Tensor | None:
        return torch.from_numpy(masks.astype(bool)).to(self.device) if masks.size else None

    def _log_std(self) -> Tensor:
        if self.network.log_std is None:
            raise ConfigError("continuous actions need a network with a parameter log_std")
        return self.network.log_std


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
