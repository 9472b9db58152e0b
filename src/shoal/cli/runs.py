"""`shoal runs`: the runs under a folder, what each was, whether it is running, and how well it did."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import print_json, table
from shoal.cli.output import program, to_type
from shoal.core.run_folder import UNFINISHED, command_of, whole_rows
from shoal.viewer.markup import counted, duration, number
from shoal.viewer.runs import PARTS, Run, folders, has_checkpoint, resume_words

MORE = """\
examples:
  shoal runs                                 all runs in runs/, the newest first
  shoal runs /data/experiments --status running
  shoal runs --json | jq '.[] | select(.command=="train") | .run'
"""


@dataclass(frozen=True)
class RunsOptions:
    """List the runs of a folder, the newest first."""

    folder: Annotated[Path, Positional("FOLDER")] = Path("runs")
    """Folder with runs."""
    status: Literal["running", "completed", "failed", "interrupted", "unfinished"] | None = None
    """List only runs with this status."""
    json: bool = False
    """Print a JSON list."""


def list_runs(options: RunsOptions) -> None:
    """List."""
    found = [_about(path) for path in folders(options.folder)]
    found.sort(key=lambda about: -about["changed"])
    if options.status is not None:
        found = [about for about in found if about["status"] == options.status]
    if options.json:
        print_json(found)
        return
    rows = [
        [
            about["run"],
            about["command"],
            about["status"],
            "-" if about["seed"] is None else str(about["seed"]),
            datetime.fromtimestamp(about["changed"]).strftime("%Y-%m-%d %H:%M"),
            "-" if about["seconds"] is None else duration(about["seconds"]),
            _result(about),
        ]
        for about in found
    ]
    if rows:
        table(
            "", ["run", "command", "status", "seed", "changed", "time", "result"], rows, text=(0, 1, 2, 4, 6)
        )
    print(f"{counted(len(rows), 'run')} in {options.folder}")


COMMAND = Command(RunsOptions, list_runs, MORE)


def how_to_go_on(run: Path, *, failed: bool = False) -> str:
    """What to do with an unfinished run, as far as its files tell which command made it.

    Args:
        run: its folder.
        failed: by an error, which going on would meet again where there is no checkpoint yet.
    """
    command = command_of(run)
    if command == "train-ppo" and not failed and not has_checkpoint(run, command):
        return "it ended before its first checkpoint: start again"
    if failed and command in ("train", "train-ppo") and not has_checkpoint(run, command):
        return "it failed before its first checkpoint: mend what its error says, and begin it anew in another folder"
    again = resume_command(run, command)
    if again is None:
        if (run / UNFINISHED).exists():
            return f"go on with: {program()} {command} as before, into {shlex.quote(str(run))}"
        return f"shoal {command} cannot go on with it: run it again"
    after = "when its cause is mended, " if failed else ""
    return f"{after}go on with:\n{to_type(again)}"


def resume_command(run: Path, command: str) -> str | None:
    """The command that goes on with a run, as it can be typed anywhere.

    Args:
        run: its folder.
        command: that made it.
    """
    words = resume_words(run, command)
    return None if words is None else f"{program()} {shlex.join(words)}"


RESULTS = (
    "heldout_success", "eval_return_mean", "chain_success", "success", "reward", "least_level", "equal", "samples",
    "skills_completed", "heldout_reward", "reward_mean",
)  # fmt: skip
"""The metric that says how well a run did: the first that it has."""


def describe(path: Path) -> dict[str, Any]:
    """What the files of a run say of it, for a list of runs; broken ones say nothing."""
    run, rows = Run(path), None
    metrics = run.summary().get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    name = next((key for key in RESULTS if metrics.get(key) is not None), None)
    with contextlib.suppress(OSError):
        rows = (path / "metrics.jsonl").read_bytes().count(b"}\n")  # no torn line
    return {
        "run": str(path),
        "command": command_of(path),
        "status": run.status(),
        "seed": run.seed(),
        "seconds": run.seconds(),
        "changed": run.written(*PARTS) or time.time(),  # it may be removed while it is looked at
        "metric": name,
        "value": None if name is None else metrics[name],
        "rows": rows,
    }


def latest_metrics(run: Run) -> dict[str, Any]:
    """The newest value of each metric in the rows of a run; empty where nothing was written."""
    path = run.path / "metrics.jsonl"
    rows = whole_rows(path.read_bytes()) if path.is_file() else []
    return {key: value for row in rows for key, value in row.items() if value is not None}


def _about(path: Path) -> dict[str, Any]:
    """What the viewer lists of a run; of one that is not completed also how far it came, and how well it did there."""
    about, run = describe(path), Run(path)
    progress = None if about["status"] == "completed" else run.progress()
    about["progress"] = progress and progress[:2]
    if about["metric"] is None:
        newest = latest_metrics(run)
        found = ((name, newest[name]) for name in RESULTS if name in newest)
        about["metric"], about["value"] = next(found, (None, None))
    return about


def _result(about: dict[str, Any]) -> str:
    told, value = [], about["value"]
    if about["progress"] is not None:
        told.append(" of ".join(map(number, about["progress"])))
    if about["metric"] is not None:
        told.append(
            f"{about['metric']} {value:.3f}" if isinstance(value, float) else f"{about['metric']} {value}"
        )
    elif about["rows"]:
        told.append(f"{counted(about['rows'], 'row')} of metrics")
    return ", ".join(told) or "-"
