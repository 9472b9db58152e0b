"""Learning: shipped configs from their first weights to held-out success, three seeds each.

Every run is the user's own two commands: `shoal train` and `shoal eval`. The start (after the warm-up) and the end
are played on the same held-out episodes, sampled as in training and greedily, with 95% intervals. Run by
`make bench-learning`; `python benchmarks/learning.py demo-gigpo sokoban` runs only those cases and keeps the other
rows of `benchmarks/results/learning.json`. A run that misses its goal, or that breaks, is a row like any other.
`--quick` runs the smallest case with one seed and saves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.files import read_json, write_json  # noqa: E402
from shoal.core.run_folder import installed_versions  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "learning.json"
SEEDS = (0, 1, 2)
EPISODES = 400
"""Held-out episodes of each evaluation; their seeds are the same for every run, and no training has them."""
HELD_OUT = 1_000_003
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    title: str
    config: str
    overrides: tuple[str, ...] = ()
    goal: float | None = None
    """Held-out success to reach; None asks for an interval that lies above the start's."""
    constant: float | None = None
    """Held-out success of the best answer that is always the same, where that is known."""


def fixed_map(title: str, *overrides: str) -> Case:
    return Case(f"FrozenLake, fixed map, {title}", "demo", overrides, 0.95, constant=0.0)


CASES = {
    "bandit": Case("Bandit, GRPO", "demo-bandit", goal=0.95, constant=0.5),
    "demo-grpo": fixed_map("GRPO"),
    "demo-gigpo": fixed_map("GiGPO", "algorithm.adv_estimator=gigpo"),
    "demo-rloo": fixed_map("RLOO", "algorithm.adv_estimator=rloo"),
    "demo-reinforce-pp": fixed_map("REINFORCE++", "algorithm.adv_estimator=reinforce_pp"),
    "demo-ppo": fixed_map("PPO with critic (GAE)", "algorithm.adv_estimator=gae"),
    "demo-maps": Case("FrozenLake, random maps, PPO with critic (GAE)", "demo-maps", goal=0.85),
    "mixed": Case("FrozenLake, Bandit and Sokoban in one run", "mixed"),
    "sokoban": Case("Sokoban 6x6, one box, imitation first", "sokoban", goal=0.8),
    "smollm2-bandit": Case(
        "SmolLM2-135M: Bandit, by number", "smollm2-bandit", ("engine.threads=1",), 0.9, constant=0.5
    ),
    "smollm2-frozen_lake": Case(
        "SmolLM2-135M: FrozenLake, fixed map", "smollm2-frozen_lake", ("engine.threads=1",), 0.8, constant=0.0
    ),
    "smollm2-countdown": Case(
        "SmolLM2-135M: Countdown, easy", "smollm2-countdown", ("engine.threads=1",), constant=0.3
    ),
}


def shoal(*arguments: str) -> tuple[str, float]:
    """A command of shoal's: its standard output and its CPU seconds."""
    before = _children()
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPO / "src")},
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        raise SystemExit(f"shoal {arguments[0]} was killed by signal {-done.returncode}: nothing is written")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout, _children() - before


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def evaluation(run: Path, checkpoint: str, temperature: float, episodes: int) -> dict[str, float]:
    """What `shoal eval` says of a checkpoint."""
    text, _ = shoal(
        "eval", str(run), "--checkpoint", checkpoint, "--episodes", str(episodes),
        "--temperature", str(temperature), "--seed", str(HELD_OUT), "--json",
    )  # fmt: skip
    found: dict[str, float] = json.loads(text.splitlines()[0])
    return found


def run_case(name: str, seed: int, episodes: int) -> dict[str, Any]:
    """Train with one seed and evaluate the first and the last weights; a failure is told in the row."""
    case = CASES[name]
    row: dict[str, Any] = {
        "case": case.title, "subject": f"shoal, seed {seed}", "value": None, "unit": "held-out success",
        "cpu_seconds": 0.0, "runs": 1, "name": name, "seed": seed, "goal": case.goal,
        "constant": case.constant, "cpu": _cpu(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        try:
            _, row["cpu_seconds"] = shoal(
                "train", "--config-name", case.config, *case.overrides, f"seed={seed}", f"run_dir={run}",
                "trainer.save_every=1000", "trainer.keep_checkpoints=1000", "trainer.tensorboard=false",
            )  # fmt: skip
            row["seconds"] = round(time.perf_counter() - began, 1)
            row |= results(run, episodes)
        except RuntimeError as error:
            row["failed"] = str(error)
        row["cpu_seconds"] = round(row["cpu_seconds"], 1)
    row["reached"] = reached(row)
    return row


def results(run: Path, episodes: int) -> dict[str, Any]:
    """The curve of a finished run, and its weights before and after on the same held-out episodes."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = read_json(run / "summary.json")["metrics"]["iterations"]
    row: dict[str, Any] = {"updates": updates, "episodes": metrics[-1]["episodes"]}
    for when, checkpoint in (("start", "0"), ("end", "newest")):
        for how, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            found = evaluation(run, checkpoint, temperature, episodes)
            row[f"{how}_{when}"] = [found[key] for key in ("success", "success_low", "success_high")]
            kinds = {key: value for key, value in found.items() if key.startswith("success/")}
            if kinds:
                row[f"{how}_{when}_by_env"] = {
                    key.removeprefix("success/"): value for key, value in kinds.items()
                }
    row["value"] = row["sampled_end"][0]
    row["curve"] = [[m["iteration"], round(m["success"], 4)] for m in metrics if "success" in m]
    row["heldout_curve"] = [[m["iteration"], m["heldout_success"]] for m in metrics if "heldout_success" in m]
    return row


def reached(row: dict[str, Any]) -> bool:
    """Whether a run did what its case asks for."""
    if row["value"] is None:
        return False
    if row["goal"] is not None:
        return bool(row["value"] >= row["goal"])
    return bool(row["sampled_end"][1] > row["sampled_start"][2])


def merge(rows: list[dict[str, Any]]) -> None:
    """New rows take the place of those of the same case and seed, in the order of `CASES`."""
    with Path(tempfile.gettempdir(), "shoal-learning.lock").open("w") as lock:  # other cases may write too
        fcntl.flock(lock, fcntl.LOCK_EX)
        _merge(rows)


def _merge(rows: list[dict[str, Any]]) -> None:
    kept = []
    if RESULTS.exists():
        before = read_json(RESULTS)
        kept = [{"cpu": before["machine"]["cpu"], "date": before["date"], **row} for row in before["rows"]]
    every = {(row["name"], row["seed"]): row for row in [*kept, *rows] if row["name"] in CASES}
    order = list(CASES)
    write_json(
        RESULTS,
        {
            "name": "learning",
            "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
            "versions": installed_versions(),
            "date": datetime.date.today().isoformat(),
            "rows": sorted(every.values(), key=lambda row: (order.index(row["name"]), row["seed"])),
        },
    )


def _cpu() -> str:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return names[0] if names else platform.processor()


def say(row: dict[str, Any]) -> None:
    """One row in words."""
    if row["value"] is None:
        print(f"{row['case']:<46} {row['subject']}: FAILED: {row['failed']}", flush=True)
        return
    start, end = row["sampled_start"], row["sampled_end"]
    print(
        f"{row['case']:<46} {row['subject']}: {start[0]:.2f} -> {end[0]:.2f} [{end[1]:.2f}, {end[2]:.2f}] "
        f"(greedy {row['greedy_start'][0]:.2f} -> {row['greedy_end'][0]:.2f}), {row['updates']} updates, "
        f"{row['cpu_seconds']:.0f} CPU-s{'' if row['reached'] else '  MISSED'}",
        flush=True,
    )


def main() -> None:
    """Run the named cases, or all, and merge the rows into the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(CASES)}; all if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--quick", action="store_true", help="the smallest case with one seed, nothing saved")
    options = parser.parse_args()
    if options.quick:
        say(run_case("bandit", 0, 50))
        return
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case named {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    for name in options.cases or CASES:
        for seed in options.seeds:
            row = run_case(name, seed, options.episodes)
            say(row)
            merge([row])


if __name__ == "__main__":
    main()
