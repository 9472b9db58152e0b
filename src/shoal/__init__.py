"""Parallel reinforcement learning of agents: the same seed gives the same trajectories everywhere.

Public names are resolved on first use, so that `import shoal` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the names below; a test keeps both equal
    from shoal.core.data import Call as Call
    from shoal.core.data import Trajectory as Trajectory
    from shoal.core.data import Turn as Turn
    from shoal.core.errors import ShoalError as ShoalError
    from shoal.core.seeding import derive_seed as derive_seed
    from shoal.envs.bandit import BanditEnv as BanditEnv
    from shoal.envs.frozen_lake import FrozenLakeEnv as FrozenLakeEnv
    from shoal.envs.sokoban.env import SokobanEnv as SokobanEnv
    from shoal.envs.text import TextEnv as TextEnv
    from shoal.rollout.compat.managers import BanditEnvironmentManager as BanditEnvironmentManager
    from shoal.rollout.compat.managers import CountdownEnvironmentManager as CountdownEnvironmentManager
    from shoal.rollout.compat.managers import EnvironmentManager as EnvironmentManager
    from shoal.rollout.compat.managers import FrozenLakeEnvironmentManager as FrozenLakeEnvironmentManager
    from shoal.rollout.compat.managers import MetaMathQAEnvironmentManager as MetaMathQAEnvironmentManager
    from shoal.rollout.compat.managers import SokobanEnvironmentManager as SokobanEnvironmentManager
    from shoal.rollout.compat.managers import WebShopEnvironmentManager as WebShopEnvironmentManager
    from shoal.rollout.compat.managers import make_manager as make_manager
    from shoal.rollout.compat.projections import create_projection_function as create_projection_function
    from shoal.rollout.factory import make_environments as make_environments
    from shoal.rollout.factory import validate_environment_config as validate_environment_config
    from shoal.rollout.play import ParallelRolloutManager as ParallelRolloutManager
    from shoal.rollout.play import TrajectoryCollector as TrajectoryCollector
    from shoal.samplers.asking import SharedLLMInferenceManager as SharedLLMInferenceManager
    from shoal.skills.learning.merge import process_completed_training as process_completed_training
    from shoal.skills.learning.network import build_remapping as build_remapping
    from shoal.skills.learning.training import prepare_training_run as prepare_training_run
    from shoal.skills.scheduler import SkillScheduler as SkillScheduler
    from shoal.splitting.splitters import LastNTrajectorySplitter as LastNTrajectorySplitter
    from shoal.splitting.splitters import StepwiseTrajectorySplitter as StepwiseTrajectorySplitter
    from shoal.splitting.splitters import TrajectorySplitter as TrajectorySplitter
    from shoal.train.agent.config import AgentConfig as AgentConfig
    from shoal.train.agent.trainer import AgentTrainer as AgentTrainer
    from shoal.train.ppo.config import PPOConfig as PPOConfig
    from shoal.train.ppo.policy import load_policy as load_policy
    from shoal.train.ppo.ppo import PPO as PPO
    from shoal.train.ppo.sb3 import load_sb3_policy as load_sb3_policy
    from shoal.train.ppo.trainer import PPOTrainer as PPOTrainer
    from shoal.train.records.evaluation import evaluate as evaluate
    from shoal.vector.faces.container import (
        MultiProcessEnvironmentContainer as MultiProcessEnvironmentContainer,
    )
    from shoal.vector.faces.container import ParallelEnv as ParallelEnv
    from shoal.vector.make import make_vec as make_vec
    from shoal.vector.spaces import groups as groups

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
    "rollout.factory": "make_environments validate_environment_config",
    "rollout.play": "ParallelRolloutManager TrajectoryCollector",
    "samplers.asking": "SharedLLMInferenceManager",
    "rollout.compat.projections": "create_projection_function",
    "vector.faces.container": "MultiProcessEnvironmentContainer ParallelEnv",
    "train.ppo.ppo": "PPO",
    "train.ppo.config": "PPOConfig",
    "train.ppo.trainer": "PPOTrainer",
    "train.ppo.policy": "load_policy",
    "train.ppo.sb3": "load_sb3_policy",
    "train.records.evaluation": "evaluate",
    "vector.make": "make_vec",
    "splitting.splitters": "TrajectorySplitter StepwiseTrajectorySplitter LastNTrajectorySplitter",
    "skills.scheduler": "SkillScheduler",
    "skills.learning.network": "build_remapping",
    "skills.learning.training": "prepare_training_run",
    "skills.learning.merge": "process_completed_training",
    "rollout.compat.managers": "EnvironmentManager SokobanEnvironmentManager FrozenLakeEnvironmentManager "
    "BanditEnvironmentManager CountdownEnvironmentManager MetaMathQAEnvironmentManager WebShopEnvironmentManager "
    "make_manager",
    "vector.spaces": "groups",
}
_HOME = {name: f"shoal.{module}" for module, names in _NAMES.items() for name in names.split()}

_ELSEWHERE: dict[str, str] = {
    "LLMAgentProxy": "ParallelRolloutManager(config, engine).rollout(), or TrajectoryCollector in one process",
    "RayAgentTrainer": "AgentTrainer(config), with engine.name=ray or agent_proxy.parallel.backend=ray for a cluster",
}
"""Names of projects that shoal takes over from, and what does their work here."""

__all__ = sorted([*_HOME, "__version__"])


if not TYPE_CHECKING:  # to which each name would be Any

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            try:
                value = getattr(importlib.import_module(_HOME[name]), name)
            except ModuleNotFoundError as error:
                from shoal.core.errors import explain_import

                raise explain_import(f"shoal.{name}", error) from error
            globals()[name] = value
            return value
        if name in _ELSEWHERE:  # of an AttributeError `from shoal import ...` would not show the message
            raise ImportError(f"shoal has no {name}: use {_ELSEWHERE[name]}", name="shoal")
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
