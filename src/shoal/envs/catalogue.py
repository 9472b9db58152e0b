"""The envs that have a name, each imported when it is first made.

Adding one: a file with a `TextEnv`, a line in `BUILT_IN`, a test.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium

from shoal.core.errors import ConfigError
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
"""shoal's own envs; each is also `shoal/Name-v0` for `gymnasium.make`."""

ADAPTERS = {
    "gymnasium": "shoal.envs.adapters.gymnasium:GymnasiumEnv",
    "reasoning_gym": "shoal.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "textarena": "shoal.envs.adapters.textarena:TextArenaEnv",
    "textworld": "shoal.envs.adapters.textworld:TextWorldEnv",
    "openenv": "shoal.envs.adapters.openenv:OpenEnvEnv",
}
"""Other people's envs as text; which one is a setting."""

_envs: Registry[str | type[TextEnv[Any]]] = Registry("env")
for _name, _where in {**BUILT_IN, **ADAPTERS}.items():
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
    if not isinstance(where, str):
        return where
    module, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in (module, module.split(".")[0]):
            raise  # the module is there; what it imports is not
        raise ConfigError(f"expected an env class as 'module:Class', but {where!r} fails: {error}") from error
    if not (isinstance(found, type) and issubclass(found, TextEnv)):
        raise ConfigError(f"{where!r} must be a TextEnv class, got {found!r}")
    return found


def make(env_type: str, **config: Any) -> TextEnv[Any]:
    """An env by name, with its config's settings as keywords.

    >>> env = make("frozen_lake", is_slippery=False)
    >>> observation, info = env.reset(seed=3)
    """
    return env_class(env_type)(**config)


def gymnasium_id(name: str) -> str:
    """The id of one of shoal's own envs for `gymnasium.make`.

    >>> gymnasium_id("frozen_lake")
    'shoal/FrozenLake-v0'
    """
    return f"shoal/{BUILT_IN[name].partition(':')[2].removesuffix('Env')}-v0"


def register_with_gymnasium() -> None:
    """Make shoal's own envs known to `gymnasium.make`; importing `shoal.envs` does it.

    `gymnasium.make("shoal.envs:shoal/Sokoban-v0")` imports it by itself.
    """
    for name, where in BUILT_IN.items():
        if gymnasium_id(name) not in gymnasium.registry:
            gymnasium.register(gymnasium_id(name), entry_point=where)


register_with_gymnasium()
