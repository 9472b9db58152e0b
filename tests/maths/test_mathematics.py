"""GAE, losses, distributions, schedules and statistics: by hand, by definition, beside Stable-Baselines3."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.maths import distributions
from shoal.maths.initial_weights import orthogonal
from shoal.maths.normalizer import ObservationNormalizer, RewardNormalizer, RunningMoments
from shoal.maths.updates import (
    clipped_policy_loss,
    clipped_surrogate,
    decayed,
    explained_variance,
    gae,
    next_values_of,
    normalized,
    value_loss,
)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[:, None]


def test_gae_by_hand_with_a_truncation_uses_the_final_observations_value():
    # r = 1, v = 0.5, last value 2, gamma = lambda = 0.5: A_2 = delta_2 = 1 + 0.5 * 2 - 0.5 = 1.5
    # truncated at t = 1 where the final observation is worth 4: A_1 = 1 + 0.5 * 4 - 0.5 = 2.5,
    # A_0 = 0.75 + 0.25 * 2.5 = 1.375; nothing flows back from t = 2
    cut, never = np.array([[False], [True], [False]]), np.zeros((3, 1), bool)
    values = column(0.5, 0.5, 0.5, 2)
    ahead = next_values_of(values, cut, np.array([4.0]))
    assert ahead[:, 0].tolist() == [0.5, 4.0, 2.0]
    got = gae(column(1, 1, 1), values[:-1], ahead, never, cut, gamma=0.5, gae_lambda=0.5)
    assert got[:, 0].tolist() == [1.375, 2.5, 1.5]


def test_an_endless_reward_of_one_is_worth_what_the_series_says():
    """Reward 1 for ever, cut every 7 steps: only with the true bootstrap is every value 1 / (1 - gamma)."""
    gamma, v = 0.9, 10.0
    cut = (np.arange(50) % 7 == 6)[:, None]
    ones = np.ones((50, 1))
    got = gae(ones, v * ones, v * ones, np.zeros_like(cut), cut, gamma=gamma, gae_lambda=0.95)
    assert np.abs(got).max() < 1e-12


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30)
def test_gae_is_the_sum_of_its_definition(seed, gamma, lam):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, up to the end of the episode, per env."""
    rng = np.random.default_rng(seed)
    n_steps, n_envs = 9, 3
    rewards, values, ahead = (rng.standard_normal((n_steps, n_envs)) for _ in range(3))
    terminated = rng.random((n_steps, n_envs)) < 0.2
    done = terminated | (rng.random((n_steps, n_envs)) < 0.2)
    got = gae(rewards, values, ahead, terminated, done, gamma=gamma, gae_lambda=lam)
    for i in range(n_envs):
        for t in range(n_steps):
            total = 0.0
            for k in range(n_steps - t):
                s = t + k
                future = 0.0 if terminated[s, i] else ahead[s, i]
                total += (gamma * lam) ** k * (rewards[s, i] + gamma * future - values[s, i])
                if done[s, i]:
                    break
            assert got[t, i] == pytest.approx(total, abs=1e-9)


def test_gae_is_that_of_stable_baselines3():
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    n_steps, n_envs = 64, 5
    rewards, values = (rng.standard_normal((n_steps, n_envs)).astype(np.float32) for _ in range(2))
    done = rng.random((n_steps, n_envs)) < 0.1
    last = rng.standard_normal(n_envs).astype(np.float32)
    buffer = RolloutBuffer(
        n_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), gamma=0.99, gae_lambda=0.95, n_envs=n_envs
    )
    start = np.ones(n_envs)
    for t in range(n_steps):
        zeros = np.zeros((n_envs, 1), np.float32)
        buffer.add(zeros, zeros, rewards[t], start, torch.from_numpy(values[t]), torch.zeros(n_envs))
        start = done[t].astype(np.float32)
    buffer.compute_returns_and_advantage(torch.from_numpy(last), done[-1])
    ahead = np.concatenate([values[1:], last[None]])
    ours = gae(rewards, values, ahead, done, done, gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(ours, buffer.advantages, atol=1e-5)
    np.testing.assert_allclose(ours + values, buffer.returns, atol=1e-5)


def test_policy_loss_by_hand():
    # ratios 1.5 and 0.5, clip 0.2, advantages 2 and -1:
    # min(2 * 1.5, 2 * 1.2) = 2.4; min(-0.5, -0.8) = -0.8; loss = -(2.4 - 0.8) / 2 = -0.8
    # KL = mean(r - 1 - log r) = ((0.5 - log 1.5) + (-0.5 - log 0.5)) / 2; both are outside the clip
    logprob = torch.log(torch.tensor([1.5, 0.5]))
    got = clipped_policy_loss(logprob, torch.zeros(2), torch.tensor([2.0, -1.0]), 0.2)
    assert float(got.loss) == pytest.approx(-0.8, abs=1e-6)
    assert float(got.approx_kl) == pytest.approx((-math.log(1.5) - math.log(0.5)) / 2, abs=1e-6)
    assert float(got.clip_fraction) == 1.0


def test_value_loss_by_hand():
    # values 3 and 1, returns 1 and 1, old values 1 and 1: errors 4 and 0, mean 2.
    # Clipped to 0.5 around the old: held 1.5 -> error 0.25, the larger one (4) counts: mean 2 again.
    values, returns, old = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    assert float(value_loss(values, returns, old)) == 2.0
    assert float(value_loss(values, returns, old, 0.5)) == 2.0
    # Old value 3: it may move to 2.5 at least, error 2.25; the new value 1 is right but moved too far.
    assert float(value_loss(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([3.0]), 0.5)) == 2.25


def test_advantages_are_normalised_as_cleanrl_and_sb3_do_and_one_alone_is_left():
    adv = torch.tensor([1.0, 2.0, 6.0])
    assert torch.allclose(normalized(adv), (adv - 3) / (math.sqrt(7) + 1e-8))  # variance (4 + 1 + 9) / 2
    assert normalized(torch.tensor([5.0])).tolist() == [5.0]


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_distributions_are_those_of_torch(seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((7, 5)) * 3)
    actions = torch.stack(
        [torch.from_numpy(rng.integers(0, 2, 7)), torch.from_numpy(rng.integers(0, 3, 7))], 1
    )
    ours = distributions.categorical_logprob(logits, actions, (2, 3))
    theirs = [torch.distributions.Categorical(logits=part) for part in logits.split((2, 3), dim=1)]
    assert torch.allclose(ours.logprob, sum(d.log_prob(actions[:, g]) for g, d in enumerate(theirs)))
    assert torch.allclose(ours.entropy, sum(d.entropy() for d in theirs))
    mean, log_std = torch.from_numpy(rng.standard_normal((7, 3))), torch.from_numpy(rng.standard_normal(3))
    points = torch.from_numpy(rng.standard_normal((7, 3)))
    normal = torch.distributions.Normal(mean, log_std.exp())
    scored = distributions.gaussian_logprob(mean, log_std, points)
    assert torch.allclose(scored.logprob, normal.log_prob(points).sum(1))
    assert torch.allclose(scored.entropy, normal.entropy().sum(1))


def test_masked_choices_are_a_categorical_over_the_allowed_ones():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    masks = torch.tensor([[True, False, True, False]])
    allowed = torch.distributions.Categorical(logits=torch.tensor([[1.0, 3.0]]))
    scored = distributions.categorical_logprob(logits, torch.tensor([[2]]), (4,), masks)
    assert torch.allclose(scored.logprob, allowed.log_prob(torch.tensor([1])))
    assert torch.allclose(scored.entropy, allowed.entropy())
    one = distributions.categorical_logprob(
        logits, torch.tensor([[1]]), (4,), torch.tensor([[False, True, False, False]])
    )
    assert one.entropy.item() == 0.0
    assert one.logprob.item() == 0.0


def test_schedules_run_from_the_start_value_to_zero():
    assert [decayed(2.0, "linear", p) for p in (0, 0.5, 1)] == [2.0, 1.0, 0.0]
    assert decayed(2.0, "cosine", 0.5) == pytest.approx(1.0)
    assert decayed(2.0, "cosine", 1.0) == pytest.approx(0.0)
    assert decayed(2.0, "constant", 0.9) == 2.0
    assert decayed(2.0, "linear", 1.5) == 0.0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=25)
def test_running_moments_are_the_moments_of_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((size, 3)) * 5 + 2 for size in sizes]
    moments = RunningMoments(3)
    for part in parts:
        moments.add(part)
    whole = np.concatenate(parts)
    np.testing.assert_allclose(moments.mean, whole.mean(0), atol=1e-9)
    np.testing.assert_allclose(moments.variance, whole.var(0), atol=1e-9)


def test_the_observation_normaliser_moves_only_when_told():
    norm = ObservationNormalizer(2)
    rows = np.array([[1.0, 10.0], [3.0, 30.0]], np.float32)
    assert (norm(rows) == rows).all()  # nothing known yet
    norm.update(rows)
    first = norm(rows)
    np.testing.assert_allclose(first, [[-1, -1], [1, 1]], atol=1e-5)
    assert (norm(rows * 1000) <= 10).all()
    assert (norm(rows) == first).all()


def test_rewards_are_scaled_by_the_deviation_of_their_discounted_sum():
    # gamma 0.5, rewards 1, 1 | 1: sums 1, 1.5, then a new episode 1. Variance of (1, 1.5, 1) = 1/18.
    norm = RewardNormalizer(1, 0.5)
    scaled = norm(column(1, 1, 1), np.array([[False], [True], [False]]))
    np.testing.assert_allclose(scaled, np.full((3, 1), math.sqrt(18)), rtol=1e-5)


def test_steps_spent_on_resets_are_no_rewards():
    # gamma 0.5, rewards 1, 1, then a step of a reset, 1: sums 1, 1.5, 1, as above
    norm = RewardNormalizer(1, 0.5)
    done, valid = np.array([[[False], [True], [False], [False]], [[True], [True], [False], [True]]])
    scaled = norm(column(1, 1, 0, 1), done, valid)
    np.testing.assert_allclose(scaled, np.array([[1], [1], [0], [1]]) * math.sqrt(18), rtol=1e-5)
    assert norm.moments.count == 3
    norm(column(0), ~valid[:1], ~valid[:1])  # nothing but a reset
    assert norm.moments.count == 3


def test_explained_variance_of_perfect_useless_and_undefined_critics():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(3), returns) == 0.0
    assert math.isnan(explained_variance(returns, np.ones(3)))
    assert math.isnan(explained_variance(returns[:0], returns[:0]))


@pytest.mark.parametrize("seed", range(5))
def test_the_surrogate_of_arrays_has_the_value_and_slope_of_the_one_of_tensors(seed):
    rng = np.random.default_rng(seed)
    new, old, advantages = (rng.standard_normal(64) for _ in range(3))
    logprob = torch.tensor(new, requires_grad=True)
    theirs = clipped_policy_loss(logprob, torch.tensor(old), torch.tensor(advantages), 0.2).loss
    theirs.backward()
    value, slope = clipped_surrogate(new, old, advantages, 0.2)
    assert -value.mean() == pytest.approx(theirs.item(), rel=1e-12)
    np.testing.assert_allclose(-slope / 64, logprob.grad, rtol=1e-12)


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)])
def test_first_weights_are_orthogonal_and_of_the_wanted_length(shape):
    matrix = orthogonal(shape, 1.5, np.random.default_rng(0)).astype(np.float64)
    small = matrix.T @ matrix if shape[0] >= shape[1] else matrix @ matrix.T
    np.testing.assert_allclose(small, 1.5**2 * np.eye(min(shape)), atol=1e-6)
    assert not np.array_equal(matrix, orthogonal(shape, 1.5, np.random.default_rng(1)))


def test_the_sum_of_gae_is_carried_in_the_dtype_asked_for():
    """0.1 has no end in binary: carried in float32, three steps of it differ from those in float64."""
    rewards, zeros = np.full((40, 1), 0.1, np.float32), np.zeros((40, 1), np.float32)
    exact = sum(np.float64(np.float32(0.1)) * 0.9**k for k in range(40))
    carried = {
        dtype: gae(rewards, zeros, zeros, zeros, zeros, gamma=0.9, gae_lambda=1.0, dtype=dtype)[0, 0]
        for dtype in (np.float32, np.float64)
    }
    assert carried[np.float64] == np.float32(exact)
    assert carried[np.float32] != carried[np.float64]
