"""`shoal rollout`: play episodes without training, compare sequential with parallel, or replay a saved run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError

EPILOG = """\
examples:
  shoal rollout --config-name base-parallel                  play the training groups once, on parallel workers
  shoal rollout --config-name base-parallel --compare        sequential against parallel: time, equality, faults
  shoal rollout --config-name base-parallel --compare --backend threads agent_proxy.parallel_n_jobs=4
  shoal rollout --config-name demo --from runs/demo          with the newest checkpoint of a run
  shoal rollout --verify runs/rollout                        play a saved rollout again and say what was equal
"""


def main(argv: list[str]) -> int:
    """Parse, play, and print a table."""
    from shoal.rollout.settings import BACKENDS
    from shoal.train.composition import config_names

    parser = argparse.ArgumentParser(
        prog="shoal rollout",
        description="Play the groups of a config with its engine, without training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config-name", default="base-parallel", help=f"one of {', '.join(config_names())}, or your own"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with your own YAML configs")
    parser.add_argument("--backend", choices=BACKENDS, help="where workers run (default: as the config says)")
    parser.add_argument("--from", dest="source", type=Path, metavar="RUN", help="take the engine of this run")
    parser.add_argument("--iteration", type=int, default=0, help="names the env seeds and the sampling noise")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--compare", action="store_true", help="play sequentially and in parallel, and compare everything"
    )
    what.add_argument(
        "--verify",
        type=Path,
        metavar="RUN",
        help="replay the saved rollout of RUN; exit code 1 if it differs",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with contextlib.ExitStack() as ending:
        return _run(options, ending)


def _run(options: argparse.Namespace, ending: contextlib.ExitStack) -> int:
    from shoal.train.composition import compose_config

    if options.verify is not None:
        return verify(options.verify, ending)
    config = compose_config(options.config_name, options.overrides, options.config_dir)
    run_dir = Path(config.run_dir or "runs/rollout")
    if (run_dir / "summary.json").exists() and config.run_dir is not None:
        raise ConfigError(f"{run_dir} holds a run already: pass another run_dir")
    config = replace(config, run_dir=str(run_dir))
    if options.compare:
        return compare_backends(config, options, ending)
    return play(config, options, ending)


def play(config: Any, options: argparse.Namespace, ending: contextlib.ExitStack) -> int:
    """One rollout, saved so that it can be replayed."""
    from shoal.core.data import write_trajectories
    from shoal.rollout.parallel import ParallelRolloutManager

    folder, engine = _prepare(config, options, ending)
    with ParallelRolloutManager(config, engine, backend=options.backend) as manager:
        trajectories = manager.collect(options.iteration)
        metrics = _metrics(trajectories, manager.report.seconds) | manager.report.metrics()
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", trajectories)
    folder.append_metrics({"iteration": options.iteration, **metrics})
    folder.finish({**metrics, "iteration": options.iteration, "level": engine.level})
    _print_table(
        f"rollout of {options.config_name}", ["", "value"], [[k, _show(v)] for k, v in metrics.items()]
    )
    print(f"episodes: {folder.path / 'trajectories'}   replay: shoal rollout --verify {folder.path}")
    return 0


def compare_backends(config: Any, options: argparse.Namespace, ending: contextlib.ExitStack) -> int:
    """The same episodes one after another, in lockstep, on workers, and with a worker killed on the way."""
    from shoal.core.data import write_trajectories
    from shoal.rollout.parallel import ParallelRolloutManager
    from shoal.rollout.verify import compare

    folder, engine = _prepare(config, options, ending)
    with ParallelRolloutManager(config, engine, backend="serial") as manager:
        reference = manager.collect(options.iteration)
        sequential = manager.report.seconds
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", reference)
    rows = [_row("one by one", reference, sequential, sequential, "reference")]
    notes: list[str] = []
    levels = []
    lockstep = _lockstep_here(config, engine)
    clock = time.perf_counter()
    trajectories = lockstep.collect(options.iteration, config.agent_proxy.sampling())
    verdict = compare(reference, trajectories)
    levels.append(verdict.level)
    rows.append(
        _row("lockstep alone", trajectories, time.perf_counter() - clock, sequential, _equal(verdict))
    )
    lockstep.close()
    backend = options.backend or config.agent_proxy.parallel.backend
    plans = [("workers, lockstep", "barrier", False), ("workers, own pace", "adaptive", False)]
    if backend in ("auto", "processes"):
        plans.append(("… a worker killed", "adaptive", True))
    for name, schedule, fault in plans:
        proxy = replace(config.agent_proxy, parallel=replace(config.agent_proxy.parallel, schedule=schedule))
        with ParallelRolloutManager(
            replace(config, agent_proxy=proxy), engine, backend=None if backend == "auto" else backend
        ) as manager:
            manager.collect(options.iteration + 1)  # workers start and import: not what is compared
            if fault:
                _kill_one_soon(manager, sequential)
            trajectories = manager.collect(options.iteration)
            verdict = compare(reference, trajectories)
            levels.append(verdict.level)
            report = manager.report
            notes.append(f"{name}: {report.workers} workers, {report.batches} batches of the engine")
            if fault:
                notes[-1] += (
                    f"; {report.worker_deaths} lost, {report.replayed_episodes} episodes played again"
                )
            rows.append(_row(name, trajectories, report.seconds, sequential, _equal(verdict)))
            if verdict.first:
                print(f"{name}: {verdict.first}", file=sys.stderr)
    header = ["", "seconds", "speed", "failed", "success", "reward", "result"]
    _print_table(f"{options.config_name}: {len(reference)} episodes, {engine.level} engine", header, rows)
    print("\n".join(notes))
    least = min(levels)
    metrics = _metrics(reference, sequential) | {"least_level": least, "seconds_parallel": float(rows[3][1])}
    folder.finish(metrics)
    return 0 if least >= min(engine.level, "L1") else 1


def verify(run: Path, ending: contextlib.ExitStack) -> int:
    """Replay what a rollout saved, one episode after another, and say how exactly it repeats."""
    from shoal.core.configuration import from_mapping
    from shoal.core.data import read_trajectories
    from shoal.core.files import read_json
    from shoal.rollout.parallel import ParallelRolloutManager
    from shoal.rollout.verify import compare
    from shoal.train.agent_config import AgentConfig

    file = run / "trajectories" / "rollout.jsonl"
    if not file.exists() or not (run / "config.yaml").exists():
        raise DataError(
            f"{run} is not the folder of a saved rollout: it needs config.yaml and {file.relative_to(run)}, as "
            f"`shoal rollout` writes them"
        )
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    config = from_mapping(AgentConfig, values)
    saved = list(read_trajectories(file))
    engine = _engine(config, run if (run / "engine").exists() else None, ending)
    summary: dict[str, Any] = read_json(run / "summary.json")["metrics"]
    iteration = int(summary.get("iteration", saved[0].iteration))
    with ParallelRolloutManager(config, engine, backend="serial") as manager:
        replayed = manager.collect(iteration)
    whole = [k for k, t in enumerate(saved) if t.status == "ok"]
    verdict = compare([saved[k] for k in whole], [replayed[k] for k in whole])
    print(f"{run}, promised {engine.level}, held {verdict}")
    if len(whole) < len(saved):
        print(f"{len(saved) - len(whole)} episodes had failed when they were saved and are left out")
    return 0 if verdict.level >= min(engine.level, "L1") else 1


def _prepare(config: Any, options: argparse.Namespace, ending: contextlib.ExitStack) -> tuple[Any, Any]:
    """The run folder with its config, and the engine, saved beside it when it is small."""
    from omegaconf import OmegaConf

    from shoal.core.configuration import to_mapping
    from shoal.core.run_folder import RunFolder

    engine = _engine(config, options.source, ending)
    folder = RunFolder(config.run_dir, "rollout", config.seed)
    OmegaConf.save(OmegaConf.create(to_mapping(config)), folder.path / "config.yaml")
    if config.engine.name == "tiny":
        (folder.path / "engine").mkdir(exist_ok=True)
        engine.save(folder.path / "engine")
    return folder, engine


def _engine(config: Any, source: Path | None, ending: contextlib.ExitStack) -> Any:
    """The engine of a run, or a fresh one as the config says; `ending` closes it."""
    import torch

    from shoal.rollout.engines.making import close_engine, make_engine
    from shoal.rollout.factory import make_roles
    from shoal.train.agent_checkpoints import newest_checkpoint
    from shoal.train.policy import load_engine

    torch.set_num_threads(config.engine.threads)
    if source is not None:
        if not source.is_dir():
            raise DataError(f"{source} is not a run folder")
        own = source / "engine"
        folder = own if own.is_dir() else newest_checkpoint(source / "checkpoints") / "engine"
        return load_engine(folder, device=config.engine.device)
    tags = {*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()}
    roles = make_roles(config.custom_envs, sorted(tags), config.agent_proxy.max_turn)
    words = sorted({word for role in roles.values() for word in role.projection.words()})
    engine = make_engine(config.engine, words, config.seed)
    ending.callback(close_engine, engine)
    return engine


def _lockstep_here(config: Any, engine: Any) -> Any:
    """The plain collector over envs in this process."""
    from shoal.rollout.collector import TrajectoryCollector
    from shoal.rollout.factory import make_roles, make_set
    from shoal.rollout.settings import rollout_config

    plain = replace(rollout_config(config).environments, use_parallel_envs=False)
    side = make_set(plain, plain.es_manager.train)
    roles = make_roles(config.custom_envs, side.tags, config.agent_proxy.max_turn)
    prompt = config.agent_proxy.prompt
    return TrajectoryCollector(side.pool, side.tags, roles, side.group_size, engine, prompt, config.seed)


def _kill_one_soon(manager: Any, seconds: float) -> None:
    """Kill a worker while it plays, as the machine's out-of-memory killer would."""

    def kill() -> None:
        time.sleep(min(0.05, seconds / 20))
        pids = manager.worker_pids()
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def _metrics(trajectories: Any, seconds: float) -> dict[str, Any]:
    from shoal.train.agent_metrics import rollout_metrics

    tokens = sum(t.n_tokens for t in trajectories)
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def _row(name: str, trajectories: Any, seconds: float, reference: float, equal: str) -> list[str]:
    metrics = _metrics(trajectories, seconds)
    return [
        name,
        f"{seconds:.3f}",
        f"{reference / seconds:.2f}x",
        str(int(metrics["failed_episodes"])),
        f"{metrics['success']:.3f}",
        f"{metrics['reward']:.3f}",
        equal,
    ]


def _equal(verdict: Any) -> str:
    words = {"L2": "bit-equal", "L1": "same tokens"}
    return words.get(verdict.level, f"{verdict.episodes - verdict.same_episodes} DIFFER")


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < place < len(header) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
