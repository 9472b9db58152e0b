"""Rollouts without training, in run folders that can be replayed; sequential ones beside parallel ones."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.configuration import as_yaml, to_mapping
from shoal.core.data import Trajectory, write_trajectories
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_folder, write_text
from shoal.core.run_folder import UNFINISHED, RunFolder
from shoal.rollout.factory import make_roles, words_of
from shoal.rollout.journal import CountedJournal, Journal, Progress
from shoal.rollout.play import ParallelRolloutManager
from shoal.rollout.prompts import Prompter
from shoal.rollout.settings import Backend
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.registry import close_engine, make_engine
from shoal.samplers.sampler import Level
from shoal.train.agent.config import AgentConfig, playing_settings
from shoal.train.agent.policies.loading import load_engine, policy_of
from shoal.train.agent.processes.determinism import threads
from shoal.train.agent.run.answers import with_room
from shoal.train.agent.run.metrics import rollout_metrics
from shoal.train.records import compare
from shoal.train.records.checkpoints import read_checkpoint
from shoal.train.records.models import weights_at


class Recorded(NamedTuple):
    """What a rollout left in its run folder."""

    summary: dict[str, Any]
    trajectories: list[Trajectory]  # failed ones too, group by group


class Played(NamedTuple):
    """The same groups, played in one of several ways."""

    name: str
    seconds: float
    metrics: dict[str, Any]
    verdict: compare.Verdict  # against the sequential rollout


class Comparison(NamedTuple):
    """A sequential rollout, a parallel one, and one in which a worker was killed."""

    summary: dict[str, Any]
    trajectories: list[Trajectory]  # of the sequential one
    ways: list[Played]
    level: Level  # how exact the engine is
    workers: int
    batches: int

    @property
    def equal(self) -> bool:
        """Whether all ways wrote the same tokens, and the same log-probabilities where the engine is exact."""
        return bool(self.summary["metrics"]["least_level"] >= min(self.level, "L1"))


def record_rollout(
    config: AgentConfig,
    source: Path | None = None,
    *,
    iteration: int = 0,
    backend: Backend | None = None,
    progress: Progress = lambda played, total: None,
) -> Recorded:
    """Play the training groups of a config once, without training: `shoal rollout` in Python.

    The same call again after a kill or a full disk plays only what is missing.

    Args:
        config: its `run_dir` is the folder.
        source: a run whose newest checkpoint plays, or a folder with an `engine`; the config's own engine if not given.
        iteration: part of the seeds.
        backend: in place of the config's.
        progress: called with the episodes played and all of them, first with those that the folder had kept.

    Raises:
        ConfigError: the folder holds a run that has come to its end, or settings do not fit.
        DataError: `source` is no run, or has no checkpoint.
    """
    _refuse_taken(config, iteration)
    with ExitStack() as ending:
        place = _prepare(config, source, ending)
        asked = {
            "weights": place.weights, "iteration": iteration,
            "settings": playing_settings(to_mapping(place.config)),
        }  # fmt: skip
        total = len(config.es_manager.train.group_tags()) * config.es_manager.train.group_size
        journal = CountedJournal(progress, total, place.folder.unfinished_path, asked, place.folder.hold)
        place.begin()
        with place.manager(backend, journal) as manager:
            trajectories = manager.collect(iteration)
            new = [t for t in trajectories if t not in journal]
            metrics = _metrics(trajectories, manager.report.seconds, new) | manager.report.metrics()
        write_trajectories(place.folder.path / "trajectories" / "rollout.jsonl", trajectories)
        place.folder.keep_metrics("iteration", -math.inf, {"iteration": iteration, **metrics})
        summary = place.folder.finish({**metrics, "iteration": iteration, "level": place.engine.level})
    return Recorded(summary, trajectories)


def compare_with_sequential(
    config: AgentConfig,
    source: Path | None = None,
    *,
    iteration: int = 0,
    backend: Backend | None = None,
    begun: Callable[[str], object] = lambda what: None,
) -> Comparison:
    """Play the same groups sequentially, on parallel workers, and once more with a worker that is killed.

    Arguments are those of `record_rollout`; `begun` is called with what is played next, in words.
    """
    _refuse_taken(config, iteration)
    if (Path(str(config.run_dir)) / UNFINISHED).exists():
        raise ConfigError(
            f"{config.run_dir} holds a rollout that is not finished: go on with it without --compare, or pass another "
            "run_dir"
        )
    ways: list[Played] = []

    def add(name: str, trajectories: Sequence[Trajectory], seconds: float) -> None:
        told = [[replace(t, error=None) for t in played] for played in (reference, trajectories)]
        ways.append(Played(name, seconds, _metrics(trajectories, seconds), compare.compare(*told)))

    with ExitStack() as ending:
        begun("playing sequentially")
        place = _prepare(config, source, ending)
        place.begin()
        with place.manager("serial") as manager:
            reference = manager.collect(iteration)
            add("sequential", reference, manager.report.seconds)
        write_trajectories(place.folder.path / "trajectories" / "rollout.jsonl", reference)
        begun("playing on parallel workers, once with one that is killed")
        with place.manager(backend) as manager:
            manager.collect(iteration + 1)  # workers start and import: not what is compared
            add("parallel", manager.collect(iteration), manager.report.seconds)
            workers, batches, deaths = manager.report.workers, manager.report.batches, 0
            if manager.worker_pids():
                with _killing_a_worker(manager):
                    trajectories = manager.collect(iteration)
                deaths = manager.report.worker_deaths
                add("a worker killed" if deaths else "no worker died", trajectories, manager.report.seconds)
        least = min(place.engine.level, *(way.verdict.level for way in ways))
        metrics = {"least_level": least, "seconds_parallel": ways[1].seconds, "worker_deaths": deaths}
        summary = place.folder.finish(ways[0].metrics | metrics)
    return Comparison(summary, reference, ways, place.engine.level, workers, batches)


@dataclass(frozen=True)
class _Place:
    """A run folder, and what plays into it."""

    config: AgentConfig  # with a number of `max_tokens`
    folder: RunFolder
    engine: Any
    weights: str
    tools: Toolbox

    def begin(self) -> None:
        """Write what the folder needs to be replayed."""
        write_text(self.folder.path / "config.yaml", as_yaml(to_mapping(self.config)))
        self.tools.keep(self.folder.path)
        if self.config.engine.name == "tiny":
            with write_folder(self.folder.path / "engine") as new:
                policy_of(self.engine).save(new)

    def manager(self, backend: Backend | None, journal: Journal | None = None) -> ParallelRolloutManager:
        from shoal.gateway.programs import sessions_of

        return ParallelRolloutManager(
            self.config, self.engine, backend=backend, journal=journal, tools=self.tools, sessions=sessions_of
        )


def _refuse_taken(config: AgentConfig, iteration: int) -> None:
    if config.run_dir is None:
        raise ConfigError("a rollout is recorded in the run_dir of its config, got None: set run_dir=FOLDER")
    for name, given in (("--iteration", iteration), ("seed", config.seed)):
        if not -(2**63) <= given < 2**64:  # before a folder is made that nothing would be in
            raise ConfigError(f"{name} must be in [-2**63, 2**64) to name seeds, got {given}")
    if (Path(str(config.run_dir)) / "summary.json").exists():
        raise ConfigError(f"{config.run_dir} holds a run already: pass another run_dir")


def _prepare(config: AgentConfig, run: Path | None, ending: ExitStack) -> _Place:
    """Load the engine, and take the run folder."""
    toolbox = ending.enter_context(Toolbox(config.agent_proxy.tools, config.agent_proxy.max_tool_turns))
    ending.enter_context(threads(config.engine.threads))

    def read(folder: Path) -> tuple[str, Any]:
        loaded = load_engine(folder, device=config.engine.device, config=config.engine)
        return weights_at(folder), loaded

    engine: Any
    if run is None:
        weights = weights_at(config.engine.model)
        engine = make_engine(config.engine, words_of(config, list(toolbox.tools.values())), config.seed)
        ending.callback(close_engine, engine)
    elif not run.is_dir():
        raise DataError(f"{run} is not a run folder")
    elif (run / "engine").is_dir():
        weights, engine = read(run / "engine")
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
    folder = ending.enter_context(RunFolder(str(config.run_dir), "rollout", config.seed))
    return _Place(config, folder, engine, weights, toolbox)


def _metrics(
    trajectories: Sequence[Trajectory], seconds: float, new: Sequence[Trajectory] | None = None
) -> dict[str, Any]:
    """How the episodes went, and how fast those were that took the seconds: the `new` ones, all if not given."""
    tokens = sum(t.n_tokens for t in (trajectories if new is None else new))
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,  # all were kept, and none played
    }


@contextmanager
def _killing_a_worker(manager: ParallelRolloutManager) -> Iterator[None]:
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
