"""The interfaces of other libraries over a vector env; each is a thin layer.

`MultiProcessEnvironmentContainer` and `ParallelEnv` (small training loops), `AsyncVectorEnv` (Gymnasium's),
`EnvPoolStyle` and `PufferStyle`; Stable-Baselines3's is in `sb3.py`, which imports it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, logger
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.core.errors import ConfigError, EnvError
from shoal.core.executors import Closing
from shoal.core.workers import StartMethod
from shoal.vector.arguments import check_whole, groups, one_each, seeds_per_env
from shoal.vector.failures import OnFailure
from shoal.vector.make import (
    BackendName,
    Options,
    env_fns_of,
    make_vec,
    open_workers,
    planned,
)
from shoal.vector.vector_env import Description, VectorPool


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
        chosen = np.flatnonzero(self.envs.active).tolist()  # without those that were masked out
        self._done = [True] * len(self)  # if it fails, some have begun anew: none continues its old episode
        results = self.envs.reset_some(chosen, [seeds[i] for i in chosen])
        for i, (obs, info) in zip(chosen, results, strict=True):
            self._obs[i], self._infos[i], self._done[i] = obs, info, not self.envs.active[i]
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
            backend=options.pop("backend", "process"),
            start_method=start_method,
            autoreset=options.pop("autoreset", "same_step"),
            **options,
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


class AsyncVectorEnv(VectorPool):
    """Environments in worker processes, with the arguments and errors of `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: functions that make the environments.
        shared_memory: accepted; observations of fixed size always go through shared memory, all others by message.
        copy: return copies of the observations.
        context: "forkserver" (default), "spawn" or "fork".
        daemon: accepted; workers always end with their parent.
        worker: not supported: a worker speaks shoal's own protocol.
        observation_mode: "same", "different" or `(batched space, single space)`.
        autoreset_mode: Gymnasium's.
        max_concurrency: how many environments may be at work at once.
        **options: of `make_vec`: `num_workers`, `threads`, `step_timeout`, `on_failure`, …; `check_nan` is off.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Any = None,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        if worker is not None:
            raise ValueError("a custom `worker` is not supported: put what it does into the env or a wrapper")
        if max_concurrency is not None:
            check_whole(max_concurrency, "max_concurrency", 1)
        mode = autoreset_mode if isinstance(autoreset_mode, AutoresetMode) else AutoresetMode(autoreset_mode)
        self.env_fns, self.shared_memory, self.daemon = env_fns, shared_memory, daemon
        self.context, self.observation_mode, self.max_concurrency = context, observation_mode, max_concurrency
        options = {"num_workers": max_concurrency, "check_nan": False, **options}
        chosen = Options("process", start_method=context, autoreset=mode, copy=copy, **options)  # type: ignore[arg-type]
        fns = env_fns_of(list(env_fns), None, None, ())
        describe = functools.partial(spaces_by_mode, mode=observation_mode)
        super().__init__(*open_workers(fns, planned(fns, chosen), chosen, describe), **chosen.policy)
        if isinstance(observation_mode, tuple):
            self.single_observation_space = observation_mode[1]

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close as Gymnasium does: with a warning, and after `timeout` by force, when a call is pending."""
        if (state := self._state) is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{state}` to complete.")
        super().close_extras(timeout, terminate)


def spaces_by_mode(found: Description, mode: Any) -> Description:
    """The description with its observation space batched as `mode` asks.

    Raises:
        RuntimeError: when the environments' spaces are not as the mode says.
    """
    each, n_envs = found.observation_spaces, len(found.observation_spaces)
    first = each[0]
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(item, Space) for item in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
        batched, first = mode
    elif mode == "same":
        batched = batch_space(first, n_envs)
    elif mode == "different":
        batched = batch_differing_spaces(each)
    else:
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}"
        )
    if mode == "same":
        if any(space != first for space in each):
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation "
                "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead."
            )
    elif any(not is_space_dtype_shape_equiv(space, first) for space in each):
        raise RuntimeError(
            "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
            "observation spaces do not share a common shape and dtype."
        )
    if any(space != found.action_spaces[0] for space in found.action_spaces):
        raise RuntimeError(
            f"Some environments have an action space different from `{found.action_spaces[0]}`. "
            "In order to batch actions, the action spaces from all environments must be equal."
        )
    return found._replace(observation_space=batched)


def needs_same_step(pool: VectorPool, face: str) -> VectorPool:
    """Refuse a vector env that does not reset an env in the step in which its episode ends.

    Raises:
        ConfigError: says what to pass to `make_vec`.
    """
    if pool.autoreset_mode is not AutoresetMode.SAME_STEP:
        raise ConfigError(
            f"{face} needs environments that reset in the step in which an episode ends, got "
            f"{pool.autoreset_mode.name}: pass autoreset='same_step' to make_vec"
        )
    return pool


class EnvPoolStyle:
    """EnvPool's asynchronous interface: every `recv` gives `batch_size` (or all) environments, whichever came first.

    The `pool` has `autoreset="same_step"`.
    """

    def __init__(self, pool: VectorPool, batch_size: int | None = None) -> None:
        self.pool = needs_same_step(pool, type(self).__name__)
        self.num_envs = pool.num_envs
        self.batch_size = check_whole(batch_size or pool.num_envs, "batch_size", 1)
        if self.batch_size > self.num_envs:
            raise ValueError(f"batch_size must be in [1, {self.num_envs}], got {batch_size}")
        self.observation_space, self.action_space = pool.single_observation_space, pool.single_action_space
        self._spare: list[tuple[Any, ...]] = []  # received and not returned
        self._held: dict[int, Any] = {}  # actions for workers of which other envs have none yet

    def async_reset(self, seed: int | None = None) -> None:
        """Begin an episode everywhere; the first observations come by `recv`.

        Steps in progress run to their end; their results are dropped.
        """
        seeds = seeds_per_env(seed, self.num_envs)
        with contextlib.suppress(Exception):  # they are dropped, also where one failed
            while self.pool.in_flight:
                self.pool.recv(self.num_envs)
        self._spare, self._held = [], {}
        self.pool.send_reset(range(self.num_envs), seeds)

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminated, truncated and infos of `batch_size` environments.

        `infos["env_id"]` says which they are, `infos["infos"]` has what each of them reported.
        """
        layout = self.pool.buffers.observations
        wanted = max(1, min(self.batch_size, len(self._spare) + len(self.pool.in_flight)))
        if len(self._spare) < wanted:
            ready = self.pool.recv(wanted - len(self._spare))
            leaves = layout.flatten(ready.observations)
            each = [[leaf[k] for leaf in leaves] for k in range(len(ready.ids))]
            self._spare += zip(ready.ids, each, *ready[2:], strict=True)
        taken, self._spare = self._spare[:wanted], self._spare[wanted:]
        ids, rows, *paid, infos = map(list, zip(*taken, strict=True))
        columns = [
            np.stack(column) if leaf.kind == "fixed" else column
            for leaf, column in zip(layout.leaves, zip(*rows, strict=True), strict=True)
        ]
        rewards, terminated, truncated = map(np.array, paid)
        info = {"env_id": np.array(ids, dtype=np.int64), "infos": infos}
        return layout.rebuild(columns), rewards, terminated, truncated, info

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Give these environments their next actions; without ids, all of them in order.

        Environments that share a worker begin to step when all of them have an action.
        """
        ids = range(self.num_envs) if env_id is None else [int(i) for i in env_id]
        self._held.update(zip(ids, one_each(actions, len(ids)), strict=True))
        for worker in self.pool.workers:
            if self._held.keys() >= set(worker.ids):
                self.pool.send(worker.ids, [self._held.pop(i) for i in worker.ids])

    def step(self, actions: Any, env_id: Any = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """`send`, then `recv`."""
        self.send(actions, env_id)
        return self.recv()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


class PufferStyle:
    """PufferLib's interface: `async_reset`, `recv` with env ids and a mask, `send` for the batch just received."""

    def __init__(self, pool: VectorPool, batch_size: int | None = None) -> None:
        self._inner = EnvPoolStyle(pool, batch_size)
        self.num_agents = self.num_envs = pool.num_envs
        self.agents_per_batch = self._inner.batch_size
        self.single_observation_space = pool.single_observation_space
        self.single_action_space = pool.single_action_space
        self._ids = np.arange(pool.num_envs)

    def async_reset(self, seed: int = 0) -> None:
        """Begin an episode everywhere, environment i with `seed + i`."""
        self._inner.async_reset(seed)

    def recv(self) -> tuple[Any, Any, Any, Any, list[dict[str, Any]], Any, Any]:
        """Observations, rewards, terminals, truncations, infos, env ids and mask of one batch."""
        obs, rewards, terminated, truncated, infos = self._inner.recv()
        self._ids = infos["env_id"]
        given = [info for info in infos["infos"] if info]
        return obs, rewards, terminated, truncated, given, self._ids, np.ones(len(self._ids), dtype=bool)

    def send(self, actions: Any) -> None:
        """The actions for the batch that `recv` gave."""
        self._inner.send(actions, self._ids)

    def reset(self, seed: int = 0) -> tuple[Any, list[dict[str, Any]]]:
        """`async_reset` and the first batch."""
        self.async_reset(seed)
        obs, _, _, _, infos, _, _ = self.recv()
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, list[dict[str, Any]]]:
        """`send`, then `recv`, without ids and mask."""
        self.send(actions)
        return self.recv()[:5]

    def close(self) -> None:
        """End the workers."""
        self._inner.close()


# --- what `SB3VecEnv` has its workers do: here, because importing Stable-Baselines3 takes seconds in every worker
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
