"""`shoal show RUN`: a run's summary, and one of its episodes turn by turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import print_json, refuse_below
from shoal.cli.output import harmless, program
from shoal.cli.runs import describe, how_to_go_on, latest_metrics
from shoal.core.data import ENDINGS, Judged, Trajectory
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import read_summary
from shoal.viewer.curves import SHARES
from shoal.viewer.index import Episode, EpisodeIndex, Filter, Order
from shoal.viewer.markup import ACTION, counted, duration, number
from shoal.viewer.runs import Run, is_run, points

FIRST = (
    "heldout_success", "best_heldout_success", "success", "success_low", "success_high", "reward", "heldout_reward",
    "heldout_turns", "iterations", "iteration", "eval_return_mean", "eval_return_std", "reward_mean", "steps",
    "episodes", "turns", "steps_per_second", "seconds_rollout", "tokens_per_second", "valid_actions", "failed_episodes",
    "worker_deaths", "replayed_episodes", "least_level", "samples", "trajectories", "images", "tokens", "skipped",
    "skills_completed", "skills_failed", "chain_success", "skill_success", "frames", "makespan", "equal", "kills",
    "played_again",
)  # fmt: skip
"""Metrics that are shown, in this order; docs/metrics.md explains them, and the others."""
DRAWN = ("success", "heldout_success", "reward", "reward_mean", "eval_return_mean", "entropy")
"""Metrics of which a line is drawn."""
MORE = """\
examples:
  shoal show runs/demo                       summary, and the first held-out episode turn by turn
  shoal show runs/demo --worst --prompt      an episode that went wrong, with whole prompts
  shoal show runs/demo --file train-000010 --episode 17
  shoal show runs/demo --all                 every metric by its name (explained in docs/metrics.md)
  shoal show runs/demo --json                the summary for a program

See also: shoal runs (all runs), shoal view (in a browser), shoal replay RUN N.
"""


@dataclass(frozen=True)
class ShowOptions:
    """Show a run's summary, its curves in small, and an episode turn by turn.

    Of each turn: what the agent saw, what it wrote (its action highlighted) and what the environment paid.
    """

    run: Annotated[Path, Positional("RUN")]
    """Run folder, such as runs/demo."""
    episode: int | None = None
    """Show the N-th episode of the file (from 0)."""
    best: bool = False
    """Show the episode with the highest reward."""
    worst: bool = False
    """Show the episode with the lowest reward."""
    file: str | None = None
    """One of trajectories/*.jsonl (default: the newest held-out one)."""
    prompt: bool = False
    """Show the whole prompt of each turn."""
    max_turns: int = 30
    """Maximum number of turns to show."""
    all: bool = False
    """Show every metric of the summary."""
    json: bool = False
    """print the summary as JSON and nothing else"""


def show(options: ShowOptions) -> None:
    """Print a run."""
    if not is_run(options.run) and not any((options.run / begun).exists() for begun in (".lock", "shards")):
        raise DataError(_no_run(options.run))
    if (options.episode is not None) + options.best + options.worst > 1:
        raise ConfigError("--episode, --best and --worst each choose an episode: leave all but one out")
    refuse_below(options, max_turns=0)
    if options.json:
        if not (options.run / "summary.json").exists():
            raise DataError(f"{options.run} has no summary.json: the run is not finished")
        print_json(read_summary(options.run))
        return
    console = Console(highlight=False, markup=False, emoji=False)  # what a run says is text
    about = describe(options.run)
    console.print(summary_table(options.run, about, everything=options.all))
    for line in sparklines(Run(options.run), console.width):
        console.print(line, soft_wrap=True)
    if about["status"] in ("unfinished", "interrupted") or (
        about["status"] == "failed" and about["metric"] is None
    ):
        how = how_to_go_on(options.run, failed=about["status"] == "failed")
        console.print(harmless(how), soft_wrap=True)
    file = _pick_file(options.run / "trajectories", options.file)
    if file is None:
        if options.episode is not None or options.best or options.worst or options.prompt:
            raise DataError(f"{options.run} recorded no episodes: there is no trajectories/*.jsonl in it")
        return
    index = EpisodeIndex(options.run).refresh(file.name)
    episode = pick_episode(index, file, options.episode, best=options.best, worst=options.worst)
    total, trajectory = index.count(Filter(file=file.name)), index.read(episode)
    decode = None
    if options.prompt:
        from shoal.train.records.replay import Replay

        with Replay(options.run) as replay:
            decode = replay.tokenizer().decode
    print_episode(
        console, trajectory, f"episode {episode.row} of {total} in {file.name}", options.max_turns, decode
    )


COMMAND = Command(ShowOptions, show, MORE)


def _no_run(path: Path) -> str:
    """What is at a place instead of a run, and what to do."""
    advice = f"{program()} runs FOLDER lists the runs of a folder (runs/, if none is named)"
    if not os.path.lexists(path):
        return f"{path} is not a run folder: there is nothing of that name; {advice}"
    if not os.path.isdir(path):
        return f"{path} is not a run folder but a file; {advice}"
    with contextlib.suppress(OSError):
        if inside := [entry for entry in sorted(path.iterdir()) if is_run(entry)]:
            return f"{path} is not a run folder but holds some: {program()} show {inside[0]}; {program()} runs {path}"
        if not any(path.iterdir()):
            return f"{path} is not a run folder: it is empty; {advice}"
    return f"{path} is not a run folder: it holds no summary.json, metrics.jsonl or config.yaml; {advice}"


def summary_table(run: Path, about: Mapping[str, Any], *, everything: bool = False) -> Table:
    """The summary of a run, or of an unfinished one what is known."""
    table = Table(title=harmless(str(run)), show_header=False, title_justify="left")
    summary: dict[str, Any] = {"metrics": {}}
    if about["status"] != "running" and (run / "summary.json").exists():
        summary = read_summary(run)
        for key in ("command", "status", "seed"):
            table.add_row(key, harmless(str(summary.get(key))))
        if "error" in summary:
            table.add_row("error", harmless(str(summary["error"])))
    else:
        now = "running now" if about["status"] == "running" else "not finished"
        table.add_row("status", f"{now}; {counted(about['rows'] or 0, 'row')} of metrics so far")
    for key in ("seconds", "cpu_seconds"):
        if isinstance(summary.get(key), int | float):
            table.add_row({"seconds": "time", "cpu_seconds": "CPU time"}[key], duration(summary[key]))
    found = flat(summary["metrics"] or latest_metrics(Run(run)))
    wanted = [name for first in FIRST for name in found if name.split("/")[0] == first]
    shown = list(found) if everything or not wanted else wanted
    for name in shown:
        table.add_row(harmless(name), harmless(readable(found[name])))
    if len(shown) < len(found):
        table.add_row("…", f"{counted(len(found) - len(shown), 'more metric')}: --all")
    return table


def sparklines(run: Run, width: int) -> Iterator[Text]:
    """A line for each of `DRAWN` that the rows have, over the same range: the mean of each stretch, and both ends."""
    rows = run.rows()
    places = points(rows, run.x, run.x)[0]
    columns = min(len(places), 60, width - 40)
    for name in DRAWN if columns > 1 else ():
        xs, ys = points(rows, run.x, name)
        if not ys:
            continue
        low, high = min(0.0, *ys), max(ys) if name not in SHARES else 1.0
        stretches: list[list[float]] = [[] for _ in range(columns)]
        for x, y in zip(xs, ys, strict=True):
            part = (x - places[0]) / (places[-1] - places[0])
            stretches[min(columns - 1, int(part * columns))].append((y - low) / ((high - low) or 1.0))
        line, block = "", " "
        for stretch in stretches:  # one without a point is as the one before
            block = "▁▂▃▄▅▆▇█"[min(7, int(8 * fmean(stretch)))] if stretch else block
            line += block
        ends = f"  {readable(ys[0])} → {readable(ys[-1])}"
        yield Text(f"{name:<17}").append(line, style="cyan").append(ends)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested metrics as `name/inner`; lists of plain values stay, others are counted."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}/")
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            found[f"{before}{key}"] = counted(len(value), "entry", "entries")
        else:
            found[f"{before}{key}"] = value
    return found


def readable(value: Any) -> str:
    """A metric for people.

    >>> readable(0.123456), readable(1234567), readable(None), readable([1, 2])
    ('0.1235', '1,234,567', '-', '1, 2')
    """
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    return "-" if value is None else number(value)


def _pick_file(folder: Path, wanted: str | None) -> Path | None:
    files = sorted(folder.glob("*.jsonl"))
    if wanted is not None:
        named = [file for file in files if wanted in (file.name, file.stem)]
        if not named:
            raise DataError(
                f"no {wanted!r} in {folder}; there are: {', '.join(f.name for f in files) or 'none'}"
            )
        return named[0]
    candidates = [file for file in files if file.name.startswith("heldout")] or files
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


def outcome(trajectory: Trajectory) -> str:
    """How an episode ended, in words."""
    if trajectory.status != "ok":
        return f"{trajectory.status}: {trajectory.error}"
    if trajectory.success:
        return "success"
    if trajectory.program_failed:
        return f"the program failed: {trajectory.error}"
    if trajectory.terminated:
        return "failed"
    why = f": {ENDINGS[trajectory.ended]}" if trajectory.ended else ""
    return f"cut off before it was solved{why}"


def print_episode(
    console: Console,
    trajectory: Trajectory,
    title: str,
    max_turns: int,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> None:
    """All turns of an episode, at most `max_turns`; whole prompts where `decode` reads them."""
    console.print(Rule(harmless(title)))
    told = (
        f"{trajectory.env}, group {trajectory.group}, member {trajectory.member}, env seed {trajectory.env_seed}: "
        f"{outcome(trajectory)}, reward {trajectory.reward:g} in {counted(len(trajectory.turns), 'turn')}"
    )
    console.print(harmless(told), markup=False)
    if isinstance(trajectory.judged, Judged):
        scores = [f"{s.name} {readable(s.value)} (weight {s.weight:g})" for s in trajectory.judged.scores]
        console.print(harmless(f"rewards: {', '.join(scores)}"))
    for line in trajectory.requests.lines() if trajectory.requests else ():
        console.print(harmless(line), markup=False)
    for at in range(min(max_turns, len(trajectory.turns))):
        print_turn(console, trajectory, at, decode)
    left = len(trajectory.turns) - max_turns
    if left > 0:
        console.print(
            f"… {counted(left, 'more turn')} (--max-turns {len(trajectory.turns)} shows all)", markup=False
        )


def print_turn(
    console: Console, trajectory: Trajectory, at: int, decode: Callable[[Sequence[int]], str] | None = None
) -> None:
    """One turn (from 0): what was seen, or with `decode` the whole prompt, what was written, and what it led to."""
    console.print(Text(f"\nturn {at + 1}", style="bold"), end="")
    turn = trajectory.turns[at]
    prompt = trajectory.prompt_ids(turn.call)
    told = "" if decode is None else f"  prompt of {counted(len(prompt), 'token')}"
    console.print(told, markup=False)
    shown = turn.observation if decode is None else decode(prompt)
    console.print(Padding(Text(harmless(shown)), (0, 0, 0, 4), expand=False))
    response = Text(harmless(turn.response.strip("\n")) or "(nothing)", style="cyan")
    for match in ACTION.finditer(response.plain):
        response.stylize("bold green" if turn.action_is_valid else "bold red", *match.span())
    verdict = f"{turn.action}, " if turn.action_is_valid else "no valid action, "
    if turn.action_is_valid and turn.action == turn.response:  # of a program: it stands before
        verdict = ""
    console.print(
        Text("  → ")
        .append_text(response)
        .append(harmless(f"   {verdict}reward {turn.reward:g}"), style="dim")
    )
