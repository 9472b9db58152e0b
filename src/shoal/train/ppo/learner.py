"""PPO's mathematics behind one face: by torch autograd for any network and device, by kernels where those fit.

Both act, judge and update from the same arrays and noise, and keep their state under the same names, so a
checkpoint of one is a checkpoint of the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.maths import distributions
from shoal.maths.updates import clipped_policy_loss, gae, normalized, value_loss
from shoal.train.optimizers import Adam
from shoal.train.ppo.arrays.spaces import ActionRows
from shoal.train.ppo.arrays.steps import StepRollout
from shoal.train.ppo.compiled.network import (
    CompiledNetwork,
    UpdateBatch,
    UpdateRates,
    UpdateStats,
    kernels_available,
)
from shoal.train.ppo.networks import (
    ActorCritic,
    MLPActorCritic,
    Pieces,
    RecurrentActorCritic,
    SDEActorCritic,
    as_tensors,
    copied,
    pieces_of,
)

Array = np.ndarray
Arrays = dict[str, Array]
Tensors = dict[str, Tensor]


Minibatch = tuple[Tensors, Tensor, Tensor]
"""Samples `[m]` of a rollout, and the network's action parameters and values of them, with gradients."""


class TorchLearner:
    """PPO by autograd, for any network, whose outputs mean `actions`, and device."""

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
        self.optimizer = Adam(self._parameters, lr=1e-3, eps=adam_eps, fused=fused)

    def act(
        self, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """Write actions and their log-probabilities."""
        with torch.inference_mode():
            parameters = self.network.policy(self._rows(obs)).cpu().numpy()
            actions[:], logprobs[:] = self._drawn(parameters, masks, noise, deterministic)

    def _drawn(
        self, parameters: Array, masks: Array, noise: Array, deterministic: bool
    ) -> tuple[Array, Array]:
        if self.actions.is_discrete:
            return distributions.choose(parameters, noise, self.actions.groups, masks, deterministic)
        log_std, size = self._log_std().cpu().numpy(), self.actions.size
        if log_std.ndim == 2:
            mean, features = parameters[:, :size], parameters[:, size:]
            return distributions.explore(mean, features, log_std, noise, deterministic)
        return distributions.draw(parameters, log_std, noise, deterministic)

    def values(self, obs: Array) -> Array:
        """The critic's values."""
        if not len(obs):
            return np.zeros(0, np.float32)
        with torch.inference_mode():
            rows = 256 if obs.dtype == np.uint8 and self.device.type == "cpu" else 4096  # what a cache holds
            parts = [self.network.value(self._rows(obs[i : i + rows])) for i in range(0, len(obs), rows)]
            return torch.cat(parts).cpu().numpy()

    def gae(
        self, rewards: Array, values: Array, next_values: Array, terminated: Array, done: Array,
        gamma: float, gae_lambda: float,
    ) -> Array:  # fmt: skip
        """Advantages."""
        return gae(rewards, values, next_values, terminated, done, gamma=gamma, gae_lambda=gae_lambda)

    def update(self, batch: UpdateBatch, rates: UpdateRates) -> UpdateStats:
        """All epochs over one rollout, up to a gradient that is not finite, with which no step is made."""
        names = ("actions", "logprobs", "advantages", "returns", "values")
        data = {name: torch.from_numpy(getattr(batch, name)).to(self.device) for name in names}
        data["obs"], masks = self._rows(batch.obs), self._masks(batch.masks)
        if masks is not None:
            data["masks"] = masks
        for group in self.optimizer.param_groups:
            group["lr"], group["eps"] = rates.learning_rate, rates.adam_eps
        told: list[list[Tensor]] = []
        first_kl = None
        limit = rates.max_grad_norm if rates.max_grad_norm > 0 else float("inf")
        for minibatch in (m for order in batch.orders for m in self._minibatches(batch, data, order, rates)):
            loss, numbers = self._loss(minibatch, rates)
            first_kl = numbers[3] if first_kl is None else first_kl
            if rates.target_kl > 0 and float(numbers[3]) > 1.5 * rates.target_kl:
                break
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            gradient = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
            told.append([*numbers, gradient])
            if not math.isfinite(float(gradient)):
                break
            self.optimizer.step()
        means = torch.tensor([0.0] * 6) if not told else torch.stack(
            [torch.stack(column).mean() for column in zip(*told, strict=True)]
        )  # fmt: skip
        policy, critic, entropy, kl, clipped, norm = means.tolist()
        first = float(first_kl) if first_kl is not None else 0.0
        return UpdateStats(policy, critic, entropy, kl, clipped, norm, len(told), first)

    def _minibatches(
        self, batch: UpdateBatch, data: Tensors, order: Array, rates: UpdateRates
    ) -> Iterator[Minibatch]:
        """The samples of each minibatch of an epoch."""
        rows = torch.from_numpy(order).to(self.device)
        shuffled = {name: value[rows] for name, value in data.items()}
        for start in range(0, len(order), rates.batch_size):
            taken = {name: value[start : start + rates.batch_size] for name, value in shuffled.items()}
            yield taken, *self.network(taken["obs"])

    def _loss(self, minibatch: Minibatch, rates: UpdateRates) -> tuple[Tensor, list[Tensor]]:
        taken, parameters, values = minibatch
        if self.actions.is_discrete:
            groups, masks = self.actions.groups, taken.get("masks")
            scored = distributions.categorical_logprob(parameters, taken["actions"], groups, masks)
        elif isinstance(self.network, SDEActorCritic):
            mean, features = parameters[:, : self.actions.size], parameters[:, self.actions.size :]
            scored = distributions.gsde_logprob(mean, features, self._log_std(), taken["actions"])
        else:
            scored = distributions.gaussian_logprob(parameters, self._log_std(), taken["actions"])
        advantages = normalized(taken["advantages"]) if rates.normalize_advantage else taken["advantages"]
        policy = clipped_policy_loss(scored.logprob, taken["logprobs"], advantages, rates.clip)
        critic = value_loss(values, taken["returns"], taken["values"], rates.value_clip)
        entropy = scored.entropy.mean()
        loss = policy.loss + rates.vf_coef * critic - rates.ent_coef * entropy
        return loss, [
            policy.loss.detach(), critic.detach(), entropy.detach(), policy.approx_kl, policy.clip_fraction
        ]  # fmt: skip

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
        self.network.load_state_dict(as_tensors(weights))
        self.load_moments(optimizer)

    def load_moments(self, optimizer: Arrays) -> None:
        """The part of a state that is the optimizer's; torch puts each number on the device that reads it."""
        step = int(optimizer["step"])
        names = [name for name, p in self.network.named_parameters() if p.requires_grad] if step else []
        keys, moments = ("exp_avg", "exp_avg_sq"), dict[int, Tensors]()
        for i, name in enumerate(names):
            moments[i] = {key: torch.from_numpy(optimizer[f"{key}.{name}"].copy()) for key in keys}
            moments[i]["step"] = torch.tensor(float(step))
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _rows(self, obs: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(obs)).to(self.device)

    def _masks(self, masks: Array) -> Tensor | None:
        return torch.from_numpy(masks.astype(bool)).to(self.device) if masks.size else None

    def _log_std(self) -> Tensor:
        if self.network.log_std is None:
            raise ConfigError("continuous actions need a network with a parameter log_std")
        return self.network.log_std


class RecurrentLearner(TorchLearner):
    """PPO for a recurrent policy: a minibatch is the whole rollouts of some envs, cut where episodes begin.

    Gradients go back to the beginning of a rollout; the hidden state there is a constant.
    """

    network: RecurrentActorCritic

    def no_memory(self, n_envs: int) -> Array:
        """Hidden states `[N, S]` at the start of an episode."""
        return np.zeros((n_envs, self.network.memory_size), np.float32)

    def act_on(
        self, memory: Array, obs: Array, masks: Array, noise: Array, actions: Array, logprobs: Array,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        """`act`, with `memory[N, S]` of the envs, which is brought up to date in place."""
        with torch.inference_mode():
            before = torch.from_numpy(memory).to(self.device)
            parameters, _, after = self.network.step(self._rows(obs), before)
            actions[:], logprobs[:] = self._drawn(parameters.cpu().numpy(), masks, noise, deterministic)
            memory[:] = after.cpu().numpy()

    def value_on(self, memory: Array, obs: Array) -> float:
        """The value of one observation `[1, D]` after this hidden state, which is not changed."""
        with torch.inference_mode():
            return float(self.network.step(self._rows(obs), torch.from_numpy(memory).to(self.device))[1][0])

    def values_along(self, rollout: StepRollout, obs: Array, final_obs: Array) -> tuple[Array, Array]:
        """Values `[T + 1, N]` of a rollout's observations and `[K]` of its final ones, remembered up to there.

        Args:
            rollout: whose ends and memory count.
            obs: `[T + 1, N, D]` its observations as the network sees them.
            final_obs: `[K, D]` likewise.
        """
        assert rollout.memory is not None
        n_rows, n_envs = obs.shape[0] * obs.shape[1], obs.shape[1]
        begins, sequences = rollout.begins, []
        finals = {place: k for k, place in enumerate(zip(*np.nonzero(rollout.truncated), strict=True))}
        for i, first, last in _runs(begins):
            rows = [t * n_envs + i for t in range(first, last)]
            if (last - 1, i) in finals:
                rows.append(n_rows + finals[last - 1, i])
            sequences.append((i if first == 0 else -1, rows))
        everything = np.concatenate([obs.reshape(n_rows, -1), final_obs.reshape(len(finals), obs.shape[2])])
        with torch.inference_mode():
            memory = torch.from_numpy(rollout.memory).to(self.device)
            pieces = self._there(pieces_of(sequences, len(everything)))
            values = self.network.along(self._rows(everything), memory, pieces)[1].cpu().numpy()
        return values[:n_rows].reshape(obs.shape[:2]), values[n_rows:]

    def _minibatches(
        self, batch: UpdateBatch, data: Tensors, order: Array, rates: UpdateRates
    ) -> Iterator[Minibatch]:
        """Some envs each, as many as have about `batch_size` steps."""
        assert batch.begins is not None
        assert batch.valid is not None
        n_steps, n_envs = batch.begins.shape
        together = max(1, round(rates.batch_size / n_steps))
        runs: dict[int, list[tuple[int, int]]] = {}
        for i, first, last in _runs(batch.begins):
            runs.setdefault(i, []).append((first, last))
        all_memory = torch.from_numpy(batch.memory).to(self.device)
        for start in range(0, n_envs, together):
            envs = order[start : start + together]
            rows = (np.arange(n_steps)[:, None] * n_envs + envs).reshape(-1)
            sequences = [
                (k if first == 0 else -1, [t * len(envs) + k for t in range(first, last)])
                for k, i in enumerate(envs)
                for first, last in runs[int(i)]
            ]
            keep = torch.from_numpy(np.flatnonzero(batch.valid.reshape(-1)[rows])).to(self.device)
            if not len(keep):
                continue
            whole = torch.from_numpy(rows).to(self.device)
            pieces = self._there(pieces_of(sequences, len(rows)))
            seen, memory = data["obs"][whole], all_memory[torch.from_numpy(envs).to(self.device)]
            taken = {name: value[whole[keep]] for name, value in data.items() if name != "obs"}

            parameters, values = self.network.along(seen, memory, pieces)
            yield taken, parameters[keep], values[keep]

    def _there(self, pieces: Pieces) -> Pieces:
        return Pieces(*(part.to(self.device) for part in pieces))


def _runs(begins: Array) -> Iterator[tuple[int, int, int]]:
    """(env, first, behind the last) of each piece of an episode in `begins[T, N]`."""
    for i in range(begins.shape[1]):
        cuts = [0, *(int(t) for t in np.flatnonzero(begins[1:, i]) + 1), len(begins)]
        yield from ((i, first, last) for first, last in itertools.pairwise(cuts))


class CompiledLearner(CompiledNetwork):
    """PPO by the compiled kernels; the torch module is filled when somebody asks for `network` or `state`."""

    def __init__(self, network: MLPActorCritic) -> None:
        super().__init__(network.shape)
        self._network = network
        self._places = _places(network, self)
        self._take(self.weights, {name: copied(p) for name, p in network.named_parameters()})

    @property
    def network(self) -> MLPActorCritic:
        """The torch module with the current weights."""
        self._network.load_state_dict(as_tensors(self._named(self.weights)))
        return self._network

    def state(self) -> tuple[Arrays, Arrays]:
        """(weights, optimizer moments) by name, as `TorchLearner` has them."""
        moments = {f"exp_avg.{name}": value for name, value in self._named(self.first).items()}
        moments |= {f"exp_avg_sq.{name}": value for name, value in self._named(self.second).items()}
        return self._named(self.weights), {**moments, "step": np.array(self.count, np.int64)}

    def load_state(self, weights: Arrays, optimizer: Arrays) -> None:
        """What `state` gave."""
        self._take(self.weights, weights)
        for key, flat in (("exp_avg", self.first), ("exp_avg_sq", self.second)):
            self._take(flat, {name: optimizer[f"{key}.{name}"] for name in weights})
        self.count = int(optimizer["step"])

    def _named(self, flat: Array) -> Arrays:
        return {name: flat[place] for name, place in self._places.items()}

    def _take(self, flat: Array, named: Arrays) -> None:
        for name, place in self._places.items():
            flat[place] = named[name]


def _places(network: MLPActorCritic, compiled: CompiledNetwork) -> Arrays:
    """For each parameter of the module, in its shape there, where its numbers stand in a flat array."""
    places, numbers = {}, np.arange(compiled.weights.size)
    for part, dims, at in (("actor", compiled.actor, 0), ("critic", compiled.critic, compiled.critic_at)):
        linear = [layer for layer in getattr(network, part) if hasattr(layer, "weight")]
        for i, layer in enumerate(linear):
            units, inputs = layer.weight.shape
            matrix = numbers[at : at + dims[i] * dims[i + 1]]
            if i == len(linear) - 1:  # stored as [outputs, inputs]
                matrix = matrix.reshape(dims[i + 1], dims[i])
            else:
                matrix = matrix.reshape(dims[i], dims[i + 1]).T
            places[f"{part}.{2 * i}.weight"] = matrix[:units, :inputs].copy()
            at += dims[i] * dims[i + 1]
            places[f"{part}.{2 * i}.bias"] = numbers[at : at + units]
            at += dims[i + 1]
    if network.log_std is not None:
        places["log_std"] = numbers[compiled.std_at : compiled.std_at + network.log_std.numel()]
    return places


Learner = TorchLearner | CompiledLearner


def fits_kernels(network: ActorCritic, device: str) -> str | None:
    """Why the compiled path cannot take this network, or None if it can."""
    if type(network) is not MLPActorCritic:
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
    if isinstance(network, RecurrentActorCritic):
        return RecurrentLearner(network, actions, device, adam_eps)
    if path == "torch" or obstacle:
        return TorchLearner(network, actions, device, adam_eps)
    assert isinstance(network, MLPActorCritic)
    return CompiledLearner(network)
