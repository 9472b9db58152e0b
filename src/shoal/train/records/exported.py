"""`shoal.json`, beside the weights of an exported model: how it was prompted and read, and the envs that it played.

Its settings have the names of the YAML. It is data: read once, checked against the same dataclasses, never evaluated.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from shoal.core.configuration import to_mapping
from shoal.core.errors import ConfigError, DataError, ShoalError, did_you_mean
from shoal.core.files import read_json, write_folder, write_json
from shoal.core.run_folder import finite
from shoal.rollout.factory import make_roles
from shoal.rollout.settings import RolloutSettings
from shoal.train.agent.config import AgentConfig
from shoal.train.ppo.checkpoint import holds_policy
from shoal.train.records.checkpoints import read_checkpoint
from shoal.train.records.read import agent_config_of, settings_of

logger = logging.getLogger(__name__)

FILE = "shoal.json"
FORMAT = 1
KEYS = ("format", "engine", "agent_proxy", "es_manager", "custom_envs", "imports", "roles")
OF_THE_ENGINE = ("name", "dtype", "threads", "max_batch", "cache_tokens", "template")
"""Settings of the engine that what it writes depends on."""
OF_THE_SPEED = ("use_parallel_rollout", "parallel_n_jobs", "parallel")
"""Settings of a rollout that it does not depend on."""


def export_model(
    run: Path,
    out: Path,
    *,
    to: Literal["hf", "shoal"] = "hf",
    adapter: bool = False,
    checkpoint: str = "newest",
) -> str:
    """Write the model of a run of agents into a folder of its own, with its `shoal.json`: `shoal export` in Python.

    Args:
        run: the run folder.
        out: the new folder; it is there whole or not at all.
        to: "hf", as transformers loads it, or "shoal", as shoal's engines do.
        adapter: with LoRA, the adapter alone, unmerged.
        checkpoint: "newest", "best", or an iteration.

    Returns:
        The name of the checkpoint.

    Raises:
        ConfigError: the folder is there already, or the run has no such model.
        DataError: there is no such checkpoint, or it is damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already: choose a new folder")
    if holds_policy(run):
        raise ConfigError(
            f"{run} is a PPO run, whose policy Python loads: shoal.load_policy({str(run)!r}), and "
            f".export_onnx('policy.onnx') of it for other programs; shoal eval {run} plays it"
        )
    with write_folder(out) as folder:

        def copy(place: Path) -> str:
            source = place / "engine"
            kind = read_json(source / "engine.json")["engine"]
            if adapter and kind != "huggingface-lora":
                raise ConfigError(f"{run} was trained without LoRA and has no adapter: leave --adapter out")
            if to == "hf" and not kind.startswith("huggingface"):
                raise ConfigError(
                    f"{run} trained the {kind} engine, which transformers does not know: "
                    f"shoal export {run} {out} --to shoal"
                )
            if kind == "huggingface-lora" and to == "hf" and not adapter:
                from shoal.train.agent.policies.lora import merge_lora

                merge_lora(source, folder)
                return place.name
            for file in source.iterdir():
                if to == "shoal" or file.name != "engine.json":
                    shutil.copy2(file, folder / file.name)
            return place.name

        name = read_checkpoint(run, checkpoint, copy)
        if "custom_envs" in settings_of(run):  # a training on recordings plays nothing
            write_json(folder / FILE, play_of(agent_config_of(run)))
    return name


def play_of(config: AgentConfig) -> dict[str, Any]:
    """What `shoal.json` says of the model of a run: all that another program needs to play it likewise."""
    values = to_mapping(config)
    tags = sorted({*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()})
    playing = [item.name for item in fields(RolloutSettings) if item.name not in OF_THE_SPEED]
    engine = {name: values["engine"][name] for name in OF_THE_ENGINE}
    # the kind of the network that was trained, whatever sampled for it
    engine["name"] = "tiny" if config.engine.played_by == "tiny" else "huggingface"
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
