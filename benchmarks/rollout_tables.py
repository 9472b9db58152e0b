"""Write the tables of `docs/rollout.md` from the results of `rollout.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "rollout.md"
SUBJECTS = (
    "shoal",
    "greedy (shoal)",
    "barrier (shoal, lockstep)",
    "worker-batched lock",
    "lock per request",
)


def cases() -> dict[str, dict[str, float]]:
    """The value of each subject in each case."""
    found: dict[str, dict[str, float]] = {}
    for row in json.loads((HERE / "results" / "rollout.json").read_text())["rows"]:
        found.setdefault(row["case"], {})[row["subject"]] = row["value"]
    return found


def utilisation() -> str:
    lines = [
        "| envs | " + " | ".join(SUBJECTS) + " |",
        "|---" * (len(SUBJECTS) + 1) + "|",
    ]
    for case, values in cases().items():
        if case.startswith("utilisation, "):
            cells = [f"{values[name]:.3f}" if name in values else "-" for name in SUBJECTS]
            lines.append(f"| {case.removeprefix('utilisation, ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead() -> str:
    lines = ["| clients | p50 | p99 | bare echo, p50 |", "|---|---|---|---|"]
    for case, values in cases().items():
        if case.startswith("request overhead, "):
            names = ("shoal, p50", "shoal, p99", "bare echo, p50")
            cells = [f"{values[name]:.0f} µs" for name in names]
            lines.append(f"| {case.removeprefix('request overhead, ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("utilisation", utilisation()), ("overhead", overhead())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page = re.sub(pattern, rf"\g<1>{table}\n\g<2>", page, flags=re.DOTALL)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
