"""From what a user names (an env id, a shoal env, a class, a function) to functions that make environments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from shoal import envs as text_envs
from shoal.core.errors import UnknownNameError, did_you_mean
from shoal.vector.env_group import EnvFn

Source = str | Callable[..., gymnasium.Env[Any, Any]] | gymnasium.envs.registration.EnvSpec


def env_fns_of(
    env: Source | Sequence[Source], num_envs: int | None, env_kwargs: dict[str, Any] | None
) -> list[EnvFn]:
    """One function per environment; a sequence of sources gives different environments.

    Raises:
        UnknownNameError: for a name that neither shoal nor Gymnasium knows.
        ValueError: when the number of environments is missing or contradicts the sequence.
    """
    kwargs = dict(env_kwargs or {})
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs is not None and num_envs != len(env):
            raise ValueError(f"got {len(env)} environments but num_envs={num_envs}; leave num_envs out")
        if not env:
            raise ValueError("at least one environment is needed, got an empty sequence")
        return [env_fn_of(item, kwargs) for item in env]
    if num_envs is None:
        raise ValueError("num_envs is needed unless a sequence of environments is given")
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    return [env_fn_of(env, kwargs)] * num_envs


def env_fn_of(env: Source, kwargs: dict[str, Any]) -> EnvFn:
    """A function that makes one environment."""
    if isinstance(env, gymnasium.envs.registration.EnvSpec):
        return functools.partial(gymnasium.make, env, **kwargs)
    if isinstance(env, str):
        return (
            functools.partial(text_envs.make, env, **kwargs)
            if env in text_envs.names()
            else _by_id(env, kwargs)
        )
    if callable(env):
        return functools.partial(env, **kwargs) if kwargs else env
    raise TypeError(f"an environment is a name, a spec, a class or a function, got {type(env).__name__}")


def _by_id(env: str, kwargs: dict[str, Any]) -> EnvFn:
    if ":" in env:  # "module:Id-v0": importing the module registers the id, there as here
        return functools.partial(gymnasium.make, env, **kwargs)
    try:
        # The spec itself travels: a worker need not have run the code that registered the id.
        return functools.partial(gymnasium.make, gymnasium.spec(env), **kwargs)
    except gymnasium.error.Error as error:
        guess = did_you_mean(env, [*text_envs.names(), *gymnasium.registry]).partition(" Known:")[0]
        raise UnknownNameError(
            f"no env named {env!r}.{guess} shoal's own: {', '.join(text_envs.names())}; "
            f"Gymnasium's: gymnasium.pprint_registry()"
        ) from error
