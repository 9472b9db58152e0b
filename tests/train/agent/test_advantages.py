import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import Exchange, trajectory_of

from shoal.train.agent.advantages import (
    anchored_step_advantages,
    batch_normalized,
    discounted_returns,
    group_relative,
    has_signal,
    leave_one_out,
    mean_relative,
    normalize_rewards,
    token_whitened,
    turn_advantages,
)
from shoal.train.agent.config import AgentProxy, Algorithm, RewardNormalization

REWARDS = st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=30)


def slow_group_relative(rewards, groups, scale):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(mates) / len(mates)
        std = (sum((r - mean) ** 2 for r in mates) / max(1, len(mates) - 1)) ** 0.5
        out.append(0.0 if std <= 1e-6 else (reward - mean) / (std if scale else 1))
    return out


@given(REWARDS, st.booleans())
def test_group_relative_is_the_definition(pairs, scale):
    groups, rewards = zip(*pairs, strict=True)
    np.testing.assert_allclose(
        group_relative(rewards, groups, scale=scale), slow_group_relative(rewards, groups, scale), atol=1e-9
    )


def test_group_relative_by_hand():
    # group 0: rewards 1, 0, 0, 0: mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2 → 1.5, -0.5, -0.5, -0.5
    np.testing.assert_allclose(group_relative([1, 0, 0, 0, 7], [0, 0, 0, 0, 1]), [1.5, -0.5, -0.5, -0.5, 0])


def test_equal_floats_have_no_signal_though_their_mean_rounds():
    rewards = [0.1] * 3 + [0.7] * 7
    groups = [0] * 3 + [1] * 7
    assert not has_signal(rewards, groups).any()
    assert not group_relative(rewards, groups).any()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean_std", [1.5, -0.5, -0.5, -0.5]),
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("identity", [1, 0, 0, 0]),
    ],
)
def test_reward_normalization_by_hand(method, expected):
    np.testing.assert_allclose(normalize_rewards([1, 0, 0, 0], [0] * 4, method), expected)


def test_asymmetric_clipping_keeps_a_rare_success_above_common_failures():
    rewards = [1.0] + [0.0] * 63  # 63/64 over std 1/8 = 7.9 clips to 3
    clipped = normalize_rewards(rewards, [0] * 64, "asym_clip")
    assert clipped[0] == 3.0
    assert normalize_rewards([0.0] + [1.0] * 63, [0] * 64, "asym_clip")[0] == -1.0


def test_discounted_returns_by_hand():
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]  # 1 + 0/2 + 2/4; 0 + 2/2; 2


def test_steps_are_compared_where_they_met_the_same_state_of_the_same_group():
    # State "a" of group 0 was met with returns 1 and 3: mean 2, std sqrt(2) → ∓ 1/sqrt(2).
    # "b" was met once, and group 1's "a" is another state: no comparison, no advantage.
    steps = anchored_step_advantages([[1.0, 5.0], [3.0], [9.0]], [["a", "b"], ["a"], ["a"]], [0, 0, 1])
    half = 2**-0.5
    np.testing.assert_allclose(steps[0], [-half, 0])
    np.testing.assert_allclose(steps[1], [half])
    np.testing.assert_allclose(steps[2], [0])


def episode(group, rewards, valid=None, env="Lake"):
    turns = tuple(
        Exchange(f"s{i}", (1,), (2,), (0.0,), "", "Up", valid is None or valid[i], reward, f"s{i}")
        for i, reward in enumerate(rewards)
    )
    return trajectory_of(env, 0, group, 0, 0, turns, sum(rewards) > 0, True, False)


def test_when_all_fail_a_format_penalty_cannot_become_a_full_sized_gradient():
    # The failure that collapses GRPO: rewards plus penalty, divided by the tiny spread of the penalty, are ±1.
    failed = [episode(0, [0.0, 0.0], [True, i % 2 == 0]) for i in range(8)]
    shaped = [t.reward - 0.1 * sum(not turn.action_is_valid for turn in t.turns) for t in failed]
    assert abs(group_relative(shaped, [0] * 8)).max() > 0.9
    advantages = turn_advantages(failed, Algorithm(), AgentProxy(format_penalty=0.1))
    assert max(abs(a).max() for a in advantages) <= 0.1


def test_the_penalty_falls_on_the_turn_that_earned_it():
    pair = [episode(0, [0.0, 1.0], [True, False]), episode(0, [0.0, 0.0], [True, True])]
    # episode part: ±1/sqrt(2); one of four turns is invalid: penalty -0.4 * (1 - 1/4) there, +0.4/4 elsewhere
    advantages = turn_advantages(pair, Algorithm(), AgentProxy(format_penalty=0.4))
    half = 2**-0.5
    np.testing.assert_allclose(advantages[0], [half + 0.1, half - 0.3])
    np.testing.assert_allclose(advantages[1], [-half + 0.1, -half + 0.1])


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [("state", [0, 0, 0]), ("inductive", [0.5, -0.5, 0]), ("batch", [2 / 3, -1 / 3, -1 / 3])],
)
def test_rewards_are_compared_within_their_grouping(grouping, expected):
    three = [episode(0, [1.0]), episode(1, [0.0]), episode(2, [0.0], env="Bandit")]
    proxy = AgentProxy(reward_normalization=RewardNormalization(grouping, "mean"))
    np.testing.assert_allclose(np.concatenate(turn_advantages(three, Algorithm(), proxy)), expected)


def test_gigpo_adds_the_step_part():
    pair = [episode(0, [1.0]), episode(0, [0.0])]
    half = 2**-0.5
    gigpo = turn_advantages(pair, Algorithm(adv_estimator="gigpo", step_advantage_weight=0.5), AgentProxy())
    np.testing.assert_allclose(np.concatenate(gigpo), [1.5 * half, -1.5 * half])


@given(REWARDS)
def test_leave_one_out_is_the_definition(pairs):
    groups, rewards = zip(*pairs, strict=True)
    for i, found in enumerate(leave_one_out(rewards, groups)):
        others = [r for j, (g, r) in enumerate(pairs) if g == groups[i] and j != i]
        expected = rewards[i] - sum(others) / len(others) if others else 0.0
        assert found == pytest.approx(expected, abs=1e-9)


def test_reinforce_plus_plus_is_normalised_over_the_batch():
    # mean 2, std sqrt((1 + 1 + 4 + 4) / 3)
    spread = (10 / 3) ** 0.5
    np.testing.assert_allclose(
        batch_normalized([1, 3, 0, 4], [0, 0, 1, 1]), np.array([-1, 1, -2, 2]) / spread
    )
    # less the group's mean the rewards are -1, 1, -2, 2 here too; with another mean a group differs
    np.testing.assert_allclose(
        batch_normalized([1, 3, 10, 14], [0, 0, 1, 1], baseline=True), np.array([-1, 1, -2, 2]) / spread
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", [0.5, -0.5]),
        ("rloo", [1.0, -1.0]),
        ("reinforce", [0.5, -0.5]),
        ("reinforce_pp", [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_each_estimator_by_hand(estimator, expected):
    pair = [episode(0, [1.0]), episode(0, [0.0])]
    found = turn_advantages(pair, Algorithm(adv_estimator=estimator), AgentProxy())
    np.testing.assert_allclose(np.concatenate(found), expected)


@pytest.mark.parametrize("reward", [1e12 / 3, 1e12 + 0.1, 7.7e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_huge_rewards_that_are_equal_are_no_signal(reward, size):
    rewards, groups = [reward] * size, [0] * size
    for scale in (True, False):
        assert not group_relative(rewards, groups, scale=scale).any()
        assert not group_relative(rewards, groups, scale=scale, counts=[3] * size).any()
    assert not has_signal(rewards, groups).any()
    assert not leave_one_out(rewards, groups).any()
    assert not mean_relative(rewards, groups).any()
    whitened = token_whitened([[reward], [reward] * size, [0.0]], [[3], [1] * size, [0]])
    assert not np.concatenate(whitened[:2]).any()
    mixed = [*rewards, 1.0, 2.0]  # the scale of the batch is that of the group that differs
    cells = [*groups, 1, 1]
    want = batch_normalized([0.0] * size + [1.0, 2.0], cells, baseline=True)
    np.testing.assert_array_equal(batch_normalized(mixed, cells, baseline=True), want)
