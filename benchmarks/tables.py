"""Write the tables of the pages of results from `benchmarks/results/*.json`, and the pictures of learning.

python benchmarks/tables.py vector      docs/vector-results.md
python benchmarks/tables.py learning    docs/learning-results.md, docs/images/learning.png and demo-llm.png
python benchmarks/tables.py real_model  docs/learning-results.md
python benchmarks/tables.py ppo         printed, for docs/ppo.md
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))


def results(name: str) -> dict[str, Any]:
    """What a benchmark saved last."""
    return json.loads((REPO / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def put(page: str, name: str, text: str) -> None:
    """Replace what stands between the marks `<!-- name -->` and `<!-- /name -->` of a page."""
    path = REPO / "docs" / page
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new, found = re.subn(
        pattern, lambda mark: mark[1] + text + "\n" + mark[2], path.read_text(), flags=re.DOTALL
    )
    if not found:
        raise ValueError(f"{page} has no <!-- {name} --> and <!-- /{name} --> on lines of their own")
    path.write_text(new)


# Vector environments

COLUMNS = {
    "shoal / gymnasium sync": "Gymnasium's `SyncVectorEnv`",
    "shoal / best Python peer": "best Python peer",
    "shoal / ideal": "ideal",
    "shoal recv/send / ideal (first ready)": "`recv`, `send`: ideal",
    "shoal / best of its backends": "best of its backends",
    "shoal async / gymnasium async": "`AsyncVectorEnv`: Gymnasium's",
}
"""Ratios, and the heads of their columns."""
BUSY = ", a core busy"
FAULT_COLUMNS = ("shoal", "shoal restart", "gymnasium async", "sb3 subproc", "pufferlib")


def by_case(part: str, key: str, *, busy: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows or ratios of each case, with or without a busy core."""
    cases: dict[str, dict[str, Any]] = {}
    for row in results("vector")[part]:
        if row["case"].endswith(BUSY) == busy:
            cases.setdefault(row["case"].removesuffix(BUSY), {})[row[key]] = row
    return cases


def speed() -> str:
    """Of each case the steps a second, and the median of each ratio, its range, and its goal where it has one."""
    speeds, busy = by_case("rows", "subject"), by_case("ratios", "ratio", busy=True)
    lines = [
        [
            case,
            _speed(speeds[case].get("shoal")),
            *(_ratio(found.get(name)) for name in COLUMNS),
            _ratio(busy.get(case, {}).get("shoal / gymnasium sync")),
        ]
        for case, found in by_case("ratios", "ratio").items()
    ]
    return table(["case", "steps a second", *COLUMNS.values(), "a core busy: `SyncVectorEnv`"], lines)


def _speed(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["value"] is None else f"{row['value']:,.0f}"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    goal = f"; goal {row['goal']:g}{'' if row['met'] else ' **missed**'}" if "goal" in row else ""
    return f"{row['value']:.2f} ({row['min']:.2f} to {row['max']:.2f}{goal})"


def faults() -> str:
    cases: dict[str, dict[str, str]] = {}
    for row in results("faults")["rows"]:
        cases.setdefault(row["case"], {})[row["subject"]] = _cell(row)
    lines = [[case, *(cells.get(name, "-") for name in FAULT_COLUMNS)] for case, cells in cases.items()]
    return table(["fault", *FAULT_COLUMNS], lines)


def _cell(row: dict[str, Any]) -> str:
    text = row.get("outcome", "did not start")
    kind = text.partition(":")[0]
    if kind.endswith(("Error", "]")) or kind == "EOFError":
        text = f"`{kind}`" + (", names the env" if row.get("names_env") else ", does not name the env")
    if "seconds" in row:
        text += f" ({row['seconds']:.2f} s)"
    if "close_seconds" in row and row["close_seconds"] is None:
        text += "; close() hangs"
    if row.get("left") and "live on" not in text:
        text += f"; {row['left']} processes left"
    return text.replace("|", "/")


def write_vector() -> None:
    for name, make in {"speed": speed, "faults": faults}.items():
        put("vector-results.md", name, make())


# What the configs reach


def write_learning() -> None:
    found = results("learning")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault(row["case"], []).append(row)
    head = [
        "config",
        "goal",
        "best constant answer",
        "start",
        "end",
        "end greedy",
        "updates",
        "CPU seconds",
        "goal reached",
    ]
    lines = [table(head, [line(case, rows) for case, rows in groups.items()])]
    lines += by_env(found["rows"])
    lines += ["", f"Measured with one thread a run on {found['machine']['cores']} cores. {where(groups)}"]
    put("learning-results.md", "table", "\n".join(lines))
    draw(groups, "learning.png", 3)
    draw(
        {case: rows for case, rows in groups.items() if case.startswith("SmolLM2") and rows[0]["goal"]},
        "demo-llm.png",
        2,
    )


def cell_of(row: dict[str, Any] | None) -> str:
    """A run with a real model: success at the end, iterations, CPU minutes to 0.8 held out and to the end."""
    if row is None:
        return "·"
    first, whole = row["goal_seconds"], row["cpu_seconds"] / 60
    goal = "never" if first is None else f"{first / 60:.1f}"
    return f"{row['heldout_success']:.2f} ({row['iterations']}, {goal}, {whole:.1f})"


def write_real_model() -> None:
    path = REPO / "benchmarks" / "results" / "real_model.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    lines = []
    for game in ("recipe", "maze", "number", "garden", "safe", "kiosk"):
        seeds = {row["seed"]: row for row in rows if row["game"] == game}
        lines.append([game, *(cell_of(seeds.get(seed)) for seed in range(3))])
    put("learning-results.md", "real model", table(["game", "seed 0", "seed 1", "seed 2"], lines))


def where(groups: dict[str, list[dict[str, Any]]]) -> str:
    """Which processor made which rows, and when."""
    places: dict[tuple[str, str], list[str]] = {}
    for case, rows in groups.items():
        places.setdefault((rows[0]["cpu"], max(row["date"] for row in rows)), []).append(case)
    most = max(places.values(), key=len)
    return " ".join(
        f"{cpu}, {date}." if cases is most else f"{cpu}, {date}: {'; '.join(cases)}."
        for (cpu, date), cases in sorted(places.items(), key=lambda item: item[1] is not most)
    )


def line(case: str, rows: list[dict[str, Any]]) -> list[str]:
    """One case in one row: each seed with its interval."""
    whole = [row for row in rows if row["value"] is not None]
    goal = rows[0]["goal"]
    asked = f"≥ {goal:g}" if goal is not None else "above the start"
    reached = sum(row["reached"] for row in rows)
    return [
        case,
        asked,
        "" if rows[0].get("constant") is None else f"{rows[0]['constant']:.2f}",
        " ".join(f"{row['sampled_start'][0]:.2f}" for row in whole),
        "<br>".join("{:.2f} ({:.2f} to {:.2f})".format(*row["sampled_end"]) for row in whole),
        " ".join(f"{row['greedy_end'][0]:.2f}" for row in whole),
        str(whole[0]["updates"]) if whole else "",
        f"{statistics.median(row['cpu_seconds'] for row in whole):.0f}" if whole else "",
        f"{reached} of {len(rows)} seeds",
    ]


def by_env(rows: list[dict[str, Any]]) -> list[str]:
    """Runs of several envs, each env apart: a seed a column, sampled, before and after."""
    several = [row for row in rows if "sampled_end_by_env" in row]
    if not several:
        return []
    lines = [
        [
            env,
            *(
                f"{row['sampled_start_by_env'][env]:.2f} → {row['sampled_end_by_env'][env]:.2f}"
                for row in several
            ),
        ]
        for env in several[0]["sampled_end_by_env"]
    ]
    head = ["env", *(f"seed {row['seed']}" for row in several)]
    return ["", "Of the mixed run, each env apart (sampled, held out, start → end):", "", table(head, lines)]


def draw(groups: dict[str, list[dict[str, Any]]], picture: str, columns: int) -> None:
    """Training success by update, one panel a case, one line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 / 3 * columns, 2.6 * -(-len(groups) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(-(-len(groups) // columns), columns, sharey=True).ravel()
    for axis, (case, rows) in zip(axes, groups.items(), strict=False):
        for row in rows:
            if row["value"] is not None:
                axis.plot(
                    *zip(*smooth(row["curve"]), strict=True), linewidth=1.2, label=f"seed {row['seed']}"
                )
        if rows[0]["goal"] is not None:
            axis.axhline(rows[0]["goal"], color="gray", linestyle=":", linewidth=1)
        axis.set_title(case, fontsize=9)
        axis.set_ylim(0, 1.03)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=8, loc="lower right")
    figure.supxlabel("update", fontsize=9)
    figure.supylabel("success in training, sampled", fontsize=9)
    figure.savefig(REPO / "docs" / "images" / picture, dpi=90)


def smooth(curve: list[list[float]], width: int = 5) -> list[tuple[float, float]]:
    """The mean of up to `width` neighbouring updates."""
    half = width // 2
    return [
        (update, statistics.fmean(value for _, value in curve[max(0, i - half) : i + half + 1]))
        for i, (update, _) in enumerate(curve)
    ]


# PPO

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


def print_ppo() -> None:
    found = results("ppo")
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
    batch(values)
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


def batch(values: dict[Any, Any]) -> None:
    """Pong on ale-py's batch, where `--parts pong-batch` was measured."""
    case = "ALE/Pong-v5 on ale-py's batch, 8 envs"
    subjects = list(dict.fromkeys(subject for found, subject, _ in values if found == case))
    if not subjects:
        return
    units = ("steps/CPU-s", "steps/s", "share of stepping", "share of inference", "share of the update")
    print(f"{case}\n\n| | {' | '.join(units)} |\n|---|{'---|' * len(units)}")
    for subject in subjects:
        found = [(values.get((case, subject, unit)), ".0%" if "share" in unit else ",.0f") for unit in units]
        shown = ["" if value is None else format(value, digits) for value, digits in found]
        print(f"| {subject} | {' | '.join(shown)} |")
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
    from shoal.train.ppo.presets import PRESETS

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
            env, ", ".join(seeds), by_seed(ours, "return"), by_seed(ours, training), by_seed(theirs, training),
            minutes(ours), minutes(theirs), PUBLISHED.get(env, "none"),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    print()


def by_seed(rows: list[dict[str, Any]], unit: str) -> str:
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
    from shoal.train.ppo.presets import PRESETS

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
    {
        "vector": write_vector,
        "learning": write_learning,
        "real_model": write_real_model,
        "ppo": print_ppo,
    }[sys.argv[1]]()
