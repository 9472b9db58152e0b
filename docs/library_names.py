"""The settings of TRL and verl, beside the settings of shoal that do the same; the docs' table is made of it.

Defaults are those of TRL 1.16.0 and of verl 0.9.1; `make test-integrations` compares them. Of TRL,
lr_scheduler_type, weight_decay, max_grad_norm, max_steps, save_steps, eval_steps and report_to are those of
transformers.TrainingArguments, and peft_config is an argument of the trainer.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Name(NamedTuple):
    """A setting of another library."""

    theirs: str
    default: Any  # there
    shoal: tuple[str, ...]  # the settings here, with the values that do what theirs does by default
    note: str = ""


TRL = (
    Name("num_generations", 8, ("es_manager.train.group_size=8",)),
    Name(
        "generation_batch_size", None, ("es_manager.train.env_groups",),
        "times `num_generations`; none: what one optimizer step takes",
    ),
    Name(
        "steps_per_generation", None, ("algorithm.minibatch_size=null",),
        "samples of a gradient step here; none: one step a batch",
    ),
    Name("max_completion_length", 512, ("agent_proxy.max_tokens=512",), "of one turn; there of all turns together"),
    Name(
        "temperature, top_p, top_k", [1.0, 1.0, 0],
        ("agent_proxy.temperature=1.0", "agent_proxy.top_p=1.0", "agent_proxy.top_k=0"),
    ),
    Name("min_p", None, ("agent_proxy.min_p=0.0",)),
    Name("learning_rate", 1e-6, ("algorithm.learning_rate=0.000001",)),
    Name("lr_scheduler_type", "linear", ("algorithm.lr_schedule=linear",)),
    Name("weight_decay, max_grad_norm", [0.0, 1.0], ("algorithm.weight_decay=0.0", "algorithm.max_grad_norm=1.0")),
    Name(
        "beta", 0.0, ("algorithm.kl.coef=0.0",),
        "with `algorithm.kl.estimator=k3`, `algorithm.kl.place=loss`; equal with `use_bias_correction_kl=False`: TRL's "
        "default multiplies the KL of a token by its ratio",
    ),
    Name("num_iterations", 1, ("algorithm.epochs=1",)),
    Name("epsilon", 0.2, ("algorithm.clip_ratio_low=0.2", "algorithm.clip_ratio_high=0.2")),
    Name(
        "epsilon_high", None, ("algorithm.clip_ratio_high=0.2",),
        "none: `epsilon`. With `loss_type=cispo` it is the largest weight itself: 1 less here",
    ),
    Name("delta", None, ("algorithm.dual_clip=null",)),
    Name("importance_sampling_level", "token", ("algorithm.policy_loss=clip",), "`sequence`: `gspo`"),
    Name(
        "scale_rewards", "group",
        ("agent_proxy.reward_normalization.method=mean_std", "agent_proxy.reward_normalization.grouping=state"),
        "`none`: `mean`; `batch`: none here, since `reinforce_pp_baseline` divides by the deviation of "
        "rewards less the mean of their group",
    ),
    Name(
        "loss_type", "dapo", ("algorithm.loss_aggregation=token_mean",),
        "`grpo`: `sequence_mean`; `dr_grpo`: `constant`; `cispo`: `algorithm.policy_loss=cispo`",
    ),
    Name("mask_truncated_completions", False, ("algorithm.overlong_filter=false",)),
    Name(
        "vllm_importance_sampling_correction, vllm_importance_sampling_mode", [True, "sequence_mask"],
        ("algorithm.rollout_correction.method=mask", "algorithm.rollout_correction.level=sequence"),
        "`token_truncate`: `truncate`, `token`",
    ),
    Name("vllm_importance_sampling_clip_max", 3.0, ("algorithm.rollout_correction.cap=3.0",)),
    Name("use_vllm", False, ("engine.name=huggingface",), "`vllm`"),
    Name("gradient_checkpointing", True, ("algorithm.gradient_checkpointing=true",)),
    Name("bf16", None, ("algorithm.precision=bfloat16",), "none: true; of the arithmetic; weights: `engine.dtype`"),
    Name("reward_weights", None, ("rewards",), "of each entry `weight`, 1 by default"),
    Name("peft_config", None, ("model.lora.rank=0",), "`LoraConfig(r=16)`: 16"),
    Name("max_steps, save_steps, eval_steps", [-1, 500, None],
         ("trainer.iterations", "trainer.save_every", "trainer.eval_every"), "iterations here"),
    Name("report_to", "none", ("trainer.wandb=false",), "`wandb`: true"),
    Name("log_completions", False, ("trainer.save_trajectories_every",), "always written"),
)  # fmt: skip
"""Of `GRPOConfig`."""

VERL = (
    Name("data.train_batch_size", 1024, ("es_manager.train.env_groups=1024",)),
    Name("data.max_response_length", 512, ("agent_proxy.max_tokens=512",), "of one turn"),
    Name("rollout.n", 1, ("es_manager.train.group_size",), "above 1 where groups are compared"),
    Name("rollout.temperature, rollout.top_p", [1.0, 1], ("agent_proxy.temperature=1.0", "agent_proxy.top_p=1.0")),
    Name("rollout.top_k", -1, ("agent_proxy.top_k=0",)),
    Name(
        "actor.ppo_mini_batch_size", 256, ("algorithm.minibatch_size",),
        "prompts there, each with `n` answers; samples here (window: turns, append: episodes)",
    ),
    Name("actor.ppo_max_token_len_per_gpu", 16384, ("algorithm.micro_batch_tokens=16384",)),
    Name("actor.ppo_epochs", 1, ("algorithm.epochs=1",)),
    Name("actor.optim.lr, critic.optim.lr", [1e-6, 1e-5],
         ("algorithm.learning_rate=0.000001", "algorithm.critic.learning_rate=0.00001")),
    Name("actor.optim.weight_decay, actor.grad_clip", [0.01, 1.0],
         ("algorithm.weight_decay=0.01", "algorithm.max_grad_norm=1.0")),
    Name("actor.clip_ratio_low, actor.clip_ratio_high", [0.2, 0.2],
         ("algorithm.clip_ratio_low=0.2", "algorithm.clip_ratio_high=0.2")),
    Name("actor.clip_ratio_c", 3.0, ("algorithm.dual_clip=3.0",), "off here by default"),
    Name("critic.cliprange_value", 0.5, ("algorithm.critic.value_clip=0.5",), "off here by default"),
    Name(
        "actor.loss_agg_mode", "token-mean", ("algorithm.loss_aggregation=token_mean",),
        "`seq-mean-token-mean`: `sequence_mean`; `seq-mean-token-sum`: `constant`",
    ),
    Name("actor.policy_loss.loss_mode", "vanilla", ("algorithm.policy_loss=clip",), "`gspo`, `cispo`: the same"),
    Name("actor.entropy_coeff", 0, ("algorithm.entropy_coef=0.0", "algorithm.entropy_target=null")),
    Name(
        "actor.use_kl_loss, algorithm.use_kl_in_reward", [False, False], ("algorithm.kl.coef=0.0",),
        "`algorithm.kl.place`: loss or reward, with a coefficient above 0",
    ),
    Name("actor.kl_loss_coef, algorithm.kl_ctrl.kl_coef", [0.001, 0.001], ("algorithm.kl.coef",)),
    Name(
        "actor.kl_loss_type, algorithm.kl_penalty", ["low_var_kl", "kl"], ("algorithm.kl.estimator=k3",),
        "`kl`: `k1`; `mse`: `k2`",
    ),
    Name(
        "algorithm.adv_estimator", "gae", ("algorithm.adv_estimator=gae",),
        "`reinforce_plus_plus`: `reinforce_pp`; `reinforce_plus_plus_baseline`: `reinforce_pp_baseline`; `grpo`, "
        "`rloo`: the same; the others are not here",
    ),
    Name("algorithm.gamma, algorithm.lam", [1.0, 1.0], ("algorithm.gamma=1.0", "algorithm.critic.gae_lambda=1.0")),
    Name("trainer.critic_warmup", 0, ("algorithm.critic.warmup=0",)),
    Name(
        "algorithm.norm_adv_by_std_in_grpo", True, ("agent_proxy.reward_normalization.method=mean_std",),
        "false: `mean`",
    ),
    Name("algorithm.filter_groups.enable, algorithm.filter_groups.max_num_gen_batches", [False, 0],
         ("algorithm.filter_groups.enable=false", "algorithm.filter_groups.max_num_gen_batches"), "of DAPO"),
    Name("trainer.total_training_steps, trainer.save_freq, trainer.test_freq", [None, -1, -1],
         ("trainer.iterations", "trainer.save_every", "trainer.eval_every")),
    Name("trainer.default_local_dir, trainer.resume_mode", ["checkpoints/…", "auto"], ("run_dir", "resume")),
)  # fmt: skip
"""Of `ppo_trainer.yaml`; `actor` and `rollout` stand for those sections of `actor_rollout_ref`."""
