"""The settings of PPO, one dataclass from which `shoal train-ppo` is made, and what a caller may not give."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from shoal.core.configuration import check_fields
from shoal.core.errors import ConfigError, did_you_mean
from shoal.maths.updates import Decay

Activation = Literal["tanh", "relu"]
Recurrence = Literal["none", "lstm", "gru"]
Precision = Literal["float32", "bfloat16"]
Convolutions = Literal["auto", "nature", "impala", "small"]


TINY, HUGE = (float(end) for end in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
LARGEST = 2**31 - 1
"""Of counts that take memory for each one."""
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Number = Annotated[float, Meta(ge=-HUGE, le=HUGE)]
Positive = Annotated[float, Meta(ge=TINY, le=HUGE)]
NotNegative = Annotated[float, Meta(ge=0, le=HUGE)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """How PPO learns; the defaults are those that most libraries share."""

    n_steps: Count = 128
    """Steps of each env in one rollout."""
    batch_size: Annotated[int, Meta(ge=1)] = 256
    """Samples in one minibatch; the last one of an epoch may be smaller."""
    n_epochs: Count = 4
    """Passes over each rollout."""
    learning_rate: Positive = 3e-4
    """Initial learning rate of Adam."""
    lr_schedule: Decay = "constant"
    """Schedule of the learning rate over the run: constant, or down to 0."""
    gamma: Share = 0.99
    """Discount of a reward per step."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the critic after one step, 1 only the rewards."""
    clip_range: Positive = 0.2
    """Clip range of the probability ratio."""
    clip_schedule: Decay = "constant"
    """Schedule of the clip range."""
    clip_range_vf: NotNegative = 0.0
    """Clip the change of the value too, by this much; 0 is off. It depends on the scale of returns."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus, which keeps the policy exploring."""
    ent_schedule: Decay = "constant"
    """Schedule of the entropy bonus."""
    vf_coef: NotNegative = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: NotNegative | None = 0.5
    """Clip the gradient's global norm; 0 or none is off."""
    target_kl: NotNegative = 0.0
    """Stop an update when a minibatch's KL exceeds 1.5 times this; 0 is off."""
    normalize_advantage: bool = True
    """Advantages to mean 0 and deviation 1 in each minibatch."""
    normalize_obs: bool = False
    """Observations to mean 0 and deviation 1, clipped to 10; statistics change between rollouts only."""
    normalize_reward: bool = False
    """Rewards by the deviation of their running discounted sum, clipped to 10."""
    hidden: Annotated[tuple[Count, ...], Meta(min_length=1)] = (64, 64)
    """Units of the hidden layers, of the actor and of the critic."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    log_std_init: Number = 0.0
    """Initial log standard deviation of continuous actions."""
    adam_eps: Positive = 1e-5
    """Added to Adam's denominator."""
    recurrent: Recurrence = "none"
    """Recurrent core behind the hidden layers (lstm, gru), backpropagated through the whole rollout."""
    memory_units: Count = 64
    """Units of the recurrent core."""
    cnn: Convolutions = "auto"
    """For images: "nature" (Mnih et al. 2015), "impala" (residual), "small", or by their size."""
    precision: Precision = "float32"
    """Of the convolutions: "bfloat16" is faster on processors that have it (AVX-512 BF16, AMX, GPUs)."""
    squash: bool = False
    """Continuous actions through tanh into their bounds, instead of clipped to them."""
    sde: bool = False
    """State-dependent exploration (gSDE, arXiv:2005.05719) for continuous actions of perceptrons."""
    sde_every: Annotated[int, Meta(ge=0)] = 0
    """Steps between its draws; 0 for one draw a rollout."""

    def __post_init__(self) -> None:
        if isinstance(self.hidden, list | tuple | np.ndarray):
            object.__setattr__(self, "hidden", tuple(np.asarray(self.hidden, object).tolist()))
        check_fields(self)
        if self.recurrent == "none" and self.memory_units != 64:
            raise ConfigError(f"memory_units={self.memory_units} needs a core: recurrent='lstm' or 'gru'")
        if self.sde_every and not self.sde:
            raise ConfigError(f"sde_every={self.sde_every} needs sde=True")


BUILT_IN = (
    "hidden", "activation", "log_std_init", "recurrent", "memory_units", "cnn", "precision", "squash", "sde",
    "normalize_obs", "normalize_reward",
)  # fmt: skip
"""The settings of which a policy and its statistics are made: a run that goes on keeps them."""
BACKENDS = ("auto", "serial", "process", "native")


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
    return PPOConfig(**values)


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
    if num_workers is not None:
        check_whole("num_workers", num_workers, 0, LARGEST)
    if backend == "process" and num_workers == 0:
        raise ConfigError("backend='process' needs at least one worker, got num_workers=0")
    if backend == "serial" and num_workers:
        raise ConfigError(
            f"backend='serial' has no workers, got num_workers={num_workers}; say "
            "backend='process' or num_workers=0"
        )
    if backend == "native" and (num_workers is not None or start_method is not None):
        raise ConfigError(
            f"a native batch steps its environments itself, in this process, got num_workers={num_workers} and "
            f"start_method={start_method}: leave both out (its threads are set by env_kwargs)"
        )
    have = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in have:
        raise ConfigError(
            f"this system has no start method {start_method!r}.{did_you_mean(start_method, have)}"
        )
