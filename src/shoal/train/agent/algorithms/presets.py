"""Presets of algorithms, which are files, and the one table of settings that follow from the engine or the prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import ConfigError, unknown_name

GROUP = "algorithm"
"""The folder of presets among the configs, and the word that names one: `algorithm=dapo`."""
Read = Callable[[str], Any]
"""Gives the setting at a path such as `engine.name`, None where it is not said."""


class Follows(NamedTuple):
    """A setting whose value another one decides."""

    path: str
    value: Any
    replaces: Callable[[Any], bool]  # what may stand there instead
    when: Callable[[Read], bool]
    reason: str


def is_pretrained(read: Read) -> bool:
    """Whether the model has weights of its own before the run: any but the tiny one, and those of a server."""
    name = read("engine.name") or "tiny"
    if name == "ray":
        name = read("engine.replicas.engine") or "huggingface"
    return name not in ("tiny", "openai")


def _answers_freely(read: Read) -> bool:
    return read("agent_proxy.prompt.mode") == "append" or bool(read("agent_proxy.tools"))


def _repeats_the_first(read: Read) -> bool:
    shown = read("agent_proxy.prompt.first"), read("agent_proxy.prompt.later")
    return bool(read("agent_proxy.prompt.mode") == "append" and shown[0] == shown[1])


def _plays_further_groups(read: Read) -> bool:
    return (read("algorithm.filter_groups.max_num_gen_batches") or 1) > 1


def _plays_once(read: Read) -> bool:
    return not _plays_further_groups(read)


def _fresh(read: Read) -> bool:
    return not is_pretrained(read)


def _auto(value: Any) -> bool:
    return bool(value == "auto")


_some_text = bool
FOLLOWS = (
    Follows("algorithm.learning_rate", 1e-3, _auto, _fresh, "auto: 0.001 for a fresh tiny model"),
    Follows(
        "algorithm.learning_rate", 3e-5, _auto, is_pretrained,
        "auto: 0.00003 for a pretrained model, found with SmolLM2-135M; papers train 7B by 0.000001",
    ),
    Follows("algorithm.critic.learning_rate", 1e-3, _auto, _fresh, "auto: 0.001 for a fresh tiny model"),
    Follows(
        "algorithm.critic.learning_rate", 1e-5, _auto, is_pretrained,
        "auto: 0.00001 for a pretrained body, as in verl",
    ),
    Follows(
        "algorithm.filter_groups.enable", True, _auto, _plays_further_groups,
        "auto: with max_num_gen_batches above 1, groups are played until enough of them differ",
    ),
    Follows(
        "algorithm.filter_groups.enable", False, _auto, _plays_once, "auto: all groups that are played are learned from"
    ),
    Follows(
        "agent_proxy.prompt.prefill", "", _some_text, _answers_freely,
        "none: with mode append, or with tools, an answer is the model's own from its first token",
    ),
    Follows(
        "agent_proxy.prompt.closing", "", _some_text, _answers_freely,
        "none: with mode append, or with tools, an answer is the model's own to its last token",
    ),
    Follows(
        "agent_proxy.prompt.later", "{observation}", _some_text, _repeats_the_first,
        "with mode append the chat shows what the first message said",
    ),
)  # fmt: skip
"""All settings that the engine or the prompt decides; what no line names here has the value that the config says."""


def settled_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested settings in which those of `FOLLOWS` that are said have their value."""
    settled = dict(values)
    for follows in FOLLOWS:
        read = partial(_at, settled)
        if follows.replaces(read(follows.path)) and follows.when(read):
            settled = _with_entry(settled, follows.path.split("."), follows.value)
    return settled


def settle(config: Any) -> None:
    """Give those settings of `FOLLOWS` their value in a config that is being made, a frozen dataclass."""
    read = partial(_at, config)
    for follows in FOLLOWS:
        if follows.replaces(read(follows.path)) and follows.when(read):
            section, *path = follows.path.split(".")
            object.__setattr__(config, section, _with_field(getattr(config, section), path, follows.value))


def reasons(config: Any) -> dict[str, str]:
    """Why settings of a config have their value, by path, of those that `FOLLOWS` decided."""
    read = partial(_at, config)
    return {f.path: f.reason for f in FOLLOWS if f.when(read) and read(f.path) == f.value}


def _at(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
    return settings


def _with_entry(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**values, name: _with_entry(values[name], rest, value) if rest else value}


def _with_field(config: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _with_field(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: inner})


# --- files
def preset_names(folder: Path | None = None) -> list[str]:
    """The presets that come with shoal, and those in `folder/algorithm`."""
    shipped = resources.files("shoal.configs").joinpath(GROUP).iterdir()
    own = (folder / GROUP).glob("*.yaml") if folder is not None else ()
    return sorted({Path(item.name).stem for item in (*shipped, *own) if item.name.endswith(".yaml")})


def preset_purposes() -> dict[str, str]:
    """What each preset that comes with shoal is: the first sentence of its file."""
    purposes = {}
    for name in preset_names():
        text = resources.files("shoal.configs").joinpath(GROUP, f"{name}.yaml").read_text("utf-8")
        lines = [line[2:] for line in takewhile(lambda line: line.startswith("# "), text.splitlines()[1:])]
        purposes[name] = " ".join(lines).partition(". ")[0].partition(": ")[0]
    return purposes


def preset_words(words: list[str], folder: Path | None, compose: Callable[[str], Any]) -> list[str]:
    """Overrides in which `algorithm=NAME` stands as the settings of that preset, before all others.

    They count more than those of the chosen config, and less than the settings that the caller names.

    Args:
        words: in Hydra's grammar.
        folder: of the user's configs, which may have an `algorithm` folder of its own.
        compose: gives the settings of the preset that an override such as `+algorithm=dapo` names.

    Raises:
        ConfigError: two presets are named, or one that is not there.
    """
    named = [word for word in words if _names_preset(word)]
    if not named:
        return words
    if len(named) > 1:
        raise ConfigError(f"one preset at a time, got {' and '.join(named)}")
    name, known = named[0].partition("=")[2], preset_names(folder)
    if name not in known:
        raise ConfigError(str(unknown_name("algorithm preset", name, known)))
    rest = [word for word in words if word != named[0]]
    return [f"++{path}={_literal(value)}" for path, value in leaves(compose(f"+{GROUP}={name}"))] + rest


def _names_preset(word: str) -> bool:
    key, equals, value = word.partition("=")
    return key.lstrip("+") == GROUP and bool(equals) and not value.startswith("{")


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested mappings, by path."""
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from leaves(value, here)
        else:
            yield here, value


def _literal(value: Any) -> str:
    """A value in Hydra's grammar."""
    return json.dumps(value, ensure_ascii=False)
