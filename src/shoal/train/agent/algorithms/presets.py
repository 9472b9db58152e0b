"""Presets of algorithms, which are files, and the one table of settings that follow from the engine or the prompt."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.core.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentConfig

GROUP = "algorithm"
"""The folder of presets among the configs, and the word that names one: `algorithm=dapo`."""


class Follows(NamedTuple):
    """A setting whose value another one decides."""

    path: str
    value: Any
    when: Callable[[AgentConfig], bool]
    reason: str
    replaces: str | None = "auto"  # what stands there instead; None: whatever does


def _pretrained(config: AgentConfig) -> bool:
    """Whether the model has weights of its own before the run: any but the tiny one."""
    return config.engine.played_by != "tiny"


def _fresh(config: AgentConfig) -> bool:
    return not _pretrained(config)


def _answers_freely(config: AgentConfig) -> bool:
    return config.agent_proxy.prompt.mode == "append" or bool(config.agent_proxy.tools)


def _repeats_the_first(config: AgentConfig) -> bool:
    prompt = config.agent_proxy.prompt
    return prompt.mode == "append" and prompt.later != "" and prompt.first == prompt.later


def _plays_further_groups(config: AgentConfig) -> bool:
    return config.algorithm.filter_groups.max_num_gen_batches > 1


def _plays_once(config: AgentConfig) -> bool:
    return not _plays_further_groups(config)


FOLLOWS = (
    Follows("algorithm.learning_rate", 1e-3, _fresh, "auto: 0.001 for a fresh tiny model"),
    Follows(
        "algorithm.learning_rate", 1e-5, _pretrained,
        "auto: 0.00001 for a pretrained model: 0.00003 with the KL of GRPO ends SmolLM2-135M's exploration",
    ),
    Follows("algorithm.critic.learning_rate", 1e-3, _fresh, "auto: 0.001 for a fresh tiny model"),
    Follows(
        "algorithm.critic.learning_rate", 1e-5, _pretrained,
        "auto: 0.00001 for a pretrained body, as in verl",
    ),
    Follows(
        "algorithm.filter_groups.enable", True, _plays_further_groups,
        "auto: with max_num_gen_batches above 1, groups are played until enough of them differ",
    ),
    Follows(
        "algorithm.filter_groups.enable", False, _plays_once, "auto: all groups that are played are learned from"
    ),
    Follows(
        "agent_proxy.prompt.prefill", "", _answers_freely,
        "none: with mode append, or with tools, an answer is the model's own from its first token", None,
    ),
    Follows(
        "agent_proxy.prompt.closing", "", _answers_freely,
        "none: with mode append, or with tools, an answer is the model's own to its last token", None,
    ),
    Follows(
        "agent_proxy.prompt.later", "{observation}", _repeats_the_first,
        "with mode append the chat shows what the first message said", None,
    ),
)  # fmt: skip
"""All settings that the engine or the prompt decides; what no line names here has the value that the config says."""


def settle(config: AgentConfig) -> None:
    """Give those settings of `FOLLOWS` their value in a config that is being made."""
    for follows in FOLLOWS:
        section, *path = follows.path.split(".")
        if follows.replaces in (None, _at(config, follows.path)) and follows.when(config):
            object.__setattr__(config, section, _with_field(getattr(config, section), path, follows.value))


def free_answers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nested settings without the texts around an answer, where `FOLLOWS` drops them: a `PromptConfig` refuses them."""
    proxy = values.get("agent_proxy") or {}
    prompt = proxy.get("prompt") or {}
    if prompt.get("mode") != "append":
        return values
    kept = {name: value for name, value in prompt.items() if name not in ("prefill", "closing")}
    return {**values, "agent_proxy": {**proxy, "prompt": kept}}


def reasons(config: AgentConfig) -> dict[str, str]:
    """Why settings of a config have their value, by path, of those that `FOLLOWS` decided."""
    return {f.path: f.reason for f in FOLLOWS if f.when(config) and _at(config, f.path) == f.value}


def _at(config: AgentConfig, path: str) -> Any:
    return reduce(getattr, path.split("."), config)


def _with_field(config: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _with_field(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: inner})


# --- files
def preset_names(folder: Path | None = None) -> list[str]:
    """The presets that come with shoal, and those in `folder/algorithm`."""
    own = (folder / GROUP).glob("*.yaml") if folder is not None else ()
    return sorted({*purposes(GROUP), *(path.stem for path in own)})


def purposes(group: str = "") -> dict[str, str]:
    """What each YAML file that comes with shoal is for, of this group: the first sentence of its first comment."""
    found = {}
    for item in resources.files("shoal.configs").joinpath(group).iterdir():
        if item.name.endswith(".yaml"):
            lines = [
                line for line in item.read_text("utf-8").splitlines() if not line.startswith("# @package")
            ]
            comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("#"), lines))
            found[Path(item.name).stem] = re.split(r"(?<!Dr)\. ", comment)[0].rstrip(".")
    return dict(sorted(found.items()))


def preset_words(words: list[str], folder: Path | None, compose: Callable[[str], Any]) -> list[str]:
    """Overrides in which `algorithm=NAME` stands as the settings of that preset, before all others.

    They count more than those of the chosen config, and less than the settings that the caller names. `folder` is that
    of the user's configs, and `compose` gives the settings that an override such as `+algorithm=dapo` names.

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
    settings = leaves(compose(f"+{GROUP}={name}"))
    return [f"++{path}={json.dumps(value, ensure_ascii=False)}" for path, value in settings] + rest


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
