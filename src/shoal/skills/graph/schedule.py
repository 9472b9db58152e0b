"""What to do next, as a pure function of the rows of a store: no clock, no files, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.skills.graph.store import AttemptRow, End, SkillRow, Status

Phase = Literal["run", "drain", "leave", "kill"]
"""Launch and wait; launch nothing more; let go of all trainings; end all of them."""


@dataclass
class Plan:
    """What follows from the rows; empty when there is nothing to do but wait."""

    launch: list[str] = field(default_factory=list)  # skills
    kill: dict[int, End] = field(default_factory=dict)  # launches, and how they end
    give_up: dict[str, tuple[Status, str | None]] = field(default_factory=dict)
    """Skills with a new status: skipped, failed, blocked, or waiting again."""


def plan(
    skills: Sequence[SkillRow],
    running: Sequence[AttemptRow],
    *,
    slots: int = 1,
    phase: Phase = "run",
    growing: bool = False,
    overdue: Sequence[int] = (),
) -> Plan:
    """What to launch, what to end, and which skills to give up.

    Args:
        skills: all of them.
        running: launches that have not ended.
        slots: trainings at a time.
        phase: whether to launch anything.
        growing: more skills may be added.
        overdue: launches that ran longer than they may.
    """
    found = Plan()
    cancelled = {row.name for row in skills if row.cancel}
    for attempt in running:
        if attempt.skill in cancelled:
            found.kill[attempt.id] = "cancelled"
        elif phase == "kill":
            found.kill[attempt.id] = "stopped"
        elif attempt.id in overdue:
            found.kill[attempt.id] = "limit"
    for row in skills:
        if row.cancel and row.status in ("waiting", "blocked"):
            found.give_up[row.name] = "skipped", "cancelled"
    if phase != "run" or found.kill or found.give_up:
        return found
    for row in ready(skills):
        if row.budget_total and row.left < 1:
            found.give_up[row.name] = "failed", f"its budget of {row.budget_total:,} steps is used up"
    for name, reason in obstacles(skills, progress=bool(running) or growing).items():
        row = next(row for row in skills if row.name == name)
        if reason is None and row.status == "blocked":
            found.give_up[name] = "waiting", None
        elif reason is not None and (row.status, row.reason) != ("blocked", reason):
            found.give_up[name] = "blocked", reason
    if not found.give_up:
        found.launch = [row.name for row in ready(skills)][: max(0, slots - len(running))]
    return found


def finished(
    skills: Sequence[SkillRow], running: Sequence[AttemptRow], *, phase: Phase, growing: bool
) -> bool:
    """Whether nothing more will happen without somebody asking for it."""
    if phase == "leave":
        return True
    return not running and (phase != "run" or (not growing and not ready(skills)))


def ready(skills: Sequence[SkillRow]) -> list[SkillRow]:
    """The waiting skills whose dependencies are all completed, those on the longest path first."""
    completed = {row.name for row in skills if row.status == "completed"}
    behind = _longest_paths(skills)
    can = [row for row in skills if row.status == "waiting" and completed.issuperset(row.dependencies)]
    return sorted(can, key=lambda row: -behind[row.name])


def _longest_paths(skills: Sequence[SkillRow]) -> dict[str, int]:
    """How many skills follow one after another behind each; a circle counts as often as there are skills."""
    needed_by: dict[str, list[str]] = {row.name: [] for row in skills}
    for row in skills:
        for name in row.dependencies:
            if name in needed_by:
                needed_by[name].append(row.name)
    path = dict.fromkeys(needed_by, 0)
    for _ in skills:
        longer = {name: max((path[n] + 1 for n in after), default=0) for name, after in needed_by.items()}
        if longer == path:
            break
        path = longer
    return path


def obstacles(skills: Sequence[SkillRow], *, progress: bool) -> Mapping[str, str | None]:
    """For each waiting or blocked skill what keeps it from ever starting, or None.

    Args:
        skills: all of them.
        progress: something runs or may be added, so what is open now may yet complete.
    """
    statuses: dict[str, str] = {row.name: row.status for row in skills}
    doomed = {name for name, status in statuses.items() if status in ("failed", "skipped")}
    idle = [row for row in skills if row.status in ("waiting", "blocked")]
    progress |= any(all(statuses.get(name) == "completed" for name in row.dependencies) for row in idle)
    if not progress:
        doomed |= {row.name for row in idle if not statuses.keys() >= set(row.dependencies)}
    while more := {row.name for row in idle if doomed.intersection(row.dependencies)} - doomed:
        doomed |= more
    statuses |= {row.name: "blocked" if row.name in doomed else "waiting" for row in idle}
    found: dict[str, str | None] = {}
    for row in idle:
        dead = [name for name in row.dependencies if name in doomed]
        still_open = [name for name in row.dependencies if statuses.get(name) != "completed"]
        missing = [name for name in still_open if name not in statuses]
        if dead:
            found[row.name] = "; ".join(f"{name} {statuses[name]}" for name in dead)
        elif not still_open or progress:
            found[row.name] = None
        elif missing:
            found[row.name] = f"needs {', '.join(missing)}, which is unknown"
        else:
            found[row.name] = "skills wait for each other: " + " -> ".join(_circle(row, skills))
    return found


def _circle(row: SkillRow, skills: Sequence[SkillRow]) -> list[str]:
    """The way around on which a skill waits for itself, or for others that do."""
    by_name = {other.name: other for other in skills}
    path = [row.name]
    while path.count(path[-1]) == 1:
        path.append(next(n for n in by_name[path[-1]].dependencies if by_name[n].status != "completed"))
    return path
