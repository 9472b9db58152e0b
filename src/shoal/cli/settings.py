"""What a command line says of an environment: settings of the form `key=value`, and wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

from shoal.core.errors import ConfigError, EnvError, ShoalError
from shoal.envs.catalogue import parse_env_kwargs

Settings = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]")]

EnvKwargs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")]
"""`--env-kwargs`, arguments of the environment as JSON or plain text."""
Wrappers = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="wrapper", metavar="MODULE:NAME")
]
"""`--wrapper`, which may be given several times."""


@contextlib.contextmanager
def blaming(name: str) -> Iterator[None]:
    """What an env raises while it is made or tried becomes an `EnvError` that names it."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # an env may raise whatever it likes
        raise EnvError(f"{name} failed when it was tried: {type(error).__name__}: {error}") from error


def arguments_of(settings: tuple[str, ...], env_kwargs: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of an env, given as settings and by `--env-kwargs`."""
    found, more = parse_settings(settings), parse_env_kwargs(env_kwargs)
    for key in more:
        if key in found:
            raise ConfigError(f"the argument {key!r} of the environment was given twice")
    return {**found, **more}


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
