"""What to do next, as a pure function of the rows of a store and of what just happened: no clock, no files.

    waiting ──launch──> running ──done──> merging ──commit──> completed
       ^  │                │ failed, retries left; stopped
       │  └─needs─> blocked(reason)       │ none left, exhausted, over its time ──> failed      cancelled ──> skipped
       └───────────────────┘

Whoever performs the actions writes `Close` and `Update` of one decision in one transaction and acts afterwards, so
that a kill in between leaves rows from which the next decision follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.skills.jobs.store import AttemptRow, JobRow

ENDED_BADLY = ("failed", "skipped")
Phase = Literal["run", "drain", "leave", "kill"]


@dataclass(frozen=True)
class Rows:
    """All that a decision may look at."""

    jobs: Sequence[JobRow]
    running: Sequence[AttemptRow]  # launches that have not ended
    slots: int = 1
    max_retries: int = 0
    time_limit: float | None = None  # seconds that one launch may take
    phase: Phase = "run"  # "drain": launch nothing more; "leave": let go of all; "kill": end all
    growing: bool = False  # more jobs may be added
    room: int | None = None  # launches for which there are resources; None: any number
    now: float = 0.0
    merging: frozenset[int] = frozenset()  # attempts being committed
    killed: frozenset[int] = frozenset()  # attempts that were told to end
    ages: Mapping[int, float] = field(default_factory=dict)  # seconds of the launches that are watched

    def job(self, name: str) -> JobRow:
        """A job by its name."""
        return next(row for row in self.jobs if row.name == name)


# What happens


@dataclass(frozen=True)
class Look:
    """Time went by, somebody asked for something, or something else changed."""


@dataclass(frozen=True)
class Ended:
    """A launch is over."""

    attempt: AttemptRow
    done: bool = False  # it left a whole result of its own
    reason: str = ""  # why not, otherwise
    final: bool = False  # it says itself that another try of the same would be in vain


@dataclass(frozen=True)
class Found:
    """A launch that an earlier scheduler recorded."""

    attempt: AttemptRow
    state: Literal["alive", "never"]  # "never": there is no trace of its process


@dataclass(frozen=True)
class MergeFailed:
    """A result could not be committed."""

    attempt: AttemptRow
    reason: str


# What to do


@dataclass(frozen=True)
class Close:
    """The attempt has ended so."""

    attempt: int
    outcome: str
    reason: str | None = None


@dataclass(frozen=True)
class Update:
    """The job's row changes."""

    job: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """The attempt is about to be ended, for this reason."""

    attempt: int
    ending: str


@dataclass(frozen=True)
class Kill:
    """End the attempt's process."""

    attempt: int


@dataclass(frozen=True)
class Launch:
    """Start the job."""

    job: str


@dataclass(frozen=True)
class Merge:
    """Commit the attempt's result."""

    attempt: int


@dataclass(frozen=True)
class Tell:
    """The job will not be completed by this run; say so to those who wait."""

    job: str


Event = Look | Ended | Found | MergeFailed
Action = Close | Update | Mark | Kill | Launch | Merge | Tell


def decide(rows: Rows, event: Event) -> list[Action]:
    """The actions that follow from an event; `Look` is repeated until nothing follows."""
    if isinstance(event, Ended):
        return _ended(rows, event)
    if isinstance(event, MergeFailed):
        return _failed(rows, event.attempt, event.reason)
    if isinstance(event, Found):
        return _found(rows, event)
    return _requests(rows) or _overdue(rows) or _obstacles(rows) or _launches(rows)


def finished(rows: Rows) -> bool:
    """Whether nothing more will happen without somebody asking for it."""
    if rows.phase == "leave":
        return True
    if rows.running or rows.merging or any(row.status == "merging" for row in rows.jobs):
        return False
    return rows.phase != "run" or (not rows.growing and not ready(rows.jobs))


def ready(jobs: Sequence[JobRow]) -> list[JobRow]:
    """The waiting jobs whose needs are all completed, those first behind which the longest way lies."""
    completed = {row.name for row in jobs if row.status == "completed"}
    behind = _way_behind(jobs)
    can = [row for row in jobs if row.status == "waiting" and completed.issuperset(row.needs)]
    return sorted(can, key=lambda row: -behind[row.name])


def _way_behind(jobs: Sequence[JobRow]) -> dict[str, int]:
    """How many jobs follow one after another behind each; a circle counts as often as there are jobs."""
    needed_by: dict[str, list[str]] = {row.name: [] for row in jobs}
    for row in jobs:
        for name in row.needs:
            if name in needed_by:
                needed_by[name].append(row.name)
    way = dict.fromkeys(needed_by, 0)
    for _ in jobs:
        longer = {name: max((way[n] + 1 for n in after), default=0) for name, after in needed_by.items()}
        if longer == way:
            break
        way = longer
    return way


def _ended(rows: Rows, event: Ended) -> list[Action]:
    attempt, job = event.attempt, rows.job(event.attempt.job)
    if job.cancel:
        return [Close(attempt.id, "cancelled"), *_skip(job, rows.now)]
    if event.done:
        return [Update(job.name, {"status": "merging"}), Merge(attempt.id)]
    if attempt.ending == "stop":
        return [Close(attempt.id, "stopped"), Update(job.name, {"status": "waiting", "reason": "stopped"})]
    if attempt.ending == "limit":
        reason = (
            f"ran longer than {rows.time_limit:g} s" if rows.time_limit else "ran longer than was allowed"
        )
        return _give_up(job, attempt, reason, rows.now, outcome="limit")
    if event.final and (attempt.budget is None or job.left <= attempt.budget):
        return _give_up(job, attempt, event.reason, rows.now, outcome="exhausted")
    if event.final:  # its budget was raised meanwhile
        return [Close(attempt.id, "failed", event.reason), Update(job.name, {"status": "waiting"})]
    return _failed(rows, attempt, event.reason)


def _failed(rows: Rows, attempt: AttemptRow, reason: str) -> list[Action]:
    """Another launch, or none left."""
    job = rows.job(attempt.job)
    if job.cancel:
        return [Close(attempt.id, "cancelled"), *_skip(job, rows.now)]
    if job.retries >= rows.max_retries:
        return _give_up(job, attempt, reason, rows.now)
    again = {"status": "waiting", "reason": reason, "retries": job.retries + 1}
    return [Close(attempt.id, "failed", reason), Update(job.name, again)]


def _give_up(
    job: JobRow, attempt: AttemptRow, reason: str, now: float, outcome: str = "failed"
) -> list[Action]:
    failed = {"status": "failed", "reason": reason, "ended": now}
    return [Close(attempt.id, outcome, reason), Update(job.name, failed), Tell(job.name)]


def _skip(job: JobRow, now: float) -> list[Action]:
    skipped = {"status": "skipped", "reason": "cancelled", "cancel": 0, "ended": now}
    return [Update(job.name, skipped), Tell(job.name)]


def _found(rows: Rows, event: Found) -> list[Action]:
    job = rows.job(event.attempt.job)
    if event.state == "never":
        lost = Close(event.attempt.id, "lost", "the scheduler died while launching it")
        return [lost, Update(job.name, {"status": "waiting", "reason": None})]
    return [Update(job.name, {"status": "running"})] if job.status == "merging" else []


def _requests(rows: Rows) -> list[Action]:
    """What somebody asked for: to give a job up, to end all."""
    actions: list[Action] = []
    for row in rows.jobs:
        if not row.cancel:
            continue
        if row.status in ("waiting", "blocked"):
            actions += _skip(row, rows.now)
        elif row.status == "running":
            actions += _end(rows, row.name, "cancel")
        elif (
            row.status != "merging"
        ):  # what is being committed is let through, and the request with it dropped
            actions.append(Update(row.name, {"cancel": 0}))
    if rows.phase == "kill":
        for name in {attempt.job for attempt in rows.running if attempt.id not in rows.merging}:
            actions += _end(rows, name, "stop")
    return actions


def _end(rows: Rows, job: str, why: str) -> list[Action]:
    actions: list[Action] = []
    for attempt in rows.running:
        if attempt.job == job and attempt.id not in rows.killed | rows.merging:
            actions += [Mark(attempt.id, why), Kill(attempt.id)]
    return actions


def _overdue(rows: Rows) -> list[Action]:
    actions: list[Action] = []
    for attempt in rows.running:
        age = rows.ages.get(attempt.id, rows.now - attempt.started)
        if rows.time_limit is not None and age > rows.time_limit:
            actions += _end(rows, attempt.job, "limit")
    return actions


def _obstacles(rows: Rows) -> list[Action]:
    """Say of each waiting job what keeps it from ever starting, and take it back when that is gone."""
    if rows.phase != "run":
        return []
    busy = bool(rows.running or rows.merging or rows.growing or ready(rows.jobs))
    progress = busy or any(row.status == "merging" for row in rows.jobs)
    actions: list[Action] = []
    for name, reason in obstacles(rows.jobs, progress=progress).items():
        row = rows.job(name)
        if reason is None and row.status == "blocked":
            actions.append(Update(name, {"status": "waiting", "reason": None}))
        elif reason is not None and (row.status, row.reason) != ("blocked", reason):
            actions += [Update(name, {"status": "blocked", "reason": reason}), Tell(name)]
    return actions


def _launches(rows: Rows) -> list[Action]:
    if rows.phase != "run":
        return []
    busy = len(rows.running) + sum(
        row.status == "merging" and not any(a.job == row.name for a in rows.running) for row in rows.jobs
    )
    free = rows.slots - busy
    if rows.room is not None:
        free = min(free, rows.room if busy else max(rows.room, 1))  # one is always tried
    actions: list[Action] = []
    for row in ready(rows.jobs):
        if row.budget_total and row.left < 1:
            reason = f"its budget of {row.budget_total:,} steps is used up"
            failed = {"status": "failed", "reason": reason, "ended": rows.now}
            return [Update(row.name, failed), Tell(row.name)]
        if len(actions) < free:
            actions.append(Launch(row.name))
    return actions


def obstacles(jobs: Sequence[JobRow], *, progress: bool) -> dict[str, str | None]:
    """For each waiting or blocked job what keeps it from ever starting, or None.

    Args:
        jobs: all of them.
        progress: something runs, merges or may still be added, so what is open now may yet complete.
    """
    statuses = {row.name: row.status for row in jobs}
    doomed = {name for name, status in statuses.items() if status in ENDED_BADLY}
    idle = [row for row in jobs if row.status in ("waiting", "blocked")]
    while more := {row.name for row in idle if doomed.intersection(row.needs)} - doomed:
        doomed |= more
    statuses |= {row.name: "blocked" if row.name in doomed else "waiting" for row in idle}
    found: dict[str, str | None] = {}
    for row in idle:
        dead = [name for name in row.needs if name in doomed]
        still_open = [name for name in row.needs if statuses.get(name) != "completed"]
        missing = [name for name in still_open if name not in statuses]
        if dead:
            found[row.name] = "; ".join(f"{name} {statuses[name]}" for name in dead)
        elif not still_open or progress:
            found[row.name] = None
        elif missing:
            found[row.name] = f"needs {', '.join(missing)}, which is unknown"
        else:
            found[row.name] = "skills wait for each other: " + " -> ".join(_circle(row, jobs))
    return found


def _circle(row: JobRow, jobs: Sequence[JobRow]) -> list[str]:
    """The way around on which a job waits for itself, or for others that do."""
    by_name = {other.name: other for other in jobs}
    path = [row.name]
    while path.count(path[-1]) == 1:
        ahead = [n for n in by_name[path[-1]].needs if n in by_name and by_name[n].status != "completed"]
        if not ahead:
            break
        path.append(ahead[0])
    return path
