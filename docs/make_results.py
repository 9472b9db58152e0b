"""Writes results.md and its charts from benchmarks/results/*.json: a hook of mkdocs, and a program of its own.

python docs/make_results.py [FOLDER]
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "vector": ("Stepping environments", "bench-vector"),
    "ppo": ("PPO", "bench-ppo"),
    "rollout": ("Rollouts", "bench-rollout"),
    "llm": ("A real language model on a CPU", "bench-llm"),
    "split": ("Splitting recordings", "bench-split"),
    "skills": ("Skills", "bench-skills"),
    "craftax": ("Craftax-Classic and Craftax with 1 M steps", "bench-craftax"),
    "learning": ("What is learned", "bench-learning"),
    "trl_update": ("One update beside TRL", "bench-update"),
    "environments": ("Grid environments", "bench-envs"),
    "text_envs": ("Text environments", "bench-text-envs"),
    "gateway": ("What the gateway costs a call", "bench-gateway"),
    "viewer": ("A run of 100,000 episodes in the viewer", "bench-viewer"),
}
"""Of each file of results its title and the target of the Makefile that writes it."""
SHOWN = 12
"""Cases of a benchmark that are drawn."""


def page(results: Path = ROOT / "benchmarks" / "results") -> str:
    """The whole page as Markdown."""
    parts = [
        "# Results\n\nMade from `benchmarks/results/*.json`, which `make bench-…` writes: every rival ran in the same "
        "minutes on the same machine.\n"
    ]
    for name, (title, target) in TITLES.items():
        path = results / f"{name}.json"
        if path.is_file():
            parts.append(section(title, target, json.loads(path.read_text("utf-8"))))
    return "\n".join(parts)


def section(title: str, target: str, result: dict[str, Any]) -> str:
    """One benchmark: where it ran, a chart of each case, all rows as a table."""
    machine = result.get("machine") or {}
    where = ", ".join(str(machine[key]) for key in ("cpu", "cores") if key in machine)
    lines = [
        f"## {title}\n",
        f"{result.get('date', '')}, {where} cores. `make {target}`.\n",
    ]
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if isinstance(row.get("value"), int | float):
            cases.setdefault(f"{row['case']} ({row.get('unit', '')})", []).append(row)
    drawn = [bars(case, rows) for case, rows in cases.items() if 1 < len(rows) <= 16][:SHOWN]
    lines += drawn
    lines += [
        "",
        f'??? note "All {sum(map(len, cases.values()))} rows"',
        "",
        "    | case | subject | value | unit |",
        "    |---|---|---:|---|",
    ]
    for rows in cases.values():
        for row in rows:
            cells = (row["case"], row["subject"], said(row["value"]), row.get("unit", ""))
            lines.append("    | " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def said(value: float) -> str:
    """A figure with three digits or more, never as a power of ten where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bars(case: str, rows: list[dict[str, Any]]) -> str:
    """A bar for each subject, shoal's in colour."""
    most = max(float(row.get("max", row["value"])) for row in rows) or 1.0
    high, left, width = 22, 190, 700
    drawn = []
    for k, row in enumerate(rows):
        y, value = k * high + 4, max(float(row["value"]), 0.0)
        long = value / most * (width - left - 90)
        colour = "#2166ac" if str(row["subject"]).startswith("shoal") else "#9aa3ad"
        drawn.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(str(row["subject"]))}</text>'
            f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{high - 6}" fill="{colour}"/>'
            f'<text x="{left + long + 6:.1f}" y="{y + 13}">{said(value)}</text>'
        )
    svg = "".join(drawn)
    return (
        f"**{html.escape(case)}**\n\n"
        f'<svg viewBox="0 0 {width} {len(rows) * high + 8}" width="100%" font-size="12" font-family="sans-serif" '
        f'fill="currentColor" role="img" aria-label="{html.escape(case)}">{svg}</svg>\n'
    )


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the page is made when the site is."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "results.md", content=page()))
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(page(), "utf-8")
