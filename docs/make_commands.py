"""Writes commands.md, every command with its options, from the dataclasses of `shoal.cli` and their docstrings.

python docs/make_commands.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from make_settings import cell

from shoal.cli.command import Command, app_of, every
from shoal.cli.main import COMMANDS

PAGE = Path(__file__).with_name("commands.md")
HEAD = """\
---
search:
  boost: 20
---

# Commands

Every command of `shoal` with its options, in the words of `shoal COMMAND --help`, which also shows examples. Written by
`make settings` from the source. Words like `key=value` change [settings](settings.md) of agent training.

`…` takes several values. An option without a value is off unless the table says on; then `--no-NAME` turns it off. A
default that depends on other options (a preset, a config) is the one without them; of `train-ppo` it is that of the
preset of its default environment.

Exit status: 0 done, 1 failed or not equal, 2 a usage error, 130 Ctrl-C. `SHOAL_TRACEBACK=1` prints the traceback of an
error instead of one line.
"""
KINDS = {"str": "TEXT", "int": "N", "float": "X", "Path": "PATH"}


def page() -> str:
    """The whole page as Markdown."""
    found = [one for name, entry in COMMANDS.items() for one in every(entry, name)]
    rows = [
        f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(line(first(command)))} |\n"
        for name, command in found
    ]
    index = "\n| command | what it does |\n|---|---|\n" + "".join(rows)
    return HEAD + index + "".join(section(name, command) for name, command in found)


def first(command: Command) -> str:
    """The first paragraph of a command's help."""
    return (inspect.getdoc(command.options) or "").partition("\n\n")[0]


def section(name: str, command: Command) -> str:
    """The usage of a command and the table of its options."""
    arguments = app_of(command, name).assemble_argument_collection()
    places = [one.names[0] for one in arguments if one.index is not None]
    words = " ".join(["shoal", name, *places])
    table = "".join(rows(arguments))
    if table:
        table = f"\n| option | meaning | default |\n|---|---|---|\n{table}"
    return f"\n## {name}\n\n`{words}`\n\n{line(first(command))}\n{table}"


def rows(arguments: Any) -> Iterator[str]:
    """A row for each option."""
    for one in arguments:
        info, default = one.parameter, one.field_info.default
        choices = one.get_choices() or ()
        flag = flags(one) if one.index is None else one.names[0]
        meaning = info.help or ""
        if choices and not set(choices) <= set(meaning.replace(",", " ").split()):
            meaning = f"{meaning.rstrip('.')} ({', '.join(choices)})"
        shown = f"`{text(default)}`" if info.show_default else ""
        yield f"| `{flag}` | {cell(line(meaning))} | {shown} |\n"


def flags(one: Any) -> str:
    """What gives an option: its names, and the kind of its value."""
    names = [name for name in one.names if not name.startswith("--no-")]
    kinds = get_args(one.hint) or (one.hint,)
    if bool in kinds:
        return ", ".join(one.names) if one.field_info.default in (True, None) else names[0]
    several = get_origin(one.hint) is tuple
    within = [kind for kind in kinds if kind not in (type(None), ...)]
    kind = KINDS.get(getattr(within[0], "__name__", ""), "CHOICE") if within else "TEXT"
    return f"{', '.join(names)} {kind}{' …' if several else ''}"


def line(words: str) -> str:
    """Text without its line breaks."""
    return " ".join(words.split())


def text(default: Any) -> str:
    """A default as it is given in a shell."""
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    PAGE.write_text(page())
