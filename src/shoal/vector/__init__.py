"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AsyncVectorEnv": "compat",
    "EnvPoolStyle": "compat",
    "JaxVectorEnv": "native",
    "MultiProcessEnvironmentContainer": "compat",
    "ParallelEnv": "compat",
    "PettingZooVectorEnv": "multi_agent",
    "PufferStyle": "compat",
    "Ready": "values",
    "SB3VecEnv": "sb3",
    "StepResult": "values",
    "VectorPool": "vector_env",
    "groups": "vector_env",
    "make_vec": "make",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"shoal.vector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shoal.vector' has no attribute {name!r}")
