"""Dynamic sampling: whole groups are played until enough of them have different rewards."""

from __future__ import annotations

from typing import Protocol

from shoal.core.data import Trajectory
from shoal.rollout.filters import FilterReport, filter_groups, next_refill
from shoal.samplers.sampler import Sampling


class Collector(Protocol):
    """Plays groups of episodes, in a vector env here or on hosts."""

    tags: tuple[str, ...]

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member."""

    def close(self) -> None:
        """End envs and workers."""


def collect_with_signal(
    collector: Collector, iteration: int, sampling: Sampling, *, max_batches: int, gamma: float = 1.0
) -> tuple[list[Trajectory], list[Trajectory], FilterReport]:
    """Dynamic sampling: play whole groups, in the order of the plan, until enough of them have different rewards.

    Args:
        collector: plays the groups; further batches are new groups with seeds of their own.
        iteration: names the seeds.
        sampling: how tokens are picked.
        max_batches: of groups, at most.
        gamma: discount a turn, see `filter_groups`.

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
        n_groups = next_refill(wanted, report.with_signal, report.played)
