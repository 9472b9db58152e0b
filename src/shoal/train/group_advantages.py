"""Group-relative advantages as pure functions of rewards and groups.

What is normalised is the task's own reward. Shaping (such as a format penalty) is added after, centred but
never divided by a standard deviation: in a group where all members fail, a division by the tiny spread of the
shaping would blow it up to a full-sized gradient, which is how GRPO unlearns the task.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Method = Literal["mean_std", "mean", "asym_clip", "identity"]
EPSILON = 1e-6
"""Groups whose rewards have a smaller standard deviation carry no signal."""


def group_relative(rewards: ArrayLike, groups: ArrayLike, *, scale: bool = True) -> Array:
    """GRPO advantages (arXiv:2402.03300, sec. 4.1.2): a reward against the mean of its group.

    Args:
        rewards: `[B]` one per trajectory.
        groups: `[B]` integer group of each; order and sizes are free.
        scale: divide by the group's standard deviation (with Bessel's correction); False gives Dr. GRPO
            (arXiv:2503.20783).

    Returns:
        `[B]`, zero for every member of a group whose rewards are all equal, and for groups of one.
    """
    centred, spread = _centre(rewards, groups)
    with_signal = spread > EPSILON
    return np.where(with_signal, centred / np.where(with_signal & scale, spread, 1.0), 0.0)


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """RLOO advantages (arXiv:2402.14740): a reward against the mean of the *other* members of its group.

    Returns:
        `[B]`; zero for groups of one, which have no other member.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    others = np.bincount(index)[index] - 1
    baseline = (np.bincount(index, values)[index] - values) / np.maximum(others, 1)
    return np.where(others > 0, values - baseline, 0.0)


def batch_normalized(rewards: ArrayLike, groups: ArrayLike, *, baseline: bool = False) -> Array:
    """REINFORCE++ advantages (arXiv:2501.03262): normalised over the whole batch instead of a group.

    Args:
        rewards: `[B]` one per trajectory.
        groups: `[B]` integer group of each, used with `baseline` only.
        baseline: subtract the mean of the group first (REINFORCE++-baseline); the scale stays the batch's.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if baseline:
        values = _centre(values, groups)[0]
    return group_relative(values, np.zeros(len(values), dtype=np.int64))


def has_signal(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """`[B]`: whether the group of each trajectory has members with different rewards."""
    return _centre(rewards, groups)[1] > EPSILON


def normalize_rewards(rewards: ArrayLike, groups: ArrayLike, method: Method) -> Array:
    """The reference's `reward_normalization.method` within `groups` (a start state, an env kind, or the batch).

    `mean_std` is GRPO, `mean` only subtracts the mean, `asym_clip` is `mean_std` clipped to [-1, 3] so that a
    rare success counts more than a common failure, and `identity` leaves rewards as they are.
    """
    if method == "identity":
        return np.asarray(rewards, dtype=np.float64)
    advantages = group_relative(rewards, groups, scale=method != "mean")
    return np.clip(advantages, -1.0, 3.0) if method == "asym_clip" else advantages


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """The discounted return from each turn on: `R_t = r_t + gamma * R_{t+1}`."""
    returns: list[float] = []
    future = 0.0
    for reward in reversed(rewards):
        future = reward + gamma * future
        returns.append(future)
    return returns[::-1]


def anchored_step_advantages(
    returns: Sequence[Sequence[float]],
    anchors: Sequence[Sequence[Hashable]],
    groups: Sequence[int],
    *,
    scale: bool = True,
) -> list[Array]:
    """Step-level advantages of GiGPO (arXiv:2505.10978, sec. 4.2): turns that met the same state, compared.

    Args:
        returns: per trajectory, the discounted return from each turn on.
        anchors: per trajectory, a key of the state before each turn.
        groups: group of each trajectory; states are compared within a group only.
        scale: divide by the standard deviation among the visits of the state.

    Returns:
        Per trajectory one value a turn; zero where no other visit of the state has another return.
    """
    keys: dict[tuple[int, Hashable], int] = {}
    states = [
        keys.setdefault((group, anchor), len(keys))
        for group, visited in zip(groups, anchors, strict=True)
        for anchor in visited
    ]
    flat = group_relative([r for turns in returns for r in turns], states, scale=scale)
    return np.split(flat, np.cumsum([len(turns) for turns in returns])[:-1])


def _centre(rewards: ArrayLike, groups: ArrayLike) -> tuple[Array, Array]:
    """Rewards less their group's mean, and their group's standard deviation, both `[B]`."""
    values = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    count = np.bincount(index)
    centred = values - (np.bincount(index, values) / count)[index]
    spread = np.sqrt(np.bincount(index, centred**2) / np.maximum(count - 1, 1))
    return centred, spread[index]
