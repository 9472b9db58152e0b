"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AsyncVectorEnv": "gym_async",
    "EnvPoolStyle": "pool_styles",
    "JaxVectorEnv": "native_batches",
    "MultiProcessEnvironmentContainer": "container",
    "ParallelEnv": "parallel_env",
    "PettingZooVectorEnv": "multi_agent",
    "PufferStyle": "pool_styles",
    "Ready": "results",
    "SB3VecEnv": "sb3",
    "StepResult": "results",
    "VectorPool": "pool",
    "groups": "arguments",
    "make_vec": "make",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"shoal.vector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shoal.vector' has no attribute {name!r}")
