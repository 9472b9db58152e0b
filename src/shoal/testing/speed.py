"""How fast each backend steps an environment on this machine, after each is checked against a plain loop."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError, ShoalError
from shoal.envs.catalogue import EnvFn, Wrapper, resolve
from shoal.envs.check import blaming
from shoal.testing.checks import check_vector_env
from shoal.vector.make import make_vec, try_env
from shoal.vector.spaces import Layout

Make = Callable[[Sequence[EnvFn]], Any]
BACKENDS = ("auto", "serial", "process", "thread", "native")
ROUNDS = 5
ACTIONS = 16
CHECKED_ENVS, CHECKED_STEPS = 3, 40


@dataclass(frozen=True)
class Speed:
    """What one way of stepping gave; `problem` says why it could not be measured or is not the same."""

    name: str
    steps_per_second: float | None = None
    cpu_microseconds: float | None = None  # of this process and its threads, per environment step
    problem: str | None = None


@dataclass(frozen=True)
class Speeds:
    """What stepping an env costs here."""

    env: str
    num_envs: int
    step_seconds: float  # of one step of one env, its median
    step_cpu_seconds: float
    observation_bytes: int  # characters of text
    loop_steps_per_second: float  # of one env in a plain loop, its resets included
    ways: list[Speed]


def measure_backends(
    env: str,
    *,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    num_envs: int = 32,
    num_workers: int | None = None,
    backends: Sequence[str] = BACKENDS,
    peers: bool = True,
    seconds: float = 2.0,
    seed: int = 0,
) -> Speeds:
    """Measure how fast each backend of `make_vec` steps an env; `shoal bench` in Python.

    Args:
        env: a name of `shoal envs list`, a Gymnasium id, module:Id-v0, module:Class or module:function.
        env_kwargs: its settings.
        wrappers: put around it, the first innermost.
        num_envs: copies of it.
        num_workers: processes (one per core if not given) or threads (one per env).
        backends: which ones; by default "native", an env's own batch, only if it has one.
        peers: also Gymnasium's SyncVectorEnv and AsyncVectorEnv.
        seconds: to measure each, in five rounds that take turns.
        seed: of the envs and actions.

    Raises:
        ConfigError: there is no such env, or `seconds` is not positive and finite.
        EnvError: the env fails when it is tried.
    """
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--seconds must be positive and finite, got {seconds}")
    fn = resolve(env, env_kwargs=env_kwargs, wrappers=wrappers)
    cost = try_env(fn)
    if cost is None:
        with blaming(env):  # once more, to tell what it raises
            _loop_speed(fn, seconds, seed)
        raise ConfigError(f"{env} failed once when it was stepped with random actions, and then did not")
    with blaming(env), contextlib.closing(fn()) as one:
        nbytes = _size(one)
    found = _ways(env, env_kwargs, wrappers, backends, num_workers, peers=peers)
    speeds = measure(found, fn, num_envs=num_envs, seconds=seconds, seed=seed)
    return Speeds(env, num_envs, cost.wall, cost.cpu, nbytes, _loop_speed(fn, seconds, seed), speeds)


def _size(env: Any) -> int:
    """Bytes of one observation; characters of text."""
    layout, obs = Layout.of(env.observation_space), env.reset(seed=0)[0]
    size = 0
    for leaf, value in zip(layout.leaves, layout.flatten(obs), strict=True):
        size += math.prod(leaf.shape) * leaf.dtype.itemsize if leaf.kind == "fixed" else 0
        size += len(value) if leaf.kind == "text" else 0
    return size


def _ways(
    env: str,
    env_kwargs: dict[str, Any] | None,
    wrappers: Sequence[Wrapper],
    backends: Sequence[str],
    num_workers: int | None,
    *,
    peers: bool,
) -> dict[str, Make]:
    """What to measure, by name: each makes a vector env of the functions it is given."""
    import gymnasium

    def shoal(backend: Any) -> Make:
        workers = None if backend in ("auto", "serial") else num_workers
        return lambda fns: make_vec(fns, backend=backend, num_workers=workers, autoreset="next_step")

    found: dict[str, Make] = {backend: shoal(backend) for backend in dict.fromkeys(backends)}
    if "native" in found:
        mode = native_mode(env, env_kwargs, wrappers)
        found["native"] = lambda fns: _native(env, env_kwargs, wrappers, len(fns), mode or "next_step")
        if mode is None and tuple(backends) == BACKENDS:
            del found["native"]
    if peers:
        found["gymnasium sync"] = gymnasium.vector.SyncVectorEnv
        found["gymnasium async"] = gymnasium.vector.AsyncVectorEnv
    return found


def measure(
    found: Mapping[str, Make], fn: EnvFn, *, num_envs: int, seconds: float, seed: int = 0
) -> list[Speed]:
    """Compare each way with a plain loop, then time those that can run, in turns.

    Args:
        found: makes a vector env of env functions, by name.
        fn: makes one env.
        num_envs: copies of it.
        seconds: to measure each.
        seed: of the envs and actions.
    """
    speeds: dict[str, Speed] = {}
    windows: dict[str, list[tuple[float, float]]] = {}
    for name, make in found.items():
        if name == "native":  # another implementation: its episodes differ
            problem = _problem(make, [fn])
        else:
            problem = _difference(make, fn, seed)
        if problem is not None:
            speeds[name] = Speed(name, problem=problem)
        else:
            windows[name] = []
    vectors: dict[str, Any] = {}
    try:
        for name in windows:
            vectors[name] = found[name]([fn] * num_envs)
            vectors[name].reset(seed=seed)
        for _ in range(ROUNDS):
            for name, rows in windows.items():
                rows.append(_window(vectors[name], seconds / ROUNDS, seed))
    finally:
        for vector in vectors.values():
            vector.close()
    for name, rows in windows.items():
        steps, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        speeds[name] = Speed(name, steps, cpu * 1e6)
    return [speeds[name] for name in found]


def _difference(make: Make, fn: EnvFn, seed: int) -> str | None:
    try:
        return _problem(
            functools.partial(
                check_vector_env, make, fn, num_envs=CHECKED_ENVS, steps=CHECKED_STEPS, seed=seed
            )
        )
    except AssertionError as error:
        return f"not the results of a plain loop: {error}"


def _native(
    env: str, env_kwargs: dict[str, Any] | None, wrappers: Sequence[Wrapper], num_envs: int, mode: Any
) -> Any:
    return make_vec(env, num_envs, backend="native", env_kwargs=env_kwargs, wrappers=wrappers, autoreset=mode)


def native_mode(
    env: str, env_kwargs: dict[str, Any] | None = None, wrappers: Sequence[Wrapper] = ()
) -> str | None:
    """The first autoreset mode, of those that `make_vec` has, that an environment's own batch has, if it has one."""
    modes = ("next_step", "same_step")
    return next((m for m in modes if _problem(_native, env, env_kwargs, wrappers, 1, m) is None), None)


def _problem(run: Callable[..., Any], *args: Any) -> str | None:
    try:
        made = run(*args)
        if made is not None:
            made.close()
    except (ShoalError, TypeError, ValueError, RuntimeError, AttributeError, OSError) as error:
        return f"cannot run: {type(error).__name__}: {error}"
    return None


def _window(vector: Any, seconds: float, seed: int) -> tuple[float, float]:
    """(environment steps a second, seconds of this process's time a step)."""
    vector.action_space.seed(seed)
    actions = [vector.action_space.sample() for _ in range(ACTIONS)]
    vector.step(actions[0])
    count, start, cpu = 0, time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) - start < seconds or not count:
        vector.step(actions[count % ACTIONS])
        count += 1
    steps = count * vector.num_envs
    return steps / (now - start), (time.process_time() - cpu) / steps


def _loop_speed(fn: EnvFn, seconds: float, seed: int) -> float:
    """Steps a second of one environment in a plain loop, its resets included."""
    env = fn()
    try:
        env.action_space.seed(seed)
        actions = [env.action_space.sample() for _ in range(ACTIONS)]
        env.reset(seed=seed)
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds / ROUNDS or not count:
            _, _, terminated, truncated, _ = env.step(actions[count % ACTIONS])
            count += 1
            if terminated or truncated:
                env.reset()
        return count / (now - start)
    finally:
        env.close()
