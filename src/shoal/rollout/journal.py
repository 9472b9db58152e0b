"""Finished episodes, recorded one by one, so that interrupted work can continue.

A line is one whole episode. What a kill or a full disk left half written is passed over: it is played again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.configuration import first_change
from shoal.core.data import Trajectory, decode_trajectory, encode_trajectory
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import append_line, write_bytes
from shoal.rollout.plan import Assignment

logger = logging.getLogger(__name__)
SYNC_SECONDS = 1.0
"""Between two waits until what was written is on the disk itself, where the system brings it sooner or later."""
Progress = Callable[[int, int], object]
"""Called with the number of episodes that have been played, and of all."""
_Key = tuple[str, int, int, int, int, int]


class Journal:
    """The finished episodes of unfinished work, in a file with one writer.

    Episodes that failed are not kept: they are played again. An episode is known by its place, its seed and the version
    of the weights that wrote its first words. Whoever has all the others removes the file, as `RunFolder.finish` does.

    Args:
        path: the file, `RunFolder.unfinished_path` of a run folder; without one nothing is kept.
        settings: JSON values by name: everything that determines the episodes, weights included.
        hold: called before each episode to check that no other process writes the file.

    Raises:
        ConfigError: the file holds episodes that were played with other settings.
        DataError: it is not such a file.
    """

    def __init__(
        self,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        hold: Callable[[], object] = lambda: None,
    ) -> None:
        self.path, self._hold = path, hold
        self._played: dict[_Key, Trajectory] = {}
        self._lock = threading.Lock()  # episodes are added while others are forgotten
        self._synced = -math.inf
        if path is not None:
            self._open(path, settings or {})

    def _open(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._header = header = msgspec.json.encode({"settings": settings})
        first, *lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        begun = _settings(path, first) if first else None
        for number, line in enumerate(lines, 2):
            if (trajectory := _episode(path, number, line)) and trajectory.calls:
                self._played.setdefault(_key(trajectory), trajectory)
        change = first_change(begun, msgspec.json.decode(header)["settings"])
        if change and self._played:
            raise ConfigError(
                f"{path} holds {len(self._played)} episodes of unfinished work with other settings: "
                f"{change:.200}; continue with those settings, use another folder, or remove the file"
            )
        if change:  # nothing was played, or there is no such file
            write_bytes(path, header + b"\n")

    def forget(self, before: int) -> None:
        """Drop the episodes of iterations before this one: their result is saved elsewhere, as in a checkpoint."""
        self._played = {key: one for key, one in self._played.items() if one.iteration >= before}
        if self.path is None:
            return
        with self._lock:
            self._hold()
            _, *lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if (one := _whole(line)) and one.iteration >= before]
            write_bytes(self.path, b"".join([self._header, b"\n", *kept]))

    @property
    def count(self) -> int:
        """The number of episodes that were there when it was opened."""
        return len(self._played)

    def __contains__(self, trajectory: Trajectory) -> bool:
        return bool(trajectory.calls) and _key(trajectory) in self._played

    def known(self, assignments: Iterable[Assignment], version: int) -> dict[int, Trajectory]:
        """Of these episodes those that were there when the journal was opened, by index.

        Args:
            assignments: the episodes.
            version: of the weights that would play them now.
        """
        found = {}
        for one in assignments:
            place = one.place
            key = one.tag, place.iteration, place.group, place.member, place.env_seed, version
            if key in self._played:
                found[one.index] = self._played[key]
        return found

    def add(self, trajectory: Trajectory) -> None:
        """Record a finished episode; after `kill -9` it is there completely or not at all."""
        if self.path is None or trajectory.status != "ok" or not trajectory.calls:
            return
        with self._lock:
            self._hold()
            now = time.monotonic()
            durable = now - self._synced >= SYNC_SECONDS
            append_line(self.path, encode_trajectory(trajectory), durable=durable)
            if durable:
                self._synced = now


class CountedJournal(Journal):
    """A journal that reports how many episodes there are: those that were kept, then after each that ends.

    Args:
        progress: called with that number and `total`.
        total: how many are wanted; more that end are not counted.
        kept_in: what `Journal` takes.
    """

    def __init__(self, progress: Progress, total: int, *kept_in: Any) -> None:
        super().__init__(*kept_in)
        self._progress, self._total, self._ended = progress, total, self.count
        progress(min(self._ended, total), total)

    def add(self, trajectory: Trajectory) -> None:
        """Record it, and count it."""
        super().add(trajectory)
        self._ended += 1
        self._progress(min(self._ended, self._total), self._total)


def _settings(path: Path, line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)["settings"]
    except (msgspec.MsgspecError, RecursionError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} must begin with the settings of the episodes in it, as shoal writes it: restore it or remove it"
        ) from error


def _episode(path: Path, number: int, line: bytes) -> Trajectory | None:
    if line and (episode := _whole(line)) is None:
        logger.warning("%s, line %d holds no complete episode: it is played again", path, number)
    return episode if line else None


def _whole(line: bytes) -> Trajectory | None:
    try:
        return decode_trajectory(line.rstrip(b"\n"))
    except DataError:
        return None


def _key(trajectory: Trajectory) -> _Key:
    return (
        trajectory.env, trajectory.iteration, trajectory.group, trajectory.member, trajectory.env_seed,
        trajectory.calls[0].weights_version,
    )  # fmt: skip
