"""The settings of PPO, one dataclass from which `shoal train-ppo` is made, and what a caller may not give."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

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


POSITIVE = ("learning_rate", "clip_range", "adam_eps")
TINY, HUGE = (float(end) for end in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
LARGEST = 2**31 - 1
"""Of counts that take memory for each one."""


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
        for field in dataclasses.fields(self):
            name, given = field.name, getattr(self, field.name)
            if isinstance(given, np.generic):  # a checkpoint has no word for it
                given = given.item()
            if name == "hidden":
                given = _units(given)
            elif name in CHOICES:
                if given not in CHOICES[name]:
                    raise ConfigError(f"{name} must be one of {', '.join(CHOICES[name])}, got {given!r}")
            elif field.type == "bool":
                if given not in (False, True):
                    raise ConfigError(f"{name} must be True or False, got {given!r}")
                given = bool(given)
            elif field.type == "int":
                if not isinstance(given, int) or isinstance(given, bool):
                    raise ConfigError(f"{name} must be of whole numbers, got {given!r}")
            elif not isinstance(given, int | float) or isinstance(given, bool):
                raise ConfigError(f"{name} must be a number, got {given!r}")
            elif not math.isfinite(given):
                off = "; 0 is off" if name in ("clip_range_vf", "max_grad_norm", "target_kl") else ""
                raise ConfigError(f"{name} must be finite, got {given}{off}")
            elif abs(given) > HUGE or (name in POSITIVE and 0 < given < TINY):
                raise ConfigError(
                    f"{name} must lie between {TINY:.1e} and {HUGE:.1e} in size (float32), got {given}"
                )
            object.__setattr__(self, name, given)
        for name in ("n_steps", "batch_size", "n_epochs", "memory_units"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("n_steps", "n_epochs", "memory_units"):
            check_whole(name, getattr(self, name), most=LARGEST)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("clip_range_vf", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "sde_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")


def _units(given: Any) -> tuple[int, ...]:
    if isinstance(given, int | float | str) or given is None:
        raise ConfigError(f"hidden must be a tuple of units, one for each layer, got {given!r}")
    units = tuple(u.item() if isinstance(u, np.generic) else u for u in given)
    for unit in units:
        if not isinstance(unit, int):
            raise ConfigError(f"hidden must be of whole numbers, got {unit!r}")
        check_whole("hidden", unit, most=LARGEST)
    if not units or min(units) < 1:
        raise ConfigError(f"hidden must name at least one layer of at least one unit, got {units}")
    return units


BUILT_IN = (
    "hidden", "activation", "log_std_init", "recurrent", "memory_units", "cnn", "precision", "squash", "sde",
    "normalize_obs", "normalize_reward",
)  # fmt: skip
"""The settings of which a policy and its statistics are made: a run that goes on keeps them."""
BACKENDS = ("auto", "serial", "process")


def choose_device(device: str) -> str:
    """The device to use; "auto" is CUDA, then Apple's, then the CPU.

    Raises:
        ConfigError: it is not there, or no device.
    """
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, is_there in there.items() if is_there)
    name = device.partition(":")[0]
    if name not in there:
        raise ConfigError(f"device must be cpu, cuda, mps or auto, got {device!r}")
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


def check_whole(name: str, given: Any, least: int | None = None, most: int | None = None) -> int:
    """`given` as Python's own whole number; a `ConfigError` if it is none, or not from `least` to `most`."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise ConfigError(f"{name} must be a whole number, got {given!r}")
    if least is not None and given < least:
        raise ConfigError(f"{name} must be at least {least}, got {given}")
    if most is not None and given > most:
        raise ConfigError(f"{name} must be at most {most}, got {given}")
    return int(given)


def check_places(backend: str, num_workers: int | None, start_method: str | None) -> None:
    """Raise a `ConfigError` for places of environments that cannot be."""
    if backend not in BACKENDS:
        raise ConfigError(f"no backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if num_workers is not None and check_whole("num_workers", num_workers, most=LARGEST) < 0:
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
