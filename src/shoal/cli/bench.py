"""`shoal bench ENV`: how fast each backend steps an environment on this machine, and which one to take."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import EnvKwargs, Settings, Wrappers, arguments_of, print_json, refuse_below, table
from shoal.core.run_folder import RunFolder

if TYPE_CHECKING:
    from shoal.testing.speed import Speeds


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
    """Worker processes (one per core if not given) or threads (one per environment)."""
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

    from shoal.testing.speed import measure_backends

    refuse_below(options, num_envs=1, seed=0, num_workers=1)
    with contextlib.ExitStack() as ending:
        folder = None
        if options.run_dir is not None:
            folder = ending.enter_context(RunFolder(options.run_dir, "bench", options.seed))
        found = measure_backends(
            options.env, env_kwargs=arguments_of(options.settings, options.env_kwargs), wrappers=options.wrappers,
            num_envs=options.num_envs, num_workers=options.num_workers, backends=options.backends,
            peers=options.peers, seconds=options.seconds, seed=options.seed,
        )  # fmt: skip
        rates = [speed.steps_per_second for speed in found.ways if speed.steps_per_second]
        if folder is not None:
            folder.finish({**asdict(found), "steps_per_second": max(rates, default=None)})
    if options.json:
        print_json(asdict(found))
    else:
        _show(Console(highlight=False), options, found)
    return 0 if rates else 1


COMMAND = Command(BenchOptions, bench, MORE, WANTED)


def _show(console: Any, options: BenchOptions, found: Speeds) -> None:
    from shoal.testing.speed import native_mode

    step, cpu, loop = found.step_seconds * 1e6, found.step_cpu_seconds * 1e6, found.loop_steps_per_second
    console.print(
        f"{options.env}: a step takes {step:.3g} µs, of which {min(cpu, step):.3g} µs compute; an observation has "
        f"{found.observation_bytes} bytes; {loop:,.0f} steps/s in a plain loop"
    )
    rows = []
    for speed in found.ways:
        if speed.steps_per_second is None or speed.cpu_microseconds is None:
            rows.append([speed.name, "-", "-", "-", "no, see below"])
        else:
            rate, same = speed.steps_per_second, "another implementation" if speed.name == "native" else "yes"
            rows.append(
                [speed.name, f"{rate:,.0f}", f"{rate / loop:.2f}", f"{speed.cpu_microseconds:.2f}", same]
            )
    header = ["way", "steps/s", "of a plain loop", "caller's µs a step", "same results"]
    table(f"{options.num_envs} environments", header, rows, text=(0, 4))
    for speed in found.ways:
        if speed.problem is not None:
            console.print(f"{speed.name}: {speed.problem}", markup=False)
    rates = {s.name: s.steps_per_second for s in found.ways if s.steps_per_second}
    ours = {n: rate for n, rate in rates.items() if n != "native" and not n.startswith("gymnasium")}
    if ours:
        best = max(ours, key=lambda name: ours[name])
        console.print(
            f"fastest of shoal here: make_vec({options.env!r}, {options.num_envs}, backend={best!r})"
        )
    native, next_best = rates.pop("native", 0.0), max(rates.values(), default=0.0)
    if native > next_best > 0:
        kwargs = arguments_of(options.settings, options.env_kwargs)
        mode = "" if native_mode(options.env, kwargs) == "next_step" else ", autoreset='same_step'"
        console.print(
            f"native is {native / next_best:.1f}x the next: make_vec({options.env!r}, {options.num_envs}, "
            f"backend='native'{mode}), another implementation: its episodes differ"
        )
