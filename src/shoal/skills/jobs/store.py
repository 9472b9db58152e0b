"""The truth about a run of skills: SQLite for what happened, content-addressed files for experts.

What belongs together is written in one transaction: a training's result, its merge, the new heads, the skill's
state and the event. Expert files are written before it and never change, so a kill at any moment leaves either
the old truth or the new one, and at worst a file that nothing refers to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, ShoalError, did_you_mean
from shoal.core.files import fsync_folder, write_bytes
from shoal.skills.jobs.records import (
    AttemptRow,
    NewVersion,
    SkillRow,
    VersionRow,
    read_attempt,
    read_skill,
    read_version,
)
from shoal.skills.learning.spec import Skill, slug

_SCHEMA = """
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
create index if not exists version_expert on version(expert);
"""


class HeadMovedError(ShoalError):
    """Another merge changed an expert's head in the meantime; decide again against the new one."""


class Store:
    """One folder of skills. Safe to use from several threads and processes."""

    def __init__(self, root: Path | str, *, create: bool = True) -> None:
        self.root = Path(root)
        if not create and not (self.root / "state.db").is_file():
            raise FileNotFoundError(f"{self.root} holds no skills: there is no state.db in it")
        self.blobs = self.root / "experts"
        self.blobs.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            self.root / "state.db", isolation_level=None, check_same_thread=False, timeout=60
        )
        self._db.row_factory = sqlite3.Row
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.execute("pragma foreign_keys=on")
        if not self._db.execute("select 1 from sqlite_master where name='setting'").fetchone():
            with self.transaction() as db:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
            fsync_folder(self.root)

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
        """A number that changes when another process commits."""
        return int(self._query("pragma data_version")[0][0])

    # Expert files

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their sha256, durably; the same bytes are stored once."""
        name = hashlib.sha256(data).hexdigest()
        path = self.blob_path(name)
        if not path.exists():
            write_bytes(path, data)
        return name

    def blob_path(self, name: str) -> Path:
        """Where the file of that sha256 lies."""
        return self.blobs / f"{name}.safetensors"

    def get_blob(self, name: str) -> bytes:
        """The bytes of that sha256, verified."""
        path = self.blob_path(name)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"{path} was altered or truncated: its sha256 is not its name")
        return data

    def sweep(self, older_than: float = 3600) -> list[Path]:
        """Remove expert files that no version refers to, and temporary files, if older than that many seconds."""
        known = {row["sha256"] for row in self._query("select sha256 from version")}
        removed = []
        for path in self.blobs.iterdir():
            leftover = path.name.startswith(".") or path.name.removesuffix(".safetensors") not in known
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
        """Store a JSON value."""
        with self.transaction() as db:
            db.execute("insert or replace into setting values (?, ?)", (key, json.dumps(value)))

    def event(self, kind: str, skill: str | None = None, **detail: Any) -> int:
        """Append to the log of events."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into event (time, kind, skill, detail) values (?, ?, ?, ?)",
                (time.time(), kind, skill, json.dumps(detail)),
            )
            return int(cursor.lastrowid or 0)

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Events in order, those after a sequence number."""
        rows = self._query("select * from event where seq > ? order by seq", after)
        return [{**dict(row), "detail": json.loads(row["detail"])} for row in rows]

    # Skills

    def add_skill(self, skill: Skill, dependencies: Sequence[str], budget: int) -> SkillRow:
        """Add a waiting skill; adding the same one again changes nothing, another of that name is refused."""
        with self.transaction() as db:
            known = self._query(
                "select name, spec from skill where name=? or slug=?", skill.name, slug(skill.name)
            )
            spec = json.dumps(skill.as_dict())
            if known:
                if known[0]["name"] != skill.name or json.loads(known[0]["spec"]) != json.loads(spec):
                    raise ValueError(f"there is another skill named {known[0]['name']!r} here already")
                return self.skill(skill.name)
            position = self._query("select count(*) from skill")[0][0]
            db.execute(
                "insert into skill (name, slug, position, spec, dependencies, status, budget_total, created)"
                " values (?, ?, ?, ?, ?, 'waiting', ?, ?)",
                (
                    skill.name,
                    slug(skill.name),
                    position,
                    spec,
                    json.dumps(list(dependencies)),
                    budget,
                    time.time(),
                ),
            )
            self.event("added", skill.name, dependencies=list(dependencies))
        return self.skill(skill.name)

    def skill(self, name: str) -> SkillRow:
        """A skill by its name or its slug."""
        rows = self._query("select * from skill where name=? or slug=?", name, name)
        if not rows:
            known = [row["name"] for row in self._query("select name from skill")]
            raise ValueError(f"no skill named {name!r}.{did_you_mean(name, known)}")
        return read_skill(rows[0])

    def skills(self, *statuses: str) -> list[SkillRow]:
        """All skills, or those in one of `statuses`, in the order they were added."""
        rows = [read_skill(row) for row in self._query("select * from skill order by position")]
        return [row for row in rows if not statuses or row.status in statuses]

    def update_skill(self, name: str, **columns: Any) -> None:
        """Change columns of a skill; a new status is an event."""
        if "result" in columns or "spec" in columns or "dependencies" in columns:
            columns = {
                k: json.dumps(v) if k in ("result", "spec", "dependencies") else v for k, v in columns.items()
            }
        with self.transaction() as db:
            before = self.skill(name).status
            assignments = ", ".join(f"{column}=?" for column in columns)
            db.execute(f"update skill set {assignments} where name=?", (*columns.values(), name))
            if columns.get("status", before) != before:
                self.event(columns["status"], name, reason=columns.get("reason"))

    def assign_expert(self, name: str) -> int:
        """The global expert index of a skill, given at its first launch and kept for good."""
        with self.transaction() as db:
            row = self.skill(name)
            if row.expert is None:
                used = self._query(
                    "select max(expert) from (select expert from skill union select expert from version)"
                )
                expert = 0 if used[0][0] is None else int(used[0][0]) + 1
                db.execute("update skill set expert=? where name=?", (expert, name))
                return expert
            return row.expert

    # Attempts

    def begin_attempt(self, skill: str, run_folder: Path) -> int:
        """Record that a training is about to be launched, before it is."""
        with self.transaction() as db:
            cursor = db.execute(
                "insert into attempt (skill, state, run_folder, started) values (?, 'running', ?, ?)",
                (skill, os.path.relpath(run_folder, self.root), time.time()),
            )
            self.update_skill(skill, status="running", reason=None, started=time.time(), ended=None)
            return int(cursor.lastrowid or 0)

    def set_handle(self, attempt: int, launcher: str, handle: Mapping[str, Any], log: Path) -> None:
        """Record what is running, so that another scheduler can adopt it."""
        with self.transaction() as db:
            db.execute(
                "update attempt set launcher=?, handle=?, log=? where id=?",
                (launcher, json.dumps(dict(handle)), os.path.relpath(log, self.root), attempt),
            )

    def attempt(self, number: int) -> AttemptRow:
        """An attempt by its number."""
        return read_attempt(self._query("select * from attempt where id=?", number)[0])

    def attempts(self, skill: str | None = None, state: str | None = None) -> list[AttemptRow]:
        """Attempts in order, of a skill or in a state."""
        rows = [read_attempt(row) for row in self._query("select * from attempt order by id")]
        return [row for row in rows if skill in (None, row.skill) and state in (None, row.state)]

    def end_attempt(self, attempt: int, outcome: str, reason: str | None = None, **columns: Any) -> None:
        """Record how an attempt ended."""
        with self.transaction() as db:
            extra = "".join(f", {column}=?" for column in columns)
            db.execute(
                f"update attempt set state='ended', outcome=?, reason=?, ended=?{extra} where id=?",
                (outcome, reason, time.time(), *columns.values(), attempt),
            )

    # Versions and heads

    def head(self, expert: int) -> VersionRow | None:
        """The accepted version of an expert."""
        rows = self._query(
            "select v.* from version v join head h on h.version = v.id where h.expert=?", expert
        )
        return read_version(rows[0]) if rows else None

    def version(self, number: int) -> VersionRow:
        """A version by its number."""
        rows = self._query("select * from version where id=?", number)
        if not rows:
            raise ValueError(f"there is no version {number}")
        return read_version(rows[0])

    def versions(self, expert: int | None = None) -> list[VersionRow]:
        """All versions, or those of an expert, oldest first."""
        rows = [read_version(row) for row in self._query("select * from version order by id")]
        return [row for row in rows if expert in (None, row.expert)]

    def ancestors(self, version: int | None) -> set[int]:
        """A version and all it descends from."""
        seen: set[int] = set()
        while version is not None and version not in seen:
            seen.add(version)
            version = self.version(version).parent
        return seen

    def commit_training(
        self,
        attempt: int,
        versions: Sequence[NewVersion],
        expected_heads: Mapping[int, int | None],
        *,
        result: Mapping[str, Any],
        frames: int,
        peak_memory: int | None = None,
        spec: Skill | None = None,
    ) -> bool:
        """Commit a training and its merge at once; False if it was committed before.

        Args:
            attempt: the training that ended.
            versions: what it and its merge made.
            expected_heads: the heads that the merge was decided against, by expert.
            result: numbers to show for the skill.
            frames: env steps the training used.
            peak_memory: bytes it needed at most.
            spec: the skill as corrected by what really happened, if it was.

        Raises:
            HeadMovedError: a head is no longer the expected one; nothing was written.
        """
        with self.transaction() as db:
            row = self.attempt(attempt)
            if row.outcome == "merged":
                return False
            for expert, expected in expected_heads.items():
                head = self.head(expert)
                if (head.id if head else None) != expected:
                    raise HeadMovedError(f"expert {expert}: head is {head and head.id}, expected {expected}")
            made = [self.add_version(version, attempt) for version in versions]
            self.end_attempt(attempt, "merged", frames=frames, peak_memory=peak_memory)
            skill = self.skill(row.skill)
            if spec is not None:
                self.update_skill(row.skill, spec=spec.as_dict())
            self.update_skill(
                row.skill, status="completed", reason=None, ended=time.time(), result=dict(result), allotment=None,
                budget_used=skill.budget_used + frames,
            )  # fmt: skip
            heads = {
                v.expert: {"version": number, "frames": v.frames}
                for number, v in zip(made, versions, strict=True)
                if v.accepted
            }
            db.execute(
                "insert into event (time, kind, skill, detail) values (?, 'merge', ?, ?)",
                (time.time(), row.skill, json.dumps({"attempt": attempt, "heads": heads})),
            )
        return True

    def add_version(self, version: NewVersion, attempt: int | None = None) -> int:
        """Add a version, and make it the head if it was accepted; its file must be there."""
        if not self.blob_path(version.sha256).exists():
            raise DataError(
                f"{self.blob_path(version.sha256)} must be written before its version is committed"
            )
        with self.transaction() as db:
            cursor = db.execute(
                "insert into version (expert, sha256, parent, frames, acted, kind, rule, wins, episodes, accepted,"
                " attempt, created) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    version.expert, version.sha256, version.parent, version.frames, version.acted, version.kind,
                    version.rule, version.wins, version.episodes, int(version.accepted), attempt, time.time(),
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
                raise ValueError(f"version {version} belongs to expert {row.expert}, not {expert}")
            self.get_blob(row.sha256)
            db.execute("insert or replace into head values (?, ?)", (expert, version))
            self.event("rollback", None, expert=expert, version=version)
