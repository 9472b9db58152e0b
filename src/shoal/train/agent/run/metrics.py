"""How good an agent is: numbers that describe a set of trajectories.

Each metric is defined in `docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.data import Trajectory
from shoal.rollout.episode import Role
from shoal.train.advice import Rejected
from shoal.train.agent.batch.samples import was_cut
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.run.filters import differing, discounted


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
    failures = Counter(t.status for t in trajectories if t.status != "ok")
    row |= {f"failed/{status}": float(count) for status, count in sorted(failures.items())}
    endings = Counter(t.ended for t in trajectories if t.ended is not None)
    row |= {f"ended/{why}": count / len(trajectories) for why, count in sorted(endings.items())}
    if uses := [use for turn in turns for use in turn.tools]:
        row["tool_calls"] = len(uses) / n
        row["tool_errors"] = sum(use.error is not None for use in uses) / len(uses)
    return row | program_metrics(trajectories) | score_metrics(trajectories) | success_by_kind(whole)


def program_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How often programs failed, were refused, and asked for what the run decides; only what occurred."""
    whole = [t for t in trajectories if t.status == "ok"]
    requests = [t.requests for t in trajectories if t.requests]
    row: dict[str, float] = {}
    if failed := sum(t.program_failed for t in whole):
        row["program_errors"] = failed / len(whole)
    if refused := sum(one.count for asked in requests for one in asked.refused):
        row["refused_requests"] = float(refused)
    for kind in ("overridden", "unenforced"):
        for one in (one for asked in requests for one in getattr(asked, kind)):
            name = f"{kind}/{one.what.partition('=')[0]}"
            row[name] = row.get(name, 0.0) + one.count
    return row


def rejected_answer(trajectories: Sequence[Trajectory], roles: Mapping[str, Role]) -> Rejected | None:
    """The first answer that held no valid action, with the words of its env; None if there is none."""
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if not turn.action_is_valid:
                words = roles[trajectory.env].projection.words()
                return Rejected(turn.response, trajectory.call_of(turn).finish, tuple(words))
    return None


def score_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`score/<name>` of each of the `rewards`, its mean over whole episodes that have one, and how many have none."""
    row: dict[str, float] = {}
    for name in dict.fromkeys(score.name for t in trajectories for score in t.scores):
        found = [(t.status, score.value) for t in trajectories for score in t.scores if score.name == name]
        values = [value for status, value in found if status == "ok" and value is not None]
        if values:
            row[f"score/{name}"] = math.fsum(values) / len(values)
        for what, failed in (("score_missing", True), ("score_abstained", False)):
            if count := sum(value is None and (status != "ok") == failed for status, value in found):
                row[f"{what}/{name}"] = float(count)
    return row


def success_by_kind(whole: Sequence[Trajectory]) -> dict[str, float]:
    """`success/<tag>` of each kind of env, where there are several."""
    won, played = Counter(t.env for t in whole if t.success), Counter(t.env for t in whole)
    return {f"success/{kind}": won[kind] / played[kind] for kind in sorted(played)} if len(played) > 1 else {}


def heldout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What an evaluation says, as `heldout_…`."""
    metrics = rollout_metrics(trajectories)
    kinds = [key for key in metrics if key.startswith(("success/", "score"))]
    of_programs = program_metrics(trajectories)
    means = ("success", "reward", "turns", "valid_actions", "truncated")
    wanted = (*means, "failed_episodes", *kinds, *of_programs)
    return {f"heldout_{key}": metrics[key] for key in wanted}


def signal_metrics(
    trajectories: Sequence[Trajectory], learned: Sequence[Trajectory], config: AgentConfig
) -> dict[str, float]:
    """How many groups of those played have different rewards, and how many are learned from."""
    whole, gamma = [t for t in trajectories if t.status == "ok"], config.algorithm.gamma
    n_groups = max(1, len({t.group for t in whole}))
    with_signal = differing([discounted(t, gamma) for t in whole], whole)
    shaping_only: set[int] = set()
    if config.agent_proxy.format_penalty:  # groups that the env itself paid alike
        rewarded = differing([discounted(t.as_played, gamma) for t in whole], whole)
        invalid = [float(sum(not turn.action_is_valid for turn in t.turns)) for t in whole]
        shaping_only = differing(invalid, whole) - rewarded
    row = {
        "groups_with_signal": len(with_signal) / n_groups,
        "groups_shaping_only": len(shaping_only) / n_groups,
        "groups_trained": float(len({t.group for t in learned})),
    }
    if config.algorithm.overlong_filter:
        closing = config.agent_proxy.prompt.closing
        row["overlong_episodes"] = sum(was_cut(t, closing) for t in whole) / max(1, len(whole))
    kinds = config.custom_envs
    if of_programs := [t for t in whole if t.env in kinds and kinds[t.env].env_type == "program"]:
        parents = [Counter(call.parent for call in t.calls) for t in of_programs]
        row["roots"] = sum(count.pop(None, 0) for count in parents) / len(parents)
        row["branches"] = sum(count.total() - len(count) for count in parents) / len(parents)
    return row


def iteration_times(
    row: Mapping[str, Any], rollout_seconds: float, update_seconds: float, tokens: int
) -> dict[str, float]:
    """Where the wall-clock of an iteration went; `row` says how busy the engine was, and what was trained."""
    share = rollout_seconds / (rollout_seconds + update_seconds)
    return {
        "seconds_rollout": round(rollout_seconds, 4),
        "seconds_update": round(update_seconds, 4),
        "tokens_per_second": round(tokens / rollout_seconds, 1),
        "update_tokens_per_second": round(row.get("trained_tokens", 0) / update_seconds, 1),
        "share_rollout": round(share, 4),
        "share_update": round(1 - share, 4),
        "share_idle": round(share * max(0.0, 1 - row["engine_busy"]), 4),
    }
