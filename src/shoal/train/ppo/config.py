"""The settings of PPO, one dataclass from which `shoal train-ppo` is made, and what a caller may not give."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from shoal.core.errors import ConfigError, did_you_mean
from shoal.maths.updates import Decay

Activation = Literal["tanh", "relu"]
Recurrence = Literal["none", "lstm", "gru"]
Precision = Literal["float32", "bfloat16"]
Convolutions = Literal["auto", "nature", "impala", "small"]


CHOICES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr_schedule", "clip_schedule", "ent_schedule"), get_args(Decay)),
    "activation": get_args(Activation),
    "recurrent": get_args(Recurrence),
    "precision": get_args(Precision),
    "cnn": get_args(Convolutions),
}
"""The settings that are words; any other word would be taken for the last of them."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """How PPO learns; the defaults are those that most libraries share."""

    n_steps: int = 128
    """Steps of each env in one rollout."""
    batch_size: int = 256
    """Samples in one minibatch; the last one of an epoch may be smaller."""
    n_epochs: int = 4
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Of Adam, at the start of the run."""
    lr_schedule: Decay = "constant"
    """How the learning rate changes over the run: not at all, or down to 0."""
    gamma: float = 0.99
    """Discount of a reward per step."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation: 0 trusts the critic after one step, 1 only the rewards."""
    clip_range: float = 0.2
    """How far the probability ratio of an action may leave 1 before it stops counting."""
    clip_schedule: Decay = "constant"
    """Likewise of the clip range."""
    clip_range_vf: float = 0.0
    """Clip the change of the value too, by this much; 0 is off. It depends on the scale of returns."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus, which keeps the policy exploring."""
    ent_schedule: Decay = "constant"
    """Likewise of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Clip the gradient's global norm; 0 is off."""
    target_kl: float = 0.0
    """Stop an update when a minibatch's KL exceeds 1.5 times this; 0 is off."""
    normalize_advantage: bool = True
    """Advantages to mean 0 and deviation 1 in each minibatch."""
    normalize_obs: bool = False
    """Observations to mean 0 and deviation 1, clipped to 10; statistics change between rollouts only."""
    normalize_reward: bool = False
    """Rewards by the deviation of their running discounted sum, clipped to 10."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of the hidden layers, of the actor and of the critic."""
    activation: Activation = "tanh"
    """Of the hidden layers."""
    log_std_init: float = 0.0
    """Where the log standard deviation of continuous actions starts."""
    adam_eps: float = 1e-5
    """Added to Adam's denominator."""
    recurrent: Recurrence = "none"
    """A policy that remembers: "lstm" or "gru" behind the hidden layers; trained through whole rollouts."""
    memory_units: int = 64
    """Of the recurrent layer."""
    cnn: Convolutions = "auto"
    """For images: "nature" (Mnih et al. 2015), "impala" (residual), "small", or by their size."""
    precision: Precision = "float32"
    """Of the convolutions: "bfloat16" is faster on processors that have it (AVX-512 BF16, AMX, GPUs)."""
    squash: bool = False
    """Continuous actions through tanh into their bounds, instead of clipped to them."""
    sde: bool = False
    """State-dependent exploration (gSDE, arXiv:2005.05719) for continuous actions of perceptrons."""
    sde_every: int = 0
    """Steps between its draws; 0 for one draw a rollout."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {given!r}")
        for field in dataclasses.fields(self):
            if isinstance(given := getattr(self, field.name), np.generic):  # a checkpoint has no word for it
                given = given.item()
                object.__setattr__(self, field.name, given)
            if isinstance(given, float) and not math.isfinite(given):
                off = "; 0 is off" if field.name in ("clip_range_vf", "max_grad_norm", "target_kl") else ""
                raise ConfigError(f"{field.name} must be finite, got {given}{off}")
        if isinstance(self.hidden, int | float | str):
            raise ConfigError(f"hidden must be a tuple of units, one for each layer, got {self.hidden!r}")
        units = (u.item() if isinstance(u, np.generic) else u for u in self.hidden)
        object.__setattr__(self, "hidden", tuple(units))
        whole = {name: getattr(self, name) for name in ("n_steps", "batch_size", "n_epochs", "memory_units")}
        for name, given in [*whole.items(), *(("hidden", u) for u in self.hidden)]:
            if not isinstance(given, int):
                raise ConfigError(f"{name} must be of whole numbers, got {given!r}")
        for name, given in whole.items():
            if given < 1:
                raise ConfigError(f"{name} must be at least 1, got {given}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("learning_rate", "clip_range", "adam_eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("clip_range_vf", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "sde_every"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"hidden must name at least one layer of at least one unit, got {self.hidden}")


BACKENDS = ("auto", "serial", "process")


def choose_device(device: str) -> str:
    """The device to use; "auto" is CUDA, then Apple's, then the CPU.

    Raises:
        ConfigError: it is not there, or no device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = device.partition(":")[0]
    if name not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device must be cpu, cuda, mps or auto, got {device!r}")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise ConfigError(f"device {device!r} is not available here; use --device auto")
    return device


def read_config(values: Mapping[str, Any]) -> PPOConfig:
    """The config in a checkpoint; unknown settings are an error."""
    check_settings(values)
    plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return PPOConfig(**plain)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` for a setting that `PPOConfig` does not have."""
    known = [field.name for field in dataclasses.fields(PPOConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"no PPO setting named {name!r}.{did_you_mean(name, known)}")


def check_call(
    n_envs: int, backend: str, num_workers: int | None, start_method: str | None, settings: Mapping[str, Any]
) -> None:
    """Raise a `ConfigError` for arguments of `PPO` that cannot be."""
    check_settings(settings)
    if not isinstance(n_envs, int | np.integer):
        raise ConfigError(f"n_envs must be a whole number, got {n_envs!r}")
    if n_envs < 1:
        raise ConfigError(f"n_envs must be at least 1, got {n_envs}")
    if backend not in BACKENDS:
        raise ConfigError(f"no backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if num_workers is not None and num_workers < 0:
        raise ConfigError(f"num_workers must not be negative, got {num_workers}")
    if backend == "process" and num_workers == 0:
        raise ConfigError("backend='process' needs at least one worker, got num_workers=0")
    if backend == "serial" and num_workers:
        raise ConfigError(
            f"backend='serial' has no workers, got num_workers={num_workers}; say "
            "backend='process' or num_workers=0"
        )
    have = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in have:
        raise ConfigError(
            f"this system has no start method {start_method!r}.{did_you_mean(start_method, have)}"
        )
