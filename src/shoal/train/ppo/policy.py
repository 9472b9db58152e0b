"""A trained policy without its trainer: load it, ask it for actions, write it as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.core.errors import ConfigError, needs_extra
from shoal.maths.distributions import EXPLORED_LEAST, choose
from shoal.maths.normalizer import ObservationNormalizer
from shoal.rollout.arrays.spaces import AS_FLOAT32, ActionRows, ObservationRows
from shoal.train.ppo.checkpoint import Checkpoint, load_checkpoint, read_space
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.envs import squashed, unbounded

Array = np.ndarray


class Policy:
    """What `load_policy` returns: `policy(observation)` is an action of the env's action space.

    A perceptron runs on NumPy alone; other networks need torch. Greedy unless a `rng` is given.
    """

    def __init__(self, checkpoint: Checkpoint, network: Any = None) -> None:
        described = checkpoint.policy
        self.env = described["env"]
        self.observation_space = read_space(described["observation_space"])
        self.action_space = read_space(described["action_space"])
        self.rows = ObservationRows(self.observation_space)
        self._squashes = described.get("squash", False)
        self.actions = ActionRows(unbounded(self.action_space) if self._squashes else self.action_space)
        self.norm: ObservationNormalizer | None = None
        if described["normalize_obs"]:
            self.norm = ObservationNormalizer(self.rows.n_numbers)
            self.norm.load_state(checkpoint.statistics)
        self._checkpoint = checkpoint
        self._network = network
        self._module: Any = None
        self._memory: Any = None
        if described["network"] != "MLPActorCritic":
            self._module = self.module()
        self.reset()

    def reset(self) -> None:
        """An episode begins: a recurrent policy forgets what it remembers. Call it after every `env.reset()`."""
        self._memory = None
        if "recurrent" in self._checkpoint.policy:
            import torch

            self._memory = torch.zeros(1, self._module.memory_size)

    def __call__(self, observation: Any, *, mask: Any = None, rng: np.random.Generator | None = None) -> Any:
        """The action for one observation.

        Args:
            observation: of the env's observation space.
            mask: allowed actions, for an env with action masks.
            rng: draw from the distribution instead of taking its mode.

        Raises:
            ValueError: the observation is not finite, or the mask is none for these actions or allows none.
        """
        actions, masks = self.actions, mask_row(self.actions, mask)
        parameters = self.parameters(observation_row(self.rows, observation))[0]
        if actions.is_discrete:
            noise = np.zeros(actions.size) if rng is None else rng.random(actions.size)
            logits = parameters[None].astype(np.float64)
            chosen = choose(logits, noise[None], actions.groups, masks, deterministic=rng is None)[0][0]
        else:
            log_std = self._checkpoint.weights["log_std"]
            size = actions.size
            mean, deviation = parameters[:size], np.exp(log_std)
            if log_std.ndim == 2:  # state-dependent exploration: the features stand behind the means
                deviation = np.sqrt(parameters[size:] ** 2 @ deviation**2 + EXPLORED_LEAST)
            drawn = rng.standard_normal(size) if rng is not None else 0.0
            chosen = (mean + deviation * drawn).astype(np.float32)
        action = actions.to_env(chosen[None])[0]
        return squashed(self.action_space, action) if self._squashes else action

    def parameters(self, rows: Array) -> Array:
        """Logits or means for raw observation rows `[B, D]`."""
        seen = rows
        if self.norm is not None:
            seen = self.rows.with_numbers(rows, self.norm(self.rows.numbers(rows)))
        if self._module is not None:
            import torch

            with torch.inference_mode():
                tensor = torch.from_numpy(np.asarray(seen))
                if self._memory is None:
                    return self._module.policy(tensor).numpy()  # type: ignore[no-any-return]
                answer, _, memory = self._module.step(tensor, self._memory.expand(len(seen), -1))
                self._memory = memory[-1:]
                return answer.numpy()  # type: ignore[no-any-return]
        weights = self._checkpoint.weights
        layers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("actor.")})
        tanh = self._checkpoint.policy["activation"] == "tanh"
        for layer in layers:
            seen = seen @ weights[f"actor.{layer}.weight"].T + weights[f"actor.{layer}.bias"]
            if layer != layers[-1]:
                seen = np.tanh(seen) if tanh else np.maximum(seen, 0.0)
        return seen

    def module(self) -> Any:
        """The torch network with these weights."""
        from shoal.train.ppo.networks import as_tensors, build_network

        described = self._checkpoint.policy
        kind = described["network"]
        ours = ("MLPActorCritic", "CNNActorCritic", "RecurrentActorCritic", "SDEActorCritic")
        if kind not in ours and self._network is None:
            raise ConfigError(f"this policy has its own network: pass network={kind}()")
        known = ("hidden", "activation", "cnn", "precision", "recurrent", "memory_units")
        told = {key: described[key] for key in known if key in described}
        config = PPOConfig(sde=kind == "SDEActorCritic", **told)
        module = build_network(self.rows, self.actions, config, seed=0, network=self._network)
        module.load_state_dict(as_tensors(self._checkpoint.weights))
        return module.eval()

    def export_onnx(self, path: Path | str) -> Path:
        """Write the actor as ONNX: input `observation [batch, D]` raw rows, output `action_parameters`.

        Normalisation is part of the graph. Rows are what `ObservationRows` makes: for a flat Box, the
        observation itself; with images, the numbers and then the pixels, all as floats. For choices take
        the largest parameter of each group; for points they are the action, before it is clipped to its bounds
        or, with `squash=True`, squashed into them. All of it is float32, also of a policy trained with
        `precision="bfloat16"`.
        """
        with needs_extra("ONNX export", "onnx"):
            import onnx  # noqa: F401
        import torch

        if "recurrent" in self._checkpoint.policy:
            raise ConfigError("a recurrent policy has no ONNX form here; load it with shoal.load_policy")
        from shoal.train.ppo.networks import Encoder, ExportedPolicy, write_onnx

        mean = scale = None
        if self.norm is not None and self.norm.moments.count:
            mean, scale = torch.from_numpy(self.norm.mean), torch.from_numpy(self.norm.scale)
        module = self.module()
        for part in module.modules():
            if isinstance(part, Encoder):
                part.halved = False
        bounds = None
        if self._squashes:
            assert isinstance(self.action_space, spaces.Box)
            low, high = self.action_space.low.reshape(-1), self.action_space.high.reshape(-1)
            bounds = torch.from_numpy(np.float32(low)), torch.from_numpy(np.float32(high))
        pixels = sum(leaf.stop - leaf.start for leaf in self.rows.leaves if leaf.is_image)
        exported = ExportedPolicy(module, mean, scale, bounds)
        return write_onnx(exported, self.rows.n_numbers + pixels, Path(path))


def load_policy(path: Path | str, network: Any = None) -> Policy:
    """The policy of a checkpoint or run folder, ready to act; nothing of the trainer is needed.

    Args:
        path: a checkpoint folder, or a run folder (the newest checkpoint is taken).
        network: the `nn.Module` of a policy that has its own.
    """
    return Policy(load_checkpoint(path), network)


def observation_row(rows: ObservationRows, observation: Any) -> Array:
    """One observation as a row `[1, D]`."""
    row = np.zeros((1, rows.size), rows.dtype)
    rows.encode_one(observation, row[0])
    if not np.isfinite(rows.numbers(row)).all():
        raise ValueError(f"an observation must be finite, got {observation} ({AS_FLOAT32})")
    return row


def mask_row(actions: ActionRows, mask: Any) -> Array:
    """A caller's mask for one action as a row of masks; without entries for None."""
    if mask is None:
        return np.zeros((1, 0), np.uint8)
    row = np.asarray(mask).reshape(1, -1).astype(bool)
    if not actions.is_discrete:
        raise ValueError("mask is for choices, and these actions are continuous")
    if row.size != actions.n_parameters:
        raise ValueError(f"mask must have {actions.n_parameters} entries, one per action, got {row.size}")
    if any(actions.forbidden(row)):
        raise ValueError("the action mask allows no action")
    return row.astype(np.uint8)
