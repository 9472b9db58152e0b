import pytest
from tests.records import Exchange, trajectory_of

from shoal.core.errors import ConfigError
from shoal.train.agent.config import Algorithm
from shoal.train.agent.run.playing import best_groups, group_scores


def played(group, reward, status="ok"):

    turn = Exchange("", (1,), (2,), (-1.0,), "", None, True, reward, "")
    return trajectory_of("e", 0, group, 0, 0, (turn,), False, True, False, status)


GROUPS = {0: [0, 0, 0, 0], 1: [1, 0, 0, 0], 2: [1, 1, 0, 0], 3: [4, 0, 4, 0]}
TRAJECTORIES = [played(group, float(r)) for group, rewards in GROUPS.items() for r in rewards]


def test_scores_are_those_computed_by_hand():
    # std: 0, sqrt(1/4 * 3/4), 1/2, 2; max - mean: 0, 3/4, 1/2, 2
    assert group_scores(TRAJECTORIES, "std") == pytest.approx({0: 0, 1: 0.4330127, 2: 0.5, 3: 2})
    assert group_scores(TRAJECTORIES, "max_mean") == pytest.approx({0: 0, 1: 0.75, 2: 0.5, 3: 2})


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


def test_a_ratio_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match=r"rollout_filter_ratio must be in \(0, 1\], got 0"):
        Algorithm(rollout_filter_ratio=0)
