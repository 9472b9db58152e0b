import pytest
from omegaconf import OmegaConf

from shoal.core.errors import ConfigError
from shoal.train.agent.algorithms.conflicts import refuse_without_signal
from shoal.train.agent.config import AgentConfig, compose_config
from shoal.train.agent.trainer import AgentTrainer

CONFLICTS = {
    "engine.model=smollm2 has no effect on engine.name=tiny": ["engine.model=smollm2"],
    "engine.train_last_layers=1 has no effect on engine.name=tiny": ["engine.train_last_layers=1"],
    "engine.dtype=bfloat16 has no effect on engine.name=tiny": ["engine.dtype=bfloat16"],
    "model.lora.rank=4 needs a model of transformers, got engine.name=tiny": ["model.lora.rank=4"],
    "dual_clip=3.0 has no effect with policy_loss=gspo": ["algorithm.dual_clip=3", "algorithm.policy_loss=gspo"],
    "clip_ratio_low=0.1 has no effect with policy_loss=cispo": [
        "algorithm.clip_ratio_low=0.1", "algorithm.policy_loss=cispo",
    ],
    "clip_ratio_low=0.1 has no effect with policy_loss=likelihood": [
        "algorithm.clip_ratio_low=0.1", "algorithm.policy_loss=likelihood",
    ],
    "floor=0.5 has no effect with method=truncate": [
        "algorithm.rollout_correction={floor: 0.5, method: truncate}",
    ],
    "loss_constant=8.0 has no effect with loss_aggregation=sequence_mean": ["algorithm.loss_constant=8"],
    "loss_constant=budget has no effect with": ["algorithm.loss_constant=budget"],
    "warmup=2 has no effect with adv_estimator=grpo, which has no critic": ["algorithm.critic.warmup=2"],
    "step_advantage_weight=0.5 is read by gigpo alone": ["algorithm.step_advantage_weight=0.5"],
    "max_num_gen_batches=3 has no effect with": [
        "algorithm.filter_groups.max_num_gen_batches=3", "algorithm.filter_groups.enable=false",
    ],
    "method=mean has no effect with adv_estimator=rloo": [
        "agent_proxy.reward_normalization.method=mean", "algorithm.adv_estimator=rloo",
    ],
    "grouping=batch has no effect with adv_estimator=gae": [
        "agent_proxy.reward_normalization.grouping=batch", "algorithm.adv_estimator=gae",
    ],
    "statistics=steps has no effect with agent_proxy.reward_normalization.method=identity": [
        "algorithm.gigpo.statistics=steps", "agent_proxy.reward_normalization.method=identity",
        "algorithm.adv_estimator=gigpo",
    ],
    "teacher=None and adv_estimator=distillation do not fit": ["algorithm.adv_estimator=distillation"],
    "teacher=somewhere and adv_estimator=grpo do not fit": ["algorithm.teacher=somewhere"],
    "only_expert needs actions of the expert: set warmup.expert above 0": ["warmup.only_expert=true"],
    "trainer.lag=1 plays beside learning, on hosts: set agent_proxy.use_par": ["trainer.lag=1"],
    "engine.copy=process has no effect with trainer.lag=0": ["engine.copy=process"],
    "kl.estimator=k1 with kl.coef=0.04 pulls nowhere": ["algorithm.kl.estimator=k1"],
}  # fmt: skip


def read(*words):
    """The config of these settings, without Hydra, which takes far longer."""
    return AgentConfig.read(OmegaConf.to_container(OmegaConf.from_dotlist(list(words))))


@pytest.mark.parametrize("message", CONFLICTS)
def test_settings_that_would_be_ignored_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        read(*CONFLICTS[message])


@pytest.mark.parametrize("message", [m for m in CONFLICTS if len(CONFLICTS[m]) > 1])
def test_each_of_two_such_settings_is_fine_with_the_other_left_out(message):
    *words, last = CONFLICTS[message]
    if "statistics" in message:
        for kept in words:
            read(kept, last)
    else:
        for kept in (*words, last):
            read(kept)


OUT_OF_RANGE = [
    "algorithm.gamma=2", "trainer.iterations=0",
    "algorithm.clip_ratio_low=-0.1", "algorithm.clip_ratio_low=2", "algorithm.clip_ratio_high=-1",
    "algorithm.weight_decay=-1", "algorithm.entropy_coef=.nan", "algorithm.kl.coef=-1",
    "algorithm.critic.gae_lambda=2", "algorithm.critic.learning_rate=0",
    "algorithm.critic.value_clip=0", "algorithm.critic.warmup=-1", "algorithm.rollout_correction.cap=0.5",
    "algorithm.filter_groups.max_num_gen_batches=0", "algorithm.learning_rate=.inf",
    "agent_proxy.format_penalty=-1", "agent_proxy.temperature=-1", "agent_proxy.max_tokens=0",
    "agent_proxy.max_turn=0", "warmup.steps=-1", "warmup.batch_size=0", "warmup.learning_rate=0",
    "warmup.expert=2", "warmup.max_grad_norm=-1", "algorithm.max_grad_norm=-1", "algorithm.rollout_correction.floor=2",
    "trainer.stop_at_success=2", "trainer.stop_at_success=0", "model.lora.alpha=0", "engine.replicas.timeout=0",
    "algorithm.rollout_filter_ratio=0", "agent_proxy.top_p=0", "trainer.lag=-1",
]  # fmt: skip


@pytest.mark.parametrize("override", OUT_OF_RANGE)
def test_a_value_that_would_undo_what_it_sets_is_refused_by_name(override):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"{key.rpartition('.')[2]} .*got {value.lstrip('.')}"):
        read(override)


def test_values_at_the_edge_of_what_makes_sense_are_taken():
    read(
        "algorithm.clip_ratio_low=1", "algorithm.clip_ratio_high=0", "algorithm.critic.gae_lambda=0",
        "algorithm.critic.value_clip=null", "algorithm.rollout_correction.cap=1", "agent_proxy.temperature=0",
        "warmup.steps=0", "trainer.stop_at_success=1", "algorithm.entropy_coef=-0.1",
        "algorithm.kl={estimator: k1, coef: 0}", "algorithm.max_grad_norm=0", "warmup.max_grad_norm=null",
    )  # fmt: skip


ALIKE = {
    "group_size=1 has no other member": ["es_manager.train.group_size=1", "algorithm.filter_groups.enable=true"],
    "temperature=0 plays all members of a group alike": ["agent_proxy.temperature=0"],
    "adv_estimator=rloo": ["es_manager.train.group_size=1", "algorithm.adv_estimator=rloo"],
}  # fmt: skip


@pytest.mark.parametrize("message", ALIKE)
def test_a_run_whose_groups_can_never_differ_is_refused_before_it_starts(tmp_path, message):
    config = compose_config("demo", [*ALIKE[message], f"run_dir={tmp_path / 'run'}"])  # fine for rollouts
    with pytest.raises(ConfigError, match=message):
        AgentTrainer(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [["algorithm.adv_estimator=gae"], ["agent_proxy.reward_normalization.grouping=batch"],
     ["algorithm.adv_estimator=reinforce"], ["algorithm.adv_estimator=gigpo"],
     ["agent_proxy.reward_normalization.method=identity"]],
)  # fmt: skip
def test_groups_of_one_are_fine_where_nothing_is_compared_within_them(settings):
    refuse_without_signal(read("es_manager.train.group_size=1", *settings))


SEVERAL = "16 gradient steps a batch may take it too far: set algorithm.minibatch_size=null"


@pytest.mark.parametrize(
    ("settings", "warned"),
    [(["algorithm=rloo", "algorithm.minibatch_size=10"], True),  # 2 groups of 4 play at most 20 turns: 160 samples
     (["algorithm=rloo", "algorithm.minibatch_size=5", "algorithm.epochs=2", "agent_proxy.max_turn=5"], True),
     (["algorithm=rloo", "algorithm.minibatch_size=160"], False),
     (["algorithm=rloo"], False),
     (["algorithm=grpo", "algorithm.minibatch_size=10"], False)],
)  # fmt: skip
def test_several_steps_a_batch_by_a_loss_without_ratios_are_warned_of_with_the_remedy(
    tmp_path, caplog, settings, warned
):
    few = ["es_manager.train.env_groups=2", "es_manager.train.group_size=4", "use_parallel_envs=false"]
    with AgentTrainer(compose_config("demo", [*few, *settings, f"run_dir={tmp_path / 'run'}"])):
        assert caplog.text.count(SEVERAL) == warned


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("model.lora.rank=4", "needs a model of transformers, got engine.name=ray"),
        ("engine.dtype=bfloat16", "has no effect on engine.replicas.engine=tiny"),
    ],
)
def test_settings_of_transformers_models_are_refused_for_tiny_replicas_too(setting, told):
    with pytest.raises(ConfigError, match=f"{setting} {told}"):
        read("engine.name=ray", "engine.replicas.engine=tiny", setting)


@pytest.mark.parametrize("limit", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_training_on_part_of_the_tokens_is_refused_without_a_correction(limit):
    with pytest.raises(ConfigError, match=f"agent_proxy.{limit}.*set algorithm.rollout_correction.method"):
        refuse_without_signal(read(f"agent_proxy.{limit}"))
    refuse_without_signal(read(f"agent_proxy.{limit}", "algorithm.rollout_correction.method=truncate"))
