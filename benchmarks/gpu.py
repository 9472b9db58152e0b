"""One GPU, shoal's own sampler and trainer: is it exact, how fast is it, what does it hold, does it resume?

    python benchmarks/gpu.py [--model FOLDER] [--device cuda] [--dtype float32] [--episodes 64]

Needs neither network nor a virtual environment: without a model folder it makes a random network of SmolLM2-135M's
shape. What is exact is checked before anything is timed: the words of the noise beside NumPy's generator, and tokens of
requests alone beside those in a batch. Results go to `benchmarks/results/gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.seeding import stream, stream_key  # noqa: E402
from shoal.rollout.samplers.huggingface import HuggingFaceEngine  # noqa: E402
from shoal.rollout.samplers.noise import TINY, uniforms  # noqa: E402
from shoal.rollout.samplers.sampler import Completion, Key, Request, Sampling  # noqa: E402
from shoal.train.agent.batch import Sample  # noqa: E402
from shoal.train.agent.config import AgentProxy, Algorithm, compose_config  # noqa: E402
from shoal.train.agent.policy import policy_of, split_optimizer, trained_parameters  # noqa: E402
from shoal.train.agent.trainer import AgentTrainer  # noqa: E402
from shoal.train.agent.update import Learner, update  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "gpu.json"
PROMPT, RESPONSE, GROUP = 200, 32, 8
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
rows: list[dict[str, Any]] = []


def add(case: str, subject: str, values: list[float], unit: str) -> None:
    value = statistics.median(values)
    rows.append(
        {"case": case, "subject": subject, "value": round(value, 4), "unit": unit, "runs": len(values)}
    )
    print(f"{case:<28} {subject:<28} {value:12.4f} {unit}", flush=True)


def random_model(folder: Path, small: bool) -> None:
    """A network with random weights, and a tokenizer of characters and made-up words that fills its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = 300 if small else 49_152
    letters = ["<unk>", "<end>", *map(chr, range(32, 127)), "\n"]
    words = [*letters, *(f"word{n}" for n in range(size - len(letters)))]
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = CHAT
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if not small:
        shape = {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
        }
    heads = shape["num_attention_heads"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=size, num_key_value_heads=3 if heads == 9 else 2, max_position_embeddings=4096,
            tie_word_embeddings=True, eos_token_id=1, pad_token_id=1, **shape,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def requests(engine: HuggingFaceEngine, n: int) -> list[Request]:
    """Groups that share a prompt, as in training."""
    asked = []
    for i in range(n):
        words = stream(0, "gpu", i // GROUP).integers(100, engine.vocabulary, PROMPT)
        asked.append(
            Request(tuple(words.tolist()), Key(0, 0, i // GROUP, i % GROUP, 0), Sampling(RESPONSE, 1.0, ()))
        )
    return asked


# --- what must be so before anything is timed
def noise_gap(device: str) -> float:
    """How far the two logarithms of the noise are from NumPy's, in units of the last place; words must be equal."""
    key, size = stream_key(1, "noise"), 10_001
    here = uniforms([key], [3], size, "cpu")[0].numpy()
    there = uniforms([key], [3], size, device)[0].cpu().numpy()
    assert np.array_equal(there, here), "the words of the noise differ on the device"
    assert np.array_equal(stream(1, "noise").random((4, size))[3], here), "the words are not NumPy's"
    inner = np.log(np.maximum(here, TINY))
    gaps = []
    for values, expected in ((np.maximum(here, TINY), inner), (-inner, np.log(-inner))):
        found = torch.from_numpy(values).to(device).log().cpu().numpy()
        gaps.append((np.abs(found - expected) / np.spacing(np.abs(expected))).max())
    return float(max(gaps))


def share_alone(engine: HuggingFaceEngine, n: int) -> float:
    """Share of requests that are answered by the same tokens alone as in a batch of `n`."""
    asked = requests(engine, n)
    together = engine.generate(asked)
    equal = []
    for i in range(0, n, max(1, n // 8)):
        engine.prefixes.clear()
        equal.append(engine.generate([asked[i]])[0].token_ids == together[i].token_ids)
    return statistics.mean(map(float, equal))


# --- speed
def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def samples_of(asked: list[Request], answers: list[Completion]) -> list[Sample]:
    samples = []
    for i, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        n = len(answer.token_ids)
        columns = {
            "rollout_logprobs": answer.logprobs,
            "old_logprobs": answer.logprobs,
            "advantages": [(-1.0) ** i] * n,
        }
        places = np.arange(PROMPT, PROMPT + n)
        sample = Sample(request.prompt_ids + answer.token_ids, places, {})
        for name, column in columns.items():
            sample = sample.with_column(name, np.array(column))  # type: ignore[arg-type]
        samples.append(sample)
    return samples


def speed(engine: HuggingFaceEngine, episodes: int, runs: int, device: str) -> None:
    asked = requests(engine, episodes)
    engine.generate(asked)
    rates, times = [], []
    for _ in range(runs):
        engine.prefixes.clear()
        took, answers = seconds(lambda: engine.generate(asked), device)
        rates.append(sum(len(answer.token_ids) for answer in answers) / took)
    add("rollout", f"{episodes} at once", rates, "tokens/s")
    policy = policy_of(engine)
    optimizer = split_optimizer(trained_parameters(policy.module), None, 1e-6, 1e-6, 0.0)
    learner = Learner(
        policy, optimizer, Algorithm(minibatch_size=episodes, micro_batch_tokens=8192), AgentProxy()
    )
    samples = samples_of(asked, answers)
    for run in range(runs + 1):
        took, row = seconds(lambda run=run: update(learner, samples, run), device)  # type: ignore[misc]
        if run == 0:
            add("log-probs", "greatest gap, rollout to update", [row["logprob_gap_max"]], "nats")
        else:
            times.append(sum(len(sample.ids) for sample in samples) / took)
    add("update", f"{episodes} samples", times, "tokens/s")
    if device.startswith("cuda"):
        add("memory", "most that was allocated", [torch.cuda.max_memory_allocated() / 2**30], "GiB")


# --- a run
def resumes(model: Path, device: str, folder: Path) -> None:
    """A run of four iterations, and one that was ended after two and resumed: metrics and weights must be equal."""

    def run(name: str, last: int, resume: bool = False) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        overrides = [
            f"engine.model={model}", f"engine.device={device}", f"run_dir={folder / name}",
            "trainer.iterations=4", "trainer.save_every=2", "trainer.eval_every=99", "trainer.tensorboard=false",
            "es_manager.val.env_groups=2",
            "use_parallel_envs=false", "engine.train_last_layers=2", f"resume={str(resume).lower()}",
        ]  # fmt: skip
        with AgentTrainer(compose_config("smollm2-bandit", overrides)) as trainer:
            found = []
            for row in trainer.train():
                found.append(row)
                if row["iteration"] >= last:  # left here, as by Ctrl-C: what was saved before is there
                    break
            return found, [p.detach().cpu().clone() for p in trainer.policy.module.parameters()]

    straight, weights = run("straight", 4)
    run("resumed", 2)
    after, again = run("resumed", 4, resume=True)
    kept = ("loss", "entropy", "reward", "grad_norm")
    same = all(a.get(k) == b.get(k) for a, b in zip(straight[-2:], after[-2:], strict=True) for k in kept)
    equal = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    add("resume", "metrics and weights are equal", [float(same and equal)], "of 1")
    add("a run", "neither engine nor update busy", [row["share_idle"] for row in straight[2:]], "share")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder; a random network if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="a network of two layers, to try the script itself"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            f"PyTorch {torch.__version__} sees no GPU here; --device cpu --small tries the script itself"
        )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if options.model is None:
            random_model(model, options.small)
        add("noise", "words equal; a logarithm apart", [noise_gap(options.device)], "ulp")
        settings = {"device": options.device, "dtype": options.dtype, "max_batch": options.episodes}
        engine = HuggingFaceEngine.load(model, **settings)
        for n in (8, options.episodes):
            add("the same tokens alone", f"in a batch of {n}", [share_alone(engine, n)], "share")
        speed(engine, options.episodes, options.runs, options.device)
        del engine
        resumes(model, options.device, Path(scratch))
    import transformers

    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else None
    name = str(options.model or "random, of SmolLM2's shape")
    versions = {module.__name__: module.__version__ for module in (torch, transformers, np)}
    report = {
        "machine": {"platform": platform.platform(), "gpu": gpu, "model": name},
        "versions": {"python": platform.python_version(), **versions},
        "settings": {"dtype": options.dtype, "prompt": PROMPT, "response": RESPONSE},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
