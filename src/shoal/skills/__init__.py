"""Skills: a graph of dependent skills trained in parallel, experts kept as versions that are never lost."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "jobs.store": "Store",
    "learning.spec": "Features Skill load_skills",
    "learning.network": "build_remapping",
    "learning.trainer": "TrainingConfig",
    "learning.training": "prepare_training_run finish_training",
    "learning.merge": "process_completed_training",
    "learning.scheduler": "SkillScheduler",
    "learning.episodes": "play_episodes",
}
_HOMES = {name: home for home, names in _HOME.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"shoal.skills.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'shoal.skills' has no attribute {name!r}")
