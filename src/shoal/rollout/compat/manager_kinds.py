"""A manager for each kind of env that comes with shoal, and `make_manager`, which finds it by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import unknown_name
from shoal.rollout.compat.managers import EnvironmentManager
from shoal.rollout.compat.projections import create_projection_function
from shoal.vector import MultiProcessEnvironmentContainer


class SokobanEnvironmentManager(EnvironmentManager):
    """Push boxes: moves up, down, left, right."""

    env_type = "sokoban"


class FrozenLakeEnvironmentManager(EnvironmentManager):
    """Cross the ice: moves left, down, right, up."""

    env_type = "frozen_lake"


class BanditEnvironmentManager(EnvironmentManager):
    """Pull an arm, by its number or by its name in that env."""

    env_type = "bandit"

    def _spaces(self) -> list[Any]:
        return [lookup or None for lookup in self._lookups]


class CountdownEnvironmentManager(EnvironmentManager):
    """Make a number from numbers."""

    env_type = "countdown"


class MetaMathQAEnvironmentManager(EnvironmentManager):
    """Answer a mathematical question, with several tries."""

    env_type = "metamathqa"


class WebShopEnvironmentManager(EnvironmentManager):
    """Search, look and buy; the published score is reported as `webshop_task_score`."""

    env_type = "webshop"
    scores = ("task_score",)


MANAGERS: dict[str, type[EnvironmentManager]] = {
    manager.env_type: manager
    for manager in (
        SokobanEnvironmentManager,
        FrozenLakeEnvironmentManager,
        BanditEnvironmentManager,
        CountdownEnvironmentManager,
        MetaMathQAEnvironmentManager,
        WebShopEnvironmentManager,
    )
    if manager.env_type
}


def make_manager(
    env_type: str,
    env_num: int = 1,
    group_n: int = 1,
    seed: int = 0,
    env_kwargs: dict[str, Any] | None = None,
    *,
    prompt: Mapping[str, Any] | None = None,
    projection: Mapping[str, Any] | None = None,
    **options: Any,
) -> EnvironmentManager:
    """A manager with its envs: `env_num` groups of `group_n`.

    Args:
        env_type: a registered env.
        env_num: number of groups.
        group_n: envs per group; those of a group start alike.
        seed: the run seed.
        env_kwargs: settings of the env.
        prompt: settings of `PromptConfig` to replace.
        projection: passed to `create_projection_function` (`separator`, `max_actions`, `lenient`, `tags`).
        **options: of `MultiProcessEnvironmentContainer` and `make_vec` (`backend`, `num_workers`, …).
    """
    if not env_type:
        raise unknown_name("env", env_type, MANAGERS)
    function = create_projection_function(env_type, **(projection or {}))
    envs = MultiProcessEnvironmentContainer(env_type, env_num, group_n, seed, env_kwargs, **options)
    return MANAGERS.get(env_type, EnvironmentManager)(
        envs, function, {"env_type": env_type, **(prompt or {})}
    )
