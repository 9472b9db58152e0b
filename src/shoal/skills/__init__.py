"""Skills: a graph of dependent skills trained in parallel, experts kept as versions that are never lost."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Features": "spec",
    "Predicate": "spec",
    "Reward": "spec",
    "Skill": "spec",
    "load_skills": "spec",
    "Step": "plan",
    "plan_for": "plan",
    "covering_plan": "plan",
    "build_remapping": "experts",
    "remap": "experts",
    "Store": "store",
    "decide": "merge",
    "TrainingConfig": "tasks",
    "Trainer": "trainer",
    "Task": "tasks",
    "prepare_training_run": "runs",
    "finish_training": "runs",
    "process_completed_training": "processing",
    "SkillScheduler": "scheduler",
    "Frontier": "frontier",
    "KnowledgeBase": "proposers",
    "LanguageModel": "proposers",
    "evaluate_chain": "evaluation",
    "migrate_folder": "migrate",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"shoal.skills.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shoal.skills' has no attribute {name!r}")
