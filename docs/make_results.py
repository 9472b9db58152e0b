"""Writes results.md and its charts from benchmarks/results/*.json: a hook of mkdocs, and a program of its own.

python docs/make_results.py [FOLDER]
"""

from __future__ import annotations

import html
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Results

How fast shoal is beside other libraries, and what agents learn with it. The subjects of a case took turns on the same
machine, and where they should compute the same, that was checked first. `make bench-…` measures again and writes
`benchmarks/results/*.json`; this page shows those files. The machines have two shared cores, so the ratio of two bars
says more than their lengths.

How to read a chart: a bar is the median of several rounds. shoal is blue and other libraries are grey. Light bars
("ideal", "floor", "limit", "bare", "echo") are no libraries: they do only the work that cannot be avoided. The heading
of a chart says whether more or less is better. The first charts of a benchmark are shown; the others and a table of all
rows are folded.
"""
BENCHMARKS = {
    "vector": (
        "Stepping environments",
        "bench-vector",
        "Steps a second of vector environments, with actions drawn before. `n=32` is 32 environments. Some are real "
        "(CartPole, LunarLander, HalfCheetah, Pong, MiniGrid). The others are made up and stress one thing: `images` "
        "and `text` cost next to nothing but their observation, `cpu200us` computes for 200 µs, `waiting` sleeps about "
        "3.5 ms, `http` asks a server that takes as long. `shoal` is the backend that shoal chooses by itself, "
        '`shoal process` and the like are backends chosen by name. Where it says "a core busy", another program '
        "occupied one of the two cores. The ideal loops over Python environments on both cores; batches in C++ or "
        "NumPy (`envpool`, `vector entry point`, `shoal native`) can pass it. "
        "[Ratios, memory and faults](vector-results.md).",
    ),
    "ppo": (
        "PPO",
        "bench-ppo",
        'Environment steps a second while PPO trains, with the same settings and one thread for all. "Limit" steps '
        "the environments without training. [Presets and the scores they reach](ppo-results.md).",
    ),
    "rollout": (
        "Rollouts",
        "bench-rollout",
        "How much of the possible speed a rollout reaches when environments take unequal time and one engine serves "
        "all; 1 is the best that any order of work allows. Environments and engine only sleep, so that the order of "
        "work is measured. The request overhead is what asking an engine costs.",
    ),
    "llm": (
        "A real language model on a CPU",
        "bench-llm",
        "Tokens a second that SmolLM2-135M samples for the turns of 16 or 64 episodes, beside transformers' "
        "`model.generate` on the same requests as padded batches. Greedy answers of both are equal.",
    ),
    "split": (
        "Splitting recordings",
        "bench-split",
        "Seconds and memory to turn recordings with screenshots into samples. The reference processes every sample by "
        "itself; the floor only decodes and resizes each image once. [All cases](splitting-results.md).",
    ),
    "skills": (
        "Skills",
        "bench-skills",
        "A graph of ten skills in the crafting world: trainings side by side and one after the other, the time between "
        "the end of a training and the start of the next, and the speed of the world and of its trainer. "
        "[In words](skills-results.md).",
    ),
    "craftax": (
        "Craftax-Classic and Craftax with 1 M steps",
        "bench-craftax",
        "What an agent of skills achieves in 256 unseen episodes after one million environment steps in all. A case "
        "that ends with the name of an achievement is the share of episodes that reached it. "
        "[Beside published scores](skills-results.md).",
    ),
    "learning": (
        "What is learned",
        "bench-learning",
        "Success on 400 held-out episodes after training with a shipped config, with three seeds. "
        "[Start, goal and best constant answer of each](learning-results.md).",
    ),
    "trl_update": (
        "One update beside TRL",
        "bench-update",
        "CPU seconds of one update of the weights on the same episodes, beside TRL's `GRPOTrainer` with several sizes "
        "of its batch. The weights after the last update are equal.",
    ),
    "trl_curves": (
        "Learning beside TRL",
        "bench-trl-curves",
        "GRPO on one task of one turn: a fresh Llama of 0.1 million weights learns three words for each of four signs. "
        "Both trainers have the same first weights, prompts, rewards and settings, and six seeds; each samples, "
        "computes its loss and steps by itself. [The curves](algorithms-compared.md#beside-the-libraries-themselves).",
    ),
    "environments": (
        "Grid environments",
        "bench-envs",
        'How fast Sokoban rooms and FrozenLake maps are made and stepped. "Mean optimal pushes" says how hard the '
        "rooms are.",
    ),
    "text_envs": (
        "Text environments",
        "bench-text-envs",
        "Puzzles made and answers scored a second, and the search of WebShop: seconds to index the products, and "
        "searches a second.",
    ),
    "gateway": (
        "What the gateway costs a call",
        "bench-gateway",
        "Milliseconds of a chat call whose model answers at once, beside a web server that returns a fixed answer.",
    ),
    "viewer": (
        "A run of 100,000 episodes in the viewer",
        "bench-viewer",
        "Seconds until the first paint of a page in Chromium, and of `shoal show` in the terminal.",
    ),
}
"""Of each file of results its title, the target of the Makefile that writes it, and what is measured."""
SHOWN = 3
"""Charts of a benchmark that are not folded: the cases with most subjects."""
LESS = {"s", "ms", "us", "CPU s/update"}
NEITHER = {"nats", "tokens", "mean optimal pushes", "MiB of pixels"}
"""Units of which less is better (and memory), and units of which neither is."""
BOUNDS = ("ideal", "floor", "limit", "bare", "echo")


def page(results: Path = ROOT / "benchmarks" / "results") -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for name, (title, target, about) in BENCHMARKS.items():
        path = results / f"{name}.json"
        if path.is_file():
            parts.append(section(title, target, about, json.loads(path.read_text("utf-8"))))
    return "\n".join(parts)


def section(title: str, target: str, about: str, result: dict[str, Any]) -> str:
    """One benchmark: what it measures and where it ran, some charts; the other charts and all rows are folded."""
    machine = result.get("machine") or {}
    cores = machine.get("cores") or machine.get("cpus")
    where = machine.get("cpu") or machine.get("machine") or machine.get("processor") or "x86_64"
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if isinstance(row.get("value"), int | float):
            cases.setdefault((row["case"], row.get("unit", "")), []).append(row)
    drawn = sorted((key for key in cases if 1 < len(cases[key]) <= 16), key=lambda key: -len(cases[key]))
    table = ["| case | subject | value | unit |", "|---|---|---:|---|"]
    for (case, unit), rows in cases.items():
        for row in rows:
            cells = (case, row["subject"], said(row["value"]), unit)
            table.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return "\n".join(
        [
            f"## {title}\n\n{about}\n",
            f"Measured on {result['date']} ({where}, {cores} cores) by `make {target}`.\n",
            *(chart(*key, cases[key]) for key in drawn[:SHOWN]),
            *folded(f"{len(drawn) - SHOWN} more charts", [chart(*key, cases[key]) for key in drawn[SHOWN:]]),
            *folded(f"All {len(table) - 2} rows", ["\n".join(table)]),
        ]
    )


def folded(title: str, blocks: list[str]) -> list[str]:
    """Blocks of Markdown below a line that opens them; nothing if there are none."""
    inside = textwrap.indent("\n".join(blocks), "    ")
    return [f'??? note "{title}"\n\n{inside}\n'] if blocks else []


def said(value: float) -> str:
    """A figure with three digits or more, never as a power of ten where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def better(unit: str) -> str:
    """Which direction is better."""
    if unit in NEITHER:
        return ""
    return ", less is better" if unit in LESS or unit.startswith("MiB") else ", more is better"


def chart(case: str, unit: str, rows: list[dict[str, Any]]) -> str:
    """A bar for each subject."""
    most = max(float(row["value"]) for row in rows) or 1.0
    drawn = []
    for row in rows:
        who = str(row["subject"])
        kind = "shoal" if who.startswith("shoal") else "bound" if who.startswith(BOUNDS) else "other"
        width = 70 * max(float(row["value"]), 0.0) / most
        drawn.append(
            f'<span>{html.escape(who)}</span><span class="{kind}"><i style="width:{width:.1f}%"></i> '
            f"{said(row['value'])}</span>"
        )
    return f'**{html.escape(case)}** ({unit}{better(unit)})\n\n<div class="bars">{"".join(drawn)}</div>\n'


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the page is made when the site is."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "results.md", content=page()))
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(page(), "utf-8")
