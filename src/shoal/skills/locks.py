"""One scheduler a folder, and finding the trainings that a dead one left."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from shoal.core.errors import WorkerError


class FolderLock:
    """A lock that the kernel drops when its holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def take(self) -> None:
        """Hold the lock, or raise a `WorkerError` that names the process that does."""
        file = self.path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise WorkerError(
                f"another scheduler (process {owner}) is running on {self.path.parent}; "
                "stop it, or use another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def release(self) -> None:
        """Give the lock up."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_taken(self) -> bool:
        """Whether any process holds it."""
        if not self.path.exists():
            return False
        with self.path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


def processes_of(attempt: int, folder: Path) -> list[int]:
    """Ids of processes that were started as this launch of this folder."""
    found = []
    wanted = [str(folder.resolve()), "--attempt", str(attempt)]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if parts[-4:-1] == wanted and "shoal.skills.training" in parts:
            found.append(int(entry.parent.name))
    return found
