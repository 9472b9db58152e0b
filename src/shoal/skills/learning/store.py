"""The store of a job graph in the words of skills: a job is a skill, what it makes is an expert's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.skills.jobs import store as jobs
from shoal.skills.jobs.store import NewVersion
from shoal.skills.learning.spec import Skill, parse_skill

_COLUMNS = {"spec": "payload", "dependencies": "needs", "expert": "artifact"}


@dataclass(frozen=True)
class SkillRow(jobs.JobRow):
    """A skill as the store knows it."""

    @cached_property
    def spec(self) -> Skill:
        """What the skill is."""
        return parse_skill(self.payload)

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Skills that must be completed before."""
        return self.needs

    @property
    def expert(self) -> int | None:
        """The number of its expert."""
        return self.artifact


@dataclass(frozen=True)
class VersionRow(jobs.VersionRow):
    """One version of an expert."""

    @property
    def expert(self) -> int:
        """The number of the expert."""
        return self.artifact

    @property
    def frames(self) -> int:
        """Env steps in which the expert acted while learning, over its whole line."""
        return self.steps

    @property
    def acted(self) -> int:
        """Env steps in which it acted in the training that made this version."""
        return int(self.note.get("acted") or 0)

    @property
    def wins(self) -> int | None:
        """Evaluation episodes of its merge that succeeded."""
        return self.note.get("wins")

    @property
    def episodes(self) -> int | None:
        """Evaluation episodes of its merge."""
        return self.note.get("episodes")


def new_version(
    expert: int,
    sha256: str,
    parent: int | None,
    frames: int,
    acted: int,
    kind: str,
    accepted: bool,
    rule: str | None = None,
    wins: int | None = None,
    episodes: int | None = None,
) -> NewVersion:
    """A version of an expert to be committed."""
    note = {"acted": acted, "wins": wins, "episodes": episodes}
    return NewVersion(expert, sha256, parent, frames, kind, accepted, rule, note)


class Store(jobs.Store):
    """One folder of skills. Safe to use from several threads and processes."""

    files = "experts"
    suffix = ".safetensors"
    noun = "skill"
    row = SkillRow
    version_row = VersionRow

    def add_skill(self, skill: Skill, dependencies: Sequence[str], budget: int) -> SkillRow:
        """Add a waiting skill; adding the same one again changes nothing, another of that name is refused."""
        self.add(skill.name, skill.as_dict(), dependencies, budget)
        return self.skill(skill.name)

    def skill(self, name: str) -> SkillRow:
        """A skill by its name or its slug."""
        row = self.job(name)
        assert isinstance(row, SkillRow)
        return row

    def skills(self, *statuses: str) -> list[SkillRow]:
        """All skills, or those in one of `statuses`, in the order they were added."""
        return [row for row in self.jobs(*statuses) if isinstance(row, SkillRow)]

    def update_skill(self, name: str, **columns: Any) -> None:
        """Change columns of a skill; a new status is an event."""
        self.update(name, **{_COLUMNS.get(key, key): value for key, value in columns.items()})

    def assign_expert(self, name: str) -> int:
        """The global expert index of a skill, given at its first launch and kept for good."""
        return self.number(name)

    def head(self, expert: int) -> VersionRow | None:
        """The accepted version of an expert."""
        row = super().head(expert)
        assert row is None or isinstance(row, VersionRow)
        return row

    def version(self, number: int) -> VersionRow:
        """A version by its number."""
        row = super().version(number)
        assert isinstance(row, VersionRow)
        return row

    def versions(self, expert: int | None = None) -> Sequence[VersionRow]:
        """All versions, or those of an expert, oldest first."""
        return [row for row in super().versions(expert) if isinstance(row, VersionRow)]

    def commit_training(
        self,
        attempt: int,
        versions: Sequence[NewVersion],
        expected_heads: Mapping[int, int | None],
        *,
        result: Mapping[str, Any],
        frames: int,
        peak_memory: int | None = None,
        spec: Skill | None = None,
        mark: str | None = None,
    ) -> bool:
        """Commit a training and its merge at once; see `commit` of the graph's store."""
        payload = spec.as_dict() if spec is not None else None
        return self.commit(
            attempt, versions, expected_heads, result=result, steps=frames, peak_memory=peak_memory, payload=payload,
            mark=mark,
        )  # fmt: skip
