"""A training as a process, and the marks it leaves in its folder.

`DONE.json` is written last, by one rename, and names the launch it belongs to, so that a scheduler believes no other;
`FAILED.json` says why there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from shoal.core.errors import DataError, DivergedError
from shoal.core.files import read_json, write_json
from shoal.core.workers import die_with_parent

DONE, FAILED = "DONE.json", "FAILED.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
LEAST_ROOM = 1 << 16
"""Bytes without which a training could not even say why it failed."""


class NotLearnedError(RuntimeError):
    """The budget was used up before the skill was learned well enough: the same again would end the same."""


def write_done(folder: Path, attempt: int | None, fields: Mapping[str, Any]) -> Path:
    """Leave the mark of a result that is whole on disk; its `id` tells results apart, however alike.

    Numbers of NumPy and torch become plain ones, and those that are not finite null.
    """
    path = folder / DONE
    text = json.dumps({"attempt": attempt, "id": secrets.token_hex(8), **fields}, default=_plain)
    write_json(path, json.loads(text, parse_constant=lambda _: None))
    return path


def steps_used(count: Any, what: str) -> int:
    """`count`, a number of Python's, NumPy's or torch's, as whole steps, none below 0."""
    count = count.item() if hasattr(count, "item") else count
    if isinstance(count, int | float) and 0 <= count < 2**63 and count % 1 == 0:
        return int(count)
    raise DataError(f"{what} must be a whole number of steps, at least 0, got {count!r}")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"numbers must be plain JSON, got {value!r}")


def read_result(result: Path, folder: Path, attempt: int | None = None) -> tuple[dict[str, Any], bytes]:
    """The mark in a folder, and the bytes of the result that it speaks of.

    What was finished by hand is of no launch, and is taken for the one that its commit began.

    Raises:
        DataError: the mark is missing, broken, or of another launch than `attempt`; the bytes are others.
    """
    path = folder / DONE
    if not path.exists():
        raise DataError(f"{folder} is not done: it has no {DONE}")
    done: dict[str, Any] = read_json(path)
    if attempt is not None and done.get("attempt") not in (attempt, None):
        raise DataError(f"{path} is the mark of launch {done.get('attempt')}, not of launch {attempt}")
    data = result.read_bytes()
    if hashlib.sha256(data).hexdigest() != done["sha256"]:
        raise DataError(f"{result} is not the file that {DONE} speaks of")
    return done, data


def write_failure(folder: Path, attempt: int | None, error: BaseException | str) -> None:
    """Leave the reason of a failed launch where the scheduler finds it."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    final, full = isinstance(error, NotLearnedError | DivergedError), is_full(error)
    write_json(folder / FAILED, {"attempt": attempt, "reason": reason, "final": final, "full": full})


def is_full(error: object) -> bool:
    """Whether an error says that there is no room on a disk."""
    return isinstance(error, OSError) and error.errno in FULL


class Failure(NamedTuple):
    """How a launch failed that left no result."""

    reason: str | None = None  # if it could say so
    final: bool = False  # another try would be in vain
    full: bool = False  # there was no room on the disk


def read_failure(folder: Path, attempt: int) -> Failure:
    """What a launch says of its failure; one that says nothing where there is no room failed for that."""
    with contextlib.suppress(FileNotFoundError, DataError, AttributeError):
        failed = read_json(folder / FAILED)
        if failed.get("attempt") == attempt:
            return Failure(str(failed.get("reason")), bool(failed.get("final")), bool(failed.get("full")))
    return Failure(full=shutil.disk_usage(folder).free < LEAST_ROOM)


def clear_marks(folder: Path) -> None:
    """Forget how an earlier launch in this folder ended."""
    for mark in (DONE, FAILED):
        (folder / mark).unlink(missing_ok=True)


def run_as_process(module: str, description: str | None, work: Callable[[Path, int | None], object]) -> int:
    """Do `work` as the whole of a process, with the folder and launch that its command line names.

    Its failure is left in the folder, SIGTERM ends it at once. With `--parent PID` it dies with that process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--parent", type=int, default=None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, default=None)
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent()
        if os.getppid() != options.parent:
            return 1
    folder = options.folder.resolve()  # work may go elsewhere

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        work(folder, options.attempt)
    except SystemExit as error:
        if isinstance(error.code, str):  # a reason; a number, as of SIGTERM, is none
            write_failure(folder, options.attempt, error.code)
        raise
    except Exception as error:
        with contextlib.suppress(OSError):  # of a full disk, which the scheduler notices too
            write_failure(folder, options.attempt, error)
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> None:
    """End this process at once: nothing is left to clean up, and the scheduler waits for the exit."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
