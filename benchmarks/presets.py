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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.stabilisers import Case, Run, lowest_after, read_runs, say, trained  # noqa: E402
from benchmarks.tables import put, table  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "presets.jsonl"
PRESETS = tuple(sorted(path.stem for path in (REPO / "src/shoal/configs/algorithm").glob("*.yaml")))
SEEDS, ITERATIONS = tuple(range(8)), 80


def run(preset: str, seed: int, iterations: int = ITERATIONS) -> Run:
    """One preset with one seed."""
    return trained(Case("demo", preset, "preset", seed), "demo", [f"algorithm={preset}"], iterations)


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
        first = [
            next(i for i, x in enumerate(one.success, 1) if x >= 0.95)
            for one in own
            if max(one.success) >= 0.95
        ]
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


def main() -> None:
    """Run what has no line yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="two iterations of one preset, nothing saved")
    parser.add_argument("--table", action="store_true", help="write the table alone")
    options = parser.parse_args()
    if unknown := set(options.presets) - set(PRESETS):
        parser.error(f"no preset named {', '.join(sorted(unknown))}; there are: {', '.join(PRESETS)}")
    if options.quick:
        say(run("grpo", 0, 2))
        return
    known = {(one.algorithm, one.seed) for one in read_runs(RESULTS)}
    for seed in () if options.table else options.seeds:
        for preset in options.presets or PRESETS:
            if (preset, seed) in known:
                continue
            done = run(preset, seed)
            with RESULTS.open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            say(done)
    write_table()


if __name__ == "__main__":
    main()
