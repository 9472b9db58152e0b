"""`shoal skills …`: train a graph of skills, look at it, steer it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.core.errors import ConfigError, unknown_name
from shoal.core.files import write_json
from shoal.core.run_folder import FolderLock, RunFolder
from shoal.skills.jobs.records import AttemptRow, SkillRow
from shoal.skills.jobs.store import Store

GraphPath = Annotated[Path, tyro.conf.arg(aliases=["--run-dir"])]
DEFAULT = Path("runs/skills")


@dataclass(frozen=True)
class Folder:
    """A folder of skills."""

    graph_path: GraphPath = DEFAULT
    """the folder of the run"""


@dataclass(frozen=True)
class StatusOptions(Folder):
    """Show every skill: state, expert, success, env steps, why it is where it is."""

    json: bool = False
    """print what scheduler_state.json holds"""


@dataclass(frozen=True)
class NamedOptions(Folder):
    """Choose one skill of a folder."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SKILL")] = tyro.MISSING
    """the skill, by its name or as it is named in folders"""


@dataclass(frozen=True)
class LogsOptions(NamedOptions):
    """Print the output of a skill's latest training."""

    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
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


@dataclass(frozen=True)
class HistoryOptions(Folder):
    """List every version of an expert."""

    expert: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERT")] = tyro.MISSING
    """number of the expert, or the name of its skill"""


@dataclass(frozen=True)
class RollbackOptions(HistoryOptions):
    """Make an older version the head of an expert again."""

    version: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="VERSION")] = tyro.MISSING
    """number of the version, as `history` shows it"""


@dataclass(frozen=True)
class ExportOptions(Folder):
    """Copy the folders for people (skills, checkpoints, scheduler_state.json) to a place of their own."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = tyro.MISSING
    """a folder that does not exist yet"""


@dataclass(frozen=True)
class MigrateOptions(Folder):
    """Say why a folder of the original project is not imported."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = tyro.MISSING
    """a folder with skills/ and checkpoints/ in it"""


def table(rows: list[SkillRow], store: Store) -> Any:
    """The skills as a rich table."""
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for column in ("skill", "state", "expert", "success", "frames", "seconds", "launches", "why"):
        out.add_column(
            column, justify="right" if column in ("success", "frames", "seconds", "launches") else "left"
        )
    for row in rows:
        head = store.head(row.expert) if row.expert is not None else None
        success, frames = row.result.get("success"), head.frames if head else None
        if row.status == "running":
            success, frames = _progress(store, row)
        seconds = (row.ended or time.time()) - row.started if row.started else None
        out.add_row(
            row.name,
            row.status,
            "" if row.expert is None else str(row.expert),
            "" if success is None else f"{success:.2f}",
            "" if frames is None else f"{frames:,}",
            "" if seconds is None else f"{seconds:.1f}",
            str(len(store.attempts(row.name))),
            row.reason or "",
        )
    return out


def _progress(store: Store, row: SkillRow) -> tuple[float | None, int | None]:
    """Success and env steps of the latest update of a running training."""
    attempts = store.attempts(row.name)
    if not attempts:
        return None, None
    path = store.root / attempts[-1].run_folder / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")
        last = json.loads(lines[-2])
        return last["success"], last["step"]
    except (OSError, ValueError, IndexError, KeyError):
        return None, None


def status(argv: list[str]) -> int:
    """Print the state of every skill."""
    options = tyro.cli(StatusOptions, args=argv, prog="shoal skills status")
    store = Store(options.graph_path, create=False)
    if options.json:
        from shoal.skills.learning.views import scheduler_state

        print(json.dumps(scheduler_state(store, 0), indent=2))
        return 0
    from rich.console import Console

    Console().print(table(store.skills(), store))
    return 0


def retry(argv: list[str]) -> int:
    """Open a failed skill again, and what was blocked by it."""
    options = tyro.cli(
        NamedOptions, args=argv, prog="shoal skills retry", description="Train a failed skill again."
    )
    store = Store(options.graph_path, create=False)
    row = store.skill(options.name)
    if row.status not in ("failed", "blocked", "skipped"):
        raise ConfigError(
            f"{row.name!r} is {row.status}; only failed, blocked or skipped skills can be retried"
        )
    opened = [row.name]
    for name in opened:  # grows while it is read: what waits for something reopened is reopened
        opened += [r.name for r in store.skills("blocked") if name in r.dependencies and r.name not in opened]
    with store.transaction():
        for name in opened:
            store.update_skill(name, status="waiting", reason=None, retries=0, cancel=0)
    print(f"reopened: {', '.join(opened)}")
    if not scheduler_runs(options.graph_path):
        print(f"start it with: shoal skills train --resume --graph-path {options.graph_path}")
    return 0


def cancel(argv: list[str]) -> int:
    """Give a skill up."""
    options = tyro.cli(
        NamedOptions,
        args=argv,
        prog="shoal skills cancel",
        description="Give up a skill; a running training is ended.",
    )
    store = Store(options.graph_path, create=False)
    row = store.skill(options.name)
    if row.status not in ("waiting", "blocked", "running"):
        raise ConfigError(f"{row.name!r} is {row.status}; there is nothing to cancel")
    if row.status == "running":
        from shoal.skills.jobs.launchers import make_launcher

        store.update_skill(row.name, cancel=1)
        attempt = _latest(store, row)
        if attempt.handle is not None and attempt.launcher != "ray":
            make_launcher(attempt.launcher or "local").kill(attempt.handle)
    elif scheduler_runs(options.graph_path):
        store.update_skill(row.name, cancel=1)
    else:
        store.update_skill(row.name, status="skipped", reason="cancelled", ended=time.time())
    print(f"cancelled: {row.name}")
    return 0


def scheduler_runs(folder: Path) -> bool:
    """Whether a scheduler is running on the folder."""
    return FolderLock(folder / "scheduler.lock").is_taken()


def _latest(store: Store, row: SkillRow) -> AttemptRow:
    attempts = store.attempts(row.name)
    if not attempts:
        raise ConfigError(f"{row.name!r} has not been launched yet")
    return attempts[-1]


def _log_path(store: Store, row: SkillRow) -> Path:
    """Where the output of the latest training is: in its run folder, or with the skill once it is merged."""
    attempt = _latest(store, row)
    name = Path(attempt.log or f"training-{attempt.id}.log").name
    running = store.root / attempt.run_folder / name
    return running if running.exists() else store.root / "skills" / f"{row.expert}_{row.slug}" / name


def logs(argv: list[str]) -> int:
    """Print what a training wrote."""
    options = tyro.cli(LogsOptions, args=argv, prog="shoal skills logs")
    store = Store(options.graph_path, create=False)
    return _follow(store, store.skill(options.name), options.follow)


def _follow(store: Store, row: SkillRow, follow: bool) -> int:
    path = _log_path(store, row)
    with path.open("rb") as file:
        while True:
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not follow or _latest(store, row).state != "running":
                shutil.copyfileobj(file, sys.stdout.buffer)
                return 0
            time.sleep(0.2)


def attach(argv: list[str]) -> int:
    """Watch a running training: its tmux session, or its output."""
    options = tyro.cli(
        NamedOptions, args=argv, prog="shoal skills attach", description="Watch a running training."
    )
    store = Store(options.graph_path, create=False)
    row = store.skill(options.name)
    attempt = _latest(store, row)
    if attempt.state != "running":
        raise ConfigError(f"{row.name!r} is {row.status}; its output: shoal skills logs {row.slug}")
    if attempt.launcher == "tmux" and attempt.handle:
        sys.stdout.flush()
        server, session = str(attempt.handle["server"]), str(attempt.handle["session"])
        os.execvp("tmux", ["tmux", "-L", server, "attach-session", "-t", f"={session}"])
    return _follow(store, row, follow=True)


def evaluate(argv: list[str]) -> int:
    """Success per skill and of the whole chain on unseen worlds."""
    from shoal.skills.learning.chain import evaluate_chain

    options = tyro.cli(EvalOptions, args=argv, prog="shoal skills eval")
    store = Store(options.graph_path, create=False)
    run = RunFolder(options.graph_path / "evaluations" / f"seed-{options.seed}", "skills eval", options.seed)
    report = evaluate_chain(store, options.episodes, options.seed, options.target)
    run.finish({"chain_success": report.success, **report.as_dict()})
    for step, reached in zip(report.plan, report.reached, strict=True):
        print(f"{reached:7.3f}  {step.skill} x{step.count}")
    print(
        f"{report.success:7.3f}  whole chain, {report.episodes} unseen worlds, {report.mean_steps:.0f} steps"
    )
    return 0


def _expert(store: Store, text: str) -> int:
    if text.isdigit():
        return int(text)
    row = store.skill(text)
    if row.expert is None:
        raise ConfigError(f"{row.name!r} has no expert yet")
    return row.expert


def history(argv: list[str]) -> int:
    """List the versions of an expert, the head marked."""
    options = tyro.cli(HistoryOptions, args=argv, prog="shoal skills history")
    store = Store(options.graph_path, create=False)
    expert = _expert(store, options.expert)
    head = store.head(expert)
    if head is None:
        raise ConfigError(f"expert {expert} has no version")
    print("    version  parent      frames  kind     rule         success      sha256")
    for row in store.versions(expert):
        success = f"{row.wins}/{row.episodes}" if row.episodes else "-"
        mark = "->" if row.id == head.id else "  "
        print(
            f" {mark} {row.id:7}  {row.parent or '-':>6}  {row.frames:>10,}  {row.kind:<7}  {row.rule or '-':<11}  "
            f"{success:<11}  {row.sha256[:12]}"
        )
    return 0


def rollback(argv: list[str]) -> int:
    """Make an older version the head."""
    from shoal.skills.learning.views import export_views

    options = tyro.cli(RollbackOptions, args=argv, prog="shoal skills rollback")
    store = Store(options.graph_path, create=False)
    expert = _expert(store, options.expert)
    store.rollback(expert, options.version)
    export_views(store)
    print(f"expert {expert} is version {options.version} again")
    return 0


def export(argv: list[str]) -> int:
    """Copy what is for people."""
    from shoal.skills.learning.views import export_state, export_views, scheduler_state

    options = tyro.cli(ExportOptions, args=argv, prog="shoal skills export")
    store = Store(options.graph_path, create=False)
    if options.to.exists():
        raise ConfigError(f"{options.to} exists; name a folder that does not")
    export_views(store)
    if not scheduler_runs(options.graph_path):
        export_state(store, 0)
    options.to.mkdir(parents=True)
    for name in ("skills", "checkpoints"):
        if (store.root / name).exists():
            shutil.copytree(store.root / name, options.to / name)
    write_json(options.to / "scheduler_state.json", scheduler_state(store, 0))
    print(f"exported {len(store.skills('completed'))} completed skills to {options.to}")
    return 0


def migrate(argv: list[str]) -> int:
    """Say why an original folder is not imported."""
    from shoal.skills.learning.views import migrate_folder

    options = tyro.cli(MigrateOptions, args=argv, prog="shoal skills migrate")
    migrate_folder(options.source, options.graph_path)
    return 2


def train(argv: list[str]) -> int:
    """Train a graph of skills."""
    from shoal.cli import skills_train

    return skills_train.main(argv)


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train a graph of skills in parallel"),
    "status": (status, "show every skill: state, success, why"),
    "retry": (retry, "open a failed skill again"),
    "cancel": (cancel, "give a skill up"),
    "logs": (logs, "print the output of a training"),
    "attach": (attach, "watch a running training"),
    "eval": (evaluate, "success of skills and chain on unseen worlds"),
    "history": (history, "list the versions of an expert"),
    "rollback": (rollback, "make an older version the head again"),
    "export": (export, "copy skills, checkpoints and state for others"),
    "migrate": (migrate, "say why a folder of the original project is not imported"),
}


def main(argv: list[str]) -> int:
    """Run `shoal skills VERB …`."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, VERBS))
        print("usage: shoal skills VERB [options]     (shoal skills VERB --help tells all about one)\n")
        print("\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in VERBS.items()))
        return 0
    if argv[0] not in VERBS:
        raise unknown_name("skills verb", argv[0], VERBS)
    return VERBS[argv[0]][0](argv[1:])
