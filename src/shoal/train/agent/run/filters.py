"""Groups whose members have different returns: filtered, and played until there are enough (dynamic sampling).

The task's own reward is compared, never a shaped one, and failed episodes take no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.core.data import Trajectory
from shoal.samplers.sampler import Sampling
from shoal.train.agent.algorithms.advantages import has_signal


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
    """The discounted return of an episode: its rewards, the one of turn `t` times `gamma**t`."""
    total = 0.0
    for turn in reversed(trajectory.turns):
        total = turn.reward + gamma * total
    return total


class Collector(Protocol):
    """Plays groups of episodes."""

    tags: tuple[str, ...]

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member."""


def collect_with_signal(
    collector: Collector, iteration: int, sampling: Sampling, *, max_batches: int, gamma: float = 1.0
) -> tuple[list[Trajectory], list[Trajectory], FilterReport]:
    """Dynamic sampling: play whole groups, in the order of the plan, until enough of them have different rewards.

    There are at most `max_batches`; further ones are new groups with seeds of their own. For `gamma` see
    `filter_groups`.

    Returns:
        All trajectories played, those to learn from (whole episodes of at most as many groups as the collector has
        tags), and the report.
    """
    wanted = len(collector.tags)
    played: list[Trajectory] = []
    n_groups = wanted
    first, batch = 0, 0
    while True:
        played += collector.collect(iteration, sampling, first_group=first, n_groups=n_groups)
        first, batch = first + n_groups, batch + 1
        kept, report = filter_groups(played, wanted, batch, gamma)
        if report.with_signal >= wanted or batch >= max_batches:
            return played, kept, report
        missing = wanted - report.with_signal
        at_this_rate = math.ceil(missing * report.played / max(1, report.with_signal))
        n_groups = min(wanted, at_this_rate)
