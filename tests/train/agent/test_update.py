import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.algorithms.losses import aggregation_weights
from shoal.train.agent.batch.packing import micro_batches, token_values
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty, RolloutCorrection
from shoal.train.agent.config import Critic as Settings
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import Critic, score
from shoal.train.agent.update import Learner, Totals, critic_loss, gradient_step, token_loss

ENGINE = policy_of(TinyEngine(["Up"], TinyShape(width=16, layers=1, heads=2, context=64), seed=1))
CRITIC = Critic(ENGINE)
NO_KL = KLPenalty(0.0)
LOSSES = [
    Algorithm(kl=NO_KL, loss_aggregation="token_mean"),
    Algorithm(kl=NO_KL, policy_loss="gspo", clip_ratio_low=0.1, clip_ratio_high=0.1),
    Algorithm(kl=NO_KL, policy_loss="cispo", loss_aggregation="sequence_mean"),
    Algorithm(kl=NO_KL, dual_clip=2.0, loss_aggregation="constant", loss_constant=8.0, entropy_coef=0.03),
    Algorithm(kl=KLPenalty(0.1, "k3"), adv_estimator="gae"),
]


def random_samples(n, seed):
    """Rows with trained stretches of one or two turns and every column that a loss may read."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(n):
        length = int(rng.integers(4, 20))
        places = np.sort(rng.choice(np.arange(1, length), int(rng.integers(1, length)), replace=False))
        near = rng.normal(-4, 0.3, len(places))
        columns = {
            "rollout_logprobs": near,
            "old_logprobs": near,
            "reference_logprobs": near + rng.normal(0, 0.2, len(places)),
            "advantages": rng.normal(size=len(places)),
            "values": rng.normal(size=len(places)),
            "returns": rng.normal(size=len(places)),
            "correction": rng.uniform(0.5, 1.5, len(places)),
        }
        as_floats = {name: column.astype(np.float32) for name, column in columns.items()}
        samples.append(Sample(tuple(rng.integers(6, 60, length).tolist()), places, as_floats))
    return samples


def gradient(samples, config, max_tokens, batching="padded"):
    ENGINE.module.zero_grad()
    CRITIC.zero_grad()
    totals = Totals()
    weights = aggregation_weights(
        [len(s.trained) for s in samples], config.loss_aggregation, config.loss_constant
    )
    weighted = [s.with_column("weights", w) for s, w in zip(samples, weights, strict=True)]
    for micro in micro_batches(weighted, max_tokens, ENGINE.pad_id, "cpu", batching):
        loss = token_loss(ENGINE, micro, config, 1.0, totals)
        (loss + critic_loss(CRITIC, micro, config, totals)).backward()
    parameters = [*ENGINE.module.parameters(), *CRITIC.parameters()]
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), totals


@pytest.mark.parametrize("config", LOSSES)
@given(
    st.integers(1, 12),
    st.integers(1, 300),
    st.integers(0, 1000),
    st.sampled_from(["padded", "packed"]),
)
@settings(max_examples=20)
def test_the_gradient_does_not_depend_on_micro_batches_order_padding_or_packing(
    config, n, max_tokens, seed, batching
):
    samples = random_samples(n, seed)
    whole, totals = gradient(samples, config, 10**9, "padded")
    order = np.random.default_rng(seed).permutation(n)
    split, split_totals = gradient([samples[i] for i in order], config, max_tokens, batching)
    torch.testing.assert_close(split, whole, atol=2e-6, rtol=1e-4)
    assert split_totals.tokens == totals.tokens == sum(len(s.trained) for s in samples)
    assert split_totals.loss == pytest.approx(totals.loss, abs=1e-5)
    assert split_totals.kl_to_reference == pytest.approx(totals.kl_to_reference, abs=1e-3)


def test_the_loss_and_what_is_told_are_those_of_a_loop_over_tokens():
    samples = random_samples(5, 3)
    config = Algorithm(
        kl=KLPenalty(0.1, "k2"),
        rollout_correction=RolloutCorrection("truncate"),
        adv_estimator="gae",
        entropy_coef=0.02,
        loss_aggregation="token_mean",
        clip_ratio_high=0.28,
        dual_clip=1.2,
        critic=Settings(value_clip=0.5),
    )
    expected, n_tokens = Counter(), sum(len(s.trained) for s in samples)
    for sample in samples:
        hidden = ENGINE.module.hidden(torch.tensor([sample.ids]), torch.zeros(1, dtype=torch.int64))
        scores = ENGINE.module.head(hidden)[0].log_softmax(-1).detach()
        for k, place in enumerate(sample.trained):
            row = scores[place - 1]
            column = {name: float(values[k]) for name, values in sample.columns.items()}
            gap = float(row[sample.ids[place]]) - column["old_logprobs"]
            surrogate = min(
                math.exp(gap) * column["advantages"],
                min(max(math.exp(gap), 0.8), 1.28) * column["advantages"],
            )
            if column["advantages"] < 0:
                surrogate = max(surrogate, 1.2 * column["advantages"])
            apart = float(row[sample.ids[place]]) - column["reference_logprobs"]
            to_reference = apart**2 / 2
            entropy = float(-(row.exp() * row).sum())
            near = column["values"] - max(-0.5, min(column["values"], 0.5))  # the critic says 0 as yet
            expected["loss"] += 0.1 * to_reference - surrogate * column["correction"] - 0.02 * entropy
            expected["entropy"] += entropy
            expected["kl_to_rollout"] += math.exp(gap) - 1 - gap
            # an estimate of the KL, whatever is trained
            expected["kl_to_reference"] += math.exp(-apart) - 1 + apart
            expected["value_loss"] += max(column["returns"] ** 2, (near - column["returns"]) ** 2) / 2
            expected["rollout_correction_mean"] += column["correction"]
    _, totals = gradient(samples, config, 64)
    told = totals.metrics(config, config.kl.coef, critic=True)
    assert {name: told[name] for name in expected} == pytest.approx(
        {name: total / n_tokens for name, total in expected.items()}, rel=1e-5
    )
    assert told["trained_tokens"] == n_tokens


def contrast(engine):
    """Two one-token samples, the first good and the second bad, with their true log-probs."""
    samples = []
    for token, advantage in ((9, 1.0), (10, -1.0)):
        sample = Sample((7, 8, token), np.array([2]), {"advantages": np.float32([advantage])})
        found = token_values([sample], lambda micro: score(engine, micro, 1.0).logprobs, 100, 0, "cpu")[0]
        for name in ("rollout_logprobs", "old_logprobs"):
            sample = sample.with_column(name, found)
        samples.append(sample)
    return samples


def learner_of(engine, critic=None, *, log_entropy=True, **settings):
    """One without a KL penalty unless the settings of its algorithm say otherwise."""
    optimizer = split_optimizer(trained_parameters(engine.module), critic, 0.01, 0.01, 0.0)
    algorithm = Algorithm(**{"kl": NO_KL} | settings)
    return Learner(engine, optimizer, algorithm, AgentProxy(), critic, log_entropy=log_entropy)


def test_frozen_parameters_stay_as_they_are():
    engine = ENGINE.copy()
    engine.module.embedding.requires_grad_(False)
    before = engine.module.embedding.weight.clone()
    gradient_step(learner_of(engine), contrast(engine), Totals())
    assert torch.equal(engine.module.embedding.weight, before)


@pytest.mark.parametrize(
    ("loss", "share"),
    # bounds 0.9 and 1.1; ratios of the tokens of three samples: (2, 0.5) with geometric mean 1, (3, 3), and (0.5)
    [("clip", 5 / 5), ("gspo", 3 / 5), ("cispo", 3 / 5)],
)
def test_the_clip_fraction_is_of_the_ratio_that_the_loss_bounds(loss, share):
    config = Algorithm(policy_loss=loss, clip_ratio_low=0.1, clip_ratio_high=0.1, kl=NO_KL)
    bare = [Sample((7, 8, 9), np.array([1, 2]), {}), Sample((8, 9, 7), np.array([1, 2]), {})]
    bare.append(Sample((9, 7), np.array([1]), {}))
    totals = Totals()
    for sample, ratios in zip(bare, ([2, 0.5], [3, 3], [0.5]), strict=True):
        (micro,) = micro_batches([sample], 99, ENGINE.pad_id, "cpu")
        now = score(ENGINE, micro, 1.0).logprobs.detach().numpy()
        columns = {
            "old_logprobs": now - np.log(ratios),
            "advantages": np.ones(len(ratios)),
            "weights": now * 0,
        }
        filled = sample
        for name, column in columns.items():
            filled = filled.with_column(name, column)
        filled = filled.with_column("rollout_logprobs", columns["old_logprobs"])
        (micro,) = micro_batches([filled], 99, ENGINE.pad_id, "cpu")
        token_loss(ENGINE, micro, config, 1.0, totals)
    assert totals.metrics(config)["clip_fraction"] == pytest.approx(share)
