"""`shoal bench ENV`: how fast each backend steps an environment on this machine, and which one to take."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import (
    EnvKwargs,
    Settings,
    Wrappers,
    arguments_of,
    blaming,
    print_json,
    refuse_below,
    table,
)
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.run_folder import RunFolder

Make = Callable[[Sequence[Callable[[], Any]]], Any]
ROUNDS = 5
ACTIONS = 16
CHECKED_ENVS, CHECKED_STEPS = 3, 40


@dataclass(frozen=True)
class BenchOptions:
    """Measure how fast each backend steps an environment, after checking it against a plain loop."""

    env: Annotated[str, Positional("ENV")]
    """A name that `shoal envs list` shows, a Gymnasium id, module:Id-v0, module:Class or module:function."""
    settings: Settings = ()
    """Settings of the env, such as `dim_room=[7,7]`."""
    env_kwargs: EnvKwargs = ()
    wrappers: Wrappers = ()
    num_envs: int = 32
    """Copies of the environment."""
    num_workers: int | None = None
    """Worker processes or threads; one per core if not given."""
    backends: tuple[Literal["auto", "serial", "process", "thread", "ray", "native"], ...] = (
        "auto", "serial", "process", "thread", "native",
    )  # fmt: skip
    """Backends to measure; "native" is an environment's own batch, measured if it has one."""
    peers: bool = True
    """Also measure Gymnasium's SyncVectorEnv and AsyncVectorEnv."""
    seconds: float = 2.0
    """Seconds to measure each backend."""
    seed: int = 0
    """Random seed of the environments and actions."""
    run_dir: Path | None = None
    """Folder for `summary.json`; without it nothing is written."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Speed:
    """What one way of stepping gave; `problem` says why it could not be measured or is not the same."""

    name: str
    steps_per_second: float | None = None
    cpu_microseconds: float | None = None  # of this process and its threads, per environment step
    problem: str | None = None


MORE = """\
examples:
  shoal bench CartPole-v1
  shoal bench sokoban dim_room=[7,7] --num-envs 64 --seconds 5
  shoal bench my_module:MyEnv --backends auto serial process --json
"""
WANTED = (
    "--num-envs", "--num-workers", "--backends", "--env-kwargs", "--wrapper", "--seconds", "--seed", "--out", "--json",
)  # fmt: skip


def bench(options: BenchOptions) -> int:
    """Measure and print."""
    from rich.console import Console

    from shoal.envs.catalogue import resolve
    from shoal.vector.make import try_env

    refuse_below(options, num_envs=1, seed=0, num_workers=1)
    if not 0 < options.seconds < math.inf:
        raise ConfigError(f"--seconds must be positive and finite, got {options.seconds}")
    fn = resolve(
        options.env,
        env_kwargs=arguments_of(options.settings, options.env_kwargs),
        wrappers=options.wrappers,
    )
    cost = try_env(fn)
    if cost is None:
        with blaming(options.env):  # once more, to tell what it raises
            _loop_speed(fn, options)
        raise ConfigError(
            f"{options.env} failed once when it was stepped with random actions, and then did not"
        )
    with blaming(options.env), contextlib.closing(fn()) as env:
        nbytes = _size(env)
    folder = RunFolder(options.run_dir, "bench", options.seed) if options.run_dir is not None else None
    speeds = measure(ways(options), fn, options)
    loop = _loop_speed(fn, options)
    result = {
        "env": options.env,
        "num_envs": options.num_envs,
        "step_seconds": cost.wall,
        "step_cpu_seconds": cost.cpu,
        "observation_bytes": nbytes,
        "loop_steps_per_second": loop,
        "ways": [asdict(speed) for speed in speeds],
    }
    if folder is not None:
        known = {speed.name: speed.steps_per_second for speed in speeds}
        folder.finish({**result, "steps_per_second": max(filter(None, known.values()), default=None)})
    if options.json:
        print_json(result)
    else:
        _show(Console(highlight=False), options, result, speeds, loop)
    return 0 if any(speed.steps_per_second for speed in speeds) else 1


def _size(env: Any) -> int:
    """Bytes of one observation; characters of text."""
    from shoal.vector.spaces import Layout

    layout, obs = Layout.of(env.observation_space), env.reset(seed=0)[0]
    leaves = layout.flatten(obs)
    return sum(layout.leaves[i].nbytes for i in layout.fixed) + sum(len(leaves[i]) for i in layout.text)


COMMAND = Command(BenchOptions, bench, MORE, WANTED)


def ways(options: BenchOptions) -> dict[str, Make]:
    """What to measure, by name: each makes a vector env of the functions it is given."""
    import gymnasium

    from shoal.vector import make_vec

    def shoal(backend: Any) -> Make:
        workers = None if backend in ("auto", "serial") else options.num_workers
        return lambda fns: make_vec(fns, backend=backend, num_workers=workers, autoreset="next_step")

    found: dict[str, Make] = {backend: shoal(backend) for backend in dict.fromkeys(options.backends)}
    if "native" in found:
        mode = _native_mode(options)
        found["native"] = lambda fns: _native(options, len(fns), mode or "next_step")
        if mode is None and options.backends == BenchOptions.backends:
            del found["native"]
    if options.peers:
        found["gymnasium sync"] = gymnasium.vector.SyncVectorEnv
        found["gymnasium async"] = gymnasium.vector.AsyncVectorEnv
    return found


def measure(found: dict[str, Make], fn: Callable[[], Any], options: BenchOptions) -> list[Speed]:
    """Compare each way with a plain loop, then time those that can run, in turns."""
    speeds: dict[str, Speed] = {}
    windows: dict[str, list[tuple[float, float]]] = {}
    for name, make in found.items():
        if name == "native":  # another implementation: its episodes differ
            problem = _problem(make, [fn])
        else:
            problem = _difference(make, fn, options.seed)
        if problem is not None:
            speeds[name] = Speed(name, problem=problem)
        else:
            windows[name] = []
    vectors: dict[str, Any] = {}
    try:
        for name in windows:
            vectors[name] = found[name]([fn] * options.num_envs)
            vectors[name].reset(seed=options.seed)
        for _ in range(ROUNDS):
            for name, rows in windows.items():
                rows.append(_window(vectors[name], options.seconds / ROUNDS, options.seed))
    finally:
        for vector in vectors.values():
            vector.close()
    for name, rows in windows.items():
        steps, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        speeds[name] = Speed(name, steps, cpu * 1e6)
    return [speeds[name] for name in found]


def _difference(make: Make, fn: Callable[[], Any], seed: int) -> str | None:
    from shoal.testing import check_vector_env

    try:
        return _problem(
            functools.partial(
                check_vector_env, make, fn, num_envs=CHECKED_ENVS, steps=CHECKED_STEPS, seed=seed
            )
        )
    except AssertionError as error:
        return f"not the results of a plain loop: {error}"


def _native(options: BenchOptions, num_envs: int, mode: str) -> Any:
    from shoal.vector import make_vec

    kwargs = arguments_of(options.settings, options.env_kwargs)
    return make_vec(options.env, num_envs, backend="native", env_kwargs=kwargs, autoreset=mode)


def _native_mode(options: BenchOptions) -> str | None:
    """The first autoreset mode, of those that `make_vec` has, that an environment's own batch has, if it has one."""
    modes = ("next_step", "same_step")
    return next((m for m in modes if _problem(_native, options, 1, m) is None), None)


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


def _loop_speed(fn: Callable[[], Any], options: BenchOptions) -> float:
    """Steps a second of one environment in a plain loop, its resets included."""
    env = fn()
    try:
        env.action_space.seed(options.seed)
        actions = [env.action_space.sample() for _ in range(ACTIONS)]
        env.reset(seed=options.seed)
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < options.seconds / ROUNDS or not count:
            _, _, terminated, truncated, _ = env.step(actions[count % ACTIONS])
            count += 1
            if terminated or truncated:
                env.reset()
        return count / (now - start)
    finally:
        env.close()


def _show(
    console: Any, options: BenchOptions, result: dict[str, Any], speeds: Sequence[Speed], loop: float
) -> None:
    step, cpu = result["step_seconds"] * 1e6, result["step_cpu_seconds"] * 1e6
    console.print(
        f"{options.env}: a step takes {step:.3g} µs, of which {min(cpu, step):.3g} µs compute; an observation has "
        f"{result['observation_bytes']} bytes; {loop:,.0f} steps/s in a plain loop"
    )
    rows = []
    for speed in speeds:
        if speed.steps_per_second is None or speed.cpu_microseconds is None:
            rows.append([speed.name, "-", "-", "-", "no, see below"])
        else:
            rate, same = speed.steps_per_second, "another implementation" if speed.name == "native" else "yes"
            rows.append(
                [speed.name, f"{rate:,.0f}", f"{rate / loop:.2f}", f"{speed.cpu_microseconds:.2f}", same]
            )
    header = ["way", "steps/s", "of a plain loop", "caller's µs a step", "same results"]
    table(f"{options.num_envs} environments", header, rows, text=(0, 4))
    for speed in speeds:
        if speed.problem is not None:
            console.print(f"{speed.name}: {speed.problem}", markup=False)
    rates = {s.name: s.steps_per_second for s in speeds if s.steps_per_second}
    ours = {n: rate for n, rate in rates.items() if n != "native" and not n.startswith("gymnasium")}
    if ours:
        best = max(ours, key=lambda name: ours[name])
        console.print(
            f"fastest of shoal here: make_vec({options.env!r}, {options.num_envs}, backend={best!r})"
        )
    native, next_best = rates.pop("native", 0.0), max(rates.values(), default=0.0)
    if native > next_best > 0:
        mode = "" if _native_mode(options) == "next_step" else ", autoreset='same_step'"
        console.print(
            f"native is {native / next_best:.1f}x the next: make_vec({options.env!r}, {options.num_envs}, "
            f"backend='native'{mode}), another implementation: its episodes differ"
        )
