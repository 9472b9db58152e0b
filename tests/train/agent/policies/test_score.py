"""Scores are made in parts where they would not fit in memory, and gradients are summed in float32."""

import numpy as np
import pytest
import torch
from tests.samplers.huggingface.test_huggingface import make_engine
from tests.train.agent.test_update import ENGINE, contrast, learner_of, random_samples

from shoal.train.agent.batch.packing import micro_batches
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies import policy as policies
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import score
from shoal.train.agent.update import Learner, Totals, gradient_step, token_loss, update


def scored(policy, micro, how, temperature=0.7):
    policy.module.zero_grad()
    found = score(policy, micro, temperature, entropy=how)
    total = found.logprobs.sum() + (0 if found.entropy is None else 0.3 * found.entropy.sum())
    total.backward()
    gradients = [p.grad.clone() for p in policy.module.parameters() if p.grad is not None]
    return found.logprobs.detach(), None if found.entropy is None else found.entropy.detach(), gradients


@pytest.mark.parametrize("how", ["none", "reported", "trained"])
@pytest.mark.parametrize("make", [lambda: ENGINE.copy(), lambda: policy_of(make_engine())])
def test_parts_of_scores_give_what_all_of_them_give(monkeypatch, make, how):
    policy = make()
    (micro,) = micro_batches(random_samples(9, 4), 10**6, policy.pad_id, "cpu")
    whole = scored(policy, micro, how)
    vocabulary = policy.head.weight.shape[0]
    monkeypatch.setattr(policies, "SCORES", 3 * vocabulary + 1)
    made = []
    policy.head.register_forward_hook(lambda *call: made.append(len(call[2])))
    parts = scored(policy, micro, how)
    assert set(made[:-1]) <= {3, len(micro.targets) % 3}
    assert max(made) == 3
    for before, after in zip(whole, parts, strict=True):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("starts", ["none", "packed", "prefixes"])
def test_the_last_layer_of_the_places_that_are_scored_is_that_of_all_places(starts, checkpointing):
    """Few places a row, one of them none, beside all hidden states; and the gradients of both."""
    policy, draw = ENGINE.copy(), torch.Generator().manual_seed(3)
    policy.module.train(checkpointing)
    ids = torch.randint(0, policy.module.vocabulary, (5, 24), generator=draw)
    where = torch.rand(5, 24, generator=draw) < 0.2
    where[:, 0] = where[2] = False
    assert 0 < int(where.sum(1).max()) * 2 <= 24
    start = torch.zeros(5, 1, dtype=torch.int64)
    if starts != "none":
        start = torch.where(torch.arange(24) < 9, 0, 9).expand(5, 24)
    if starts == "prefixes":  # the second branch goes on from the first five places of the row
        start = torch.stack([start, torch.zeros_like(start), torch.where(start == 9, 5, 0)])
    given = None if starts == "none" else start
    found, gradients = [], []
    for hidden in (
        policy.hidden(ids, torch.full((5,), 24), where, given),
        policy.module.hidden(ids, start)[:, :-1][where[:, 1:]],
    ):
        policy.module.zero_grad()
        (hidden * torch.linspace(-1, 1, hidden.shape[1])).square().sum().backward()
        found.append(hidden.detach())
        gradients.append([parameter.grad for parameter in policy.module.blocks.parameters()])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    for few, all_of_it in zip(*gradients, strict=True):
        torch.testing.assert_close(few, all_of_it, atol=1e-5, rtol=1e-4)


def test_log_probabilities_and_entropy_are_those_of_a_float64_softmax():
    (micro,) = micro_batches(random_samples(4, 2), 10**6, ENGINE.pad_id, "cpu")
    logits = (
        ENGINE.logits(micro.ids, micro.lengths, micro.where, micro.starts).detach().double().numpy() / 0.7
    )
    odds = np.exp(logits - logits.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    found = score(ENGINE, micro, 0.7, entropy="reported")
    expected = np.log(odds[np.arange(len(odds)), micro.targets.numpy()])
    np.testing.assert_allclose(found.logprobs.detach(), expected, atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(odds * np.log(odds)).sum(1), atol=1e-5)
    assert not found.entropy.requires_grad
    assert score(ENGINE, micro, 0.7).entropy is None


@pytest.mark.parametrize(("coefficient", "asked"), [(0.0, True), (0.0, False), (0.02, False)])
def test_the_entropy_is_computed_only_when_it_is_trained_or_told(monkeypatch, coefficient, asked):
    engine, computed = ENGINE.copy(), []
    monkeypatch.setattr(policies, "entropy_of", lambda s: computed.append(1) or s.sum(-1))
    row = update(learner_of(engine, entropy_coef=coefficient, log_entropy=asked), contrast(engine), 0)
    assert ("entropy" in row) == bool(computed) == (asked or coefficient != 0)


# --- gradients of few bits
def half_policy():
    policy = policy_of(make_engine())
    policy.module.to(torch.bfloat16)
    return policy


def test_gradients_of_micro_batches_are_summed_in_float32():
    """Each micro-batch's own gradient, read from a network of its own, is summed here in float64."""
    samples = random_samples(24, 7)
    passes, policy = [], half_policy()
    optimizer = split_optimizer(trained_parameters(policy.module), None, 0.0, 0.0, 0.0)
    optimizer.register_step_pre_hook(lambda *_: passes.append([p.grad.clone() for p in optimizer.stepped[0]]))
    config = Algorithm(
        micro_batch_tokens=1,
        batching="padded",
        max_grad_norm=0,
        loss_aggregation="token_mean",
        kl=KLPenalty(0.0),
    )
    gradient_step(Learner(policy, optimizer, config, AgentProxy()), samples, Totals())
    own = half_policy()
    tokens = sum(len(sample.trained) for sample in samples)
    sums = [np.zeros(p.shape) for p in trained_parameters(own.module)]
    for sample in samples:
        own.module.zero_grad()
        weighted = sample.with_column("weights", np.full(len(sample.trained), 1 / tokens))
        (micro,) = micro_batches([weighted], 1, own.pad_id, "cpu")
        token_loss(own, micro, config, 1.0, Totals()).backward()
        for total, parameter in zip(sums, trained_parameters(own.module), strict=True):
            total += 0.0 if parameter.grad is None else parameter.grad.double().numpy()
    for total, found in zip(sums, passes[0], strict=True):
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, total, atol=1e-6 * max(np.abs(total).max(), 1e-12))
