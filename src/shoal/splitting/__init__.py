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
    "Sample": "batch",
    "Fixes": "original",
    "Recording": "readers.recordings",
    "Message": "readers.recordings",
    "Reader": "readers.recordings",
    "RolloutTokens": "readers.recordings",
    "FolderReader": "readers.recordings",
    "ChatReader": "readers.records",
    "RecordReader": "readers.records",
    "Record": "readers.records",
    "AgentNetReader": "readers.formats",
    "LiteSampleReader": "readers.formats",
    "AtifReader": "readers.formats",
    "reader": "readers",
    "OSWorldReader": "readers.formats",
    "ShoalReader": "readers.formats",
    "find_reader": "readers",
    "write_rollout": "readers.recordings",
    "write_sharegpt": "exports",
    "write_chats": "exports",
    "split_shards": "shards",
    "read_shards": "shards",
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
