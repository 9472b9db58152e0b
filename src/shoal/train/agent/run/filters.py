"""Groups whose members have different returns, and no others.

The task's own reward is compared, never a shaped one, and failed episodes take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.data import Trajectory
from shoal.train.agent.algorithms.advantages import discounted_returns, has_signal


@dataclass(frozen=True, slots=True)
class FilterReport:
    """Counts of the groups that were played, kept and dropped."""

    played: int
    with_signal: int
    all_solved: int  # equal rewards: every member succeeded
    none_solved: int  # equal rewards: no member succeeded
    too_few: int  # fewer than two members ended "ok"
    kept: int
    batches: int = 1

    def metrics(self) -> dict[str, float]:
        """As numbers for `metrics.jsonl`."""
        n = max(1, self.played)
        return {
            "generated_batches": float(self.batches),
            "groups_played": float(self.played),
            "groups_all_solved": self.all_solved / n,
            "groups_none_solved": self.none_solved / n,
            "groups_too_few": float(self.too_few),
        }

    def __str__(self) -> str:
        return (
            f"{self.kept} groups kept of {self.played} played in {self.batches} batches: {self.with_signal} "
            f"with different rewards, {self.all_solved} solved by all, {self.none_solved} by none, {self.too_few} with "
            f"fewer than two whole episodes"
        )


def filter_groups(
    trajectories: Sequence[Trajectory], wanted: int | None = None, batches: int = 1, gamma: float = 1.0
) -> tuple[list[Trajectory], FilterReport]:
    """The whole episodes of groups with different rewards, of the first `wanted` such groups, and what was left out.

    Args:
        trajectories: of any number of groups.
        wanted: groups to keep, at most.
        batches: how many were played, for the report.
        gamma: discount a turn; members are compared by their discounted returns, as advantages compare them.
    """
    whole = [t for t in trajectories if t.status == "ok"]
    signal = differing([discounted(t, gamma) for t in whole], whole)
    succeeded: dict[int, list[bool]] = {t.group: [] for t in trajectories}  # the members of each group
    for trajectory in whole:
        succeeded[trajectory.group].append(trajectory.success)
    equal = [members for group, members in succeeded.items() if group not in signal and len(members) > 1]
    chosen = set(sorted(signal)[:wanted])
    report = FilterReport(
        played=len(succeeded),
        with_signal=len(signal),
        all_solved=sum(map(all, equal)),
        none_solved=sum(not any(members) for members in equal),
        too_few=len(succeeded) - len(signal) - len(equal),
        kept=len(chosen),
        batches=batches,
    )
    return [t for t in whole if t.group in chosen], report


def differing(values: Sequence[float], episodes: Sequence[Trajectory]) -> set[int]:
    """The groups whose episodes have different values, one an episode."""
    groups = [t.group for t in episodes]
    return {group for group, differs in zip(groups, has_signal(values, groups), strict=True) if differs}


def discounted(trajectory: Trajectory, gamma: float) -> float:
    """The discounted return of an episode; 0 for one that ended before its first turn."""
    return next(iter(discounted_returns([turn.reward for turn in trajectory.turns], gamma)), 0.0)
