"""What each token of a set of trajectories was worth, by the estimator of the config; estimators are registered here.

What is normalised is the task's own reward. Shaping (such as a format penalty) is added after, centred but
never divided by a standard deviation: in a group where all members fail, a division by the tiny spread of the
shaping would blow it up to a full-sized gradient, which is how GRPO unlearns the task.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
LEAST_SPREAD = 0.1
"""Of the size of returns: advantages of a critic are never divided by less, see `critic_advantages`."""


# --- the registry
class Played(NamedTuple):
    """What an estimator is given: the episodes to learn from, and how the config wants them compared."""

    trajectories: Sequence[Trajectory]
    returns: list[list[float]]  # [B][turns] the discounted return of the task's own reward from each turn on
    cells: list[int]  # [B] episodes of one cell are compared (`reward_normalization.grouping`)
    algorithm: Algorithm
    proxy: AgentProxy

    @property
    def episode_returns(self) -> list[float]:
        """`[B]` the discounted return of each episode; 0 for one that ended before its first turn."""
        return [returns[0] if returns else 0.0 for returns in self.returns]


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages, and what its name brings along."""

    compute: Callable[..., Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `algorithm` that the name sets where the config does not."""
    conflicts: Callable[[Algorithm], Iterator[str]] | None = None
    """Gives a sentence for each setting that would have no effect."""
    grouped: bool = False
    """Whether it compares rewards within `reward_normalization.grouping`."""
    normalized: bool = False
    """Whether it reads `reward_normalization.method`."""
    needs: Literal["nothing", "critic", "teacher"] = "nothing"


ESTIMATORS: Registry[Estimator] = Registry("advantage")


def advantage(name: str, *, replace: bool = False, **about: Any) -> Callable[[F], F]:
    """Register an estimator under the name that `algorithm.adv_estimator` takes.

    Args:
        name: in the YAML.
        replace: an estimator of that name.
        about: fields of `Estimator`: `defaults`, `conflicts`, `grouped`, `normalized`, `needs`.

    The function gets `Played` and gives one number an episode (`[B]`), or per episode one a turn. With
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
    trajectories: Sequence[Trajectory], algorithm: Algorithm, proxy: AgentProxy
) -> list[Array]:
    """Per trajectory one advantage a turn, shared by all tokens of that turn's response; for estimators without critic.

    Shaping acts on the turn that earned it, see `shaping_of`.
    """
    returns = [discounted_returns([turn.reward for turn in t.turns], algorithm.gamma) for t in trajectories]
    cells = _cells(trajectories, proxy.reward_normalization.grouping)
    played = Played(tuple(trajectories), returns, cells, algorithm, proxy)  # nobody can change their order
    found = []
    for t, given in zip(trajectories, ESTIMATORS[algorithm.adv_estimator].compute(played), strict=True):
        turns = np.full(len(t.turns), given) if np.ndim(given) == 0 else given
        found.append(_numbers(algorithm, turns, (len(t.turns),)))
    shaping = shaping_of(trajectories, proxy)
    return [turns + bonus for turns, bonus in zip(found, shaping, strict=True)]


def critic_advantages(
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[Array]],
    algorithm: Algorithm,
    proxy: AgentProxy,
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Advantages and critic targets, per trajectory and turn `[tokens]`, from values of the same shape.

    Advantages are normalised over all tokens of the batch; targets are in the task's own reward. The divisor is the
    advantages' standard deviation, or a tenth of the targets' root mean square where that is more: once every episode
    succeeds, advantages are only the errors of the critic, and divided by their own spread they would become a
    full-sized gradient that unlearns the task.
    """
    compute = ESTIMATORS[algorithm.adv_estimator].compute
    pairs = []
    for t, known in zip(trajectories, values, strict=True):
        advantages, targets = compute([turn.reward for turn in t.turns], known, algorithm)
        pairs.append([_by_token(algorithm, given, known) for given in (advantages, targets)])
    every = np.concatenate([tokens for turns, _ in pairs for tokens in turns])
    bessel = algorithm.critic.whitening == "sample" and len(every) > 1
    size = np.sqrt(np.square(np.concatenate([tokens for _, turns in pairs for tokens in turns])).mean())
    mean, spread = every.mean(), max(every.std(ddof=int(bessel)), LEAST_SPREAD * size) + 1e-8
    shaped = []
    for (turns, _), bonuses in zip(pairs, shaping_of(trajectories, proxy), strict=True):
        shaped.append([(one - mean) / spread + bonus for one, bonus in zip(turns, bonuses, strict=True)])
    return shaped, [targets for _, targets in pairs]


def teacher_advantages(
    trajectories: Sequence[Trajectory],
    known: Sequence[Sequence[Array]],
    teacher: Sequence[Sequence[Array]],
    algorithm: Algorithm,
    proxy: AgentProxy,
) -> list[list[Array]]:
    """Advantages per trajectory and turn `[tokens]` from log-probabilities: the policy's (`known`), the teacher's."""
    compute, found = ESTIMATORS[algorithm.adv_estimator].compute, []
    for ours, theirs, bonuses in zip(known, teacher, shaping_of(trajectories, proxy), strict=True):
        turns = _by_token(algorithm, map(compute, ours, theirs), ours)
        found.append([tokens + bonus for tokens, bonus in zip(turns, bonuses, strict=True)])
    return found


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


# --- shaping
def shaping_of(trajectories: Sequence[Trajectory], proxy: AgentProxy) -> list[Array]:
    """Per trajectory one number a turn: what is added to advantages of the task's own reward."""
    formats = format_shaping(trajectories, proxy.format_penalty)
    if not proxy.overlong_buffer:
        return formats
    buffer, limit = proxy.overlong_buffer, proxy.token_limit
    lengths = [np.array(t.response_lengths, dtype=np.float64) for t in trajectories]
    long = _centred([proxy.overlong_penalty * overlong_shaping(own, limit, buffer) for own in lengths])
    return [a + b for a, b in zip(formats, long, strict=True)]


def format_shaping(trajectories: Sequence[Trajectory], penalty: float) -> list[Array]:
    """Per trajectory one number a turn: `-penalty` for turns without a valid action, centred over the batch."""
    invalid = [np.array([not turn.action_is_valid for turn in t.turns], dtype=float) for t in trajectories]
    if not penalty:
        return [np.zeros(len(turns)) for turns in invalid]
    return [-penalty * turns for turns in _centred(invalid)]


def overlong_shaping(lengths: ArrayLike, limit: int, buffer: int) -> Array:
    """DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13), in [-1, 0].

    Nothing up to `limit - buffer` tokens, then falling evenly to -1 at `limit`.
    """
    return -np.clip((np.asarray(lengths, dtype=np.float64) - (limit - buffer)) / buffer, 0.0, 1.0)


def _centred(turns: Sequence[Array]) -> list[Array]:
    """Less the mean over all turns of the batch."""
    every = np.concatenate(turns)
    mean = float(every.mean()) if len(every) else 0.0
    return [own - mean for own in turns]


# --- estimators that compare episodes
@advantage("grpo", grouped=True, normalized=True)
def _grpo(played: Played) -> Array:
    return normalize_rewards(played.episode_returns, played.cells, played.proxy.reward_normalization.method)


@advantage("dr_grpo", grouped=True, defaults={"loss_aggregation": "constant", "loss_constant": "budget"})
def _dr_grpo(played: Played) -> Array:
    return group_relative(played.episode_returns, played.cells, scale=False)


@advantage("rloo", grouped=True)
def _rloo(played: Played) -> Array:
    return leave_one_out(played.episode_returns, played.cells)


@advantage("maxrl", grouped=True)
def _maxrl(played: Played) -> Array:
    return mean_relative(played.episode_returns, played.cells)


@advantage("reinforce")
def _reinforce(played: Played) -> Array:
    """With the mean of the batch as its baseline: without one, the successes of a solved task are all pushed alike."""
    return group_relative(played.episode_returns, np.zeros(len(played.returns), dtype=np.int64), scale=False)


@advantage("reinforce_pp")
def _reinforce_pp(played: Played) -> Array:
    return batch_normalized(played.episode_returns, played.cells)


@advantage("reinforce_pp_baseline", grouped=True)
def _reinforce_pp_baseline(played: Played) -> Array:
    return batch_normalized(played.episode_returns, played.cells, baseline=True)


@advantage("reinforce_pp_tokens")
def _reinforce_pp_tokens(played: Played) -> list[Array]:
    counts = [t.response_lengths for t in played.trajectories]
    return token_whitened(played.returns, counts)


@advantage("gigpo", grouped=True, normalized=True)
def _gigpo(played: Played) -> list[Array]:
    """The episode part is that of `grpo`; `algorithm.gigpo` says of what, and over what it is normalised."""
    settings, method = played.algorithm.gigpo, played.proxy.reward_normalization.method
    sums = settings.episode_reward == "sum"
    rewards = [t.reward for t in played.trajectories] if sums else played.episode_returns
    n_turns = [len(t.turns) for t in played.trajectories]
    counts = n_turns if settings.statistics == "steps" else None
    episodes = normalize_rewards(rewards, played.cells, method, counts)
    anchors = [[turn.anchor for turn in t.turns] for t in played.trajectories]
    groups = [t.group for t in played.trajectories]
    steps = anchored_step_advantages(played.returns, anchors, groups, scale=method != "mean")
    weight = played.algorithm.step_advantage_weight
    return [episode + weight * own for episode, own in zip(episodes, steps, strict=True)]


@advantage("graphgpo", grouped=True, normalized=True)
def _graphgpo(played: Played) -> list[Array]:
    """The episode part is that of `grpo`."""
    method = played.proxy.reward_normalization.method
    episodes = normalize_rewards(played.episode_returns, played.cells, method)
    anchors = [[turn.anchor for turn in t.turns] for t in played.trajectories]
    solved, groups = [t.success for t in played.trajectories], [t.group for t in played.trajectories]
    discount, scale = played.algorithm.graph_discount, method != "mean"
    steps = graph_step_advantages(anchors, solved, groups, discount=discount, scale=scale)
    weight = played.algorithm.step_advantage_weight
    return [episode + weight * own for episode, own in zip(episodes, steps, strict=True)]


def _cells(trajectories: Sequence[Trajectory], grouping: str) -> list[int]:
    """The cell of each trajectory within which rewards are compared."""
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
    centred, spread = _centre(rewards, groups, counts)
    with_signal = spread > EPSILON
    return np.where(with_signal, centred / np.where(with_signal & scale, spread, 1.0), 0.0)


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """RLOO advantages (arXiv:2402.14740): a reward against the mean of the *other* members of its group.

    Returns:
        `[B]`; zero in groups whose rewards are all equal, and in groups of one.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    others = np.bincount(index)[index] - 1
    baseline = (np.bincount(index, values)[index] - values) / np.maximum(others, 1)
    return np.where(_centre(values, groups)[1] > 0, values - baseline, 0.0)


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


def mean_relative(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """MaxRL advantages (arXiv:2602.02710): a reward against the mean of its group, over that mean.

    With rewards of 0 and 1 the gradient is that of the mean log-likelihood of the successes of a group, with the mean
    score as its baseline. Rewards must not be negative.

    Returns:
        `[B]`, zero for groups in which nothing was earned, or all the same.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) and values.min() < 0:
        raise ValueError(
            f"maxrl divides by the mean reward of a group, so none may be below 0, got {values.min()}"
        )
    centred, spread = _centre(values, groups)
    with_signal = spread > EPSILON
    return np.where(with_signal, centred / np.where(with_signal, values - centred, 1.0), 0.0)


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


def graph_step_advantages(
    anchors: Sequence[Sequence[Hashable]],
    solved: Sequence[bool],
    groups: Sequence[int],
    *,
    discount: float = 0.1,
    scale: bool = True,
) -> list[Array]:
    """Step-level advantages of GraphGPO (arXiv:2605.26684, eq. 4): turns that left the same state, compared.

    The episodes of a group make one graph of the states they met. A turn is worth `discount ** (d + 1)`, with `d` the
    fewest turns, of any episode, from the state it led to to where one was solved. States from which none was solved
    count as one turn further than the furthest other.

    Args:
        anchors: per trajectory, a key of the state before each turn; its last turn led to the goal, or nowhere known.
        solved: of each trajectory.
        groups: group of each trajectory; a graph is of one group.
        discount: worth of a state against that of one a turn nearer to the goal, in (0, 1).
        scale: divide by the standard deviation among the turns that left a state.

    Returns:
        Per trajectory one value a turn; zero where nobody left the state otherwise, and in groups that solved nothing
        (there, all states are equally far).
    """
    goal = object()
    edges: list[tuple[Hashable, Hashable]] = []  # of all turns, in order: the state before, the state after
    before: dict[Hashable, set[Hashable]] = {}
    for k, (visited, group) in enumerate(zip(anchors, groups, strict=True)):
        states: list[Hashable] = [(group, anchor) for anchor in visited]
        ends: Hashable = (group, goal) if solved[k] else (group, goal, k)
        for state, after in itertools.pairwise([*states, ends]):
            edges.append((state, after))
            before.setdefault(after, set()).add(state)
    distance: dict[Hashable, int] = {}
    furthest: dict[int, int] = {}
    for group in set(groups):
        level: set[Hashable] = {(group, goal)} if (group, goal) in before else set()
        steps = 0
        while level:
            distance.update(dict.fromkeys(level, steps))
            furthest[group], steps = steps, steps + 1
            level = {state for after in level for state in before.get(after, ())} - distance.keys()
    keys: dict[Hashable, int] = {}
    states_left = np.array([keys.setdefault(state, len(keys)) for state, _ in edges], dtype=np.int64)
    nowhere = [furthest.get(g, 0) + 1 for v, g in zip(anchors, groups, strict=True) for _ in v]
    turns_left = np.array([distance.get(after, n) + 1 for (_, after), n in zip(edges, nowhere, strict=True)])
    if scale:
        # In units of the best turn from there: far from the goal, differences are small and mean as much.
        best = np.full(len(keys), np.inf)
        np.minimum.at(best, states_left, turns_left)
        turns_left = turns_left - best[states_left]
    flat = group_relative(discount**turns_left, states_left, scale=scale)
    return np.split(flat, np.cumsum([len(visited) for visited in anchors])[:-1])


def _centre(rewards: ArrayLike, groups: ArrayLike, counts: ArrayLike | None = None) -> tuple[Array, Array]:
    """Rewards less their group's mean, and their group's standard deviation, both `[B]`."""
    values = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    weights = np.ones(len(values)) if counts is None else np.asarray(counts, dtype=np.float64)
    total = np.bincount(index, weights)
    centred = values - (np.bincount(index, weights * values) / np.maximum(total, 1))[index]
    spread = np.sqrt(np.bincount(index, weights * centred**2) / np.maximum(total - 1, 1))[index]
    rounding = spread <= ROUNDING * np.abs(values - centred)
    return np.where(rounding, 0.0, centred), np.where(rounding, 0.0, spread)


# --- estimators with a critic or a teacher
@advantage("gae", needs="critic")
def _token_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    return token_gae(rewards, values, algorithm.gamma, algorithm.critic.gae_lambda)


@advantage("turn_gae", needs="critic")
def _turn_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    return turn_gae(rewards, values, algorithm.gamma, algorithm.critic.gae_lambda)


@advantage("bi_level_gae", needs="critic")
def _bi_level_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    critic = algorithm.critic
    return bi_level_gae(rewards, values, algorithm.gamma, critic.gae_lambda, critic.token_lambda)


@advantage("distillation", needs="teacher", defaults={"entropy_coef": 0.0})
def reverse_kl(logprobs: Array, teacher_logprobs: Array) -> Array:
    """On-policy distillation: the teacher scores each token that the student wrote (MiniLLM, arXiv:2306.08543).

    `[tokens]`: how much likelier the teacher holds each token; its mean under the student is minus the reverse KL, so
    the policy gradient with it as advantage pulls the student to the teacher.
    """
    return teacher_logprobs - logprobs


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
    steps = [max(len(known), 1) for known in values]
    paid = [reward for n, r in zip(steps, rewards, strict=True) for reward in (*[0.0] * (n - 1), r)]
    valued = [value for known in values for value in (known if len(known) else [None])]
    discounts = [discount for n in steps for discount in (*[1.0] * (n - 1), gamma)]
    found = iter(_gae(paid, valued, discounts, gae_lambda))
    advantages = [
        np.array(list(itertools.islice(found, n))[: len(known)])
        for n, known in zip(steps, values, strict=True)
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def turn_gae(
    rewards: Sequence[float], values: Sequence[Array], gamma: float, gae_lambda: float
) -> tuple[list[Array], list[Array]]:
    """GAE with every turn as a step, valued at its first token; all tokens of a turn share its advantage."""
    first = [float(known[0]) if len(known) else None for known in values]
    advantages = _gae(rewards, first, [gamma] * len(values), gae_lambda)
    shared = [np.full(len(known), a) for a, known in zip(advantages, values, strict=True)]
    return shared, [a + known[:1] for a, known in zip(shared, values, strict=True)]


def bi_level_gae(
    rewards: Sequence[float],
    values: Sequence[Array],
    gamma: float,
    gae_lambda: float,
    token_lambda: float = 1.0,
) -> tuple[list[Array], list[Array]]:
    """Turns first, then tokens within each turn (bi-level GAE of VAGEN, arXiv:2510.16907).

    A turn is valued at its last token. Its advantage, from GAE over turns, becomes the advantage of that token; from
    there GAE runs back over the tokens of the turn, without reward and discount.
    """
    last = [float(known[-1]) if len(known) else None for known in values]
    advantages: list[Array] = []
    for carried, known in zip(_gae(rewards, last, [gamma] * len(values), gae_lambda), values, strict=True):
        tokens = np.full(len(known), carried)
        for place in range(len(known) - 2, -1, -1):
            carried = known[place + 1] - known[place] + token_lambda * carried
            tokens[place] = carried
        advantages.append(tokens)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _gae(
    rewards: Sequence[float], values: Sequence[float | None], discounts: Sequence[float], gae_lambda: float
) -> list[float]:
    """One advantage a step. One without a value is a turn without tokens: it pays the step before it."""
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
