"""A checkpoint of a run folder, whose run may still go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.core.errors import DataError
from shoal.core.files import restore_folders, verify_folder
from shoal.train.agent.run.checkpoint import list_checkpoints, newest_checkpoint

T = TypeVar("T")


def checkpoint_of(run: Path, which: str) -> Path:
    """A checkpoint of a run folder: "newest", "best", or the number of an iteration."""
    folder = run / "checkpoints"
    restore_folders(folder)
    if which == "best":
        if not (folder / "best").is_dir():
            raise DataError(f"{run} has no best checkpoint: it was never evaluated after a save")
        return folder / "best"
    found = list_checkpoints(folder)
    if not found:
        raise DataError(f"{run} has no checkpoint in {folder}")
    if which == "newest":
        return found[-1]
    numbers = {path.name.removeprefix("step-").lstrip("0") or "0": path for path in found}
    wanted = which.removeprefix("step-").lstrip("0") or "0"
    if wanted not in numbers:
        kept = f"newest, best, {', '.join(numbers)} (trainer.keep_checkpoints says how many are kept)"
        raise DataError(f"{run} has no checkpoint {which!r}; it has {kept}")
    return numbers[wanted]


def read_checkpoint(run: Path, which: str, read: Callable[[Path], T]) -> T:
    """What `read` makes of a whole checkpoint; once more where its run, which goes on, replaces or drops it meanwhile.

    For `which` see `checkpoint_of`; `read` is given the folder, whose files are those of its manifest.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        return read(verify_folder(checkpoint_of(run, which)))
    except (DataError, OSError):
        if which == "newest" and list_checkpoints(run / "checkpoints"):
            newest_checkpoint(run / "checkpoints")  # names what to go on from, if this one is damaged
        return read(verify_folder(checkpoint_of(run, which)))
