"""The table of the names of TRL and verl has the defaults that they document, and settings that exist here."""

import subprocess
import sys
from pathlib import Path

from docs.library_names import TRL, VERL

from shoal.core.configuration import to_mapping
from shoal.train.agent.config import compose_config

ROOT = Path(__file__).parents[4]
# trl/trainer/grpo_config.py of July 2026; peft_config is an argument of the trainer; lr_scheduler_type, weight_decay,
# max_grad_norm, max_steps, save_steps, eval_steps and report_to are those of transformers.TrainingArguments
OF_TRL = {
    "num_generations": 8, "generation_batch_size": None, "steps_per_generation": None, "max_completion_length": 256,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "learning_rate": 1e-6, "lr_scheduler_type": "linear",
    "weight_decay": 0.0, "max_grad_norm": 1.0, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None,
    "delta": None, "importance_sampling_level": "token", "scale_rewards": "group", "loss_type": "dapo",
    "mask_truncated_completions": False, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_cap": 3.0, "use_vllm": False,
    "gradient_checkpointing": True, "bf16": True, "reward_weights": None, "peft_config": None, "max_steps": -1,
    "save_steps": 500, "eval_steps": None, "report_to": "none", "log_completions": False,
}  # fmt: skip
# verl/trainer/config/ppo_trainer.yaml and actor/actor.yaml
OF_VERL = {
    "data.train_batch_size": 1024, "data.max_response_length": 512, "rollout.n": 1, "rollout.temperature": 1.0,
    "rollout.top_p": 1, "rollout.top_k": -1, "actor.ppo_mini_batch_size": 256, "actor.ppo_max_token_len_per_gpu": 16384,
    "actor.ppo_epochs": 1, "actor.optim.lr": 1e-6, "critic.optim.lr": 1e-5, "actor.optim.weight_decay": 0.01,
    "actor.grad_clip": 1.0, "actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.2, "actor.clip_ratio_c": 3.0,
    "critic.cliprange_value": 0.5, "actor.loss_agg_mode": "token-mean", "actor.policy_loss.loss_mode": "vanilla",
    "actor.entropy_coeff": 0, "actor.use_kl_loss": False, "algorithm.use_kl_in_reward": False,
    "actor.kl_loss_coef": 0.001, "algorithm.kl_ctrl.kl_coef": 0.001, "actor.kl_loss_type": "low_var_kl",
    "algorithm.kl_penalty": "kl", "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "trainer.critic_warmup": 0, "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.filter_groups.enable": False, "algorithm.filter_groups.max_num_gen_batches": 0,
    "trainer.total_training_steps": None, "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.default_local_dir": "checkpoints/…", "trainer.resume_mode": "auto",
}  # fmt: skip


def defaults(names):
    found = {}
    for name in names:
        theirs = name.theirs.split(", ")
        values = name.default if len(theirs) > 1 else [name.default]
        found |= dict(zip(theirs, values, strict=True))
    return found


def test_the_defaults_in_the_table_are_those_that_the_libraries_document():
    assert defaults(TRL) == OF_TRL
    assert defaults(VERL) == OF_VERL


def test_what_stands_beside_them_are_settings_that_can_be_said_together():
    for names in (TRL, VERL):
        words = [word for name in names for word in name.shoal if "=" in word]
        said = dict(word.split("=") for word in words)
        config = to_mapping(compose_config("smollm2", [f"{key}={value}" for key, value in said.items()]))
        for name in names:
            for word in name.shoal:
                node = config
                for part in word.partition("=")[0].split("."):
                    node = node[part]
        assert said["algorithm.kl.coef"] == "0.0"


def test_the_tables_of_the_docs_are_what_the_source_says():
    write = (
        "import sys; sys.path.insert(0, 'docs'); import make_presets as m; "
        "print(all(path.read_text() == text for path, text in m.pages().items()))"
    )
    done = subprocess.run([sys.executable, "-c", write], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True", "the tables are of another source: run make settings"
