"""The truth about a graph of jobs, and what follows from it: rows, what jobs made, how launches ended, `decide`.

SQLite holds what happened, content-addressed files what jobs made. What belongs together is written in one
transaction: a job's result, its versions, the new heads, its state and the event. Files are written before it and
never change, so a kill at any moment leaves either the old truth or the new one, and at worst a file that nothing
refers to. `user_version` says which layout a database has; one with another layout is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from shoal.core.errors import DataError, ShoalError, did_you_mean, reading
from shoal.core.files import fsync_folder, read_json, write_bytes, write_json
from shoal.core.registry import check_name

Status = Literal["waiting", "blocked", "running", "merging", "completed", "failed", "skipped"]
R = TypeVar("R")


class HeadMovedError(ShoalError):
    """Another merge changed an artifact's head in the meantime; decide again against the new one."""


@dataclass(frozen=True)
class JobRow:
    """A job as the store knows it."""

    name: str
    slug: str
    payload: dict[str, Any]  # what to do, as the client of the graph understands it
    needs: tuple[str, ...]  # jobs that must be completed before
    status: Status
    reason: str | None
    artifact: int | None  # number of what it makes, given at its first launch
    retries: int  # used since it was last (re)opened
    rounds: int  # how often it was begun anew after it was completed, or given up
    budget_total: int  # steps it may use in all, as it counts them itself; 0: no limit
    budget_used: int
    allotment: int | None  # steps the next launch may use; None: what is left of the budget
    created: float
    started: float | None
    ended: float | None
    result: dict[str, Any]
    cancel: bool  # somebody asked for it to be given up
    fresh: bool  # the next launch begins anew instead of from a checkpoint

    @property
    def left(self) -> int:
        """Steps that the next launch may use."""
        return self.budget_total - self.budget_used if self.allotment is None else self.allotment


@dataclass(frozen=True)
class AttemptRow:
    """One launch of a job."""

    id: int
    job: str
    state: Literal["running", "ended"]
    run_folder: str
    launcher: str | None
    handle: dict[str, Any] | None
    log: str | None
    started: float
    ended: float | None
    outcome: str | None  # "merged" | "failed" | "cancelled" | "stopped" | "limit" | "lost"
    reason: str | None
    peak_memory: int | None
    steps: int | None
    ending: str | None  # why it is being ended by us: "cancel", "stop" or "limit"
    budget: int | None  # steps it was allowed
    mark: str | None  # of the result that was merged, so that none counts twice


@dataclass(frozen=True)
class VersionRow:
    """One version of an artifact."""

    id: int
    artifact: int
    sha256: str
    parent: int | None
    steps: int  # that its whole line was worked on
    kind: str  # "run", or what else made it
    rule: str | None  # by which it was accepted or not
    note: dict[str, Any]
    accepted: bool
    attempt: int | None
    created: float


class _EventRow(TypedDict):
    seq: int
    time: float
    kind: str
    job: str | None
    detail: dict[str, Any]


@dataclass(frozen=True)
class NewVersion:
    """A version to be committed, and whether it becomes the head."""

    artifact: int
    sha256: str
    parent: int | None
    steps: int
    kind: str
    accepted: bool
    rule: str | None
    note: Mapping[str, Any]


def slug(name: str, noun: str = "job") -> str:
    """A folder and session name for a job's name; different names have different slugs.

    Letters, digits and `-` stay, a space becomes `_`, anything else `~` and its code, so it can be undone.

    >>> slug("Collect Wood"), slug("Make (Iron) Pickaxe")
    ('Collect_Wood', 'Make_~28Iron~29_Pickaxe')
    """
    check_name(noun, name)
    return "".join(c if c.isalnum() or c == "-" else "_" if c == " " else f"~{ord(c):02x}" for c in name)


SCHEMA = """
create table job (
    name text primary key, slug text not null unique, position integer not null, payload text not null,
    needs text not null, status text not null, reason text, artifact integer unique,
    retries integer not null default 0, rounds integer not null default 0,
    budget_total integer not null, budget_used integer not null default 0,
    allotment integer, created real not null, started real, ended real, result text,
    cancel integer not null default 0, fresh integer not null default 0, submitted text);
create table attempt (
    id integer primary key autoincrement, job text not null references job(name), state text not null,
    run_folder text not null, launcher text, handle text, log text, started real not null, ended real,
    outcome text, reason text, peak_memory integer, steps integer, ending text, budget integer, mark text);
create table version (
    id integer primary key autoincrement, artifact integer not null, sha256 text not null, parent integer,
    steps integer not null, kind text not null, rule text, accepted integer not null, attempt integer,
    created real not null, note text not null default '{}');
create table head (artifact integer primary key, version integer not null references version(id));
create table event (
    seq integer primary key autoincrement, time real not null, kind text not null, job text, detail text);
create table setting (key text primary key, value text not null);
create index attempt_job on attempt(job);
create index version_artifact on version(artifact)
"""
LAYOUT = 2
"""Number of the schema above, kept as `user_version`."""
PATIENCE = 60.0
"""Seconds for which another process that writes is waited for."""
_JSON = ("payload", "submitted", "needs", "result", "handle", "note", "detail", "value")
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO, sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_IOERR_SHMSIZE: errno.ENOSPC,
}  # fmt: skip


class Store:
    """One folder of jobs. Safe to use from several threads and processes."""

    files = "artifacts"  # the folder of what jobs made
    suffix = ""  # of the names of those files
    noun = "job"  # what messages call a job
    row: type[JobRow] = JobRow
    version_row: type[VersionRow] = VersionRow

    def __init__(self, root: Path | str, *, create: bool = True) -> None:
        self.root = Path(root)
        if not create and not (self.root / "state.db").is_file():
            raise FileNotFoundError(f"{self.root} holds no {self.noun}s: there is no state.db in it")
        self.blobs = self.root / self.files
        self.blobs.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            self.root / "state.db", isolation_level=None, check_same_thread=False, timeout=PATIENCE
        )
        try:
            with self._told():
                self._open()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise DataError(f"{self.root / 'state.db'} cannot be opened: {error}") from error
            raise
        weakref.finalize(self, self._db.close)  # of one that nobody closed

    def _open(self) -> None:
        self._db.row_factory = sqlite3.Row
        until = time.monotonic() + PATIENCE
        while True:  # of two that make the file at once, SQLite has neither wait for the other here
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
                f"{self.root / 'state.db'} has layout {found}, and this shoal reads layout {LAYOUT}; open it with the "
                "version of shoal that wrote it, or begin in a new folder"
            )
        self._db.execute("pragma foreign_keys=on")

    def _layout(self) -> int:
        return int(self._query("pragma user_version")[0][0])

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
                with self._told():
                    self._db.execute("begin immediate")
                    yield self._db
                    self._db.execute("commit")
            finally:
                if self._db.in_transaction:  # also where Ctrl-C came amid "begin"
                    self._db.execute("rollback")

    def _query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, self._told():
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What SQLite says it cannot do, as the error of files or data that it is."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            path = self.root / "state.db"
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
            number = _ERRNO.get(code, _ERRNO.get(code & 0xFF))
            if number is not None:
                said = {
                    errno.ENOSPC: os.strerror(number),
                    errno.EBUSY: f"another process has been writing for {PATIENCE:g} s; it may be stopped",
                }
                raise OSError(number, said.get(number, str(error)), str(path)) from error
            undecodable = code == sqlite3.SQLITE_OK and isinstance(error, sqlite3.OperationalError)
            if undecodable or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise DataError(f"{path} cannot be read: {error}") from error
            raise
        except OverflowError as error:
            raise DataError(f"a number is larger than {self.root / 'state.db'} can hold: {error}") from error

    def changes(self) -> int:
        """A number that changes when anybody writes, in this process or another."""
        with self._lock:
            return (int(self._query("pragma data_version")[0][0]) << 40) + self._db.total_changes

    # Files

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their sha256, durably; the same bytes are stored once, and again if they were damaged."""
        name = hashlib.sha256(data).hexdigest()
        path = self.blob_path(name)
        try:
            os.utime(path)  # so that no sweep takes one that nothing refers to yet
            whole = path.read_bytes() == data
        except FileNotFoundError:
            whole = False
        if not whole:
            write_bytes(path, data)
        return name

    def blob_path(self, name: str) -> Path:
        """Where the file of that sha256 lies."""
        return self.blobs / f"{name}{self.suffix}"

    def get_blob(self, name: str) -> bytes:
        """The bytes of that sha256, verified."""
        path = self.blob_path(name)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"{path} was altered or truncated: its sha256 is not its name")
        return data

    def sweep(self, older_than: float = 3600) -> list[Path]:
        """Remove files that no version refers to, and temporary ones, if older than that many seconds."""
        removed = []
        with self.transaction():  # nobody commits what is being removed
            known = {row.sha256 for row in self.versions()}
            for path in self.blobs.iterdir():
                leftover = path.name.startswith(".") or path.name.removesuffix(self.suffix) not in known
                with contextlib.suppress(FileNotFoundError):
                    if leftover and time.time() - path.stat().st_mtime > older_than:
                        path.unlink()
                        removed.append(path)
        return removed

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

    def event(self, kind: str, job: str | None = None, **detail: Any) -> int:
        """Append to the log of events."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into event (time, kind, job, detail) values (?, ?, ?, ?)",
                (time.time(), kind, job, json.dumps(detail)),
            )
            return int(cursor.lastrowid or 0)

    def last_event(self) -> int:
        """The sequence number of the newest event, 0 before the first."""
        return int(self._query("select coalesce(max(seq), 0) from event")[0][0])

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Events in order, those after a sequence number."""
        rows = self._query("select * from event where seq > ? order by seq", after)
        events = [self._read(_EventRow, row, f"event {row['seq']}") for row in rows]
        return [{**event, "skill": event["job"]} for event in events]

    # Jobs

    def add(
        self, name: str, payload: Mapping[str, Any], needs: Sequence[str] = (), budget: int = 0
    ) -> JobRow:
        """Add a waiting job; adding the same one again changes nothing, another of that name is refused.

        The same is what was submitted before, even if it was changed since by what was learned of it.
        """
        if isinstance(needs, str) or not all(isinstance(one, str) for one in needs):
            raise ValueError(f"what {name!r} needs must be a list of names, got {needs!r}")
        budget = steps_used(budget, f"the budget of {name!r}")
        try:
            text = json.dumps(dict(payload), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"what {name!r} is to do must be plain JSON: {error}") from None
        with self.transaction() as db:
            known = self._query(
                "select name, payload, submitted from job where name=? or slug=?", name, slug(name)
            )
            if known:
                before = self._read(dict[str, Any], known[0], f"{self.noun} {known[0]['name']!r}")
                plain = json.loads(text)
                same = before["submitted"] in (None, plain) or before["payload"] == plain
                if before["name"] != name or not same:
                    raise ValueError(f"there is another {self.noun} named {known[0]['name']!r} here already")
                return self.job(name)
            position = self._query("select count(*) from job")[0][0]
            db.execute(
                "insert into job (name, slug, position, payload, submitted, needs, status, budget_total, created,"
                " fresh) values (?, ?, ?, ?, ?, ?, 'waiting', ?, ?, 1)",
                (
                    name,
                    slug(name, self.noun),
                    position,
                    text,
                    text,
                    json.dumps(list(needs)),
                    budget,
                    time.time(),
                ),
            )
            self.event("added", name, dependencies=list(needs))
        return self.job(name)

    def job(self, name: str) -> JobRow:
        """A job by its name, or else its slug."""
        rows = self._query("select * from job where name=?1 or slug=?1 order by name=?1 desc", name)
        if not rows:
            known = [row.name for row in self.jobs()]
            raise ValueError(f"no {self.noun} named {name!r}.{did_you_mean(name, known)}")
        return self._job(rows[0])

    def jobs(self, *statuses: str) -> list[JobRow]:
        """All jobs, or those in one of `statuses`, in the order they were added."""
        rows = [self._job(row) for row in self._query("select * from job order by position")]
        return [row for row in rows if not statuses or row.status in statuses]

    def _job(self, row: sqlite3.Row) -> JobRow:
        values = {**dict(row), "result": row["result"] or "{}"}
        return self._read(self.row, values, f"{self.noun} {row['name']!r}")

    def _read(self, kind: type[R], row: sqlite3.Row | Mapping[str, Any], what: str) -> R:
        """A row with its JSON parsed, each value of the type that it has to be, or a `DataError` that names it."""
        with reading(self.root / "state.db", f"cannot be read: {what} is damaged", "; restore it"):
            values = {
                key: json.loads(value) if key in _JSON and value is not None else value
                for key, value in dict(row).items()
            }
            return msgspec.convert(values, kind, strict=False)  # flags are numbers

    def update(self, name: str, **columns: Any) -> None:
        """Change columns of a job; a new status is an event."""
        columns = {
            key: json.dumps(value) if key in ("result", "payload", "needs") else value
            for key, value in columns.items()
        }
        with self.transaction() as db:
            before = self.job(name).status
            assignments = ", ".join(f"{column}=?" for column in columns)
            db.execute(f"update job set {assignments} where name=?", (*columns.values(), name))
            if columns.get("status", before) != before:
                self.event(columns["status"], name, reason=columns.get("reason"))

    def number(self, name: str) -> int:
        """The number of a job's artifact, given at its first launch and kept for good."""
        with self.transaction() as db:
            row = self.job(name)
            if row.artifact is None:
                used = {one.artifact for one in self.jobs()} | {one.artifact for one in self.versions()}
                number = max((one for one in used if one is not None), default=-1) + 1
                db.execute("update job set artifact=? where name=?", (number, row.name))
                return number
            return row.artifact

    # Attempts

    def begin_attempt(self, job: str, run_folder: Path, budget: int | None = None) -> int:
        """Record that a job is about to be launched, before it is."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into attempt (job, state, run_folder, started, budget) values (?, 'running', ?, ?, ?)",
                (job, os.path.relpath(run_folder, self.root), time.time(), budget),
            )
            self.update(job, status="running", reason=None, started=time.time(), ended=None, fresh=0)
            return int(cursor.lastrowid or 0)

    def set_handle(self, attempt: int, launcher: str, handle: Mapping[str, Any], log: Path) -> None:
        """Record what is running, so that another scheduler can adopt it."""
        with self.transaction() as db:
            db.execute(
                "update attempt set launcher=?, handle=?, log=? where id=?",
                (launcher, json.dumps(dict(handle)), os.path.relpath(log, self.root), attempt),
            )

    def set_ending(self, attempt: int, why: str) -> None:
        """Record why a launch is about to be ended, so that its end is understood whoever sees it."""
        with self.transaction() as db:
            db.execute("update attempt set ending=? where id=? and ending is null", (why, attempt))

    def attempt(self, number: int) -> AttemptRow:
        """An attempt by its number."""
        rows = self._query("select * from attempt where id=?", number)
        if not rows:
            raise ValueError(f"there is no launch {number}")
        return self._attempt(rows[0])

    def attempts(self, job: str | None = None, state: str | None = None) -> list[AttemptRow]:
        """Attempts in order, of a job or in a state."""
        rows = [self._attempt(row) for row in self._query("select * from attempt order by id")]
        return [row for row in rows if job in (None, row.job) and state in (None, row.state)]

    def _attempt(self, row: sqlite3.Row) -> AttemptRow:
        return self._read(AttemptRow, row, f"launch {row['id']}")

    def end_attempt(self, attempt: int, outcome: str, reason: str | None = None, **columns: Any) -> None:
        """Record how an attempt ended."""
        with self.transaction() as db:
            extra = "".join(f", {column}=?" for column in columns)
            db.execute(
                f"update attempt set state='ended', outcome=?, reason=?, ended=?{extra} where id=?",
                (outcome, reason, time.time(), *columns.values(), attempt),
            )

    def merged(self, mark: str) -> AttemptRow | None:
        """The launch whose result bears this mark and is committed."""
        rows = self._query("select * from attempt where mark=? and outcome='merged'", mark)
        return self._attempt(rows[0]) if rows else None

    # Versions and heads

    def head(self, artifact: int) -> VersionRow | None:
        """The accepted version of an artifact."""
        rows = self._query(
            "select v.* from version v join head h on h.version = v.id where h.artifact=?", artifact
        )
        return self._version(rows[0]) if rows else None

    def version(self, number: int) -> VersionRow:
        """A version by its number."""
        rows = self._query("select * from version where id=?", number)
        if not rows:
            raise ValueError(f"there is no version {number}")
        return self._version(rows[0])

    def versions(self, artifact: int | None = None) -> Sequence[VersionRow]:
        """All versions, or those of an artifact, oldest first."""
        rows = [self._version(row) for row in self._query("select * from version order by id")]
        return [row for row in rows if artifact in (None, row.artifact)]

    def _version(self, row: sqlite3.Row) -> VersionRow:
        return self._read(self.version_row, row, f"version {row['id']}")

    def ancestors(self, version: int | None) -> set[int]:
        """A version and all it descends from."""
        seen: set[int] = set()
        while version is not None and version not in seen:
            seen.add(version)
            version = self.version(version).parent
        return seen

    def commit(
        self,
        attempt: int,
        versions: Sequence[NewVersion],
        expected_heads: Mapping[int, int | None],
        *,
        result: Mapping[str, Any],
        steps: int,
        peak_memory: int | None = None,
        payload: Mapping[str, Any] | None = None,
        mark: str | None = None,
    ) -> bool:
        """Commit a job and its merge at once; False if this launch, or the result of this mark, was before.

        Args:
            attempt: the launch that ended.
            versions: what it and its merge made.
            expected_heads: the heads that the merge was decided against, by artifact.
            result: numbers to show for the job.
            steps: that it used.
            peak_memory: bytes it needed at most.
            payload: the job as corrected by what really happened, if it was.
            mark: of the result, the same whoever commits it and however often.

        Raises:
            HeadMovedError: a head is no longer the expected one; nothing was written.
        """
        with self.transaction() as db:
            row = self.attempt(attempt)
            if row.outcome == "merged" or (mark is not None and self.merged(mark) is not None):
                return False
            for artifact, expected in expected_heads.items():
                head = self.head(artifact)
                if (head.id if head else None) != expected:
                    raise HeadMovedError(
                        f"artifact {artifact}: head is {head and head.id}, expected {expected}"
                    )
            made = [self.add_version(version, attempt) for version in versions]
            self.end_attempt(attempt, "merged", steps=steps, peak_memory=peak_memory, mark=mark)
            job = self.job(row.job)
            if payload is not None:
                self.update(row.job, payload=dict(payload))
            self.update(
                row.job, status="completed", reason=None, ended=time.time(), result=dict(result), allotment=None,
                budget_used=job.budget_used + steps,
            )  # fmt: skip
            heads = {
                v.artifact: {"version": number, "frames": v.steps}
                for number, v in zip(made, versions, strict=True)
                if v.accepted
            }
            self.event("merge", row.job, attempt=attempt, heads=heads)
            assert db.in_transaction
        return True

    def add_version(self, version: NewVersion, attempt: int | None = None) -> int:
        """Add a version, and make it the head if it was accepted; its file must be there."""
        if not self.blob_path(version.sha256).exists():
            raise DataError(
                f"{self.blob_path(version.sha256)} must be written before its version is committed"
            )
        with self.transaction() as db:
            cursor = db.execute(
                "insert into version (artifact, sha256, parent, steps, kind, rule, note, accepted, attempt, created)"
                " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    version.artifact, version.sha256, version.parent, version.steps, version.kind, version.rule,
                    json.dumps(dict(version.note)), int(version.accepted), attempt, time.time(),
                ),
            )  # fmt: skip
            number = int(cursor.lastrowid or 0)
            if version.accepted:
                db.execute("insert or replace into head values (?, ?)", (version.artifact, number))
        return number

    def rollback(self, artifact: int, version: int) -> None:
        """Make an older version the head again; nothing is lost, and it can be undone the same way."""
        with self.transaction() as db:
            row = self.version(version)
            if row.artifact != artifact:
                raise ValueError(f"version {version} belongs to {row.artifact}, not {artifact}")
            self.get_blob(row.sha256)
            db.execute("insert or replace into head values (?, ?)", (artifact, version))
            self.event("rollback", None, expert=artifact, version=version)


def merge_once(commit: Callable[[], R]) -> R:
    """Call `commit` until no other merge came between its decision and its commit; what it returned."""
    while True:
        try:
            return commit()
        except HeadMovedError:
            continue


# The marks that a launch leaves in its folder: `DONE.json` is written last, by one rename, and names the launch it
# belongs to, so that a scheduler believes no other; `FAILED.json` says why there is none.

DONE, FAILED = "DONE.json", "FAILED.json"


class ExhaustedError(RuntimeError):
    """The budget was used up before the job reached its goal: the same again would end the same."""


def write_done(folder: Path, attempt: int | None, fields: Mapping[str, Any]) -> Path:
    """Leave the mark of a result that is whole on disk; its `id` tells results apart, however alike.

    NumPy's and torch's numbers are told as plain ones, and those that are not finite as null.
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


def read_done(folder: Path, attempt: int | None = None) -> dict[str, Any]:
    """The mark in a folder; a `DataError` if it is missing, broken, or of another launch than `attempt`.

    What was finished by hand is of no launch, and is taken for the one that its commit began: launching clears marks.
    """
    path = folder / DONE
    if not path.exists():
        raise DataError(f"{folder} is not done: it has no {DONE}")
    done: dict[str, Any] = read_json(path)
    if attempt is not None and done.get("attempt") not in (attempt, None):
        raise DataError(f"{path} is the mark of launch {done.get('attempt')}, not of launch {attempt}")
    return done


def read_result(result: Path, folder: Path, attempt: int | None = None) -> tuple[dict[str, Any], bytes]:
    """The mark in a folder and the bytes of the result that it speaks of; a `DataError` if they are others."""
    done, data = read_done(folder, attempt), result.read_bytes()
    if hashlib.sha256(data).hexdigest() != done["sha256"]:
        raise DataError(f"{result} is not the file that {DONE} speaks of")
    return done, data


def mark_of(folder: Path) -> str:
    """What tells this result from every other; marks of the first edition are told by their bytes."""
    done = read_done(folder)
    return str(done.get("id") or hashlib.sha256((folder / DONE).read_bytes()).hexdigest())


def write_failure(folder: Path, attempt: int | None, error: BaseException | str) -> None:
    """Leave the reason of a failed launch where the scheduler finds it."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    final = isinstance(error, ExhaustedError)
    write_json(folder / FAILED, {"attempt": attempt, "reason": reason, "final": final})


def read_failure(folder: Path, attempt: int) -> tuple[str | None, bool]:
    """Why a launch failed, if it could say so, and whether it says that another try would be in vain."""
    with contextlib.suppress(FileNotFoundError, DataError, AttributeError):
        failed = read_json(folder / FAILED)
        if failed.get("attempt") == attempt:
            return str(failed.get("reason")), bool(failed.get("final"))
    return None, False


def clear_marks(folder: Path) -> None:
    """Forget how an earlier launch in this folder ended."""
    for mark in (DONE, FAILED):
        (folder / mark).unlink(missing_ok=True)


# What to do next, as a pure function of the rows of a store and of what just happened: no clock, no files.
#
#     waiting ──launch──> running ──done──> merging ──commit──> completed
#        ^  │                │ failed, retries left; stopped
#        │  └─needs─> blocked(reason)       │ none left, exhausted, over its time ──> failed      cancelled ──> skipped
#        └───────────────────┘
#
# Whoever performs the actions writes `Close` and `Update` of one decision in one transaction and acts afterwards, so
# that a kill in between leaves rows from which the next decision follows.

ENDED_BADLY = ("failed", "skipped")
Phase = Literal["run", "drain", "leave", "kill"]


@dataclass(frozen=True)
class Rows:
    """All that a decision may look at."""

    jobs: Sequence[JobRow]
    running: Sequence[AttemptRow]  # launches that have not ended
    slots: int = 1
    max_retries: int = 0
    time_limit: float | None = None  # seconds that one launch may take
    phase: Phase = "run"  # "drain": launch nothing more; "leave": let go of all; "kill": end all
    growing: bool = False  # more jobs may be added
    room: int | None = None  # launches for which there are resources; None: any number
    now: float = 0.0
    merging: frozenset[int] = frozenset()  # attempts being committed
    killed: frozenset[int] = frozenset()  # attempts that were told to end
    ages: Mapping[int, float] = field(default_factory=dict)  # seconds of the launches that are watched
    resting: frozenset[str] = frozenset()  # jobs that could not be started a moment ago

    def job(self, name: str) -> JobRow:
        """A job by its name."""
        return next(row for row in self.jobs if row.name == name)


# What happens


@dataclass(frozen=True)
class Look:
    """Time went by, somebody asked for something, or something else changed."""


@dataclass(frozen=True)
class Ended:
    """A launch is over."""

    attempt: AttemptRow
    done: bool = False  # it left a whole result of its own
    reason: str = ""  # why not, otherwise
    final: bool = False  # it says itself that another try of the same would be in vain


@dataclass(frozen=True)
class Found:
    """A launch that an earlier scheduler recorded."""

    attempt: AttemptRow
    state: Literal["alive", "never"]  # "never": there is no trace of its process


@dataclass(frozen=True)
class NotPrepared:
    """A job could not be set up."""

    job: str
    reason: str
    final: bool  # another try would end the same


@dataclass(frozen=True)
class MergeFailed:
    """A result could not be committed."""

    attempt: AttemptRow
    reason: str


# What to do


@dataclass(frozen=True)
class Close:
    """The attempt has ended so."""

    attempt: int
    outcome: str
    reason: str | None = None


@dataclass(frozen=True)
class Update:
    """The job's row changes."""

    job: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """The attempt is about to be ended, for this reason."""

    attempt: int
    ending: str


@dataclass(frozen=True)
class Kill:
    """End the attempt's process."""

    attempt: int


@dataclass(frozen=True)
class Launch:
    """Start the job."""

    job: str


@dataclass(frozen=True)
class Merge:
    """Commit the attempt's result."""

    attempt: int


@dataclass(frozen=True)
class Tell:
    """The job will not be completed by this run; say so to those who wait."""

    job: str


Event = Look | Ended | Found | NotPrepared | MergeFailed
Action = Close | Update | Mark | Kill | Launch | Merge | Tell


def decide(rows: Rows, event: Event) -> list[Action]:
    """The actions that follow from an event; `Look` is repeated until nothing follows."""
    if isinstance(event, Ended):
        return _ended(rows, event)
    if isinstance(event, MergeFailed):
        return _failed(rows, event.attempt, event.reason)
    if isinstance(event, NotPrepared):
        return _not_prepared(rows, event)
    if isinstance(event, Found):
        return _found(rows, event)
    return _requests(rows) or _overdue(rows) or _obstacles(rows) or _launches(rows)


def finished(rows: Rows) -> bool:
    """Whether nothing more will happen without somebody asking for it."""
    if rows.phase == "leave":
        return True
    if rows.running or rows.merging or any(row.status == "merging" for row in rows.jobs):
        return False
    return rows.phase != "run" or (not rows.growing and not ready(rows.jobs))


def ready(jobs: Sequence[JobRow]) -> list[JobRow]:
    """The waiting jobs whose needs are all completed, those first behind which the longest way lies."""
    completed = {row.name for row in jobs if row.status == "completed"}
    behind = _way_behind(jobs)
    can = [row for row in jobs if row.status == "waiting" and completed.issuperset(row.needs)]
    return sorted(can, key=lambda row: -behind[row.name])


def _way_behind(jobs: Sequence[JobRow]) -> dict[str, int]:
    """How many jobs follow one after another behind each; a circle counts as often as there are jobs."""
    needed_by: dict[str, list[str]] = {row.name: [] for row in jobs}
    for row in jobs:
        for name in row.needs:
            if name in needed_by:
                needed_by[name].append(row.name)
    way = dict.fromkeys(needed_by, 0)
    for _ in jobs:
        longer = {name: max((way[n] + 1 for n in after), default=0) for name, after in needed_by.items()}
        if longer == way:
            break
        way = longer
    return way


def _ended(rows: Rows, event: Ended) -> list[Action]:
    attempt, job = event.attempt, rows.job(event.attempt.job)
    if job.cancel:
        return [Close(attempt.id, "cancelled"), *_skip(job, rows.now)]
    if event.done:
        return [Update(job.name, {"status": "merging"}), Merge(attempt.id)]
    if attempt.ending == "stop":
        return [Close(attempt.id, "stopped"), Update(job.name, {"status": "waiting", "reason": "stopped"})]
    if attempt.ending == "limit":
        reason = (
            f"ran longer than {rows.time_limit:g} s" if rows.time_limit else "ran longer than was allowed"
        )
        return _give_up(job, attempt, reason, rows.now, outcome="limit")
    if event.final and (attempt.budget is None or job.left <= attempt.budget):
        return _give_up(job, attempt, event.reason, rows.now, outcome="exhausted")
    if event.final:  # its budget was raised meanwhile
        return [Close(attempt.id, "failed", event.reason), Update(job.name, {"status": "waiting"})]
    return _failed(rows, attempt, event.reason)


def _failed(rows: Rows, attempt: AttemptRow, reason: str) -> list[Action]:
    """Another launch, or none left."""
    job = rows.job(attempt.job)
    if job.cancel:
        return [Close(attempt.id, "cancelled"), *_skip(job, rows.now)]
    if job.retries >= rows.max_retries:
        return _give_up(job, attempt, reason, rows.now)
    again = {"status": "waiting", "reason": reason, "retries": job.retries + 1}
    return [Close(attempt.id, "failed", reason), Update(job.name, again)]


def _give_up(
    job: JobRow, attempt: AttemptRow, reason: str, now: float, outcome: str = "failed"
) -> list[Action]:
    failed = {"status": "failed", "reason": reason, "ended": now}
    return [Close(attempt.id, outcome, reason), Update(job.name, failed), Tell(job.name)]


def _not_prepared(rows: Rows, event: NotPrepared) -> list[Action]:
    job = rows.job(event.job)
    if event.final or job.retries >= rows.max_retries:
        failed = {"status": "failed", "reason": event.reason, "ended": rows.now}
        return [Update(job.name, failed), Tell(job.name)]
    return [Update(job.name, {"reason": event.reason, "retries": job.retries + 1})]


def _skip(job: JobRow, now: float) -> list[Action]:
    skipped = {"status": "skipped", "reason": "cancelled", "cancel": 0, "ended": now}
    return [Update(job.name, skipped), Tell(job.name)]


def _found(rows: Rows, event: Found) -> list[Action]:
    job = rows.job(event.attempt.job)
    if event.state == "never":
        lost = Close(event.attempt.id, "lost", "the scheduler died while launching it")
        return [lost, Update(job.name, {"status": "waiting", "reason": None})]
    return [Update(job.name, {"status": "running"})] if job.status == "merging" else []


def _requests(rows: Rows) -> list[Action]:
    """What somebody asked for: to give a job up, to end all."""
    actions: list[Action] = []
    for row in rows.jobs:
        if not row.cancel:
            continue
        if row.status in ("waiting", "blocked"):
            actions += _skip(row, rows.now)
        elif row.status == "running":
            actions += _end(rows, row.name, "cancel")
        elif row.status != "merging":  # which is let through, and the request with it dropped
            actions.append(Update(row.name, {"cancel": 0}))
    if rows.phase == "kill":
        for name in {attempt.job for attempt in rows.running if attempt.id not in rows.merging}:
            actions += _end(rows, name, "stop")
    return actions


def _end(rows: Rows, job: str, why: str) -> list[Action]:
    actions: list[Action] = []
    for attempt in rows.running:
        if attempt.job == job and attempt.id not in rows.killed | rows.merging:
            actions += [Mark(attempt.id, why), Kill(attempt.id)]
    return actions


def _overdue(rows: Rows) -> list[Action]:
    actions: list[Action] = []
    for attempt in rows.running:
        age = rows.ages.get(attempt.id, rows.now - attempt.started)
        if rows.time_limit is not None and age > rows.time_limit:
            actions += _end(rows, attempt.job, "limit")
    return actions


def _obstacles(rows: Rows) -> list[Action]:
    """Say of each waiting job what keeps it from ever starting, and take it back when that is gone."""
    if rows.phase != "run":
        return []
    progress = bool(rows.running or rows.merging or rows.growing)
    actions: list[Action] = []
    for name, reason in obstacles(rows.jobs, progress=progress).items():
        row = rows.job(name)
        if reason is None and row.status == "blocked":
            actions.append(Update(name, {"status": "waiting", "reason": None}))
        elif reason is not None and (row.status, row.reason) != ("blocked", reason):
            actions += [Update(name, {"status": "blocked", "reason": reason}), Tell(name)]
    return actions


def _launches(rows: Rows) -> list[Action]:
    if rows.phase != "run":
        return []
    busy = len(rows.running) + sum(
        row.status == "merging" and not any(a.job == row.name for a in rows.running) for row in rows.jobs
    )
    free = rows.slots - busy
    if rows.room is not None:
        free = min(free, rows.room if busy else max(rows.room, 1))  # one is always tried
    actions: list[Action] = []
    for row in ready(rows.jobs):
        if row.budget_total and row.left < 1:
            reason = f"its budget of {row.budget_total:,} steps is used up"
            failed = {"status": "failed", "reason": reason, "ended": rows.now}
            return [Update(row.name, failed), Tell(row.name)]
        if len(actions) < free and row.name not in rows.resting:
            actions.append(Launch(row.name))
    return actions


def obstacles(jobs: Sequence[JobRow], *, progress: bool) -> dict[str, str | None]:
    """For each waiting or blocked job what keeps it from ever starting, or None.

    Args:
        jobs: all of them.
        progress: more may be added, so what is open now may yet complete; as it may while any job runs or can start.
    """
    statuses = {row.name: row.status for row in jobs}
    doomed = {name for name, status in statuses.items() if status in ENDED_BADLY}
    idle = [row for row in jobs if row.status in ("waiting", "blocked")]
    able = (row for row in idle if all(statuses.get(name) == "completed" for name in row.needs))
    progress |= any(able) or not {"running", "merging"}.isdisjoint(statuses.values())
    if not progress:
        doomed |= {row.name for row in idle if not statuses.keys() >= set(row.needs)}
    while more := {row.name for row in idle if doomed.intersection(row.needs)} - doomed:
        doomed |= more
    statuses |= {row.name: "blocked" if row.name in doomed else "waiting" for row in idle}
    found: dict[str, str | None] = {}
    for row in idle:
        dead = [name for name in row.needs if name in doomed]
        still_open = [name for name in row.needs if statuses.get(name) != "completed"]
        missing = [name for name in still_open if name not in statuses]
        if dead:
            found[row.name] = "; ".join(f"{name} {statuses[name]}" for name in dead)
        elif not still_open or progress:
            found[row.name] = None
        elif missing:
            found[row.name] = f"needs {', '.join(missing)}, which is unknown"
        else:
            found[row.name] = "skills wait for each other: " + " -> ".join(_circle(row, jobs))
    return found


def _circle(row: JobRow, jobs: Sequence[JobRow]) -> list[str]:
    """The way around on which a job waits for itself, or for others that do."""
    by_name = {other.name: other for other in jobs}
    path = [row.name]
    while path.count(path[-1]) == 1:
        path.append(next(n for n in by_name[path[-1]].needs if by_name[n].status != "completed"))
    return path
