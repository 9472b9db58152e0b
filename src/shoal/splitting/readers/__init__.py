"""Readers of recordings by name: small classes behind the `Reader` protocol that travel to workers.

A reader of your own is registered with `@reader("name")`, and found by `shoal split --reader name`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import DataError
from shoal.core.registry import Registry
from shoal.splitting.readers.formats import (
    AgentNetReader,
    AtifReader,
    LiteSampleReader,
    OSWorldReader,
    ShoalReader,
    looks_like_own_run,
)
from shoal.splitting.readers.recordings import MESSAGES, FolderReader, Reader
from shoal.splitting.readers.records import SUFFIXES, ChatReader, first_record

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Callable[..., Any])
BUILT_IN: dict[str, Callable[[Any], Reader]] = {
    "folder": FolderReader,
    "chat": ChatReader,
    "osworld": OSWorldReader,
    "agentnet": AgentNetReader,
    "shoal": ShoalReader,
    "atif": AtifReader,
    "litesample": LiteSampleReader,
}
READERS: Registry[Callable[[Any], Reader]] = Registry("reader")
for _name, _kind in BUILT_IN.items():
    READERS.register(_name, _kind)


def reader(name: str, *, replace: bool = False) -> Callable[[R], R]:
    """Register a class or function that makes a reader of a path.

    Args:
        name: what `--reader` takes.
        replace: a reader of that name.
    """

    def register(factory: R) -> R:
        READERS.register(name, factory, replace=replace)
        return factory

    return register


def find_reader(path: Path | str) -> Reader:
    """The reader for what `path` holds, by looking at its files."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the folder or file that holds the recordings")
    return READERS[_kind_of(path)](path)


def reader_of(path: Path, name: str = "auto", *, recorded_tokens: bool = False) -> Reader:
    """The reader of this name for what is in `path`, or the one that its files ask for ("auto").

    Args:
        path: a folder or a file of recordings.
        name: of a registered reader.
        recorded_tokens: of folders of messages, read the tokens that were sampled, too.
    """
    found = find_reader(path) if name == "auto" else READERS[name](path)
    if isinstance(found, FolderReader):
        found.rollout_tokens = recorded_tokens
    return found


def _kind_of(path: Path) -> str:
    if path.is_dir():
        if (path / MESSAGES).is_file():
            return "folder"
        if next(path.glob(f"*/{MESSAGES}"), None):
            records = sorted(file.name for file in path.iterdir() if file.suffix.lower() in SUFFIXES[1:])
            if records:
                logger.warning(
                    "%s: not read beside */%s: %s; give each by itself", path, MESSAGES, ", ".join(records)
                )
            return "folder"
        if next(path.glob("trajectories/*.jsonl"), None) or path.name == "trajectories":
            return "shoal"
        if next(path.rglob("traj.jsonl"), None):
            return "osworld"
        if next(path.rglob("agent/trajectory.json"), None):
            return "atif"
    elif path.suffix == ".jsonl" and looks_like_own_run(path):
        return "shoal"
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(
            f"{path} holds no recordings: expected <id>/final_messages.json, trajectories/*.jsonl, traj.jsonl of "
            "OSWorld, agent/trajectory.json of Harbor, or .json, .jsonl, .parquet or .tar files of records"
        )
    first = first_record(files)
    if isinstance(first, dict):
        if str(first.get("schema_version", "")).startswith("ATIF"):
            return "atif"
        if isinstance(first.get("traj"), list):
            return "agentnet"
        if {"images", "messages", "metadata"} <= set(first):
            return "litesample"
    return "chat"
