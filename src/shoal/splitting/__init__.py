"""Cut recorded trajectories into training samples: pure per trajectory, the same on every executor.

The names below are resolved on first use, so that importing the room stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "splitters": "TrajectorySplitter StepwiseTrajectorySplitter LastNTrajectorySplitter",
    "batch": "Batch",
    "readers": "reader find_reader ChatReader",
    "readers.recordings": "Recording Message",
    "readers.records": "RecordReader Record",
    "processors": "load_processor build_qwen_processor",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"shoal.splitting.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shoal.splitting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
