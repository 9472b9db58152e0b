"""`shoal.json`, beside the weights of an exported model: how it was prompted and read, and the envs that it played.

Its settings have the names of the YAML. It is data: read once, checked against the same dataclasses, never evaluated.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.core.configuration import to_mapping
from shoal.core.errors import ConfigError, DataError, ShoalError, did_you_mean
from shoal.core.files import read_json
from shoal.core.run_folder import finite
from shoal.rollout.factory import make_roles
from shoal.rollout.settings import RolloutSettings
from shoal.train.agent.config import AgentConfig

logger = logging.getLogger(__name__)

FILE = "shoal.json"
FORMAT = 1
KEYS = ("format", "engine", "agent_proxy", "es_manager", "custom_envs", "imports", "roles")
OF_THE_ENGINE = ("name", "dtype", "threads", "max_batch", "cache_tokens", "template")
"""Settings of the engine that what it writes depends on."""
OF_THE_SPEED = ("use_parallel_rollout", "parallel_n_jobs", "parallel")
"""Settings of a rollout that it does not depend on."""


def play_of(config: AgentConfig) -> dict[str, Any]:
    """What `shoal.json` says of the model of a run: all that another program needs to play it likewise."""
    values = to_mapping(config)
    tags = sorted({*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()})
    playing = [item.name for item in fields(RolloutSettings) if item.name not in OF_THE_SPEED]
    engine = {name: values["engine"][name] for name in OF_THE_ENGINE}
    if engine["name"] not in (
        "tiny",
        "huggingface",
    ):  # which sampled for a network that was trained beside it
        replicated = engine["name"] == "ray" and config.engine.replicas.engine == "tiny"
        engine["name"] = "tiny" if replicated else "huggingface"
    return {
        "format": FORMAT,
        "engine": engine,
        "agent_proxy": {name: values["agent_proxy"][name] for name in playing},
        "es_manager": {"val": values["es_manager"]["val"]},
        "custom_envs": {tag: values["custom_envs"][tag] for tag in tags},
        "imports": values["imports"],
        "roles": _roles(config, tags),
    }


def _roles(config: AgentConfig, tags: list[str]) -> dict[str, Any]:
    """What an agent is told of each kind of env, and how its answers become actions there."""
    try:
        roles = make_roles(config.custom_envs, tags, config.agent_proxy.max_turn)
    except ShoalError as error:
        logger.warning(
            "%s names no words for actions, since an env of the run cannot be made here: %s", FILE, error
        )
        return {}
    return {
        tag: {
            "instructions": role.instructions,
            "max_turns": role.max_turns,
            "words": finite(dict(role.projection.lookup)),  # and their actions; none where any text is one
            "invalid": finite(role.projection.invalid),
            "tags": list(role.projection.tags),
            "style": role.projection.style,
            "separator": role.projection.separator,
            "max_actions": role.projection.max_actions,
        }
        for tag, role in roles.items()
    }


def read_play(folder: Path) -> AgentConfig | None:
    """The settings in the `shoal.json` of a model folder, those of training at their defaults; None without the file.

    Raises:
        DataError: it is no JSON, no object, or of another format.
        ConfigError: a key is unknown, or a value does not fit.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else values
        raise DataError(
            f"{path} must be an object of format {FORMAT}, got {found!r:.80}: export the run again with this shoal"
        )
    for key in values:
        if key not in KEYS:
            raise ConfigError(
                f"{path} has an unknown key {key!r}.{did_you_mean(key, KEYS)} Remove it, or export the run again"
            )
    settings = {key: value for key, value in values.items() if key not in ("format", "roles")}
    try:
        config = AgentConfig.read(settings)
        for tag in config.es_manager.val.group_tags():
            if tag not in config.custom_envs:
                raise ConfigError(
                    f"es_manager.val.env_configs.tags names {tag!r}, which is not in custom_envs"
                )
        return config
    except ConfigError as error:
        raise ConfigError(
            f"{path} does not fit this version of shoal: {error}. Correct it, or export the run again"
        ) from error
