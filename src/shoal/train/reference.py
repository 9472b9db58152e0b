"""The frozen weights that a KL penalty holds on to: those of the start of the run, kept in its folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.core.files import verify_folder, write_folder
from shoal.train.policy import TrainableEngine, load_engine

if TYPE_CHECKING:
    from shoal.train.lora import LoraEngine


class Reference:
    """A copy of an engine that is never trained.

    Args:
        folder: where its weights are kept for a run that is resumed.
        writes: False keeps them in memory alone (another process of the run writes them).
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self._folder = folder
        self._writes = writes
        self._engine: TrainableEngine | None = None

    @property
    def engine(self) -> TrainableEngine:
        """The frozen engine, once `keep` or `load` was called."""
        if self._engine is None:
            raise RuntimeError("the reference has no weights yet: keep() or load() comes first")
        return self._engine

    def keep(self, engine: TrainableEngine) -> None:
        """Copy the present weights of `engine`, in memory and on disk."""
        if self._writes:
            with write_folder(self._folder) as folder:
                engine.save(folder)
        frozen = copy.copy(engine)
        frozen.model = copy.deepcopy(engine.model)  # type: ignore[misc]
        self._engine = self._frozen(frozen)

    def load(self, device: str) -> None:
        """Read back what `keep` wrote."""
        self._engine = self._frozen(load_engine(verify_folder(self._folder), device=device))

    @staticmethod
    def _frozen(engine: TrainableEngine) -> TrainableEngine:
        engine.model.requires_grad_(False)
        return engine


class BaseReference:
    """The base model under LoRA adapters as the reference: the same network with them switched off.

    Args:
        engine: the adapted engine.
    """

    def __init__(self, engine: LoraEngine) -> None:
        self._engine = engine
        self.engine: TrainableEngine = _Base(engine)

    def keep(self, engine: TrainableEngine) -> None:
        """Nothing to keep: the base never changes."""

    def load(self, device: str) -> None:
        """Nothing to load: the base is loaded with the engine."""


class _Base:
    """The part of a trainable engine that is asked of a reference, without the adapters."""

    def __init__(self, engine: LoraEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits_at(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        with self._engine.without_adapters():
            return self._engine.logits_at(ids, lengths, where, begins)
