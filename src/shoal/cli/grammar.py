"""What all commands say alike: folders of runs, events and results as JSON, progress with the time that is left.

On a terminal work shows a bar with its ETA; elsewhere lines, and one of a heartbeat where nothing else was said.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError

HEARTBEAT = 30.0
"""Seconds without a word, off a terminal, after which a command says that it is still at work."""


def new_folder(name: str) -> Path:
    """`runs/<name>`, with a number behind it when that is taken."""
    first = Path("runs") / name
    number, path = 1, first
    while path.exists():
        number += 1
        path = first.with_name(f"{name}-{number}")
    return path


def newest_folder(name: str) -> Path:
    """The newest of `runs/<name>`, `runs/<name>-2`, …, to go on with.

    Raises:
        ConfigError: there is none.
    """
    first = Path("runs") / name
    taken = [path for path in [first, *sorted(first.parent.glob(f"{name}-[0-9]*"))] if path.is_dir()]
    if not taken:
        raise ConfigError(f"there is no run {first} to go on with: start without --resume, or say --run-dir")
    return max(taken, key=lambda path: path.stat().st_mtime)


def print_json(value: Any) -> None:
    """One line of JSON on standard output: an event of `--json-events`, or the result of `--json`."""
    print(json.dumps(value, allow_nan=False), flush=True)


def count_of(number: int, thing: str, things: str = "") -> str:
    """A number with its noun.

    >>> count_of(1, "turn"), count_of(2, "turn"), count_of(0, "batch", "batches")
    ('1 turn', '2 turns', '0 batches')
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(4.2), duration(75), duration(7300)
    ('4 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """How far a command is: a bar with its ETA on a terminal, plain lines and a heartbeat elsewhere.

    Args:
        what: the work in a word or two, such as "training".
        out: where it is said.
        heartbeat: seconds of silence, off a terminal, after which it is said that the work goes on.
        bar: False shows lines on a terminal too.
    """

    def __init__(
        self, what: str, out: Any = None, heartbeat: float | None = None, *, bar: bool = True
    ) -> None:
        self.what, self.out, self._wants_bar = what, out or sys.stdout, bar
        self.heartbeat = HEARTBEAT if heartbeat is None else heartbeat
        self.share = 0.0
        self._began = self._said = time.monotonic()
        self._since: tuple[float, float] | None = (
            None  # when the first share was known: what came before is start-up
        )
        self._bar: Any = None
        self._done = threading.Event()

    def __enter__(self) -> Progress:
        from rich.console import Console

        console = Console(file=self.out)
        if console.is_terminal and self._wants_bar:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("ETA"),
                TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=1.0)
        else:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="shoal-heartbeat")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._bar is not None:
            self._bar.stop()
        else:
            self._thread.join()

    @property
    def on_terminal(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def at(self, share: float, description: str = "", line: str = "") -> None:
        """The work has come so far.

        Args:
            share: of the whole, from 0 to 1.
            description: beside the bar.
            line: what is said where there is no bar; nothing if not given.
        """
        self.share = share
        if self._since is None:
            self._since = (time.monotonic(), share)
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=description or self.what)
        elif line:
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._said = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self.out, flush=True)

    def left(self) -> float | None:
        """Seconds that the rest may take at the pace so far; None where that cannot be told yet."""
        if self._since is None or self.share <= self._since[1]:
            return None
        seconds = time.monotonic() - self._since[0]
        return seconds * (1.0 - self.share) / (self.share - self._since[1])

    def _beat(self) -> None:
        while not self._done.wait(max(0.05, self._said + self.heartbeat - time.monotonic())):
            if time.monotonic() - self._said >= self.heartbeat:
                left = self.left()
                more = "" if left is None else f", about {duration(left)} left"
                self.say(f"… {self.what}: {duration(time.monotonic() - self._began)} so far{more}")


@contextmanager
def counted(what: str, total: int, out: Any = None) -> Iterator[Callable[[int, int], None]]:
    """Progress of countable work: the block gets a function of (done, total); off a terminal ten lines tell it."""
    step = max(1, -(-total // 10))
    with Progress(what, out or sys.stderr) as progress:

        def told(done: int, _: int) -> None:
            line = f"{what} {done} of {total}" if done % step == 0 or done == total else ""
            progress.at(done / max(1, total), f"{what} {done}/{total}", line)

        yield told


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Sequence[int] = (0,),
    out: Any = None,
) -> None:
    """A table on standard output, or `out`; columns are numbers, to the right, but for those in `text`."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    for place, name in enumerate(header):
        made.add_column(name, justify="left" if place in text else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    console = Console(highlight=False, markup=False, file=out or sys.stdout)
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file or a pipe has no edge
    console.print(made)
