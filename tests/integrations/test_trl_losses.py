"""What shoal's presets compute beside TRL's own GRPOTrainer, on one batch: skipped where TRL is not installed.

TRL's methods make the batch (padding, masks, reference log-probabilities, advantages), compute the loss and send it
back. Answers, rewards and the log-probabilities of the sampler are given to both. The options of each case make TRL
compute what the paper has; where TRL's default is another, that stands beside the option.
"""

import copy

import numpy as np
import pytest

pytest.importorskip("trl")
import torch
from datasets import Dataset
from tests.integrations.hand_made import (
    BUDGET,
    GROUP,
    assert_same,
    gradients_of,
    logprobs_of,
    make_answers,
    moved,
    padded,
    record,
    relative,
    shoals,
)
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.train.agent.algorithms.advantages import turn_advantages
from shoal.train.agent.config import compose_config
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.update import Learner, prepare_samples, update

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PAPERS = {
    "grpo": {
        "loss_type": "grpo",  # TRL: dapo
        "epsilon": 0.2,
        "beta": 0.04,  # TRL: 0
        "use_bias_correction_kl": False,  # TRL: True, the KL of each token times its ratio (arXiv:2512.02556)
        "scale_rewards": "group",
    },
    "dr_grpo": {
        "loss_type": "dr_grpo",  # TRL: dapo
        "epsilon": 0.2,
        "beta": 0.0,
        "scale_rewards": "none",  # TRL: group
        "max_completion_length": BUDGET,  # the constant that sums are divided by
    },
    "dapo": {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,  # TRL: epsilon
        "beta": 0.0,
        "scale_rewards": "group",
        "mask_truncated_completions": True,  # TRL: False
    },  # TRL has no dynamic sampling: it is given the groups that shoal keeps
    "gspo": {
        "loss_type": "grpo",  # TRL: dapo
        "importance_sampling_level": "sequence",  # TRL: token
        "epsilon": 3e-4,  # TRL: 0.2
        "epsilon_high": 4e-4,  # TRL: epsilon
        "beta": 0.0,
        "scale_rewards": "group",
    },
    "cispo": {
        "loss_type": "cispo",  # TRL: dapo
        "epsilon_high": 5.0,  # the largest weight, which is 1 + clip_ratio_high; TRL: epsilon
        "beta": 0.0,
        "scale_rewards": "group",
    },
}
NOISE = {"gspo": 5e-4, "cispo": 1.5}  # of log-probabilities, so that ratios are on both sides of the bounds


@pytest.fixture
def models(make_model, tokenizer, tmp_path):
    """The policy, and the reference beside it, which TRL reads from the folder that the policy names."""
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    return moved(reference), reference


def make_trainer(model, tokenizer, answers, folder, parts=1, **options):
    def rollout(prompts, trainer):
        return {
            "prompt_ids": [list(answer.prompt) for answer in answers],
            "completion_ids": [list(answer.response) for answer in answers],
            "logprobs": [answer.old.tolist() for answer in answers],
            "reward": [answer.reward for answer in answers],
        }

    settings = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": len(answers) // parts,
        "gradient_accumulation_steps": parts,
        "num_generations": GROUP,
        "max_completion_length": BUDGET,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    return GRPOTrainer(
        model=copy.deepcopy(model),
        reward_funcs=lambda reward, **rest: reward,
        args=GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": rows_of(answers)}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def rows_of(answers):
    return [[{"role": "user", "content": f"group {answer.group}"}] for answer in answers]


def batch_of(trainer, answers):
    trainer.model.train()
    return trainer._generate_and_score_completions([{"prompt": row} for row in rows_of(answers)])


def trls(trainer, answers, advantages, parts=1):
    """Loss and gradients, with these advantages and the log-probabilities that the answers were sampled with."""
    batch = batch_of(trainer, answers)
    batch["advantages"] = torch.tensor(advantages, dtype=torch.float32)
    batch["old_per_token_logps"] = padded([answer.old for answer in answers])
    trainer.current_gradient_accumulation_steps = parts
    total = 0.0
    for part in split_tensor_dict(batch, parts):
        loss = trainer.compute_loss(trainer.model, part)
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(trainer.model)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("preset", PAPERS)
def test_loss_and_gradient_of_a_preset_are_those_of_trl(preset, parts, models, tokenizer, tmp_path):
    model, reference = models
    answers = make_answers(model, len(tokenizer), NOISE.get(preset, 0.3))
    given = answers[:-GROUP] if preset == "dapo" else answers  # the rewards of the last group are equal
    trainer = make_trainer(model, tokenizer, given, tmp_path, parts, **PAPERS[preset])
    loss, gradients = trls(trainer, given, relative(given, scale=preset != "dr_grpo"), parts)
    metrics, found, _ = shoals(preset, model, reference, tokenizer, answers)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["gradient_steps"] == 1
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert_same(found, gradients)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_temperature_divides_the_scores_in_both(temperature, models, tokenizer, tmp_path):
    model, reference = models
    answers = make_answers(model, len(tokenizer), 0.3, temperature)
    trainer = make_trainer(model, tokenizer, answers, tmp_path, temperature=temperature, **PAPERS["grpo"])
    loss, gradients = trls(trainer, answers, relative(answers))
    word = f"agent_proxy.temperature={temperature}"
    metrics, found, _ = shoals("grpo", model, reference, tokenizer, answers, word)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert_same(found, gradients)


def test_the_reference_and_the_masks_are_those_of_trl(models, tokenizer, tmp_path):
    model, reference = models
    answers = make_answers(model, len(tokenizer), 0.3)
    options = PAPERS["grpo"] | {"mask_truncated_completions": True}
    batch = batch_of(make_trainer(model, tokenizer, answers, tmp_path, **options), answers)
    _, _, samples = shoals("grpo", model, reference, tokenizer, answers)
    for i, (answer, sample) in enumerate(zip(answers, samples, strict=True)):
        found = batch["ref_per_token_logps"][i][: len(answer.response)]
        if not answer.cut:  # TRL scores nothing of these
            np.testing.assert_allclose(found, sample.columns["reference_logprobs"], rtol=1e-6)
    _, _, kept = shoals("dapo", model, reference, tokenizer, answers)
    trained = [answer for answer in answers[:-GROUP] if not answer.cut]
    assert [len(sample.trained) for sample in kept] == [len(answer.response) for answer in trained]
    assert [int(n) for n in batch["completion_mask"].sum(1)] == [
        0 if answer.cut else len(answer.response) for answer in answers
    ]


class Kept(TrainerCallback):
    """The weights after each step, as one vector, and what was logged of it."""

    def __init__(self):
        self.weights, self.logged = [], []

    def on_step_end(self, args, state, control, model, **rest):
        self.weights.append(flat(model))

    def on_log(self, args, state, control, logs, **rest):
        self.logged.append(logs)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in trained_parameters(model)])


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_weights_after_several_steps_are_those_of_trl(preset, models, tokenizer, tmp_path):
    """Both take 5 steps of Adam, each with its own weights, on answers to which the rewards are given.

    Rewards are large, so that the 1e-4 that TRL adds to their deviation is nothing. A weight whose gradient is only
    rounding moves up or down by chance, by a whole learning rate as all others do in the first step: such are few.
    """
    rate, steps = 1e-3, 5
    model, reference = copy.deepcopy(models[0]), models[1]
    answers = [a._replace(reward=1e3 * a.reward) for a in make_answers(model, len(tokenizer), 0.0)]
    kept = Kept()
    trainer = make_trainer(
        model, tokenizer, answers, tmp_path, learning_rate=rate, lr_scheduler_type="constant", max_steps=steps,
        max_grad_norm=0.5, logging_steps=1, save_strategy="no", shuffle_dataset=False, disable_tqdm=True,
        **PAPERS[preset],
    )  # fmt: skip
    trainer.add_callback(kept)
    trainer.train()
    words = [f"algorithm={preset}", f"algorithm.learning_rate={rate}", "algorithm.max_grad_norm=0.5"]
    config = compose_config("base", [*words, f"agent_proxy.max_tokens={BUDGET}"])
    optimizer = split_optimizer(trained_parameters(model), None, rate, rate, 0.0)
    networks = [policy_of(HuggingFaceEngine(one, tokenizer)) for one in (model, reference)]
    held = networks[1] if config.algorithm.kl.coef else None
    learner = Learner(
        networks[0], optimizer, config.algorithm, config.agent_proxy, reference=held, token_budget=BUDGET
    )
    begin = flat(model)
    for step in range(steps):
        with torch.no_grad():
            now = [a._replace(old=logprobs_of(model, a.prompt, a.response)) for a in answers]
        metrics = update(learner, prepare_samples([record(a) for a in now], learner), step)
        assert metrics["grad_norm"] == pytest.approx(kept.logged[step]["grad_norm"], rel=1e-4)
        gaps = (flat(model) - kept.weights[step]).abs()
        assert float((flat(model) - begin).abs().mean()) > 0.5 * rate
        assert float(gaps.quantile(0.99)) <= 1e-6, step
        assert float(gaps.mean()) <= 1e-6, step


def spread(rewards):
    """The standard deviation with Bessel's correction, as TRL and shoal have it."""
    return float(np.std(rewards, ddof=1))


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_advantages_of_trl_and_of_shoal_differ_by_what_is_written_here(scale, models, tokenizer, tmp_path):
    """TRL divides by a standard deviation and 1e-4, shoal by that alone.

    `batch` is no estimator of shoal: TRL divides by the deviation of all rewards, `reinforce_pp_baseline`
    (REINFORCE++-baseline, arXiv:2501.03262) by that of what is left when the mean of its group is taken off each.
    """
    model, _ = models
    answers = make_answers(model, len(tokenizer), 0.0)
    trainer = make_trainer(model, tokenizer, answers, tmp_path, scale_rewards=scale)
    found = batch_of(trainer, answers)["advantages"].numpy()
    preset = {"group": "grpo", "none": "dr_grpo", "batch": "grpo"}[scale]
    words = ["algorithm.adv_estimator=reinforce_pp_baseline"] if scale == "batch" else []
    config = compose_config("base", [f"algorithm={preset}", *words])
    played = [record(answer) for answer in answers]
    ours = np.array([own[0] for own in turn_advantages(played, config.algorithm, config.agent_proxy)])
    rewards = np.array([answer.reward for answer in answers]).reshape(-1, GROUP)
    if scale == "group":
        each = np.repeat([spread(group) for group in rewards], GROUP)
        ours = ours * each / (each + 1e-4)
    elif scale == "batch":
        centred = rewards - rewards.mean(1, keepdims=True)
        ours = ours * spread(centred) / (spread(rewards) + 1e-4)
    assert np.abs(ours).max() > 0.5
    np.testing.assert_allclose(found, ours, rtol=1e-6, atol=1e-6)
