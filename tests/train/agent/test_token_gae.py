import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.agent.advantages import ESTIMATORS, bi_level_gae, token_gae, turn_gae
from shoal.train.agent.config import Algorithm, Critic

EPISODES = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=1, max_size=4)), min_size=1, max_size=5
)
RATES = st.floats(0, 1)


def unpack(episode):
    return [reward for reward, _ in episode], [np.array(values) for _, values in episode]


def slow_gae(rewards, values, discounts, gae_lambda):
    """The definition: a sum over all later steps of discounted, decayed TD errors."""
    n = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + discounts[t] * following[t] - values[t] for t in range(n)]
    out = []
    for t in range(n):
        total, factor = 0.0, 1.0
        for k in range(t, n):
            total += factor * deltas[k]
            factor *= discounts[k] * gae_lambda
        out.append(total)
    return out


@given(EPISODES, RATES, RATES)
def test_token_gae_is_the_sum_of_decayed_errors_over_tokens(episode, gamma, gae_lambda):
    rewards, values = unpack(episode)
    flat = [v for turn in values for v in turn]
    paid = [
        r if k == len(v) - 1 else 0.0 for r, v in zip(rewards, values, strict=True) for k in range(len(v))
    ]
    discounts = [gamma if k == len(v) - 1 else 1.0 for v in values for k in range(len(v))]
    advantages, returns = token_gae(rewards, values, gamma, gae_lambda)
    np.testing.assert_allclose(
        np.concatenate(advantages), slow_gae(paid, flat, discounts, gae_lambda), atol=1e-9
    )
    np.testing.assert_allclose(np.concatenate(returns), np.concatenate(advantages) + flat, atol=1e-9)


@given(EPISODES, RATES, RATES)
def test_turn_gae_is_the_sum_of_decayed_errors_over_turns(episode, gamma, gae_lambda):
    rewards, values = unpack(episode)
    expected = slow_gae(rewards, [float(v[0]) for v in values], [gamma] * len(values), gae_lambda)
    advantages, _ = turn_gae(rewards, values, gamma, gae_lambda)
    for tokens, wanted in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(tokens, wanted, atol=1e-9)


def test_bi_level_gae_by_hand():
    # Two turns, values 0.1 0.3 | 0.4, rewards 0 and 1, gamma 1/2, lambda 1, token lambda 1/2.
    # Turns, valued at their last tokens: A1 = 1 - 0.4 = 0.6; A0 = 0 + 0.5*0.4 - 0.3 + 0.5*0.6 = 0.2.
    # Tokens of turn 0: last 0.2; first 0.3 - 0.1 + 0.5*0.2 = 0.3.
    advantages, returns = bi_level_gae([0.0, 1.0], [np.array([0.1, 0.3]), np.array([0.4])], 0.5, 1.0, 0.5)
    np.testing.assert_allclose(np.concatenate(advantages), [0.3, 0.2, 0.6])
    np.testing.assert_allclose(np.concatenate(returns), [0.4, 0.5, 1.0])


def test_each_estimator_reads_the_settings_of_a_run():
    # The episode above, with lambda 3/4: the last turn has 0.6. By tokens, the end of turn 0 has
    # 0.5*0.4 - 0.3 + 0.5*0.75*0.6 = 0.125, its first token 0.3 - 0.1 + 0.75*0.125 = 0.29375; by turns, both have
    # 0.5*0.4 - 0.1 + 0.375*0.6 = 0.325; by both, the first token has 0.3 - 0.1 + 0.5*0.125 = 0.2625.
    algorithm = Algorithm(gamma=0.5, critic=Critic(gae_lambda=0.75, token_lambda=0.5))
    wanted = {"gae": [0.29375, 0.125], "turn_gae": [0.325, 0.325], "bi_level_gae": [0.2625, 0.125]}
    for name, first in wanted.items():
        values = [np.array([0.1, 0.3]), np.array([0.4])]
        advantages, _ = ESTIMATORS[name].compute([0.0, 1.0], values, algorithm)
        np.testing.assert_allclose(np.concatenate(advantages), [*first, 0.6])


@given(EPISODES, RATES, RATES)
def test_all_agree_when_every_turn_is_one_token(episode, gamma, gae_lambda):
    rewards, values = [r for r, _ in episode], [np.array(v[:1]) for _, v in episode]
    results = [f(rewards, values, gamma, gae_lambda)[0] for f in (token_gae, turn_gae, bi_level_gae)]
    for other in results[1:]:
        np.testing.assert_allclose(np.concatenate(other), np.concatenate(results[0]), atol=1e-9)


def bi_level_over_one_row(rewards, values, gamma, gae_lambda, token_lambda):
    """RAGEN's way: one row of tokens, ends of turns marked in it, two passes from its end, the second over the first.

    (RAGEN takes a token with a reward for the end of a turn; here every last token is one.)
    """
    row = [v for turn in values for v in turn]
    ends = np.cumsum([len(turn) for turn in values]) - 1
    paid, result = dict(zip(ends, rewards, strict=True)), [0.0] * len(row)
    carried = 0.0
    for i in reversed(range(len(ends))):
        ahead = row[ends[i + 1]] if i + 1 < len(ends) else 0.0
        carried = paid[ends[i]] + gamma * ahead - row[ends[i]] + gamma * gae_lambda * carried
        result[ends[i]] = carried
    scores = {end: result[end] + row[end] for end in ends}
    for t in reversed(range(len(row))):
        is_end = t in scores
        delta = scores[t] - row[t] if is_end else row[t + 1] - row[t]
        result[t] = delta + (0.0 if is_end else token_lambda * result[t + 1])
    return result


def test_bi_level_gae_is_what_two_passes_over_one_row_give():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = [rng.normal(size=rng.integers(1, 5)) for _ in range(rng.integers(1, 6))]
        rewards, rates = rng.normal(size=len(values)).tolist(), rng.uniform(size=3)
        found, _ = bi_level_gae(rewards, values, *rates)
        np.testing.assert_allclose(
            np.concatenate(found), bi_level_over_one_row(rewards, values, *rates), atol=1e-9
        )


def test_a_critic_that_learns_its_bi_level_targets_settles():
    # Two turns of two tokens, rewards 0 and 3: every token of an undiscounted episode is worth 3.
    values = [np.zeros(2), np.zeros(2)]
    for _ in range(10):
        _, values = bi_level_gae([0.0, 3.0], values, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(np.concatenate(values), [3.0] * 4)
