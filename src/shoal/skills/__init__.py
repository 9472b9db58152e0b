"""Skills: a graph of dependent skills trained in parallel, experts kept as versions that are never lost."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Features": "learning.spec",
    "Predicate": "learning.spec",
    "Reward": "learning.spec",
    "Skill": "learning.spec",
    "load_skills": "learning.spec",
    "Step": "learning.spec",
    "plan_for": "learning.spec",
    "covering_plan": "learning.spec",
    "build_remapping": "learning.trainer",
    "remap": "learning.trainer",
    "Store": "learning.spec",
    "Graph": "jobs.graph",
    "Run": "jobs.run",
    "decide": "learning.run",
    "TrainingConfig": "learning.trainer",
    "Trainer": "learning.trainer",
    "Task": "learning.trainer",
    "prepare_training_run": "learning.run",
    "finish_training": "learning.run",
    "process_completed_training": "learning.run",
    "SkillScheduler": "learning.scheduler",
    "Frontier": "learning.scheduler",
    "KnowledgeBase": "learning.proposers",
    "knowledge_base": "learning.proposers",
    "Replay": "learning.proposers",
    "LanguageModel": "learning.proposers",
    "evaluate_chain": "learning.episodes",
    "play_episodes": "learning.episodes",
    "migrate_folder": "learning.run",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"shoal.skills.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shoal.skills' has no attribute {name!r}")
