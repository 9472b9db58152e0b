"""Engines whose weights can be trained here, and how a config names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.core.files import read_json
from shoal.rollout.samplers.registry import make_learner
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request
from shoal.rollout.samplers.settings import EngineConfig


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
        `[3, B, T]` each may go on from a stem before it in the row, see `shoal.train.samples.MicroBatch`.
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


def load_engine(folder: Path, *, device: str = "cpu") -> TrainableEngine:
    """The engine in the `engine` folder of a checkpoint."""
    described: dict[str, Any] = read_json(folder / "engine.json")
    if described.get("engine") == "tiny":
        from shoal.rollout.samplers.tiny import TinyEngine

        return TinyEngine.load(folder, device=device)
    if described.get("engine") == "huggingface-lora":
        from shoal.train.lora import load_lora

        return load_lora(folder, device)
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine

    return HuggingFaceEngine.load(folder, device=device, dtype=described.get("dtype", "float32"))
