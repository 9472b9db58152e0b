"""`shoal skills train`: grow a graph of skills, train it, and show what it can do on unseen worlds."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.command import Command, flags_of_field
from shoal.cli.grammar import Progress, print_json, refuse_below, show_warnings, tracking
from shoal.cli.output import harmless, next_steps, program
from shoal.cli.runs import resume_command
from shoal.cli.skills import DEFAULT, table
from shoal.core.configuration import from_mapping, read_settings, to_mapping
from shoal.core.errors import ConfigError, MissingExtraError
from shoal.core.files import write_text
from shoal.core.run_folder import RunFolder, refuse_missing
from shoal.skills.graph.launchers import compilation_cache, make_launcher
from shoal.skills.graph.requests import is_exhausted
from shoal.skills.graph.views import training_seconds
from shoal.skills.learning.episodes import draw_chain, evaluate_chain
from shoal.skills.learning.trainer import TrainingConfig, default_config
from shoal.skills.plan import dependencies, plan_for
from shoal.skills.proposers import KnowledgeBase, LanguageModel, Proposer, Replay, knowledge_base
from shoal.skills.scheduler import SkillScheduler, check_limits
from shoal.skills.spec import Features, load_skills
from shoal.skills.worlds.registry import check_installed, world_features, world_of
from shoal.viewer.markup import counted

UNSEEN = 12345  # seed of the worlds of the final evaluation
STATES = ("running", "completed", "failed", "blocked")
"""Of a skill, whose changes are printed where there is no terminal."""


@dataclass(frozen=True)
class TrainOptions:
    """Train skills bottom-up, several at a time; a skill starts when those it needs are completed."""

    graph_path: Path = DEFAULT
    """folder of the run: state, experts, pictures, summary.json"""
    env_name: str = "crafting"
    """crafting, craftax-classic, craftax (both need the extra "craftax"), or module:Class of your own"""
    max_nodes: int = 10
    """most skills in the graph"""
    max_parallel_skills: int = 3
    """trainings at a time, whatever the number of GPUs"""
    scheduler_poll_interval: float = 30.0
    """seconds between looks at batch jobs of SLURM; other trainings are noticed when they end"""
    max_retries: int = 2
    """launches again after a failure, each from the last checkpoint"""
    seed: int = 0
    """of the run: start states, weights and noise"""
    skills: Path | None = None
    """a YAML file of skills; by default the one that comes with the world"""
    target_skill: str | None = None
    """train only this skill and what it needs"""
    skill_timesteps_budget: float | None = None
    """env steps a skill may use in all; by default --total-timesteps"""
    llm_name: str | None = None
    """let this language model propose the skills"""
    llm_url: str = "http://127.0.0.1:8000/v1"
    """its OpenAI-compatible server; OPENAI_API_KEY is sent to it only if you name it here, and never further"""
    replay: Path | None = None
    """propose what a language model proposed in an earlier run, from its proposals.jsonl"""
    launcher: str = "local"
    """local, tmux (to attach and watch), ray or slurm"""
    sbatch: tuple[str, ...] = ()
    """options for SLURM, each as sbatch takes it; docs/skills.md shows some"""
    time_limit: float | None = None
    """seconds that one launch of a training may take"""
    gpus_per_skill: float = 0.0
    """share of a GPU each training gets from Ray"""
    evaluation_worlds: int = 512
    """unseen worlds for the final evaluation; 0: none"""
    film: bool = True
    """write chain.gif"""
    resume: bool = False
    """go on with what is in the folder"""
    dry_run: bool = False
    """print what would be trained, check that it can be, and stop"""
    json_events: bool = False
    """print one JSON line per durable moment instead of a table"""
    json: bool = False
    """print the summary as JSON at the end instead of a table"""
    tracker: Literal["none", "wandb"] | None = None
    """Where finished skills are logged besides the run folder (default: none)."""
    wandb: str | None = None
    """Log finished skills to this Weights & Biases project (needs the package wandb)."""
    use_wandb: bool = False
    """The same as --wandb shoal-skills."""
    gpu_ids: str | None = None
    """sets CUDA_VISIBLE_DEVICES of the trainings"""
    config: TrainingConfig = field(default_factory=TrainingConfig)
    said: Annotated[tuple[str, ...], Parameter(parse=False)] = ()
    """the options that the call itself names; what a resumed folder was trained with is kept silently"""


def _defaults(given: Mapping[str, Any]) -> TrainOptions:
    """The training defaults of the world that is named; of a run to go on with, what it was trained with."""
    world, folder = given.get("env_name", TrainOptions.env_name), given.get("graph_path", DEFAULT)
    default = TrainOptions(config=default_config(world_of(world)), said=tuple(given))
    path = folder / "config.yaml"
    if given.get("resume") and path.exists():  # what is not said again is as it was
        return _read_config(path, folder, default)
    return default


OF_ONE_CALL = ("dry_run", "json_events", "json", "graph_path", "said")


def _read_config(path: Path, folder: Path, default: TrainOptions) -> TrainOptions:
    """The options that a folder was trained with, but for those that belong to one call."""
    saved = read_settings(path)
    try:
        paths = {key: Path(saved[key]) for key in ("skills", "replay") if saved.get(key)}
        kept = {key: value for key, value in saved.items() if key not in (*OF_ONE_CALL, *paths)}
        options = from_mapping(TrainOptions, {"config": saved["config"], **kept})
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what this version writes: {error}; remove it to resume") from error
    return replace(options, graph_path=folder, said=default.said, **paths)  # type: ignore[arg-type]


MORE = """\
examples:
  shoal skills train --max_parallel_skills 2
  shoal skills train --dry-run                                    what would be trained
  shoal skills train --resume --out runs/skills                   go on
  shoal skills train --launcher tmux --skills mine.yaml --out runs/mine
"""
WANTED = (
    "--out", "--env-name", "--skills", "--max-nodes", "--max-parallel-skills", "--total-timesteps", "--seed",
    "--resume", "--dry-run", "--json",
)  # fmt: skip


def train(options: TrainOptions) -> int:
    """Train the graph."""
    world = world_of(options.env_name)
    features = world_features(world)
    os.environ.update(compilation_cache())
    refuse_below(options, max_nodes=1, evaluation_worlds=0)
    _refuse_what_is_ignored(options)
    proposer = _proposer(options, options.skills or knowledge_base(world), features)
    if options.dry_run:
        _print_graph(proposer, as_json=options.json)
    if options.launcher in ("local", "tmux"):
        check_installed(world)  # before anything is made for it
    if options.resume:
        refuse_missing(options.graph_path)
    elif (options.graph_path / "state.db").exists():
        raise ConfigError(
            f"{options.graph_path} holds skills already; pass --resume to go on, or another --out"
        )
    check_limits(
        options.max_parallel_skills, options.max_retries, options.scheduler_poll_interval, options.time_limit
    )
    launcher = make_launcher(
        options.launcher, gpus=options.gpus_per_skill, folder=options.graph_path, sbatch=options.sbatch,
        every=options.scheduler_poll_interval,
    )  # fmt: skip
    if options.dry_run:
        return 0
    run = RunFolder(
        options.graph_path, "skills train", options.seed, print_json if options.json_events else None
    )
    config = options.config
    if options.skill_timesteps_budget is not None:
        config = replace(config, total_timesteps=options.skill_timesteps_budget)
    began = time.monotonic()
    progress, quiet = Progress("training", bar=False), options.json_events or options.json
    progress.doing = lambda: f"in training: {', '.join(scheduler.get_running_skills()) or 'nothing'}"

    def happened(event: dict[str, Any]) -> None:
        run.event(**event)
        if not (quiet or sys.stdout.isatty()) and event["event"] in STATES:
            why = harmless(event.get("reason") or "")
            line = f"{time.monotonic() - began:8.1f} s  {event['skill']}: {event['event']} {why}"
            progress.say(line.rstrip())

    scheduler = SkillScheduler(
        options.graph_path, options.max_parallel_skills, options.scheduler_poll_interval, options.max_retries,
        world=world, launcher=launcher, seed=options.seed, config=config,
        on_event=happened, time_limit=options.time_limit,
        gpu_ids=options.gpu_ids,
    )  # fmt: skip
    scheduler.take()  # before anything of a run that is going on is changed
    _write_config(options)
    log = _wandb(options)

    def told(name: str, data: dict[str, Any]) -> None:
        run.append_metrics({"skill": name, "seconds": round(time.monotonic() - began, 2), **data})
        if log is not None:
            log.log({f"{name}/{key}": value for key, value in data.items() if isinstance(value, int | float)})

    scheduler.set_callbacks(told, told)
    show_warnings("shoal: %(message)s")
    try:
        with ExitStack() as stack:
            if not quiet and sys.stdout.isatty():  # the skills in the states that they are in, as they change
                from rich.live import Live

                store, redirect = scheduler.store, sys.stderr.isatty()
                shown = Live(get_renderable=lambda: table(store.skills(), store), redirect_stderr=redirect)
                stack.enter_context(shown)
            elif not quiet:
                stack.enter_context(progress)
            finished = scheduler.run(proposer, options.max_nodes)
        with Progress("evaluating and drawing the chain", sys.stderr):
            metrics = _measure(options, scheduler, began)
    except KeyboardInterrupt:
        going = ", ".join(scheduler.get_running_skills())
        run.finish(_counts(scheduler, began), "interrupted")
        folder = shlex.quote(str(options.graph_path))
        print(f"shoal: interrupted; still in training: {going or 'nothing'}", file=sys.stderr)
        print(f"shoal: end them with: {program()} skills stop --out {folder}", file=sys.stderr)
        print(f"shoal: go on with: {resume_command(options.graph_path, 'skills train')}", file=sys.stderr)
        return 130
    except Exception as error:
        run.fail(error)
        raise
    return _conclude(options, scheduler, run, finished, metrics)


COMMAND = Command(TrainOptions, train, MORE, WANTED, _defaults)


def _proposer(options: TrainOptions, path: Path, features: Features) -> Proposer:
    """What names the skills to train; `path` describes some."""
    if options.replay:
        return Replay(options.replay, features)
    if not options.llm_name:
        return KnowledgeBase(path, features, options.max_nodes, options.target_skill)
    key = os.environ.get("OPENAI_API_KEY", "none") if "llm_url" in options.said else "none"
    return LanguageModel(
        options.llm_name, options.llm_url, features, api_key=key, examples=load_skills(path, features)[:1],
        record=options.graph_path / "proposals.jsonl",
    )  # fmt: skip


def _refuse_what_is_ignored(options: TrainOptions) -> None:
    """Raise a `ConfigError` that names options of which one would be ignored."""
    if options.gpu_ids and options.gpus_per_skill:
        raise ConfigError("--gpu-ids names GPUs, --gpus-per-skill lets Ray choose them; give one of the two")
    for name, launcher in (("gpus_per_skill", "ray"), ("sbatch", "slurm")):
        if getattr(options, name) and options.launcher != launcher and name in options.said:
            raise ConfigError(
                f"{flags_of_field(name)[0]} is for --launcher {launcher} and does nothing with {options.launcher}: "
                "leave it out, or name that launcher"
            )
    other = "--replay" if options.replay else "--llm-name" if options.llm_name else None
    if options.target_skill and other:
        raise ConfigError(
            f"--target-skill chooses from a file of skills, and {other} has skills proposed: give one of the two"
        )
    if options.replay and "llm_name" in options.said:
        raise ConfigError("--replay and --llm-name both say what proposes skills: give one of the two")
    if not options.llm_name and "llm_url" in options.said:
        raise ConfigError("--llm-url does nothing without --llm-name: leave it out")


def _measure(options: TrainOptions, scheduler: SkillScheduler, began: float) -> dict[str, Any]:
    """Counts, the final evaluation, the film."""
    metrics = _counts(scheduler, began)
    store = scheduler.store
    if options.evaluation_worlds and store.skills("completed") and not scheduler.stopped:
        report = evaluate_chain(store, options.evaluation_worlds, UNSEEN)
        metrics |= {
            "chain_success": report.success,
            "skill_success": report.skills,
            "chain": report.as_dict(),
        }
        if options.film:
            try:
                metrics["film_finished"] = draw_chain(store, options.graph_path / "chain.gif", UNSEEN)
            except MissingExtraError as error:
                print(f"shoal: no chain.gif: {error}", file=sys.stderr)
    return metrics


def _conclude(
    options: TrainOptions, scheduler: SkillScheduler, run: RunFolder, finished: bool, metrics: dict[str, Any]
) -> int:
    """Write summary.json and say how it went."""
    stopped = scheduler.stopped
    status = "completed" if finished else "interrupted" if stopped else "failed"
    summary = run.finish(metrics, status)
    if options.json:
        print_json(summary)
    elif not options.json_events:
        if "chain_success" in metrics:
            print(
                f"on {options.evaluation_worlds} unseen worlds, of those that got to the skill, the share that did it:"
            )
            for name, success in metrics["skill_success"].items():
                print(f"{success:7.3f}  {name}")
            print(f"{metrics['chain_success']:7.3f}  of all worlds: the whole chain")
        print(
            f"{counted(metrics['skills_completed'], 'skill')} in {metrics['makespan']:.1f} s "
            f"({metrics['training_seconds']:.1f} s of all trainings, {summary['seconds']:.1f} s with the evaluation)\n"
            f"{next_steps(options.graph_path, {})}"
        )
    if stopped:
        print(
            f"shoal: stopped; go on with: {resume_command(options.graph_path, 'skills train')}",
            file=sys.stderr,
        )
    for name, reason in scheduler.get_failed_skills().items():
        print(f"shoal: {name}: {scheduler.get_status(name)}: {harmless(reason)}", file=sys.stderr)
    if failed := scheduler.store.skills("failed"):
        name = failed[0].name
        again = f"{program()} skills retry {shlex.quote(name)} --out {shlex.quote(str(options.graph_path))}"
        anew = " --fresh" if is_exhausted(scheduler.store, name) else ""
        print(f"shoal: give a failed skill another chance with: {again}{anew}", file=sys.stderr)
    scheduler.close()
    return 0 if finished else 1


def _counts(scheduler: SkillScheduler, began: float) -> dict[str, Any]:
    rows = scheduler.store.skills()
    return {
        "skills_completed": sum(row.status == "completed" for row in rows),
        "skills_failed": sum(row.status == "failed" for row in rows),
        "skills_blocked": sum(row.status in ("blocked", "skipped") for row in rows),
        "frames": sum(row.budget_used for row in rows),
        "training_seconds": round(training_seconds(scheduler.store.attempts(), time.time()), 3),
        "makespan": round(time.monotonic() - began, 3),
    }


def _print_graph(proposer: Proposer, *, as_json: bool) -> None:
    if not isinstance(proposer, KnowledgeBase):
        raise ConfigError("--dry-run shows the knowledge base; a language model proposes as training goes on")
    known = proposer.skills, proposer.features
    graph = [
        (skill.name, dependencies(skill, *known), plan_for(skill.name, *known)) for skill in proposer.skills
    ]
    if as_json:
        rows = [{"skill": name, "needs": needs, "plan": plan} for name, needs, plan in graph]
        print_json(to_mapping({"skills": rows}))
        return
    for name, needs, plan in graph:
        steps = " -> ".join(f"{step.skill} x{step.count}" for step in plan)
        print(f"{name}: needs {', '.join(needs) or 'nothing'}; plan {steps}")


def _write_config(options: TrainOptions) -> None:
    import yaml

    plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    del plain["said"]
    write_text(options.graph_path / "config.yaml", yaml.safe_dump(plain, sort_keys=False))


def _wandb(options: TrainOptions) -> Any:
    _, project = tracking(options.tracker, options.wandb or ("shoal-skills" if options.use_wandb else None))
    if project is None:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb needs the package wandb: pip install wandb") from error
    return wandb.init(project=project, config=asdict(options))
