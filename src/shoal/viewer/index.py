"""Where each episode of a run lies and how it ended, so that one of 100,000 is found without reading the others.

The index is made in memory of the lines of `trajectories/*.jsonl`; a file that changed is read anew. A last line
without its newline is still being written, and waits.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
AROUND = 30
"""Letters beside a text that is found."""
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
    team: int  # the same for all that began in one state in one rollout

    @property
    def name(self) -> str:
        """Under which commands and links know it: `FILE:ROW`, the file without its ending."""
        return f"{self.file.removesuffix('.jsonl')}:{self.row}"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes are meant; None of all means all."""

    text: str | None = None  # in an observation, a response or an action; a to z match both cases
    outcome: Outcome | None = None
    cause: str | None = None  # status and error
    env: str | None = None
    iteration: int | None = None
    group: int | None = None
    file: str | None = None
    invalid: bool = False  # those that have an invalid action
    reward_from: float | None = None
    reward_to: float | None = None


class Place(NamedTuple):
    """Where an episode stands in a list; `at` is None where neither it nor its group is in it."""

    at: int | None
    total: int
    before: Episode | None = None
    behind: Episode | None = None


@dataclass(eq=False)
class _File:
    """What was read of one file."""

    mark: tuple[int, int, int]  # inode, size and time of change
    rows: Any  # of `_ROW`
    broken: int
    searched: tuple[str, Any] = ("", None)  # the last search: the text, and which rows have it


class EpisodeIndex:
    """The episodes of a run folder. Safe to use from several threads.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path | str) -> None:
        self.folder = Path(run) / "trajectories"
        self.progress = (0, 0)  # bytes read and to read by the refresh that is going on
        self._refreshing = threading.Lock()
        self._table: tuple[dict[str, _File], Any] = {}, np.empty(0, _ROW)  # by name, and the rows of all
        self._orders: tuple[Any, dict[str, Any]] = None, {}  # of those rows, by column
        self._names: dict[str, int] = {}  # values to their numbers
        self._envs: dict[str, int] = {}
        self._ends: dict[tuple[str, str | None], int] = {("ok", None): 0}
        self._teams: dict[tuple[Any, ...], int] = {}

    # --- bringing it up to date
    def files(self) -> list[str]:
        """The names of the run's files of episodes as they are now, in order."""
        return sorted(path.name for path in self.folder.glob("[!.]*.jsonl") if path.is_file())

    def refresh(self, only: str | None = None) -> EpisodeIndex:
        """Read the files that are new or changed, all of them or the one of that name; returns itself."""
        with self._refreshing:
            known = self._table[0]
            marks = {name: mark for name in self.files() if (mark := self._mark(name))}
            asked = [name for name in marks if only in (None, name)]
            stale = [name for name in asked if name not in known or known[name].mark != marks[name]]
            total = sum(marks[name][1] for name in stale)
            read = {name: self._read(name, marks[name], total) for name in stale}
            files = {name: file for name in marks if (file := read.get(name) or known.get(name))}
            if files != known:
                parts = [np.empty(0, _ROW), *(file.rows for file in files.values())]
                self._table = files, np.concatenate(parts)
            self.progress = (0, 0)
        return self

    def _mark(self, name: str) -> tuple[int, int, int] | None:
        """What tells whether a file is as it was; None if it went in this moment."""
        with contextlib.suppress(OSError):
            status = (self.folder / name).stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    def _read(self, name: str, mark: tuple[int, int, int], total: int) -> _File:
        """The lines of a file."""
        place, numbered = _number_of(name, self._names), _NUMBERED.fullmatch(name)
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
        return _File(mark, np.array(found, _ROW), broken)

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
            _number_of(e.env, self._envs), _number_of((e.status, e.error), self._ends),
            _number_of((place, e.iteration, e.env, e.group), self._teams),
        )  # fmt: skip

    # --- asking it
    def _select(self, wanted: Filter | None = None, order: Order = "file") -> tuple[Any, Any]:
        """All rows, and the places among them of those of that kind, in that order."""
        wanted, (files, rows) = wanted or Filter(), self._table
        keep = np.ones(len(rows), bool)
        for column, value in (
            ("file", wanted.file and self._names.get(wanted.file, -1)),
            ("env", wanted.env and self._envs.get(wanted.env, -1)),
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
        if wanted.invalid:
            keep &= rows["invalid"] > 0
        if wanted.cause is not None:
            of_cause = [number for end, number in self._ends.items() if _cause(end) == wanted.cause]
            keep &= np.isin(rows["end"], of_cause)
        if wanted.text:
            asked = [self._search(name, file, wanted) for name, file in files.items()]
            keep &= np.concatenate([np.empty(0, bool), *asked])
        order = ORDERS.get(order, order)
        column = order.removeprefix("-")
        places = self._sorted(rows, column)
        found = places[keep[places]]
        return rows, found if order == column else found[::-1]

    def _sorted(self, rows: Any, column: str) -> Any:
        """The places of all rows in the order of a column, kept until there are other rows."""
        of, known = self._orders
        if of is not rows:
            known = {"file": np.arange(len(rows))}  # which they are in
            self._orders = rows, known
        if column not in known:
            values = rows[column]
            if column == "env":
                values = np.argsort(np.argsort(list(self._envs)))[values]  # their order in the alphabet
            unsolved = rows["outcome"] != 0  # of equals, turned round, they come first
            known[column] = np.lexsort((-rows["turns"], unsolved, values))
        return known[column]

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
                    found[k] = written in line.lower() and any(
                        text in t.lower() for t in chain(*_texts(line))
                    )
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
        return self._episodes(rows[found[offset : offset + limit]])

    def _episodes(self, rows: Any) -> list[Episode]:
        names, envs, ends = list(self._names), list(self._envs), list(self._ends)
        found = []
        for row in rows.tolist():
            values = dict(zip(_ROW.names or (), row, strict=True))
            status, error = ends[values.pop("end")]
            values |= {"file": names[values["file"]], "env": envs[values["env"]], "status": status}
            found.append(Episode(**values | {"error": error, "outcome": OUTCOMES[values["outcome"]]}))
        return found

    def find(self, name: str) -> Episode:
        """The episode `FILE:ROW`.

        Raises:
            DataError: there is none of that name.
        """
        file, _, row = name.rpartition(":")
        if file and row.isascii() and row.isdecimal() and len(row) < 12:
            known = self._table[0].get(file if file.endswith(".jsonl") else f"{file}.jsonl")
            if known is not None and int(row) < len(known.rows):
                return self._episodes(known.rows[int(row) : int(row) + 1])[0]
        raise DataError(
            f"there is no episode {name!r} in {self.folder}; names are FILE:ROW, such as train-000001:0"
        )

    def place_of(self, episode: Episode, wanted: Filter, order: Order, *, groups: bool = False) -> Place:
        """Where an episode stands in a list, and what is before and behind it; with `groups`, those of other groups.

        Of an episode that is not in the list, its group's first one counts.
        """
        rows, found = self._select(wanted, order)
        team = rows["team"][found]
        if groups:
            firsts = np.sort(np.unique(team, return_index=True)[1])
            found, team = found[firsts], team[firsts]
        same_file = rows["file"][found] == self._names[episode.file]
        at = np.flatnonzero(same_file & (rows["row"][found] == episode.row))
        if groups or not len(at):
            at = np.flatnonzero(team == episode.team)
        if not len(at):
            return Place(None, len(found))
        k = int(at[0])
        around = [self._episodes(rows[found[i : i + 1]]) if i >= 0 else [] for i in (k - 1, k + 1)]
        return Place(k, len(found), *(one[0] if one else None for one in around))

    def said(self, episode: Episode, text: str | None = None) -> tuple[int, str]:
        """A turn, counted from 1, and what stands there: around the first `text`, else its action or answer; the last.

        Turn 0 and nothing where there is none, or the file has changed.
        """
        try:
            turns = _texts(self._line(episode))
        except OSError:
            return 0, ""
        for number, turn in enumerate(turns, 1):
            for said in turn:
                if text and (at := said.lower().find(text.lower())) >= 0:
                    return number, said[max(0, at - AROUND) : at + len(text) + AROUND]
        return len(turns), (turns[-1][2] or turns[-1][1])[: 3 * AROUND] if turns else ""

    def _line(self, episode: Episode) -> bytes:
        with (self.folder / episode.file).open("rb") as file:
            file.seek(episode.start)
            return file.read(episode.length)

    def group_of(self, episode: Episode, limit: int = 64) -> list[Episode]:
        """The episodes that began in the same state in the same rollout, the episode itself among them."""
        rows = self._table[1]
        members = rows[rows["team"] == episode.team]
        return self._episodes(members[np.lexsort((members["row"], members["member"]))][:limit])

    def outcomes(self, wanted: Filter | None = None) -> dict[Outcome, int]:
        """How many ended how."""
        rows, found = self._select(wanted)
        counts = np.bincount(rows["outcome"][found], minlength=len(OUTCOMES))
        return dict(zip(OUTCOMES, counts.tolist(), strict=True))

    def causes(self, wanted: Filter | None = None, limit: int = 12) -> list[tuple[str, int]]:
        """Why episodes broke off, or their programs failed, and how often; the most frequent first."""
        counts: Counter[str] = Counter()
        rows, found = self._select(wanted)
        for end, n in zip(list(self._ends), np.bincount(rows["end"][found]).tolist(), strict=False):
            if n and (cause := _cause(end)) is not None:
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
        for name, file in self._table[0].items():
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
        there = set(np.unique(self._table[1]["env"]).tolist())
        return sorted(env for env, number in list(self._envs.items()) if number in there)

    def read(self, episode: Episode) -> Trajectory:
        """The whole trajectory, from the file itself.

        Raises:
            DataError: the file has changed since it was indexed, or holds something else than a trajectory there.
        """
        path = self.folder / episode.file
        try:
            line = self._line(episode)
            return decode_trajectory(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except DataError as error:
            if _decoded(line, _EPISODE) is None:
                raise DataError(f"{path} changed while it was read; look again") from error
            raise DataError(f"{path}, episode {episode.row}: {error}") from error

    def advantages(self, members: Sequence[Episode]) -> list[Advantages | None] | None:
        """What an update computed for the tokens of some episodes of a file, None for one that it did not learn from.

        None for all if nothing was kept: nobody learned from the file, or its run is of before advantages were.
        """
        file = members[0].file
        path, known = self.folder.with_name("advantages") / file, self._table[0].get(file)
        if known is None or known.broken or not path.is_file():  # of which lines they are is not known
            return None
        try:
            found = read_advantages(path, {member.row: self.read(member) for member in members})
        except (DataError, OSError):
            return None
        return [found.get(member.row) for member in members] if found else None


def _cause(end: tuple[str, str | None]) -> str | None:
    """Why an episode broke off, or what its program failed with; None for others."""
    status, error = end
    if status == "ok":
        return f"the program failed: {error}" if error else None
    return status if error is None else f"{status}: {error}"


def _number_of(value: Any, known: dict[Any, int]) -> int:
    """The number of a value, a new one if it has none."""
    return known.setdefault(value, len(known))


class _Said(msgspec.Struct):
    observation: str
    response: str
    action: str | None = None


class _Texts(msgspec.Struct):
    turns: list[_Said]


_EPISODE = msgspec.json.Decoder(_Episode)
_TEXTS = msgspec.json.Decoder(_Texts)


def _decoded(line: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """What a line says; None if it is no trajectory."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _texts(line: bytes) -> list[tuple[str, str, str]]:
    """The observation, the response and the action of each turn."""
    return [(t.observation, t.response, t.action or "") for t in getattr(_decoded(line, _TEXTS), "turns", ())]
