"""Which groups are learned from, and how many are played for it."""

import pytest
from tests.records import Exchange, trajectory_of

from shoal.samplers.sampler import Sampling
from shoal.train.agent.run.filters import filter_groups
from shoal.train.agent.run.playing import best_groups, collect_with_signal


def played(group, reward, status="ok"):
    turn = Exchange("", (1,), (2,), (-1.0,), "", None, True, reward, "")
    return trajectory_of("e", 0, group, 0, 0, (turn,), False, True, False, status)


GROUPS = {0: [0, 0, 0, 0], 1: [1, 0, 0, 0], 2: [1, 1, 0, 0], 3: [4, 0, 4, 0]}
TRAJECTORIES = [played(group, float(r)) for group, rewards in GROUPS.items() for r in rewards]


@pytest.mark.parametrize(
    ("groups", "solved", "unsolved"), [([0], 0.0, 1.0), ([0, 1], 0.0, 0.5), ([], 0.0, 0.0)]
)
def test_groups_without_signal_are_told_as_shares_of_those_played(groups, solved, unsolved):
    told = filter_groups([t for t in TRAJECTORIES if t.group in groups])[1].metrics()
    assert told["groups_played"] == len(groups)
    assert (told["groups_all_solved"], told["groups_none_solved"]) == (solved, unsolved)


class EveryThird:
    """Of its groups every third has signal; it remembers what it was asked for."""

    tags = ("Lake",) * 4

    def __init__(self):
        self.asked = []

    def collect(self, iteration, sampling, *, first_group=0, n_groups=None):
        self.asked.append((first_group, n_groups))
        groups = range(first_group, first_group + n_groups)
        return [played(group, reward) for group in groups for reward in (0.0, float(group % 3 == 0))]


def test_a_refill_plays_the_groups_after_those_played_and_as_many_as_the_rate_asks_for():
    collector = EveryThird()
    everything, kept, report = collect_with_signal(collector, 0, Sampling(8), max_batches=5)
    # 2 of 4 have signal: 2 * 4 / 2 more; 3 of 8: 1 * 8 / 3 more, rounded up.
    assert collector.asked == [(0, 4), (4, 4), (8, 3)]
    assert [t.group for t in everything] == [group for group in range(11) for _ in range(2)]
    assert {t.group for t in kept} == {0, 3, 6, 9}
    assert (report.played, report.with_signal, report.batches) == (11, 4, 3)
    short = EveryThird()
    assert collect_with_signal(short, 0, Sampling(8), max_batches=2)[2].with_signal == 3
    assert short.asked == [(0, 4), (4, 4)]


# --- the best share of those
@pytest.mark.parametrize(
    ("how", "ratio", "kept"),
    [("std", 0.5, {2, 3}), ("max_mean", 0.5, {1, 3}), ("std", 0.1, {3}), ("std", 1.0, {0, 1, 2, 3}),
     ("std", 0.75, {1, 2, 3})],
)  # fmt: skip
def test_the_best_share_of_groups_is_kept(how, ratio, kept):
    kept_of, metrics = best_groups(TRAJECTORIES, TRAJECTORIES, ratio, how)
    assert {t.group for t in kept_of} == kept
    assert metrics["rollout_filter_dropped"] == 4 - len(kept)


def test_of_equal_groups_the_first_is_kept_and_failed_episodes_do_not_count():
    equal = [played(g, r) for g in (5, 3) for r in (0.0, 1.0)] + [played(7, 9.0, "env_error"), played(7, 0.0)]
    assert {t.group for t in best_groups(equal, equal, 0.34, "std")[0]} == {3}


def test_the_best_are_those_among_what_may_be_learned_from_when_more_groups_were_played():
    # A refill overshot: of the three groups with signal two were wanted, and the best is none of them.
    candidates = [t for t in TRAJECTORIES if t.group in (1, 2)]
    assert {t.group for t in best_groups(TRAJECTORIES, candidates, 0.25, "std")[0]} == {2}
    assert {t.group for t in best_groups(TRAJECTORIES, candidates, 0.5, "std")[0]} == {1, 2}
