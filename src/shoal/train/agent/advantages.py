"""What each token of a set of trajectories was worth, by the algorithm of the config.

What is normalised is the task's own reward. Shaping (such as a format penalty) is added after, centred but
never divided by a standard deviation: in a group where all members fail, a division by the tiny spread of the
shaping would blow it up to a full-sized gradient, which is how GRPO unlearns the task.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.core.data import Trajectory

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentProxy, Algorithm


Array = NDArray[np.float64]
Method = Literal["mean_std", "mean", "asym_clip", "identity"]
EPSILON = 1e-6
"""Groups whose rewards have a smaller standard deviation carry no signal."""


def turn_advantages(
    trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> list[Array]:
    """Per trajectory one advantage a turn, shared by all tokens of that turn's response; for estimators without critic.

    The episode part is the discounted return of the task's own rewards, normalised within its grouping; GiGPO
    adds the step part. The format penalty acts on the turn that earned it, see `format_shaping`.
    """
    returns = [discounted_returns([turn.reward for turn in t.turns], algorithm.gamma) for t in trajectories]
    episode = _episode_advantages([r[0] for r in returns], trajectories, algorithm, proxy)
    advantages = [np.full(len(r), value) for r, value in zip(returns, episode, strict=True)]
    if algorithm.adv_estimator == "gigpo":
        steps = anchored_step_advantages(
            returns,
            [[turn.anchor for turn in t.turns] for t in trajectories],
            [t.group for t in trajectories],
            scale=proxy.reward_normalization.method != "mean",
        )
        advantages = [a + algorithm.step_advantage_weight * s for a, s in zip(advantages, steps, strict=True)]
    shaping = format_shaping(trajectories, proxy.format_penalty)
    return [a + s for a, s in zip(advantages, shaping, strict=True)]


def critic_advantages(
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[Array]],
    algorithm: Algorithm,
    proxy: AgentProxy,
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Advantages and critic targets, per trajectory and turn `[tokens]`, from values of the same shape.

    Advantages are normalised over all tokens of the batch; targets are in the task's own reward.
    """
    critic = algorithm.critic
    advantages, targets = [], []
    for trajectory, known in zip(trajectories, values, strict=True):
        rewards = [turn.reward for turn in trajectory.turns]
        if algorithm.adv_estimator == "gae":
            found = token_gae(rewards, known, algorithm.gamma, critic.gae_lambda)
        elif algorithm.adv_estimator == "turn_gae":
            found = turn_gae(rewards, known, algorithm.gamma, critic.gae_lambda)
        else:
            found = bi_level_gae(rewards, known, algorithm.gamma, critic.gae_lambda, critic.token_lambda)
        advantages.append(found[0])
        targets.append(found[1])
    every = np.concatenate([tokens for turns in advantages for tokens in turns])
    mean, spread = every.mean(), every.std() + 1e-8
    shaping = format_shaping(trajectories, proxy.format_penalty)
    shaped = [
        [(tokens - mean) / spread + bonus for tokens, bonus in zip(turns, bonuses, strict=True)]
        for turns, bonuses in zip(advantages, shaping, strict=True)
    ]
    return shaped, targets


def format_shaping(trajectories: Sequence[Trajectory], penalty: float) -> list[Array]:
    """Per trajectory one number a turn: `-penalty` for turns without a valid action, centred over the batch."""
    invalid = [
        np.array([not turn.action_is_valid for turn in t.turns], dtype=np.float64) for t in trajectories
    ]
    if not penalty:
        return [np.zeros(len(turns)) for turns in invalid]
    mean = float(np.concatenate(invalid).mean())
    return [-penalty * (turns - mean) for turns in invalid]


def _episode_advantages(
    rewards: Sequence[float], trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> Array:
    """`[B]` from the discounted return of each trajectory."""
    settings = proxy.reward_normalization
    cells = _cells(trajectories, settings.grouping)
    estimator = algorithm.adv_estimator
    if estimator == "dr_grpo":
        return group_relative(rewards, cells, scale=False)
    if estimator == "rloo":
        return leave_one_out(rewards, cells)
    if estimator == "reinforce":
        return np.asarray(rewards, dtype=np.float64)
    if estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        return batch_normalized(rewards, cells, baseline=estimator == "reinforce_pp_baseline")
    return normalize_rewards(rewards, cells, settings.method)


def _cells(trajectories: Sequence[Trajectory], grouping: str) -> list[int]:
    """The cell of each trajectory within which rewards are compared."""
    if grouping == "state":
        return [t.group for t in trajectories]
    if grouping == "inductive":
        kinds = sorted({t.env for t in trajectories})
        return [kinds.index(t.env) for t in trajectories]
    return [0] * len(trajectories)


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


def token_gae(
    rewards: Sequence[float], values: Sequence[Array], gamma: float, gae_lambda: float
) -> tuple[list[Array], list[Array]]:
    """GAE (arXiv:1506.02438, eq. 16) with every token as a step.

    Args:
        rewards: one a turn.
        values: per turn `[tokens]`, the critic's value of the context before each token.
        gamma: discount from the last token of a turn to the first of the next.
        gae_lambda: trace decay, at every token.

    Returns:
        Advantages and returns (what the critic shall learn), per turn `[tokens]`.
    """
    advantages: list[Array] = []
    carried, following = 0.0, 0.0  # advantage and value of the next token
    for reward, known in zip(reversed(rewards), reversed(values), strict=True):
        turn = np.zeros(len(known))
        for place in range(len(known) - 1, -1, -1):
            last = place == len(known) - 1
            discount = gamma if last else 1.0
            delta = (reward if last else 0.0) + discount * following - known[place]
            carried = delta + discount * gae_lambda * carried
            turn[place], following = carried, known[place]
        advantages.append(turn)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def turn_gae(
    rewards: Sequence[float], values: Sequence[Array], gamma: float, gae_lambda: float
) -> tuple[list[Array], list[Array]]:
    """GAE with every turn as a step, valued at its first token; all tokens of a turn share its advantage."""
    first = [float(known[0]) for known in values]
    advantages = _gae(rewards, first, gamma, gae_lambda)
    shared = [np.full(len(known), a) for a, known in zip(advantages, values, strict=True)]
    targets = [np.full(len(known), a + v) for a, v, known in zip(advantages, first, values, strict=True)]
    return shared, targets


def bi_level_gae(
    rewards: Sequence[float],
    values: Sequence[Array],
    gamma: float,
    gae_lambda: float,
    token_lambda: float = 1.0,
) -> tuple[list[Array], list[Array]]:
    """Turns first, then tokens within each turn (bi-level GAE of VAGEN, arXiv:2510.16907).

    The advantage of a turn, from GAE over turns, becomes the advantage of its last token; from there GAE runs back
    over the tokens of the turn, without reward and discount.
    """
    turns = _gae(rewards, [float(known[0]) for known in values], gamma, gae_lambda)
    advantages: list[Array] = []
    for advantage, known in zip(turns, values, strict=True):
        tokens = np.zeros(len(known))
        tokens[-1] = carried = advantage
        for place in range(len(known) - 2, -1, -1):
            carried = known[place + 1] - known[place] + token_lambda * carried
            tokens[place] = carried
        advantages.append(tokens)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _gae(rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float) -> list[float]:
    advantages: list[float] = []
    carried = following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + gamma * following - value + gamma * gae_lambda * carried
        advantages.append(carried)
        following = value
    return advantages[::-1]
