"""Writes settings.md, every setting of agent training, from the dataclasses that hold them and their docstrings.

python docs/make_settings.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shoal.core.configuration import field_notes
from shoal.train.agent.algorithms.presets import FOLLOWS
from shoal.train.agent.config import AgentConfig

PAGE = Path(__file__).with_name("settings.md")
HEAD = """\
---
search:
  boost: 20
---

# Settings

Every setting of `shoal train`, with its meaning and default. Written by `make settings` from the source.

On the command line: `shoal train --config-name base algorithm.gamma=0.97 trainer.iterations=80`. In a file of your own:
the same names, nested as YAML. A shipped config changes some defaults; `shoal train --config-name NAME --cfg` prints
the values of a run, with these meanings as comments. A value with braces or commas needs quotes within quotes:
`'agent_proxy.prompt.turn="{action}"'`.

The defaults of `algorithm` are those of the preset `grpo`; `algorithm=NAME` chooses another
([algorithms](algorithms.md#presets)). Settings of TRL, verl and verl-agent beside these:
[from TRL or verl](how-to/from-trl-verl.md).
"""
FOLLOWING = """
## What follows from other settings

These are all settings whose value the engine or the prompt decides. `shoal train --config-name NAME --cfg` prints the
value and the reason.

| setting | value | reason |
|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    tables = "".join(f"\n{line}" for line in sections(AgentConfig, ""))
    following = "".join(f"| `{f.path}` | {shown(f.value)} | {cell(f.reason)} |\n" for f in FOLLOWS)
    return HEAD + index(tables) + tables + FOLLOWING + following


def index(tables: str) -> str:
    """The sections with the first sentence of each."""
    rows = ["", "| section | what it sets |", "|---|---|"]
    for name, about in re.findall(r"^## `(.+)`\n+(.+)$", tables, re.MULTILINE):
        rows.append(f"| [`{name}`](#{name.replace('.', '').lower()}) | {cell(about)} |")
    return "\n".join(rows) + "\n"


def sections(kind: Any, path: str) -> Iterator[str]:
    """The table of a dataclass of settings, then those of the sections in it."""
    hints, notes = get_type_hints(kind), field_notes(kind)
    rows, inner = [], []
    for item in dataclasses.fields(kind):
        section, within = section_in(hints[item.name]), get_origin(hints[item.name])
        if section is None or within is tuple:  # a list is a setting, and so are those of its entries
            meaning = notes[item.name] + choices(hints[item.name], notes[item.name])
            rows.append(f"| `{path}{item.name}` | {default_of(item)} | {cell(meaning)} |")
        if section is not None:
            below = {dict: ".NAME", tuple: ".N"}.get(within, "")
            inner.append((section, f"{path}{item.name}{below}."))
    if path and rows:
        yield f"## `{path.removesuffix('.')}`\n"
        yield f"{(inspect.getdoc(kind) or '').split(chr(10))[0]}\n"
    if rows:
        yield "| setting | default | meaning |\n|---|---|---|"
        yield from rows
        yield ""
    for section, its_path in inner:
        if its_path == "es_manager.val.":
            yield "## `es_manager.val`\n\nThe held-out envs, with the settings of `es_manager.train`.\n"
        else:
            yield from sections(section, its_path)


def section_in(hint: Any) -> Any:
    """The dataclass of settings that a field holds, alone or by names; None if it holds a value."""
    inside = [hint, *get_args(hint)]
    inside += [kind for one in get_args(hint) for kind in get_args(one)]
    return next((kind for kind in inside if dataclasses.is_dataclass(kind)), None)


def default_of(item: Any) -> str:
    """The default as YAML writes it."""
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    elif item.default is dataclasses.MISSING:
        return "needed"
    else:
        value = item.default
    return shown(value)


def shown(value: Any) -> str:
    """A value as YAML writes it."""
    plain = isinstance(value, str) and value and "\n" not in value
    return f"`{cell(value if plain else json.dumps(value, ensure_ascii=False))}`"


def choices(hint: Any, note: str) -> str:
    """The words that a setting takes, where its meaning does not name them all."""
    options = [hint, *get_args(hint)]
    words = [str(word) for option in options if get_origin(option) is Literal for word in get_args(option)]
    return f" One of: {', '.join(words)}." if any(word not in note for word in words) else ""


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
