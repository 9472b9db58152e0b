"""Write the tables of `docs/vector-results.md` from the results of `vector.py` and `faults.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "vector-results.md"
SPEED_COLUMNS = (
    "ideal",
    "ideal (first ready)",
    "shoal",
    "shoal recv/send",
    "shoal process",
    "shoal thread",
    "shoal serial",
    "shoal async",
    "gymnasium sync",
    "gymnasium async",
    "sb3 dummy",
    "sb3 subproc",
    "pufferlib 1 worker",
    "pufferlib 2 workers",
)
BATCH_COLUMNS = ("shoal", "shoal native", "vector entry point", "envpool")
RATIO_COLUMNS = (
    "shoal / best Python peer",
    "shoal / gymnasium sync",
    "shoal / ideal",
    "shoal recv/send / ideal (first ready)",
    "shoal / best of its backends",
)
DROP_IN = "shoal async / gymnasium async"
BUSY = ", a core busy"
FAULT_COLUMNS = ("shoal", "shoal restart", "gymnasium async", "sb3 subproc", "pufferlib")


def results() -> dict[str, Any]:
    return json.loads((HERE / "results" / "vector.json").read_text())


def by_case(part: str, key: str, *, busy: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows or ratios of each case, with or without a busy core."""
    cases: dict[str, dict[str, Any]] = {}
    for row in results()[part]:
        if row["case"].endswith(BUSY) == busy:
            cases.setdefault(row["case"].removesuffix(BUSY), {})[row[key]] = row
    return cases


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def speed(columns: tuple[str, ...] = SPEED_COLUMNS) -> str:
    """Steps a second; below them the CPU time of one step."""
    lines = []
    for case, found in by_case("rows", "subject").items():
        if any(name in found for name in columns[1:] if not name.startswith("shoal")):
            lines.append([case, *(_speed(found.get(name)) for name in columns)])
    return table(["case", *columns], lines)


def batches() -> str:
    return speed(BATCH_COLUMNS)


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["value"] is None:
        return row["error"].partition(":")[0]
    cpu = f" ({1e6 * row['cpu_seconds'] / row['steps']:.1f})" if row.get("steps") else ""
    return f"{row['value']:,.0f}{cpu}"


def ratios() -> str:
    """The median of each ratio, its range, and its goal where it has one."""
    lines = [
        [case, *(_ratio(found.get(name)) for name in RATIO_COLUMNS)]
        for case, found in by_case("ratios", "ratio").items()
    ]
    return table(["case", *RATIO_COLUMNS], lines)


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    goal = f"; goal {row['goal']:g}{'' if row['met'] else ' **missed**'}" if "goal" in row else ""
    return f"{row['value']:.2f} ({row['min']:.2f} to {row['max']:.2f}{goal})"


def drop_in() -> str:
    """Shoal's `AsyncVectorEnv` beside the class whose constructor it has."""
    speeds = by_case("rows", "subject")
    names = DROP_IN.split(" / ")
    lines = [
        [case, *(_speed(speeds[case][name]) for name in names), _ratio(found[DROP_IN])]
        for case, found in by_case("ratios", "ratio").items()
        if DROP_IN in found
    ]
    return table(["case", "shoal.vector.AsyncVectorEnv", "gymnasium.vector.AsyncVectorEnv", "ratio"], lines)


def busy_core() -> str:
    """What is left when another process keeps one core busy."""
    columns = ("shoal / gymnasium sync", "shoal / ideal")
    lines = [
        [case, *(_ratio(found.get(name)) for name in columns)]
        for case, found in by_case("ratios", "ratio", busy=True).items()
    ]
    return table(["case", *columns], lines)


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
    if f"<!-- {name} -->\n" not in page:
        raise ValueError(
            f"{PAGE.name} has no place for a table: put <!-- {name} --> and <!-- /{name} --> on lines"
        )
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    PAGE.write_text(re.sub(pattern, lambda m: m.group(1) + table + "\n" + m.group(2), page, flags=re.DOTALL))


TABLES = {
    "ratios": ratios,
    "drop-in": drop_in,
    "busy core": busy_core,
    "speed": speed,
    "batches": batches,
    "faults": faults,
}

if __name__ == "__main__":
    for name, make in TABLES.items():
        try:
            put(name, make())
        except FileNotFoundError as error:
            print(f"no table of {name}: {error.filename} is not there")
