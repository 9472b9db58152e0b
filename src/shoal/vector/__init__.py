"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AsyncVectorEnv": "compat",
    "EnvPoolStyle": "compat",
    "JaxVectorEnv": "jax",
    "MultiProcessEnvironmentContainer": "compat",
    "ParallelEnv": "compat",
    "PettingZooVectorEnv": "multi_agent",
    "PufferStyle": "compat",
    "Ready": "infos",
    "SB3VecEnv": "sb3",
    "StepResult": "infos",
    "VectorPool": "vector_env",
    "groups": "arguments",
    "make_vec": "make",
}
__all__ = sorted(name for name in _HOME if name != "SB3VecEnv")  # which needs Stable-Baselines3


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"shoal.vector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shoal.vector' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
