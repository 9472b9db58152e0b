"""TRL's GRPOTrainer learns shoal's FrozenLake: shoal plays the episodes, TRL updates the weights. About a minute.

    pip install ".[trl]"
    python examples/trl_grpo_frozenlake.py [steps]

The language model is created here, so nothing is downloaded; a short warm-up teaches it the format of an answer. Any
model with a chat template can replace it.
"""

import sys
import tempfile

try:
    from datasets import disable_progress_bars
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f'this example needs {error.name}: run pip install ".[trl]"')

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

from shoal import envs
from shoal.integrations.trl import TRLRollout, episode_reward
from shoal.rollout.factory import make_roles
from shoal.rollout.prompts import Prompter
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.train.agent.config import Warmup
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.supervised.warmup import warm_up

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
WORDS = ("<action>", "</action>", "Left", "Down", "Right", "Up")
CONFIG = {
    "seed": 0,
    "custom_envs": {
        "lake": {
            "env_type": "frozen_lake",
            "env_config": {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False},
            "max_actions_per_traj": 8,
        }
    },
    "agent_proxy": {
        "max_tokens": 4,
        "prompt": {
            "mode": "append",
            "first": "{observation}",
            "later": "{observation}",
            "on_drift": "ignore",
        },
    },
}


def make_language_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A tenth of a million weights over bytes, with one token for each word of an answer."""
    control = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(control + letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = TURN + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(shape), tokenizer


class Report(TrainerCallback):
    """One line for the last five updates."""

    def on_log(self, args, state, control, logs, **rest):
        """TRL has means over `logging_steps` updates."""
        if "shoal/success" in logs:
            print(
                f"update {state.global_step:3d}: success {logs['shoal/success']:.2f}, "
                f"turns {logs['shoal/turns']:.1f}, valid actions {logs['shoal/valid_actions']:.2f}",
                flush=True,
            )


def main(steps: int) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    model, tokenizer = make_language_model()
    with TRLRollout(CONFIG, backend="thread") as rollout:
        kinds = rollout.config.custom_envs
        engine = HuggingFaceEngine(model, tokenizer)
        makers = {
            tag: lambda kind=kind: envs.make(kind.env_type, **kind.env_config) for tag, kind in kinds.items()
        }
        prompter = Prompter(rollout.config.agent_proxy.prompt, engine.tokenizer)
        for _ in warm_up(
            policy_of(engine), makers, make_roles(kinds, list(kinds)), prompter, Warmup(60, 16, 1e-2), 4096, 0
        ):
            pass
        with tempfile.TemporaryDirectory() as folder:
            arguments = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=64,
                num_generations=16,
                max_steps=steps,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                entropy_coef=0.003,
                epsilon_high=0.28,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=5,
            )
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=episode_reward,
                args=arguments,
                train_dataset=rollout.dataset(64),
                processing_class=tokenizer,
                rollout_func=rollout,
                callbacks=[Report()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
