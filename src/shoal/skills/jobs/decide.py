"""Which skills can start, and what keeps the others from it: pure functions of the rows of a store."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.skills.jobs.records import SkillRow

ENDED_BADLY = ("failed", "skipped", "blocked")


def launchable(rows: Sequence[SkillRow]) -> list[SkillRow]:
    """The waiting skills whose dependencies are all completed."""
    completed = {row.name for row in rows if row.status == "completed"}
    return [row for row in rows if row.status == "waiting" and completed.issuperset(row.dependencies)]


def obstacles(rows: Sequence[SkillRow], *, progress: bool) -> dict[str, str | None]:
    """For each waiting or blocked skill what keeps it from ever starting, or None.

    Args:
        rows: all skills.
        progress: something runs, merges or may still be added, so what is open now may yet complete.
    """
    statuses = {row.name: row.status for row in rows}
    found: dict[str, str | None] = {}
    for row in rows:
        if row.status not in ("waiting", "blocked"):
            continue
        dead = [name for name in row.dependencies if statuses.get(name) in ENDED_BADLY]
        still_open = [name for name in row.dependencies if statuses.get(name) != "completed"]
        missing = [name for name in still_open if name not in statuses]
        if dead:
            found[row.name] = "; ".join(f"{name} {statuses[name]}" for name in dead)
        elif not still_open or progress:
            found[row.name] = None
        elif missing:
            found[row.name] = f"needs {', '.join(missing)}, which is unknown"
        else:
            found[row.name] = "skills wait for each other: " + " -> ".join(_circle(row, rows))
    return found


def _circle(row: SkillRow, rows: Sequence[SkillRow]) -> list[str]:
    """The way around on which a skill waits for itself, or for others that do."""
    by_name = {other.name: other for other in rows}
    path = [row.name]
    while path.count(path[-1]) == 1:
        ahead = [
            name
            for name in by_name[path[-1]].dependencies
            if name in by_name and by_name[name].status != "completed"
        ]
        if not ahead:
            break
        path.append(ahead[0])
    return path
