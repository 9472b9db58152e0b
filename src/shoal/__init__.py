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
    "TextEnv": "shoal.envs.text",
    "SokobanEnv": "shoal.envs.sokoban.env",
    "FrozenLakeEnv": "shoal.envs.frozen_lake",
    "BanditEnv": "shoal.envs.bandit",
    "AgentTrainer": "shoal.train.agent.trainer",
    "AgentConfig": "shoal.train.agent.config",
    "TrajectoryCollector": "shoal.rollout.collector",
    "make_environments": "shoal.rollout.factory",
    "validate_environment_config": "shoal.rollout.factory",
    "ParallelRolloutManager": "shoal.rollout.parallel.rollout",
    "SharedLLMInferenceManager": "shoal.rollout.parallel.server",
    "create_projection_function": "shoal.rollout.compat.projections",
    "MultiProcessEnvironmentContainer": "shoal.vector.compat",
    "PPO": "shoal.train.ppo.ppo",
    "PPOConfig": "shoal.train.ppo.config",
    "PPOTrainer": "shoal.train.ppo.trainer",
    "load_policy": "shoal.train.ppo.policy",
    "load_sb3_policy": "shoal.train.ppo.sb3",
    "make_vec": "shoal.vector.make",
    "TrajectorySplitter": "shoal.splitting.splitters",
    "StepwiseTrajectorySplitter": "shoal.splitting.splitters",
    "LastNTrajectorySplitter": "shoal.splitting.splitters",
    "SkillScheduler": "shoal.skills.learning.scheduler",
    "build_remapping": "shoal.skills.learning.trainer",
    "prepare_training_run": "shoal.skills.learning.run",
    "process_completed_training": "shoal.skills.learning.run",
    "EnvironmentManager": "shoal.rollout.compat.managers",
    "SokobanEnvironmentManager": "shoal.rollout.compat.managers",
    "WebShopEnvironmentManager": "shoal.rollout.compat.managers",
    "CountdownEnvironmentManager": "shoal.rollout.compat.managers",
    "MetaMathQAEnvironmentManager": "shoal.rollout.compat.managers",
    "FrozenLakeEnvironmentManager": "shoal.rollout.compat.managers",
    "BanditEnvironmentManager": "shoal.rollout.compat.managers",
    "make_manager": "shoal.rollout.compat.managers",
    "ParallelEnv": "shoal.vector.compat",
    "groups": "shoal.vector.vector_env",
}

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
