"""What commands print: text that commands no terminal, and JSON that has standard output to itself."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
"""Characters that command a terminal or turn text around."""
_json_streams: list[TextIO] = []


def harmless(text: str) -> str:
    """Text of a model, env, file or error with its control characters replaced by their numbers."""
    return re.sub(_CONTROL, lambda one: f"<U+{ord(one[0]):04X}>", text)


def program() -> str:
    """`shoal` as it can be typed here: by the path, or the Python, that it was called by if it is not found by name."""
    called, found = Path(sys.argv[0]), shutil.which("shoal")
    if called.name == "__main__.py" and called.parent.name == "shoal":
        return shlex.join([sys.orig_argv[0], "-m", "shoal"])
    if called.name != "shoal" or (found is not None and Path(found).resolve() == called.resolve()):
        return "shoal"
    return shlex.quote(str(called))


def to_type(command: str) -> str:
    """A command on lines of its own, to be copied: one wider than the terminal is broken between its words."""
    width = shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else sys.maxsize
    in_quotes = r"'[^']*'|\"[^\"]*\""
    lines = textwrap.wrap(
        re.sub(in_quotes, lambda quoted: quoted[0].replace(" ", "\0"), command), width,
        initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return " \\\n".join(lines).replace("\0", " ")


def next_steps(run: Path | None, steps: Mapping[str, str]) -> str:
    """What can be done after a command: a page of the run that it made, if any, and commands by what they are for."""
    place = shlex.quote(str(run))
    first = {} if run is None else {"look at it in a browser": f"{program()} view {place}"}
    return "\n".join(f"{what}:\n{to_type(command)}" for what, command in (first | dict(steps)).items())


def json_stream() -> TextIO:
    """Where JSON is written: standard output, also where `only_json` keeps all else from it."""
    return _json_streams[-1] if _json_streams else sys.stdout


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """Inside, standard output is for `json_stream` alone; other output, also of workers and C code, goes to stderr."""
    with contextlib.ExitStack() as ending:
        stream, is_own = sys.stdout, sys.stdout is sys.__stdout__
        if is_own:  # not replaced by a test
            stream.flush()
            stream = ending.enter_context(open(os.dup(1), "w", encoding="utf-8"))
            ending.callback(os.dup2, stream.fileno(), 1)
            os.dup2(2, 1)
        ending.enter_context(contextlib.redirect_stdout(sys.stderr))
        _json_streams.append(stream)
        ending.callback(_json_streams.pop)
        yield
