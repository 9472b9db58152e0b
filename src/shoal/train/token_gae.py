"""Generalized advantage estimation over the tokens and turns of one episode, with a critic's values.

An episode is the tokens that the model wrote, turn after turn; a turn's reward comes with its last token. Within a
turn there is no discount; `gamma` and `gae_lambda` act from turn to turn unless said otherwise. An episode that
was cut off counts as ended: the limit is part of the task, as the prompts can say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
