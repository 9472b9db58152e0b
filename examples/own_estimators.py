"""Own estimators of advantages, registered: turns compared in a graph of states, and GAE over turns.

shoal train imports=[examples/own_estimators.py] algorithm.adv_estimator=graphgpo
shoal train imports=[examples/own_estimators.py] algorithm=ppo algorithm.adv_estimator=turn_gae
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from shoal.train.agent.algorithms.advantages import (
    Array,
    Played,
    advantage,
    gae,
    group_relative,
    normalize_rewards,
)
from shoal.train.agent.config import Algorithm

DISCOUNT = 0.1
"""GraphGPO: worth of a state against that of one a turn nearer to the goal."""
TOKEN_LAMBDA = 1.0
"""Bi-level GAE: trace decay within a turn."""


@advantage("graphgpo", grouped=True, normalized=True)
def graphgpo(played: Played) -> list[Array]:
    """The advantage of the episode is that of GRPO, each turn's is added."""
    method = played.proxy.reward_normalization.method
    episodes = normalize_rewards(played.episode_returns, played.baseline_groups, method)
    anchors = [[turn.anchor for turn in t.turns] for t in played.trajectories]
    solved, groups = [t.success for t in played.trajectories], [t.group for t in played.trajectories]
    steps = graph_step_advantages(anchors, solved, groups, discount=DISCOUNT, scale=method != "mean")
    return [episode + own for episode, own in zip(episodes, steps, strict=True)]


@advantage("turn_gae", needs="critic")
def _turn_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    return turn_gae(rewards, values, algorithm.gamma, algorithm.critic.gae_lambda)


@advantage("bi_level_gae", needs="critic")
def _bi_level_gae(rewards: Sequence[float], values: Sequence[Array], algorithm: Algorithm) -> Any:
    return bi_level_gae(rewards, values, algorithm.gamma, algorithm.critic.gae_lambda, TOKEN_LAMBDA)


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


def turn_gae(
    rewards: Sequence[float], values: Sequence[Array], gamma: float, gae_lambda: float
) -> tuple[list[Array], list[Array]]:
    """GAE with every turn as a step, valued at its first token; all tokens of a turn share its advantage."""
    first = [float(known[0]) if len(known) else None for known in values]
    advantages = gae(rewards, first, [gamma] * len(values), gae_lambda)
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
    for carried, known in zip(gae(rewards, last, [gamma] * len(values), gae_lambda), values, strict=True):
        tokens = np.full(len(known), carried)
        for place in range(len(known) - 2, -1, -1):
            carried = known[place + 1] - known[place] + token_lambda * carried
            tokens[place] = carried
        advantages.append(tokens)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
