"""`shoal compare A B …`: what is different between runs: settings, results, curves, the first differing token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.command import Command, Flag
from shoal.cli.grammar import print_json, refuse_idle, table
from shoal.cli.output import harmless
from shoal.cli.runs import describe
from shoal.cli.show import FIRST, flat, readable
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import latest, read_summary, whole_rows
from shoal.viewer.runs import metric_names, points

NOT_SETTINGS = ("run_dir", "resume", "next_step", "graph_path", "resume_from")
"""Keys of a config that differ between any two runs."""
CURVES = ("heldout_success", "eval_return_mean", "success", "reward_mean", "reward")
MORE = """\
examples:
  shoal compare runs/demo runs/demo-2                   settings and metrics that differ, side by side
  shoal compare runs/seed-* --png curves.png            one curve a run, and the mean of all
  shoal compare runs/a runs/b --curve entropy --png entropy.png
  shoal compare runs/a runs/b --all --json

Of two runs that recorded the same episodes, the first differing token, env answer or seed is named.
Exit status: 0 whether or not they differ; `shoal replay A --diff B` is 1 where they do.
"""


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs: their settings, their results, their curves, their episodes."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """two or more run folders"""
    all: Flag = False
    """also the metrics and settings that are equal"""
    png: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """draw one curve a run, and their mean"""
    curve: Annotated[str | None, tyro.conf.arg(metavar="METRIC")] = None
    """with --png: which metric of metrics.jsonl; the held-out success or return if not given"""
    json: Flag = False
    """print the comparison as JSON"""


def compare(options: CompareOptions) -> None:
    """Compare and print."""
    runs = options.runs
    if len(runs) < 2:
        raise ConfigError(
            f"shoal compare needs two run folders or more, got {len(runs)}; shoal runs lists them"
        )
    if options.png is None:
        refuse_idle(options, "without --png", "curve")
    for run in runs:
        if not run.is_dir():
            raise DataError(f"{run} is not a run folder; `shoal runs` lists them")
    settings = differing([_settings(run) for run in runs], options.all)
    metrics = differing([_metrics(run) for run in runs], options.all)
    first = _first(runs)
    curve = _draw(runs, options.curve, options.png) if options.png is not None else None
    if options.json:
        print_json({"runs": [describe(run) for run in runs], "settings": settings, "metrics": metrics,
                    "first_difference": first})  # fmt: skip
        return
    names = [str(run) for run in runs]
    for title, found in (("settings", settings), ("metrics", metrics)):
        if found:
            keys = sorted(found, key=_place) if title == "metrics" else sorted(found)
            rows = [[key, *(readable(value) for value in found[key])] for key in keys]
            table(f"{title}{'' if options.all else ' that differ'}", ["", *names], rows)
        else:
            print(f"{title}: all equal")
    if first is not None:
        print(harmless(f"episodes: {first}"))
    if curve is not None:
        print(f"curves of {curve}: {options.png}")


COMMAND = Command(CompareOptions, compare, MORE)


def differing(sides: Sequence[Mapping[str, Any]], everything: bool = False) -> dict[str, list[Any]]:
    """Values by key, one a side, of the keys whose values are not all the same.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
    {'b': [2, 3], 'c': [None, 4]}
    """
    keys = dict.fromkeys(key for side in sides for key in side)
    found = {key: [side.get(key) for side in sides] for key in keys}
    return {key: values for key, values in found.items() if everything or any(v != values[0] for v in values)}


def _settings(run: Path) -> dict[str, Any]:
    from shoal.testing.recorded_runs import settings_of

    values = settings_of(run)
    return {key: value for key, value in flat(values).items() if key.split("/")[0] not in NOT_SETTINGS}


def _metrics(run: Path) -> dict[str, Any]:
    if not (run / "summary.json").exists():
        return {"status": describe(run)["status"]}
    summary = read_summary(run)
    named = {key: summary.get(key) for key in ("status", "seconds", "cpu_seconds")}
    return named | {key: value for key, value in flat(summary["metrics"]).items() if key != "rows"}


def _place(key: str) -> tuple[int, str]:
    name = key.split("/")[0]
    return (FIRST.index(name) if name in FIRST else len(FIRST), key)


def _first(runs: Sequence[Path]) -> str | None:
    from shoal.testing.recorded_runs import first_difference, recordings_of

    if len(runs) != 2 or not all(recordings_of(run) for run in runs):
        return None
    try:
        difference = first_difference(*runs)
    except DataError as error:
        return str(error)
    return "all equal" if difference is None else f"differ first at {difference}"


def _draw(runs: Sequence[Path], wanted: str | None, path: Path) -> str:
    """One line a run, and where all have a point their mean; returns the metric's name."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = [run / "metrics.jsonl" for run in runs]
    told = [
        whole_rows(file.read_bytes()) if file.is_file() else [] for file in files
    ]  # a pipe would be waited for
    across = "steps" if all("steps" in row for one in told for row in one) else "iteration"
    rows = [latest(one, across) for one in told]
    known = {key for one in rows for key in metric_names(one)}
    name = wanted or next((key for key in CURVES if key in known), None)
    if name is None or name not in known:
        raise ConfigError(
            f"no run has the metric {name or CURVES[0]!r} in metrics.jsonl; "
            f"there are: {', '.join(sorted(known)) or 'none'}"
        )
    figure = Figure(figsize=(8, 4.5), layout="tight")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    curves = []
    for run, one in zip(runs, rows, strict=True):
        xs, ys = points(one, across, name)
        curves.append(dict(zip(xs, ys, strict=True)))
        axis.plot(xs, ys, alpha=0.5, label=str(run))
    shared = sorted(set.intersection(*map(set, curves)))
    if len(runs) > 2 and shared:
        axis.plot(shared, [np.mean([curve[x] for curve in curves]) for x in shared], "k", lw=2, label="mean")
    axis.set_xlabel(across)
    axis.set_ylabel(name)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=100, format=None if path.suffix else "png")
    return name
