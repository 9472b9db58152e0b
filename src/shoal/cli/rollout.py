"""`shoal rollout`: play episodes without training, or compare sequential with parallel."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.cli.command import Command
from shoal.cli.grammar import (
    AgentOptions,
    ConfigName,
    Progress,
    came_to_an_end,
    composed,
    new_folder,
    print_json,
    show_warnings,
    table,
    tell_kept,
)
from shoal.cli.output import program
from shoal.core.data import Trajectory, write_trajectories
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import UNFINISHED, RunFolder
from shoal.rollout.settings import Backend
from shoal.viewer.markup import number

if TYPE_CHECKING:
    from shoal.rollout.journal import Journal
    from shoal.rollout.tools.toolbox import Toolbox

MORE = """\
examples:
  shoal rollout --config-name base-parallel                  play the training groups once, on parallel workers
  shoal rollout --config-name base-parallel --compare        sequential beside parallel: time, equality, metrics
  shoal rollout --config-name base-parallel --compare --backend threads agent_proxy.parallel_n_jobs=4
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
    for name, given in (("--iteration", options.iteration), ("seed", config.seed)):
        if not -(2**63) <= given < 2**64:  # before a folder is made that nothing would be in
            raise ConfigError(f"{name} must be in [-2**63, 2**64) to name seeds, got {given}")
    run_dir = new_folder("rollout") if config.run_dir is None else Path(config.run_dir)
    if (run_dir / "summary.json").exists():
        raise ConfigError(f"{run_dir} holds a run already: pass another run_dir")
    if options.compare and (run_dir / UNFINISHED).exists():
        raise ConfigError(
            f"{run_dir} holds a rollout that is not finished: go on with it without --compare, or pass another run_dir"
        )
    plays = compare_with_sequential if options.compare else play
    with contextlib.ExitStack() as ending:
        return plays(replace(config, run_dir=str(run_dir)), options, ending)


COMMAND = Command(RolloutOptions, rollout, MORE, MOST_USED)


def play(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    """One rollout, saved so that it can be replayed."""
    from shoal.rollout.play import ParallelRolloutManager

    with Progress("loading the engine", sys.stderr, bar=False):
        config, folder, engine, journal, tools = prepare(config, options, ending)
    with ParallelRolloutManager(
        config, engine, backend=options.backend, journal=journal, tools=tools
    ) as manager:
        with Progress("playing", sys.stderr, bar=False) as progress:
            progress.doing = lambda: "playing, {} of {} episodes".format(*manager.counts)
            trajectories = manager.collect(options.iteration)
        new = [t for t in trajectories if t not in journal]
        metrics = episode_metrics(trajectories, manager.report.seconds, new) | manager.report.metrics()
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", trajectories)
    folder.keep_metrics("iteration", -math.inf, {"iteration": options.iteration, **metrics})
    summary = folder.finish({**metrics, "iteration": options.iteration, "level": engine.level})
    if options.json:
        print_json(summary)
    else:
        table(
            f"rollout of {options.config_name}",
            ["", "value"],
            [[k, number(v)] for k, v in metrics.items()],
            text=(0, 1),
        )
        replay = f"{program()} replay {shlex.quote(str(config.run_dir))}"
        print(f"episodes: {config.run_dir}/trajectories   replay one: {replay}")
    came_to_an_end(trajectories)
    return 0


def prepare(
    config: Any, options: RolloutOptions, ending: contextlib.ExitStack
) -> tuple[Any, RunFolder, Any, Journal, Toolbox]:
    """The config with a number of `max_tokens`, its run folder, the engine, what was played before, and the tools."""
    from shoal.core.configuration import as_yaml, to_mapping
    from shoal.core.files import write_folder, write_text
    from shoal.rollout.factory import make_roles
    from shoal.rollout.journal import Journal
    from shoal.rollout.prompts import Prompter
    from shoal.rollout.tools.toolbox import Toolbox
    from shoal.train.agent.config import playing_settings
    from shoal.train.agent.policies.loading import policy_of
    from shoal.train.agent.run.answers import with_room
    from shoal.train.records.checkpoints import read_checkpoint
    from shoal.train.records.models import weights_at

    toolbox = ending.enter_context(Toolbox(config.agent_proxy.tools, config.agent_proxy.max_tool_turns))

    def read(source: Path | None) -> tuple[str, Any]:
        weights = weights_at(config.engine.model if source is None else source)
        return weights, engine_for(config, source, ending, toolbox)

    run = options.source
    if run is not None and not run.is_dir():
        raise DataError(f"{run} is not a run folder")
    if run is None or (run / "engine").is_dir():
        weights, engine = read(None if run is None else run / "engine")
    else:
        weights, engine = read_checkpoint(run, "newest", lambda checkpoint: read(checkpoint / "engine"))
    if config.engine.name == "openai":
        weights = engine.model  # which the server may have chosen
    elif engine.weights_version:  # a sampler's own weights, of which the settings say nothing
        weights += f" version {engine.weights_version}"
    if config.agent_proxy.max_tokens == "auto":
        prompter = Prompter(config.agent_proxy.prompt, engine.tokenizer, toolbox.chat(engine.tokenizer))
        roles = make_roles(config.custom_envs, config.es_manager.train.group_tags())
        config = replace(config, agent_proxy=with_room(config.agent_proxy, roles, prompter))
    folder = ending.enter_context(RunFolder(config.run_dir, "rollout", config.seed))
    asked = {
        "weights": weights,
        "iteration": options.iteration,
        "settings": playing_settings(to_mapping(config)),
    }
    journal = Journal() if options.compare else Journal(folder.unfinished_path, asked, folder.hold)
    if journal.count:
        tell_kept(journal.count, folder.path)
    write_text(folder.path / "config.yaml", as_yaml(to_mapping(config)))
    toolbox.keep(folder.path)
    if config.engine.name == "tiny":
        with write_folder(folder.path / "engine") as new:
            policy_of(engine).save(new)
    return config, folder, engine, journal, toolbox


def engine_for(config: Any, folder: Path | None, ending: contextlib.ExitStack, toolbox: Toolbox) -> Any:
    """The engine in a folder, or a fresh one as the config says; `ending` closes it."""
    import torch

    from shoal.rollout.factory import words_of
    from shoal.samplers.registry import close_engine, make_engine
    from shoal.train.agent.policies.loading import load_engine

    torch.set_num_threads(config.engine.threads)
    if folder is not None:
        return load_engine(folder, device=config.engine.device, config=config.engine)
    engine = make_engine(config.engine, words_of(config, list(toolbox.tools.values())), config.seed)
    ending.callback(close_engine, engine)
    return engine


def episode_metrics(
    trajectories: Sequence[Trajectory], seconds: float, new: Sequence[Trajectory] | None = None
) -> dict[str, Any]:
    """How the episodes went, and how fast those were that took the seconds: the `new` ones, all if not given."""
    from shoal.train.agent.run.metrics import rollout_metrics

    tokens = sum(t.n_tokens for t in (trajectories if new is None else new))
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


# --- --compare: the same episodes sequentially, on parallel workers, and with a worker that died
@contextlib.contextmanager
def _killing_a_worker(manager: Any) -> Iterator[None]:
    """Kill a worker as soon as the engine has been asked for an answer inside the block."""
    asked, done = manager.inference.statistics.requests, threading.Event()

    def kill() -> None:
        while manager.inference.statistics.requests == asked:
            if done.wait(0.001):
                return
        os.kill(manager.worker_pids()[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True, name="shoal-kill")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compare_with_sequential(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    """Print time, metrics and equality of each; exit code 1 if anything differs."""
    from shoal.rollout.play import ParallelRolloutManager
    from shoal.train.records.compare import compare

    config, folder, engine, _, tools = prepare(config, options, ending)
    level = engine.level
    rows: list[list[str]] = []
    notes: list[str] = []
    least = level

    def add(name: str, trajectories: Sequence[Trajectory], seconds: float) -> None:
        nonlocal least
        metrics = episode_metrics(trajectories, seconds)
        verdict = compare(
            [replace(t, error=None) for t in reference], [replace(t, error=None) for t in trajectories]
        )
        least = min(least, verdict.level)
        equal = {"L2": "bit-equal", "L1": "same tokens"}.get(verdict.level, f"differs: {verdict.first}")
        rows.append([
            name, f"{seconds:.3f}", f"{sequential / seconds:.2f}x", str(int(metrics["failed_episodes"])),
            f"{metrics['success']:.3f}", f"{metrics['reward']:.3f}", equal,
        ])  # fmt: skip

    with Progress("playing sequentially", sys.stderr, bar=False) as progress:
        with ParallelRolloutManager(config, engine, backend="serial", tools=tools) as manager:
            reference, sequential = manager.collect(options.iteration), manager.report.seconds
        write_trajectories(folder.path / "trajectories" / "rollout.jsonl", reference)
        add("sequential", reference, sequential)
        progress.doing = lambda: "playing on parallel workers, once with one that is killed"
        with ParallelRolloutManager(config, engine, backend=options.backend, tools=tools) as manager:
            manager.collect(options.iteration + 1)  # workers start and import: not what is compared
            add("parallel", manager.collect(options.iteration), manager.report.seconds)
            parallel, deaths = manager.report.seconds, 0
            notes.append(
                f"parallel: {manager.report.workers} workers, {manager.report.batches} batches of the engine"
            )
            if manager.worker_pids():
                with _killing_a_worker(manager):
                    trajectories = manager.collect(options.iteration)
                deaths = manager.report.worker_deaths
                add("a worker killed" if deaths else "no worker died", trajectories, manager.report.seconds)
    header = ["", "seconds", "speed", "failed", "success", "reward", "result"]
    table(f"{options.config_name}: {len(reference)} episodes, {level} engine", header, rows, text=(0, 6))
    print("\n".join(notes))
    metrics = episode_metrics(reference, sequential)
    metrics |= {"least_level": least, "seconds_parallel": parallel, "worker_deaths": deaths}
    summary = folder.finish(metrics)
    if options.json:
        print_json(summary)
    came_to_an_end(reference)
    return 0 if least >= min(level, "L1") else 1
