"""JAX environments (the interface of gymnax and craftax) as one batched vector env; needs the extra `[craftax]`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import missing_extra
from shoal.core.seeding import derive_seed


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
        truncation: `(state, params) -> bool`: whether an end was a time limit; gymnax does not tell.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int,
        *,
        params: Any = None,
        seed: int = 0,
        truncation: Any = None,
    ) -> None:
        try:
            import jax
        except ImportError as error:
            raise missing_extra("JaxVectorEnv", "craftax") from error
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs, self.env = num_envs, env
        self.params = env.default_params if params is None else params
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = to_gymnasium(env.observation_space(self.params))
        self.single_action_space = to_gymnasium(env.action_space(self.params))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._jax, self._seed, self._resets = jax, seed, 0
        reset = env.reset_env if hasattr(env, "reset_env") else env.reset
        step = env.step_env if hasattr(env, "step_env") else env.step

        def reset_one(key: Any, params: Any) -> Any:
            return reset(key, params)

        def step_one(key: Any, count: Any, state: Any, action: Any, params: Any) -> Any:
            key = jax.random.fold_in(key, count)
            step_key, reset_key = jax.random.split(key)
            obs, after, reward, done, info = step(step_key, state, action, params)
            cut = truncation(after, params) if truncation is not None else False
            fresh_obs, fresh = reset(reset_key, params)
            pick = lambda new, old: jax.numpy.where(done, new, old)  # noqa: E731
            shown = jax.tree.map(pick, fresh_obs, obs)
            return shown, jax.tree.map(pick, fresh, after), reward, done, done & cut, obs, info

        self._reset_all = jax.jit(jax.vmap(reset_one, in_axes=(0, None)))
        self._step_all = jax.jit(jax.vmap(step_one, in_axes=(0, 0, 0, 0, None)))

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode everywhere: env i with `seed + i`, or with its own seed of a list."""
        del options
        jax = self._jax
        if seed is None:
            base = derive_seed(self._seed, "jax", self._resets)
            seeds = [base + i for i in range(self.num_envs)]
            self._resets += 1
        else:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} seeds, got {len(seeds)}")
        words = [derive_seed(item, "jax-key") & 0xFFFFFFFF for item in seeds]
        self._keys = jax.vmap(jax.random.PRNGKey)(np.array(words, dtype=np.uint32))
        self._counts = np.zeros(self.num_envs, dtype=np.uint32)
        obs, self._state = self._reset_all(self._keys, self.params)
        return jax.tree.map(np.asarray, obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all; the end of an episode is in `infos["final_obs"]`, as with other vector envs."""
        jax = self._jax
        self._counts += 1
        obs, self._state, reward, done, cut, last, told = self._step_all(
            self._keys, self._counts, self._state, jax.numpy.asarray(actions), self.params
        )
        ended, truncated = np.asarray(done), np.asarray(cut)
        infos: dict[str, Any] = {
            key: np.asarray(value) for key, value in told.items() if hasattr(value, "shape")
        }
        if ended.any():
            last = jax.tree.map(np.asarray, last)
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(ended).tolist():
                final[i] = jax.tree.map(lambda leaf, i=i: leaf[i], last)
            infos |= {"final_obs": final, "_final_obs": ended.copy()}
        return (
            jax.tree.map(np.asarray, obs),
            np.asarray(reward, dtype=np.float64),
            ended & ~truncated,
            truncated,
            infos,
        )


def to_gymnasium(space: Any) -> gymnasium.Space[Any]:
    """Gymnasium's space for one of gymnax's (told by what it has, so that gymnax need not be installed)."""
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
