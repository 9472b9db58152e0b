"""Write the table and the pictures of docs/learning.md from benchmarks/results/learning.json."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.files import read_json  # noqa: E402

PICTURE = REPO / "docs" / "images" / "learning.png"
PICTURE_LLM = REPO / "docs" / "images" / "demo-llm.png"
PAGE = REPO / "docs" / "learning.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def main() -> None:
    found = read_json(REPO / "benchmarks" / "results" / "learning.json")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault(row["case"], []).append(row)
    lines = [
        "| config | asked for | best constant answer | start, seeds 0 1 2 | end, seeds 0 1 2 | end, greedy "
        "| updates | CPU seconds | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line(case, rows) for case, rows in groups.items()),
    ]
    lines += by_env(found["rows"])
    lines += ["", f"Measured with one thread a run on {found['machine']['cores']} cores. {where(groups)}"]
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
    draw(groups, PICTURE, 3)
    draw(
        {case: rows for case, rows in groups.items() if case.startswith("SmolLM2") and rows[0]["goal"]},
        PICTURE_LLM,
        2,
    )
    print("\n".join(lines))


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


def line(case: str, rows: list[dict[str, Any]]) -> str:
    """One case in one row: each seed with its interval."""
    whole = [row for row in rows if row["value"] is not None]
    goal = rows[0]["goal"]
    asked = f"≥ {goal:g}" if goal is not None else "above the start"
    reached = sum(row["reached"] for row in rows)
    cells = [
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
    return "| " + " | ".join(cells) + " |"


def by_env(rows: list[dict[str, Any]]) -> list[str]:
    """Runs of several envs, each env apart: a seed a column, sampled, before and after."""
    several = [row for row in rows if "sampled_end_by_env" in row]
    if not several:
        return []
    seeds = [str(row["seed"]) for row in several]
    lines = [
        "",
        "Of the mixed run, each env apart (sampled, held out, start → end):",
        "",
        "| env | " + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---|" + "---|" * len(seeds),
    ]
    for env in several[0]["sampled_end_by_env"]:
        cells = [
            f"{row['sampled_start_by_env'][env]:.2f} → {row['sampled_end_by_env'][env]:.2f}"
            for row in several
        ]
        lines.append(f"| {env} | " + " | ".join(cells) + " |")
    return lines


def draw(groups: dict[str, list[dict[str, Any]]], picture: Path, columns: int) -> None:
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
    figure.savefig(picture, dpi=90)


def smooth(curve: list[list[float]], width: int = 5) -> list[tuple[float, float]]:
    """The mean of up to `width` neighbouring updates."""
    half = width // 2
    return [
        (update, statistics.fmean(value for _, value in curve[max(0, i - half) : i + half + 1]))
        for i, (update, _) in enumerate(curve)
    ]


if __name__ == "__main__":
    main()
