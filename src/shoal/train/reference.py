"""The frozen weights that a KL penalty holds on to: those of the start of the run, kept in its folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.core.files import verify_folder, write_folder
from shoal.train.policy import TrainableEngine
from shoal.train.processes import ALONE, Processes
from shoal.train.sharding import ShardedEngine

if TYPE_CHECKING:
    from shoal.train.lora import LoraEngine


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
