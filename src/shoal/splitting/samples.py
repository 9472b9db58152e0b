"""One training sample without padding, and where its reward goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Array = np.ndarray
RewardPlacement = Literal["final", "all", "last_step"] | Callable[[float, int, int], float]
"""Where a trajectory's reward goes in a sample.

"final": on one token of every sample. "all": on every trained token. "last_step": on one token of the
trajectory's last sample. A callable of (reward, step_index, n_steps) gives the number for that one token.
"""


@dataclass(slots=True)
class Sample:
    """Tokens of one sample; `rows` is 3 for models with M-RoPE positions, else 1."""

    dataset_id: str
    uid: str
    traj_index: int
    step_index: int
    n_steps: int
    prompt_ids: Array  # [p] int32
    response_ids: Array  # [r] int32
    prompt_positions: Array  # [rows, p] int32
    response_positions: Array  # [rows, r] int32
    response_mask: Array  # [r] bool: the tokens that are trained
    rewards: Array  # [r] float32
    n_attended: int  # the first so many response tokens are attended to
    pads_count_on: bool  # positions behind the response keep counting, instead of being 1
    images: tuple[int, ...]  # images of the trajectory that it shows, in order
    messages: list[dict[str, Any]]
    logprobs: Array | None = None  # [r] float32 of the response, as recorded by the sampler
    roles: tuple[
        tuple[str, int, int], ...
    ] = ()  # (role, first token, token behind), over prompt and response
    image_spans: tuple[tuple[int, int, int], ...] = ()  # (image, first token, token behind), likewise
    inputs: Any = field(default=None, repr=False)  # multi_modal_inputs, filled in when a batch is made

    @property
    def is_last_step(self) -> bool:
        """Whether this is the last sample of its trajectory."""
        return self.step_index == self.n_steps - 1

    @property
    def input_ids(self) -> Array:
        """Prompt and response, `[p + r]` int32."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def position_ids(self) -> Array:
        """`[rows, p + r]` int32."""
        return np.concatenate([self.prompt_positions, self.response_positions], axis=1)

    @property
    def n_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


def place_reward(
    reward: float,
    placement: RewardPlacement,
    step_index: int,
    n_steps: int,
    response_mask: Array,
    final: int | None,
) -> Array:
    """Rewards of the response tokens `[r]` float32.

    Args:
        reward: of the trajectory.
        placement: see `RewardPlacement`.
        step_index: which sample of the trajectory this is.
        n_steps: how many it has.
        response_mask: the trained tokens.
        final: the token that stands for the whole sample; None where nothing is trained.
    """
    rewards = np.zeros(len(response_mask), np.float32)
    if placement == "all":
        rewards[response_mask] = reward
    elif final is not None:
        if callable(placement):
            rewards[final] = placement(reward, step_index, n_steps)
        elif placement == "final" or step_index == n_steps - 1:
            rewards[final] = reward
    return rewards


def add_step_scores(rewards: Array, ends: Sequence[tuple[int, int]], scores: Sequence[float]) -> None:
    """Add `0.5 * (score - 0.5)` on the last token of each scored turn, in place; a score of -1 means none.

    Args:
        rewards: of the response tokens.
        ends: (turn, its last trained token).
        scores: in [0, 1] by turn.
    """
    for turn, token in ends:
        if turn < len(scores) and scores[turn] != -1:
            rewards[token] += np.float32(0.5 * (scores[turn] - 0.5))
