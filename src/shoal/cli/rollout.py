"""`shoal rollout`: play episodes without training, compare sequential with parallel, or replay a saved run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.agent_options import AgentOptions, ConfigName, composed, hide_loading, show_warnings
from shoal.cli.command import Command, Flag
from shoal.cli.grammar import Progress, print_json, table
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, DataError
from shoal.rollout.settings import Backend

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
    """Play the groups of a config with its engine, without training."""

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
        from shoal.cli.rollout_replay import verify

        return verify(options.verify, ending)
    config = composed(options)
    run_dir = Path(config.run_dir or "runs/rollout")
    if (run_dir / "summary.json").exists() and config.run_dir is not None:
        raise ConfigError(f"{run_dir} holds a run already: pass another run_dir")
    config = replace(config, run_dir=str(run_dir))
    if options.compare:
        from shoal.cli.rollout_comparison import compare_schedules

        return compare_schedules(config, options, ending)
    return play(config, options, ending)


def play(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> int:
    """One rollout, saved so that it can be replayed."""
    from shoal.core.data import write_trajectories
    from shoal.rollout.parallel.rollout import ParallelRolloutManager

    folder, engine = prepare(config, options, ending)
    with ParallelRolloutManager(config, engine, backend=options.backend) as manager:
        with Progress("playing", sys.stderr, bar=False):
            trajectories = manager.collect(options.iteration)
        metrics = episode_metrics(trajectories, manager.report.seconds) | manager.report.metrics()
    write_trajectories(folder.path / "trajectories" / "rollout.jsonl", trajectories)
    folder.append_metrics({"iteration": options.iteration, **metrics})
    summary = folder.finish({**metrics, "iteration": options.iteration, "level": engine.level})
    if options.json:
        print_json(summary)
        return 0
    table(
        f"rollout of {options.config_name}",
        ["", "value"],
        [[k, _shown(v)] for k, v in metrics.items()],
        text=(0, 1),
    )
    print(f"episodes: {folder.path / 'trajectories'}   replay: shoal rollout --verify {folder.path}")
    return 0


def prepare(config: Any, options: RolloutOptions, ending: contextlib.ExitStack) -> tuple[Any, Any]:
    """The run folder with its config, and the engine, saved beside it when it is small."""
    from omegaconf import OmegaConf

    from shoal.core.configuration import to_mapping
    from shoal.core.run_folder import RunFolder
    from shoal.train.agent.policy import policy_of

    engine = engine_for(config, options.source, ending)
    folder = RunFolder(config.run_dir, "rollout", config.seed)
    OmegaConf.save(OmegaConf.create(to_mapping(config)), folder.path / "config.yaml")
    if config.engine.name == "tiny":
        (folder.path / "engine").mkdir(exist_ok=True)
        policy_of(engine).save(folder.path / "engine")
    return folder, engine


def engine_for(config: Any, source: Path | None, ending: contextlib.ExitStack) -> Any:
    """The engine of a run, or a fresh one as the config says; `ending` closes it."""
    import torch

    from shoal.rollout.factory import make_roles
    from shoal.rollout.samplers.registry import close_engine, make_engine
    from shoal.train.agent.checkpoint import newest_checkpoint
    from shoal.train.agent.policy import load_engine

    torch.set_num_threads(config.engine.threads)
    if config.engine.name == "huggingface":
        hide_loading()
    if source is not None:
        if not source.is_dir():
            raise DataError(f"{source} is not a run folder")
        own = source / "engine"
        folder = own if own.is_dir() else newest_checkpoint(source / "checkpoints") / "engine"
        return load_engine(folder, device=config.engine.device, config=config.engine)
    tags = {*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()}
    roles = make_roles(config.custom_envs, sorted(tags), config.agent_proxy.max_turn)
    words = sorted({word for role in roles.values() for word in role.projection.words()})
    engine = make_engine(config.engine, words, config.seed)
    ending.callback(close_engine, engine)
    return engine


def episode_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, Any]:
    """How the episodes went, and how fast."""
    from shoal.train.agent.evaluation import rollout_metrics

    tokens = sum(t.n_tokens for t in trajectories)
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def _shown(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
