"""Playing the envs of a manager to the end with one engine: what older agent projects call `multi_turn_loop`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.envs.actions import Projected, Projection
from shoal.rollout.collector import TrajectoryCollector
from shoal.rollout.compat.managers import EnvironmentManager
from shoal.rollout.compat.projections import as_actions
from shoal.rollout.episode import Role
from shoal.rollout.samplers.sampler import Engine, Sampling
from shoal.vector import MultiProcessEnvironmentContainer


def multi_turn_loop(
    envs: EnvironmentManager,
    engine: Engine,
    sampling: Sampling | None = None,
    *,
    max_turns: int | None = None,
) -> list[Trajectory]:
    """One episode in every env of a manager, with its prompts and projection, group by group, member by member.

    The seed and the number of the iteration are the container's: this is its next `reset()`.

    Args:
        envs: a manager whose envs are a `MultiProcessEnvironmentContainer`.
        engine: writes the responses.
        sampling: how tokens are picked.
        max_turns: turns after which an episode is truncated; the env's own limit if None.
    """
    container = envs.envs
    if not isinstance(container, MultiProcessEnvironmentContainer):
        raise ConfigError(
            f"multi_turn_loop needs the envs in a MultiProcessEnvironmentContainer, got {type(container).__name__}"
        )
    pool, tag = container.envs, envs.env_name or "env"
    limits = (max_turns, envs.max_turns, pool.get_attr("config")[0].max_steps)
    role = Role(
        tag,
        pool.get_attr("instructions")[0],
        _Batched(lookup=pool.get_attr("action_words")[0], function=envs.projection_f),
        min(limit for limit in limits if limit),
    )
    container.iteration += 1
    collector = TrajectoryCollector(
        pool,
        [tag] * container.env_num,
        {tag: role},
        container.group_n,
        engine,
        envs.prompt,
        container.seed,
    )
    return collector.collect(container.iteration, sampling or Sampling())


@dataclass(frozen=True)
class _Batched(Projection):
    """A projection of single responses that asks a function over batches."""

    function: Callable[..., Any] | None = None

    def __call__(self, text: str) -> Projected:
        assert self.function is not None
        actions, valids = self.function([text])
        return Projected(tuple(as_actions(actions[0])), bool(valids[0]))
