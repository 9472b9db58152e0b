from dataclasses import replace

from shoal.core.data import Trajectory
from shoal.train.agent_metrics import rollout_metrics


def test_failures_are_counted_by_their_kind():
    whole = Trajectory("Lake", 0, 0, 0, 1, (), success=True, terminated=True, truncated=False)
    row = rollout_metrics(
        [whole, *(replace(whole, status=status) for status in ("timeout", "env_error", "timeout"))]
    )
    assert row["failed_episodes"] == 3
    assert (row["failed/timeout"], row["failed/env_error"]) == (2, 1)
    assert "failed/engine_error" not in row
    assert row["success"] == 1.0
