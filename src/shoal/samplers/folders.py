"""Temporary folders by which weights and adapters reach a sampler: in memory where there is room, else on disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where Linux has files in memory; a container may have little of it."""


def folder_for(size: int) -> tempfile.TemporaryDirectory[str]:
    """An empty folder for so many bytes, in memory where there is room for twice as many."""
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return tempfile.TemporaryDirectory(prefix="shoal-weights-", dir=MEMORY if in_memory else None)


def copy_of(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A copy of the LoRA adapter of a folder, which may change or go."""
    copied = folder_for(sum(file.stat().st_size for file in Path(folder).iterdir()))
    shutil.copytree(folder, copied.name, dirs_exist_ok=True)
    return copied
