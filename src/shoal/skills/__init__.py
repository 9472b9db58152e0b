"""Skills: a graph of dependent skills trained in parallel, experts kept as versions that are never lost."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the names below; a test keeps both equal
    from shoal.skills.graph.store import Store as Store
    from shoal.skills.learning.episodes import play_episodes as play_episodes
    from shoal.skills.learning.merge import process_completed_training as process_completed_training
    from shoal.skills.learning.network import build_remapping as build_remapping
    from shoal.skills.learning.trainer import TrainingConfig as TrainingConfig
    from shoal.skills.learning.training import finish_training as finish_training
    from shoal.skills.learning.training import prepare_training_run as prepare_training_run
    from shoal.skills.scheduler import SkillScheduler as SkillScheduler
    from shoal.skills.spec import Features as Features
    from shoal.skills.spec import Skill as Skill
    from shoal.skills.spec import load_skills as load_skills

_HOME = {
    "graph.store": "Store",
    "spec": "Features Skill load_skills",
    "learning.network": "build_remapping",
    "learning.trainer": "TrainingConfig",
    "learning.training": "prepare_training_run finish_training",
    "learning.merge": "process_completed_training",
    "scheduler": "SkillScheduler",
    "learning.episodes": "play_episodes",
}
_HOMES = {name: home for home, names in _HOME.items() for name in names.split()}

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # to which each name would be Any

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"shoal.skills.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'shoal.skills' has no attribute {name!r}")
