"""Where each episode of a run lies and how it ended, so that one of 100,000 is found without reading the others.

The index is a SQLite file in the user's cache folder, never in the run. It is brought up to date from what was added
to `trajectories/*.jsonl` since: a file that only grew is read from where the last reading ended, any other change
reads it anew. A last line without its newline is still being written, and waits for the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.core.data import Advantages, Status, Trajectory, decode_trajectory, read_advantages
from shoal.core.errors import DataError
from shoal.core.files import cache_folder

FORMAT = 1
"""Of the index; one of another format is made anew."""
Order = Literal["file", "best", "worst", "longest", "newest"]
Outcome = Literal["success", "failed", "truncated", "error"]
ORDERS: dict[Order, str] = {
    "file": "f.name, e.row",
    "best": "e.reward desc, e.turns, e.file, e.row",
    "worst": "e.reward, e.turns desc, e.file desc, e.row desc",
    "longest": "e.turns desc, e.file desc, e.row desc",
    "newest": "e.iteration desc, e.file desc, e.row desc",
}
_OUTCOMES: dict[Outcome, str] = {
    "success": "e.status = 'ok' and e.success",
    "failed": "e.status = 'ok' and not e.success and not e.truncated",
    "truncated": "e.status = 'ok' and not e.success and e.truncated",
    "error": "e.status != 'ok'",
}
_SCHEMA = f"""
create table file (id integer primary key, name text not null unique, inode integer not null, size integer not null,
    changed integer not null, read integer not null, tail blob not null, rows integer not null,
    broken integer not null);
create table episode (file integer not null, row integer not null, start integer not null, length integer not null,
    env text not null, iteration integer not null, team integer not null, member integer not null,
    env_seed text not null, reward real not null, turns integer not null, tokens integer not null,
    success integer not null, truncated integer not null, status text not null, error text,
    invalid integer not null, cut integer not null, primary key (file, row)) without rowid;
create index team on episode (file, iteration, env, team, member);
create index best on episode (reward desc, turns, file, row);
create index longest on episode (turns);
create index newest on episode (iteration);
pragma user_version = {FORMAT};
"""
_TAIL = 4096
_CHUNK = 2000
_BETWEEN_COMMITS = 64 * 2**20  # bytes read; a commit for each of a thousand small files is slow


class _Call(msgspec.Struct):
    response_ids: msgspec.Raw
    finish: str | None = None


class _Turn(msgspec.Struct):
    action_is_valid: bool
    reward: float


class _Episode(msgspec.Struct):
    """The fields of a trajectory that the index keeps; the rest is passed over unread."""

    env: str
    iteration: int
    group: int
    member: int
    env_seed: int
    calls: list[_Call]
    turns: list[_Turn]
    success: bool
    truncated: bool
    status: Status = "ok"
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """What the index knows of an episode."""

    file: str  # its name in trajectories/
    row: int  # its number in the file, from 0
    start: int  # the byte where its line begins
    length: int  # bytes of the line
    env: str
    iteration: int
    group: int
    member: int
    env_seed: str
    reward: float
    turns: int
    tokens: int
    success: bool
    truncated: bool
    status: str
    error: str | None
    invalid: int  # turns without a valid action
    cut: int  # responses that ended at the limit of tokens

    @property
    def name(self) -> str:
        """Under which commands and links know it: `FILE:ROW`, the file without its ending."""
        return f"{self.file.removesuffix('.jsonl')}:{self.row}"

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.status != "ok":
            return "error"
        return "success" if self.success else "truncated" if self.truncated else "failed"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes are meant; None of all means all."""

    file: str | None = None
    iteration: int | None = None
    group: int | None = None
    env: str | None = None
    outcome: Outcome | None = None
    cause: str | None = None  # the first line of the error, or the status where there is none
    reward_from: float | None = None
    reward_to: float | None = None
    contains_invalid: bool = False

    def where(self) -> tuple[str, list[Any]]:
        """The condition in SQL and its values."""
        parts, values = ["1"], []
        for column, value in (
            ("e.file = (select id from file where name = ?)", self.file),
            ("e.iteration = ?", self.iteration),
            ("e.team = ?", self.group),
            ("e.env = ?", self.env),
            ("e.reward >= ?", self.reward_from),
            ("e.reward <= ?", self.reward_to),
            (f"{_CAUSE} = ?", self.cause),
        ):
            if value is not None:
                parts.append(column)
                values.append(value)
        if self.outcome is not None:
            parts.append(_OUTCOMES[self.outcome])
        if self.contains_invalid:
            parts.append("e.invalid > 0")
        return " and ".join(f"({part})" for part in parts), values


_CAUSE = "case when e.status = 'ok' then null else e.status || coalesce(': ' || e.error, '') end"
_COLUMNS = (
    "f.name, e.row, e.start, e.length, e.env, e.iteration, e.team, e.member, e.env_seed, e.reward, e.turns, e.tokens, "
    "e.success, e.truncated, e.status, e.error, e.invalid, e.cut"
)


class _DamagedError(DataError):
    """The index is no database any more, and is removed."""


class EpisodeIndex:
    """The episodes of a run folder. Safe to use from several threads and processes.

    Args:
        run: the folder.
        cache: where indexes are kept; a temporary folder where it cannot be written.
    """

    def __init__(self, run: Path | str, cache: Path | None = None) -> None:
        self.folder = Path(run) / "trajectories"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.path = self._place((cache or cache_folder()) / "index")
        self._refreshing = threading.Lock()
        self.progress = (0, 0)  # bytes read and to read by the refresh that is going on

    def _place(self, folder: Path) -> Path:
        name = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()[:32] + ".db"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            self._temporary = tempfile.TemporaryDirectory(prefix="shoal-index-")
            folder = Path(self._temporary.name)
        return folder / name

    def close(self) -> None:
        """Remove what was only for this object; the index in the cache stays."""
        if self._temporary is not None:
            self._temporary.cleanup()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(self._connect()) as db:
                yield db
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # a lock, a full disk: the index itself is well
                told = f"the index {self.path} cannot be used ({error}); set XDG_CACHE_HOME to another disk"
                raise DataError(told) from error
            self.path.unlink(missing_ok=True)
            raise _DamagedError(f"the index {self.path} was damaged; try again") from error

    def _connect(self) -> sqlite3.Connection:
        for _ in range(2):
            db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
            try:
                db.execute("pragma synchronous = off")  # it can be made again
                db.execute("pragma cache_size = -65536")
                if db.execute("pragma user_version").fetchone()[0] == FORMAT:
                    return db
                db.execute("begin exclusive")
                known = db.execute("select count(*) from sqlite_master").fetchone()[0]
                version = db.execute("pragma user_version").fetchone()[0]
                if not known:
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute("commit")
                    return db
                db.execute("rollback")
                if version == FORMAT:  # another process was quicker
                    return db
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                    db.close()
                    raise DataError(
                        f"the index {self.path} is being made by another process; try again"
                    ) from error
            db.close()
            self.path.unlink(missing_ok=True)  # of another format, or damaged
        raise DataError(f"the index {self.path} cannot be made; remove it, or set XDG_CACHE_HOME")

    # --- bringing it up to date
    def files(self) -> list[str]:
        """The names of the run's files of episodes as they are now, in order."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.folder) if _is_file_of_episodes(entry))
        return []

    def refresh(
        self, only: str | None = None, progress: Callable[[int, int], None] | None = None
    ) -> EpisodeIndex:
        """Read what was added or changed, of one file or of all; returns itself.

        Args:
            only: the name of a file.
            progress: told the bytes read so far and in all.
        """
        try:
            return self._refresh(only, progress)
        except _DamagedError:
            return self._refresh(only, progress)

    def _refresh(self, only: str | None, progress: Callable[[int, int], None] | None) -> EpisodeIndex:
        with self._refreshing, self._open() as db:
            known = {row[1]: row for row in db.execute("select * from file")}
            names = [name for name in self.files() if only in (None, name)]
            if only is None:
                for name in known.keys() - set(names):
                    self._forget(db, known[name][0])
            stale = [(name, status) for name in names if (status := self._stale(name, known.get(name)))]
            todo = sum(status.st_size - self._kept(name, known.get(name), status) for name, status in stale)
            done = safe = 0
            db.execute("begin immediate")
            try:
                for name, status in stale:
                    for n_bytes in self._read(db, name, known.get(name), status):
                        done += n_bytes
                        self.progress = (done, todo)
                        if progress is not None:
                            progress(done, todo)
                    if done - safe > _BETWEEN_COMMITS:
                        db.execute("commit")
                        db.execute("begin immediate")
                        safe = done
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a damaged one has none to give up
                    db.execute("rollback")
                raise
            db.execute("commit")
            self.progress = (0, 0)
        return self

    def _stale(self, name: str, row: Any) -> os.stat_result | None:
        """The file's status if it is not as it was when it was read."""
        try:
            status = (self.folder / name).stat()
        except OSError:
            return None
        same = row is not None and row[2:5] == (status.st_ino, status.st_size, status.st_mtime_ns)
        return None if same else status

    def _kept(self, name: str, row: Any, status: os.stat_result) -> int:
        """How many bytes of a file were read before and are still the same: all of them, or none."""
        if row is None or row[2] != status.st_ino or row[3] >= status.st_size:  # only what grew is kept
            return 0
        with (self.folder / name).open("rb") as file:
            file.seek(max(0, row[5] - _TAIL))
            return int(row[5]) if file.read(min(_TAIL, row[5])) == row[6] else 0

    def _forget(self, db: sqlite3.Connection, number: int) -> None:
        db.execute("begin immediate")
        db.execute("delete from episode where file = ?", (number,))
        db.execute("delete from file where id = ?", (number,))
        db.execute("commit")

    def _read(self, db: sqlite3.Connection, name: str, row: Any, status: os.stat_result) -> Iterator[int]:
        """Add a file's lines; yields how many bytes were read."""
        begin = self._kept(name, row, status)
        number, rows, broken = (row[0], row[7], row[8]) if row is not None else (None, 0, 0)
        if row is not None and not begin:
            db.execute("delete from episode where file = ?", (number,))
            rows = broken = 0
        if number is None:
            db.execute("delete from episode where file = (select id from file where name = ?)", (name,))
            db.execute("delete from file where name = ?", (name,))
            number = db.execute("select coalesce(max(id), 0) + 1 from file").fetchone()[0]
        end, tail = begin, row[6] if begin else b""
        found: list[tuple[Any, ...]] = []
        with (self.folder / name).open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                values = _values(line)
                if values is None:
                    broken += bool(line.strip())
                else:
                    found.append((number, rows, end, len(line), *values))
                    rows += 1
                end, tail = end + len(line), (tail + line)[-_TAIL:]
                if len(found) == _CHUNK:
                    _insert(db, found)
                    yield sum(item[3] for item in found)
                    found.clear()
        _insert(db, found)
        known = (number, name, status.st_ino, status.st_size, status.st_mtime_ns, end, tail, rows, broken)
        db.execute("insert or replace into file values (?, ?, ?, ?, ?, ?, ?, ?, ?)", known)
        yield sum(item[3] for item in found)

    # --- asking it
    def count(self, wanted: Filter | None = None) -> int:
        """How many episodes there are of that kind."""
        where, values = (wanted or Filter()).where()
        return int(self._ask(f"select count(*) from episode e where {where}", values)[0][0])

    def episodes(
        self, wanted: Filter | None = None, order: Order = "file", limit: int = 50, offset: int = 0
    ) -> list[Episode]:
        """A page of the episodes of that kind."""
        where, values = (wanted or Filter()).where()
        sql = (
            f"select {_COLUMNS} from episode e join file f on f.id = e.file where {where} "
            f"order by {ORDERS[order]} limit ? offset ?"
        )
        return [_episode(row) for row in self._ask(sql, [*values, limit, offset])]

    def find(self, name: str) -> Episode:
        """The episode `FILE:ROW`.

        Raises:
            DataError: there is none of that name.
        """
        file, _, row = name.rpartition(":")
        if file and row.isdecimal() and len(row) < 12:
            wanted = (file if file.endswith(".jsonl") else f"{file}.jsonl", int(row))
            sql = f"select {_COLUMNS} from episode e join file f on f.id = e.file where f.name = ? and e.row = ?"
            for found in self._ask(sql, wanted):
                return _episode(found)
        raise DataError(
            f"there is no episode {name!r} in {self.folder}; names are FILE:ROW, such as train-000001:0"
        )

    def group_of(self, episode: Episode, limit: int = 64) -> list[Episode]:
        """The episodes that began in the same state in the same rollout, the episode itself among them."""
        sql = (
            f"select {_COLUMNS} from episode e join file f on f.id = e.file "
            "where f.name = ? and e.iteration = ? and e.env = ? and e.team = ? order by e.member, e.row limit ?"
        )
        values = (episode.file, episode.iteration, episode.env, episode.group, limit)
        return [_episode(row) for row in self._ask(sql, values)]

    def outcomes(self, wanted: Filter | None = None) -> dict[Outcome, int]:
        """How many ended how."""
        where, values = (wanted or Filter()).where()
        sums = ", ".join(f"coalesce(sum({condition}), 0)" for condition in _OUTCOMES.values())
        row = self._ask(f"select {sums} from episode e where {where}", values)[0]
        return dict(zip(_OUTCOMES, map(int, row), strict=True))

    def causes(self, wanted: Filter | None = None, limit: int = 12) -> list[tuple[str, int]]:
        """Why episodes broke off, and how often; the most frequent first."""
        where, values = (wanted or Filter()).where()
        sql = (
            f"select {_CAUSE}, count(*) from episode e where {where} and e.status != 'ok' "
            "group by 1 order by 2 desc, 1 limit ?"
        )
        return [(str(cause), int(n)) for cause, n in self._ask(sql, [*values, limit])]

    def rewards(self, wanted: Filter | None = None, bins: int = 24) -> list[tuple[float, float, int, int]]:
        """A histogram: from, to, episodes, and how many of them were successes; at most `bins` bars."""
        where, values = (wanted or Filter()).where()
        base = f"from episode e where {where}"
        # +e.reward: in the order of the table, since going by the index would look up every row of it
        sql = f"select +e.reward, count(*), sum(e.success) {base} group by 1 order by 1 limit ?"
        kinds = self._ask(sql, [*values, bins + 1])
        if len(kinds) <= bins:  # every value has a bar of its own
            return [(float(a), float(a), int(n), int(s)) for a, n, s in kinds]
        low, high = self._ask(f"select min(+e.reward), max(+e.reward) {base}", values)[0]
        width = (high - low) / bins
        sql = (
            f"select min(cast((e.reward - ?) / ? as integer), ?) as bar, count(*), sum(e.success), min(e.reward), "
            f"max(e.reward) {base} group by bar order by bar"
        )
        rows = self._ask(sql, [low, width, bins - 1, *values])
        return [(float(a), float(b), int(n), int(s)) for _, n, s, a, b in rows]

    def summary(self) -> list[dict[str, Any]]:
        """Every file with its episodes, means of the whole ones and ends, in the order of names."""
        sql = (
            "select f.name, f.rows, f.broken, min(e.iteration), avg(case when e.status = 'ok' then e.reward end), "
            "avg(case when e.status = 'ok' then e.success end), sum(e.status != 'ok') "
            "from file f left join episode e on e.file = f.id group by f.id order by f.name"
        )
        names = ("file", "episodes", "broken", "iteration", "reward", "success", "errors")
        return [dict(zip(names, row, strict=True)) for row in self._ask(sql, ())]

    def envs(self) -> list[str]:
        """The tags of envs that occur."""
        return [str(row[0]) for row in self._ask("select distinct env from episode order by 1", ())]

    def _ask(self, sql: str, values: Sequence[Any]) -> list[Any]:
        for _ in range(2):
            try:
                with self._open() as db:
                    return db.execute(sql, values).fetchall()
            except _DamagedError:
                self.refresh()
        raise DataError(
            f"the index {self.path} is damaged time and again; set XDG_CACHE_HOME to another disk"
        )

    def read(self, episode: Episode) -> Trajectory:
        """The whole trajectory, from the file itself.

        Raises:
            DataError: the file has changed since it was indexed, or holds something else than a trajectory there.
        """
        line = self.line(episode)
        try:
            return decode_trajectory(line)
        except DataError as error:
            if _values(line) is None:
                raise DataError(
                    f"{self.folder / episode.file} changed while it was read; look again"
                ) from error
            raise DataError(f"{self.folder / episode.file}, episode {episode.row}: {error}") from error

    def advantages(self, members: Sequence[Episode]) -> list[Advantages | None] | None:
        """What an update computed for the tokens of some episodes of a file, None for one that it did not learn from.

        None for all if nothing was kept: nobody learned from the file, or its run is of before advantages were.
        """
        path = self.folder.with_name("advantages") / members[0].file
        broken = self._ask("select broken from file where name = ?", (members[0].file,)) != [(0,)]
        if broken or not path.is_file():  # of which lines they are is not known; a pipe would be waited for
            return None
        try:
            found = read_advantages(path, {member.row: self.read(member) for member in members})
        except (DataError, OSError):
            return None
        return [found.get(member.row) for member in members] if found else None

    def line(self, episode: Episode) -> bytes:
        """The bytes of the episode's line."""
        try:
            with (self.folder / episode.file).open("rb") as file:
                file.seek(episode.start)
                return file.read(episode.length)
        except OSError as error:
            raise DataError(f"{self.folder / episode.file} cannot be read: {error.strerror}") from error


def _is_file_of_episodes(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".jsonl") and not entry.name.startswith(".") and entry.is_file()


def _values(line: bytes) -> tuple[Any, ...] | None:
    """The columns of a line behind its place; None if it is no trajectory."""
    try:
        e = _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if any(abs(number) >> 63 for number in (e.iteration, e.group, e.member)):  # SQLite holds no more
        return None
    tokens = sum(ids.count(b",") + 1 for call in e.calls if (ids := bytes(call.response_ids)) != b"[]")
    invalid = sum(not turn.action_is_valid for turn in e.turns)
    cut = sum(call.finish == "length" for call in e.calls)
    reward = sum(turn.reward for turn in e.turns)
    return (
        e.env, e.iteration, e.group, e.member, str(e.env_seed), float(reward), len(e.turns), tokens, e.success,
        e.truncated, e.status, e.error, invalid, cut,
    )  # fmt: skip


_DECODER = msgspec.json.Decoder(_Episode)


def _insert(db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    db.executemany(f"insert into episode values ({','.join('?' * 18)})", rows)


def _episode(row: Sequence[Any]) -> Episode:
    values = list(row)
    values[12], values[13] = bool(values[12]), bool(values[13])
    return Episode(*values)
