"""What a caller of PPO may give: each mistake is an error that names what came and what there is."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping
from typing import Any

import torch

from shoal.core.errors import ConfigError, did_you_mean
from shoal.train.ppo_config import PPOConfig

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
    if n_envs < 1:
        raise ConfigError(f"n_envs must be at least 1, got {n_envs}")
    if backend not in BACKENDS:
        raise ConfigError(f"no backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if num_workers is not None and num_workers < 0:
        raise ConfigError(f"num_workers must not be negative, got {num_workers}")
    if backend == "process" and num_workers == 0:
        raise ConfigError("backend='process' needs at least one worker, got num_workers=0")
    have = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in have:
        raise ConfigError(
            f"this system has no start method {start_method!r}.{did_you_mean(start_method, have)}"
        )
