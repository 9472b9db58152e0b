"""SQLite database of a run of skills (source of truth): skills, launches of their trainings, experts' versions.

What belongs together is written in one transaction. Parameters lie in files named by their sha256, written before the
transaction that names them and never changed, so a kill at any moment leaves either the old state or the new one, and
at worst a file that nothing refers to.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from shoal.core.errors import DataError, did_you_mean, reading
from shoal.core.files import fsync_folder, write_bytes
from shoal.core.run_folder import FolderLock
from shoal.skills.graph.process import steps_used
from shoal.skills.spec import Skill, parse_skill, slug

Status = Literal["waiting", "blocked", "running", "completed", "failed", "skipped"]
End = Literal["failed", "exhausted", "limit", "cancelled", "stopped", "lost"]
"""How a launch ends that is not merged."""
R = TypeVar("R")


@dataclass(frozen=True)
class SkillRow:
    """A skill as the store knows it."""

    name: str
    spec: Skill
    dependencies: tuple[str, ...]  # skills that must be completed before
    status: Status
    reason: str | None
    expert: int | None  # number of its expert, given at its first launch
    retries: int  # used since it was last (re)opened
    rounds: int  # how often it was begun anew after it was completed, or given up
    budget_total: int  # env steps it may use in all; 0: no limit
    budget_used: int
    allotment: int | None  # env steps the next launch may use; None: what is left of the budget
    created: float
    started: float | None
    ended: float | None
    result: dict[str, Any]
    cancel: bool  # somebody asked for it to be given up
    fresh: bool  # the next launch begins anew instead of from a checkpoint

    @property
    def slug(self) -> str:
        """Its name as used in folders."""
        return slug(self.name)

    @property
    def left(self) -> int:
        """Env steps that the next launch may use."""
        return self.budget_total - self.budget_used if self.allotment is None else self.allotment


@dataclass(frozen=True)
class AttemptRow:
    """One launch of a training."""

    id: int
    skill: str
    run_folder: str
    launcher: str | None
    handle: dict[str, Any] | None
    log: str | None
    started: float
    ended: float | None
    outcome: Literal["merged"] | End | None  # None: it runs
    reason: str | None
    frames: int | None
    budget: int | None  # env steps it was allowed
    mark: str | None  # of the result that was merged, so that none counts twice


@dataclass(frozen=True)
class NewVersion:
    """A version of an expert to be committed, and whether it becomes the head."""

    expert: int
    sha256: str
    parent: int | None
    frames: int  # env steps the expert acted in while learning, over its whole line
    acted: int  # of those, in the training that made this version
    accepted: bool


@dataclass(frozen=True)
class VersionRow(NewVersion):
    """One version of an expert."""

    id: int
    attempt: int | None
    created: float


class _EventRow(TypedDict):
    seq: int
    time: float
    kind: str
    skill: str | None
    detail: dict[str, Any]


SCHEMA = """
create table skill (
    name text primary key, spec text not null, dependencies text not null,
    status text not null default 'waiting', reason text, expert integer unique,
    retries integer not null default 0, rounds integer not null default 0,
    budget_total integer not null, budget_used integer not null default 0, allotment integer,
    created real not null, started real, ended real, result text not null default '{}',
    cancel integer not null default 0, fresh integer not null default 1);
create table attempt (
    id integer primary key autoincrement, skill text not null references skill(name), run_folder text not null,
    launcher text, handle text, log text, started real not null, ended real, outcome text, reason text,
    frames integer, budget integer, mark text);
create table version (
    id integer primary key autoincrement, expert integer not null, sha256 text not null, parent integer,
    frames integer not null, acted integer not null, accepted integer not null, attempt integer,
    created real not null);
create table head (expert integer primary key, version integer not null references version(id));
create table event (
    seq integer primary key autoincrement, time real not null, kind text not null, skill text, detail text);
create table setting (key text primary key, value text not null)
"""
LAYOUT = 4
"""Number of the schema above, kept as `user_version`."""
LOCK = "scheduler.lock"
PATIENCE = 60.0
"""Seconds for which another process that writes is waited for."""
_JSON = ("spec", "dependencies", "result", "handle", "detail", "value")


class Store:
    """One folder of skills. Safe to use from several threads and processes.

    Args:
        root: the folder.
        create: make the folder and its database if they are not there.

    Raises:
        FileNotFoundError: there is no database, and `create` is not set.
        DataError: the database is damaged, or was made by another version of shoal.
    """

    def __init__(self, root: Path | str, *, create: bool = False) -> None:
        self.root = Path(root)
        if not create and not (self.root / "state.db").is_file():
            raise FileNotFoundError(f"{self.root} holds no skills: there is no state.db in it")
        self.experts = self.root / "experts"
        self.experts.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            self.root / "state.db", isolation_level=None, check_same_thread=False, timeout=PATIENCE
        )
        try:
            with self._naming_errors():
                self._open()
        except BaseException:
            self._db.close()
            raise
        weakref.finalize(self, self._db.close)  # of one that nobody closed

    def _open(self) -> None:
        self._db.row_factory = sqlite3.Row
        until = time.monotonic() + PATIENCE
        while True:  # SQLite does not wait here for another process that makes the file at the same time
            try:
                self._db.execute("pragma journal_mode=wal")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(0.01)
        self._db.execute("pragma synchronous=full")
        if self._layout() == 0:
            with self.transaction() as db:
                if self._layout() == 0:  # again, since another process may have been faster
                    for statement in SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"pragma user_version={LAYOUT}")
            fsync_folder(self.root)
        if (found := self._layout()) != LAYOUT:
            raise DataError(
                f"{self.root / 'state.db'} was made by another version of shoal (layout {found}, this one reads "
                f"{LAYOUT}); open it with that version, or begin in a new folder"
            )
        self._db.execute("pragma foreign_keys=on")

    def _layout(self) -> int:
        return int(self._query("pragma user_version")[0][0])

    def is_held(self) -> bool:
        """Whether a scheduler runs the folder."""
        return FolderLock(self.root / LOCK).is_taken()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All writes inside happen together or not at all; durable when the block is left."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            try:
                with self._naming_errors():
                    self._db.execute("begin immediate")
                    yield self._db
                    self._db.execute("commit")
            finally:
                if self._db.in_transaction:
                    self._db.execute("rollback")

    def _query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, self._naming_errors():
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """SQLite's errors as an `OSError` (disk, rights, another writer) or a `DataError` (damage)."""
        path = self.root / "state.db"
        try:
            yield
        except sqlite3.OperationalError as error:
            full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
        except (sqlite3.DatabaseError, OverflowError) as error:
            raise DataError(f"{path} cannot be read or written: {error}") from error

    def changes(self) -> int:
        """A number that changes when anybody writes, in this process or another."""
        with self._lock:
            return (int(self._query("pragma data_version")[0][0]) << 40) + self._db.total_changes

    # Files of parameters

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their sha256, durably; the same bytes are stored once, and again if they were damaged."""
        name = hashlib.sha256(data).hexdigest()
        path = self.blob_path(name)
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)
        return name

    def blob_path(self, name: str) -> Path:
        """Where the file of that sha256 lies."""
        return self.experts / f"{name}.safetensors"

    def get_blob(self, name: str) -> bytes:
        """The bytes of that sha256, verified."""
        path = self.blob_path(name)
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != name:
            what = "was altered or truncated: its sha256 is not its name" if data else "is missing or empty"
            raise DataError(f"{path} {what}; put it back from a copy, as nothing else holds these weights")
        return data

    # Settings and events

    def setting(self, key: str) -> Any:
        """A stored value, or None."""
        rows = self._query("select value from setting where key=?", key)
        return self._read(dict[str, Any], rows[0], f"setting {key!r}")["value"] if rows else None

    def set_setting(self, key: str, value: Any) -> None:
        """Store a JSON value; None forgets it."""
        with self.transaction() as db:
            if value is None:
                db.execute("delete from setting where key=?", (key,))
            else:
                db.execute("insert or replace into setting values (?, ?)", (key, json.dumps(value)))

    def event(self, kind: str, skill: str | None = None, **detail: Any) -> int:
        """Append to the log of events."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into event (time, kind, skill, detail) values (?, ?, ?, ?)",
                (time.time(), kind, skill, json.dumps(detail)),
            )
            return int(cursor.lastrowid or 0)

    def events(self, after: int = 0) -> list[_EventRow]:
        """Events in order, those after a sequence number."""
        rows = self._query("select * from event where seq > ? order by seq", after)
        return [self._read(_EventRow, row, f"event {row['seq']}") for row in rows]

    # Skills

    def add_skill(self, skill: Skill, dependencies: Sequence[str], budget: int) -> SkillRow:
        """Add a waiting skill; adding the same one again changes nothing, another of that name is refused."""
        if isinstance(dependencies, str) or not all(isinstance(one, str) for one in dependencies):
            raise ValueError(
                f"the dependencies of {skill.name!r} must be a list of names, got {dependencies!r}"
            )
        budget = steps_used(budget, f"the budget of {skill.name!r}")
        slug(skill.name)
        spec = json.dumps(skill.as_dict())
        with self.transaction() as db:
            if known := self._query("select spec from skill where name=?", skill.name):
                if spec != known[0]["spec"]:
                    raise ValueError(f"there is another skill named {skill.name!r} here already")
                return self.skill(skill.name)
            db.execute(
                "insert into skill (name, spec, dependencies, budget_total, created) values (?, ?, ?, ?, ?)",
                (skill.name, spec, json.dumps(list(dependencies)), budget, time.time()),
            )
            self.event("added", skill.name, dependencies=list(dependencies))
        return self.skill(skill.name)

    def skill(self, name: str) -> SkillRow:
        """A skill by its name, or else its slug."""
        if found := self._query("select * from skill where name=?", name):
            return self._skill(found[0])
        rows = self.skills()
        for row in rows:
            if row.slug == name:
                return row
        raise ValueError(f"no skill named {name!r}.{did_you_mean(name, [row.name for row in rows])}")

    def skills(self, *statuses: str) -> list[SkillRow]:
        """All skills, or those in one of `statuses`, in the order they were added."""
        rows = [self._skill(row) for row in self._query("select * from skill order by rowid")]
        return [row for row in rows if not statuses or row.status in statuses]

    def _skill(self, row: sqlite3.Row) -> SkillRow:
        return self._read(SkillRow, row, f"skill {row['name']!r}")

    def _read(self, kind: type[R], row: sqlite3.Row, what: str) -> R:
        """A row with its JSON parsed, each value of the type that it has to be, or a `DataError` that names it."""
        with reading(self.root / "state.db", f"cannot be read: {what} is damaged", "; restore it"):
            values = {
                key: json.loads(value) if key in _JSON and value is not None else value
                for key, value in dict(row).items()
            }
            if "spec" in values:
                values["spec"] = parse_skill(values["spec"])
            return msgspec.convert(values, kind, strict=False)  # flags are numbers

    def update_skill(self, name: str, **columns: Any) -> None:
        """Change columns of a skill; a new status is an event."""
        columns = {
            key: json.dumps(value) if key in ("result", "spec", "dependencies") else value
            for key, value in columns.items()
        }
        with self.transaction() as db:
            before = self.skill(name).status
            assignments = ", ".join(f"{column}=?" for column in columns)
            db.execute(f"update skill set {assignments} where name=?", (*columns.values(), name))
            if columns.get("status", before) != before:
                self.event(columns["status"], name, reason=columns.get("reason"))

    def assign_expert(self, name: str) -> int:
        """The global expert index of a skill, given at its first launch and kept for good."""
        with self.transaction():
            row = self.skill(name)
            if row.expert is not None:
                return row.expert
            used = {one.expert for one in self.skills()} | {one.expert for one in self.versions()}
            number = max((one for one in used if one is not None), default=-1) + 1
            self.update_skill(row.name, expert=number)
            return number

    # Launches of trainings

    def begin_attempt(self, skill: str, run_folder: Path, budget: int | None = None) -> int:
        """Record that a training is about to be launched, before it is."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into attempt (skill, run_folder, started, budget) values (?, ?, ?, ?)",
                (skill, os.path.relpath(run_folder, self.root), time.time(), budget),
            )
            self.update_skill(skill, status="running", reason=None, started=time.time(), ended=None, fresh=0)
            return int(cursor.lastrowid or 0)

    def set_handle(self, attempt: int, launcher: str, handle: Mapping[str, Any], log: Path) -> None:
        """Record what is running, so that another scheduler can adopt it."""
        with self.transaction() as db:
            db.execute(
                "update attempt set launcher=?, handle=?, log=? where id=?",
                (launcher, json.dumps(dict(handle)), os.path.relpath(log, self.root), attempt),
            )

    def attempt(self, number: int) -> AttemptRow:
        """A launch by its number."""
        rows = self._query("select * from attempt where id=?", number)
        if not rows:
            raise ValueError(f"there is no launch {number}")
        return self._read(AttemptRow, rows[0], f"launch {number}")

    def attempts(self, skill: str | None = None, *, running: bool = False) -> list[AttemptRow]:
        """Launches in order: all, those of a skill, those that have not ended."""
        where = "where ? in (skill, '')" + (" and outcome is null" if running else "")
        rows = self._query(f"select * from attempt {where} order by id", skill or "")
        return [self._read(AttemptRow, row, f"launch {row['id']}") for row in rows]

    def finish(self, attempt: int, end: End, reason: str | None = None, *, max_retries: int = 0) -> SkillRow:
        """End a launch that is not merged, and say what becomes of its skill, in one transaction.

        What was stopped or lost waits to be launched again, and so does what failed while it has retries left, or
        used up a budget that was raised meanwhile. What was cancelled is skipped, anything else has failed.
        """
        with self.transaction() as db:
            launch = self.attempt(attempt)
            row = self.skill(launch.skill)
            if launch.outcome is not None:  # another process merged it meanwhile
                return row
            end = "cancelled" if row.cancel else end
            raised = end == "exhausted" and row.left > (launch.budget or row.left)
            retry = end == "failed" and row.retries < max_retries
            db.execute(
                "update attempt set outcome=?, reason=?, ended=? where id=?",
                (end, reason, time.time(), attempt),
            )
            if end in ("stopped", "lost") or raised or retry:
                self.update_skill(row.name, status="waiting", reason=reason, retries=row.retries + retry)
            elif end == "cancelled":
                self.give_up(row.name, "skipped", "cancelled")
            else:
                self.give_up(row.name, "failed", reason)
        return self.skill(row.name)

    def give_up(self, name: str, status: Status, reason: str | None) -> None:
        """A skill is failed, skipped or blocked."""
        self.update_skill(name, status=status, reason=reason, ended=time.time(), cancel=0)

    def merged(self, mark: str) -> AttemptRow | None:
        """The launch whose result bears this mark and is committed."""
        rows = self._query("select * from attempt where mark=? and outcome='merged'", mark)
        return self._read(AttemptRow, rows[0], f"launch {rows[0]['id']}") if rows else None

    # Versions and heads

    def head(self, expert: int) -> VersionRow | None:
        """The accepted version of an expert."""
        rows = self._query(
            "select v.* from version v join head h on h.version = v.id where h.expert=?", expert
        )
        return self._version(rows[0]) if rows else None

    def version(self, number: int) -> VersionRow:
        """A version by its number."""
        rows = self._query("select * from version where id=?", number)
        if not rows:
            raise ValueError(
                f"there is no version {number} of any expert: name one that shoal skills history EXPERT lists"
            )
        return self._version(rows[0])

    def versions(self, expert: int | None = None) -> list[VersionRow]:
        """All versions, or those of an expert, oldest first."""
        rows = [self._version(row) for row in self._query("select * from version order by id")]
        return [row for row in rows if expert in (None, row.expert)]

    def _version(self, row: sqlite3.Row) -> VersionRow:
        return self._read(VersionRow, row, f"version {row['id']}")

    def commit_training(
        self,
        attempt: int,
        versions: Sequence[NewVersion],
        *,
        result: Mapping[str, Any],
        frames: int,
        mark: str | None = None,
    ) -> None:
        """Commit a training and its merge at once.

        Args:
            attempt: the launch that ended.
            versions: what it and its merge made.
            result: numbers to show for the skill.
            frames: env steps that it used.
            mark: of the result, the same whoever commits it and however often.
        """
        with self.transaction() as db:
            row = self.skill(self.attempt(attempt).skill)
            made = [self.add_version(version, attempt) for version in versions]
            db.execute(
                "update attempt set outcome='merged', reason=null, ended=?, frames=?, mark=? where id=?",
                (time.time(), frames, mark, attempt),
            )
            self.update_skill(
                row.name, status="completed", reason=None, ended=time.time(), result=dict(result), allotment=None,
                budget_used=row.budget_used + frames, cancel=0,
            )  # fmt: skip
            heads = {
                v.expert: {"version": number, "frames": v.frames}
                for number, v in zip(made, versions, strict=True)
                if v.accepted
            }
            self.event("merge", row.name, attempt=attempt, heads=heads)

    def add_version(self, version: NewVersion, attempt: int | None = None) -> int:
        """Add a version, and make it the head if it was accepted; its file must be there."""
        path = self.blob_path(version.sha256)
        if not path.exists():
            raise DataError(f"{path} must be written before its version is committed")
        with self.transaction() as db:
            cursor = db.execute(
                "insert into version (expert, sha256, parent, frames, acted, accepted, attempt, created)"
                " values (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    version.expert, version.sha256, version.parent, version.frames, version.acted,
                    int(version.accepted), attempt, time.time(),
                ),
            )  # fmt: skip
            number = int(cursor.lastrowid or 0)
            if version.accepted:
                db.execute("insert or replace into head values (?, ?)", (version.expert, number))
        return number

    def rollback(self, expert: int, version: int) -> None:
        """Make an older version the head again; nothing is lost, and it can be undone the same way."""
        with self.transaction() as db:
            row = self.version(version)
            if row.expert != expert:
                own = ", ".join(str(one.id) for one in self.versions(expert))
                raise ValueError(
                    f"version {version} is one of expert {row.expert}, and expert {expert} has {own or 'none'}: name "
                    "one of these (shoal skills history EXPERT lists them)"
                )
            self.get_blob(row.sha256)
            db.execute("insert or replace into head values (?, ?)", (expert, version))
            self.event("rollback", None, expert=expert, version=version)
