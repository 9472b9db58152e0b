"""What `shoal rollout` tells of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.data import Trajectory


def episode_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, Any]:
    """How the episodes went, and how fast."""
    from shoal.train.agent.evaluation import rollout_metrics

    tokens = sum(t.n_tokens for t in trajectories)
    return {
        "episodes": len(trajectories),
        **rollout_metrics(trajectories),
        "seconds_rollout": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def show(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
