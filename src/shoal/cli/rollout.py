"""`shoal rollout`: play episodes without training, or compare sequential with parallel."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from shoal.cli.command import Command
from shoal.cli.grammar import (
    AgentOptions,
    ConfigName,
    Progress,
    came_to_an_end,
    composed,
    episodes_played,
    print_json,
    run_folder,
    show_warnings,
    table,
)
from shoal.cli.output import next_steps, program
from shoal.rollout.settings import Backend
from shoal.viewer.markup import number

MORE = """\
examples:
  shoal rollout --config-name base-parallel                  play the training groups once, on parallel workers
  shoal rollout --config-name base-parallel --compare        sequential beside parallel: time, equality, metrics
  shoal rollout --config-name base-parallel --compare --backend thread agent_proxy.parallel_n_jobs=4
  shoal rollout --config-name demo --from runs/demo          with the newest checkpoint of a run
"""


MOST_USED = (
    "--config-name", "--config-dir", "--from", "--backend", "--out", "--seed", "--device", "--compare", "--json",
)  # fmt: skip


@dataclass(frozen=True)
class RolloutOptions(AgentOptions):
    """Play the groups of a config with its engine, without training.

    Run the same command again with --out FOLDER after a kill, Ctrl-C or full disk: finished episodes are kept.
    """

    config_name: Annotated[str, ConfigName] = "base-parallel"
    backend: Backend | None = None
    """Execution backend (default: the config's)."""
    source: Path | None = None
    """Run whose newest checkpoint plays."""
    iteration: int = 0
    """Iteration index (part of the seeds)."""
    compare: bool = False
    """Play sequentially, in parallel, and with a worker that is killed, and compare times, episodes and metrics."""


def rollout(options: RolloutOptions) -> int:
    """Play, and print a table."""
    show_warnings()
    config = composed(options)
    config = replace(config, run_dir=str(run_folder(config.run_dir, "rollout", False)))
    how: dict[str, Any] = {
        "source": options.source,
        "iteration": options.iteration,
        "backend": options.backend,
    }
    return (_compare if options.compare else _play)(options, config, how)


COMMAND = Command(RolloutOptions, rollout, MORE, MOST_USED)


def _play(options: RolloutOptions, config: Any, how: dict[str, Any]) -> int:
    from shoal.train.records.rollouts import record_rollout

    with episodes_played("loading the engine", config.run_dir, bar=False) as progress:
        summary, trajectories = record_rollout(config, progress=progress, **how)
    if options.json:
        print_json(summary)
    else:
        shown = {k: v for k, v in summary["metrics"].items() if k not in ("iteration", "level")}
        rows = [[key, number(value)] for key, value in shown.items()]
        table(f"rollout of {options.config_name}", ["", "value"], rows, text=(0, 1))
        print(f"episodes: {config.run_dir}/trajectories")
        replay = f"{program()} replay {shlex.quote(str(config.run_dir))}"
        print(next_steps(Path(config.run_dir), {"replay one": replay}))
    came_to_an_end(trajectories)
    return 0


def _compare(options: RolloutOptions, config: Any, how: dict[str, Any]) -> int:
    """Print time, metrics and equality of each; exit code 1 if anything differs."""
    from shoal.train.records.rollouts import compare_with_sequential

    with Progress("loading the engine", sys.stderr, bar=False) as progress:

        def begun(what: str) -> None:
            progress.doing = lambda: what

        found = compare_with_sequential(config, begun=begun, **how)
    rows = []
    for way in found.ways:
        verdict, metrics = way.verdict, way.metrics
        equal = {"L2": "bit-equal", "L1": "same tokens"}.get(verdict.level, f"differs: {verdict.first}")
        speed = found.ways[0].seconds / way.seconds
        rows.append([
            way.name, f"{way.seconds:.3f}", f"{speed:.2f}x", str(int(metrics["failed_episodes"])),
            f"{metrics['success']:.3f}", f"{metrics['reward']:.3f}", equal,
        ])  # fmt: skip
    title = f"{options.config_name}: {len(found.trajectories)} episodes, {found.level} engine"
    header = ["", "seconds", "speed", "failed", "success", "reward", "result"]
    table(title, header, rows, text=(0, 6))
    print(f"parallel: {found.workers} workers, {found.batches} batches of the engine")
    if options.json:
        print_json(found.summary)
    came_to_an_end(found.trajectories)
    return 0 if found.equal else 1
