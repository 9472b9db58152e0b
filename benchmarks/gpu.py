"""One GPU in eight minutes: is shoal exact on it, does a run go on as if nothing had happened, how fast is it?

    python benchmarks/gpu.py [--device cuda] [--budget 450] [--only WORD] [--model FOLDER]
    python benchmarks/gpu.py --device cpu --small        tries the script itself

Needs no network and no virtual environment: torch and a transformers from 5.17 to 5.23, and networks with random
weights of the shapes of SmolLM2-135M (float32) and Qwen2.5-0.5B (bfloat16). Every row is printed as soon as it is
known. A part that fails says why and the next one begins; when the budget is used up, the rest is left out and named.
Requests come in groups of eight with one prompt, as in training. Results go to `benchmarks/results/gpu.json`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from shoal.core.seeding import stream  # noqa: E402
from shoal.samplers.huggingface.engine import HuggingFaceEngine  # noqa: E402
from shoal.samplers.noise import Noise, gumbel, key_words, words  # noqa: E402
from shoal.samplers.sampler import Completion, Key, Request, Sampling  # noqa: E402
from shoal.train.agent.batch.samples import Sample  # noqa: E402
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty, compose_config  # noqa: E402
from shoal.train.agent.optimizer import split_optimizer, trained_parameters  # noqa: E402
from shoal.train.agent.policies.loading import policy_of  # noqa: E402
from shoal.train.agent.processes.determinism import applies, deterministic  # noqa: E402
from shoal.train.agent.trainer import AgentTrainer  # noqa: E402
from shoal.train.agent.update import Learner, update  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "gpu.json"
GROUP = 8
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
rows: list[dict[str, Any]] = []


def add(case: str, subject: str, values: Sequence[float], unit: str) -> None:
    value = statistics.median(values)
    rows.append(
        {"case": case, "subject": subject, "value": round(value, 6), "unit": unit, "runs": len(values)}
    )
    print(f"{time.monotonic() - BEGAN:5.0f} s  {case:<26} {subject:<36} {value:14,.4f} {unit}", flush=True)


@dataclass(frozen=True)
class Shape:
    """A network with random weights."""

    name: str
    kind: str
    vocabulary: int
    sizes: dict[str, int]
    dtype: str

    def save(self, folder: Path) -> None:
        """The network, and a tokenizer of characters and made-up words that fills its vocabulary."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        letters = ["<unk>", "<end>", *map(chr, range(32, 127)), "\n"]
        words = [*letters, *(f"word{n}" for n in range(self.vocabulary - len(letters)))]
        plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
        )
        tokenizer.chat_template = CHAT
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = getattr(transformers, f"{self.kind}Config")(
                vocab_size=self.vocabulary, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1,
                pad_token_id=1, **self.sizes,
            )  # fmt: skip
            model = getattr(transformers, f"{self.kind}ForCausalLM")(config)
        model.to(getattr(torch, self.dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


SMOLLM2 = Shape(
    "SmolLM2-135M", "Llama", 49_152,
    {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
     "num_key_value_heads": 3}, "float32",
)  # fmt: skip
QWEN = Shape(
    "Qwen2.5-0.5B", "Qwen2", 151_936,
    {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
     "num_key_value_heads": 2}, "bfloat16",
)  # fmt: skip
TWO_LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL = (
    Shape("two layers", "Llama", 300, TWO_LAYERS, "float32"),
    Shape("two layers", "Qwen2", 300, TWO_LAYERS, "bfloat16"),
)


class Bench:
    """What all parts share: the device, the networks on disk, and how much is asked of them."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.device, self.scratch, self.options = str(options.device), scratch, options
        self.deterministic = applies("auto", self.device)
        self.exact, self.fast = SMALL if options.small else (SMOLLM2, QWEN)
        # tokens of a prompt and of an answer, requests at once, timed turns, seconds of Pong
        self.prompt, self.answer, self.counts, self.runs, self.pong_seconds = (
            (24, 8, (8, 16), 1, 5) if options.small else (200, 128, (64, 256), 2, 45)
        )

    @cached_property
    def exact_model(self) -> Path:
        """The folder of the float32 network."""
        return self._model("exact", self.exact)

    @cached_property
    def fast_model(self) -> Path:
        """The folder of the bfloat16 network."""
        return self._model("fast", self.fast)

    def _model(self, name: str, shape: Shape) -> Path:
        if self.options.model:
            return Path(self.options.model)
        shape.save(self.scratch / name)
        return self.scratch / name

    def engine(self, shape: Shape, batch: int) -> HuggingFaceEngine:
        """A network as it is on disk, on the device."""
        folder = self.exact_model if shape is self.exact else self.fast_model
        return HuggingFaceEngine.load(
            folder, device=self.device, dtype=shape.dtype, max_batch=batch, cache_tokens=2 * batch * 512
        )

    def learner(self, engine: HuggingFaceEngine, batch: int) -> Learner:
        """A trainer of all weights of a network."""
        policy = policy_of(engine)
        optimizer = split_optimizer(trained_parameters(policy.module), None, 1e-6, 1e-6, 0.0)
        algorithm = Algorithm(minibatch_size=batch, micro_batch_tokens=8192, kl=KLPenalty(0.0))
        return Learner(policy, optimizer, algorithm, AgentProxy())

    def requests(self, engine: HuggingFaceEngine, n: int, answer: int, draw: int = 0) -> list[Request]:
        """Groups that share a prompt; each `draw` has others."""
        asked = []
        for i in range(n):
            words = stream(draw, "gpu", i // GROUP).integers(100, engine.vocabulary, self.prompt)
            key = Key(0, (0, i // GROUP, i % GROUP, 0))
            asked.append(Request(tuple(words.tolist()), key, Sampling(answer, 1.0, ())))
        return asked

    def seconds(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """How long some work takes, until the device has done it, and its result."""
        self.wait()
        began = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - began, result

    def time_left(self) -> float:
        """Seconds of the budget."""
        return float(self.options.budget - (time.monotonic() - BEGAN))

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory of networks that nobody holds any more back."""
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


# --- what must be so
def noise(bench: Bench) -> None:
    """The words of the noise are those of a CPU; its two logarithms are so many units of the last place apart."""
    key, token, size = Key(1, (2, 3)), 3, 10_001
    keys = torch.from_numpy(key_words(key).astype(np.int64))[None]
    there = keys.to(bench.device), torch.tensor([token], device=bench.device), size
    assert torch.equal(words(*there).cpu(), words(keys, torch.tensor([token]), size)), "the words differ"
    here = Noise(key).rows(token + 1, size)[token]
    gap = np.abs(gumbel(*there)[0].cpu().numpy() - here) / np.spacing(np.maximum(np.abs(here), 1e-3))
    add("noise", "words equal; noise apart", [float(gap.max())], "ulp")
    n = bench.counts[-1]
    many, drawn = keys.to(bench.device).expand(n, -1), torch.zeros(n, dtype=torch.int64, device=bench.device)
    gumbel(many, drawn, bench.fast.vocabulary)
    took, _ = bench.seconds(lambda: gumbel(many, drawn, bench.fast.vocabulary))
    add("noise", f"of {n} tokens, vocabulary {bench.fast.vocabulary}", [1000 * took], "ms")


def alone(bench: Bench) -> None:
    """The share of requests that are answered by the same tokens alone as in a batch."""
    for shape in (bench.exact, bench.fast):
        alone_of(bench, shape)
        bench.free()


def alone_of(bench: Bench, shape: Shape) -> None:
    """Eight of a batch are asked again."""
    n = bench.counts[0]
    engine = bench.engine(shape, n)
    asked = bench.requests(engine, n, min(32, bench.answer))
    together = engine.generate(asked)
    equal = []
    for i in range(0, n, n // 8):
        engine.prefixes.clear()
        equal.append(float(engine.generate([asked[i]])[0].token_ids == together[i].token_ids))
    add("the same tokens alone", f"in a batch of {n}, {shape.dtype}", [statistics.mean(equal)], "share")


def samples_of(asked: list[Request], answers: list[Completion]) -> list[Sample]:
    """What an update sees of answers, half of them praised."""
    samples = []
    for i, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        n, first = len(answer.token_ids), len(request.prompt_ids)
        sample = Sample(request.prompt_ids + answer.token_ids, np.arange(first, first + n), {})
        columns = {
            "rollout_logprobs": answer.logprobs,
            "old_logprobs": answer.logprobs,
            "advantages": [(-1.0) ** i] * n,
        }
        for name, column in columns.items():
            sample = sample.with_column(name, np.array(column))  # type: ignore[arg-type]
        samples.append(sample)
    return samples


def twice(bench: Bench) -> None:
    """Two updates from equal weights and equal samples: their metrics and weights have equal bits.

    As `engine.deterministic=auto` has it, and without it, where nothing is promised.
    """
    n = bench.counts[0]
    engine = bench.engine(bench.exact, n)
    asked = bench.requests(engine, n, min(32, bench.answer))
    samples = samples_of(asked, engine.generate(asked))

    def updated(on: bool) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
        learner = bench.learner(bench.engine(bench.exact, n), n)
        with deterministic(on):
            metrics = [update(learner, samples, iteration) for iteration in range(2)]
        return metrics, [p.detach().cpu() for p in learner.policy.module.parameters()]

    def compare(case: str, on: bool) -> None:
        (metrics, weights), (again, other) = updated(on), updated(on)
        gap = max(float((a - b).abs().max()) for a, b in zip(weights, other, strict=True))
        for name in metrics[0]:
            if any(a[name] != b[name] for a, b in zip(metrics, again, strict=True)):
                print(f"{case}: {name} is {[m[name] for m in metrics]} and {[m[name] for m in again]}")
        add(case, "metrics are equal", [float(metrics == again)], "of 1")
        add(case, "weights are equal", [float(gap == 0.0)], "of 1")
        add(case, "largest difference of a weight", [gap], "")

    compare("same update twice", bench.deterministic)
    if bench.deterministic:
        compare("the same, deterministic off", False)


def resumed(bench: Bench) -> None:
    """A run of four iterations, the same once more, and one that was ended after two and resumed.

    Metrics and weights of the last two iterations must be equal.
    """

    def run(name: str, last: int, resume: bool = False) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        overrides = [
            f"engine.model={bench.exact_model}", f"engine.device={bench.device}", f"run_dir={bench.scratch / name}",
            "trainer.iterations=4", "trainer.save_every=2", "trainer.eval_every=99", "trainer.tensorboard=false",
            "es_manager.train.env_groups=32", "es_manager.val.env_groups=2", "warmup.steps=5",
            "use_parallel_envs=false", "engine.train_last_layers=2", f"resume={str(resume).lower()}",
        ]  # fmt: skip
        with AgentTrainer(compose_config("smollm2-bandit", overrides)) as trainer:
            found = []
            for row in trainer.train():
                found.append(row)
                if row["iteration"] >= last:  # left here, as by Ctrl-C: what was saved before is there
                    break
            return found[-2:], [p.detach().cpu().clone() for p in trainer.policy.module.parameters()]

    straight = run("straight", 4)
    add("a run", "neither engine nor update busy", [row["share_idle"] for row in straight[0]], "share")

    def compare(case: str, other: tuple[list[dict[str, Any]], list[torch.Tensor]]) -> None:
        names = ("loss", "entropy", "reward", "grad_norm")
        same = all(a.get(k) == b.get(k) for a, b in zip(straight[0], other[0], strict=True) for k in names)
        equal = all(torch.equal(a, b) for a, b in zip(straight[1], other[1], strict=True))
        add(case, "metrics are equal", [float(same)], "of 1")
        add(case, "weights are equal", [float(equal)], "of 1")

    compare("same run twice", run("again", 4))
    run("resumed", 2)
    compare("resumed = not interrupted", run("resumed", 4, resume=True))


# --- speed
def generation(bench: Bench) -> None:
    """Sampled tokens a second: shoal beside `generate` and transformers' continuous batching, same weights."""
    for n in bench.counts:
        generation_of(bench, n)
        bench.free()


def generation_of(bench: Bench, n: int) -> None:
    """All three on so many requests."""
    engine = bench.engine(bench.fast, n)
    for subject, generate in (
        ("shoal", by_shoal),
        ("model.generate", by_generate),
        ("generate_batch", by_generate_batch),
    ):
        rates = []
        try:
            for run in range(
                bench.runs + 1
            ):  # the first one warms up; nobody knows a prompt of the one before
                asked = bench.requests(engine, n, bench.answer, run)
                took, tokens = bench.seconds(partial(generate, bench, engine, asked))
                if run:
                    rates.append(tokens / took)
        except Exception as error:  # of one of three subjects: the others are still worth a row
            tell_failure(f"generation by {subject}, {n} at once", error)
        else:
            add(f"generation, {n} at once", subject, rates, "tokens/s")
    engine.model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def by_shoal(bench: Bench, engine: HuggingFaceEngine, asked: list[Request]) -> int:
    engine.prefixes.clear()
    return sum(len(answer.token_ids) for answer in engine.generate(asked))


def by_generate(bench: Bench, engine: HuggingFaceEngine, asked: list[Request]) -> int:
    ids = torch.tensor([request.prompt_ids for request in asked], device=bench.device)
    with torch.inference_mode():
        out = engine.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=sampled(bench, engine)
        )
    return int((out[:, bench.prompt :] != engine.pad_id).sum())


def by_generate_batch(bench: Bench, engine: HuggingFaceEngine, asked: list[Request]) -> int:
    from transformers.generation import ContinuousBatchingConfig

    if bench.device.startswith("cuda"):
        config = ContinuousBatchingConfig(max_memory_percent=0.5)
    else:  # nothing is known of free memory there
        config = ContinuousBatchingConfig(num_blocks=2 * len(asked), max_batch_tokens=1024)
    found = engine.model.generate_batch(  # type: ignore[operator]
        inputs=[list(request.prompt_ids) for request in asked], generation_config=sampled(bench, engine),
        continuous_batching_config=config, persistent_manager=True,
    )  # fmt: skip
    if len(found) < len(asked):
        raise RuntimeError(f"generate_batch answered {len(found)} of {len(asked)} requests")
    return sum(len(answer.generated_tokens) for answer in found.values())


def sampled(bench: Bench, engine: HuggingFaceEngine) -> transformers.GenerationConfig:
    """What the rivals are asked for: plain sampling, as long as shoal's."""
    return transformers.GenerationConfig(
        max_new_tokens=bench.answer, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=1,
        pad_token_id=engine.pad_id,
    )  # fmt: skip


def updates(bench: Bench) -> None:
    """Tokens a second and memory of an update, and how far the rollout's log-probabilities are from the update's."""
    for shape in (bench.exact, bench.fast):
        updates_of(bench, shape)
        bench.free()


def updates_of(bench: Bench, shape: Shape) -> None:
    """The same samples again and again, each time with and without deterministic algorithms."""
    n = bench.counts[0]
    engine = bench.engine(shape, n)
    asked = bench.requests(engine, n, bench.answer)
    samples = samples_of(asked, engine.generate(asked))
    bench.free()
    learner, tokens = bench.learner(engine, n), sum(len(sample.ids) for sample in samples)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for run in range(bench.runs + 1):
        for on in rates:
            with deterministic(on):
                took, row = bench.seconds(partial(update, learner, samples, run))
            if run:
                rates[on].append(tokens / took)
            elif on:
                gap = [row["logprob_gap_max"]]
                add("log-probs, greatest gap", f"rollout to update, {shape.dtype}", gap, "nats")
    for on, case in ((True, "update"), (False, "update, deterministic off")):
        add(case, f"{n} samples, {shape.name}, {shape.dtype}", rates[on], "tokens/s")
    if bench.device.startswith("cuda"):
        most = torch.cuda.max_memory_allocated() / 2**30
        add("update: memory", f"{shape.name}, {shape.dtype}", [most], "GiB")


def vllm(bench: Bench) -> None:
    """Tokens a second of vLLM, how far its log-probabilities are from those of the update, how long weights take."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is left out: it is not installed", flush=True)
        return
    from shoal.samplers.vllm import VllmEngine

    n, shape = bench.counts[0], bench.fast
    asked = bench.requests(bench.engine(shape, n), n, bench.answer)
    options = {"gpu_memory_utilization": 0.4} if bench.device.startswith("cuda") else {}
    length = bench.prompt + bench.answer
    with VllmEngine(bench.fast_model, dtype=shape.dtype, max_model_len=length, **options) as there:
        there.generate(asked[:1])
        took, answers = bench.seconds(lambda: there.generate(asked))
        add(
            "vLLM", f"{n} at once, {shape.dtype}", [sum(len(a.token_ids) for a in answers) / took], "tokens/s"
        )
        learner = bench.learner(bench.engine(shape, n), n)
        row = update(learner, samples_of(asked, answers), 0)
        add("log-probs, greatest gap", f"vLLM to update, {shape.dtype}", [row["logprob_gap_max"]], "nats")
        module = learner.policy.module
        weights = {name: value.cpu() for name, value in module.state_dict(keep_vars=True).items()}
        took, _ = bench.seconds(lambda: there.load_weights(weights, 1))
        add("vLLM", "takes over all weights", [took], "s")


def pong(bench: Bench) -> None:
    """Steps a second of Pong's convolutional network, shoal and Stable-Baselines3 in turns where it is installed."""
    if importlib.util.find_spec("ale_py") is None:
        print("Pong is left out: ale_py is not installed", flush=True)
        return
    small = "--n-envs 2 --n-steps 16 --batch-size 16" if bench.options.small else ""
    settings = (
        f"--env ale_py:ALE/Pong-v5 --device {bench.device} --no-tensorboard --log-every 1 --total-timesteps 100000000 "
        f"{small}"
    )
    shoal = ["-m", "shoal", "train-ppo", *settings.split(), "--out"]
    peer = [str(REPO / "benchmarks" / "ppo_pong.py"), "train", "--device", bench.device, "--out"]
    subjects = {"shoal": shoal}
    if not bench.options.small and importlib.util.find_spec("stable_baselines3") is not None:
        subjects["Stable-Baselines3"] = peer
    for subject, command in subjects.items():
        folder = bench.scratch / f"pong-{subject}"
        add(
            "Pong",
            f"{subject} on {bench.device}",
            [pong_rate(bench, [*command, str(folder)], folder)],
            "steps/s",
        )


def pong_rate(bench: Bench, command: list[str], folder: Path) -> float:
    """Steps a second from the first update on, for a fixed time."""
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *command], stdout=said, stderr=said, env=environment)
        try:
            first: dict[str, Any] | None = None
            while True:
                time.sleep(0.5)
                found = metrics_of(folder)
                first = first or (found[0] if found else None)
                measured = found[-1]["seconds"] - first["seconds"] if first else 0.0
                if measured >= bench.pong_seconds or (measured and bench.time_left() < 5):
                    break
                if process.poll() is not None:
                    said.seek(0)
                    raise RuntimeError(f"{command[0]} ended: {said.read().strip()[-300:]}")
        finally:
            process.kill()
            process.wait()
    steps, seconds = (found[-1][name] - first[name] for name in ("steps", "seconds"))
    return float(steps / seconds)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics so far."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


# --- all parts within the budget
PARTS: dict[str, Callable[[Bench], None]] = {
    "noise": noise,
    "same update twice": twice,
    "resumed = not interrupted": resumed,
    "generation": generation,
    "update": updates,
    "the same tokens alone": alone,
    "vLLM": vllm,
    "Pong": pong,
}


class OutOfTimeError(BaseException):
    """The budget is used up; nothing in between may take it for a fault of its own."""


def tell_failure(what: str, error: Exception) -> None:
    """A row that says why there is no figure."""
    reason = f"{type(error).__name__}: {error}".strip()
    rows.append({"case": what, "subject": "failed", "value": None, "unit": reason[:500]})
    traceback.print_exception(error)
    print(f"{what}: FAILED: {reason.splitlines()[0]:.300}", flush=True)


def play(bench: Bench, names: list[str]) -> list[str]:
    """Play the parts, and return those that were left out or broken off because the time was over."""

    def ring(*_: Any) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, bench.time_left()))
    left = list(names)
    try:
        while left and bench.time_left() > 0:
            try:
                PARTS[left[0]](bench)
            except Exception as error:
                tell_failure(left[0], error)
            left.pop(0)
            bench.free()
    except OutOfTimeError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    return left


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder for all parts; random networks if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds, start included")
    parser.add_argument("--only", default="", help=f"parts that hold this: {', '.join(PARTS)}")
    parser.add_argument(
        "--small", action="store_true", help="networks of two layers, to try the script itself"
    )
    parser.add_argument("--quick", action="store_true", help="--small within two minutes, nothing saved")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        if not options.quick:
            raise SystemExit(
                f"PyTorch {torch.__version__} sees no GPU here; --device cpu --small tries the script itself"
            )
        print(f"PyTorch {torch.__version__} sees no GPU here: tried on the CPU", flush=True)
        options.device = "cpu"
    if options.quick:
        options.small, options.budget = True, min(options.budget, 110.0)
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else None
    print(f"{gpu or 'CPU'}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        bench = Bench(options, Path(scratch))
        left = play(bench, [name for name in PARTS if options.only in name])
        networks = str(options.model or f"random, of the shapes {bench.exact.name} and {bench.fast.name}")
    if left:
        print(f"the budget of {options.budget:g} s is used up; not done: {', '.join(left)}", flush=True)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, np)}
    report = {
        "machine": {"platform": platform.platform(), "gpu": gpu, "model": networks},
        "versions": {"python": platform.python_version(), **versions},
        "settings": {"prompt": bench.prompt, "answer": bench.answer, "group": GROUP, "not done": left},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    if not options.quick:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["value"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
