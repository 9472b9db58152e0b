"""What commands print: text that commands no terminal, and JSON that has standard output to itself."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
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
