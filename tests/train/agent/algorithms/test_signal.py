"""Steps that fit the signal: what an update does where few groups differ, or none."""

import pytest
import torch
from tests.train.agent.test_update import ENGINE, contrast, learner_of, random_samples

from shoal.train.agent.algorithms.losses import PolicyLoss, policy_loss
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.config import KLPenalty
from shoal.train.agent.policies.policy import Critic
from shoal.train.agent.update import update


def learner(network=None, **settings):
    return learner_of(ENGINE.copy(), network, **{"loss_aggregation": "token_mean"} | settings)


def weights_of(one):
    return torch.cat([p.detach().flatten() for p in one.policy.module.parameters()])


def scaled(samples, factor):
    """Samples with advantages times a factor."""
    return [s.with_column("advantages", factor * s.columns["advantages"]) for s in samples]


# --- minibatches
@pytest.mark.parametrize(
    ("n", "parts"), [(257, [86, 86, 85]), (256, [128, 128]), (129, [65, 64]), (100, [100])]
)
def test_minibatches_are_nearly_equal_and_the_tokens_of_each_share_a_weight_of_1(n, parts):
    weights_seen = []

    @policy_loss("test_linear", replace=True)
    def linear(tokens, config):  # whose gradient is the weight of each token
        tokens.logprobs.register_hook(lambda gradient: weights_seen.append(gradient.tolist()))
        return PolicyLoss(tokens.logprobs, tokens.logprobs > 0)

    one = learner(policy_loss="test_linear", minibatch_size=128, batching="padded", entropy_coef=0.0)
    assert update(one, single_tokens(n), 0)["gradient_steps"] == len(parts)
    assert [len(weights) for weights in weights_seen] == parts
    for weights, size in zip(weights_seen, parts, strict=True):
        assert weights == pytest.approx([1 / size] * size)


def single_tokens(n):
    """Samples of one trained token each."""
    names = "rollout_logprobs", "old_logprobs", "advantages"
    return [Sample(s.ids, s.trained[:1], {k: s.columns[k][:1] for k in names}) for s in random_samples(n, 7)]


# --- nothing pulls
BONUS = {"entropy_coef": 0.03, "entropy_target": 0.4}
PULLS = [
    ({}, 1.0, None, 1),  # an advantage
    (BONUS, 0.0, 0.1, 1),  # the bonus, below its target
    ({"kl": KLPenalty(0.1)}, 0.0, 5.0, 1),
    (BONUS, 0.0, 5.0, 0),  # above the target
    ({"kl": KLPenalty(0.1, "k1", "reward")}, 0.0, 5.0, 0),  # which is in the advantages, if anywhere
    ({"entropy_coef": 0.0}, 0.0, 0.1, 0),
    ({"entropy_target": None, "entropy_coef": 0.05}, 0.0, 0.1, 0),  # alone it would lift the entropy for ever
    ({"entropy_target": None, "entropy_coef": 0.05}, 1.0, 0.1, 1),
]


@pytest.mark.parametrize(("settings", "advantages", "entropy", "steps"), PULLS)
def test_without_anything_that_pulls_there_is_no_step_and_the_weights_are_those_of_before(
    settings, advantages, entropy, steps
):
    one = learner(**settings)
    samples = [s.with_column("reference_logprobs", s.columns["old_logprobs"] - 1) for s in contrast(ENGINE)]
    update(one, samples, 0)  # which Adam's momentum would go on with
    before = weights_of(one)
    row = update(one, scaled(samples, advantages), 1, entropy=entropy)
    assert row["gradient_steps"] == steps
    assert torch.equal(weights_of(one), before) == (steps == 0)


def test_a_critic_learns_where_no_token_has_an_advantage():
    critic = Critic(ENGINE)
    one = learner(critic, adv_estimator="gae", entropy_coef=0.0)
    before = torch.cat([p.detach().flatten() for p in critic.parameters()])
    assert update(one, scaled(random_samples(4, 2), 0), 0)["gradient_steps"] == 1
    assert not torch.equal(torch.cat([p.detach().flatten() for p in critic.parameters()]), before)


# --- the entropy bonus
@pytest.mark.parametrize(
    ("entropy", "bonus"), [(0.0, 0.04), (0.1, 0.03), (0.2, 0.02), (0.4, 0.0), (2.0, 0.0), (None, 0.04)]
)
def test_the_bonus_falls_evenly_to_0_at_the_target_and_is_what_the_update_uses(entropy, bonus):
    one = learner(entropy_coef=0.04, entropy_target=0.4)
    constant = learner(entropy_coef=bonus, entropy_target=None)
    row = update(one, contrast(ENGINE), 0, entropy=entropy)
    update(constant, contrast(ENGINE), 0)
    assert row["entropy_bonus"] == pytest.approx(bonus)
    torch.testing.assert_close(weights_of(one), weights_of(constant), atol=1e-6, rtol=0)
