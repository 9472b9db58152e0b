"""Settings of an environment on a command line: words of the form `key=value`."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from shoal.core.errors import ConfigError

Settings = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")]


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """Settings from `key=value` words; values are YAML, and `a.b=c` sets b inside a.

    >>> parse_settings(("dim_room=[7,7]", "kwargs.fast=true"))
    {'dim_room': [7, 7], 'kwargs': {'fast': True}}
    """
    from omegaconf import OmegaConf

    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"settings must be key=value, got {setting!r}")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
