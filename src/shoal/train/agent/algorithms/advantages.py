"""What each token of a set of trajectories was worth, by the estimator of the config; estimators are registered here.

An estimator is given rewards from which all penalties are taken already: of long responses, and of a KL in the reward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.core.data import MOST_REWARD, Trajectory
from shoal.core.registry import Registry

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentProxy, Algorithm


F = TypeVar("F", bound=Callable[..., Any])
Array = NDArray[np.float64]
Method = Literal["mean_std", "mean", "asym_clip", "identity"]
EPSILON = 1e-6
"""Groups whose rewards have a smaller standard deviation carry no signal."""
ROUNDING = 1e-12
"""Rewards whose standard deviation is a smaller share of their mean are equal but for rounding."""


# --- the registry
class Played(NamedTuple):
    """What an estimator is given: the episodes to learn from, and how the config wants them compared."""

    trajectories: Sequence[Trajectory]
    returns: list[list[float]]  # [B][turns] the discounted return from each turn on, less its penalties
    baseline_groups: list[int]  # [B] those with one number are compared
    algorithm: Algorithm
    proxy: AgentProxy
    penalties: Sequence[Sequence[Array]] | None = None
    """`[B][turns][tokens]` what each token costs (`kl.place: reward`); None where tokens cost nothing."""

    @property
    def episode_returns(self) -> list[float]:
        """`[B]` the discounted return of each episode; 0 for one that ended before its first turn."""
        return [returns[0] if returns else 0.0 for returns in self.returns]


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages, and what is known of it."""

    compute: Callable[..., Any]
    grouped: bool = False
    """Whether it compares rewards within `reward_normalization.grouping`."""
    normalized: bool = False
    """Whether it reads `reward_normalization.method`."""
    needs: Literal["nothing", "critic", "teacher"] = "nothing"
    reads: tuple[str, ...] = ()
    """Settings of the algorithm, by their paths, that no estimator reads which does not name them."""


ESTIMATORS: Registry[Estimator] = Registry("advantage")


def advantage(name: str, *, replace: bool = False, **about: Any) -> Callable[[F], F]:
    """Register an estimator under the name that `algorithm.adv_estimator` takes.

    Args:
        name: in the YAML.
        replace: an estimator of that name.
        about: fields of `Estimator`: `grouped`, `normalized`, `needs`, `reads`.

    The function gets `Played` and gives one number an episode (`[B]`), or per episode one a turn, or per episode and
    turn one a token. With
    `needs="critic"` it gets the rewards `[turns]` and values `[turns][tokens]` of one episode and the settings, and
    gives advantages and targets of that shape; with `needs="teacher"`, per episode and turn, the log-probabilities
    `[tokens]` of the policy and of the teacher, and gives advantages of that shape.

    It must be pure: a run that goes on makes no call of before again, so what a function keeps between calls (a
    running mean) is lost, and the run goes on otherwise than without the break.
    """

    def register(function: F) -> F:
        ESTIMATORS.register(name, Estimator(function, **about), replace=replace)
        return function

    return register


def turn_advantages(
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    proxy: AgentProxy,
    penalties: Sequence[Sequence[Array]] | None = None,
) -> list[Any]:
    """Advantages of estimators without critic: per trajectory one a turn, or per turn one a token, as they give them.

    `penalties` are what each token costs: per trajectory and turn `[tokens]`.
    """
    rewards = _rewards(trajectories, proxy)
    if penalties is not None:
        rewards = [
            [reward - float(np.sum(tokens)) for reward, tokens in zip(own, penalty, strict=True)]
            for own, penalty in zip(rewards, penalties, strict=True)
        ]
    returns = [discounted_returns(own, algorithm.gamma) for own in rewards]
    baseline_groups = _baseline_groups(trajectories, proxy.reward_normalization.grouping)
    # nobody can change their order
    played = Played(tuple(trajectories), returns, baseline_groups, algorithm, proxy, penalties)
    found: list[Any] = []
    for t, given in zip(trajectories, ESTIMATORS[algorithm.adv_estimator].compute(played), strict=True):
        if isinstance(given, list) and any(np.ndim(turn) for turn in given):
            found.append(_by_token(algorithm, given, [np.empty(length) for length in t.response_lengths]))
            continue
        turns = np.full(len(t.turns), given) if np.ndim(given) == 0 else given
        found.append(_numbers(algorithm, turns, (len(t.turns),)))
    return found


def critic_advantages(
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[Array]],
    algorithm: Algorithm,
    proxy: AgentProxy,
    penalties: Sequence[Sequence[Array]] | None = None,
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Advantages and critic targets, per trajectory and turn `[tokens]`, from values of the same shape.

    Advantages are normalised over all tokens of the batch. GAE is linear in rewards and values: what tokens cost is a
    GAE of its own, added.
    """
    compute, decay = ESTIMATORS[algorithm.adv_estimator].compute, algorithm.critic.gae_lambda
    pairs = []
    for k, (rewards, known) in enumerate(zip(_rewards(trajectories, proxy), values, strict=True)):
        advantages, targets = compute(rewards, known, algorithm)
        pair = [_by_token(algorithm, given, known) for given in (advantages, targets)]
        if penalties is not None:
            nothing = [np.zeros(len(tokens)) for tokens in known]
            cost, _ = token_gae([0.0] * len(known), nothing, algorithm.gamma, decay, penalties=penalties[k])
            pair = [[tokens + own for tokens, own in zip(turns, cost, strict=True)] for turns in pair]
        pairs.append(pair)
    every = np.concatenate([tokens for turns, _ in pairs for tokens in turns])
    bessel = algorithm.critic.whitening == "sample" and len(every) > 1
    mean, deviation = every.mean(), every.std(ddof=int(bessel)) + 1e-8
    return [[(one - mean) / deviation for one in turns] for turns, _ in pairs], [
        targets for _, targets in pairs
    ]


def teacher_advantages(
    known: Sequence[Sequence[Array]], teacher: Sequence[Sequence[Array]], algorithm: Algorithm
) -> list[list[Array]]:
    """Advantages per trajectory and turn `[tokens]` from log-probabilities: the policy's (`known`), the teacher's."""
    compute = ESTIMATORS[algorithm.adv_estimator].compute
    pairs = zip(known, teacher, strict=True)
    return [_by_token(algorithm, map(compute, ours, theirs), ours) for ours, theirs in pairs]


def _by_token(algorithm: Algorithm, given: Iterable[Any], like: Sequence[Array]) -> list[Array]:
    """What an estimator gave for the turns of an episode, one number for each token, `like` these."""
    return [_numbers(algorithm, row, np.shape(tokens)) for row, tokens in zip(given, like, strict=True)]


def _numbers(algorithm: Algorithm, given: Any, shape: tuple[int, ...]) -> Array:
    """What an estimator gave, as an array of its own; a `ValueError` where it is no finite numbers of this shape."""
    numbers = np.array(given, dtype=np.float64)
    if numbers.shape != shape or not (np.abs(numbers) <= MOST_REWARD).all():
        raise ValueError(
            f"adv_estimator={algorithm.adv_estimator} must give one finite number an episode, turn or token, "
            f"of float32, here {shape}, got {given!r:.200}"
        )
    return numbers


# --- rewards
def _rewards(trajectories: Sequence[Trajectory], proxy: AgentProxy) -> list[list[float]]:
    """Per trajectory one a turn, less what its response costs for its length."""
    rewards = [[turn.reward for turn in t.turns] for t in trajectories]
    if not proxy.overlong_buffer:
        return rewards
    buffer, limit, weight = proxy.overlong_buffer, proxy.token_limit, proxy.overlong_penalty
    return [
        [r + float(weight * x) for r, x in zip(own, overlong(t.response_lengths, limit, buffer), strict=True)]
        for own, t in zip(rewards, trajectories, strict=True)
    ]


def overlong(lengths: ArrayLike, limit: int, buffer: int) -> Array:
    """DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13), in [-1, 0].

    Nothing up to `limit - buffer` tokens, then falling evenly to -1 at `limit`.
    """
    return -np.clip((np.asarray(lengths, dtype=np.float64) - (limit - buffer)) / buffer, 0.0, 1.0)


# --- estimators that compare episodes
@advantage("grpo", grouped=True, normalized=True)
def _grpo(played: Played) -> Array:
    return normalize_rewards(
        played.episode_returns, played.baseline_groups, played.proxy.reward_normalization.method
    )


@advantage("dr_grpo", grouped=True)
def _dr_grpo(played: Played) -> Array:
    return group_relative(played.episode_returns, played.baseline_groups, scale=False)


@advantage("rloo", grouped=True)
def _rloo(played: Played) -> Array:
    """RLOO (arXiv:2402.14740): a reward against the mean of the *other* members of its group; 0 where all are equal."""
    values = np.asarray(played.episode_returns, dtype=np.float64)
    _, index = np.unique(np.asarray(played.baseline_groups), return_inverse=True)
    others = np.bincount(index)[index] - 1
    baseline = (np.bincount(index, values)[index] - values) / np.maximum(others, 1)
    return np.where(_centre(values, played.baseline_groups)[1] > 0, values - baseline, 0.0)


@advantage("maxrl", grouped=True)
def _maxrl(played: Played) -> Array:
    """MaxRL (arXiv:2602.02710): a reward against the mean of its group, over that mean; 0 where all are equal.

    With rewards of 0 and 1 the gradient is that of the mean log-likelihood of the successes of a group, with the mean
    score as its baseline.
    """
    values = np.asarray(played.episode_returns, dtype=np.float64)
    if len(values) and values.min() < 0:
        raise ValueError(
            f"maxrl divides by the mean reward of a group, so none may be below 0, got {values.min()}"
        )
    centred, deviation = _centre(values, played.baseline_groups)
    with_signal = deviation > EPSILON
    return np.where(with_signal, centred / np.where(with_signal, values - centred, 1.0), 0.0)


@advantage("reinforce")
def _reinforce(played: Played) -> Array:
    """With the mean of the batch as its baseline: without one, the successes of a solved task are all pushed alike."""
    return group_relative(played.episode_returns, np.zeros(len(played.returns), dtype=np.int64), scale=False)


@advantage("reinforce_pp")
def _reinforce_pp(played: Played) -> list[Any]:
    """Every token is a step: the return from it on, normalised over the tokens of the batch."""
    if played.penalties is None:  # the tokens of a turn have one return
        return token_whitened(played.returns, [t.response_lengths for t in played.trajectories])
    steps = [list(map(_to_go, *pair)) for pair in zip(played.returns, played.penalties, strict=True)]
    flat = [np.concatenate([*turns, np.empty(0)]) for turns in steps]
    white = token_whitened([one.tolist() for one in flat], [[1] * len(one) for one in flat])
    return [
        np.split(one, np.cumsum([len(turn) for turn in turns])[:-1]) if turns else []
        for one, turns in zip(white, steps, strict=True)
    ]


def _to_go(paid: float, penalty: Array) -> Array:
    """`[tokens]` the return from each token of a turn on, of which that from its first token on is known."""
    return paid + np.cumsum(penalty) - penalty


@advantage("reinforce_pp_baseline", grouped=True)
def _reinforce_pp_baseline(played: Played) -> Array:
    """REINFORCE++-baseline (arXiv:2501.03262): less the mean of the group, then normalised over the whole batch."""
    centred = _centre(played.episode_returns, played.baseline_groups)[0]
    return group_relative(centred, np.zeros(len(centred), dtype=np.int64))


@advantage(
    "gigpo", grouped=True, normalized=True,
    reads=("step_advantage_weight", "gigpo.episode_reward", "gigpo.statistics"),
)  # fmt: skip
def _gigpo(played: Played) -> list[Array]:
    """The episode part is that of `grpo`; `algorithm.gigpo` says of what, and over what it is normalised."""
    settings, method = played.algorithm.gigpo, played.proxy.reward_normalization.method
    sums = settings.episode_reward == "sum"
    rewards = [t.reward for t in played.trajectories] if sums else played.episode_returns
    n_turns = [len(t.turns) for t in played.trajectories]
    counts = n_turns if settings.statistics == "steps" else None
    episodes = normalize_rewards(rewards, played.baseline_groups, method, counts)
    anchors = [[turn.anchor for turn in t.turns] for t in played.trajectories]
    groups = [t.group for t in played.trajectories]
    steps = anchored_step_advantages(played.returns, anchors, groups, scale=method != "mean")
    weight = played.algorithm.step_advantage_weight
    return [episode + weight * own for episode, own in zip(episodes, steps, strict=True)]


def _baseline_groups(trajectories: Sequence[Trajectory], grouping: str) -> list[int]:
    """`[B]` episodes with the same number are compared."""
    if grouping == "state":
        return [t.group for t in trajectories]
    if grouping == "inductive":
        kinds = sorted({t.env for t in trajectories})
        return [kinds.index(t.env) for t in trajectories]
    return [0] * len(trajectories)


# --- their mathematics
def group_relative(
    rewards: ArrayLike, groups: ArrayLike, *, scale: bool = True, counts: ArrayLike | None = None
) -> Array:
    """GRPO advantages (arXiv:2402.03300, sec. 4.1.2): a reward against the mean of its group.

    Args:
        rewards: `[B]` one per trajectory.
        groups: `[B]` integer group of each; order and sizes are free.
        scale: divide by the group's standard deviation (with Bessel's correction); False gives Dr. GRPO
            (arXiv:2503.20783).
        counts: `[B]` how often each counts in mean and standard deviation; once if not given.

    Returns:
        `[B]`, zero for every member of a group whose rewards are all equal, and for groups of one.
    """
    centred, deviation = _centre(rewards, groups, counts)
    with_signal = deviation > EPSILON
    return np.where(with_signal, centred / np.where(with_signal & scale, deviation, 1.0), 0.0)


def has_signal(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """`[B]`: whether the group of each trajectory has members with different rewards."""
    return _centre(rewards, groups)[1] > EPSILON


def normalize_rewards(
    rewards: ArrayLike, groups: ArrayLike, method: Method, counts: ArrayLike | None = None
) -> Array:
    """The reference's `reward_normalization.method` within `groups` (a start state, an env kind, or the batch).

    `mean_std` is GRPO, `mean` only subtracts the mean, `asym_clip` is `mean_std` clipped to [-1, 3] so that a
    rare success counts more than a common failure, and `identity` leaves rewards as they are.
    """
    if method == "identity":
        return np.asarray(rewards, dtype=np.float64)
    advantages = group_relative(rewards, groups, scale=method != "mean", counts=counts)
    return np.clip(advantages, -1.0, 3.0) if method == "asym_clip" else advantages


def token_whitened(returns: Sequence[Sequence[float]], counts: Sequence[Sequence[int]]) -> list[Array]:
    """REINFORCE++ with every token as a step: returns from each turn on, normalised over the tokens of the batch.

    Args:
        returns: per trajectory, the discounted return from each turn on; the tokens of a turn share it.
        counts: per trajectory, the tokens of each turn.

    Returns:
        Per trajectory one value a turn; Bessel's correction is made, and 1e-8 added to the variance.
    """
    flat = np.array([value for turns in returns for value in turns], dtype=np.float64)
    weights = np.array([count for turns in counts for count in turns], dtype=np.float64)
    total = max(weights.sum(), 1.0)
    mean = (weights * flat).sum() / total
    variance = (weights * (flat - mean) ** 2).sum() / max(total - 1, 1.0)
    rounding = np.sqrt(variance) <= ROUNDING * abs(mean)
    white = np.where(rounding, 0.0, (flat - mean) / np.sqrt(variance + 1e-8))
    return np.split(white, np.cumsum([len(turns) for turns in returns])[:-1])


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


def _centre(rewards: ArrayLike, groups: ArrayLike, counts: ArrayLike | None = None) -> tuple[Array, Array]:
    """Rewards less their group's mean, and their group's standard deviation, both `[B]`."""
    values = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    weights = np.ones(len(values)) if counts is None else np.asarray(counts, dtype=np.float64)
    total = np.bincount(index, weights)
    centred = values - (np.bincount(index, weights * values) / np.maximum(total, 1))[index]
    deviation = np.sqrt(np.bincount(index, weights * centred**2) / np.maximum(total - 1, 1))[index]
    rounding = deviation <= ROUNDING * np.abs(values - centred)
    return np.where(rounding, 0.0, centred), np.where(rounding, 0.0, deviation)


# --- estimators with a critic or a teacher
@advantage("gae", needs="critic")
def _critic_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    return token_gae(rewards, values, algorithm.gamma, algorithm.critic.gae_lambda)


@advantage("distillation", needs="teacher")
def reverse_kl(logprobs: Array, teacher_logprobs: Array) -> Array:
    """On-policy distillation: the teacher scores each token that the student wrote (MiniLLM, arXiv:2306.08543).

    `[tokens]`: how much likelier the teacher holds each token; its mean under the student is minus the reverse KL, so
    the policy gradient with it as advantage pulls the student to the teacher.
    """
    return teacher_logprobs - logprobs


def token_gae(
    rewards: Sequence[float],
    values: Sequence[Array],
    gamma: float,
    gae_lambda: float,
    *,
    penalties: Sequence[Array] | None = None,
) -> tuple[list[Array], list[Array]]:
    """GAE (arXiv:1506.02438, eq. 16) with every token as a step.

    Args:
        rewards: one a turn.
        values: per turn `[tokens]`, the critic's value of the context before each token.
        gamma: discount from the last token of a turn to the first of the next.
        gae_lambda: trace decay, at every token.
        penalties: per turn `[tokens]`, what is taken off the reward of each token.

    Returns:
        Advantages and returns (what the critic shall learn), per turn `[tokens]`.
    """
    steps = [max(len(known), 1) for known in values]
    paid = [reward for n, r in zip(steps, rewards, strict=True) for reward in (*[0.0] * (n - 1), r)]
    if penalties is not None:
        penalty = [cost for own in penalties for cost in (own if len(own) else [0.0])]
        paid = [reward - cost for reward, cost in zip(paid, penalty, strict=True)]
    valued = [value for known in values for value in (known if len(known) else [None])]
    discounts = [discount for n in steps for discount in (*[1.0] * (n - 1), gamma)]
    found = iter(gae(paid, valued, discounts, gae_lambda))
    advantages = [
        np.array(list(itertools.islice(found, n))[: len(known)])
        for n, known in zip(steps, values, strict=True)
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def gae(
    rewards: Sequence[float], values: Sequence[float | None], discounts: Sequence[float], gae_lambda: float
) -> list[float]:
    """GAE (arXiv:1506.02438, eq. 16): one advantage a step.

    Args:
        rewards: one a step.
        values: of the state before each step. A step without one is a turn without tokens: it pays the step before it.
        discounts: from each step to the next.
        gae_lambda: trace decay.
    """
    advantages: list[float] = []
    carried = following = 0.0
    later, past = 0.0, 1.0  # what turns without tokens paid that come next, and the discount over them
    for reward, value, discount in zip(reversed(rewards), reversed(values), reversed(discounts), strict=True):
        paid, ahead = reward + discount * later, discount * past
        if value is None:
            later, past = paid, ahead
            advantages.append(0.0)
        else:
            carried = paid + ahead * following - value + ahead * gae_lambda * carried
            following, later, past = value, 0.0, 1.0
            advantages.append(carried)
    return advantages[::-1]
