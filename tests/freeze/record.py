"""Write `interface.json`: names, signatures, commands and settings, as the installed shoal has them.

Users rely on what it wrote down; `test_interface.py` compares every later shoal with it. What is to stay joins it,
as the functions below tell it. When something recorded here is meant to change, change the one entry in
`interface.json` by hand, in the commit that changes it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("interface.json")
ROOMS = ("shoal", "shoal.vector", "shoal.splitting", "shoal.skills", "shoal.testing")
KINDS = dict(zip(inspect._ParameterKind, ("/ ", "", "*", "* ", "**"), strict=True))
TOLD_DEFAULT = re.compile(r"\(default: (.*)\)$")  # tyro's parsers tell defaults in their help only
SPLIT_COMMANDS = {
    "envs": ("list", "show", "play", "check", "serve"),
    "skills": (
        "train", "status", "stop", "retry", "cancel", "logs", "eval", "history", "rollback",
    ),
}  # fmt: skip
"""Commands whose first word chooses another command."""


# --- names
def interface_of(room: str) -> dict[str, Any]:
    """Every name in `__all__` of a room, with what can be called and how."""
    module = importlib.import_module(room)
    return {name: describe(getattr(module, name)) for name in module.__all__ if not name.startswith("__")}


def describe(thing: Any) -> dict[str, Any]:
    """How a function or class is called, and the public members of a class that shoal itself defines."""
    if not inspect.isclass(thing):
        return {"parameters": parameters(thing)} if callable(thing) else {}
    members: dict[str, Any] = {}
    for owner in reversed(thing.__mro__):
        if not owner.__module__.startswith("shoal."):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            members[name] = parameters(function) if inspect.isfunction(function) else "attribute"
    return {"parameters": parameters(thing), "members": members}


def parameters(function: Any) -> list[str]:
    """The parameters as `name = default`; `* ` before those by keyword only, `/ ` before those by position only."""
    if getattr(function, "__init__", None) is Exception.__init__:
        return []  # a plain exception class: Python tells no signature
    return [
        KINDS[p.kind] + p.name + ("" if p.default is p.empty else f" = {default_of(p.default)}")
        for p in inspect.signature(function).parameters.values()
    ]


def default_of(value: Any) -> str:
    """A default as text; of an object its class, since its settings are recorded elsewhere."""
    plain = isinstance(value, bool | int | float | str | tuple | None)
    return repr(value) if plain else f"<{type(value).__name__}>"


# --- commands
def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    from shoal.cli.main import COMMANDS

    for name in COMMANDS:
        yield from ((name, verb) for verb in SPLIT_COMMANDS[name]) if name in SPLIT_COMMANDS else [(name,)]


def flags_of(command: tuple[str, ...]) -> dict[str, Any]:
    """Flags and positional arguments of a command: names, default, choices, and whether it must be given."""
    from shoal.cli.command import Group, _parser, _settings, loaded
    from shoal.cli.main import COMMANDS

    what = loaded(COMMANDS[command[0]])
    if isinstance(what, Group) and len(command) > 1:
        what = loaded(what.commands[command[1]])
    if isinstance(what, Group):
        return {f"{verb} {flag}": value for verb in what.commands
                for flag, value in {"": {}, **flags_of((command[0], verb))}.items()}  # fmt: skip
    return actions_of(_parser(what, " ".join(command), _settings(what, [])))


def actions_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The arguments of one parser."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        default = str(action.default)
        if default.startswith("tyro.MISSING"):
            default = "".join(TOLD_DEFAULT.findall(action.help or ""))
        what = {
            "default": default,
            "choices": sorted(map(str, action.choices or ())),
            "required": bool(action.required),
        }
        found |= dict.fromkeys(action.option_strings or [action.dest], what)
    return found


# --- settings
def flat(values: Any, path: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists and empty mappings are values."""
    if not isinstance(values, dict) or not values:
        return {path: values}
    return {
        key: value
        for name, item in values.items()
        for key, value in flat(item, f"{path}.{name}" if path else str(name)).items()
    }


def settings() -> dict[str, Any]:
    """Every key of agent training with its default, and of each config that comes with shoal what differs."""
    from omegaconf import OmegaConf

    from shoal.core.configuration import to_mapping
    from shoal.train.agent.config import AgentConfig, compose_config, config_names

    def plain(config: AgentConfig) -> dict[str, Any]:
        return flat(json.loads(json.dumps(to_mapping(config))))

    defaults = plain(AgentConfig())
    configs = {}
    for name in config_names():
        values = plain(compose_config(name))
        configs[name] = {k: v for k, v in values.items() if k not in defaults or defaults[k] != v}
    from shoal.cli.train import RECORDED
    from shoal.cli.train_recorded import read_config

    recorded = {
        name: flat(json.loads(json.dumps(to_mapping(read_config(name, ["recordings=."])))))
        for name in RECORDED
    }
    folder = resources.files("shoal.configs") / "skills"
    skills = {
        item.name: OmegaConf.to_container(OmegaConf.create(item.read_text("utf-8")))
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if item.name.endswith(".yaml")
    }
    return {"defaults": defaults, "configs": configs, "skills": skills, "recorded": recorded}


def readers() -> list[str]:
    """What `shoal split --reader` takes."""
    from shoal.splitting.readers import BUILT_IN

    return sorted(BUILT_IN)


def record() -> dict[str, Any]:
    """All that is compared."""
    return {
        "rooms": {room: interface_of(room) for room in ROOMS},
        "commands": {" ".join(command): flags_of(command) for command in commands()},
        "settings": settings(),
        "readers": readers(),
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
