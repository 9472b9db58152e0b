"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the names below; a test keeps both equal
    from shoal.vector.backends.jax import JaxVectorEnv as JaxVectorEnv
    from shoal.vector.faces.asynchronous import AsyncVectorEnv as AsyncVectorEnv
    from shoal.vector.faces.container import (
        MultiProcessEnvironmentContainer as MultiProcessEnvironmentContainer,
    )
    from shoal.vector.faces.container import ParallelEnv as ParallelEnv
    from shoal.vector.faces.pettingzoo import PettingZooVectorEnv as PettingZooVectorEnv
    from shoal.vector.faces.sb3 import SB3VecEnv as SB3VecEnv
    from shoal.vector.infos import Ready as Ready
    from shoal.vector.infos import StepResult as StepResult
    from shoal.vector.make import make_vec as make_vec
    from shoal.vector.spaces import groups as groups
    from shoal.vector.vector_env import VectorPool as VectorPool

_HOME = {
    "AsyncVectorEnv": "faces.asynchronous",
    "JaxVectorEnv": "backends.jax",
    "MultiProcessEnvironmentContainer": "faces.container",
    "ParallelEnv": "faces.container",
    "PettingZooVectorEnv": "faces.pettingzoo",
    "Ready": "infos",
    "SB3VecEnv": "faces.sb3",
    "StepResult": "infos",
    "VectorPool": "vector_env",
    "groups": "spaces",
    "make_vec": "make",
}
__all__ = sorted(name for name in _HOME if name != "SB3VecEnv")  # which needs Stable-Baselines3


if not TYPE_CHECKING:  # to which each name would be Any

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(f"shoal.vector.{_HOME[name]}"), name)
        raise AttributeError(f"module 'shoal.vector' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
