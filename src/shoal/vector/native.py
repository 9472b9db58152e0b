"""An environment's own batch behind the interface of `make_vec`: `backend="native"`.

It is another implementation of the environment, so it is only taken when named, and what it cannot do is refused.
"""
# ruff: noqa: D102 (what the others are for is told where `VectorEnv` has them)

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.core.data import check_step_result, deep_copy
from shoal.core.errors import ConfigError, EnvError, ShoalError, missing_extra
from shoal.core.seeding import derive_seed
from shoal.envs.adapters.library import library
from shoal.envs.catalogue import find, named
from shoal.vector.arguments import check_options, check_whole
from shoal.vector.infos import Ready
from shoal.vector.spaces import refuse_loss

if TYPE_CHECKING:
    from shoal.vector.make import Options

INSTEAD = {  # what only shoal's own workers do, and what to do here
    "num_workers": "env_kwargs={'num_threads': …} where the batch has threads",
    "start_method": "leave it out: a batch has no processes",
    "step_timeout": "backend='process', which can kill what hangs",
    "make_timeout": "backend='process', which can kill what hangs",
    "ray_options": "leave it out: a batch runs in this process",
    "on_failure": "backend='process', which can replace one environment",
    "max_restarts": "backend='process', which can replace one environment",
    "threads": "env_kwargs={'num_threads': …} where the batch has threads",
    "wrappers": "a wrapper of gymnasium.wrappers.vector around the result, or another backend",
}
NOT_HERE = ("step_some", "reset_some", "apply", "call", "call_async", "call_wait", "get_attr", "set_attr",
            "observations")  # fmt: skip


class RefusedError(EnvError, AttributeError):
    """A call that a native batch does not offer (so `hasattr` is False for it)."""


class Abilities(NamedTuple):
    """What a batch keeps to; a batch of your own says so in its `metadata`, by the first two names."""

    seed_per_env: bool = False  # reset(seed=[…]); else one int for all
    reset_mask: bool = False  # options["reset_mask"] leaves the others alone
    split_step: bool = False  # send(actions) begins a step, recv() ends it
    fresh: bool = False  # what it returned is never written again


def abilities_of(batch: Any) -> Abilities:
    """What is known of a batch: of these classes by test, of others by what they say."""
    if _is_atari(batch):
        return Abilities(True, True, True, True)
    if isinstance(batch, SyncVectorEnv | AsyncVectorEnv):
        return Abilities(True, True)
    said = batch.metadata
    must = said["autoreset_mode"] is AutoresetMode.DISABLED  # then Gymnasium demands masked resets
    split = isinstance(batch, EnvPoolBatch)
    return Abilities(bool(said.get("seed_per_env")), bool(said.get("reset_mask", must)), split)


def _is_atari(batch: Any) -> bool:
    return f"{type(batch).__module__}.{type(batch).__name__}" == "ale_py.vector_env.AtariVectorEnv"


def make_native(
    env: Any,
    num_envs: int | None,
    env_kwargs: dict[str, Any] | None,
    wrappers: Sequence[Any],
    options: Options,
) -> NativeVectorEnv:
    """The batch that an environment brings itself.

    Args:
        env: a Gymnasium id or spec with a `vector_entry_point`, `"envpool:ID"`, `"gymnax:ID"`, an environment
            or class in gymnax's interface, or what returns a `VectorEnv` when called with `num_envs`.
        num_envs: how many.
        env_kwargs: passed to what makes the batch.
        wrappers: of `make_vec`; refused.
        options: those of shoal's workers are refused. Autoreset is what the batch does by itself; "same_step"
            too where a masked reset gives exactly that.

    Raises:
        ConfigError: for all that this batch cannot honour, and for environments without a batch.
    """
    if num_envs is None:
        raise ValueError("num_envs is needed for backend='native'")
    num_envs = check_whole(num_envs, "num_envs", 1)
    given = options.given() | ({"wrappers": tuple(wrappers)} if wrappers else {})
    refused = [f"{name}={given[name]!r} (do this: {INSTEAD[name]})" for name in given if name in INSTEAD]
    name = env if isinstance(env, str) else getattr(env, "id", getattr(env, "__name__", type(env).__name__))
    if refused:
        raise ConfigError(
            f"backend='native' steps all of {name!r} in its own batch; expected none of "
            f"shoal's workers' options, got {'; '.join(refused)}"
        )
    batch = _open(env, name, num_envs, named(env_kwargs), options.autoreset)
    problem = _mismatch(batch, num_envs, options.autoreset)
    if problem is not None:
        with contextlib.suppress(Exception):  # what is wrong with it is what is told
            batch.close()
        raise ConfigError(f"the native batch of {name!r} ({type(batch).__name__}) {problem}")
    copies = options.copy
    return NativeVectorEnv(batch, str(name), options.autoreset, options.check_nan, copies)


def _open(env: Any, name: Any, num_envs: int, kwargs: dict[str, Any], mode: AutoresetMode) -> Any:
    make = _maker(env, name, num_envs, kwargs, mode)
    try:
        batch = make(num_envs=num_envs, **kwargs)
    except ShoalError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the native batch of {name!r} cannot be made with {kwargs}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(batch, VectorEnv):
        if isinstance(batch, gymnasium.Env):
            batch.close()
        raise TypeError(f"{name}(num_envs={num_envs}) must give a VectorEnv, got {type(batch).__name__}")
    return batch


def _maker(
    env: Any, name: Any, num_envs: int, kwargs: dict[str, Any], mode: AutoresetMode
) -> Callable[..., Any]:
    if isinstance(env, str) and env.startswith("envpool:"):
        return functools.partial(EnvPoolBatch, env.removeprefix("envpool:"))
    if isinstance(env, str) and env.startswith("gymnax:"):
        return functools.partial(gymnax_batch, env.removeprefix("gymnax:"))
    env = cast(Any, find(env)) if isinstance(env, str) else env
    single = isinstance(env, type) and issubclass(env, gymnasium.Env)
    if single or isinstance(env, gymnasium.envs.registration.EnvSpec):
        entry = getattr(env, "vector_entry_point", None)
        if entry is None:
            raise ConfigError(
                f"backend='native' needs an environment with a vector_entry_point, got {name!r}, which has none; "
                "use another backend"
            )
        load = gymnasium.envs.registration.load_env_creator
        _tell_mode(load(entry) if isinstance(entry, str) else entry, kwargs, mode)
        return functools.partial(gymnasium.make_vec, env, vectorization_mode="vector_entry_point")
    jax_env = env() if isinstance(env, type) and hasattr(env, "default_params") else env
    if hasattr(jax_env, "default_params"):
        return functools.partial(JaxVectorEnv, jax_env)
    if not callable(env):
        raise TypeError(
            f"backend='native' needs an id, a spec, a JAX environment or what makes a batch, got {name}"
        )
    _tell_mode(env, kwargs, mode)
    return functools.partial(env)


def _tell_mode(make: Callable[..., Any], kwargs: dict[str, Any], mode: AutoresetMode) -> None:
    """Ask a batch for an autoreset mode if it takes one."""
    if "autoreset_mode" in inspect.signature(make).parameters:
        kwargs.setdefault("autoreset_mode", mode)


def _mismatch(batch: Any, num_envs: int, mode: AutoresetMode) -> str | None:
    needed = ("num_envs", "metadata", "single_observation_space", "single_action_space")
    if missing := [name for name in needed if getattr(batch, name, None) is None]:
        return f"must have what every VectorEnv has, got none of {', '.join(missing)}"
    if batch.num_envs != num_envs or getattr(batch, "batch_size", num_envs) not in (0, num_envs):
        if not isinstance(batch, EnvPoolBatch):
            return f"must step {num_envs} environments at once, got num_envs={batch.num_envs}, batch_size too"
        if mode is not AutoresetMode.NEXT_STEP:
            return "resets one step later when batch_size < num_envs; pass autoreset='next_step'"
    own = batch.metadata.get("autoreset_mode")
    if not isinstance(own, AutoresetMode):
        return f"must tell its AutoresetMode in metadata['autoreset_mode'], got {own!r}"
    if own is mode or (mode is AutoresetMode.SAME_STEP and abilities_of(batch).reset_mask):
        return None
    ours = own.name.lower()
    return (
        f"has autoreset={ours!r}, got {mode.name.lower()!r}; pass autoreset={ours!r} or use another backend"
    )


class NativeVectorEnv(VectorEnv[Any, Any, Any]):
    """A native batch as `make_vec` gives it; `batch` is what lies beneath.

    Actions are checked before the batch sees them (a wrong index or shape ends the whole process in some), and
    what fails inside is told as an `EnvError` with its cause; then `reset()` begins again.
    """

    def __init__(self, batch: Any, name: str, mode: AutoresetMode, check_nan: bool, copy: bool) -> None:
        self.batch, self.num_envs, self.can = batch, batch.num_envs, abilities_of(batch)
        self.name = f"the native batch of {name!r} ({type(batch).__name__}, {self.num_envs} environments)"
        self._adapts = batch.metadata["autoreset_mode"] is not mode
        self.metadata = {**batch.metadata, "autoreset_mode": mode}
        self.render_mode, self.spec = batch.render_mode, batch.spec
        self.single_observation_space = batch.single_observation_space
        self.single_action_space = batch.single_action_space
        self.observation_space = batch_space(batch.single_observation_space, self.num_envs)
        self.action_space = batch_space(batch.single_action_space, self.num_envs)
        self.active = np.ones(self.num_envs, dtype=np.bool_)
        self._bounds = _bounds(batch.single_action_space)
        self._check_nan, self._copies = check_nan, copy and not self.can.fresh
        self.batch_size: int = getattr(batch, "batch_size", 0) or self.num_envs  # answered at a time
        self._begun, self._since = False, 0.0
        self._state: str | None = None
        self._pending: Any = None
        self._flying: set[int] = set()
        self._seconds: deque[float] = deque(maxlen=1024)
        self._failures = 0
        self._alone = threading.RLock()  # held by the thread that is at something

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]` where the batch can.

        Args:
            seed: None, an int, or one for each environment where the batch can. With an int, env i has
                `seed + i` in batches with a seed per environment; others seed all of it with the one number.
            options: passed to the batch.
        """
        self._idle("reset")
        self._whole("reset")
        mask = (check_options(options) or {}).get("reset_mask")
        if mask is not None:
            self._refuse(not self.can.reset_mask, "options['reset_mask']", "reset all, or another backend")
            if np.shape(mask) != (self.num_envs,) or np.asarray(mask).dtype != np.bool_ or not np.any(mask):
                raise ValueError(f"reset_mask must be {self.num_envs} booleans, one of them True, got {mask}")
            self._refuse(not self._begun, "a reset_mask before the first reset", "reset all")
            options = {**(options or {}), "reset_mask": np.array(mask)}
        if seed is not None and not isinstance(seed, int | np.integer):
            self._refuse(not self.can.seed_per_env, f"seed={seed!r}", "one int, which seeds all of it")
            seed = seed_each(seed, self.num_envs)
        elif seed is not None:
            seed = int(seed)
        obs, infos = self._run("reset", lambda: self._pair(self._seeded(seed, mask, options)))
        self._begun = True
        self._examine("reset", obs)
        return self._mine(obs), self._mine(infos)

    def _seeded(self, seed: Any, mask: Any, options: dict[str, Any] | None) -> Any:
        given = None if options is None else dict(options)
        if _is_atari(self.batch) and seed is not None:
            seeds = np.array([int32_seed(one) for one in seed_each(seed, self.num_envs)], dtype=np.int64)
            return self.batch.reset(seed=seeds if mask is None else seeds[mask], options=given)
        return self.batch.reset(seed=seed, options=given)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step where the batch can; else `step_wait` does it all."""
        self._idle("step")
        self._whole("step")
        self._refuse(not self._begun, "a step before reset() (or after a failure)", "reset() first")
        self._pending, self._since = self._checked(actions, range(self.num_envs)), time.perf_counter()
        if self.can.split_step:
            self._run("step", lambda: self.batch.send(self._pending))
        self._state = "step"

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`."""
        self._refuse(timeout is not None, "step_wait(timeout=)", "no timeout")
        self._expect("step")
        with self._held("step"):
            return self._stepped()

    def _stepped(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        native = self.batch.recv if self.can.split_step else lambda: self.batch.step(self._pending)
        obs, *arrays, infos = self._run("step", lambda: self._five(native()))
        self._seconds.append(time.perf_counter() - self._since)
        rewards, terminated, truncated = arrays
        ended = terminated | truncated
        self._examine("step", obs, rewards)
        if self._adapts and ended.any():
            final, infos = _column(obs, self.num_envs, ended), deep_copy(infos)  # reset may write into both
            given = {"reset_mask": ended.copy()}
            obs, told = self._run("reset", lambda: self._pair(self.batch.reset(options=given)))
            self._examine("reset", obs)
            ends = {"final_obs": final, "_final_obs": ended.copy()}
            ends |= {"final_info": _only(ended, infos), "_final_info": ended.copy()}
            infos = {**_where(ended, told, infos), **ends}
        elif "final_obs" in infos and "_final_obs" not in infos:
            final = self._run("step", lambda: _column(infos["final_obs"], self.num_envs, ended))
            infos = {**infos, "final_obs": final, "_final_obs": ended.copy()}
        return self._mine(obs), rewards, terminated, truncated, self._mine(infos)

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Begin a reset; `reset_wait` returns its result."""
        self._pending, self._state = self.reset(seed=seed, options=options), "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        self._expect("reset")
        result: tuple[Any, dict[str, Any]] = self._pending
        return result

    def send_reset(self, env_ids: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        """Begin to reset all environments (EnvPool only); `recv` returns their first observations."""
        self._idle("send_reset")
        self._apart("send_reset")
        everyone = sorted(int(i) for i in env_ids) == list(range(self.num_envs))
        self._refuse(not everyone, "send_reset of some", "send_reset(range(num_envs))")
        if seeds is not None:
            seeds = seed_each(list(seeds), self.num_envs)
        self._run("send_reset", lambda: self.batch.begin(seeds))
        self._begun, self._flying = True, set(range(self.num_envs))

    def send(self, env_ids: Sequence[int], actions: Any) -> None:
        """Begin to step these environments (EnvPool only); `recv` returns them."""
        self._idle("send", flying=self.batch_size < self.num_envs)
        self._apart("send")
        self._refuse(not self._begun, "send before reset() or send_reset()", "reset first")
        ids = [check_whole(i, "an index", 0) for i in env_ids]
        if not ids or len(set(ids)) != len(ids) or not {*ids} <= {*range(self.num_envs)} - self._flying:
            raise ValueError(
                f"env_ids must be different numbers in [0, {self.num_envs}) that are not in flight, got {ids}"
            )
        given = self._checked(actions, ids)
        self._run("send", lambda: self.batch.send(given, np.array(ids, dtype=np.int32)))
        self._flying |= {*ids}

    def recv(self, min_envs: int = 1, timeout: float | None = None) -> Any:
        """At least `min_envs` of those in flight, in whole batches of EnvPool's `batch_size`, as `Ready`."""
        self._idle("recv", flying=True)
        self._apart("recv")
        self._refuse(timeout is not None, "recv(timeout=)", "no timeout")
        size = self.batch_size if self.batch_size < self.num_envs else max(1, len(self._flying))
        rounds = -(-max(1, min_envs) // size)
        if len(self._flying) < rounds * size:
            raise RefusedError(
                f"{self.name} answers {size} at a time, so recv(min_envs={min_envs}) needs {rounds * size} in "
                f"flight, got {len(self._flying)}; send more"
            )
        parts = [self._run("recv", self.batch.receive) for _ in range(rounds)]
        ids = np.concatenate([part[0] for part in parts])
        obs, rewards, terminated, truncated = (
            tree(lambda *rows: np.concatenate(rows), *column) for column in zip(*(p[1:5] for p in parts), strict=True)
        )  # fmt: skip
        told = [{k: v[j] for k, v in part[5].items()} for part in parts for j in range(len(part[0]))]
        self._flying -= {*ids.tolist()}
        self._examine("recv", obs, rewards, ids=ids)
        ended = np.flatnonzero(terminated | truncated)
        if self._adapts and len(ended):
            fresh, news = self._run("reset", lambda: self.batch.restart(ids[ended]))
            for k, j in enumerate(ended.tolist()):
                last = tree(lambda leaf, j=j: leaf[j].copy(), obs)
                told[j] = {**{key: v[k] for key, v in news.items()}, "final_obs": last, "final_info": told[j]}
            tree(lambda all_, new: all_.__setitem__(ended, new), obs, fresh)
        return Ready(ids.astype(np.int64), obs, rewards, terminated, truncated, told)

    def stats(self) -> dict[str, Any]:
        """As that of other backends."""
        none = [0] * self.num_envs
        times = self._seconds
        return {"steps": len(times), "step_seconds": sum(times) / len(times) if times else math.nan,
                "restarts": none, "failures": [self._failures] * self.num_envs, "active": self.num_envs,
                "workers": []}  # fmt: skip

    def render(self) -> Any:
        return self.batch.render()

    def close_extras(self, **kwargs: Any) -> None:
        with self._alone:  # after what another thread is at
            self._pending = None
            self.batch.close()

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise RefusedError(f"{self.name} has no {name}: expected reset, step; use another backend for it")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self, unless: bool, what: str, instead: str) -> None:
        if unless:
            raise RefusedError(f"{self.name} cannot take {what}; do this: {instead}")

    def _whole(self, operation: str) -> None:
        if self.batch_size < self.num_envs:
            what = f"{operation}: it answers {self.batch_size} at a time"
            self._refuse(True, what, "send_reset(range(num_envs)), then recv and send")

    def _apart(self, operation: str) -> None:
        self._refuse(not isinstance(self.batch, EnvPoolBatch), operation, "step, or another backend")

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on {self.name}, after a call to `close()`.")

    def _expect(self, operation: str) -> None:
        self._check_open()
        if self._state != operation:
            said = f"Calling `{operation}_wait` without any prior call to `{operation}_async`."
            raise NoAsyncCallError(said, operation)
        self._state = None

    def _idle(self, operation: str, *, flying: bool = False) -> None:
        self._check_open()
        pending = self._state or ("recv" if self._flying and not flying else None)
        if pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while waiting for a pending call to `{pending}` to complete.", pending
            )

    def _run(self, operation: str, work: Callable[[], Any]) -> Any:
        """Let the batch work; what it raises is told as its own, and nobody knows where it stands after that."""
        with self._held(operation):
            try:
                return work()
            except BaseException as error:
                self._begun, self._flying, self._failures = False, set(), self._failures + 1
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise EnvError(
                    f"{self.name} failed in {operation}: {type(error).__name__}: {error}"
                ) from error

    @contextlib.contextmanager
    def _held(self, operation: str) -> Iterator[None]:
        """Of two threads at once the second is told so."""
        if not self._alone.acquire(blocking=False):
            said = f"Calling `{operation}` while another thread waits for a call to complete."
            raise AlreadyPendingCallError(said, operation)
        try:
            yield
        finally:
            self._alone.release()

    def _checked(self, actions: Any, ids: Sequence[int]) -> Any:
        """A copy of the actions, as the batch wants them."""
        space = self.single_action_space
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box | spaces.MultiBinary):
            if not batch_space(space, len(ids)).contains(actions):
                raise ValueError(f"expected {len(ids)} actions of {space}, got {actions!r}")
            return deep_copy(actions)
        array, shape = np.asarray(actions), (len(ids), *(space.shape or ()))
        if array.shape != shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise ValueError(f"expected actions {shape} of {space.dtype}, got {array.shape} of {array.dtype}")
        if self._bounds is not None:
            wrong = (array < self._bounds[0]) | (array >= self._bounds[1])
            if wrong.any():
                who = np.array(ids)[wrong.reshape(len(ids), -1).any(axis=1)].tolist()
                raise ValueError(f"expected actions in {space}, got others from environments {who}")
        return array.astype(space.dtype)

    def _examine(self, operation: str, obs: Any, rewards: Any = None, *, ids: Any = None) -> None:
        if not self._check_nan:
            return
        seen = [] if rewards is None else [rewards]
        tree(lambda leaf: seen.append(np.asarray(leaf)), obs)
        what, wrong = "NaN", [np.isnan(leaf) for leaf in seen if leaf.dtype.kind == "f"]
        if rewards is not None and not any(places.any() for places in wrong):
            what, wrong = "an infinite reward", [np.isinf(rewards)]
        if any(places.any() for places in wrong):
            self._begun, self._failures = False, self._failures + 1
            rows = np.arange(self.num_envs) if ids is None else ids
            who = rows[
                np.any([places.reshape(len(rows), -1).any(axis=1) for places in wrong], axis=0)
            ].tolist()
            raise EnvError(
                f"{self.name} gave {what} in {operation}: environments {who}; reset() begins again"
            )

    def _mine(self, obs: Any) -> Any:
        return deep_copy(obs) if self._copies else obs

    def _pair(self, result: Any) -> tuple[Any, dict[str, Any]]:
        obs, infos = check_step_result(result, "reset")
        if not isinstance(infos, dict):
            raise ValueError(f"expected infos as a dict, got {infos!r:.80}")
        return _rows(obs, self.single_observation_space, self.num_envs), infos

    def _five(self, result: Any) -> tuple[Any, ...]:
        obs, paid, terminated, truncated, infos = check_step_result(result, "step")
        rewards, *flags = map(np.asarray, (paid, terminated, truncated))
        kinds = [rewards.dtype.kind in "biuf", *(flag.dtype.kind in "biu" for flag in flags)]
        if kinds != [True] * 3 or any(column.shape != (self.num_envs,) for column in (rewards, *flags)):
            told = ", ".join(f"{column.shape} of {column.dtype}" for column in (rewards, *flags))
            raise ValueError(f"expected {self.num_envs} rewards, terminated and truncated, got {told}")
        obs, infos = self._pair((obs, infos))
        return obs, np.array(rewards, np.float64), *(np.array(flag, np.bool_) for flag in flags), infos


def _bounds(space: Any) -> tuple[Any, Any] | None:
    """The first index and the one after the last of every part of an action."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec
    return (0, 2) if isinstance(space, spaces.MultiBinary) else None


def _rows(obs: Any, space: Any, n_envs: int) -> Any:
    """Observations as arrays with a row for each environment, as the space has them."""
    if isinstance(space, spaces.Dict) and isinstance(obs, dict) and obs.keys() == space.spaces.keys():
        return {key: _rows(obs[key], part, n_envs) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(obs, tuple) and len(obs) == len(space.spaces):
        return tuple(_rows(rows, part, n_envs) for rows, part in zip(obs, space.spaces, strict=True))
    rows, fits = obs, obs is not None and not isinstance(space, spaces.Dict | spaces.Tuple)
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        rows = np.asarray(obs)
        fits = rows.dtype.kind in "biuf" and rows.size == n_envs * math.prod(space.shape or ())
        if fits:
            refuse_loss(rows, space.dtype)
            rows = rows.astype(space.dtype, copy=False)
    if not fits or (isinstance(rows, np.ndarray) and rows.shape[:1] != (n_envs,)):
        told = f"got {obs!r:.80} of shape {getattr(rows, 'shape', ())}, not of {space}"
        raise ValueError(f"expected observations of {n_envs}, {told}")
    return rows


def _column(obs: Any, n_envs: int, ended: Any) -> Any:
    """The observations of those that ended, one object each, as Gymnasium has them in `final_obs`."""
    final = np.full(n_envs, None, dtype=object)
    for i in np.flatnonzero(ended).tolist():
        final[i] = tree(lambda leaf, i=i: np.array(leaf[i]), obs)
    return final


def _where(ended: Any, told: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
    """Infos of a step in which some began anew: theirs from the reset, the others' from the step."""
    out = {key: value for key, value in told.items() if key in infos or key.removeprefix("_") not in infos}
    for key, old in infos.items():
        new = told.get(key)
        if isinstance(old, dict):
            out[key] = _where(ended, new or {}, old)
        elif isinstance(old, np.ndarray) and old.shape[:1] == ended.shape:
            out[key] = _picked(ended, _nothing(old) if new is None else new, old)
    return out


def _only(ended: Any, infos: dict[str, Any]) -> dict[str, Any]:
    """Of the infos of a step what those that ended told, as Gymnasium has it in `final_info`."""
    out: dict[str, Any] = {}
    for key, value in infos.items():
        who = ended & infos.get(f"_{key}", True)
        if isinstance(value, dict):
            value = _only(ended, value)
        elif isinstance(value, np.ndarray) and value.shape[:1] == ended.shape:
            value = _picked(who, value, _nothing(value))
        if who.any() and not (key.startswith("_") and key[1:] in infos):
            out[key], out[f"_{key}"] = value, who
    return out


def _picked(who: Any, these: Any, others: Any) -> Any:
    return np.where(who.reshape(-1, *[1] * (np.ndim(others) - 1)), these, others)


def _nothing(like: Any) -> Any:
    return np.full_like(like, None) if like.dtype == object else np.zeros_like(like)


# --- batches of other libraries as plain `gymnasium.vector.VectorEnv`s: EnvPool, and environments written in JAX
def tree(change: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """`change` of every array of nested dicts and tuples."""
    if isinstance(first, dict):
        return {key: tree(change, value, *(other[key] for other in rest)) for key, value in first.items()}
    if isinstance(first, tuple):
        return tuple(tree(change, *parts) for parts in zip(first, *rest, strict=True))
    return change(first, *rest)


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
        self._envpool = library("envpool")
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
        make = self._envpool.make_gymnasium
        self._pool = make(self._id, num_envs=self.num_envs, seed=seed, **self._settings)

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
    env, params = library("gymnax").make(env_id, **settings)
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
        try:
            import jax
        except ImportError as error:
            raise missing_extra("JaxVectorEnv", "craftax") from error
        self.num_envs, self.env = check_whole(num_envs, "num_envs", 1), env
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
        words = [derive_seed(one, "jax-key") & 0xFFFFFFFF for one in seed_each(seed, self.num_envs)]
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
        self._obs, self._state, reward, over, cut, last, told = self._step_all(
            self._keys, self._counts, self._state, jax.numpy.asarray(actions), self.params
        )
        terminated, truncated = np.asarray(over), np.asarray(cut)
        ended = terminated | truncated
        infos: dict[str, Any] = {k: np.asarray(v) for k, v in told.items() if hasattr(v, "shape")}
        if ended.any():
            final = _column(jax.tree.map(np.asarray, last), self.num_envs, ended)
            infos |= {"final_obs": final, "_final_obs": ended.copy()}
        shown = jax.tree.map(np.asarray, self._obs)
        return shown, np.asarray(reward, dtype=np.float64), terminated, truncated, infos


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
