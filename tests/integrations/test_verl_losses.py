"""What shoal's presets compute beside verl's own functions, on one batch: skipped where verl is not installed.

verl's functions give the advantages and the loss of padded tensors, as its workers call them; the gradient goes back
through plain passes of the same weights. The options of each case make verl compute what the paper has; where verl's
default is another, that stands beside the option.
"""

import copy

import numpy as np
import pytest

pytest.importorskip("verl")
import torch
from tests.integrations.hand_made import (
    BUDGET,
    GROUP,
    assert_same,
    gradients_of,
    logprobs_of,
    make_answers,
    moved,
    padded,
    shoals,
)

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig

from shoal.train.agent.algorithms.advantages import group_relative
from shoal.train.agent.algorithms.losses import kl_penalty, value_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PAPERS = {
    "grpo": {
        "loss_agg_mode": "seq-mean-token-mean",  # verl: token-mean
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "use_kl_loss": True,  # verl: False
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.04,  # verl: 0.001
    },
    "dr_grpo": {
        "loss_agg_mode": "seq-mean-token-sum-norm",  # verl: token-mean
        "loss_scale_factor": BUDGET,  # verl: the width of the batch
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
    },
    "dapo": {
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,  # verl: 0.2
    },
    "gspo": {
        "loss_mode": "gspo",  # verl: vanilla
        "loss_agg_mode": "seq-mean-token-mean",  # verl: token-mean
        "clip_ratio_low": 3e-4,  # verl: 0.2
        "clip_ratio_high": 4e-4,  # verl: 0.2
    },
    "cispo": {
        "loss_mode": "cispo",  # verl: vanilla
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 1.0,  # verl: 0.2
        "clip_ratio_high": 4.0,  # verl: 0.2
    },
}
NOISE = {"gspo": 5e-4, "cispo": 1.5}  # of log-probabilities, so that ratios are on both sides of the bounds


@pytest.fixture
def models(make_model, tokenizer):
    """The policy and the reference."""
    reference = make_model(tokenizer)
    return moved(reference), reference


def masks_of(answers):
    return padded([torch.ones(len(answer.response)) for answer in answers])


def rewards_of(answers):
    """`[answers, tokens]`: paid at the last token."""
    return padded([torch.tensor([0.0] * (len(a.response) - 1) + [a.reward]) for a in answers])


def groups_of(answers):
    return np.array([answer.group for answer in answers], dtype=object)


def scored(model, answers):
    return padded([logprobs_of(model, answer.prompt, answer.response) for answer in answers])


def config_of(answers, **options):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=len(answers),
        clip_ratio_c=1e9,  # verl: 3.0, a bound on the loss that none of these papers has
        **options,
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor  # as `ppo_loss` does
    return config


def verls(model, reference, answers, advantages, mask, loss_mode="vanilla", **options):
    """Loss and gradients, put together as in verl's `ppo_loss`."""
    model, config = copy.deepcopy(model), config_of(answers, **options)
    now = scored(model, answers)
    loss, _ = core_algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=padded([answer.old for answer in answers]),
        log_prob=now,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    if config.use_kl_loss:
        with torch.no_grad():
            known = scored(reference, answers)
        penalty = core_algos.kl_penalty(now, known, config.kl_loss_type)
        kl = core_algos.agg_loss(penalty, mask, config.loss_agg_mode, **config.global_batch_info)
        loss = loss + config.kl_loss_coef * kl
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.parametrize("preset", PAPERS)
def test_loss_and_gradient_of_a_preset_are_those_of_verl(preset, models, tokenizer):
    model, reference = models
    answers, options = make_answers(model, len(tokenizer), NOISE.get(preset, 0.3)), PAPERS[preset]
    mask = masks_of(answers)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        rewards_of(answers),
        mask,
        groups_of(answers),
        epsilon=0.0,  # verl: 1e-6, added to the standard deviation
        norm_adv_by_std_in_grpo=preset != "dr_grpo",  # verl: True
    )
    advantages = advantages.nan_to_num()  # 0 / 0 in the last group, whose rewards are equal
    if preset == "dapo":  # the parts that are not in verl's loss: dynamic sampling, and no cut answers
        mask = mask * torch.tensor([float(a.group < 3 and not a.cut) for a in answers])[:, None]
    loss, gradients = verls(model, reference, answers, advantages, mask, **options)
    metrics, found, _ = shoals(preset, model, reference, tokenizer, answers)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert_same(found, gradients)


def penalised(model, reference, answers, coef):
    """Rewards of tokens, less the KL as verl's `apply_kl_penalty` takes it off."""
    with torch.no_grad():
        known = scored(reference, answers)
    penalty = core_algos.kl_penalty(padded([answer.old for answer in answers]), known, "kl")
    return rewards_of(answers) - coef * penalty * masks_of(answers)


def test_loss_and_gradient_of_reinforce_pp_are_those_of_verl(models, tokenizer):
    model, reference = models
    answers = make_answers(model, len(tokenizer), 0.3)
    mask = masks_of(answers)
    advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        penalised(model, reference, answers, 0.01),  # use_kl_in_reward; verl: False, and 0.001
        mask,
        config=AlgoConfig(gamma=1.0),
    )
    loss, gradients = verls(model, reference, answers, advantages, mask)  # vanilla, token-mean, 0.2
    metrics, found, _ = shoals("reinforce_pp", model, reference, tokenizer, answers)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert_same(found, gradients)


def test_gradient_of_rloo_is_that_of_verl_where_the_weights_are_those_that_sampled(models, tokenizer):
    """verl has a ratio in the place of the log-probability, whose gradient is the same where it is 1."""
    model, reference = models
    answers = make_answers(model, len(tokenizer), 0.0)
    mask = masks_of(answers)
    advantages, _ = core_algos.compute_rloo_outcome_advantage(
        penalised(model, reference, answers, 0.03), mask, groups_of(answers)
    )
    _, gradients = verls(
        model, reference, answers, advantages, mask, loss_agg_mode="seq-mean-token-sum"
    )  # verl: token-mean
    _, found, _ = shoals("rloo", model, reference, tokenizer, answers)
    assert_same(found, gradients)


def test_advantages_of_grpo_differ_from_verls_by_a_millionth_in_the_deviation(models, tokenizer):
    answers = make_answers(models[0], len(tokenizer), 0.0)
    found, _ = core_algos.compute_grpo_outcome_advantage(
        rewards_of(answers).double(), masks_of(answers).double(), groups_of(answers)
    )
    rewards = np.array([answer.reward for answer in answers]).reshape(-1, GROUP)
    spread = np.repeat(rewards.std(1, ddof=1), GROUP)
    expected = group_relative(rewards.ravel(), groups_of(answers)) * spread / (spread + 1e-6)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_estimators_of_the_kl_and_their_gradients_are_those_of_verl(name):
    """verl bounds what k3 finds at 10, shoal does not: both are the same below."""
    generator = torch.Generator().manual_seed(3)
    known, ours = 0.5 * torch.randn(2, 200, generator=generator, dtype=torch.float64)
    ours.requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    kl_penalty(ours, known, name).sum().backward()
    expected = core_algos.kl_penalty(theirs, known, name)
    assert float(expected.detach().max()) < 10
    expected.sum().backward()
    torch.testing.assert_close(kl_penalty(ours, known, name), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_the_clipped_loss_of_a_critic_is_that_of_verl(models, tokenizer):
    answers = make_answers(models[0], len(tokenizer), 0.0)
    mask = masks_of(answers)
    rng = np.random.default_rng(3)
    now, old, returns = (torch.from_numpy(rng.normal(size=mask.shape)) for _ in range(3))
    expected, clipped = core_algos.compute_value_loss(now, returns, old, mask, cliprange_value=0.5)
    assert 0 < float(clipped) < 1
    found = value_loss(now, old, returns, 0.5)[mask.bool()].mean()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
