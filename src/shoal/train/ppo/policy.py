"""A trained policy without its trainer: load it, ask it for actions, write it as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.core.errors import ConfigError, needs_extra
from shoal.maths.distributions import EXPLORED_LEAST, choose
from shoal.maths.normalizer import ObservationNormalizer
from shoal.train.ppo.arrays.spaces import AS_FLOAT32, ActionRows, ObservationRows
from shoal.train.ppo.checkpoint import Checkpoint, load_checkpoint, read_space
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.envs import squashed, unbounded

Array = np.ndarray


class Policy:
    """What `load_policy` returns: `policy(observation)` is an action of the env's action space, or a batch of them.

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
            self.norm = ObservationNormalizer(self.rows.n_numbers, self.rows.choices)
            self.norm.load_state(checkpoint.statistics)
        self._checkpoint = checkpoint
        self._network = network
        self._module: Any = None
        self._remembers = "recurrent" in described
        self._memory: Array | None = None  # [N, S] of a recurrent policy
        self.masked: bool = described.get("masked", False)
        """Whether it was trained with action masks."""
        if described["network"] != "MLPActorCritic":
            self._module = self.module()

    def reset(self, ended: Any = None) -> None:
        """An episode begins: a recurrent policy forgets the last one. Call it after every `env.reset()`.

        Args:
            ended: `[N]` bool, the envs of a batch in which one begins; None for all.
        """
        if ended is None:
            self._memory = None
        elif self._memory is not None:
            self._memory[np.flatnonzero(ended)] = 0.0

    def __call__(self, observation: Any, mask: Any = None, *, rng: np.random.Generator | None = None) -> Any:
        """The action for one observation, or `[N, ...]` actions for a batch `[N, ...]` of them.

        Args:
            observation: of the env's observation space, or a batch as a vector env returns it.
            mask: allowed actions, `[sum of choices]` or a batch of them; needed if the env gave masks in training.
            rng: draw from the distribution instead of taking its mode.

        Raises:
            ValueError: the observation is not finite, or the mask is missing, none for these actions or allows none.
        """
        actions, n = self.actions, batch_of(self.rows, observation)
        if mask is None and self.masked:
            raise ValueError(
                "the policy was trained with action masks and must act with them: policy(observation, "
                "info['action_mask'])"
            )
        rows = observation_rows(self.rows, observation, n)
        masks = mask_rows(actions, mask, len(rows))
        parameters, size = self.parameters(rows), actions.size
        if actions.is_discrete:
            noise = np.zeros((len(rows), size)) if rng is None else rng.random((len(rows), size))
            logits = parameters.astype(np.float64)
            chosen = choose(logits, noise, actions.groups, masks, deterministic=rng is None)[0]
        else:
            log_std = self._checkpoint.weights["log_std"]
            mean, deviation = parameters[:, :size], np.exp(log_std)
            if log_std.ndim == 2:  # state-dependent exploration: the features stand behind the means
                deviation = np.sqrt(parameters[:, size:] ** 2 @ deviation**2 + EXPLORED_LEAST)
            drawn = rng.standard_normal((len(rows), size)) if rng is not None else 0.0
            chosen = (mean + deviation * drawn).astype(np.float32)
        action = actions.to_env(chosen)[0] if n is None else actions.to_batch(chosen)
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
                if not self._remembers:
                    return self._module.policy(tensor).numpy()  # type: ignore[no-any-return]
                if self._memory is None:
                    self._memory = np.zeros((len(seen), self._module.memory_size), np.float32)
                if len(self._memory) != len(seen):
                    raise ValueError(
                        f"a recurrent policy remembers {len(self._memory)} envs, got observations of {len(seen)}: "
                        "call policy.reset() first"
                    )
                answer, _, memory = self._module.step(tensor, torch.from_numpy(self._memory))
                self._memory = memory.numpy().copy()
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

        Normalisation is part of the graph. Rows are what `ObservationRows` makes: for a flat Box, the observation
        itself; with images, the numbers and then the pixels, all as floats. For choices take the largest parameter of
        each group, of those that a mask allows; for points they are the action, before it is clipped to its bounds or,
        with `squash=True`, squashed into them. All of it is float32, also of a policy trained with
        `precision="bfloat16"`.
        """
        with needs_extra("ONNX export", "onnx"):
            import onnx  # noqa: F401
        import torch

        if self._remembers:
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


def batch_of(rows: ObservationRows, observation: Any) -> int | None:
    """How many observations a batch holds; None for a single one."""
    leaf = rows.leaves[0]
    try:
        for key in leaf.path:
            observation = observation[key]
        return len(observation) if np.ndim(observation) == len(leaf.space.shape or ()) + 1 else None
    except (LookupError, TypeError, ValueError):  # no observation: the encoding says what is expected
        return None


def observation_rows(rows: ObservationRows, observation: Any, n: int | None = None) -> Array:
    """One observation, or a batch of `n`, as rows `[N, D]`."""
    found = np.zeros((1 if n is None else n, rows.size), rows.dtype)
    if n is None:
        rows.encode_one(observation, found[0])
    else:
        rows.encode(observation, found)
    if not np.isfinite(rows.numbers(found)).all():
        raise ValueError(f"an observation must be finite, got {observation} ({AS_FLOAT32})")
    return found


def mask_rows(actions: ActionRows, mask: Any, n: int = 1) -> Array:
    """A caller's masks for `n` actions as rows; without entries for None."""
    if mask is None:
        return np.zeros((n, 0), np.uint8)
    if not actions.is_discrete:
        raise ValueError("mask is for choices, and these actions are continuous")
    given = np.asarray(mask)
    if given.size != n * actions.n_parameters:
        of = f" for each of {n} observations" if n > 1 else ""
        raise ValueError(
            f"mask must have {actions.n_parameters} entries, one per action{of}, got {given.size}"
        )
    rows = given.reshape(n, -1).astype(bool)
    if any(actions.forbidden(rows)):
        raise ValueError("the action mask allows no action")
    return rows.astype(np.uint8)
