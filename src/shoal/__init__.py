"""Parallel reinforcement learning of agents: the same seed gives the same trajectories everywhere.

Public names are resolved on first use, so that `import shoal` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    "derive_seed": "shoal.core.seeding",
    "Trajectory": "shoal.core.data",
    "Turn": "shoal.core.data",
    "ShoalError": "shoal.core.errors",
    "ParallelRolloutManager": "shoal.rollout.parallel",
    "SharedLLMInferenceManager": "shoal.rollout.inference",
    "TrajectoryCollector": "shoal.rollout.collector",
    "make_environments": "shoal.rollout.factory",
    "validate_environment_config": "shoal.rollout.factory",
    "MultiProcessEnvironmentContainer": "shoal.vector.container",
    "make_vec": "shoal.vector.make",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
