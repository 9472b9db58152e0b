"""EnvPool as a plain `gymnasium.vector.VectorEnv`, for `backend="native"`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.envs.adapters.library import library
from shoal.vector.spaces import Layout, seeds_per_env


def int32_seed(seed: int) -> int:
    """A seed for a batch that knows 31 bits: itself where it fits, else one derived from it."""
    return seed if 0 <= seed < 2**31 else derive_seed(seed, "native") % 2**31


class EnvPoolBatch(VectorEnv[Any, Any, Any]):
    """EnvPool with seeds at reset, batched spaces, and whole rows after a partial reset.

    EnvPool takes seeds when it is made, so a reset with seeds makes it anew.

    Args:
        env_id: one of `envpool.list_all_envs()`.
        num_envs: how many.
        **settings: of `envpool.make_gymnasium`, such as `num_threads`, `stack_num`; no `batch_size`.
    """

    def __init__(self, env_id: str, num_envs: int, **settings: Any) -> None:
        self._envpool = library("envpool")
        self.num_envs, self._id, self._settings = num_envs, env_id, settings
        if settings.get("batch_size", num_envs) != num_envs:
            raise ConfigError(
                "all environments are stepped at once: leave batch_size out, or use EnvPool itself"
            )
        self._make(settings.pop("seed", int(np.random.SeedSequence().generate_state(1)[0] >> 1)))
        if self._pool.config.get("max_num_players", 1) != 1:
            raise ConfigError(f"expected one player in each environment, 'envpool:{env_id}' has several")
        self.metadata = {**self._pool.metadata, "seed_per_env": True, "reset_mask": True}
        self.render_mode = self._pool.render_mode
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._layout = Layout.of(self.single_observation_space)
        self._last: list[Any] = []  # the leaves of the present observations

    def _make(self, seed: int | list[int]) -> None:
        make = self._envpool.make_gymnasium
        self._pool = make(self._id, num_envs=self.num_envs, seed=seed, **self._settings)
        self._at_work = False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all, or in those of `options["reset_mask"]` (without seeds)."""
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if given or (mask is not None and seed is not None):
            raise ValueError(f"expected a reset_mask or a seed, got {options} and seed={seed}")
        if seed is not None:
            self._make([int32_seed(one) for one in seeds_per_env(seed, self.num_envs)])  # type: ignore[arg-type]
        if self._at_work:  # a step that was broken off
            self.step_wait()
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        obs, info = self._pool.reset(ids.astype(np.int32))
        rows = _sorted(info["env_id"], self._layout.flatten(obs))
        infos = dict(zip(_columns(info), _sorted(info["env_id"], _columns(info).values()), strict=True))
        if mask is None:
            self._last = rows
            return self._layout.rebuild(rows), infos
        self._last = [leaf.copy() for leaf in self._last]
        for leaf, new in zip(self._last, rows, strict=True):
            leaf[ids] = new
        whole: dict[str, Any] = {}
        for key, column in infos.items():
            whole[key] = np.zeros((self.num_envs, *column.shape[1:]), column.dtype)
            whole[key][ids], whole[f"_{key}"] = column, np.array(mask)
        return self._layout.rebuild(self._last), whole

    def step_async(self, actions: Any) -> None:
        """Begin to step all."""
        self._pool.send(actions)
        self._at_work = True

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The step of all, in the order of the environments."""
        obs, rewards, terminated, truncated, infos = self._pool.recv()
        self._at_work = False
        ids, named = infos["env_id"], _columns(infos)
        self._last = _sorted(ids, self._layout.flatten(obs))
        paid = rewards.astype(np.float64), terminated, truncated
        rewards, terminated, truncated, *columns = _sorted(ids, [*paid, *named.values()])
        infos = dict(zip(named, columns, strict=True))
        return self._layout.rebuild(self._last), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """End its threads."""
        self._pool = None


def _columns(infos: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in infos.items() if k not in ("env_id", "players") and isinstance(v, np.ndarray)}


def _sorted(ids: Any, columns: Iterable[Any]) -> list[Any]:
    """The rows of these environments in the order of the environments."""
    if (ids[1:] > ids[:-1]).all():
        return list(columns)
    order = np.argsort(ids)
    return [column[order] for column in columns]
