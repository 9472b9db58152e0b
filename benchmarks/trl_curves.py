"""Learning curves of GRPO: shoal's trainer beside TRL's GRPOTrainer, each with its own sampler, loss and optimizer.

    python benchmarks/trl_curves.py [--seeds 0 1 2 3 4 5] [--quick]

The task has one turn: the prompt is one of four signs, and the answer shall be the three words that a fixed table has
for it, and no more. Both trainers load the same fresh Llama, see the same prompts at the same step, are paid by the
same function and have the settings of `SETTINGS`, which are those of the paper of GRPO but for the learning rate and
the sizes. What differs is the noise of sampling. So with three of the seeds TRL trains once more, on answers that
shoal's sampler writes with TRL's weights and the noise of shoal's run: while the updates are the same, so are the
answers. The subjects take turns.

A curve is the mean reward of the 128 answers that a step learns from, before that step. Times are CPU seconds, with one
thread, of training alone; shoal's have an evaluation and a checkpoint at the end and the records of all episodes in
them. Results are written after each seed; those of seeds that are not run stay. `--quick` trains six steps with one
seed, and saves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from shoal.core.seeding import derive_seed, stream  # noqa: E402
from shoal.envs.actions import Projected, Projection  # noqa: E402
from shoal.envs.text import Outcome, TextEnv  # noqa: E402
from shoal.samplers.huggingface.engine import HuggingFaceEngine  # noqa: E402
from shoal.samplers.sampler import Key, Request, Sampling  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "trl_curves.json"
PICTURE = REPO / "docs" / "images" / "trl_curves.svg"
SIGNS = [f"sign{i}" for i in range(4)]
WORDS = [f"word{i}" for i in range(6)]
TABLE = {sign: [str(w) for w in stream(0, "table", sign).choice(WORDS, 3)] for sign in SIGNS}
SETTINGS = {
    "groups": 8,
    "group_size": 16,
    "max_tokens": 4,  # three words and the end
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "clip": 0.2,
    "kl_coef": 0.04,
    "max_grad_norm": 1.0,
}
ANSWERS = SETTINGS["groups"] * SETTINGS["group_size"]
STEPS = 150
SEEDS = range(6)
SAME_NOISE_SEEDS = range(3)
SMOOTHED = 10
"""Steps that a point of the comparison is the mean of."""
SHOAL, TRL, SAME_NOISE = "shoal", "TRL GRPOTrainer", "TRL GRPOTrainer, shoal's sampler and noise"


# --- the task
def paid(sign: str, answer: str) -> float:
    """The share of places that have the right word; further words make the share smaller."""
    right, words = TABLE[sign], answer.split()
    return sum(a == b for a, b in zip(right, words, strict=False)) / max(len(right), len(words))


class WholeAnswer(Projection):
    """Every text is an action."""

    def __call__(self, text: str) -> Projected:
        return Projected((text,), True)


class Signs(TextEnv[Any]):
    """One sign, one answer."""

    max_steps = 1
    projection = WholeAnswer()
    instructions = "Answer with the three words of the sign."

    def _start(self, rng: Any) -> None:
        self.sign = SIGNS[int(rng.integers(len(SIGNS)))]

    def _advance(self, action: Any) -> Outcome:
        reward = paid(self.sign, str(action))
        return Outcome(reward, terminated=True, success=reward == 1)

    def observe(self) -> str:
        return self.sign


def prompts_of(seed: int, steps: int) -> list[str]:
    """The signs of all groups of a run, in order: those that shoal's seeds lead to."""
    env = Signs()
    seeds = [
        derive_seed(seed, "env", step, group) for step in range(steps) for group in range(SETTINGS["groups"])
    ]
    return [env.reset(seed=one)[0] for one in seeds]


def save_model(folder: Path, seed: int) -> Any:
    """Write a fresh Llama of 0.1 million weights and its tokenizer, which has a token for each word."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    control = ["<pad>", "<end>", "<user>", "<assistant>"]
    raw = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*control, *SIGNS, *WORDS])}, unk_token="<pad>")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )
    turn = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}<assistant>{% endif %}"
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


# --- the trainers
@dataclass(frozen=True)
class Run:
    """What one trainer did with one seed."""

    subject: str
    seed: int
    rewards: list[float]  # of each step
    kl: float  # to the first weights, in nats a token, of the last `SMOOTHED` steps
    cpu_seconds: float


def run_of(subject: str, seed: int, rows: Sequence[Mapping[str, float]], kl: str, seconds: float) -> Run:
    """A run by the rows of metrics of its steps."""
    last = float(np.mean([row[kl] for row in rows[-SMOOTHED:]]))
    return Run(subject, seed, [round(row["reward"], 4) for row in rows], round(last, 4), round(seconds, 2))


def check_prompts(subject: str, found: Sequence[str], seed: int, steps: int) -> None:
    if found != prompts_of(seed, steps):
        raise AssertionError(f"{subject} did not see the prompts of seed {seed} in their order")


def run_shoal(model: Path, folder: Path, seed: int, steps: int) -> Run:
    """`AgentTrainer` with the preset `grpo`."""
    from shoal.train.agent.config import compose_config
    from shoal.train.agent.trainer import AgentTrainer

    side = f"{{env_groups: {SETTINGS['groups']}, group_size: {SETTINGS['group_size']}, env_configs: {{tags: [signs]}}}}"
    overrides = [
        "algorithm=grpo",
        f"seed={seed}",
        f"run_dir={folder}",
        "custom_envs.FrozenLakeEnv=null",
        "custom_envs.signs.env_type=benchmarks.trl_curves:Signs",
        "engine.name=huggingface",
        f"engine.model={model}",
        "engine.threads=1",
        f"engine.max_batch={ANSWERS}",  # all at once, as TRL
        f"es_manager.train={side}",
        f"es_manager.val={side}",
        "use_parallel_envs=false",
        "agent_proxy.prompt.mode=append",
        "agent_proxy.prompt.first='{observation}'",
        "agent_proxy.prompt.later='{observation}'",
        "agent_proxy.stop=[]",
        f"agent_proxy.max_tokens={SETTINGS['max_tokens']}",
        f"agent_proxy.temperature={SETTINGS['temperature']}",
        f"algorithm.learning_rate={SETTINGS['learning_rate']}",
        f"algorithm.max_grad_norm={SETTINGS['max_grad_norm']}",
        "warmup.steps=0",
        f"trainer.iterations={steps}",
        f"trainer.eval_every={steps}",
        f"trainer.save_every={steps}",
        "trainer.save_trajectories_every=1",
        "trainer.stop_at_success=null",
        "trainer.tensorboard=false",
    ]
    config = compose_config("base", overrides)
    algorithm = config.algorithm
    assert (algorithm.kl.coef, algorithm.clip_ratio_high) == (SETTINGS["kl_coef"], SETTINGS["clip"])
    with AgentTrainer(config) as trainer:
        clock = time.process_time()
        rows = [row for row in trainer.train() if row["iteration"]]
        seconds = time.process_time() - clock
    check_prompts(SHOAL, prompts_played(folder), seed, steps)
    return run_of(SHOAL, seed, rows, "kl_to_reference", seconds)


def prompts_played(folder: Path) -> list[str]:
    """The signs that a run of shoal played, one a group, in order."""
    files = sorted((folder / "trajectories").glob("train-*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    ordered = sorted(
        (e["iteration"], e["group"], e["member"], e["turns"][0]["observation"]) for e in episodes
    )
    return [sign for _, _, member, sign in ordered if member == 0]


def shoals_answers(seed: int) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func`: what shoal's sampler writes with TRL's weights, and the noise of shoal's run of this seed."""
    steps = itertools.count()

    def answers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer, step, size = trainer.processing_class, next(steps), SETTINGS["group_size"]
        sampling = Sampling(SETTINGS["max_tokens"], SETTINGS["temperature"], ())
        requests = []
        for i, prompt in enumerate(prompts):
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            requests.append(Request(tuple(ids), Key(seed, (step, i // size, i % size, 0)), sampling))
        training = trainer.model.training  # which a sampler ends
        written = HuggingFaceEngine(trainer.model, tokenizer, max_batch=ANSWERS).generate(requests)
        trainer.model.train(training)
        return {
            "prompt_ids": [list(request.prompt_ids) for request in requests],
            "completion_ids": [list(answer.token_ids) for answer in written],
            "logprobs": [list(answer.logprobs) for answer in written],
        }

    return answers


def run_trl(model: Path, folder: Path, seed: int, steps: int, *, same_noise: bool = False) -> Run:
    """TRL's `GRPOTrainer`, which generates with transformers unless it is given the noise of shoal's run."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    logged: list[dict[str, float]] = []
    asked: list[str] = []

    class Log(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **rest: Any) -> None:
            if "reward" in logs:
                logged.append(logs)

    def reward(prompts: list[Any], completions: list[Any], **rest: Any) -> list[float]:
        signs = [prompt[0]["content"] for prompt in prompts]
        asked.extend(signs[:: SETTINGS["group_size"]])
        return [paid(sign, answer[0]["content"]) for sign, answer in zip(signs, completions, strict=True)]

    signs = prompts_of(seed, steps)
    arguments = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=1,
        num_generations=SETTINGS["group_size"],
        num_iterations=1,
        max_steps=steps,
        max_completion_length=SETTINGS["max_tokens"],
        temperature=SETTINGS["temperature"],
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=SETTINGS["max_grad_norm"],
        loss_type="grpo",
        scale_rewards="group",
        epsilon=SETTINGS["clip"],
        beta=SETTINGS["kl_coef"],
        use_bias_correction_kl=False,  # TRL multiplies the KL of each token by its ratio, the paper does not
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
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": sign}] for sign in signs]}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Log()],
        rollout_func=shoals_answers(seed) if same_noise else None,
    )
    trainer.remove_callback(PrinterCallback)
    clock = time.process_time()
    trainer.train()
    seconds = time.process_time() - clock
    subject = SAME_NOISE if same_noise else TRL
    check_prompts(subject, asked, seed, steps)
    return run_of(subject, seed, logged, "kl", seconds)


# --- the comparison
def smoothed(curve: Any) -> Any:
    """Means of `SMOOTHED` steps, `[..., steps / SMOOTHED]`."""
    whole = np.asarray(curve, dtype=float)
    cut = whole[..., : whole.shape[-1] // SMOOTHED * SMOOTHED]
    return cut.reshape(*cut.shape[:-1], -1, SMOOTHED).mean(-1)


def overlap(ours: Any, theirs: Any) -> float:
    """The share of smoothed points at which the ranges of the seeds have values in common."""
    low = np.maximum(ours.min(0), theirs.min(0))
    high = np.minimum(ours.max(0), theirs.max(0))
    return float((low <= high).mean())


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the file of results."""
    rows: list[dict[str, Any]] = []
    own = {name: [run for run in runs if run.subject == name] for name in (SHOAL, TRL)}

    def add(case: str, subject: str, values: Sequence[float], unit: str) -> None:
        each = [round(float(one), 4) for one in values]
        value = round(statistics.fmean(each), 4)
        known = own.get(subject)
        seconds = round(sum(run.cpu_seconds for run in known), 2) if known else None
        rows.append(
            {
                "case": case,
                "subject": subject,
                "value": value,
                "unit": unit,
                "cpu_seconds": seconds,
                "runs": len(each),
                "each": each,
            }
        )

    for name, known in own.items():
        add(
            f"reward of the last {SMOOTHED} steps",
            name,
            [smoothed(run.rewards)[-1] for run in known],
            "reward",
        )
    for name, known in own.items():
        add("reward of all steps", name, [np.mean(run.rewards) for run in known], "reward")
    for name, known in own.items():
        add(f"KL to the start, last {SMOOTHED} steps", name, [run.kl for run in known], "nats")
    for name, known in own.items():
        add("a step", name, [run.cpu_seconds / len(run.rewards) for run in known], "CPU s/update")
    ours, theirs = (smoothed([run.rewards for run in known]) for known in own.values())
    add("points at which the ranges overlap", "of the rewards", [overlap(ours, theirs)], "share")
    by_seed = {run.seed: run.rewards for run in own[SHOAL]}
    pairs = [(by_seed[run.seed], run.rewards) for run in runs if run.subject == SAME_NOISE]
    for steps in (20, 50, STEPS):
        gaps = [np.abs(np.subtract(a, b))[:steps].max() for a, b in pairs]
        if gaps:
            add("largest difference with the same noise", f"of {steps} steps", gaps, "reward")
    return rows


def draw(runs: Sequence[Run]) -> None:
    """Mean and range of the seeds, over steps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for name, colour in ((SHOAL, "#2f6fb0"), (TRL, "#d1661f")):
        values = smoothed([run.rewards for run in runs if run.subject == name])
        at = SMOOTHED * (np.arange(values.shape[1]) + 0.5)
        axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, values.mean(0), color=colour, label=name)
    axes.set(xlabel="step", ylabel=f"reward, mean of {SMOOTHED} steps", ylim=(0, 1))
    axes.grid(color="#c8ccd0", linewidth=0.5)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--quick", action="store_true", help="six steps of one seed, nothing saved")
    options = parser.parse_args()
    seeds, steps = ([0], 6) if options.quick else (options.seeds, STEPS)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    trainers = (run_shoal, run_trl, partial(run_trl, same_noise=True))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            model = Path(folder) / f"model-{seed}"
            save_model(model, seed)
            runs: list[Run] = []
            for number, run in enumerate(trainers if seed in SAME_NOISE_SEEDS else trainers[:2]):
                runs.append(done := run(model, Path(folder) / f"{seed}-{number}", seed, steps))
                curve = done.rewards if options.quick else smoothed(done.rewards)
                line = " ".join(f"{one:.2f}" for one in curve)
                print(f"seed {seed} {done.subject:42s} {done.cpu_seconds:6.1f} CPU s  {line}", flush=True)
            if not options.quick:
                known = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
                rows = save([*(Run(**one) for one in known if one["seed"] != seed), *runs])
    for row in rows:
        print(
            f"{row['case']:44s} {row['subject']:18s} {row['value']:8.4f} {row['unit']}  {row['each']}",
            flush=True,
        )


def save(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Write the results and their picture; gives the rows."""
    runs = sorted(runs, key=lambda run: ((SHOAL, TRL, SAME_NOISE).index(run.subject), run.seed))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
    report = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "threads": 1},
        "versions": {"python": platform.python_version(), **versions},
        "date": time.strftime("%Y-%m-%d"),
        "settings": {**SETTINGS, "steps": STEPS},
        "rows": (rows := rows_of(runs)),
        "runs": [asdict(run) for run in runs],
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    draw(runs)
    return rows


if __name__ == "__main__":
    main()
