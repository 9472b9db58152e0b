"""Groups of text environments in worker processes, as lists: the interface of older agent projects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.errors import EnvError
from shoal.vector.arguments import groups
from shoal.vector.make import Backend, make_vec
from shoal.vector.standing import OnFailure


class MultiProcessEnvironmentContainer:
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
        backend: Backend = "process",
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
        self._obs: list[Any] = [None] * len(self)
        self._infos: list[dict[str, Any]] = [{} for _ in range(len(self))]
        self._done = [True] * len(self)

    def __len__(self) -> int:
        return self.env_num * self.group_n

    def reset(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """New episodes everywhere: one observation and one info per environment."""
        self.iteration += 1
        seeds = groups(self.seed, self.env_num, self.group_n, iteration=self.iteration)
        for i, (obs, info) in enumerate(self.envs.reset_some(range(len(self)), seeds)):
            self._obs[i], self._infos[i], self._done[i] = obs, info, False
        return list(self._obs), list(self._infos)

    def step(self, actions: Sequence[Any]) -> tuple[list[Any], list[float], list[bool], list[dict[str, Any]]]:
        """One action per environment; None leaves an environment alone (its last results, reward 0).

        Raises:
            EnvError: for an action to an environment whose episode is over.
        """
        if len(actions) != len(self):
            raise ValueError(f"expected {len(self)} actions (None leaves an env alone), got {len(actions)}")
        chosen = [i for i, action in enumerate(actions) if action is not None]
        over = [i for i in chosen if self._done[i]]
        if over:
            raise EnvError(f"the episodes of environments {over} are over: pass None for them, or reset()")
        rewards = [0.0] * len(self)
        results = self.envs.step_some(chosen, [actions[i] for i in chosen]) if chosen else []
        for i, result in zip(chosen, results, strict=True):
            self._obs[i], rewards[i], self._infos[i] = result.observation, result.reward, result.info
            self._done[i] = result.terminated or result.truncated
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

    def __enter__(self) -> MultiProcessEnvironmentContainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
