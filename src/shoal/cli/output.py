"""What commands print: standard output, whose reader may go away, and which a program that reads JSON has to itself."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ReaderGoneError(BaseException):
    """Nobody reads the output any more; no error, since whoever looks after those would tell of it."""


_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
"""Characters that command a terminal or turn text around."""
_OWN = r"(?P<own>\x1b\[(?:[0-9;]*m|[0-9]*[AK]|\?25[hl])|\r)"
"""What colours and bars are made of."""


def harmless(text: str, but: str = r"(?P<own>\r\n)") -> str:
    """Text that commands no terminal: control characters `but` some are told by their numbers.

    For what models, envs, files and errors say, where it is put into a message: colours of it would pass the stream.
    """
    return re.sub(f"{but}|{_CONTROL}|\r", lambda one: one["own"] or f"<U+{ord(one[0]):04X}>", text)


class Watched:
    """A stream whose reader may go away (a pipe that was closed, a terminal that is gone): work goes on, or ends.

    So it does where what is written can no longer be kept (a file on a full disk), which is an error of the command.
    What is written is made harmless.

    Args:
        stream: that is written to.
        goes_on: whether the work does.
        tells: whether standard error says so.
        lost: gets what kept words from being written.
    """

    def __init__(
        self, stream: Any, goes_on: bool, *, tells: bool = False, lost: list[OSError] | None = None
    ) -> None:
        self._stream, self._goes_on, self._tells, self._gone = stream, goes_on, tells, False
        self.lost: list[OSError] = [] if lost is None else lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def onto(self, stream: Any) -> Watched:
        """The same for another stream."""
        return Watched(stream, self._goes_on, tells=self._tells, lost=self.lost)

    def write(self, text: str) -> int:
        """Write, as long as somebody reads."""
        self._try(lambda: self._stream.write(harmless(text, _OWN)))
        return len(text)

    def flush(self) -> None:
        """Have it read, as long as somebody does."""
        self._try(self._stream.flush)

    def _try(self, act: Any) -> None:
        if self._gone:
            return
        try:
            act()
        except OSError as error:
            self._gone = True
            forget(self._stream)
            if error.errno in (errno.EPIPE, errno.EIO):
                why, ending = "nobody reads the output any more", ReaderGoneError()
            else:
                why, ending = f"the output cannot be written ({error.strerror})", None
                self.lost.append(error)
            if not self._goes_on:
                raise ending or OSError(error.errno, error.strerror, "standard output") from None
            if self._tells:
                print(f"shoal: {why}; the work goes on", file=sys.stderr)


def forget(stream: Any) -> None:
    """Send a stream nowhere, so that what it still holds does not fail again when the program ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_streams() -> None:
    """Have streams that were closed (`>&-`) lead nowhere: the files that a program opens would take their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115 (the lowest number: its own)
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)


@contextlib.contextmanager
def watched_output(goes_on: bool) -> Iterator[list[OSError]]:
    """Inside, work goes on without a reader or, if it does not, a reader that has enough is the end.

    What the terminal's encoding has no letter for is written by its number. Yields what kept words from being written.
    """
    before, errors = (sys.stdout, sys.stderr), getattr(sys.stdout, "errors", None)
    chosen = errors not in ("strict", "surrogateescape")  # Python's own, the latter in the C locale
    if not chosen and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    out = Watched(sys.stdout, goes_on, tells=True)
    sys.stdout, sys.stderr = out, Watched(sys.stderr, True)  # type: ignore[assignment]
    try:
        yield out.lost
    finally:
        sys.stdout, sys.stderr = before
        if not chosen and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors=errors)


def program() -> str:
    """`shoal` as it can be typed here: by the path, or the Python, that it was called by if it is not found by name."""
    called, found = Path(sys.argv[0]), shutil.which("shoal")
    if called.name == "__main__.py" and called.parent.name == "shoal":
        return shlex.join([sys.orig_argv[0], "-m", "shoal"])
    if called.name != "shoal" or (found is not None and Path(found).resolve() == called.resolve()):
        return "shoal"
    return shlex.quote(str(called))


# --- JSON for a program
_programs: list[Any] = []


def for_programs() -> Any:
    """Where JSON is written: standard output, also where `only_json` keeps all else from it."""
    return _programs[-1] if _programs else sys.stdout


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """Inside, standard output is for `for_programs` alone; what an env or a library prints goes to standard error.

    So does what workers, C code and programs that an env starts print there.
    """
    with contextlib.ExitStack() as ending:
        stream: Any = sys.stdout
        if _is_standard_output(stream):
            stream = ending.enter_context(_apart(stream))
        ending.enter_context(contextlib.redirect_stdout(sys.stderr))
        _programs.append(stream)
        ending.callback(_programs.pop)
        yield


def _is_standard_output(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 1)
    except (AttributeError, OSError, ValueError):  # a stream in memory
        return False


@contextlib.contextmanager
def _apart(stream: Any) -> Iterator[Any]:
    """A stream to where `stream` went, while the descriptor that others know, 1, leads to standard error."""
    stream.flush()
    kept = os.dup(1)
    with open(kept, "w", encoding=stream.encoding, errors=stream.errors) as file:
        os.dup2(2, 1)
        try:
            yield stream.onto(file) if isinstance(stream, Watched) else file
        finally:
            os.dup2(kept, 1)
