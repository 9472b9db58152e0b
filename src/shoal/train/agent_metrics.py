"""Numbers that describe a set of trajectories; each is defined in `docs/metrics.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.core.data import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over whole episodes, and how many were not whole; success per kind of env when there are several."""
    whole = [t for t in trajectories if t.status == "ok"]
    turns = [turn for t in whole for turn in t.turns]
    n, n_turns = max(1, len(whole)), max(1, len(turns))
    row = {
        "success": sum(t.success for t in whole) / n,
        "reward": sum(t.reward for t in whole) / n,
        "turns": len(turns) / n,
        "response_tokens": sum(t.n_tokens for t in whole) / n,
        "valid_actions": sum(turn.action_is_valid for turn in turns) / n_turns,
        "truncated": sum(t.truncated for t in whole) / n,
        "failed_episodes": float(len(trajectories) - len(whole)),
    }
    row |= {
        f"failed/{kind}": float(n)
        for kind, n in sorted(Counter(t.status for t in trajectories).items())
        if kind != "ok"
    }
    kinds = sorted({t.env for t in whole})
    if len(kinds) > 1:
        won, played = Counter(t.env for t in whole if t.success), Counter(t.env for t in whole)
        row |= {f"success/{kind}": won[kind] / played[kind] for kind in kinds}
    return row
