"""Agent configs by name: YAML composed by Hydra over the defaults of the dataclasses, overridden `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shoal.core.configuration import from_mapping, to_mapping
from shoal.core.errors import ConfigError, did_you_mean, unknown_name
from shoal.train.agent_config import AgentConfig

OWN = "over-the-defaults"
"""What Hydra is asked for in the place of a config that has no defaults list."""

MOST_BYTES, MOST_VALUES = 2**20, 20_000
"""Of a config file; more is a mistake or an attack (aliases of aliases), and takes minutes to compose."""


def config_names() -> list[str]:
    """The configs that come with shoal."""
    folder = resources.files("shoal.configs")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def compose_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> AgentConfig:
    """The config `name` with `overrides` in Hydra's grammar (`a.b=1`, `+a.c=2`, `~a.d`).

    Args:
        name: one of `config_names()`, or of a YAML file in `folder`.
        overrides: applied last.
        folder: a folder of the user's YAML; its files may name shoal's in their defaults list. One without such a
            list changes the defaults of the settings.

    Raises:
        UnknownNameError: no such config.
        ConfigError: an override or a value that does not fit.
    """
    own = [path.stem for path in folder.glob("*.yaml")] if folder else []
    if name not in config_names() and name not in own:
        raise unknown_name("config", name, [*config_names(), *own])
    GlobalHydra.instance().clear()
    ConfigStore.instance().store(name="defaults", node=to_mapping(AgentConfig()))
    try:
        if folder is None:
            with initialize_config_module("shoal.configs", version_base=None):
                composed = compose(name, overrides=list(overrides))
        else:
            with initialize_config_dir(str(folder.resolve()), version_base=None):
                composed = compose(
                    _with_defaults(name, folder),
                    overrides=[*overrides, "hydra.searchpath=[pkg://shoal.configs]"],
                    return_hydra_config=True,
                )
                OmegaConf.set_struct(composed, False)
                composed.pop("hydra")
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    except MissingConfigException as error:
        raise ConfigError(f"config {name!r} needs one that is not there: {error}") from error
    except (ConfigCompositionException, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(_explain(error)) from error
    kinds = values.get("custom_envs")
    if isinstance(kinds, dict):
        values["custom_envs"] = {tag: kind for tag, kind in kinds.items() if kind is not None}
    return from_mapping(AgentConfig, values)


def _with_defaults(name: str, folder: Path) -> str:
    """The name under which Hydra finds a config of the user's, over the defaults if it names none itself."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        return name
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} must be at most {MOST_BYTES} bytes, got {path.stat().st_size}")
    try:
        own = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(own, dict | None):
        raise ConfigError(f"{path} must be a mapping of settings, got {type(own).__name__}")
    todo: list[Any] = [own]
    for _ in range(MOST_VALUES):  # as they are with every alias in full
        if not todo:
            break
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if todo:
        raise ConfigError(f"{path} must hold at most {MOST_VALUES} values, aliases in full, got more")
    if own and "defaults" in own:
        return name
    ConfigStore.instance().store(name=OWN, node={"defaults": ["defaults", name, "_self_"]})
    return OWN


def _explain(error: Exception) -> str:
    """Hydra's first line, and the key that was probably meant."""
    first = str(error).strip().split("\n")[0]
    key = first.split("'")[1] if "Could not override" in first and "'" in first else ""
    if not key:
        return first
    if _takes_own_keys(key):
        return f"{key!r} is not there yet. {str(error).strip().splitlines()[-1]}"
    return f"no setting {key!r}.{_nearest(key)}"


def _takes_own_keys(key: str) -> bool:
    """Whether a setting is in a mapping whose keys are the user's, or is such a mapping."""
    node: Any = AgentConfig()
    for part in key.split("."):
        if isinstance(node, dict):
            return True
        node = getattr(node, part, None)
    return isinstance(node, dict)


def _nearest(key: str) -> str:
    node: Any = to_mapping(AgentConfig())
    *parents, _ = parts = key.split(".")
    for depth, parent in enumerate(parents):
        if not isinstance(node, dict) or parent not in node:
            return did_you_mean(parts[depth], node if isinstance(node, dict) else [])
        node = node[parent]
    return did_you_mean(parts[-1], node if isinstance(node, dict) else [])
