"""`shoal show RUN`: a run's summary, and one of its episodes turn by turn."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shoal.core.data import Trajectory, Turn
from shoal.core.errors import DataError
from shoal.core.files import read_json
from shoal.viewer.index import Episode, EpisodeIndex, Filter, Order

_TAG = re.compile(r"<(action|answer)>.*?</\1>", re.DOTALL)


def main(argv: list[str]) -> int:
    """Print a run."""
    parser = argparse.ArgumentParser(
        prog="shoal show",
        description="Show a run's summary, and an episode turn by turn: what the agent saw, what it wrote "
        "(its action highlighted) and what the environment paid.",
    )
    parser.add_argument("run", type=Path, help="a run folder, such as runs/demo")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--episode", type=int, metavar="N", help="the N-th episode of the file (from 0)")
    which.add_argument(
        "--best", action="store_true", help="the episode with the highest reward (shortest of them)"
    )
    which.add_argument(
        "--worst", action="store_true", help="the episode with the lowest reward (longest of them)"
    )
    parser.add_argument("--file", help="which of trajectories/*.jsonl (default: the newest held-out one)")
    parser.add_argument("--prompt", action="store_true", help="also show how many tokens each prompt had")
    parser.add_argument("--max-turns", type=int, default=30, metavar="N", help="turns to show (default 30)")
    options = parser.parse_args(argv)
    if not options.run.is_dir():
        raise DataError(
            f"{options.run} is not a run folder; runs are in runs/ unless run_dir= said otherwise"
        )
    console = Console(highlight=False)
    console.print(summary_table(options.run))
    file = _pick_file(options.run / "trajectories", options.file)
    if file is None:
        return 0
    with contextlib.closing(EpisodeIndex(options.run)) as index:
        index.refresh(file.name)
        episode = pick_episode(index, file, options.episode, best=options.best, worst=options.worst)
        total, trajectory = index.count(Filter(file=file.name)), index.read(episode)
    print_episode(console, trajectory, f"episode {episode.row} of {total} in {file.name}", options)
    return 0


def summary_table(run: Path) -> Table:
    """The summary of a run, or of an unfinished one what is known."""
    table = Table(title=str(run), show_header=False, title_justify="left")
    if not (run / "summary.json").exists():
        table.add_row("status", "not finished (no summary.json yet); go on with it by resume=true")
        return table
    summary: dict[str, Any] = read_json(run / "summary.json")
    for key in ("command", "status", "seed", "seconds", "cpu_seconds"):
        table.add_row(key, str(summary.get(key)))
    for key, value in summary.get("metrics", {}).items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _pick_file(folder: Path, wanted: str | None) -> Path | None:
    files = sorted(folder.glob("*.jsonl"))
    if wanted is not None:
        named = [file for file in files if wanted in (file.name, file.stem)]
        if not named:
            raise DataError(
                f"no {wanted!r} in {folder}; there are: {', '.join(f.name for f in files) or 'none'}"
            )
        return named[0]
    held_out = [file for file in files if file.name.startswith("heldout")]
    candidates = held_out or files
    return candidates[-1] if candidates else None


def pick_episode(index: EpisodeIndex, file: Path, number: int | None, *, best: bool, worst: bool) -> Episode:
    """The episode of a file that was asked for; the first if nothing was said."""
    wanted = Filter(file=file.name)
    total = index.count(wanted)
    if not total:
        raise DataError(f"{file} holds no episodes")
    if number is not None and not 0 <= number < total:
        raise DataError(f"--episode must be in [0, {total - 1}], got {number}")
    order: Order = "best" if best else "worst" if worst else "file"
    return index.episodes(wanted, order, limit=1, offset=number or 0)[0]


def print_episode(console: Console, trajectory: Trajectory, title: str, options: argparse.Namespace) -> None:
    """All turns of an episode, at most `options.max_turns`."""
    outcome = "success" if trajectory.success else "failed" if trajectory.terminated else "not solved in time"
    if trajectory.status != "ok":
        outcome = f"{trajectory.status}: {trajectory.error}"
    console.print(Rule(title))
    console.print(
        f"{trajectory.env}, group {trajectory.group}, member {trajectory.member}, env seed {trajectory.env_seed}: "
        f"{outcome}, reward {trajectory.reward:g} in {len(trajectory.turns)} turns",
        markup=False,
    )
    for number, turn in enumerate(trajectory.turns[: options.max_turns]):
        _print_turn(console, number, turn, with_prompt=options.prompt)
    left = len(trajectory.turns) - options.max_turns
    if left > 0:
        console.print(f"… {left} more turns (--max-turns {len(trajectory.turns)} shows all)")


def _print_turn(console: Console, number: int, turn: Turn, *, with_prompt: bool) -> None:
    console.print(Text(f"\nturn {number + 1}", style="bold"), end="")
    console.print(f"  prompt of {len(turn.prompt_ids)} tokens" if with_prompt else "", markup=False)
    console.print(Padding(Text(turn.observation), (0, 0, 0, 4)))
    response = Text(turn.response.strip("\n") or "(nothing)", style="cyan")
    for match in _TAG.finditer(response.plain):
        response.stylize("bold green" if turn.action_is_valid else "bold red", *match.span())
    verdict = turn.action if turn.action_is_valid else "no valid action"
    console.print(
        Text("  → ").append_text(response).append(f"   {verdict}, reward {turn.reward:g}", style="dim")
    )
