"""Readers of recordings by name: small classes behind the `Reader` protocol that travel to workers.

A reader of your own is registered with `@reader("name")`, and found by `shoal split --reader name`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import DataError
from shoal.core.registry import Registry
from shoal.splitting.readers.recordings import FolderReader as FolderReader
from shoal.splitting.readers.recordings import Reader

R = TypeVar("R", bound=Callable[..., Any])
BUILT_IN = {
    "folder": "recordings:FolderReader",
    "chat": "records:ChatReader",
    "osworld": "formats:OSWorldReader",
    "agentnet": "formats:AgentNetReader",
    "shoal": "formats:ShoalReader",
    "atif": "formats:AtifReader",
    "litesample": "formats:LiteSampleReader",
}


class _Readers(Registry[Callable[[Any], Reader]]):
    """The registered readers; shoal's own are imported when they are asked for."""

    def __getitem__(self, name: str) -> Callable[[Any], Reader]:
        if name in BUILT_IN and name not in self._items:
            module, _, kind = BUILT_IN[name].partition(":")
            self.register(name, getattr(importlib.import_module(f"{__name__}.{module}"), kind))
        for own in BUILT_IN if name not in self._items else ():
            self[own]  # so that the error names all
        return super().__getitem__(name)


READERS = _Readers("reader")


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


def _kind_of(path: Path) -> str:
    from shoal.splitting.readers.formats import looks_like_own_run
    from shoal.splitting.readers.records import SUFFIXES, first_record

    if path.is_dir():
        if next(path.glob("*/final_messages.json"), None):
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
    first = first_record(files[0])
    if isinstance(first, dict):
        if str(first.get("schema_version", "")).startswith("ATIF"):
            return "atif"
        if isinstance(first.get("traj"), list):
            return "agentnet"
        if {"images", "messages", "metadata"} <= set(first):
            return "litesample"
    return "chat"


def __getattr__(name: str) -> Any:
    for place in BUILT_IN.values():
        module, _, kind = place.partition(":")
        if kind == name:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
