"""Environments written in JAX as one vector env, in one compiled call."""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import EnvError, needs_extra
from shoal.core.seeding import derive_seed
from shoal.envs.adapters.library import library
from shoal.envs.catalogue import function_named
from shoal.vector.backends.native import final_observations
from shoal.vector.spaces import Layout, check_options, check_whole, seeds_per_env


def jax_batch(name: str, num_envs: int, **settings: Any) -> JaxVectorEnv:
    """An environment of gymnax by its id, or what the "module:Class" in gymnax's interface makes."""
    if ":" in name:
        return JaxVectorEnv(function_named(name, "the JAX environment")(**settings), num_envs)
    env, params = library("gymnax").make(name, **settings)
    return JaxVectorEnv(env, num_envs, params=params)


class JaxVectorEnv(VectorEnv[Any, Any, Any]):
    """All environments in one compiled call; episodes restart in the same step.

    Environment i draws from keys of `(seed of i, step)` alone, so it plays the same whatever `num_envs` is.

    Args:
        env: has `reset_env(key, params) -> (obs, state)` and
            `step_env(key, state, action, params) -> (obs, state, reward, done, info)` (or `reset` and `step`
            that do not reset by themselves), `observation_space(params)` and `action_space(params)`.
        num_envs: how many.
        params: of the env; default `env.default_params`.
        seed: for resets without a seed.
        truncation: `(state, params) -> bool`: whether an end was a time limit, for environments that count
            those as `done` (gymnax before 1.0); later ones have `is_truncated`, which is asked.
    """

    def __init__(
        self, env: Any, num_envs: int, *, params: Any = None, seed: int = 0, truncation: Any = None
    ) -> None:
        with needs_extra("JaxVectorEnv", "craftax"):
            import jax
        self.num_envs, self.env = check_whole(num_envs, "num_envs", 1), env
        self.params = env.default_params if params is None else params
        mode = AutoresetMode.SAME_STEP
        self.metadata = {"autoreset_mode": mode, "seed_per_env": True, "reset_mask": True}
        self.single_observation_space = to_gymnasium(env.observation_space(self.params))
        self.single_action_space = to_gymnasium(env.action_space(self.params))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._layout = Layout.of(self.single_observation_space)
        self._jax, self._seed, self._resets = jax, seed, 0
        self._keys = self._counts = self._obs = self._state = cast(Any, None)  # of the episodes at play
        reset = env.reset_env if hasattr(env, "reset_env") else env.reset
        step = env.step_env if hasattr(env, "step_env") else env.step

        def step_one(key: Any, count: Any, state: Any, action: Any, params: Any) -> Any:
            key = jax.random.fold_in(key, count)
            step_key, reset_key = jax.random.split(key)
            obs, after, reward, done, info = step(step_key, state, action, params)
            cut = truncation(after, params) & done if truncation is not None else False
            terminated = done & ~cut if truncation is not None else done
            if truncation is None and hasattr(env, "is_truncated"):
                cut = env.is_truncated(after, params)
            done = terminated | cut
            fresh_obs, fresh = reset(reset_key, params)
            pick = lambda new, old: jax.numpy.where(done, new, old)  # noqa: E731
            shown = jax.tree.map(pick, fresh_obs, obs)
            return shown, jax.tree.map(pick, fresh, after), reward, terminated, done & cut, obs, info

        self._reset_all = jax.jit(jax.vmap(reset, in_axes=(0, None)))
        self._step_all = jax.jit(jax.vmap(step_one, in_axes=(0, 0, 0, 0, None)))

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode everywhere, or where `options["reset_mask"]` says: env i with `seed + i`, or its own."""
        jax = self._jax
        mask = (check_options(options) or {}).get("reset_mask")
        if mask is not None and self._keys is None:
            raise EnvError("a reset_mask before the first reset: reset all first")
        if seed is None:
            seed = derive_seed(self._seed, "jax", self._resets)
            self._resets += 1
        seeds = cast(list[int], seeds_per_env(seed, self.num_envs))
        words = [derive_seed(one, "jax-key") & 0xFFFFFFFF for one in seeds]
        keys = jax.vmap(jax.random.PRNGKey)(np.array(words, dtype=np.uint32))
        obs, state = self._reset_all(keys, self.params)
        counts = np.zeros(self.num_envs, dtype=np.uint32)
        if mask is not None:
            place = jax.numpy.asarray(mask)
            old, new = (self._keys, self._counts, self._obs, self._state), (keys, counts, obs, state)
            keys, counts, obs, state = jax.tree.map(
                lambda a, b: jax.numpy.where(place.reshape(-1, *[1] * (b.ndim - 1)), b, a), old, new
            )
        self._keys, self._counts, self._obs, self._state = keys, np.array(counts), obs, state
        return jax.tree.map(np.asarray, obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all; the end of an episode is in `infos["final_obs"]`, as with other vector envs."""
        jax = self._jax
        if self._keys is None:
            raise EnvError("a step before the first reset: reset() first")
        self._counts += 1
        self._obs, self._state, reward, over, cut, last, info = self._step_all(
            self._keys, self._counts, self._state, jax.numpy.asarray(actions), self.params
        )
        terminated, truncated = np.asarray(over), np.asarray(cut)
        ended = terminated | truncated
        infos: dict[str, Any] = {k: np.asarray(v) for k, v in info.items() if hasattr(v, "shape")}
        if ended.any():
            final = final_observations(self._layout, jax.tree.map(np.asarray, last), ended)
            infos |= {"final_obs": final, "_final_obs": ended.copy()}
        shown = jax.tree.map(np.asarray, self._obs)
        return shown, np.asarray(reward, dtype=np.float64), terminated, truncated, infos


def to_gymnasium(space: Any) -> gymnasium.Space[Any]:
    """Gymnasium's space for one of gymnax's, recognized by its attributes, so that gymnax need not be installed."""
    if isinstance(space, gymnasium.Space):
        return space
    inner = getattr(space, "spaces", None)
    if isinstance(inner, dict):
        return spaces.Dict({key: to_gymnasium(item) for key, item in inner.items()})
    if isinstance(inner, list | tuple):
        return spaces.Tuple(tuple(to_gymnasium(item) for item in inner))
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low") and hasattr(space, "high"):
        dtype = np.dtype(space.dtype)
        low = np.broadcast_to(np.asarray(space.low, dtype=dtype), space.shape)
        high = np.broadcast_to(np.asarray(space.high, dtype=dtype), space.shape)
        return spaces.Box(low, high, tuple(space.shape), dtype.type)
    raise TypeError(f"expected a space of gymnax or Gymnasium, got {type(space).__name__}")
