import numpy as np
import pytest
import torch
from tests.records import Exchange, trajectory_of

from shoal.train.agent.algorithms.advantages import (
    batch_normalized,
    group_relative,
    has_signal,
    leave_one_out,
    mean_relative,
    normalize_rewards,
    reverse_kl,
    token_whitened,
    turn_advantages,
)
from shoal.train.agent.config import AgentProxy, Algorithm, RewardNormalization


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


def episode(group, rewards, valid=None, env="Lake"):
    turns = tuple(
        Exchange(f"s{i}", (1,), (2,), (0.0,), "", "Up", valid is None or valid[i], reward, f"s{i}")
        for i, reward in enumerate(rewards)
    )
    return trajectory_of(env, 0, group, 0, 0, turns, sum(rewards) > 0, True, False)


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [("state", [0, 0, 0]), ("inductive", [0.5, -0.5, 0]), ("batch", [2 / 3, -1 / 3, -1 / 3])],
)
def test_rewards_are_compared_within_their_grouping(grouping, expected):
    three = [episode(0, [1.0]), episode(1, [0.0]), episode(2, [0.0], env="Bandit")]
    proxy = AgentProxy(reward_normalization=RewardNormalization(grouping, "mean"))
    np.testing.assert_allclose(np.concatenate(turn_advantages(three, Algorithm(), proxy)), expected)


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
    want = batch_normalized([0.0] * size + [1.0, 2.0], cells)
    np.testing.assert_array_equal(batch_normalized(mixed, cells), want)


def test_maxrl_is_the_mean_of_the_scores_of_successes_less_the_mean_of_all():
    """With rewards of 0 and 1, k successes of n: sum A_i g_i / n = sum over successes g_i / k - sum g_i / n."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 9))
        won, scores = rng.random(n) < 0.4, rng.normal(size=(n, 3))
        advantages = mean_relative(won.astype(float), np.zeros(n))
        found = (advantages[:, None] * scores).mean(0)
        some = won.any() and not won.all()
        expected = scores[won].mean(0) - scores.mean(0) if some else np.zeros(3)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_maxrl_refuses_rewards_that_it_cannot_divide_by():
    with pytest.raises(ValueError, match="none may be below 0"):
        mean_relative([-1.0, 1.0], [0, 0])


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, sum p A grad log p = -grad KL(student || teacher)."""
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        logits = torch.randn(5, generator=rng, dtype=torch.float64, requires_grad=True)
        teacher = torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(-1)
        student = logits.log_softmax(-1)
        (expected,) = torch.autograd.grad(
            (student.exp() * (student - teacher)).sum(), logits, retain_graph=True
        )
        advantages = torch.from_numpy(reverse_kl(student.detach().numpy(), teacher.numpy()))
        (found,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
