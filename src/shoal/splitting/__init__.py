"""Cut recorded trajectories into training samples: pure per trajectory, the same on every executor.

The names below are resolved on first use, so that importing the room stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME: dict[str, str] = {
    "TrajectorySplitter": "splitters",
    "StepwiseTrajectorySplitter": "splitters",
    "LastNTrajectorySplitter": "splitters",
    "Batch": "batch",
    "Sample": "samples",
    "Fixes": "fixes",
    "Recording": "recordings",
    "Message": "recordings",
    "Reader": "recordings",
    "RolloutTokens": "recordings",
    "FolderReader": "readers",
    "ChatReader": "readers",
    "OSWorldReader": "osworld",
    "ShoalReader": "own_runs",
    "find_reader": "readers",
    "write_rollout": "rollouts",
    "write_sharegpt": "sharegpt",
    "load_processor": "processors",
    "build_qwen_processor": "processors",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"shoal.splitting.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shoal.splitting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
