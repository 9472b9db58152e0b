"""The folder that a command leaves behind: metrics while it runs, a summary when it ends.

`metrics.jsonl` has one object per report; `summary.json` is what a script reads after any command that runs
something. Both are safe against `kill -9`: a half-written line of metrics is passed over. One process at a time
writes a run folder; a second one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import logging
import math
import os
import platform
import shlex
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from shoal.core.errors import ConfigError, DataError, WorkerError, with_frames
from shoal.core.executors import Closing
from shoal.core.files import append_line, read_json, write_bytes, write_json

logger = logging.getLogger(__name__)
Event = Callable[[dict[str, Any]], None]
UNFINISHED = "unfinished.jsonl"
LOG = "log.txt"
"""What a run was started by, what it said, its warnings, and how it ended, with a traceback."""
STARTED = "started by: "
VERSIONS_OF = ("shoal", "numpy", "gymnasium", "torch", "transformers", "ray")


def installed_versions() -> dict[str, str]:
    """Versions of Python, shoal and the packages that change its results, of those installed."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _note_in(descriptor: int) -> tuple[str, str]:
    """The process and the command that a lock file names."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    owner, _, rest = os.read(descriptor, 200).decode(errors="replace").partition("\n")
    return owner.strip() or "unknown", rest.partition("\n")[0]


def read_summary(run: Path) -> dict[str, Any]:
    """What `summary.json` of a run folder holds, NaN and infinity as None.

    Raises:
        DataError: it is broken, or not what a run writes.
        FileNotFoundError: there is none: the run has not come to its end.
    """
    path = run / "summary.json"
    readable = path.is_file() or not path.exists()  # a pipe would be waited for
    summary = finite(read_json(path)) if readable else None
    if not isinstance(summary, dict) or not isinstance(summary.setdefault("metrics", {}), dict):
        raise DataError(
            f"{path} must hold an object with 'metrics', an object too, as a run writes it; "
            "restore it or remove it"
        )
    return summary


def command_of(run: Path) -> str:
    """The command that made a run folder, also of an unfinished run, by its files."""
    if command := _noted_command(run):
        return command
    if (run / "state.db").exists():
        return "skills train"
    return "train-ppo" if any((run / "checkpoints").glob("step_*")) else "train"


def _noted_command(run: Path) -> str:
    """The command that a run's summary names, or its lock while there is none; empty where neither does."""
    with contextlib.suppress(OSError, DataError):
        if command := read_summary(run).get("command"):
            return str(command)
    with contextlib.suppress(OSError):
        if (run / ".lock").is_file():
            return (run / ".lock").read_text(errors="replace").partition("\n")[2]
    return ""


OF_A_RUN = {
    ".lock", LOG, "config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "trajectories", "tensorboard",
    UNFINISHED,
}  # fmt: skip
"""Files and folders of runs, of which any run folder has one."""


def refuse_foreign(path: Path) -> None:
    """Refuse a folder that holds files, and none of a run, as the place for a new run.

    Raises:
        ConfigError: it is one.
    """
    found = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    shown = sorted(name for name in found if not name.startswith("."))
    if shown and not found & OF_A_RUN:
        raise ConfigError(
            f"{path} holds other files ({', '.join(shown[:3])}{', …' if shown[3:] else ''}) and no run: name a new "
            f"folder, such as {path / 'run'}"
        )


def refuse_missing(path: Path) -> None:
    """Refuse to resume a run that is not there, a name misspelt.

    Raises:
        DataError: there is no such folder.
    """
    if not path.is_dir():
        raise DataError(f"there is no run {path} to go on with: start without resume, or correct the name")


def whole_rows(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of whole lines; a last line that is still being written is left out, so are torn ones."""
    rows = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def latest(rows: Iterable[Mapping[str, Any]], x: str) -> list[Any]:
    """Rows in the order of their `x`, those that have a number there; of several of the same the last."""
    found = {row[x]: row for row in rows if type(row.get(x)) in (int, float) and row[x] == row[x]}
    return [found[place] for place in sorted(found)]


_MOST = 1e300
"""Larger numbers are no points of a curve."""


def is_number(value: Any) -> bool:
    """A number that can be drawn: the distance between two of them is finite too. False for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


LOOKS = 5
"""Attempts at a lock, 20 ms apart: a process that looks whether it is taken holds it for a moment."""


class FolderLock:
    """A lock that the kernel drops when its holder dies, however it dies; processes forked off never hold it.

    Args:
        path: a file in the folder; made if it is not there, and left there.
        holder: what takes it, for the message to others.
    """

    def __init__(self, path: Path, holder: str = "another run") -> None:
        self.path = path
        self.holder = holder
        self._close: Callable[[], object] | None = None
        self._descriptor: int

    def take(self) -> None:
        """Hold the lock, or raise a `WorkerError` that names the process that does.

        Taking it again does nothing, unless the file or the folder was removed meanwhile.
        """
        if self._close is not None:
            try:
                same = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
            except FileNotFoundError:
                self.release()  # it is taken again below, if the folder is there
            else:
                if not same:
                    raise WorkerError(
                        f"{self.path.parent} was removed, and {self.holder} has begun there: nothing more is "
                        "written into it; begin anew in another folder"
                    )
                return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(LOOKS):
            if locked(descriptor, self.path):
                break
            time.sleep(0.02)
        else:
            owner, _ = _note_in(descriptor)
            os.close(descriptor)
            here = ", which this process has open" if owner == str(os.getpid()) else ""
            raise WorkerError(
                f"{self.holder} (process {owner}) is running on {self.path.parent}{here}; "
                "stop it or wait for it, or use another folder"
            )
        self._descriptor = descriptor
        close = weakref.finalize(self, os.close, descriptor)
        close.atexit = False  # what is still written while the process ends is written under the lock
        self._close = close
        _held.add(self)
        self.note(_note_in(descriptor)[1])

    def note(self, command: str) -> None:
        """Record the process and command that hold the lock; they identify a run without a summary."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, f"{os.getpid()}\n{command}".rstrip().encode())

    def release(self) -> None:
        """Give the lock up, if it is held."""
        if self._close is not None:
            self._close()
            self._close = None
            _held.discard(self)

    def is_taken(self) -> bool:
        """Whether any process holds it."""
        if not self.path.exists():
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            descriptor = os.open(self.path, os.O_RDONLY)  # the run of another user
        try:
            return not locked(descriptor, self.path, shared=True)
        finally:
            os.close(descriptor)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _give_up_in_child() -> None:
    for lock in list(_held):
        lock.release()  # closes the child's descriptor; the parent's goes on holding


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_in_child)


def locked(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Lock this file; False where another process holds it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 2**30, os.SEEK_SET)  # beyond all that is written there, which others may read
        with contextlib.suppress(OSError):
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return True
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        logger.warning("%s: this file system has no locks, so a second writer is not noticed", path.parent)
    return True


class RunFolder(Closing):
    """`runs/<name>/` of one run, which it alone writes until `finish` or `close`.

    Args:
        path: the folder; made if it is not there. It stays where it is though the working directory changes.
        command: what ran, for the summary.
        seed: its run seed.
        on_event: called with `{"event": …, "step": …}` after a durable moment, once the data is safe.
        lock: False where another process of the same run holds the folder.

    Raises:
        WorkerError: another run is writing there.
        ConfigError: `path` cannot be a folder, or holds the run of another command.
    """

    def __init__(
        self,
        path: Path | str,
        command: str,
        seed: int,
        on_event: Event | None = None,
        *,
        lock: bool = True,
    ) -> None:
        self.path = Path(path).absolute()
        self.command = command
        self.seed = seed
        self._on_event = on_event
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"a run folder must be a folder, got {self.path}: {error.strerror}") from error
        self._lock = FolderLock(self.path / ".lock") if lock else None
        self._log: _LogFile | None = None
        self.hold()
        begun = set(os.listdir(self.path)) - {".lock", LOG}
        before = _noted_command(self.path) if begun else ""
        if before not in ("", command):
            self.close()
            raise ConfigError(
                f"{self.path} holds a run of `shoal {before}`, which one of `shoal {command}` would write over: "
                "choose another folder"
            )
        if self._lock is not None:
            self._lock.note(command)
            self._log = _LogFile(self.path / LOG, self._lock)

    def close(self) -> None:
        """Let others write the folder; may be called twice."""
        if self._log is not None:
            self._log.end()
            self._log = None
        if self._lock is not None:
            self._lock.release()

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Add a line to the log of the run, and of no other one that this process has open."""
        if self._log is not None:
            self._log.say(text, level)

    def hold(self) -> None:
        """Check that no other run has the folder, before anything is written into it."""
        if self._lock is not None:
            self._lock.take()

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def unfinished_path(self) -> Path:
        """Episodes of a run that has not come to its end; what was `completed` has none."""
        return self.path / UNFINISHED

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one row, its numbers Python's or NumPy's; NaN and infinity, which JSON lacks, become null."""
        self.hold()
        self._go_on()
        append_line(self.metrics_path, json.dumps(finite(dict(row))).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The whole rows written so far; half-written ones are passed over with a warning."""
        data = self.metrics_path.read_bytes() if self.metrics_path.exists() else b""
        rows = whole_rows(data)
        if torn := len(data.splitlines()) - len(rows):
            logger.warning("%s: %d half-written lines are passed over", self.metrics_path, torn)
        return rows

    def keep_metrics(self, x: str, upto: float, *more: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Drop the rows beyond, and half-written ones: what a resumed run will write again; returns those that stay.

        They stand in the order of `x`; of several of the same the last stays. Rows to be added (`more`) are
        written in the same moment, so that none is lost with a run that is killed.

        Raises:
            DataError: a row has no whole number as its `x`, which no run writes; nothing is dropped.
        """
        self.hold()
        rows = self.read_metrics()
        for row in rows:
            if type(row.get(x)) is not int:
                raise DataError(
                    f"a row of {self.metrics_path} must have a whole number as its {x}, got {row!r:.80}: "
                    "remove that line"
                )
        kept = latest([*(row for row in rows if row[x] <= upto), *map(finite, map(dict, more))], x)
        if more or self.metrics_path.exists():
            write_bytes(self.metrics_path, b"".join(json.dumps(row).encode() + b"\n" for row in kept))
        return kept

    def event(self, event: str, **fields: Any) -> None:
        """Report an event to the listener; call it only when the data is on disk."""
        self._go_on()
        self._tell(event, **fields)

    def _tell(self, event: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event({"event": event, **fields})

    def _go_on(self) -> None:
        """Something is added, so the summary of an earlier end is removed."""
        if self._log is not None:
            self._log.begin()
        (self.path / "summary.json").unlink(missing_ok=True)

    def clocks(self) -> dict[str, float]:
        """Seconds of the run so far, by the wall and of its processes, those before a resume included."""
        return {
            "seconds": round(time.monotonic() - self._wall, 3),
            "cpu_seconds": round(_cpu_seconds() - self._cpu, 3),
        }

    def add_clocks(self, before: Mapping[str, Any]) -> None:
        """Count the seconds of a row of metrics that holds `clocks()`, written before this run was resumed."""
        self._wall -= before.get("seconds", 0.0)
        self._cpu -= before.get("cpu_seconds", 0.0)

    def finish(self, metrics: Mapping[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
        """Write `summary.json` (with `more` beside the metrics), return it, and let others write the folder."""
        self.hold()
        summary = {
            "command": self.command,
            "seed": self.seed,
            "status": status,
            **self.clocks(),
            "versions": installed_versions(),
            **more,
            "metrics": finite(dict(metrics)),
        }
        write_json(self.path / "summary.json", summary)
        self.log(f"{status} after {summary['seconds']:.1f} s")
        if status == "completed":
            self.unfinished_path.unlink(missing_ok=True)
        self.close()
        self._tell("summary", path=str(self.path / "summary.json"))
        return summary

    def fail(self, error: BaseException) -> None:
        """Write the summary of a run that `error` ended; one stays if nothing has been added since.

        A full disk does not hide `error`.
        """
        if not (self.path / "summary.json").exists():
            try:
                if isinstance(error, KeyboardInterrupt):
                    self.finish({}, "interrupted")
                else:
                    self.log("".join(traceback.format_exception(error)).rstrip(), logging.ERROR)
                    self.finish({}, "failed", error=with_frames(error)[:MOST_REASON])
            except (OSError, WorkerError) as other:
                logger.error("the run failed, and its summary could not be written: %s", other)


def _command_line() -> str:
    """The command of shoal that started this process, as it can be typed; of another program its name alone.

    What others are called with may be a secret.
    """
    first = Path(sys.argv[0])
    module = first.parent.name if first.name == "__main__.py" else None
    program = ["python", "-m", module] if module else [first.name]
    return shlex.join([*program, *sys.argv[1:]] if (module or first.stem) == "shoal" else program)


class _LogFile(logging.Handler):
    """Adds to a file what shoal says in this process; what cannot be written, on a full disk, is left out.

    The file begins with the command, once something is said or `begin` is called: a run that is refused leaves none.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        super().__init__()
        self._lock = lock
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._path = path
        self._file: TextIO | None = None
        logging.getLogger("shoal").addHandler(self)

    def begin(self) -> None:
        """Write the command down, unless that was done."""
        self.acquire()  # two threads may say the first things at once
        try:
            if self._file is None:
                with contextlib.suppress(OSError, WorkerError):
                    self._lock.take()  # the folder may be that of another run by now
                    self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
                    self.say(f"{STARTED}{_command_line()}")
        finally:
            self.release()

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Add a line that no other log gets."""
        self.handle(logging.LogRecord("shoal", level, "", 0, text, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line of whoever said it."""
        self.begin()
        if self._file is not None:
            with contextlib.suppress(OSError):
                # lines of a text are set in, so that none of them looks like one of the log
                print("\n    ".join(self.format(record).splitlines()), file=self._file, flush=True)

    def end(self) -> None:
        """Write no more; `close` does nothing, which whoever sets up logging calls of all handlers, as uvicorn does."""
        logging.getLogger("shoal").removeHandler(self)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


MOST_REASON = 2000
"""Characters of the error that a summary keeps."""


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def finite(value: Any) -> Any:
    """A value with Python's numbers instead of NumPy's, and None for those that JSON cannot represent."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
