"""What models and commands answered, by a digest of what they were asked, in a file: they are asked once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.core.files import append_line

logger = logging.getLogger(__name__)
NAME = "answers"


class _Line(msgspec.Struct):
    key: str
    answer: str


class Answers:
    """The answers of a run; whoever finds them in its folder need not ask again.

    Args:
        folder: of the run, with `answers.jsonl`; None keeps them in memory.
        rank: of the process, where several play one run: each writes a file of its own, and reads all.
        hold: called before each line to check that no other process writes the folder.
    """

    def __init__(
        self, folder: Path | None = None, rank: int = 0, hold: Callable[[], object] = lambda: None
    ) -> None:
        self._known: dict[str, str] = {}
        self._path, self._hold = (
            None if folder is None else folder / f"{NAME}{f'-{rank}' if rank else ''}.jsonl",
            hold,
        )
        for path in sorted(folder.glob(f"{NAME}*.jsonl")) if folder is not None else ():
            for number, line in enumerate(path.read_bytes().splitlines(), 1):
                try:
                    found = msgspec.json.decode(line, type=_Line)
                    self._known.setdefault(found.key, found.answer)
                except msgspec.MsgspecError:  # a kill or a full disk cut it off
                    logger.warning("%s, line %d is no whole answer: it is asked for again", path, number)

    def get(self, key: str) -> str | None:
        """The answer, if it is known."""
        return self._known.get(key)

    def add(self, key: str, answer: str) -> None:
        """Record an answer."""
        self._known[key] = answer
        if self._path is not None:
            self._hold()
            append_line(self._path, msgspec.json.encode(_Line(key, answer)) + b"\n")
