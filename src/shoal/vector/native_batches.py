"""Batches of other libraries as plain `gymnasium.vector.VectorEnv`s: EnvPool, and environments written in JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.errors import ConfigError, MissingExtraError, missing_extra
from shoal.core.seeding import derive_seed


def tree(change: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """`change` of every array of nested dicts and tuples."""
    if isinstance(first, dict):
        return {key: tree(change, value, *(other[key] for other in rest)) for key, value in first.items()}
    if isinstance(first, tuple):
        return tuple(tree(change, *parts) for parts in zip(first, *rest, strict=True))
    return change(first, *rest)


def leaves(nested: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays of nested dicts and tuples."""
    if isinstance(nested, dict | tuple):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from leaves(part)
    else:
        yield np.asarray(nested)


def seed_each(seed: Any, n_envs: int) -> list[int]:
    """One seed for each environment: `seed + i`, or those of a list."""
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(n_envs)]
    if len(seed) != n_envs or any(not isinstance(one, int | np.integer) for one in seed):
        raise ValueError(f"expected {n_envs} integer seeds, got {list(seed)}")
    return [int(one) for one in seed]


def int32_seed(seed: int) -> int:
    """A seed for a batch that knows 31 bits: itself where it fits, else one derived from it."""
    return seed if 0 <= seed < 2**31 else derive_seed(seed, "native") % 2**31


class EnvPoolBatch(VectorEnv[Any, Any, Any]):
    """EnvPool with what its own Gymnasium face lacks: seeds at reset, batched spaces, whole rows after part of a reset.

    EnvPool takes seeds when it is made, so a reset with seeds makes it anew.

    Args:
        env_id: one of `envpool.list_all_envs()`.
        num_envs: how many.
        **settings: of `envpool.make_gymnasium`, such as `num_threads`, `batch_size`, `stack_num`.
    """

    def __init__(self, env_id: str, num_envs: int, **settings: Any) -> None:
        try:
            self._envpool = importlib.import_module("envpool")
        except ImportError as error:
            raise MissingExtraError(f"'envpool:{env_id}' needs EnvPool: run pip install envpool") from error
        self.num_envs, self._id, self._settings = num_envs, env_id, settings
        self._make(settings.pop("seed", int(np.random.SeedSequence().generate_state(1)[0] >> 1)))
        if self._pool.config.get("max_num_players", 1) != 1:
            raise ConfigError(f"expected one player in each environment, 'envpool:{env_id}' has several")
        self.batch_size = self._pool.config["batch_size"] or num_envs
        self.metadata = {**self._pool.metadata, "seed_per_env": True, "reset_mask": True}
        self.render_mode = self._pool.render_mode
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._last: Any = None

    def _make(self, seed: int | list[int]) -> None:
        self._pool = self._envpool.make_gymnasium(
            self._id, num_envs=self.num_envs, seed=seed, **self._settings
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all, or in those of `options["reset_mask"]` (without seeds)."""
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if given or (mask is not None and seed is not None):
            raise ValueError(f"expected a reset_mask or a seed, got {options} and seed={seed}")
        if seed is not None:
            self._make([int32_seed(one) for one in seed_each(seed, self.num_envs)])
        if mask is None:
            self._last, infos = self.restart(np.arange(self.num_envs))
            return self._last, infos
        ids = np.flatnonzero(mask)
        rows, told = self.restart(ids)

        def whole(old: Any, new: Any) -> Any:
            new, out = np.asarray(new), np.array(old)
            out[ids] = new
            return out

        self._last = tree(whole, self._last, rows)
        infos = {k: whole(np.zeros((self.num_envs, *v.shape[1:]), v.dtype), v) for k, v in told.items()}
        return self._last, infos | {f"_{key}": np.array(mask) for key in told}

    def restart(self, ids: Any) -> tuple[Any, dict[str, Any]]:
        """Reset some: their rows, in the order of `ids`."""
        rows, infos = self._pool.reset(np.asarray(ids, dtype=np.int32))
        order = _order(infos["env_id"], ids)
        return tree(lambda leaf: leaf[order], rows), {k: v[order] for k, v in _plain(infos).items()}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """`send` to all, then `recv`."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Begin to step all, or these."""
        self._pool.send(actions, env_ids)

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The step of all, in the order of the environments."""
        ids, *columns, infos = self.receive()
        order = _order(ids, np.arange(self.num_envs))
        self._last, *rest = (tree(lambda leaf: leaf[order], column) for column in columns)
        return (self._last, *rest, {k: v[order] for k, v in infos.items()})  # type: ignore[return-value]

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin to reset all; `receive` gives their first observations."""
        if seeds is not None:
            self._make([int32_seed(one) for one in seeds])
        self._pool.async_reset()

    def receive(self) -> tuple[Any, ...]:
        """Ids, observations, rewards, terminated, truncated, infos of those that are ready."""
        obs, rewards, terminated, truncated, infos = self._pool.recv()
        return infos["env_id"], obs, rewards.astype(np.float64), terminated, truncated, _plain(infos)

    def close_extras(self, **kwargs: Any) -> None:
        """End its threads."""
        self._pool = self._last = None


def _plain(infos: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in infos.items() if k not in ("env_id", "players") and isinstance(v, np.ndarray)}


def _order(ids: Any, wanted: Any) -> Any:
    """Where each of `wanted` is in `ids`."""
    if np.array_equal(ids, wanted):
        return slice(None)
    place = {int(env): row for row, env in enumerate(ids)}
    return np.array([place[int(env)] for env in wanted], dtype=np.intp)


def gymnax_batch(env_id: str, num_envs: int, **settings: Any) -> JaxVectorEnv:
    """An environment of gymnax by its id."""
    try:
        gymnax = importlib.import_module("gymnax")
    except ImportError as error:
        raise MissingExtraError(f"'gymnax:{env_id}' needs gymnax: run pip install gymnax") from error
    env, params = gymnax.make(env_id, **settings)
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
        mode = AutoresetMode.SAME_STEP
        self.metadata = {"autoreset_mode": mode, "seed_per_env": True, "reset_mask": True}
        self.single_observation_space = to_gymnasium(env.observation_space(self.params))
        self.single_action_space = to_gymnasium(env.action_space(self.params))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._jax, self._seed, self._resets = jax, seed, 0
        self._keys = self._counts = self._obs = self._state = cast(Any, None)  # of the episodes at play
        reset = env.reset_env if hasattr(env, "reset_env") else env.reset
        step = env.step_env if hasattr(env, "step_env") else env.step

        def reset_one(key: Any, params: Any) -> Any:
            return reset(key, params)

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

        self._reset_all = jax.jit(jax.vmap(reset_one, in_axes=(0, None)))
        self._step_all = jax.jit(jax.vmap(step_one, in_axes=(0, 0, 0, 0, None)))

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode everywhere, or where `options["reset_mask"]` says: env i with `seed + i`, or its own."""
        jax = self._jax
        if seed is None:
            seed = derive_seed(self._seed, "jax", self._resets)
            self._resets += 1
        words = [derive_seed(one, "jax-key") & 0xFFFFFFFF for one in seed_each(seed, self.num_envs)]
        keys = jax.vmap(jax.random.PRNGKey)(np.array(words, dtype=np.uint32))
        obs, state = self._reset_all(keys, self.params)
        counts = np.zeros(self.num_envs, dtype=np.uint32)
        mask = None if options is None else options.get("reset_mask")
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
        self._counts += 1
        self._obs, self._state, reward, over, cut, last, told = self._step_all(
            self._keys, self._counts, self._state, jax.numpy.asarray(actions), self.params
        )
        terminated, truncated = np.asarray(over), np.asarray(cut)
        ended = terminated | truncated
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
            jax.tree.map(np.asarray, self._obs),
            np.asarray(reward, dtype=np.float64),
            terminated,
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
