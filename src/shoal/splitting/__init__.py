"""Cut recorded trajectories into training samples: pure per trajectory, the same on every executor.

The names below are resolved on first use, so that importing the room stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the names below; a test keeps both equal
    from shoal.splitting.batch import Batch as Batch
    from shoal.splitting.processors import build_qwen_processor as build_qwen_processor
    from shoal.splitting.processors import load_processor as load_processor
    from shoal.splitting.readers import find_reader as find_reader
    from shoal.splitting.readers import reader as reader
    from shoal.splitting.readers.recordings import Message as Message
    from shoal.splitting.readers.recordings import Recording as Recording
    from shoal.splitting.readers.records import ChatReader as ChatReader
    from shoal.splitting.readers.records import Record as Record
    from shoal.splitting.readers.records import RecordReader as RecordReader
    from shoal.splitting.splitters import LastNTrajectorySplitter as LastNTrajectorySplitter
    from shoal.splitting.splitters import StepwiseTrajectorySplitter as StepwiseTrajectorySplitter
    from shoal.splitting.splitters import TrajectorySplitter as TrajectorySplitter

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


if not TYPE_CHECKING:  # to which each name would be Any

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(f"shoal.splitting.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'shoal.splitting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
