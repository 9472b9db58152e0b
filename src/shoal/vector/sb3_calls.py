"""What `SB3VecEnv` has its workers do; without Stable-Baselines3, whose import takes seconds in every worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium


def patched(fn: Callable[[], Any]) -> Callable[[], Any]:
    """A function whose env Gymnasium understands, even when `fn` makes one of the old `gym` package."""
    return functools.partial(_make, fn)


def _make(fn: Callable[[], Any]) -> Any:
    env = fn()
    if isinstance(env, gymnasium.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    return _patch_env(env)


def get(env: Any, name: str) -> Any:
    """An attribute of the env or of a wrapper around it."""
    return env.get_wrapper_attr(name)


def has(env: Any, name: str) -> bool:
    """Whether `get` would find it."""
    return bool(env.has_wrapper_attr(name))


def call(env: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of the env or of a wrapper around it."""
    return env.get_wrapper_attr(name)(*args, **kwargs)


def is_wrapped(env: Any, wrapper_class: type) -> bool:
    """Whether a wrapper of this class is somewhere around the env."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, wrapper_class):
            return True
        env = env.env
    return False
