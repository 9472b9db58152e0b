"""The vector environments of small training loops: groups of text environments as lists, and `ParallelEnv`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from shoal.core.errors import EnvError
from shoal.core.executors import Closing
from shoal.core.workers import StartMethod
from shoal.vector.failures import OnFailure, reported
from shoal.vector.make import BackendName, make_vec
from shoal.vector.spaces import groups, one_each


class MultiProcessEnvironmentContainer(Closing):
    """`env_num` groups of `group_n` environments; those of a group start from the same state.

    Group g holds environments `g * group_n … (g + 1) * group_n - 1`; in the k-th `reset()` they all get the
    seed derived from `(seed, "env", k, g)`.

    Args:
        env_type: name of a shoal env, a Gymnasium id, or a class or function that makes an env.
        env_num: number of groups.
        group_n: environments per group.
        seed: the run seed.
        env_kwargs: settings of the env.
        backend: where the environments run.
        on_failure: "restart" replaces what failed and reports it done with `info["worker_restarted"]`.
        **options: passed on to `make_vec` (`num_workers`, `step_timeout`, …).
    """

    def __init__(
        self,
        env_type: str | Callable[..., Any],
        env_num: int = 1,
        group_n: int = 1,
        seed: int = 0,
        env_kwargs: dict[str, Any] | None = None,
        *,
        backend: BackendName = "process",
        on_failure: OnFailure = "restart",
        **options: Any,
    ) -> None:
        if env_num < 1 or group_n < 1:
            raise ValueError(f"env_num and group_n must be at least 1, got {env_num} and {group_n}")
        self.env_type, self.env_num, self.group_n, self.seed = env_type, env_num, group_n, seed
        self.num_processes = env_num * group_n
        self.iteration = -1
        self.envs = make_vec(
            env_type,
            env_num * group_n,
            backend=backend,
            env_kwargs=env_kwargs,
            autoreset="disabled",
            on_failure=on_failure,
            **options,
        )
        where = f"{env_num} groups of {group_n} of {env_type}, {backend}"
        logging.getLogger(__name__).debug("%s: environments are made", where)
        self._obs: list[Any] = [None] * len(self)
        self._infos: list[dict[str, Any]] = [{} for _ in range(len(self))]
        self._done = [True] * len(self)

    def __len__(self) -> int:
        return self.env_num * self.group_n

    def reset(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """New episodes everywhere: one observation and one info per environment."""
        seeds = groups(self.seed, self.env_num, self.group_n, iteration=self.iteration + 1)
        self._done = [True] * len(self)  # if it fails, some have begun anew: none continues its old episode
        results = self.envs.reset_some(range(len(self)), seeds)
        self._obs, self._infos = [obs for obs, _ in results], [info for _, info in results]
        self._done = [False] * len(self)
        self.iteration += 1  # a reset that fails is done again with the same seeds
        return list(self._obs), list(self._infos)

    def step(self, actions: Sequence[Any]) -> tuple[list[Any], list[float], list[bool], list[dict[str, Any]]]:
        """One action per environment; None leaves an environment alone (its last results, reward 0).

        Raises:
            EnvError: for an action to an environment whose episode is over.
        """
        actions = one_each(actions, len(self))
        chosen = [i for i, action in enumerate(actions) if action is not None]
        over = [i for i in chosen if self._done[i]]
        if over:
            raise EnvError(f"the episodes of environments {over} are over: pass None for them, or reset()")
        rewards = [0.0] * len(self)
        results = self.envs.step_some(chosen, [actions[i] for i in chosen]) if chosen else []
        for i, result in zip(chosen, results, strict=True):
            self._obs[i], rewards[i], self._infos[i] = result.observation, result.reward, result.info
            self._done[i] = result.terminated or result.truncated
        for i, failure in self.envs.undone.items():  # left alone, and lost with the worker of one that failed
            if failure is not None and not self._done[i]:
                self._done[i], self._infos[i] = True, reported(failure)
        return list(self._obs), rewards, list(self._done), list(self._infos)

    def render(self) -> list[Any]:
        """What every environment renders."""
        return list(self.envs.render())

    def get_available_actions(self) -> list[Any]:
        """The actions each environment would take now, as it names them."""
        return list(self.envs.call("available_actions"))

    def close(self) -> None:
        """End the worker processes."""
        self.envs.close()


class ParallelEnv(Closing):
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
            list(env_fns),
            start_method=start_method,
            **{"backend": "process", "autoreset": "same_step", **options},
        )
        self.n_envs = self.num_envs = self.envs.num_envs
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        self._seed = seed

    def reset(self, seed: int | Sequence[int | None] | None = None) -> tuple[Any, dict[str, Any]]:
        """First observations `[n_envs, ...]` and infos; without a seed the one given at the start, once."""
        result = self.envs.reset(seed=self._seed if seed is None else seed)
        if seed is None:
            self._seed = None
        return result

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
