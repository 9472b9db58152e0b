"""The promise, tried: one run in many ways, and with what runs it killed; all must leave the same bytes.

A `Case` makes the run once in a folder of its own. `prove` makes the first case, the reference, then the others, and
compares what they left. A case with a fault proves nothing unless a kill landed and something was played again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import WorkerError
from shoal.core.run_folder import whole_rows

ATTEMPTS = 4
"""Runs of a case with a fault, until a kill was felt."""
RUN_SECONDS = 3600.0
"""Of one command that a case starts, after which it counts as hung."""


@dataclass(slots=True)
class Toll:
    """What a fault did to a run."""

    kills: int = 0  # processes that were there and were ended by our SIGKILL
    again: int = 0  # episodes (or steps, samples, skills) that were played again because of them
    seconds: float | None = None  # lost; None: what the run took more than the calm one


@dataclass(frozen=True)
class Case:
    """One way to make the run."""

    name: str
    make: Callable[[Path], Toll | None]
    """Makes the run in a folder; tells what the fault did, of a case that has one."""
    fault: bool = False


@dataclass(slots=True)
class Row:
    """What one case gave."""

    name: str
    fault: bool
    digests: dict[str, str]  # by what is compared: "episodes", "weights", …
    seconds: float
    toll: Toll = field(default_factory=Toll)
    problem: str = ""  # why it is not equal, or proves nothing

    @property
    def equal(self) -> bool:
        """Whether the promise held."""
        return not self.problem

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "equal": self.equal}


@dataclass(frozen=True)
class Part:
    """A part of shoal with a promise: how its runs are made, and what of them must be equal."""

    name: str
    again: str
    """What is counted as played again: "episodes", "env steps", …"""
    cases: Sequence[Case]
    digests: Callable[[Path], dict[str, str]]
    difference: Callable[[Path, Path], str]
    """In words, where the second run first differs from the first; "" if nothing is found."""
    calm: str = ""
    """The case that those with a fault are like, but for the fault."""
    seed: int = 0
    """Of all its runs."""


def prove(part: Part, folder: Path, told: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Make all runs of a part under a folder; `told` gets each row as it is there.

    What the first run raises, which the others are compared with, is raised.
    """
    rows: list[Row] = []
    runs = [folder / "".join(c if c.isalnum() else "-" for c in case.name).strip("-") for case in part.cases]
    try:
        for case, run in zip(part.cases, runs, strict=True):
            row = _make(part, case, run, is_first=not rows)
            if case.fault and row.toll.seconds is None:
                calm = next((other.seconds for other in rows if other.name == part.calm), row.seconds)
                row.toll.seconds = max(0.0, row.seconds - calm)
            if rows and not row.problem:
                row.problem = _compare(part, rows[0], row, runs[0], run)
            rows.append(row)
            told(row)
    finally:  # a case that was broken off (Ctrl-C) may have left commands running
        for process in _COMMANDS:
            if process.poll() is None:
                kill_session(process)
        _COMMANDS.clear()
    return rows


def _make(part: Part, case: Case, folder: Path, *, is_first: bool) -> Row:
    began = time.monotonic()
    toll: Toll | None = None
    digests: dict[str, str] = {}
    problem = ""
    try:
        for _ in range(ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            toll = case.make(folder)
            if not case.fault or (toll is not None and toll.kills and toll.again):
                break
        digests = part.digests(folder)
    except Exception as error:  # a border: whatever a case's run raises is what the table says of it
        if is_first:
            raise
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    row = Row(case.name, case.fault, digests, time.monotonic() - began, toll or Toll(), problem)
    if case.fault and not problem and not (row.toll.kills and row.toll.again):
        row.problem = (
            f"no fault was felt: {row.toll.kills} kills landed, {row.toll.again} {part.again} played again"
        )
    return row


def _compare(part: Part, reference: Row, row: Row, one: Path, other: Path) -> str:
    parted = [what for what, digest in reference.digests.items() if row.digests.get(what) != digest]
    if not parted:
        return ""
    where = part.difference(one, other)
    return f"{' and '.join(parted)} differ" + (f"; first: {where}" if where else "")


def ray_is_here(asked: bool | None) -> bool:
    """Whether runs are made on Ray too: where it is installed, unless the caller says."""
    return importlib.util.find_spec("ray") is not None if asked is None else asked


# --- running and killing
def shoal_command(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A `shoal` command in a process and session of its own; what it says goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    _COMMANDS.append(process)
    return process


_COMMANDS: list[subprocess.Popen[bytes]] = []


def run_shoal(words: Sequence[str], log: Path) -> None:
    """Run a `shoal` command to its end, which must be a good one."""
    process = shoal_command(words, log)
    for _ in while_running(process):
        pass
    if process.returncode:
        raise WorkerError(f"shoal {words[0]} ended with {process.returncode}: {last_line(log)}")


def while_running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Give the turn every few milliseconds until a process ends.

    Raises:
        WorkerError: it took longer than `RUN_SECONDS`, and was ended with its session.
    """
    deadline = time.monotonic() + RUN_SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            kill_session(process)
            raise WorkerError(f"a command did not end within {RUN_SECONDS:g} s: {process.args!r:.300}")
        yield
        time.sleep(0.005)


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
    """Kill a process and its session once `ready` says so; False if it ended by itself before."""
    for _ in while_running(process):
        if ready():
            process.send_signal(signal.SIGKILL)
            landed = process.wait() == -signal.SIGKILL
            kill_session(process)
            return landed
    return False


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command, which leads its session, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """What a command said last."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def workers_of(pid: int) -> list[int]:
    """Worker processes: shoal forks them from a small process without threads, so they are grandchildren."""
    return [worker for child in children_of(pid) for worker in children_of(child)]


def bytes_read_by(pid: int) -> int:
    """How much a process has read so far, from sockets too; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def kill(pid: int) -> bool:
    """SIGKILL; whether there was a process to get it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread for as long as the block lasts; it is told by the event when to end."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), daemon=True, name="shoal-killer")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The whole rows of `metrics.jsonl`, while somebody may be writing it."""
    path = run / "metrics.jsonl"
    return whole_rows(path.read_bytes()) if path.exists() else []
