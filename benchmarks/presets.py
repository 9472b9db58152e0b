"""Every preset on the lake of `demo`, 80 iterations with eight seeds: who learns it, and stays there.

    python benchmarks/presets.py [PRESET …] [--seeds 0 1 …] [--quick] [--table]

Each run is `shoal train --config-name demo algorithm=PRESET trainer.iterations=80`, and at the end a greedy evaluation
in 128 held-out episodes. A run that is done is one line of `benchmarks/results/presets.jsonl`, and is not run again.
`--table` only writes the table of docs/learning-results.md; `--quick` runs two iterations, and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.stabilisers import Case, Run, lowest_after, read_runs, say, trained  # noqa: E402
from benchmarks.tables import put, table  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "presets.jsonl"
PRESETS = tuple(sorted(path.stem for path in (REPO / "src/shoal/configs/algorithm").glob("*.yaml")))
SEEDS, ITERATIONS = tuple(range(8)), 80


def run(preset: str, seed: int, iterations: int | None = None) -> Run:
    """One preset with one seed."""
    case = Case("demo", preset, "preset", seed)
    return trained(case, "demo", [f"algorithm={preset}"], iterations or ITERATIONS)


def holds(one: Run) -> bool:
    """Whether success reached 0.95, was never below 0.85 again, and is 0.95 or more in the held-out episodes."""
    lowest = lowest_after(one.success)
    return lowest is not None and lowest >= 0.85 and one.heldout >= 0.95


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """A line of the table for each preset."""
    lines = []
    for preset in PRESETS:
        own = [one for one in runs if one.algorithm == preset]
        if not own:
            lines.append([preset, *"····"])
            continue
        lowest = [low for one in own if (low := lowest_after(one.success)) is not None]
        first = reached(own)
        lines.append(
            [
                preset,
                f"{sum(map(holds, own))} of {len(own)}",
                f"{min(first)} to {max(first)}" if first else "never",
                f"{min(lowest):.2f}" if lowest else "",
                f"{min(one.heldout for one in own):.2f}",
            ]
        )
    return lines


def write_table() -> None:
    head = ["preset", "seeds that hold", "iterations to 0.95", "lowest after it", "lowest held out"]
    put("learning-results.md", "presets", table(head, rows_of(read_runs(RESULTS))))


def reached(runs: Sequence[Run], goal: float = 0.95) -> list[int]:
    """The first iteration with that success while sampling, of each run that has one."""
    return [
        next(i for i, x in enumerate(one.success, 1) if x >= goal) for one in runs if max(one.success) >= goal
    ]


def run_missing(
    told: str | None,
    names: Sequence[str],
    run: Callable[[str, int, int | None], Run],
    name_of: Callable[[Run], str],
    results: Path,
    write: Callable[[], None],
) -> None:
    """The command line of a benchmark of several cases and seeds, which runs what has no line in its results.

    Args:
        told: its help.
        names: of the cases.
        run: one case with a seed, so many iterations or as many as it has.
        name_of: the case of a run.
        results: the file of lines.
        write: writes its table.
    """
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(names))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="two iterations of one case, nothing saved")
    parser.add_argument("--table", action="store_true", help="write the table alone")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"nothing is named {', '.join(sorted(unknown))}; there are: {'; '.join(names)}")
    if options.quick:
        say(run(names[0], 0, 2))
        return
    known = {(name_of(one), one.seed) for one in read_runs(results)}
    for seed in () if options.table else options.seeds:
        for name in options.names or names:
            if (name, seed) in known:
                continue
            done = run(name, seed, None)
            with results.open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            say(done)
    write()


if __name__ == "__main__":
    run_missing(__doc__, PRESETS, run, lambda one: one.algorithm, RESULTS, write_table)
