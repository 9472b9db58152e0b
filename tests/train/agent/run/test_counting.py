"""Each episode played is counted once: in the filter, in refills, in the statistics, in what is learned from."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.records import Exchange, trajectory_of

from shoal.rollout.plan import slot_of
from shoal.train.agent.algorithms.advantages import turn_advantages
from shoal.train.agent.config import AgentProxy, Algorithm
from shoal.train.agent.run.filters import filter_groups
from shoal.train.agent.run.metrics import rollout_metrics
from shoal.train.agent.run.playing import best_groups


def episode(group, member, rewards, success=True, tokens=1):
    turns = tuple(
        Exchange("s", (1,), (2,) * tokens, (0.0,) * tokens, "", "Up", True, reward, f"s{i}")
        for i, reward in enumerate(rewards)
    )
    return trajectory_of("Lake", 0, group, member, 0, turns, success, True, False)


def test_a_group_that_differs_by_discounted_returns_is_learned_from():
    # gamma 0.97, solved in 4 and in 12 turns: returns 0.97**3 and 0.97**11, so advantages +-0.71.
    pair = [episode(0, 0, [0, 0, 0, 1.0]), episode(0, 1, [0] * 11 + [1.0])]
    advantages = turn_advantages(pair, Algorithm(gamma=0.97), AgentProxy())
    np.testing.assert_allclose([a[0] for a in advantages], [0.5**0.5, -(0.5**0.5)])
    kept, report = filter_groups(pair, gamma=0.97)
    assert (len(kept), report.with_signal, report.all_solved) == (2, 1, 0)
    assert filter_groups(pair)[1].all_solved == 1  # without discount they are equal
    half = [episode(0, 0, [1.0]), episode(0, 1, [0, 1.0])]
    assert best_groups(half, half, 1.0, "max_mean", 0.5)[1]["rollout_filter_score"] == 0.25


@pytest.mark.parametrize("size", [1, 3, 4, 10, 40])
def test_a_refill_has_the_proportions_of_the_mix(size):
    tags = ["A"] * 10 + ["B"] * 10 + ["C"] * 20
    assert [slot_of(g, tags) for g in range(40)] == list(range(40))  # the first batch is as it was
    for first in (40, 50, 73):
        slots = [slot_of(g, tags) for g in range(first, first + size)]
        assert len(set(slots)) == size
        kinds = Counter(tags[slot] for slot in slots)
        assert all(
            abs(kinds[tag] - size * share) <= 1.5 for tag, share in (("A", 0.25), ("B", 0.25), ("C", 0.5))
        )


def test_a_refill_of_one_kind_takes_the_groups_in_order():
    assert [slot_of(g, ("A",) * 4) for g in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


EMPTY = replace(episode(0, 2, [], success=False), terminated=False, truncated=True)


def test_metrics_count_episodes_without_turns():
    row = rollout_metrics([episode(0, 0, [1.0]), EMPTY])
    assert (row["success"], row["truncated"], row["turns"], row["failed_episodes"]) == (0.5, 0.5, 0.5, 0.0)
    assert filter_groups([episode(0, 0, [1.0]), EMPTY])[1].with_signal == 1
