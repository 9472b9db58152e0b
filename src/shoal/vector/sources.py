"""From what a user names (an env id, a shoal env, a class, a function) to functions that make environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.envs.catalogue import EnvFn, Source, Wrapper, resolve

__all__ = ["Source", "env_fn_of", "env_fns_of"]


def env_fns_of(
    env: Source | Sequence[Source],
    num_envs: int | None,
    env_kwargs: dict[str, Any] | None,
    wrappers: Sequence[Wrapper] = (),
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
        return [env_fn_of(item, kwargs, wrappers) for item in env]
    if num_envs is None:
        raise ValueError("num_envs is needed unless a sequence of environments is given")
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    return [env_fn_of(env, kwargs, wrappers)] * num_envs


def env_fn_of(env: Source, kwargs: dict[str, Any], wrappers: Sequence[Wrapper] = ()) -> EnvFn:
    """A function that makes one environment."""
    return resolve(env, env_kwargs=kwargs, wrappers=wrappers)
