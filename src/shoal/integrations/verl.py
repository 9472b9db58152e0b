"""shoal's trajectories as what verl trains on (verl 0.9.1): a padded `DataProto`, or agent-loop outputs.

Prompts are padded on their left and responses on their right, masks and positions are as verl's own agent loop
makes them. The agent loop that plays shoal's envs inside verl is in `shoal.integrations.verl_agent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.data import Trajectory
from shoal.core.errors import DataError, needs_extra
from shoal.integrations.rows import TokenRow, row_of_nothing, token_rows
from shoal.splitting.batch import object_array


def to_dataproto(
    trajectories: Sequence[Trajectory],
    pad_id: int,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    advantages: Sequence[Sequence[float]] | None = None,
    meta_info: dict[str, Any] | None = None,
) -> Any:
    """The whole episodes among `trajectories` as verl's `DataProto`, one row a stretch of context.

    With `prompt.mode: append` a row is an episode. With `window` it is a turn, and verl's own group advantages
    would count long episodes more often than short ones: hand in shoal's `advantages` then.

    Tensors: `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`,
    `rollout_log_probs`, and `rm_scores` = `token_level_scores` = `token_level_rewards` (each turn's reward at its
    last token). Beside them `uid` (equal within a group), `traj_uid`, `env`, `turn` (the row's first), `reward` (of
    the episode), `success`, `__num_turns__`.

    Args:
        trajectories: those with a `status` other than "ok" are left out.
        pad_id: the tokenizer's padding token.
        prompt_length: tokens that prompts are padded to; the longest if not given.
        response_length: tokens that responses are padded to.
        advantages: per trajectory one number a turn, see `shoal.train.agent.algorithms.advantages.turn_advantages`;
            they become `advantages` and `returns`.
        meta_info: goes along as it is.
    """
    with needs_extra("to_dataproto", "verl"):
        from verl import DataProto
    if advantages is not None and len(advantages) != len(trajectories):
        raise ValueError(
            f"advantages must be one sequence a trajectory, {len(trajectories)}, got {len(advantages)}"
        )
    for trajectory, numbers in zip(trajectories, () if advantages is None else advantages, strict=False):
        if trajectory.status == "ok" and np.shape(numbers) != (len(trajectory.turns),):
            raise ValueError(
                f"advantages must be one number a turn: the episode of group {trajectory.group}, member "
                f"{trajectory.member} has {len(trajectory.turns)} turns, got the shape {np.shape(numbers)}"
            )
    rows = [
        (trajectory, row, None if advantages is None else advantages[index])
        for index, trajectory in enumerate(trajectories)
        if trajectory.status == "ok"
        for row in token_rows(trajectory)
    ]
    if not rows:
        raise DataError("no whole episode with a token of the model among the trajectories")
    border = _width("prompt_length", prompt_length, [len(row.prompt_ids) for _, row, _ in rows])
    width = _width("response_length", response_length, [len(row.response_ids) for _, row, _ in rows])
    fields = _tensors([row for _, row, _ in rows], pad_id, border, width)
    if advantages is not None:
        fields["advantages"] = _spread([(row, turns) for _, row, turns in rows], width)
        fields["returns"] = fields["advantages"].clone()
    played = [trajectory for trajectory, _, _ in rows]
    uids = [f"{t.env}-{t.iteration}-{t.group}" for t in played]
    fields["uid"] = object_array(uids)
    fields["traj_uid"] = object_array([f"{uid}-{t.member}" for uid, t in zip(uids, played, strict=True)])
    fields["env"] = object_array([t.env for t in played])
    fields["turn"] = np.array([row.first_turn for _, row, _ in rows])
    fields["reward"] = np.array([t.reward for t in played])
    fields["success"] = np.array([t.success for t in played])
    fields["__num_turns__"] = np.array([2 * row.n_turns for _, row, _ in rows], dtype=np.int32)
    return DataProto.from_single_dict(fields, meta_info=meta_info)


def agent_loop_outputs(trajectory: Trajectory, end: int | None = None) -> list[Any]:
    """An `AgentLoopOutput` of verl for each stretch of context; the last carries the episode's reward.

    Args:
        trajectory: the episode.
        end: the end token, to make one output also of an episode in which the model wrote nothing.
    """
    with needs_extra("agent_loop_outputs", "verl"):
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    rows = list(token_rows(trajectory))
    turns = trajectory.turns
    facts = {
        "success": float(trajectory.success),
        "turns": len(turns),
        "valid_actions": sum(turn.action_is_valid for turn in turns) / max(1, len(turns)),
        "failed": float(trajectory.status != "ok" or not rows),
    }
    if not rows and end is not None:
        rows = [row_of_nothing(end)]
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            reward_score=trajectory.reward if place == len(rows) - 1 else None,
            num_turns=2 * row.n_turns,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "turn_scores": [turn.reward for turn in turns[row.first_turn :][: row.n_turns]],
                "tool_rewards": [],
                "reward_extra_info": facts,
            },
        )
        for place, row in enumerate(rows)
    ]


def _width(name: str, given: int | None, lengths: Sequence[int]) -> int:
    longest = max(lengths)
    if given is not None and given < longest:
        raise DataError(f"{name} must be at least {longest}, the longest row, got {given}")
    return longest if given is None else given


def _tensors(rows: Sequence[TokenRow], pad_id: int, border: int, width: int) -> dict[str, Any]:
    """The padded tensors under verl's names."""
    import torch

    count = len(rows)
    ids = np.full((count, border + width), pad_id, dtype=np.int64)
    attention = np.zeros((count, border + width), dtype=np.int64)
    mask = np.zeros((count, width), dtype=np.int64)
    logprobs, rewards = (np.zeros((count, width), dtype=np.float32) for _ in range(2))
    for place, row in enumerate(rows):
        start, length = border - len(row.prompt_ids), len(row.response_ids)
        ids[place, start : border + length] = row.prompt_ids + row.response_ids
        attention[place, start : border + length] = 1
        mask[place, :length] = row.mask
        logprobs[place, :length] = row.logprobs
        rewards[place, :length] = row.rewards
    scores = torch.from_numpy(rewards)
    whole = torch.from_numpy(ids)
    return {
        "prompts": whole[:, :border].clone(),
        "responses": whole[:, border:].clone(),
        "input_ids": whole,
        "attention_mask": torch.from_numpy(attention),
        "position_ids": torch.from_numpy((attention.cumsum(1) - 1).clip(min=0)),
        "response_mask": torch.from_numpy(mask),
        "rollout_log_probs": torch.from_numpy(logprobs),
        "rm_scores": scores,
        "token_level_scores": scores.clone(),
        "token_level_rewards": scores.clone(),
    }


def _spread(rows: Sequence[tuple[TokenRow, Sequence[float] | None]], width: int) -> Any:
    """`[rows, width]`: each written token has its turn's advantage; a turn ends where its reward would stand."""
    import torch

    spread = np.zeros((len(rows), width), dtype=np.float32)
    for place, (row, turns) in enumerate(rows):
        assert turns is not None
        of_token = np.repeat(np.arange(row.n_turns), row.turn_lengths) + row.first_turn
        spread[place, : len(row.mask)][np.array(row.mask, dtype=bool)] = np.asarray(turns)[of_token]
    return torch.from_numpy(spread)
