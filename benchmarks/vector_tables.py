"""Write the tables of `docs/vector.md` from the results of `vector.py` and `faults.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "vector.md"
SPEED_COLUMNS = (
    "shoal",
    "shoal recv/send",
    "shoal process",
    "gymnasium sync",
    "gymnasium async",
    "sb3 dummy",
    "sb3 subproc",
    "pufferlib 1 worker",
    "pufferlib 2 workers",
)
FAULT_COLUMNS = ("shoal", "shoal restart", "gymnasium async", "sb3 subproc", "pufferlib")


def speed() -> str:
    rows = json.loads((HERE / "results" / "vector.json").read_text())["rows"]
    cases: dict[str, dict[str, Any]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["subject"]] = row["value"]
    lines = [
        "| case | limit | " + " | ".join(SPEED_COLUMNS) + " | shoal / best rival | shoal / limit |",
        "|---" * (len(SPEED_COLUMNS) + 4) + "|",
    ]
    for case, values in cases.items():
        limits = [value for name, value in values.items() if name.startswith("limit")]
        limit = values.get("limit (all)", limits[0])
        rivals = [v for name, v in values.items() if v and not name.startswith(("shoal", "limit", "envpool"))]
        cells = [f"{values[name]:,.0f}" if values.get(name) else "-" for name in SPEED_COLUMNS]
        shares = f"{values['shoal'] / max(rivals):.2f} | {values['shoal'] / limit:.2f}"
        lines.append(f"| {case} | {limit:,.0f} | {' | '.join(cells)} | {shares} |")
    return "\n".join(lines)


def faults() -> str:
    rows = json.loads((HERE / "results" / "faults.json").read_text())["rows"]
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["subject"]] = _cell(row)
    lines = ["| fault | " + " | ".join(FAULT_COLUMNS) + " |", "|---" * (len(FAULT_COLUMNS) + 1) + "|"]
    for case, cells in cases.items():
        lines.append(f"| {case} | " + " | ".join(cells.get(name, "-") for name in FAULT_COLUMNS) + " |")
    return "\n".join(lines)


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


def put(name: str, table: str) -> None:
    page = PAGE.read_text()
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    PAGE.write_text(re.sub(pattern, lambda m: m.group(1) + table + "\n" + m.group(2), page, flags=re.DOTALL))


if __name__ == "__main__":
    for name, table in (("speed", speed), ("faults", faults)):
        try:
            put(name, table())
        except FileNotFoundError as error:
            print(f"no table of {name}: {error.filename} is not there")
