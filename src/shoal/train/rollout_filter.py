"""Learning from the groups that say most: those whose members' task rewards differ most.

Only the task's own rewards of whole episodes count, never a shaped one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shoal.core.data import Trajectory

FilterType = Literal["std", "max_mean"]


class Filtered(NamedTuple):
    """What is left, and what was done."""

    kept: list[Trajectory]
    metrics: dict[str, float]


def group_scores(trajectories: Sequence[Trajectory], how: FilterType) -> dict[int, float]:
    """Per group the spread of its members' rewards: population standard deviation, or maximum less mean."""
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.status == "ok":
            rewards.setdefault(trajectory.group, []).append(trajectory.reward)
    if how == "std":
        return {group: statistics.pstdev(values) for group, values in sorted(rewards.items())}
    return {group: max(values) - statistics.fmean(values) for group, values in sorted(rewards.items())}


def filter_rollouts(
    played: Sequence[Trajectory], candidates: Sequence[Trajectory], ratio: float, how: FilterType
) -> Filtered:
    """Those of `candidates` whose group is among the best `ratio` of the groups played.

    Args:
        played: all trajectories of the iteration.
        candidates: those that may be learned from.
        ratio: share of the groups to keep, rounded down, at least one; of equal scores the lower group number wins.
        how: the score of a group.
    """
    scores = group_scores(played, how)
    n_kept = max(1, int(ratio * len(scores) + 1e-9))
    best = set(sorted(scores, key=lambda group: (-scores[group], group))[:n_kept])
    before = {t.group for t in candidates}
    mean = statistics.fmean(scores.values()) if scores else 0.0
    mean_kept = statistics.fmean(scores[group] for group in best) if best else 0.0
    return Filtered(
        [t for t in candidates if t.group in best],
        {
            "rollout_filter_dropped": float(len(before - best)),
            "rollout_filter_score": mean,
            "rollout_filter_score_kept": mean_kept,
        },
    )
