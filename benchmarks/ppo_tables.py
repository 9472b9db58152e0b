"""Print the Markdown tables of docs/ppo-results.md from benchmarks/results/ppo.json, and those of the presets."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.files import read_json  # noqa: E402
from shoal.train.ppo.presets import PRESETS  # noqa: E402

SUBJECTS = (
    "shoal", "shoal, 2 workers", "shoal, torch path", "shoal, bfloat16", "shoal, bfloat16, 2 workers",
    "Stable-Baselines3", "sbx", "single-file PPO", "CleanRL", "limit: stepping only",
)  # fmt: skip
COUNTS = (1, 4, 8, 16)
PUBLISHED = {
    "HalfCheetah-v5": "1,443 ± 46 (-v4, CleanRL)",
    "Hopper-v5": "2,383 ± 272 (-v4, CleanRL)",
    "Walker2d-v5": "2,288 ± 572 (-v4, CleanRL)",
    "MiniGrid-DoorKey-5x5-v0": "0.964 ± 0.006 (zoo)",
}
"""CleanRL: docs/benchmark/ppo_continuous_action.md, episodes of training, three seeds. Zoo: benchmark.md, one run."""
BASELINE = "Stable-Baselines3"


def main() -> None:
    found = read_json(REPO / "benchmarks" / "results" / "ppo.json")
    values = {(row["case"], row["subject"], row["unit"]): row["value"] for row in found["rows"]}
    places = {row["case"]: (row["date"], row["cpu"]) for row in found["rows"] if "cpu" in row}
    where: dict[tuple[str, str], list[str]] = {}
    for case, place in places.items():
        where.setdefault(place, []).append(case)
    cores = found["machine"]["cores"]
    for (day, cpu), cases in sorted(where.items()):
        print(f"Measured on {day} on {cpu}, {cores} cores: {'; '.join(sorted(cases))}.")
    print()
    for env in ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5", "ALE/Pong-v5"):
        throughput(values, env)
    solve(values)
    scaling(values, {case: cpu for case, (_, cpu) in places.items()})
    scores(found["rows"])
    presets()


def throughput(values: dict[Any, Any], env: str) -> None:
    counts = [n for n in COUNTS if (f"{env}, {n} envs", BASELINE, "steps/CPU-s") in values]
    if not counts:
        return
    print(
        f"{env}: thousands of env steps per CPU second (and per second of wall time); x is against {BASELINE}.\n"
    )
    print("| | " + " | ".join(f"{n} env{'s' if n > 1 else ''}" for n in counts) + " |")
    print("|---|" + "---|" * len(counts))
    for subject in SUBJECTS:
        cells = []
        for n in counts:
            case = f"{env}, {n} envs"
            cpu, wall = (values.get((case, subject, unit)) for unit in ("steps/CPU-s", "steps/s"))
            if cpu is None:
                cells.append("")
                continue
            base = values[case, BASELINE, "steps/CPU-s"]
            ratio = f", {cpu / base:.1f}x" if subject != BASELINE else ""
            digits = 1 if base >= 1000 else 2
            cells.append(f"{cpu / 1000:.{digits}f} ({wall / 1000:.{digits}f}){ratio}")
        if any(cells):
            print(f"| {subject} | " + " | ".join(cells) + " |")
    print()


def solve(values: dict[Any, Any]) -> None:
    case = "CartPole-v1 to 475"
    print("CartPole-v1 until the mean of 100 episodes reaches 475, 8 envs, the same published settings, median of "
          "seeds 1, 2, 3.\n")  # fmt: skip
    print("| | seconds | env steps | |")
    print("|---|---|---|---|")
    base = values.get((case, BASELINE, "s"))
    if base is None:
        print("not measured\n")
        return
    for subject in SUBJECTS:
        if (case, subject, "s") not in values:
            continue
        seconds, steps = (values.get((case, subject, unit)) for unit in ("s", "env steps"))
        if seconds is None:
            print(f"| {subject} | not within 100,000 steps in all seeds | | |")
        else:
            print(f"| {subject} | {seconds:.2f} | {steps:,.0f} | {base / seconds:.1f}x |")
    print()


def scaling(values: dict[Any, Any], cpus: dict[str, str]) -> None:
    """Only what one kind of processor measured is compared."""
    print("Speed-up of more environments over one, in steps per second of wall time on two cores.\n")
    print("| n-envs | " + " | ".join(f"{env}, {s}" for env in ("CartPole", "LunarLander") for s in
          ("shoal", "shoal, 2 workers", BASELINE)) + " |")  # fmt: skip
    print("|---|" + "---|" * 6)
    for n in COUNTS:
        cells = []
        for env in ("CartPole-v1", "LunarLander-v3"):
            for subject in ("shoal", "shoal, 2 workers", BASELINE):
                one = values[f"{env}, 1 envs", subject.removesuffix(", 2 workers"), "steps/s"]
                many = values.get((f"{env}, {n} envs", subject, "steps/s"))
                same = many and cpus[f"{env}, {n} envs"] == cpus[f"{env}, 1 envs"]
                cells.append(f"{many / one:.1f}x" if same else "")
        print(f"| {n} | " + " | ".join(cells) + " |")
    print()


def scores(rows: list[dict[str, Any]]) -> None:
    print(
        "| environment | seeds | greedy return | in training | CleanRL, in training | CPU min | CleanRL's | published |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for env in PRESETS:
        found = [row for row in rows if row["case"] == f"score of {env}"]
        ours, theirs = (
            [row for row in found if row["subject"].startswith(who)] for who in ("shoal", "CleanRL")
        )
        if not ours:
            continue
        seeds = [row["subject"].rpartition(" ")[2] for row in ours if row["unit"] == "return"]
        training = "return in training"
        cells = [
            env, ", ".join(seeds), told(ours, "return"), told(ours, training), told(theirs, training),
            minutes(ours), minutes(theirs), PUBLISHED.get(env, "none"),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    print()


def told(rows: list[dict[str, Any]], unit: str) -> str:
    """Each seed, and where there are several their mean and deviation."""
    values = [row["value"] for row in rows if row["unit"] == unit]
    if not values:
        return ""
    digits = 2 if max(values) < 10 else 0
    each = " · ".join(f"{value:,.{digits}f}" for value in values)
    if len(values) == 1:
        return each
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return f"{each}: **{mean:,.{digits}f} ± {spread:,.{digits}f}**"


def minutes(rows: list[dict[str, Any]]) -> str:
    spent = [row["cpu_seconds"] / 60 for row in rows if row["unit"] == "return in training"]
    return f"{statistics.median(spent):.1f}" if spent else ""


def presets() -> None:
    print("| environment | n-envs | steps | source | settings |")
    print("|---|---|---|---|---|")
    for name, preset in PRESETS.items():
        around = {
            "atari": preset.atari,
            "frame_stack": preset.frame_stack,
            "wrapper": " ".join(preset.wrappers),
        }
        shown = {**preset.settings, **{key: value for key, value in around.items() if value}}
        shown |= {} if preset.eval_deterministic else {"eval_deterministic": False}
        settings = ", ".join(f"{key} {value}" for key, value in shown.items())
        print(f"| {name} | {preset.n_envs} | {preset.total_timesteps:,} | {preset.source} | {settings} |")


if __name__ == "__main__":
    main()
