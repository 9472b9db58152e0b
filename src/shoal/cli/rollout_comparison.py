"""`shoal rollout --compare`: the same episodes on every schedule, and with a worker killed on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shoal.cli.grammar import print_json, table
from shoal.cli.rollout import RolloutOptions, episode_metrics, prepare
from shoal.core.data import Trajectory, write_trajectories
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.samplers.sampler import Engine, Level
from shoal.rollout.verify import Verdict, compare

ATTEMPTS = 5
"""Rollouts in which a worker is killed, until one was hit while it played."""
LEVELS: dict[Level, str] = {
    "L2": "promises the same log-probabilities to the bit",
    "L1": "promises the same tokens",
    "L0": "promises nothing: a server's batches decide its rounding",
}
HEADER = ["", "seconds", "speed", "failed", "success", "reward", "lost", "result"]


def compare_schedules(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    """One after another, in lockstep, on workers, and with a worker killed; exit code 1 if anything differs."""
    folder, engine = prepare(config, options, ending)
    with ParallelRolloutManager(config, engine, backend="serial") as manager:
        reference = manager.collect(options.iteration)
        sequential = manager.report.seconds
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", reference)
    rows = [_row("one by one", reference, sequential, sequential, 0, "reference")]
    lockstep = _lockstep_here(config, engine)
    clock = time.perf_counter()
    trajectories = lockstep.collect(options.iteration, config.agent_proxy.sampling())
    seconds = time.perf_counter() - clock
    lockstep.close()
    verdict = compare(reference, trajectories)
    verdicts = [verdict]
    rows.append(_row("lockstep alone", trajectories, seconds, sequential, 0, _equal(verdict)))

    notes, parallel, died = [], 0.0, None
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
            play = _collect_and_kill if fault else ParallelRolloutManager.collect
            trajectories = play(manager, options.iteration)
            report = manager.report
        verdict = compare(reference, trajectories)
        verdicts.append(verdict)
        plural = "" if report.workers == 1 else "s"
        notes.append(f"{name}: {report.workers} worker{plural}, {report.batches} batches of the engine")
        if fault:
            died = report
            notes[-1] += f"; {report.worker_deaths} killed, {report.replayed_episodes} episodes played again"
        else:
            parallel = report.seconds
        told = "none died" if fault and not report.worker_deaths else _equal(verdict)
        rows.append(_row(name, trajectories, report.seconds, sequential, report.worker_deaths, told))
        if verdict.first:
            print(f"{name}: {verdict.first}", file=sys.stderr)
    out = sys.stderr if options.json else sys.stdout
    title = (
        f"{options.config_name}: {len(reference)} episodes, {engine.level} engine ({LEVELS[engine.level]})"
    )
    table(title, HEADER, rows, text=(0, len(HEADER) - 1), out=out)
    if not any(t.success for t in reference) and options.source is None:
        notes.append("no episode succeeded: these weights are untrained; --from RUN plays those of a run")
    print("\n".join(notes), file=out)
    least: Level = min(verdict.level for verdict in verdicts)
    metrics = episode_metrics(reference, sequential) | {"least_level": least, "seconds_parallel": parallel}
    if died is not None:
        metrics |= {"worker_deaths": died.worker_deaths, "replayed_episodes": died.replayed_episodes}
    summary = folder.finish(metrics)
    if options.json:
        print_json(summary)
    equal = least >= min(engine.level, "L1")
    return 0 if equal and (died is None or died.worker_deaths) else 1


def _lockstep_here(config: Any, engine: Engine) -> Any:
    """The plain collector over envs in this process."""
    from shoal.rollout.collector import TrajectoryCollector
    from shoal.rollout.factory import make_roles, make_set
    from shoal.rollout.settings import rollout_config

    plain = replace(rollout_config(config).environments, use_parallel_envs=False)
    side = make_set(plain, plain.es_manager.train)
    roles = make_roles(config.custom_envs, side.tags, config.agent_proxy.max_turn)
    prompt = config.agent_proxy.prompt
    return TrajectoryCollector(side.pool, side.tags, roles, side.group_size, engine, prompt, config.seed)


def _collect_and_kill(manager: ParallelRolloutManager, iteration: int) -> list[Trajectory]:
    """A rollout in which a worker is killed while it plays; again, should every worker have been too quick."""
    for _ in range(ATTEMPTS):
        with _killer(manager):
            trajectories = manager.collect(iteration)
        if manager.report.worker_deaths:
            break
    return trajectories


@contextlib.contextmanager
def _killer(manager: ParallelRolloutManager) -> Iterator[None]:
    """Kill workers as the machine's out-of-memory killer would, until one had an episode to lose."""
    done = threading.Event()
    before, asked = manager.report, manager.inference.statistics.requests

    def kill() -> None:
        while manager.report is before or manager.inference.statistics.requests == asked:
            if done.wait(0.001):
                return
        for pid in manager.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if done.wait(0.2) or manager.report.worker_deaths:  # an idle worker costs nothing: try the next
                return

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _row(
    name: str, trajectories: Sequence[Trajectory], seconds: float, reference: float, lost: int, result: str
) -> list[str]:
    metrics = episode_metrics(trajectories, seconds)
    return [
        name,
        f"{seconds:.3f}",
        f"{reference / seconds:.2f}x",
        str(int(metrics["failed_episodes"])),
        f"{metrics['success']:.3f}",
        f"{metrics['reward']:.3f}",
        str(lost),
        result,
    ]


def _equal(verdict: Verdict) -> str:
    words = {"L2": "bit-equal", "L1": "same tokens"}
    return words.get(verdict.level, f"{verdict.episodes - verdict.same_episodes} DIFFER")
