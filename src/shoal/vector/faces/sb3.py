"""A vector environment of shoal as a `VecEnv` of Stable-Baselines3 (imported when one is made)."""
# ruff: noqa: D102 (the other methods are documented in `VecEnv`)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from shoal.core.errors import ConfigError, MissingExtraError
from shoal.vector.env_group import call_attribute
from shoal.vector.faces.sb3_workers import is_wrapped, patched
from shoal.vector.make import make_vec
from shoal.vector.spaces import one_each
from shoal.vector.vector_env import VectorPool

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise MissingExtraError("SB3VecEnv needs Stable-Baselines3: run pip install stable-baselines3") from error


class SB3VecEnv(VecEnv):
    """Environments in worker processes for Stable-Baselines3.

    Where it takes `indices`, an env that is named twice is asked twice, one time after the other.

    Args:
        env_fns: functions that make the environments, or a `VectorPool` with `autoreset="same_step"`.
        start_method: "forkserver" (default), "spawn" or "fork".
        backend: of `make_vec`.
        **options: of `make_vec`: `num_workers`, `step_timeout`, `on_failure`, …
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]] | VectorPool,
        start_method: Any = None,
        *,
        backend: Any = "process",
        **options: Any,
    ) -> None:
        if isinstance(env_fns, VectorPool):
            given = [*options, *(["start_method"] if start_method is not None else [])]
            given += ["backend"] if backend != "process" else []
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: for environments that are made here; give it to make_vec instead"
                )
            if env_fns.autoreset_mode is not AutoresetMode.SAME_STEP:
                raise ConfigError(
                    "SB3VecEnv needs environments that reset in the step in which an episode ends, got "
                    f"{env_fns.autoreset_mode.name}: pass autoreset='same_step' to make_vec"
                )
            self.pool = env_fns
        else:
            self.pool = make_vec(
                [functools.partial(patched, fn) for fn in env_fns],
                backend=backend,
                start_method=start_method,
                autoreset="same_step",
                check_nan=options.pop("check_nan", False),
                **options,
            )
        self.waiting = False
        self.closed = False
        self.render_mode = self.pool.render_mode
        super().__init__(
            self.pool.num_envs, self.pool.single_observation_space, self.pool.single_action_space
        )
        self.metadata = self.pool.metadata
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]

    def reset(self) -> Any:
        """First observations everywhere, with the seeds and options set before."""
        # `set_options` with one dict notes that very dict for all.
        alike = all(options is self._options[0] for options in self._options) or not any(self._options)
        everyone = list(range(self.num_envs))
        for ids in [everyone] if alike else [[i] for i in everyone]:
            seeds, options = [self._seeds[i] for i in ids], self._options[ids[0]]
            for i, (_, info) in zip(ids, self.pool.reset_some(ids, seeds, options or None), strict=True):
                self.reset_infos[i] = info
        self._reset_seeds()
        self._reset_options()
        return self._stack(self.pool.observations())

    def step_async(self, actions: Any) -> None:
        if not isinstance(actions, np.ndarray):  # one for each, also of a space with parts
            room: Any = create_empty_array(self.action_space, self.num_envs)
            actions = concatenate(self.action_space, one_each(actions, self.num_envs), room)
        self.pool.step_async(actions)
        self.waiting = True

    def step_wait(self) -> Any:
        """Observations, rewards, dones and infos; an env that is done is reset at once."""
        obs, rewards, terminated, truncated, records = self.pool.step_wait_each()
        self.waiting = False
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i, final, final_info, info in records:
            if final_info is None:
                infos[i] = dict(info)
            else:
                infos[i] = {**final_info, "terminal_observation": final}
                self.reset_infos[i] = info
        for i, cut in enumerate((truncated & ~terminated).tolist()):
            infos[i]["TimeLimit.truncated"] = cut
        return self._stack(obs), rewards.astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        """End the workers."""
        if not self.closed:
            self.pool.close()
            self.closed = True

    def get_images(self) -> Sequence[Any]:
        """A frame of every environment, None where its render mode has none."""
        if self.render_mode != "rgb_array":
            return [None for _ in range(self.num_envs)]
        return list(self.pool.render())

    def has_attr(self, attr_name: str) -> bool:
        return all(self.pool.apply(methodcaller("has_wrapper_attr", attr_name)))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return self._apply(indices, methodcaller("get_wrapper_attr", attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self._apply(indices, setattr, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        return self._apply(indices, call_attribute, method_name, method_args, method_kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return self._apply(indices, is_wrapped, wrapper_class.__module__, wrapper_class.__qualname__)

    def _apply(self, indices: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
        """One answer for each of `indices`."""
        n, given = self.num_envs, list(self._get_indices(indices))
        if any(not -n <= i < n for i in given):
            raise IndexError(f"indices must be in [{-n}, {n}), got {given}")
        answers: list[Any] = [None] * len(given)
        left = dict(enumerate(i % n for i in given))
        while left:
            places = {i: place for place, i in reversed(left.items())}
            for i, answer in zip(places, self.pool.apply(function, *args, indices=list(places)), strict=True):
                answers[places[i]] = answer
                del left[places[i]]
        return answers

    def _stack(self, batch: Any) -> Any:
        # values of custom spaces come as a tuple of n; Stable-Baselines3 wants one array
        is_tuple = isinstance(self.observation_space, gymnasium.spaces.Tuple)
        return np.stack(batch) if isinstance(batch, tuple) and not is_tuple else batch
