"""The truth about a graph of jobs: SQLite for what happened, content-addressed files for what jobs made.

What belongs together is written in one transaction: a job's result, its versions, the new heads, its state and the
event. Files are written before it and never change, so a kill at any moment leaves either the old truth or the new
one, and at worst a file that nothing refers to. `user_version` says which layout a database has; older ones are
brought up to date when they are opened, newer ones are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shoal.core.errors import DataError, ShoalError, did_you_mean
from shoal.core.files import fsync_folder, write_bytes
from shoal.core.registry import check_name

Status = Literal["waiting", "blocked", "running", "merging", "completed", "failed", "skipped"]
STATUSES: tuple[str, ...] = get_args(Status)


class HeadMovedError(ShoalError):
    """Another merge changed an artifact's head in the meantime; decide again against the new one."""


@dataclass(frozen=True)
class JobRow:
    """A job as the store knows it."""

    name: str
    slug: str
    payload: dict[str, Any]  # what to do, as the client of the graph understands it
    needs: tuple[str, ...]  # jobs that must be completed before
    status: str
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
    state: str  # "running" | "ended"
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


_FIRST = """
create table if not exists skill (
    name text primary key, slug text not null unique, position integer not null, spec text not null,
    dependencies text not null, status text not null, reason text, expert integer unique,
    retries integer not null default 0, rounds integer not null default 0,
    budget_total integer not null, budget_used integer not null default 0,
    allotment integer, created real not null, started real, ended real, result text,
    cancel integer not null default 0);
create table if not exists attempt (
    id integer primary key autoincrement, skill text not null references skill(name), state text not null,
    run_folder text not null, launcher text, handle text, log text, started real not null, ended real,
    outcome text, reason text, peak_memory integer, frames integer);
create table if not exists version (
    id integer primary key autoincrement, expert integer not null, sha256 text not null, parent integer,
    frames integer not null, acted integer not null, kind text not null, rule text, wins integer,
    episodes integer, accepted integer not null, attempt integer, created real not null);
create table if not exists head (expert integer primary key, version integer not null references version(id));
create table if not exists event (
    seq integer primary key autoincrement, time real not null, kind text not null, skill text, detail text);
create table if not exists setting (key text primary key, value text not null);
create index if not exists attempt_skill on attempt(skill);
create index if not exists version_expert on version(expert)
"""

# The second layout speaks of jobs and artifacts, says why a launch was ended and which result was merged, and
# remembers what was submitted beside what became of it.
_SECOND = """
alter table skill rename to job;
alter table job rename column spec to payload;
alter table job rename column dependencies to needs;
alter table job rename column expert to artifact;
alter table job add column fresh integer not null default 0;
alter table job add column submitted text;
alter table attempt rename column skill to job;
alter table attempt rename column frames to steps;
alter table attempt add column ending text;
alter table attempt add column budget integer;
alter table attempt add column mark text;
alter table version rename column expert to artifact;
alter table version rename column frames to steps;
alter table version add column note text not null default '{}';
update version set note = json_object('acted', acted, 'wins', wins, 'episodes', episodes);
alter table version drop column acted;
alter table version drop column wins;
alter table version drop column episodes;
alter table head rename column expert to artifact;
alter table event rename column skill to job;
update job set submitted = payload where name not in (select job from event where kind = 'corrected');
update job set fresh = 1 where name not in (select job from attempt)
"""
MIGRATIONS = (_FIRST, _SECOND)


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
            self.root / "state.db", isolation_level=None, check_same_thread=False, timeout=60
        )
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.row_factory = sqlite3.Row
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        if self._layout() != len(MIGRATIONS):
            self._db.execute("pragma foreign_keys=off")
            with self.transaction() as db:
                found = self._layout()  # again, since another process may have been faster
                if found > len(MIGRATIONS):
                    raise DataError(
                        f"{self.root / 'state.db'} was written by a newer shoal (layout {found}, this one knows "
                        f"{len(MIGRATIONS)}); use that version"
                    )
                for migration in MIGRATIONS[found:]:
                    for statement in migration.split(";"):
                        db.execute(statement)
                db.execute(f"pragma user_version={len(MIGRATIONS)}")
            fsync_folder(self.root)
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
            self._db.execute("begin immediate")
            try:
                yield self._db
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def _query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def changes(self) -> int:
        """A number that changes when anybody writes, in this process or another."""
        with self._lock:
            return (int(self._query("pragma data_version")[0][0]) << 40) + self._db.total_changes

    # Files

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their sha256, durably; the same bytes are stored once, and again if they were damaged."""
        name = hashlib.sha256(data).hexdigest()
        path = self.blob_path(name)
        if not path.exists() or path.read_bytes() != data:
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
        known = {row["sha256"] for row in self._query("select sha256 from version")}
        removed = []
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
        return json.loads(rows[0][0]) if rows else None

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

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Events in order, those after a sequence number."""
        rows = self._query("select * from event where seq > ? order by seq", after)
        return [{**dict(row), "skill": row["job"], "detail": json.loads(row["detail"])} for row in rows]

    # Jobs

    def add(
        self, name: str, payload: Mapping[str, Any], needs: Sequence[str] = (), budget: int = 0
    ) -> JobRow:
        """Add a waiting job; adding the same one again changes nothing, another of that name is refused.

        The same is what was submitted before, even if it was changed since by what was learned of it.
        """
        with self.transaction() as db:
            known = self._query(
                "select name, payload, submitted from job where name=? or slug=?", name, slug(name)
            )
            text = json.dumps(dict(payload))
            if known:
                plain = json.loads(text)
                before = known[0]["submitted"]
                same = before is None or plain in (json.loads(before), json.loads(known[0]["payload"]))
                if known[0]["name"] != name or not same:
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
        """A job by its name or its slug."""
        rows = self._query("select * from job where name=? or slug=?", name, name)
        if not rows:
            known = [row["name"] for row in self._query("select name from job")]
            raise ValueError(f"no {self.noun} named {name!r}.{did_you_mean(name, known)}")
        return self._job(rows[0])

    def jobs(self, *statuses: str) -> list[JobRow]:
        """All jobs, or those in one of `statuses`, in the order they were added."""
        rows = [self._job(row) for row in self._query("select * from job order by position")]
        return [row for row in rows if not statuses or row.status in statuses]

    def _job(self, row: sqlite3.Row) -> JobRow:
        values = {key: row[key] for key in row.keys() if key not in ("position", "submitted")}  # noqa: SIM118
        values |= {
            "payload": json.loads(row["payload"]),
            "needs": tuple(json.loads(row["needs"])),
            "result": json.loads(row["result"] or "{}"),
            "cancel": bool(row["cancel"]),
            "fresh": bool(row["fresh"]),
        }
        return self.row(**values)

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
                used = self._query(
                    "select max(artifact) from (select artifact from job union select artifact from version)"
                )
                number = 0 if used[0][0] is None else int(used[0][0]) + 1
                db.execute("update job set artifact=? where name=?", (number, name))
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
        return _attempt(rows[0])

    def attempts(self, job: str | None = None, state: str | None = None) -> list[AttemptRow]:
        """Attempts in order, of a job or in a state."""
        rows = [_attempt(row) for row in self._query("select * from attempt order by id")]
        return [row for row in rows if job in (None, row.job) and state in (None, row.state)]

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
        return _attempt(rows[0]) if rows else None

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
        return self.version_row(
            **{**dict(row), "accepted": bool(row["accepted"]), "note": json.loads(row["note"])}
        )

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


def _attempt(row: sqlite3.Row) -> AttemptRow:
    return AttemptRow(**{**dict(row), "handle": json.loads(row["handle"]) if row["handle"] else None})


def merge_once(commit: Callable[[], bool]) -> bool:
    """Call `commit` until no other merge came between its decision and its commit; what it returned."""
    while True:
        try:
            return commit()
        except HeadMovedError:
            continue
