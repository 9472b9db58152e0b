"""The envs that have a name, each imported when it is first made.

Adding one: a file with a `TextEnv`, a line in `BUILT_IN`, a test.
"""

from __future__ import annotations

import importlib
from typing import Any

from shoal.core.registry import Registry
from shoal.envs.text import TextEnv

BUILT_IN = {
    "frozen_lake": "shoal.envs.frozen_lake:FrozenLakeEnv",
    "bandit": "shoal.envs.bandit:BanditEnv",
    "sokoban": "shoal.envs.sokoban.env:SokobanEnv",
    "countdown": "shoal.envs.countdown:CountdownEnv",
    "metamathqa": "shoal.envs.metamathqa:MetaMathQAEnv",
    "webshop": "shoal.envs.webshop.env:WebShopEnv",
}

_envs: Registry[str | type[TextEnv[Any]]] = Registry("env")
for _name, _where in BUILT_IN.items():
    _envs.register(_name, _where)


def register(name: str, env_class: str | type[TextEnv[Any]], *, replace: bool = False) -> None:
    """Give an env class a name; `env_class` is the class or "module:Class", imported on first use."""
    _envs.register(name, env_class, replace=replace)


def names() -> list[str]:
    """All registered names, sorted."""
    return list(_envs)


def env_class(name: str) -> type[TextEnv[Any]]:
    """The class registered under `name`, or given as "module:Class"."""
    where = _envs[name] if ":" not in name else name
    if isinstance(where, str):
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    return where


def make(env_type: str, **config: Any) -> TextEnv[Any]:
    """An env by name, with its config's settings as keywords.

    >>> env = make("frozen_lake", is_slippery=False)
    >>> observation, info = env.reset(seed=3)
    """
    return env_class(env_type)(**config)
