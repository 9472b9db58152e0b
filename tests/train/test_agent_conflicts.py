import pytest

from shoal.core.errors import ConfigError
from shoal.train.composition import compose_config

HUGGING = ["engine.name=huggingface", "engine.model=somewhere"]
CONFLICTS = {
    "train_last_layers=2 would do nothing": [*HUGGING, "model.lora.rank=4", "engine.train_last_layers=2"],
    "engine.model=smollm2 has no effect on engine.name=tiny": ["engine.model=smollm2"],
    "engine.train_last_layers=1 has no effect on engine.name=tiny": ["engine.train_last_layers=1"],
    "engine.dtype=bfloat16 has no effect on engine.name=tiny": ["engine.dtype=bfloat16"],
    "gradient_checkpointing=true has no effect": ["algorithm.gradient_checkpointing=true"],
    "dual_clip=3.0 has no effect with policy_loss=gspo": ["algorithm.dual_clip=3", "algorithm.policy_loss=gspo"],
    "loss_constant=8.0 has no effect with loss_aggregation=token_mean": ["algorithm.loss_constant=8"],
    "step_advantage_weight=0.5 is gigpo's": ["algorithm.step_advantage_weight=0.5"],
    "token_lambda=0.9 is bi_level_gae's": ["algorithm.critic.token_lambda=0.9", "algorithm.adv_estimator=gae"],
    "max_num_gen_batches=3 has no effect with": [
        "algorithm.filter_groups.max_num_gen_batches=3", "algorithm.filter_groups.enable=false",
    ],
    "method=mean has no effect with adv_estimator=rloo": [
        "agent_proxy.reward_normalization.method=mean", "algorithm.adv_estimator=rloo",
    ],
    "grouping=batch has no effect with adv_estimator=gae": [
        "agent_proxy.reward_normalization.grouping=batch", "algorithm.adv_estimator=gae",
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", CONFLICTS)
def test_settings_that_would_be_ignored_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        compose_config("demo", CONFLICTS[message])


@pytest.mark.parametrize("message", [m for m in CONFLICTS if len(CONFLICTS[m]) > 1])
def test_each_of_two_such_settings_is_fine_with_the_other_left_out(message):
    overrides = CONFLICTS[message]
    if overrides[:2] == HUGGING:
        for kept in overrides[2:]:
            compose_config("demo", [*HUGGING, kept])
    elif "token_lambda" in message:
        compose_config("demo", [overrides[0], "algorithm.adv_estimator=bi_level_gae"])
    else:
        for kept in overrides:
            compose_config("demo", [kept])
