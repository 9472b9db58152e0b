"""What the store knows, as records: skills, launches of trainings, versions of experts."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shoal.skills.learning.spec import Skill, parse_skill

Status = Literal["waiting", "blocked", "running", "merging", "completed", "failed", "skipped"]
STATUSES: tuple[str, ...] = get_args(Status)
OPEN = ("waiting", "blocked", "running", "merging")


@dataclass(frozen=True)
class SkillRow:
    """A skill as the store knows it."""

    name: str
    slug: str
    spec: Skill
    dependencies: tuple[str, ...]
    status: str
    reason: str | None
    expert: int | None
    retries: int  # used since it was last (re)opened
    rounds: int  # continuations asked for
    budget_total: int
    budget_used: int
    allotment: int | None  # env steps the next training may use; None: what is left of the budget
    created: float
    started: float | None
    ended: float | None
    result: dict[str, Any]
    cancel: bool


@dataclass(frozen=True)
class AttemptRow:
    """One launch of a training."""

    id: int
    skill: str
    state: str  # "running" | "ended"
    run_folder: str
    launcher: str | None
    handle: dict[str, Any] | None
    log: str | None
    started: float
    ended: float | None
    outcome: str | None  # "merged" | "failed" | "cancelled" | "lost"
    reason: str | None
    peak_memory: int | None
    frames: int | None


@dataclass(frozen=True)
class VersionRow:
    """One version of an expert."""

    id: int
    expert: int
    sha256: str
    parent: int | None
    frames: int
    acted: int
    kind: str  # "run" | "average" | "import"
    rule: str | None
    wins: int | None
    episodes: int | None
    accepted: bool
    attempt: int | None
    created: float


@dataclass(frozen=True)
class NewVersion:
    """A version to be committed, and whether it becomes the head."""

    expert: int
    sha256: str
    parent: int | None
    frames: int
    acted: int
    kind: str
    accepted: bool
    rule: str | None = None
    wins: int | None = None
    episodes: int | None = None


def read_skill(row: sqlite3.Row) -> SkillRow:
    """A row of the table of skills."""
    values = {key: row[key] for key in row.keys() if key != "position"}  # noqa: SIM118
    values |= {
        "spec": parse_skill(json.loads(row["spec"])),
        "dependencies": tuple(json.loads(row["dependencies"])),
        "result": json.loads(row["result"] or "{}"),
        "cancel": bool(row["cancel"]),
    }
    return SkillRow(**values)


def read_attempt(row: sqlite3.Row) -> AttemptRow:
    """A row of the table of attempts."""
    return AttemptRow(**{**dict(row), "handle": json.loads(row["handle"]) if row["handle"] else None})


def read_version(row: sqlite3.Row) -> VersionRow:
    """A row of the table of versions."""
    return VersionRow(**{**dict(row), "accepted": bool(row["accepted"])})
