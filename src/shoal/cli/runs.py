"""`shoal runs`: the runs under a folder, what each was, whether it is running, and how well it did."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import count_of, duration, print_json, table
from shoal.core.errors import DataError
from shoal.core.run_folder import UNFINISHED, FolderLock, command_of, read_summary

RESULTS = (
    "heldout_success", "eval_return_mean", "chain_success", "success", "reward", "least_level", "equal", "samples",
    "skills_completed", "heldout_reward", "reward_mean",
)  # fmt: skip
"""The metric that says how well a run did: the first that it has."""
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
    found = [about for path in folders(options.folder) if (about := describe(path))]
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
    print(f"{count_of(len(rows), 'run')} in {options.folder}")


COMMAND = Command(RunsOptions, list_runs, MORE)


def _result(about: dict[str, Any]) -> str:
    if about["metric"] is None:
        return "-" if about["rows"] is None else f"{count_of(about['rows'], 'row')} of metrics"
    value = about["value"]
    return f"{about['metric']} {value:.3f}" if isinstance(value, float) else f"{about['metric']} {value}"


def folders(root: Path) -> list[Path]:
    """Run folders under `root`, at most two levels down; the inside of a run is not looked at."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: runs are in runs/ unless --out (run_dir=) said otherwise")
    found: list[Path] = []
    for path in _shown(root):
        found += [path] if is_run(path) else filter(is_run, _shown(path))
    return found


def _shown(folder: Path) -> list[Path]:
    """The folders inside, but for hidden ones and where nobody may look."""
    with contextlib.suppress(PermissionError):
        return sorted(path for path in folder.iterdir() if os.path.isdir(path) and path.name[:1] != ".")
    return []


def is_run(path: Path) -> bool:
    """Whether a folder is one of a run."""
    return any(os.path.exists(path / name) for name in PARTS)  # False too where nobody may look


PARTS = ("summary.json", "metrics.jsonl", "config.yaml", "state.db", "trajectories", "batch", UNFINISHED)
"""One of these makes a folder a run."""


def describe(run: Path) -> dict[str, Any]:
    """What the files of a run say of it; broken ones say nothing."""
    summary: dict[str, Any] = {"metrics": {}}
    with contextlib.suppress(OSError, DataError):
        summary = read_summary(run)
    running = any(FolderLock(run / name).is_taken() for name in (".lock", "scheduler.lock"))
    metrics = summary["metrics"]
    name = next((key for key in RESULTS if metrics.get(key) is not None), None)
    seconds, changed, rows = summary.get("seconds"), 0.0, None
    for part in PARTS:
        with contextlib.suppress(OSError):  # a run may be removed while it is looked at
            changed = max(changed, (run / part).stat().st_mtime)
    with contextlib.suppress(OSError):
        rows = (run / "metrics.jsonl").read_bytes().count(b"}\n")  # no torn line
    return {
        "run": str(run),
        "command": command_of(run),
        "status": "running" if running else str(summary.get("status") or "unfinished"),
        "seed": summary.get("seed"),
        "seconds": seconds if isinstance(seconds, int | float) else None,
        "changed": changed or time.time(),
        "metric": name,
        "value": None if name is None else metrics[name],
        "rows": rows,
    }
