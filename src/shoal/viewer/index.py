"""Where each episode of a run lies and how it ended, so that one of 100,000 is found without reading the others.

The index is made in memory of the lines of `trajectories/*.jsonl`; a file that changed is read anew. A last line
without its newline is still being written, and waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from shoal.core.data import Advantages, Status, Trajectory, decode_trajectory, read_advantages
from shoal.core.errors import DataError

Order = str
"""A name of `ORDERS`, one of `COLUMNS`, or one of them behind `-` for the largest first."""
Outcome = Literal["success", "failed", "truncated", "error"]
COLUMNS = ("file", "reward", "turns", "tokens", "invalid", "iteration", "group", "env", "outcome")
ORDERS = {"file": "file", "best": "-reward", "worst": "reward", "longest": "-turns", "newest": "-iteration"}
OUTCOMES: tuple[Outcome, ...] = ("success", "failed", "truncated", "error")
_ROW = np.dtype(
    [("row", "i8"), ("start", "i8"), ("length", "i8"), ("iteration", "i8"), ("group", "i8"), ("member", "i8"),
     ("reward", "f8"), ("turns", "i4"), ("tokens", "i8"), ("outcome", "i1"), ("invalid", "i4"),
     ("env", "i4"), ("end", "i4"), ("team", "i8"), ("file", "i4")]
)  # fmt: skip
"""`env`, `end` (status and error), `team` (episodes of one start) and `file` are numbers in lists of the index."""
_NUMBERED = re.compile(r"(?:train|heldout)-(\d+)\.jsonl")


class _Call(msgspec.Struct):
    response_ids: msgspec.Raw


class _Turn(msgspec.Struct):
    action_is_valid: bool
    reward: float


class _Episode(msgspec.Struct):
    """The fields of a trajectory that the index keeps; the rest is passed over unread."""

    env: str
    iteration: int
    group: int
    member: int
    calls: list[_Call]
    turns: list[_Turn]
    success: bool
    truncated: bool
    status: Status = "ok"
    error: str | None = None


class _Said(msgspec.Struct):
    observation: str
    response: str
    action: str | None = None


class _Texts(msgspec.Struct):
    """The fields that a search looks into."""

    turns: list[_Said]


@dataclass(frozen=True, slots=True)
class Episode:
    """What the index knows of an episode."""

    file: str  # its name in trajectories/
    row: int  # its number in the file, from 0
    start: int  # the byte where its line begins
    length: int  # bytes of the line
    env: str
    iteration: int  # of the file, as curves have it: of a held-out file, of the weights that it judged
    group: int
    member: int
    reward: float
    turns: int
    tokens: int
    outcome: Outcome  # how it ended
    status: str
    error: str | None
    invalid: int  # turns without a valid action

    @property
    def name(self) -> str:
        """Under which commands and links know it: `FILE:ROW`, the file without its ending."""
        return f"{self.file.removesuffix('.jsonl')}:{self.row}"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes are meant; None of all means all."""

    file: str | None = None
    iteration: int | None = None
    group: int | None = None
    env: str | None = None
    outcome: Outcome | None = None
    cause: str | None = None  # status and error
    reward_from: float | None = None
    reward_to: float | None = None
    contains_invalid: bool = False
    text: str | None = None  # in an observation, a response or an action; a to z match both cases


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode stands in a list; `at` is None where neither it nor its group is in it."""

    at: int | None
    total: int
    before: Episode | None
    behind: Episode | None


class _Numbers(list[Any]):
    """Values that each have a number, in the order in which they came."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """The number of a value, a new one if it has none."""
        if value not in self._known:
            self.append(value)
            self._known[value] = len(self) - 1
        return self._known[value]

    def known(self, value: Any) -> int:
        """The number of a value; -1 if it has none."""
        return self._known.get(value, -1)


@dataclass
class _File:
    """What was read of one file."""

    mark: tuple[int, int, int]  # as `_mark` gives it
    rows: Any  # of `_ROW`
    broken: int
    searched: tuple[str, Any] = ("", None)  # the last search: the text, and which rows have it


@dataclass(frozen=True)
class _Table:
    """All files at one moment, in the order of their names."""

    files: dict[str, _File] = field(default_factory=dict)
    rows: Any = field(default_factory=lambda: np.empty(0, _ROW))


class EpisodeIndex:
    """The episodes of a run folder. Safe to use from several threads.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path | str, cache: Path | None = None) -> None:
        self.folder = Path(run) / "trajectories"
        self.progress = (0, 0)  # bytes read and to read by the refresh that is going on
        self._refreshing = threading.Lock()
        self._table = _Table()
        self._names = _Numbers()
        self._envs = _Numbers()
        self._ends = _Numbers()
        self._teams = _Numbers()
        self._ends.of(("ok", None))

    def close(self) -> None:
        """Nothing is open between two calls."""

    # --- bringing it up to date
    def files(self) -> list[str]:
        """The names of the run's files of episodes as they are now, in order."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.folder) if _is_file_of_episodes(entry))
        return []

    def refresh(self, only: str | None = None) -> EpisodeIndex:
        """Read the files that are new or changed, all of them or the one of that name; returns itself."""
        with self._refreshing:
            known = self._table.files
            files: dict[str, _File] = {}
            stale: list[tuple[str, os.stat_result]] = []
            for name in self.files():
                with contextlib.suppress(OSError):  # it went in this moment
                    status = (self.folder / name).stat()
                    old = known.get(name)
                    if old and (only not in (None, name) or old.mark == _mark(status)):
                        files[name] = old
                    elif only in (None, name):
                        stale.append((name, status))
            total = sum(status.st_size for _, status in stale)
            for name, status in stale:
                files[name] = self._read(name, status, total)
            if stale or files.keys() != known.keys():
                ordered = dict(sorted(files.items()))
                parts = [np.empty(0, _ROW), *(file.rows for file in ordered.values())]
                self._table = _Table(ordered, np.concatenate(parts))
            self.progress = (0, 0)
        return self

    def _read(self, name: str, status: os.stat_result, total: int) -> _File:
        """The lines of a file."""
        place, numbered = self._names.of(name), _NUMBERED.fullmatch(name)
        found: list[tuple[Any, ...]] = []
        broken = end = 0
        with (self.folder / name).open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                values = self._values(line, place, int(numbered[1]) if numbered else None)
                if values is None:
                    broken += bool(line.strip())
                else:
                    found.append((len(found), end, len(line), *values, place))
                end += len(line)
                self.progress = (self.progress[0] + len(line), total)
        return _File(_mark(status), np.array(found, _ROW), broken)

    def _values(self, line: bytes, place: int, iteration: int | None) -> tuple[Any, ...] | None:
        """The columns of a line behind its place; None if it is no trajectory."""
        e = _decoded(line, _EPISODE)
        if e is None:
            return None
        tokens = sum(ids.count(b",") + 1 for call in e.calls if (ids := bytes(call.response_ids)) != b"[]")
        outcome = 3 if e.status != "ok" else 0 if e.success else 2 if e.truncated else 1
        shown = e.iteration if iteration is None else iteration
        if any(abs(number) >> 63 for number in (shown, e.group, e.member)):  # the table holds no more
            return None
        return (
            shown, e.group, e.member, float(sum(turn.reward for turn in e.turns)), len(e.turns), tokens, outcome,
            sum(not turn.action_is_valid for turn in e.turns),
            self._envs.of(e.env), self._ends.of((e.status, e.error)),
            self._teams.of((place, e.iteration, e.env, e.group)),
        )  # fmt: skip

    # --- asking it
    def _select(self, wanted: Filter | None = None, order: Order = "file") -> tuple[Any, Any]:
        """All rows, and the places among them of those of that kind, in that order."""
        wanted, table = wanted or Filter(), self._table
        rows = table.rows
        keep = np.ones(len(rows), bool)
        for column, value in (
            ("file", wanted.file and self._names.known(wanted.file)),
            ("env", wanted.env and self._envs.known(wanted.env)),
            ("iteration", wanted.iteration),
            ("group", wanted.group),
            ("outcome", wanted.outcome and OUTCOMES.index(wanted.outcome)),
        ):
            if value is not None:
                keep &= rows[column] == value
        if wanted.reward_from is not None:
            keep &= rows["reward"] >= wanted.reward_from
        if wanted.reward_to is not None:
            keep &= rows["reward"] <= wanted.reward_to
        if wanted.contains_invalid:
            keep &= rows["invalid"] > 0
        if wanted.cause is not None:
            keep &= np.isin(
                rows["end"], [k for k, end in enumerate(self._ends) if _cause(end) == wanted.cause]
            )
        if wanted.text:
            asked = [self._search(name, file, wanted) for name, file in table.files.items()]
            keep &= np.concatenate([np.empty(0, bool), *asked])
        found = np.flatnonzero(keep)
        order = ORDERS.get(order, order)
        column = order.removeprefix("-")
        if column != "file":  # which they are in
            values = rows[column][found]
            if column == "env":
                values = np.argsort(np.argsort(self._envs))[values]  # their order in the alphabet
            found = found[np.lexsort((-rows["turns"][found], values))]
        return rows, found if order == column else found[::-1]

    def _search(self, name: str, file: _File, wanted: Filter) -> Any:
        """Which rows of a file have the text in an observation, a response or an action."""
        text = str(wanted.text).lower()
        if wanted.file not in (None, name):
            return np.zeros(len(file.rows), bool)
        if file.searched[0] != text:
            written = msgspec.json.encode(text)[1:-1].lower()  # as it stands in a line
            found = np.zeros(len(file.rows), bool)
            with contextlib.suppress(OSError), (self.folder / name).open("rb") as opened:
                for k, (start, length) in enumerate(file.rows[["start", "length"]].tolist()):
                    opened.seek(start)
                    line = opened.read(length)
                    found[k] = written in line.lower() and _has(line, text)
            file.searched = (text, found)
        return file.searched[1]

    def count(self, wanted: Filter | None = None) -> int:
        """How many episodes there are of that kind."""
        return len(self._select(wanted)[1])

    def episodes(
        self, wanted: Filter | None = None, order: Order = "file", limit: int = 50, offset: int = 0
    ) -> list[Episode]:
        """A page of the episodes of that kind."""
        rows, found = self._select(wanted, order)
        return [self._episode(rows[i]) for i in found[offset : offset + limit].tolist()]

    def _episode(self, row: Any) -> Episode:
        values = dict(zip(_ROW.names or (), row.tolist(), strict=True))
        status, error = self._ends[values.pop("end")]
        values |= {"file": self._names[values["file"]], "env": self._envs[values["env"]]}
        values["outcome"] = OUTCOMES[values["outcome"]]
        del values["team"]
        return Episode(**values, status=status, error=error)

    def _row(self, name: str) -> Any:
        """The row of `FILE:ROW`."""
        file, _, row = name.rpartition(":")
        if file and row.isascii() and row.isdecimal() and len(row) < 12:
            known = self._table.files.get(file if file.endswith(".jsonl") else f"{file}.jsonl")
            if known is not None and int(row) < len(known.rows):
                return known.rows[int(row)]
        raise DataError(
            f"there is no episode {name!r} in {self.folder}; names are FILE:ROW, such as train-000001:0"
        )

    def find(self, name: str) -> Episode:
        """The episode `FILE:ROW`.

        Raises:
            DataError: there is none of that name.
        """
        return self._episode(self._row(name))

    def place_of(self, name: str, wanted: Filter, order: Order, *, groups: bool = False) -> Place:
        """Where an episode stands in a list, and what is before and behind it.

        Of an episode that is not in the list, its group's first one counts.

        Args:
            name: of the episode.
            wanted: which episodes the list holds.
            order: of the list.
            groups: whether the neighbours are the first episodes of other groups.
        """
        one, (rows, found) = self._row(name), self._select(wanted, order)
        team = rows["team"][found]
        if groups:
            firsts = np.sort(np.unique(team, return_index=True)[1])
            found, team = found[firsts], team[firsts]
        at = np.flatnonzero((rows["file"][found] == one["file"]) & (rows["row"][found] == one["row"]))
        if groups or not len(at):
            at = np.flatnonzero(team == one["team"])
        if not len(at):
            return Place(None, len(found), None, None)
        k = int(at[0])
        before, behind = (
            self._episode(rows[found[i]]) if 0 <= i < len(found) else None for i in (k - 1, k + 1)
        )
        return Place(k, len(found), before, behind)

    def group_of(self, episode: Episode, limit: int = 64) -> list[Episode]:
        """The episodes that began in the same state in the same rollout, the episode itself among them."""
        rows = self._table.rows
        members = rows[rows["team"] == self._row(episode.name)["team"]]
        return [
            self._episode(row) for row in members[np.lexsort((members["row"], members["member"]))][:limit]
        ]

    def outcomes(self, wanted: Filter | None = None) -> dict[Outcome, int]:
        """How many ended how."""
        rows, found = self._select(wanted)
        counts = np.bincount(rows["outcome"][found], minlength=len(OUTCOMES))
        return dict(zip(OUTCOMES, counts.tolist(), strict=True))

    def causes(self, wanted: Filter | None = None, limit: int = 12) -> list[tuple[str, int]]:
        """Why episodes broke off, and how often; the most frequent first."""
        counts: Counter[str] = Counter()
        rows, found = self._select(wanted)
        for end, n in enumerate(np.bincount(rows["end"][found]).tolist()):
            if n and (cause := _cause(self._ends[end])) is not None:
                counts[cause] += n
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]

    def rewards(self, wanted: Filter | None = None, bins: int = 24) -> list[tuple[float, float, int, int]]:
        """A histogram: from, to, episodes, and how many of them were successes; at most `bins` bars."""
        rows, places = self._select(wanted)
        rewards, won = rows["reward"][places], rows["outcome"][places] == 0
        values, bar = np.unique(rewards, return_inverse=True)
        if len(values) > bins:  # few enough values have a bar of their own each
            low, high = float(values[0]), float(values[-1])
            bar = np.minimum((rewards - low) / (high - low) * bins, bins - 1).astype(int)
        found = [(rewards[bar == k], int(won[bar == k].sum())) for k in range(min(len(values), bins))]
        return [(float(part.min()), float(part.max()), len(part), n) for part, n in found if len(part)]

    def summary(self) -> list[dict[str, Any]]:
        """Every file with its episodes, means of the whole ones and ends, in the order of names."""
        found = []
        for name, file in self._table.files.items():
            whole = file.rows[file.rows["outcome"] != 3]
            found.append(
                {
                    "file": name,
                    "episodes": len(file.rows),
                    "broken": file.broken,
                    "reward": float(whole["reward"].mean()) if len(whole) else None,
                    "success": float((whole["outcome"] == 0).mean()) if len(whole) else None,
                    "errors": len(file.rows) - len(whole),
                }
            )
        return found

    def envs(self) -> list[str]:
        """The tags of envs that occur."""
        return sorted(self._envs[k] for k in np.unique(self._table.rows["env"]).tolist())

    def read(self, episode: Episode) -> Trajectory:
        """The whole trajectory, from the file itself.

        Raises:
            DataError: the file has changed since it was indexed, or holds something else than a trajectory there.
        """
        line = self.line(episode)
        try:
            return decode_trajectory(line)
        except DataError as error:
            if _decoded(line, _EPISODE) is None:
                raise DataError(
                    f"{self.folder / episode.file} changed while it was read; look again"
                ) from error
            raise DataError(f"{self.folder / episode.file}, episode {episode.row}: {error}") from error

    def advantages(self, members: Sequence[Episode]) -> list[Advantages | None] | None:
        """What an update computed for the tokens of some episodes of a file, None for one that it did not learn from.

        None for all if nothing was kept: nobody learned from the file, or its run is of before advantages were.
        """
        path, known = (
            self.folder.with_name("advantages") / members[0].file,
            self._table.files.get(members[0].file),
        )
        if known is None or known.broken or not path.is_file():  # of which lines they are is not known
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


def _mark(status: os.stat_result) -> tuple[int, int, int]:
    """What tells whether a file is as it was."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _cause(end: tuple[str, str | None]) -> str | None:
    """Why an episode broke off; None for a whole one."""
    status, error = end
    return None if status == "ok" else status if error is None else f"{status}: {error}"


_EPISODE = msgspec.json.Decoder(_Episode)
_TEXTS = msgspec.json.Decoder(_Texts)


def _decoded(line: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """What a line says; None if it is no trajectory."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _has(line: bytes, text: str) -> bool:
    """Whether a turn says the text, which stands in small letters."""
    turns = getattr(_decoded(line, _TEXTS), "turns", ())
    return any(text in said.lower() for t in turns for said in (t.observation, t.response, t.action or ""))
