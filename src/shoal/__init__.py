"""Parallel reinforcement learning of agents: the same seed gives the same trajectories everywhere.

Public names are resolved on first use, so that `import shoal` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES = {
    "core.seeding": "derive_seed",
    "core.data": "Call Trajectory Turn",
    "core.errors": "ShoalError",
    "envs.text": "TextEnv",
    "envs.sokoban.env": "SokobanEnv",
    "envs.frozen_lake": "FrozenLakeEnv",
    "envs.bandit": "BanditEnv",
    "train.agent.trainer": "AgentTrainer",
    "train.agent.config": "AgentConfig",
    "rollout.collector": "TrajectoryCollector",
    "rollout.factory": "make_environments validate_environment_config",
    "rollout.rollouts": "ParallelRolloutManager",
    "rollout.samplers.batching": "SharedLLMInferenceManager",
    "rollout.compat.projections": "create_projection_function",
    "vector.compat": "MultiProcessEnvironmentContainer ParallelEnv",
    "train.ppo.ppo": "PPO",
    "train.ppo.config": "PPOConfig",
    "train.ppo.trainer": "PPOTrainer",
    "train.ppo.policy": "load_policy",
    "train.ppo.sb3": "load_sb3_policy",
    "vector.make": "make_vec",
    "splitting.splitters": "TrajectorySplitter StepwiseTrajectorySplitter LastNTrajectorySplitter",
    "skills.learning.scheduler": "SkillScheduler",
    "skills.learning.network": "build_remapping",
    "skills.learning.training": "prepare_training_run",
    "skills.learning.merge": "process_completed_training",
    "rollout.compat.managers": "EnvironmentManager SokobanEnvironmentManager FrozenLakeEnvironmentManager "
    "BanditEnvironmentManager CountdownEnvironmentManager MetaMathQAEnvironmentManager WebShopEnvironmentManager "
    "make_manager",
    "vector.arguments": "groups",
}
_HOME = {name: f"shoal.{module}" for module, names in _NAMES.items() for name in names.split()}

_ELSEWHERE: dict[str, str] = {
    "LLMAgentProxy": "ParallelRolloutManager(config, engine).rollout(), or TrajectoryCollector in one process",
    "RayAgentTrainer": "AgentTrainer(config), with engine.name=ray or agent_proxy.parallel.backend=ray for a cluster",
}
"""Names of projects that shoal takes over from, and what does their work here."""

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            from shoal.core.errors import explain_import

            raise explain_import(f"shoal.{name}", error) from error
        globals()[name] = value
        return value
    if name in _ELSEWHERE:  # an AttributeError's message would not reach who writes `from shoal import ...`
        raise ImportError(f"shoal has no {name}: use {_ELSEWHERE[name]}", name="shoal")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
