"""`ParallelEnv`: environments in worker processes with plain NumPy results, as small training loops like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from shoal.vector.launch import StartMethod
from shoal.vector.make import make_vec


class ParallelEnv:
    """Environments in worker processes that reset themselves when an episode ends.

    Args:
        env_fns: functions that make the environments; they may be lambdas.
        start_method: "forkserver" (default), "spawn" or "fork".
        seed: environment i is seeded with `seed + i` in the first reset.
        **options: of `make_vec`: `num_workers`, `step_timeout`, `on_failure`, …
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        start_method: StartMethod | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.envs = make_vec(
            list(env_fns), backend=options.pop("backend", "process"), start_method=start_method, **options
        )
        self.n_envs = self.num_envs = self.envs.num_envs
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        self._seed = seed

    def reset(self, seed: int | Sequence[int | None] | None = None) -> tuple[Any, dict[str, Any]]:
        """First observations `[n_envs, ...]` and infos; without a seed the one given at the start, once."""
        if seed is None:
            seed, self._seed = self._seed, None
        return self.envs.reset(seed=seed)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminated, truncated `[n_envs, ...]` and infos.

        Where an episode ended the observation is the first of the next one; the last one is in
        `infos["final_obs"]`.
        """
        return self.envs.step(actions)

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def __len__(self) -> int:
        return self.num_envs

    def __enter__(self) -> ParallelEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
