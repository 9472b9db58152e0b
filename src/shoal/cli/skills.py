"""`shoal skills …`: train a graph of skills, look at it, steer it."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from shoal.cli.command import Command, Group, Positional
from shoal.cli.grammar import refuse_below, wide_console
from shoal.cli.output import harmless, json_stream, program
from shoal.cli.runs import resume_command
from shoal.core.errors import ConfigError, WorkerError
from shoal.core.run_folder import RunFolder, finite
from shoal.skills.graph.requests import ask_to_cancel, ask_to_stop, reopen
from shoal.skills.graph.store import AttemptRow, SkillRow, Store
from shoal.skills.graph.views import condition, export_views, progress_of, scheduler_state, training_seconds
from shoal.skills.scheduler import ENDING_SECONDS, SkillScheduler

DEFAULT = Path("runs/skills")


@dataclass(frozen=True)
class Folder:
    """A folder of skills."""

    graph_path: Path = DEFAULT
    """the folder of the run"""


@dataclass(frozen=True)
class StatusOptions(Folder):
    """Show every skill: state, expert, success, env steps, why it is where it is."""

    json: bool = False
    """print what scheduler_state.json holds"""


@dataclass(frozen=True, kw_only=True)
class NamedOptions(Folder):
    """Choose one skill of a folder."""

    name: Annotated[str, Positional("SKILL")]
    """the skill, by its name or as it is named in folders"""


@dataclass(frozen=True)
class CancelOptions(NamedOptions):
    """Give up a skill; a running training is ended."""


@dataclass(frozen=True)
class RetryOptions(NamedOptions):
    """Give a skill another chance: a failed one goes on from its last checkpoint, with what it blocked."""

    budget: float | None = None
    """env steps that it may use in all from now on; also for skills that run, wait or are completed"""
    fresh: bool = False
    """begin anew, with other random numbers"""


@dataclass(frozen=True)
class StopOptions(Folder):
    """End the run of a folder: its scheduler, and its trainings, which go on from their checkpoints when resumed."""

    wait: bool = False
    """let trainings that run end first, and merge them"""


@dataclass(frozen=True)
class LogsOptions(NamedOptions):
    """Print the output of a skill's latest training."""

    follow: bool = False
    """go on until the training ends"""


@dataclass(frozen=True)
class EvalOptions(Folder):
    """Play the plan over all completed skills in unseen worlds."""

    episodes: int = 512
    """worlds to play in"""
    seed: int = 12345
    """of the worlds"""
    target: str | None = None
    """play the plan of this skill instead"""


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(Folder):
    """List every version of an expert."""

    expert: Annotated[str, Positional("EXPERT")]
    """number of the expert, or the name of its skill"""


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(HistoryOptions):
    """Make an older version the head of an expert again."""

    version: Annotated[int, Positional("VERSION")]
    """number of the version, as `history` shows it"""


def table(rows: list[SkillRow], store: Store) -> Any:
    """The skills as a rich table, in the state they are really in."""
    from rich.table import Table

    held = store.is_held()
    out = Table(box=None, pad_edge=False)
    names = ("skill", "state", "expert", "evaluated success", "frames", "seconds", "launches", "why")
    for column in names:
        out.add_column(column, justify="left" if column in ("skill", "state", "expert", "why") else "right")
    for row in rows:
        head = store.head(row.expert) if row.expert is not None else None
        success, frames, until = row.result.get("success"), head.frames if head else None, None
        state = condition(store, row, held=held)
        if row.status == "running":
            success, frames, last = progress_of(store, row)
            until = time.time() if state.startswith("running") else last
        launches = store.attempts(row.name)
        seconds = training_seconds(launches, until)
        out.add_row(
            row.name,
            state,
            "" if row.expert is None else str(row.expert),
            "" if success is None else f"{success:.1%}",
            "" if frames is None else f"{frames:,}",
            f"{seconds:.1f}" if launches else "",
            str(len(launches)),
            harmless(row.reason or ""),
        )
    return out


def status(options: StatusOptions, store: Store) -> None:
    """Print the state of every skill."""
    if options.json:
        print(json.dumps(finite(scheduler_state(store, 0)), indent=2), file=json_stream())
        return
    wide_console().print(table(store.skills(), store))
    for attempt in store.attempts(running=True):
        if handle := attempt.handle if attempt.launcher == "tmux" else None:
            print(f"watch {attempt.skill}: tmux -L {handle['server']} attach -t '={handle['session']}'")
    if not store.is_held() and store.skills("waiting", "running"):
        print(f"no scheduler runs; go on with: {resume_command(options.graph_path, 'skills train')}")


def retry(options: RetryOptions, store: Store) -> None:
    """Open a failed skill again, and what was blocked by it."""
    if options.budget is not None and not math.isfinite(options.budget):
        raise ConfigError(f"--budget must be a number of env steps, got {options.budget}")
    budget = None if options.budget is None else int(options.budget)
    opened = reopen(store, options.name, budget=budget, fresh=options.fresh)
    if opened:
        print(f"reopened: {', '.join(opened)}")
    if budget is not None:
        print(f"{store.skill(options.name).name}: may use {budget:,} env steps in all")
    if opened and not store.is_held():
        print(f"start it with: {resume_command(options.graph_path, 'skills train')}")


def cancel(options: CancelOptions, store: Store) -> None:
    """Give a skill up, by its scheduler or, where there is none, here."""
    name, until = ask_to_cancel(store, options.name).name, time.monotonic() + ENDING_SECONDS
    while (row := store.skill(name)).cancel:
        if time.monotonic() > until:
            raise WorkerError(
                f"{name!r} is {row.status} and not cancelled after {ENDING_SECONDS:g} s: whoever runs {store.root} "
                "does not answer, and cancels it when it does"
            )
        time.sleep(0.05)
        if store.is_held():  # if only by one that has done what it was asked for, and goes
            continue
        try:
            SkillScheduler(options.graph_path).settle()  # tidies, whatever the world, and trains nothing
        except WorkerError:
            if not store.is_held():
                raise
    if row.status != "skipped":
        raise ConfigError(f"{name!r} was not cancelled: it is {row.status} by now")
    print(f"cancelled: {name}")


def stop(options: StopOptions, store: Store) -> None:
    """End the run of a folder."""
    going = [row.name for row in store.skills("running")]
    asked = ask_to_stop(store, wait=options.wait)
    if store.attempts(running=True):  # who held the folder, if anyone did, may have been no scheduler
        if options.wait and not asked:
            raise ConfigError(
                f"no scheduler runs {store.root}, so nobody would merge what is in training ({', '.join(going)}): "
                f"wait for it with {resume_command(options.graph_path, 'skills train')}, or end it without --wait"
            )
        if not options.wait:
            SkillScheduler(options.graph_path).settle(kill=True)
    print(f"stopped: {', '.join(going) or 'nothing was in training'}")
    print(f"go on with: {resume_command(options.graph_path, 'skills train')}")


def _latest(store: Store, row: SkillRow) -> AttemptRow:
    attempts = store.attempts(row.name)
    if not attempts:
        raise ConfigError(f"{row.name!r} has not been launched yet")
    return attempts[-1]


def _log_path(store: Store, row: SkillRow, attempt: AttemptRow) -> Path:
    """Where the output of a training is: in its run folder, or with the skill once it is merged."""
    name = Path(attempt.log or f"training-{attempt.id}.log").name
    running = store.root / attempt.run_folder / name
    return running if running.exists() else store.root / "skills" / f"{row.expert}_{row.slug}" / name


def logs(options: LogsOptions, store: Store) -> int:
    """Print what a training wrote."""
    row, follow = store.skill(options.name), options.follow
    last = _latest(store, row)
    while True:
        path = _log_path(store, row, last)
        if path.exists():
            with path.open("rb") as file:
                while True:
                    now = _latest(store, row)
                    shutil.copyfileobj(file, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
                    if not follow or now.id != last.id or now.outcome:
                        break
                    time.sleep(0.2)
            if not follow or now.id == last.id:
                return 0
        elif follow and last.outcome is None:
            time.sleep(0.2)
            now = _latest(store, row)
        else:
            raise ConfigError(
                f"launch {last.id} of {row.name!r} wrote nothing: {last.reason or last.outcome or 'running'}"
            )
        last = now  # it was launched again


def evaluate(options: EvalOptions, store: Store) -> None:
    """Success per skill and of the whole chain on unseen worlds."""
    refuse_below(options, episodes=1)
    from shoal.skills.learning.episodes import evaluate_chain

    run = RunFolder(options.graph_path / "evaluations" / f"seed-{options.seed}", "skills eval", options.seed)
    report = evaluate_chain(store, options.episodes, options.seed, options.target)
    run.finish({"chain_success": report.success, **report.as_dict()})
    print(f"share of {report.episodes} unseen worlds that got so far")
    for step, reached in zip(report.plan, report.reached, strict=True):
        print(f"{reached:7.3f}  {step.skill} x{step.count}")
    print(
        f"{report.success:7.3f}  whole chain, {report.episodes} unseen worlds, {report.mean_steps:.0f} steps on average"
    )


def _expert(store: Store, text: str) -> int:
    known = sorted({row.expert for row in store.skills() if row.expert is not None})
    if text.isdecimal():
        if int(text) not in known:
            have = ", ".join(map(str, known)) or "none yet"
            raise ConfigError(
                f"{store.root} has no expert {text}; it has {have} (shoal skills status shows whose they are)"
            )
        return int(text)
    row = store.skill(text)
    if row.expert is None:
        raise ConfigError(f"{row.name!r} has no expert yet: it gets one when its training starts")
    return row.expert


def history(options: HistoryOptions, store: Store) -> None:
    """List the versions of an expert, the head marked."""
    expert = _expert(store, options.expert)
    head = store.head(expert)
    if head is None:
        raise ConfigError(
            f"expert {expert} has no version yet: it gets one when its skill is completed (shoal skills status)"
        )
    owner = next((row.name for row in store.skills() if row.expert == expert), "?")
    print(f"expert {expert}, {owner}; frames are env steps it acted in while learning; -> is the head")
    print("    version  parent      frames  sha256")
    for row in store.versions(expert):
        mark = "->" if row.id == head.id else "  "
        print(f" {mark} {row.id:7}  {row.parent or '-':>6}  {row.frames:>10,}  {row.sha256[:12]}")


def rollback(options: RollbackOptions, store: Store) -> None:
    """Make an older version the head."""
    expert = _expert(store, options.expert)
    before = store.head(expert)
    if before is not None and before.id == options.version:
        print(f"version {options.version} is the head of expert {expert} already; nothing was changed")
        return
    store.rollback(expert, options.version)
    export_views(store)
    print(f"version {options.version} is the head of expert {expert} again")
    if before is not None:
        print(
            f"undo it with: {program()} skills rollback {expert} {before.id} --out {shlex.quote(str(store.root))}"
        )


def _command(options: Any, run: Any, example: str) -> Command:
    """A command about a folder that holds skills already."""
    return Command(
        options, lambda o: run(o, Store(o.graph_path, create=False)), f"examples:\n  shoal skills {example}"
    )


COMMAND = Group(
    "Train a graph of dependent skills, look at it, steer it.",
    {
        "train": ("shoal.cli.skills_train", "Train a graph of skills in parallel."),
        "status": _command(StatusOptions, status, "status --out runs/skills --json"),
        "stop": _command(StopOptions, stop, "stop --out runs/skills"),
        "retry": _command(RetryOptions, retry, 'retry "Collect Stone" --budget 2e6'),
        "cancel": _command(CancelOptions, cancel, 'cancel "Collect Stone"'),
        "logs": _command(LogsOptions, logs, 'logs "Collect Wood" --follow'),
        "eval": _command(EvalOptions, evaluate, "eval --episodes 1024"),
        "history": _command(HistoryOptions, history, 'history "Collect Wood"'),
        "rollback": _command(RollbackOptions, rollback, 'rollback "Collect Wood" 3'),
    },
)
