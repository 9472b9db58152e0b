"""What older weights cost: the lake of `demo` with lags, with importance weights and without, several seeds.

    python benchmarks/lag.py [CASE …] [--seeds 0 1 …] [--quick] [--table]

Each run is `shoal train --config-name demo` with the settings of its case, 60 iterations, and at the end a greedy
evaluation in 128 held-out episodes. A run that is done is one line of `benchmarks/results/lag.jsonl`, and is not run
again. `--table` only writes the table of docs/asynchrony.md; `--quick` runs two iterations, and saves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.presets import reached, run_missing  # noqa: E402
from benchmarks.stabilisers import Case, Run, read_runs, trained  # noqa: E402
from benchmarks.tables import put, table  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "lag.jsonl"
ITERATIONS = 60
AHEAD = (
    "agent_proxy.use_parallel_rollout=true",
    "agent_proxy.parallel_n_jobs=1",
    "agent_proxy.parallel.backend=threading",
)
CORRECTED = ("algorithm.rollout_correction.method=truncate",)
CASES = {
    "lag 1": ("trainer.lag=1", *AHEAD),
    "lag 2": ("trainer.lag=2", *AHEAD),
    "lag 8": ("trainer.lag=8", *AHEAD),
    "lag 8, corrected": ("trainer.lag=8", *AHEAD, *CORRECTED),
}
"""What is set beside the settings of `demo`; `presets.py` has it without a lag."""


def run(name: str, seed: int, iterations: int | None = None) -> Run:
    """One case with one seed."""
    return trained(Case("demo", "grpo", name, seed), "demo", CASES[name], iterations or ITERATIONS)


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """A line of the table for each case."""
    lines = []
    for name in CASES:
        own = [one for one in runs if one.arm == name]
        if not own:
            lines.append([name, *"···"])
            continue
        first = reached(own)
        held_out = sorted(one.heldout for one in own)
        lines.append(
            [
                name,
                f"{sum(one >= 0.95 for one in held_out)} of {len(own)}",
                f"{min(first)} to {max(first)} ({len(first)})" if first else "never",
                f"{held_out[0]:.2f} to {held_out[-1]:.2f}",
            ]
        )
    return lines


def write_table() -> None:
    head = [
        "training",
        "seeds that end at 0.95 or more",
        "iterations to 0.95 while sampling (seeds)",
        "held out at the end",
    ]
    put("asynchrony.md", "lags", table(head, rows_of(read_runs(RESULTS))))


if __name__ == "__main__":
    run_missing(__doc__, tuple(CASES), run, lambda one: one.arm, RESULTS, write_table)
