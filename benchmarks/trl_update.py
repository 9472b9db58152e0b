"""CPU time of one update of the weights: shoal beside TRL's GRPOTrainer, same weights, same batch, same run.

    python benchmarks/trl_update.py [--only WORD] [--threads 1] [--quick]

The batch is one set of multi-turn episodes with their sampled log-probs and advantages; as always with GRPO, the
members of a group share their first prompt. Clip objective, no KL term, AdamW, float32. TRL runs its own loop
(`GRPOTrainer.train`): a rollout function hands it the episodes once, and `num_iterations` makes it train on them again
and again; what is timed is from `on_step_begin` to `on_step_end`, so neither generation nor logging counts. TRL is
tried with several sizes of micro-batch, without gradient checkpointing; its fastest counts. Losses of all updates and
the weights after the last must agree before a time is kept. Times are CPU seconds, with one thread by default: what
else the machine does hardly shows in them. Cases that were not run keep their rows in the results. `--quick` does two
updates of one case and saves nothing, and there shoal is timed alone where TRL is not installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from tests.records import Exchange, trajectory_of  # noqa: E402

from shoal.core.data import Trajectory  # noqa: E402
from shoal.core.errors import EngineError  # noqa: E402
from shoal.core.seeding import stream  # noqa: E402
from shoal.samplers.huggingface.engine import HuggingFaceEngine  # noqa: E402
from shoal.samplers.models import resolve_model  # noqa: E402
from shoal.train.agent.algorithms.advantages import group_relative  # noqa: E402
from shoal.train.agent.batch.packing import token_values  # noqa: E402
from shoal.train.agent.batch.samples import Sample, make_samples  # noqa: E402
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty  # noqa: E402
from shoal.train.agent.optimizer import split_optimizer, trained_parameters  # noqa: E402
from shoal.train.agent.policies.loading import policy_of  # noqa: E402
from shoal.train.agent.policies.policy import Policy, score  # noqa: E402
from shoal.train.agent.update import Learner, update  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "trl_update.json"
VOCABULARY, GROUP, RATE = 2048, 8, 1e-4
rows: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Case:
    """Lengths of a batch of episodes, all drawn uniformly between two bounds, and what is tried on it."""

    name: str
    prompt: tuple[int, int]
    turns: tuple[int, int]
    response: tuple[int, int]
    observation: tuple[int, int]
    episodes: int = 32
    model: str = "tiny"
    updates: int = 4
    shoal_tokens: tuple[int, ...] = (1024, 4096)  # in a micro-batch
    trl_rows: tuple[int, ...] = (8, 4, 2)  # in a micro-batch

    @property
    def rate(self) -> float:
        """Learning rate, small enough that rounding stays rounding."""
        return RATE if self.model == "tiny" else RATE / 100


CASES = (
    Case("many short turns", (60, 160), (1, 12), (4, 16), (12, 40)),
    Case("few long turns", (60, 160), (1, 3), (20, 120), (20, 60)),
    Case("one turn, like lengths", (96, 128), (1, 1), (48, 64), (0, 0)),
    Case("one turn, equal lengths", (112, 112), (1, 1), (56, 56), (0, 0)),
    Case(
        "SmolLM2 135M, several turns",
        *((40, 60), (1, 3), (8, 24), (8, 24)),
        episodes=16,
        model="smollm2",
        updates=3,
        shoal_tokens=(1024,),
        trl_rows=(4, 2),
    ),
)


def make_model(name: str) -> Any:
    """`tiny`: a small Llama whose head has as much of the work as a 0.5B model's, about a quarter; or a fetched one."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name != "tiny":
        return AutoModelForCausalLM.from_pretrained(
            resolve_model(name), dtype=torch.float32, local_files_only=True
        )
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(shape)


def make_tokenizer() -> Any:
    """A tokenizer that the trainers need beside the tokens: ids are words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<bos>", "<eos>", "<pad>", *(f"w{i}" for i in range(3, VOCABULARY))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def make_episodes(case: Case, seed: int) -> list[Trajectory]:
    """Episodes with seeded lengths, tokens and rewards; each prompt extends the tokens before it.

    A group begins in one state, so its members share the first prompt.
    """
    rng = stream(seed, "episodes", case.name)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(3, VOCABULARY, rng.integers(bounds[0], bounds[1] + 1)))

    firsts = [tokens(case.prompt) for _ in range(case.episodes // GROUP)]
    episodes = []
    for i in range(case.episodes):
        context = firsts[i // GROUP]
        turns = []
        for _ in range(rng.integers(case.turns[0], case.turns[1] + 1)):
            response = tokens(case.response)
            turns.append(
                Exchange(
                    "", context, response, (0.0,) * len(response), "", "a", True, float(rng.random()), ""
                )
            )
            context += response + tokens(case.observation)
        episodes.append(
            trajectory_of("synthetic", 0, i // GROUP, i % GROUP, 0, tuple(turns), True, True, False)
        )
    return episodes


def make_batch(episodes: Sequence[Trajectory], engine: Policy) -> list[Sample]:
    """One sample an episode, with advantages and the log-probs of the first weights."""
    samples = [sample for episode in episodes for sample in make_samples(episode)]
    old = token_values(samples, lambda micro: score(engine, micro, 1.0).logprobs, 8192, engine.pad_id, "cpu")
    advantages = group_relative([e.reward for e in episodes], [e.group for e in episodes])
    return [
        s.with_column("rollout_logprobs", o)
        .with_column("old_logprobs", o)
        .with_column("advantages", np.full(len(o), a))
        for s, o, a in zip(samples, old, advantages, strict=True)
    ]


@dataclass
class Result:
    """What one trainer did."""

    losses: list[float]
    seconds: list[float]  # of CPU, one an update
    weights: dict[str, torch.Tensor]


def run_shoal(case: Case, samples: list[Sample], tokenizer: Any, micro_batch_tokens: int) -> Result:
    """`shoal.train.agent.update` on the whole batch, again and again."""
    model = make_model(case.model)
    engine = policy_of(HuggingFaceEngine(model, tokenizer))
    optimizer = split_optimizer(trained_parameters(model), None, case.rate, case.rate, 0.0)
    config = Algorithm(
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        loss_aggregation="token_mean",
        kl=KLPenalty(0.0),
        learning_rate=case.rate,
        minibatch_size=len(samples),
        micro_batch_tokens=micro_batch_tokens,
        batching="packed",
    )
    result = Result([], [], {})
    for iteration in range(case.updates):
        clock = time.process_time()
        metrics = update(Learner(engine, optimizer, config, AgentProxy()), samples, iteration)
        result.seconds.append(time.process_time() - clock)
        result.losses.append(metrics["loss"])
    result.seconds = result.seconds[1:]  # as TRL's: the first warms up
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def run_trl(case: Case, samples: list[Sample], tokenizer: Any, micro_batch: int) -> Result:
    """TRL's own loop over the same episodes, with `micro_batch` rows at a time."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from transformers.utils import logging as transformers_logging
    from trl import GRPOConfig, GRPOTrainer

    transformers_logging.set_verbosity_error()
    result = Result([], [], {})
    clocks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **rest: Any) -> None:
            clocks[:] = [time.process_time()]

        def on_step_end(self, *args: Any, **rest: Any) -> None:
            result.seconds.append(time.process_time() - clocks[0])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **rest: Any) -> None:
            if "loss" in logs:
                result.losses.append(float(logs["loss"]))

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        masks, texts = [], []
        for sample in samples:
            start = int(sample.trained[0])
            mask = np.zeros(len(sample.ids) - start, dtype=np.int64)
            mask[sample.trained - start] = 1
            masks.append(mask.tolist())
            texts.append((list(sample.ids[:start]), list(sample.ids[start:])))
        return {
            "prompt_ids": [prompt for prompt, _ in texts],
            "completion_ids": [completion for _, completion in texts],
            "logprobs": [[0.0] * len(mask) for mask in masks],
            "env_mask": masks,
            "reward": [float(sample.columns["advantages"][0]) for sample in samples],
        }

    accumulate = len(samples) // micro_batch
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulate,
            num_generations=GROUP,
            num_iterations=case.updates,
            max_steps=case.updates,
            learning_rate=case.rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            scale_rewards="none",
            shuffle_dataset=False,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_steps=1,
            logging_first_step=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = [[{"role": "user", "content": f"w{i + 3}"}] for i in range(len(samples) // GROUP)]
        trainer = GRPOTrainer(
            model=make_model(case.model),
            reward_funcs=lambda reward, **rest: reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=recorded,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    del result.losses[case.updates :]
    result.seconds = result.seconds[1:]  # the first step includes generation and scoring
    result.weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return result


def agree(case: Case, shoal: Result, trl: Result) -> None:
    """Raise unless both did the same updates: after n of them a weight has moved by up to n learning rates."""
    np.testing.assert_allclose(shoal.losses, trl.losses, rtol=2e-3, atol=2e-5)
    moved = apart = 0.0
    start = make_model(case.model).state_dict()
    for name, value in shoal.weights.items():
        torch.testing.assert_close(trl.weights[name], value, rtol=0, atol=case.rate)
        moved += float((value - start[name]).abs().sum())
        apart += float((value - trl.weights[name]).abs().sum())
    if apart > 0.01 * moved:
        raise AssertionError(f"the trainers' weights are {apart / moved:.1%} of the way they moved apart")


def add_row(case: str, subject: str, value: float, unit: str, result: Result | None = None) -> None:
    rows.append(
        {
            "case": case,
            "subject": subject,
            "value": round(value, 4),
            "unit": unit,
            "cpu_seconds": round(sum(result.seconds), 2) if result else None,
            "runs": len(result.seconds) if result else None,
        }
    )
    print(f"{case:32s} {subject:36s} {value:8.3f} {unit}", flush=True)


def measure(case: Case) -> None:
    """Both on one case; the fastest setting of each counts, and all settings are shown."""
    tokenizer = make_tokenizer()
    samples = make_batch(
        make_episodes(case, 0), policy_of(HuggingFaceEngine(make_model(case.model), tokenizer))
    )
    add_row(case.name, "tokens of the batch", sum(len(s.ids) for s in samples), "tokens")
    add_row(case.name, "written by the model", sum(len(s.trained) for s in samples), "tokens")
    best: dict[str, float] = {}
    first: Result | None = None
    for size in case.shoal_tokens:
        result = run_shoal(case, samples, tokenizer, size)
        first = first or result
        best["shoal"] = min(best.get("shoal", np.inf), seconds := statistics.median(result.seconds))
        add_row(case.name, f"shoal, {size} tokens at once", seconds, "CPU s/update", result)
    assert first is not None
    if importlib.util.find_spec("trl") is None:
        print(
            f"{case.name:32s} TRL is left out: it is not installed (make bench-update installs it)",
            flush=True,
        )
        return
    for size in case.trl_rows:
        result = run_trl(case, samples, tokenizer, size)
        agree(case, first, result)
        best["TRL"] = min(best.get("TRL", np.inf), seconds := statistics.median(result.seconds))
        add_row(case.name, f"TRL GRPOTrainer, {size} rows at once", seconds, "CPU s/update", result)
        gc.collect()
    add_row(case.name, "TRL's best / shoal's best", best["TRL"] / best["shoal"], "times")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="a word that the names of the cases have")
    parser.add_argument("--quick", action="store_true", help="two updates of one case, nothing saved")
    options = parser.parse_args()
    names = ("torch", "transformers", "trl")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    if "trl" not in versions and not options.quick:
        sys.exit("trl is not installed: run make bench-update")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if options.quick:
        measure(replace(CASES[0], updates=2, shoal_tokens=(4096,), trl_rows=(8,)))
        return
    measured = [case for case in CASES if options.only in case.name]
    for case in measured:
        try:
            measure(case)
        except EngineError as error:  # its model was not fetched
            print(f"{case.name:32s} not run: {error}", flush=True)
            rows.append({"case": case.name, "subject": "not run", "value": None, "unit": str(error)})
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    names = [case.name for case in CASES]
    all_rows = rows + [row for row in kept if row["case"] not in {case.name for case in measured}]
    report = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "threads": options.threads},
        "versions": {"python": platform.python_version(), **versions},
        "date": time.strftime("%Y-%m-%d"),
        "rows": sorted(all_rows, key=lambda row: names.index(row["case"])),
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
