"""An environment's own batch behind the interface of `make_vec`: `backend="native"`.

It is another implementation of the environment, so it is only taken when named.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from shoal.core.data import check_step_result, deep_copy, info_of
from shoal.core.errors import ConfigError, EnvError, ShoalError
from shoal.core.executors import Closing
from shoal.envs.catalogue import find, named
from shoal.vector.backends.envpool import int32_seed
from shoal.vector.spaces import (
    FIXED,
    Layout,
    check_mask,
    check_options,
    check_whole,
    plain_seed,
    refuse_loss,
    seeds_per_env,
)
from shoal.vector.vector_env import one_at_a_time

if TYPE_CHECKING:
    from shoal.vector.make import Options

T = TypeVar("T")
HONOURED = ("backend", "autoreset", "check_nan", "copy")
"""The options of `make_vec` that do not need workers of shoal's."""


def make_native(
    env: Any,
    num_envs: int | None,
    env_kwargs: dict[str, Any] | None,
    wrappers: Sequence[Any],
    options: Options,
    *,
    any_autoreset: bool = False,
) -> NativeVectorEnv:
    """The native batch of an environment.

    Args:
        env: a Gymnasium id or spec with a `vector_entry_point`, `"ale:ID"`, `"envpool:ID"`, `"gymnax:ID"` (or
            `"jax:ID"`), `"jax:module:Class"`, an environment or class in gymnax's interface, or what returns a
            `VectorEnv` when called with `num_envs`.
        num_envs: how many (default: 1).
        env_kwargs: passed to what makes the batch.
        wrappers: of `make_vec`; refused.
        options: those of shoal's workers are refused. Autoreset is what the batch does by itself.
        any_autoreset: take the mode that the batch has, and that of `options` only where it has a choice.

    Raises:
        ConfigError: for what this batch does not do, and for environments without a batch.
    """
    num_envs = 1 if num_envs is None else check_whole(num_envs, "num_envs", 1)
    name = env if isinstance(env, str) else getattr(env, "id", getattr(env, "__name__", type(env).__name__))
    given = options.given() | ({"wrappers": tuple(wrappers)} if wrappers else {})
    refused = [f"{option}={value!r}" for option, value in given.items() if option not in HONOURED]
    if refused:
        raise ConfigError(
            f"backend='native' steps all of {name!r} in its own batch, which has no use for {', '.join(refused)}: "
            "leave that out, or use another backend (threads of a batch are set by env_kwargs; "
            "gymnasium.wrappers.vector has wrappers for the result)"
        )
    kwargs, mode = named(env_kwargs), options.autoreset
    make = _maker(env, name, kwargs, mode)
    try:
        batch = make(num_envs=num_envs, **kwargs)
    except ShoalError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the native batch of {name!r} cannot be made with {kwargs}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(batch, VectorEnv):
        raise TypeError(f"{name}(num_envs={num_envs}) must give a VectorEnv, got {type(batch).__name__}")
    own = batch.metadata.get("autoreset_mode")
    if any_autoreset and isinstance(own, AutoresetMode):
        mode = own
    if batch.num_envs != num_envs or own is not mode:
        batch.close()
        ours = own.name.lower() if isinstance(own, AutoresetMode) else own
        raise ConfigError(
            f"the native batch of {name!r} ({type(batch).__name__}) has num_envs={batch.num_envs} and "
            f"autoreset={ours!r} (its metadata['autoreset_mode']), got num_envs={num_envs} and "
            f"autoreset={mode.name.lower()!r}: pass autoreset={ours!r}, or use another backend"
        )
    return NativeVectorEnv(batch, str(name), mode, options.check_nan, options.copy)


def _maker(env: Any, name: Any, kwargs: dict[str, Any], mode: AutoresetMode) -> Callable[..., Any]:
    """The function that makes the batch, called with `num_envs` and the `kwargs`."""
    kind, _, rest = env.partition(":") if isinstance(env, str) else ("", "", "")
    if kind == "envpool":
        from shoal.vector.backends.envpool import EnvPoolBatch

        return functools.partial(EnvPoolBatch, rest)
    if kind in ("gymnax", "jax"):
        from shoal.vector.backends.jax import jax_batch

        return functools.partial(jax_batch, rest)
    if kind == "ale":
        env = f"ale_py:ALE/{rest}"
    env = cast(Any, find(env)) if isinstance(env, str) else env
    make = env
    if isinstance(env, EnvSpec) or (isinstance(env, type) and issubclass(env, gymnasium.Env)):
        entry = getattr(env, "vector_entry_point", None)
        if entry is None:
            raise ConfigError(
                f"backend='native' needs an environment with a vector_entry_point, got {name!r}, which has none; "
                "use another backend"
            )
        env = load_env_creator(entry) if isinstance(entry, str) else entry
        make = functools.partial(gymnasium.make_vec, make, vectorization_mode="vector_entry_point")
    elif hasattr(env, "default_params"):
        from shoal.vector.backends.jax import JaxVectorEnv

        return functools.partial(JaxVectorEnv, env() if isinstance(env, type) else env)
    elif not callable(env):
        raise TypeError(
            f"backend='native' needs an id, a spec, a JAX environment or what makes a batch, got {name}"
        )
    if "autoreset_mode" in inspect.signature(env).parameters:
        kwargs.setdefault("autoreset_mode", mode)
    return cast(Callable[..., Any], make)


def _is_atari(batch: Any) -> bool:
    return f"{type(batch).__module__}.{type(batch).__name__}" == "ale_py.vector_env.AtariVectorEnv"


def _abilities(batch: Any) -> dict[str, Any]:
    """Whether `reset` takes `seed_per_env` and a `reset_mask`; a batch of your own states it in its `metadata`."""
    known = isinstance(batch, SyncVectorEnv | AsyncVectorEnv) or _is_atari(batch)
    masked = batch.metadata.get("autoreset_mode") is AutoresetMode.DISABLED  # then Gymnasium demands it
    return {"seed_per_env": known, "reset_mask": known or masked, **batch.metadata}


class NativeVectorEnv(VectorWrapper[Any, Any, Any, Any, Any], Closing):
    """A native batch as `make_vec` gives it; `env` is the batch itself.

    Actions are checked before the batch sees them (a wrong index or shape ends the whole process in some), and
    what fails inside is raised as an `EnvError` with its cause; then only a whole `reset()` can follow.
    """

    def __init__(self, batch: Any, name: str, mode: AutoresetMode, check_nan: bool, copy: bool) -> None:
        super().__init__(batch)
        self.name = f"the native batch of {name!r} ({type(batch).__name__}, {self.num_envs} environments)"
        self._atari, self._abilities = _is_atari(batch), _abilities(batch)
        self.metadata = {**self._abilities, "autoreset_mode": mode}
        self._layout = Layout.of(batch.single_observation_space)
        self._check_nan = check_nan
        self._copies = copy and not self._atari  # ALE never writes again what it returned
        begin, finish = ("send", "recv") if self._atari else ("step_async", "step_wait")
        self._begin, self._finish = getattr(batch, begin, None), getattr(batch, finish, None)
        self._pending: Callable[[], Any] | None = None  # finishes the step that `step_async` began
        self._broken = "it was not reset yet"  # why only a whole reset can follow
        self._calls: dict[str, object] = {}
        self._steps, self._seconds, self._failures = 0, 0.0, 0

    @one_at_a_time
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]` where the batch can.

        Args:
            seed: None, an int, or one for each environment where the batch can. With an int, env i has
                `seed + i` in batches with a seed per environment; others seed all of it with the one number.
            options: passed to the batch.
        """
        mask = (check_options(options) or {}).get("reset_mask")
        self._check_idle("reset", begins=mask is None)
        if mask is not None:
            self._check_ability("reset_mask", "options['reset_mask']", "reset all of them")
            options = {**(options or {}), "reset_mask": check_mask(mask, self.num_envs).copy()}
        if isinstance(seed, Iterable):
            self._check_ability("seed_per_env", f"seed={seed!r}", "pass one int, which seeds all of it")
            seed = seeds_per_env(seed, self.num_envs)  # type: ignore[arg-type]
        else:
            seed = plain_seed(seed)
        if seed is not None and self._atari:
            seeds = [int32_seed(cast(int, one)) for one in seeds_per_env(seed, self.num_envs)]
            seed = np.array(seeds, dtype=np.int64)[slice(None) if mask is None else mask]
        return self._run("reset", lambda: self._first(self.env.reset(seed=seed, options=options)))

    def _first(self, answer: Any) -> tuple[Any, dict[str, Any]]:
        """The observations and infos of a reset."""
        obs, infos = check_step_result(answer, "reset")
        return self._checked(obs), info_of(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment with its action."""
        self.step_async(actions)
        return self.step_wait()

    @one_at_a_time
    def step_async(self, actions: Any) -> None:
        """Begin a step if the batch can; otherwise `step_wait` does all of it."""
        self._check_idle("step")
        actions = check_actions(self.single_action_space, actions, self.num_envs)
        self._seconds -= time.perf_counter()
        if self._begin is None or self._finish is None:
            self._pending = functools.partial(self.env.step, actions)
        else:
            self._run("step", functools.partial(self._begin, actions))
            self._pending = self._finish

    @one_at_a_time
    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`."""
        self._check_open()
        finish, self._pending = self._pending, None
        if finish is None:
            raise NoAsyncCallError("Calling `step_wait` without any prior call to `step_async`.", "step")
        result = self._run("step", lambda: self._stepped(finish()))
        self._steps += 1
        self._seconds += time.perf_counter()
        return result

    def _stepped(self, answer: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The parts of a step, with the ends of episodes as Gymnasium has them."""
        obs, rewards, terminated, truncated, infos = check_step_result(answer, "step")
        rewards = self._column("rewards", rewards, "biuf", np.float64)
        terminated = self._column("terminated", terminated, "biu", np.bool_)
        truncated = self._column("truncated", truncated, "biu", np.bool_)
        obs, infos, ended = self._checked(obs, rewards), info_of(infos), terminated | truncated
        if "final_obs" in infos and "_final_obs" not in infos:  # of all environments, as ALE has them
            last = final_observations(self._layout, infos["final_obs"], ended)
            infos = {**infos, "final_obs": last, "_final_obs": ended.copy()}
        return obs, rewards, terminated, truncated, infos

    def _column(self, word: str, given: Any, kinds: str, dtype: Any) -> Any:
        column = np.asarray(given)
        if column.shape != (self.num_envs,) or column.dtype.kind not in kinds:
            raise ValueError(f"expected {self.num_envs} {word}, got {column.shape} of {column.dtype}")
        return column.astype(dtype)

    def _checked(self, obs: Any, rewards: Any = None) -> Any:
        """The observations in the dtypes of their space, with a row for each environment; NaN is refused."""
        leaves, n_envs = self._layout.flatten(obs), self.num_envs
        for k, (leaf, rows) in enumerate(zip(self._layout.leaves, leaves, strict=True)):
            array = np.asarray(rows) if leaf.kind == "fixed" else np.empty(len(rows))
            if array.shape[:1] != (n_envs,) or array.size != n_envs * math.prod(leaf.shape):
                raise ValueError(
                    f"expected observations of {n_envs}, each of shape {leaf.shape}, got {rows!r:.80}"
                )
            if leaf.kind == "fixed":
                refuse_loss(array, leaf.dtype)
                leaves[k] = array.astype(leaf.dtype, copy=False)
        checks: list[tuple[str, Any, Any]] = [("NaN", np.isnan, column) for column in leaves]
        if rewards is not None:
            checks += [("NaN", np.isnan, rewards), ("an infinite reward", np.isinf, rewards)]
        for what, is_wrong, column in checks if self._check_nan else ():
            if isinstance(column, np.ndarray) and column.dtype.kind == "f" and is_wrong(column).any():
                wrong = np.flatnonzero(is_wrong(column).reshape(n_envs, -1).any(axis=1)).tolist()
                raise EnvError(f"got {what} from environments {wrong}")
        return self._layout.rebuild(leaves)

    def _run(self, operation: str, work: Callable[[], T]) -> T:
        """Call the batch; wrap its exceptions in EnvError."""
        self._broken = f"the last {operation} failed or was interrupted"
        try:
            result = work()
        except Exception as error:
            self._failures += 1
            raise EnvError(f"{self.name} failed in {operation}: {type(error).__name__}: {error}") from error
        self._broken = ""
        return cast(T, deep_copy(result)) if self._copies else result

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on {self.name}, after a call to `close()`.")

    def _check_idle(self, operation: str, *, begins: bool = False) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while waiting for a pending call to `step` to complete.", "step"
            )
        if self._broken and not begins:
            raise EnvError(f"{self.name}: {self._broken}: reset() all environments before `{operation}`")

    def _check_ability(self, ability: str, what: str, instead: str) -> None:
        if not self._abilities[ability]:
            raise EnvError(f"{self.name} does not support {what}; {instead}, or use another backend")

    def stats(self) -> dict[str, Any]:
        """The same keys as those of other backends."""
        idle = self._steps and self._pending is None
        return {
            "steps": self._steps,
            "step_seconds": self._seconds / self._steps if idle else math.nan,
            "restarts": [0] * self.num_envs,
            "failures": [self._failures] * self.num_envs,
            "workers": [],
        }

    @one_at_a_time
    def close(self, **kwargs: Any) -> None:
        """Close the batch."""
        super().close(**kwargs)


def check_actions(space: Space[Any], actions: Any, n_envs: int) -> Any:
    """A copy of one action for each environment, in the dtype of their space.

    Raises:
        ValueError: for another shape, dtype or index, which in a batch of C++ can end the process.
    """
    if not isinstance(space, FIXED):
        if not batch_space(space, n_envs).contains(actions):
            raise ValueError(f"expected {n_envs} actions of {space}, got {actions!r}")
        return deep_copy(actions)
    array, shape = np.asarray(actions), (n_envs, *(space.shape or ()))
    if array.shape != shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise ValueError(f"expected actions {shape} of {space.dtype}, got {array.shape} of {array.dtype}")
    if not isinstance(space, spaces.Box):  # Boxes clip or scale as they like
        start, end = _bounds(space)
        wrong = ((array < start) | (array >= end)).reshape(n_envs, -1).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"expected actions in {space}, got others from environments {np.flatnonzero(wrong).tolist()}"
            )
    return array.astype(space.dtype)


def _bounds(space: Any) -> tuple[Any, Any]:
    """The first index and the one after the last of every part of an action."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n
    return (space.start, space.start + space.nvec) if isinstance(space, spaces.MultiDiscrete) else (0, 2)


def final_observations(layout: Layout, obs: Any, ended: Any) -> Any:
    """A copy of the observation of each episode that ended, as Gymnasium has them in `final_obs`; else None."""
    final = np.full(len(ended), None, dtype=object)
    for i in np.flatnonzero(ended).tolist():
        final[i] = layout.map(lambda rows, i=i: np.array(rows[i]), obs)  # type: ignore[misc]
    return final
