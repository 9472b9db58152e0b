"""`shoal rollout`: play episodes without training, compare sequential with parallel, or replay a saved run."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.command import Command, Flag
from shoal.cli.grammar import (
    AgentOptions,
    ConfigName,
    Progress,
    came_to_an_end,
    composed,
    hide_loading,
    journal_of,
    new_folder,
    playing_settings,
    print_json,
    refuse_idle,
    show_warnings,
    table,
    weights_at,
)
from shoal.cli.output import program
from shoal.core.data import Trajectory, read_trajectories, write_trajectories
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import UNFINISHED, RunFolder
from shoal.core.seeding import derive_seed
from shoal.rollout.journal import Journal
from shoal.rollout.plan import Assignment, place_of
from shoal.rollout.rollouts import ParallelRolloutManager
from shoal.rollout.samplers.sampler import Level, Sampler
from shoal.rollout.settings import Backend
from shoal.rollout.verify import Verdict, compare
from shoal.testing.proof import meanwhile
from shoal.viewer.markup import number

MORE = """\
examples:
  shoal rollout --config-name base-parallel                  play the training groups once, on parallel workers
  shoal rollout --config-name base-parallel --compare        sequential against parallel: time, equality, faults
  shoal rollout --config-name base-parallel --compare --backend threads agent_proxy.parallel_n_jobs=4
  shoal rollout --config-name demo --from runs/demo          with the newest checkpoint of a run
  shoal rollout --verify runs/rollout                        play a saved rollout again and say what was equal
  shoal rollout --verify runs/demo                           the same for what a training run saved
"""


ONE = tyro.conf.create_mutex_group(required=False)


@dataclass(frozen=True)
class RolloutOptions(AgentOptions):
    """Play the groups of a config with its engine, without training.

    Say the same again with run_dir=FOLDER after a kill, Ctrl-C or full disk, and what was played there is kept.
    """

    config_name: Annotated[str, ConfigName] = "base-parallel"
    backend: Backend | None = None
    """where workers run; as the config says if not given"""
    source: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """take the engine of this run"""
    iteration: int = 0
    """names the env seeds and the sampling noise"""
    compare: Annotated[Flag, ONE] = False
    """play sequentially and in parallel, and compare everything"""
    verify: Annotated[Path | None, tyro.conf.arg(metavar="RUN"), ONE] = None
    """replay what RUN saved, a rollout or the episodes of a training run whose checkpoint is there, and say which
    guarantee held; exit status 1 if less than promised"""


def rollout(options: RolloutOptions) -> int:
    """Play, and print a table."""
    show_warnings()
    with contextlib.ExitStack() as ending:
        return _run(options, ending)


COMMAND = Command(RolloutOptions, rollout, MORE)


def _run(options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    if options.verify is not None:
        refuse_idle(
            options, "with --verify, which plays what is recorded",
            "config_name", "config_dir", "overrides", "backend", "source", "iteration", "run_dir", "seed", "device",
        )  # fmt: skip
        return verify(options.verify, ending, as_json=options.json)
    config = composed(options)
    for name, given in (("--iteration", options.iteration), ("seed", config.seed)):
        if not -(2**63) <= given < 2**64:  # before a folder is made that nothing would be in
            raise ConfigError(f"{name} must be in [-2**63, 2**64) to name seeds, got {given}")
    run_dir = new_folder("rollout") if config.run_dir is None else Path(config.run_dir)
    if (run_dir / "summary.json").exists():
        raise ConfigError(f"{run_dir} holds a run already: pass another run_dir")
    config = replace(config, run_dir=str(run_dir))
    if options.compare:
        if (run_dir / UNFINISHED).exists():
            raise ConfigError(
                f"{run_dir} holds a rollout that is not finished: go on with it without --compare, or pass another "
                "run_dir"
            )
        return compare_schedules(config, options, ending)
    return play(config, options, ending)


def play(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    """One rollout, saved so that it can be replayed."""
    with Progress("loading the engine", sys.stderr, bar=False):
        config, folder, engine, journal = prepare(config, options, ending)
    with ParallelRolloutManager(config, engine, backend=options.backend, journal=journal) as manager:
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
        replay = f"{program()} rollout --verify {shlex.quote(str(config.run_dir))}"
        print(f"episodes: {config.run_dir}/trajectories   replay: {replay}")
    came_to_an_end(trajectories)
    return 0


def prepare(
    config: Any, options: RolloutOptions, ending: contextlib.ExitStack
) -> tuple[Any, RunFolder, Any, Journal]:
    """The config with a number of `max_tokens`, the run folder that has it, the engine and what was played before."""
    from shoal.core.configuration import as_yaml, to_mapping
    from shoal.core.files import write_folder, write_text
    from shoal.rollout.answers import with_room
    from shoal.rollout.factory import make_roles
    from shoal.rollout.prompts import Prompter
    from shoal.train.agent.evaluation import read_checkpoint
    from shoal.train.agent.policy import policy_of

    def read(source: Path | None) -> tuple[str, Any]:
        weights = weights_at(config.engine.model if source is None else source)
        return weights, engine_for(config, source, ending)

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
        prompter = Prompter(config.agent_proxy.prompt, engine.tokenizer)
        roles = make_roles(config.custom_envs, config.es_manager.train.group_tags())
        config = replace(config, agent_proxy=with_room(config.agent_proxy, roles, prompter))
    folder = ending.enter_context(RunFolder(config.run_dir, "rollout", config.seed))
    asked = {"iteration": options.iteration, "settings": playing_settings(to_mapping(config))}
    journal = Journal() if options.compare else journal_of(folder, weights, asked)
    write_text(folder.path / "config.yaml", as_yaml(to_mapping(config)))
    if config.engine.name == "tiny":
        with write_folder(folder.path / "engine") as new:
            policy_of(engine).save(new)
    return config, folder, engine, journal


def engine_for(config: Any, folder: Path | None, ending: contextlib.ExitStack) -> Any:
    """The engine in a folder, or a fresh one as the config says; `ending` closes it."""
    import torch

    from shoal.rollout.factory import words_of
    from shoal.rollout.samplers.registry import close_engine, make_engine
    from shoal.train.agent.policy import load_engine

    torch.set_num_threads(config.engine.threads)
    if config.engine.name == "huggingface":
        hide_loading()
    if folder is not None:
        return load_engine(folder, device=config.engine.device, config=config.engine)
    engine = make_engine(config.engine, words_of(config), config.seed)
    ending.callback(close_engine, engine)
    return engine


def episode_metrics(
    trajectories: Sequence[Trajectory], seconds: float, new: Sequence[Trajectory] | None = None
) -> dict[str, Any]:
    """How the episodes went, and how fast those were that took the seconds: the `new` ones, all if not given."""
    from shoal.train.agent.evaluation import rollout_metrics

    tokens = sum(t.n_tokens for t in (trajectories if new is None else new))
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


# --- --compare: the same episodes on every schedule, and with a worker killed on the way
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
    from shoal.rollout.factory import make_set
    from shoal.rollout.settings import rollout_config
    from shoal.train.agent.playing import lockstep_collector

    config, folder, engine, _ = prepare(config, options, ending)
    name = "one by one"
    ending.enter_context(Progress("comparing", sys.stderr, bar=False)).doing = lambda: f"playing {name}"
    with ParallelRolloutManager(config, engine, backend="serial") as manager:
        reference = manager.collect(options.iteration)
        sequential = manager.report.seconds
    folder.hold()
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", reference)
    rows = [_row(name, reference, sequential, sequential, 0, "reference")]
    name, plain = "lockstep alone", replace(rollout_config(config), use_parallel_envs=False)
    lockstep = lockstep_collector(config, make_set(plain, plain.es_manager.train), engine, config.seed)
    clock = time.perf_counter()
    trajectories = lockstep.collect(options.iteration, config.agent_proxy.sampling())
    seconds = time.perf_counter() - clock
    lockstep.close()
    verdict = compare(_wordless(reference), _wordless(trajectories))
    verdicts = [verdict]
    rows.append(_row(name, trajectories, seconds, sequential, 0, _equal(verdict)))
    if verdict.first:
        print(f"{name}: {verdict.first}", file=sys.stderr)

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
        verdict = compare(_wordless(reference), _wordless(trajectories))
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
    title = (
        f"{options.config_name}: {len(reference)} episodes, {engine.level} engine ({LEVELS[engine.level]})"
    )
    table(title, HEADER, rows, text=(0, len(HEADER) - 1))
    if not any(t.success for t in reference) and options.source is None:
        notes.append("no episode succeeded: these weights are untrained; --from RUN plays those of a run")
    print("\n".join(notes))
    least: Level = min(verdict.level for verdict in verdicts)
    metrics = episode_metrics(reference, sequential) | {"least_level": least, "seconds_parallel": parallel}
    if died is not None:
        metrics |= {"worker_deaths": died.worker_deaths, "replayed_episodes": died.replayed_episodes}
    summary = folder.finish(metrics)
    if options.json:
        print_json(summary)
    came_to_an_end(reference)
    equal = least >= min(engine.level, "L1")
    return 0 if equal and (died is None or died.worker_deaths) else 1


def _wordless(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The same without the words of failures, which tell who played them."""
    return [replace(trajectory, error=None) for trajectory in trajectories]


def _collect_and_kill(manager: ParallelRolloutManager, iteration: int) -> list[Trajectory]:
    """A rollout in which a worker is killed while it plays; again, should every worker have been too quick."""
    for _ in range(ATTEMPTS):
        with meanwhile(_killer(manager)):
            trajectories = manager.collect(iteration)
        if manager.report.worker_deaths:
            break
    return trajectories


def _killer(manager: ParallelRolloutManager) -> Callable[[threading.Event], None]:
    """Kills workers as the machine's out-of-memory killer would, until one had an episode to lose."""
    before, asked = manager.report, manager.inference.statistics.requests

    def kill(done: threading.Event) -> None:
        while manager.report is before or manager.inference.statistics.requests == asked:
            if done.wait(0.001):
                return
        for pid in manager.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if done.wait(0.2) or manager.report.worker_deaths:  # an idle worker costs nothing: try the next
                return

    return kill


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


# --- --verify: what a run saved again, one episode after another
def verify(run: Path, ending: contextlib.ExitStack, *, as_json: bool = False) -> int:
    """Replay a saved rollout, or what a training run saved; exit code 1 if less held than was promised."""
    from shoal.testing.recorded_runs import recordings_of
    from shoal.testing.replay import Replay

    file = run / "trajectories" / "rollout.jsonl"
    player = Replay(run) if (run / "config.yaml").exists() else None
    recordings = [] if player is None else [
        (recording, folder) for recording in recordings_of(run)
        if recording.kind in ("train", "heldout") and (folder := player.weights_of(recording)) is not None
    ]  # fmt: skip
    if player is None or not (file.exists() or recordings):
        raise DataError(
            f"{run} is not the folder of a saved rollout or of an agent's training: it needs config.yaml and "
            f"{file.relative_to(run)}, as `shoal rollout` writes them, or trajectories/heldout-N.jsonl with the "
            f"checkpoint of iteration N, as `shoal train` does"
        )
    config = player.config
    if file.exists():
        own = run / "engine"
        engine = engine_for(config, own if own.exists() else None, ending)
        found = [_replay(str(run), config, engine, file, engine.level)]
    else:
        found = []
        for recording, folder in recordings:
            engine = Replay(run).engine_of(folder)  # another one, which holds no more than these weights
            promised: Level = "L0" if config.engine.name == "vllm" else engine.level
            name = f"{run}: {recording.file.name} with {folder.name}"
            found.append(_replay(name, config, engine, recording.file, promised, held_out=recording.held_out))
    for one in found:
        print(f"{one['name']}, promised {one['promised']}, held {one.pop('told')}")
        if one["left_out"]:
            print(f"{one['left_out']} episodes had failed when they were saved and are left out")
    equal = all(one["equal"] for one in found)
    if as_json:
        print_json({"equal": equal, "files": found})
    return int(not equal)


def _replay(
    name: str, config: Any, engine: Sampler, file: Path, promised: Level, *, held_out: bool = False
) -> dict[str, Any]:
    """Play the episodes of a file again; what held of what was promised."""
    saved = list(read_trajectories(file))
    seed = derive_seed(config.seed, "held-out") if held_out else config.seed
    sampling = config.agent_proxy.sampling(greedy=held_out)
    side = "val" if held_out else "train"
    with ParallelRolloutManager(config, engine, backend="serial", side=side, seed=seed) as manager:
        places = [place_of(seed, t.iteration, t.group, t.member) for t in saved]
        assignments = [
            Assignment(i, place, t.env) for i, (place, t) in enumerate(zip(places, saved, strict=True))
        ]
        with Progress("playing", sys.stderr, bar=False) as progress:
            progress.doing = lambda: "playing {} again, {} of {} episodes".format(file.name, *manager.counts)
            replayed = manager.play(assignments, sampling)
    whole = [k for k, t in enumerate(saved) if t.status == "ok"]
    verdict = compare([saved[k] for k in whole], [replayed[k] for k in whole])
    equal = bool(whole) and verdict.level >= min(promised, "L1")
    return {
        "name": name, "promised": promised, "held": verdict.level if whole else None, "equal": equal,
        "episodes": len(whole), "left_out": len(saved) - len(whole),
        "told": str(verdict) if whole else "nothing: no episode came to its end",
    }  # fmt: skip
