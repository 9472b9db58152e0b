"""Skills: a graph of dependent skills trained in parallel, experts kept as versions that are never lost."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "learning.spec": "Features Predicate Reward Skill load_skills Store",
    "learning.plan": "Step plan_for covering_plan",
    "learning.network": "build_remapping remap",
    "learning.trainer": "TrainingConfig Trainer Task",
    "jobs.graph": "Graph",
    "jobs.run": "Run",
    "learning.training": "prepare_training_run finish_training",
    "learning.merge": "process_completed_training",
    "learning.merge_rules": "decide",
    "learning.views": "migrate_folder",
    "learning.scheduler": "SkillScheduler Frontier",
    "learning.proposers": "KnowledgeBase knowledge_base Replay LanguageModel",
    "learning.episodes": "evaluate_chain play_episodes",
}
_HOMES = {name: home for home, names in _HOME.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"shoal.skills.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'shoal.skills' has no attribute {name!r}")
