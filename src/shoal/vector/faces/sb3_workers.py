"""What `SB3VecEnv` has its workers do: here, because importing Stable-Baselines3 takes seconds in every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium


def patched(fn: Callable[[], Any]) -> Any:
    """An env that Gymnasium understands, even when `fn` makes one of the old `gym` package."""
    env = fn()
    if isinstance(env, gymnasium.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    return _patch_env(env)


def is_wrapped(env: Any, module: str, name: str) -> bool:
    """Whether a wrapper of the class of this name is around the env (the class would bring its packages along)."""
    while isinstance(env, gymnasium.Wrapper):
        if any((kind.__module__, kind.__qualname__) == (module, name) for kind in type(env).__mro__):
            return True
        env = env.env
    return False
