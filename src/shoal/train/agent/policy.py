"""The networks of a run: the one that is trained, its critic, and the one that a KL penalty holds on to."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import ConfigError
from shoal.core.files import read_json, verify_folder, write_folder
from shoal.rollout.samplers.models import resolve_model
from shoal.rollout.samplers.registry import make_learner
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request
from shoal.rollout.samplers.settings import EngineConfig
from shoal.train.agent.batch import Batching, MicroBatch, Sample, token_values
from shoal.train.agent.distributed import ALONE, Processes, ShardedEngine
from shoal.train.agent.weights import MasterAdamW

if TYPE_CHECKING:
    from shoal.train.agent.lora import LoraEngine

logger = logging.getLogger(__name__)


class TrainableEngine(Protocol):
    """An engine in this process that shares its network with the trainer."""

    weights_version: int
    pad_id: int

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Between text and this engine's tokens."""
        ...

    @property
    def model(self) -> nn.Module:
        """The network, shared with the engine."""
        ...

    @property
    def reads_stems(self) -> bool:
        """Whether `logits_at` takes rows in which samples share what they begin with."""
        ...

    @property
    def level(self) -> Level:
        """See `shoal.rollout.samplers.sampler.Level`."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        ...

    def logits_at(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """Scores `[N, V]` of the tokens at the true places of `where [B, T]`, in row-major order.

        With `begins [B, T]` a row holds several samples: attention stays within them and positions start anew. With
        `[3, B, T]` each may go on from a stem before it in the row, see `shoal.train.agent.batch.MicroBatch`.
        """
        ...

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name."""
        ...

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote, by the names that `load_weights` wants."""
        ...

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `load_engine` needs into an existing folder; `weights` by name in the place of the network's."""
        ...


def make_engine(config: EngineConfig, words: Sequence[str], seed: int) -> TrainableEngine:
    """The engine of a config, with fresh or pretrained weights that can be trained.

    Raises:
        ConfigError: it cannot be trained (see `shoal.rollout.samplers.registry.make_engine` for playing).
    """
    engine: TrainableEngine = make_learner(config, words, seed)
    return engine


def load_teacher(folder: str, student: TrainableEngine) -> TrainableEngine:
    """A frozen network that scores what a student wrote, from a model folder or the `engine` folder of a checkpoint.

    Raises:
        ConfigError: it does not read the student's tokens.
    """
    where = resolve_model(folder)
    device = str(next(student.model.parameters()).device)
    teacher: Any = load_engine(where, device=device)
    sizes = [next(p for p in one.model.parameters() if p.dim() == 2).shape[0] for one in (teacher, student)]
    text = "The quick brown fox: 3 + 4 = 7? <action>Up</action>"
    if sizes[0] != sizes[1] or teacher.tokenizer.encode(text) != student.tokenizer.encode(text):
        raise ConfigError(
            f"algorithm.teacher={folder} has another vocabulary than the model that is trained ({sizes[0]} and "
            f"{sizes[1]} tokens): choose a teacher of the same family"
        )
    teacher.model.requires_grad_(False)
    return teacher  # type: ignore[no-any-return]


def load_engine(folder: Path, *, device: str = "cpu") -> TrainableEngine:
    """The engine in the `engine` folder of a checkpoint."""
    described: dict[str, Any] = {}
    if (folder / "engine.json").exists() or not (folder / "config.json").exists():  # a bare model has none
        described = read_json(folder / "engine.json")
    if described.get("engine") == "tiny":
        from shoal.rollout.samplers.tiny import TinyEngine

        return TinyEngine.load(folder, device=device)
    if described.get("engine") == "huggingface-lora":
        from shoal.train.agent.lora import load_lora

        return load_lora(folder, device)
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine

    return HuggingFaceEngine.load(folder, device=device, dtype=described.get("dtype", "float32"))


Precision = Literal["float32", "bfloat16"]


def autocast(model: nn.Module, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in bfloat16 if asked for; sums that need it stay in float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


def can_checkpoint(model: nn.Module) -> bool:
    """Whether layers of this model can be computed again in the backward pass."""
    return bool(_layers(model))


def _layers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]


@contextlib.contextmanager
def training_mode(model: nn.Module, checkpointing: bool, seed: int) -> Iterator[None]:
    """The layers of `model` are computed again in the backward pass if asked for, and adapters drop out by `seed`.

    The model itself stays in evaluation mode: what it computes is what the engine computed.
    """
    layers = _layers(model) if checkpointing else []
    drops = [
        part
        for name, part in model.named_modules()
        if "lora_dropout" in name and isinstance(part, nn.Dropout) and part.p > 0
    ]
    before = [part.gradient_checkpointing for part in layers]
    for (
        part
    ) in layers:  # set here, since the methods of transformers that do it change names between versions
        part.gradient_checkpointing = True  # type: ignore[assignment]
        part._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
    switched = [*layers, *drops]
    for part in switched:
        part.training = True  # of this module alone: its parts keep their mode
    device = next(model.parameters()).device
    noise = (
        torch.random.fork_rng([device] if device.type == "cuda" else [])
        if drops
        else contextlib.nullcontext()
    )
    try:
        with noise:
            if drops:
                torch.manual_seed(seed % 2**63)
            yield
    finally:
        for part in switched:
            part.training = False
        for part, was in zip(layers, before, strict=True):
            part.gradient_checkpointing = was


def context_of(engine: TrainableEngine) -> int | None:
    """Tokens of the longest prompt and response together that a model reads; None where it does not say."""
    shape = getattr(engine.model, "shape", None)
    if shape is not None:
        return int(shape.context)
    limit = getattr(getattr(engine.model, "config", None), "max_position_embeddings", None)
    return int(limit) if limit else None


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in a fixed order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def logprobs_of(
    engine: TrainableEngine, micro: MicroBatch, temperature: float, precision: Precision = "float32"
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[N, V]` of every token and `[N]` of the trained ones, as sampled at `temperature`."""
    with autocast(engine.model, precision):
        logits = engine.logits_at(micro.ids, micro.lengths, micro.where, micro.begins)
    scores = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    return scores, scores.gather(1, micro.targets[:, None])[:, 0]


class Critic(nn.Module):
    """A body of the policy's shape, started from its weights, and one linear output that starts at 0.

    Args:
        engine: whose network is copied; it must be able to give hidden states.
    """

    def __init__(self, engine: TrainableEngine) -> None:
        super().__init__()
        if not hasattr(engine, "hidden_at"):
            raise ConfigError(
                f"estimators with a critic need an engine that gives hidden states, {type(engine).__name__} does not"
            )
        self._body = copy.copy(engine)
        self.model = copy.deepcopy(engine.model)
        self._body.model = self.model  # type: ignore[misc]
        width = self._body.hidden_width  # type: ignore[attr-defined]
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=[]):  # the weights are set below; global state stays as it was
            self.output = nn.Linear(width, 1, device=device)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """Values `[N]` of the contexts before the true places of `where [B, T]`, in row-major order."""
        hidden = self._body.hidden_at(ids, lengths, where, begins)  # type: ignore[attr-defined]
        return cast(Tensor, self.output(hidden.float())[:, 0].clone())  # hooks on the result want no view


def split_optimizer(
    policy: list[nn.Parameter], critic: Critic | None, rate: float, critic_rate: float, weight_decay: float
) -> MasterAdamW:
    """One Adam for both, each with its own rate."""
    groups: list[dict[str, Any]] = [{"params": policy, "lr": rate}]
    if critic is not None:
        groups.append({"params": trained_parameters(critic), "lr": critic_rate})
    return MasterAdamW(groups, weight_decay=weight_decay)


class Reference:
    """A copy of an engine that is never trained.

    Args:
        folder: where its weights are kept for a run that is resumed.
        engine: what is copied, with a whole network.
        processes: of the run; the first one writes the folder, and all hold shards of the copy where networks do.
    """

    def __init__(self, folder: Path, engine: TrainableEngine, processes: Processes = ALONE) -> None:
        self._folder = folder
        self._writes = processes.first
        frozen: TrainableEngine = copy.copy(engine)
        frozen.model = copy.deepcopy(engine.model)  # type: ignore[misc]
        frozen.model.requires_grad_(False)
        self.engine: TrainableEngine = ShardedEngine(frozen, processes) if processes.sharded else frozen

    def keep(self, engine: TrainableEngine) -> None:
        """Take over the present weights of `engine`, in memory and on disk."""
        self.engine.model.load_state_dict(engine.model.state_dict())
        weights = engine.gathered(self._writes) if isinstance(engine, ShardedEngine) else None
        if self._writes:
            with write_folder(self._folder) as folder:
                engine.save(folder, weights)

    def load(self) -> None:
        """Read back what `keep` wrote."""
        weights = self.engine.read(verify_folder(self._folder))
        self.engine.load_weights(weights, self.engine.weights_version)


class BaseReference:
    """The base model under LoRA adapters as the reference: the same network with them switched off.

    Args:
        engine: the adapted engine.
    """

    def __init__(self, engine: LoraEngine | ShardedEngine) -> None:
        self._engine = engine
        self.engine: TrainableEngine = _Base(engine)

    def keep(self, engine: TrainableEngine) -> None:
        """Nothing to keep: the base never changes."""

    def load(self) -> None:
        """Nothing to load: the base is loaded with the engine."""


class _Base:
    """The part of a trainable engine that is asked of a reference, without the adapters."""

    def __init__(self, engine: LoraEngine | ShardedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits_at(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        with self._engine.without_adapters():
            return self._engine.logits_at(ids, lengths, where, begins)


LENGTHS = (23, 14, 9)
"""Tokens of the samples of the trial: the last two share a row, behind each other."""


def safe_batching(engine: TrainableEngine, wanted: Batching) -> Batching:
    """`wanted`, or what is right for this model: `auto` becomes `bucketed` where packing would be wrong.

    Raises:
        ConfigError: `packed` is asked for, and this model does not keep samples of a row apart.
    """
    if wanted not in ("auto", "packed"):
        return wanted
    fault = packing_fault(engine)
    if fault is None:
        return wanted
    if wanted == "packed":
        raise ConfigError(
            f"algorithm.batching=packed is wrong for this model: {fault}; set bucketed (or auto)"
        )
    logger.warning("samples are not packed into rows (algorithm.batching=bucketed): %s", fault)
    return "bucketed"


def packing_fault(engine: TrainableEngine) -> str | None:
    """What goes wrong when this model gets two samples in one row, or None if nothing does.

    The second sample of a row must not change when the first does (not even by rounding: masked tokens count
    nothing), and must have the log-probabilities that it has alone.
    """
    parameter = next(engine.model.parameters())
    tolerance = 1e-3 if parameter.dtype == torch.float32 else 0.1
    samples, changed = _trial(engine, 0), _trial(engine, 7)
    changed[2] = samples[2]
    try:
        packed, other = (_logprobs(engine, each, "packed") for each in (samples, changed))
        alone = _logprobs(engine, samples, "padded")
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        lines = str(error).strip().splitlines() or [""]
        return f"it does not take packed rows ({type(error).__name__}: {lines[0]})"
    leak = float(np.abs(packed[2] - other[2]).max())
    if not leak <= 1e-6:
        return (
            f"a sample's log-probs change by {leak:.2g} with the sample before it in the row (recurrent or "
            f"linear-attention layers, or a mask that is ignored)"
        )
    gap = max(float(np.abs(a - b).max()) for a, b in zip(packed, alone, strict=True))
    if not gap <= tolerance:
        return f"log-probs in a packed row differ by {gap:.2g} from those alone (positions that do not start anew)"
    return None


def _trial(engine: TrainableEngine, start: int) -> list[Sample]:
    """Samples of arbitrary tokens that every vocabulary has (special ones count as well as any)."""
    embedding = next(p for p in engine.model.parameters() if p.dim() == 2)
    below = min(200, embedding.shape[0])
    ids = (np.arange(sum(LENGTHS)) * 37 + 11 + start) % below
    parts = np.split(ids, np.cumsum(LENGTHS)[:-1])
    return [Sample(tuple(part.tolist()), np.arange(1, len(part)), {}) for part in parts]


def _logprobs(engine: TrainableEngine, samples: list[Sample], batching: Batching) -> list[np.ndarray]:
    device = str(next(engine.model.parameters()).device)
    return list(
        token_values(
            samples, lambda micro: logprobs_of(engine, micro, 1.0)[1], 4096, engine.pad_id, device, batching
        )
    )
