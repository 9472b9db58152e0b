"""Networks in shards (FSDP2): each process holds a part of parameters, gradients and optimizer state.

A pass through a sharded network is one of all processes: each must take as many as the others. A block's parameters are
gathered when the pass comes to it and let go behind it; gradients are summed over the processes and cut as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.rollout.samplers.sampler import EngineAround
from shoal.train.critic import Critic
from shoal.train.policy import TrainableEngine
from shoal.train.processes import Processes
from shoal.train.whole_tensors import cut_like, whole_weights

if TYPE_CHECKING:  # it takes a second to import, and few runs need it
    from torch.distributed.fsdp import FSDPModule


class ShardedEngine(EngineAround):
    """An engine whose network lies in shards; it computes scores with all processes, and generates with none.

    To generate, the engine itself is asked for as long as `whole` lasts.

    Args:
        engine: with a whole network, the same in every process; it is cut in place.
        processes: who holds the shards.
    """

    _engine: TrainableEngine

    def __init__(self, engine: TrainableEngine, processes: Processes) -> None:
        super().__init__(engine)
        _try(engine.logits_at, engine)  # it finds out what its network is like while that is whole
        self.reads_stems, self.pad_id = engine.reads_stems, engine.pad_id
        self._scores = _Scores(engine)
        self._parts = _shard(self._scores, engine.model, [], processes)
        self._root = self._parts[-1]
        _try(self.logits_at, engine)  # from the first pass on, the outermost module is known as such

    @property
    def model(self) -> nn.Module:
        """The network, whose parameters are shards."""
        return self._engine.model

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every process has all parameters for as long as this lasts, and may use the engine without the others.

        An engine that samples elsewhere is handed the weights, and nothing is held here.
        """
        hand_over = getattr(self._engine, "hand_over", None)
        if hand_over is not None:
            hand_over(whole_weights(self.model))
            yield
            return
        self._root.set_reshard_after_forward(False)
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            self._root.set_reshard_after_forward(True)
            self._forget()

    # --- training
    def logits_at(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        """As the engine's, with all processes at once."""
        scores: Tensor = self._scores(ids, lengths, where, begins)
        if not torch.is_grad_enabled():
            self._forget()
        return scores

    def _forget(self) -> None:
        """Let go of whole parameters and of passes without a backward pass.

        What comes next is guessed from the passes before, and the guesses of all processes must be the same.
        """
        self._root.reset_iter_state()

    # --- files
    def gathered(self, keep: bool) -> dict[str, Tensor]:
        """Whole weights for `save`, asked for by all processes and given to those that `keep` them."""
        return whole_weights(self.model, keep, trained_only=hasattr(self._engine, "adapter_parameters"))

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `load_engine` needs, with weights from `gathered`."""
        if weights is None:
            raise ValueError("the weights lie in shards: gather them in all processes, and pass them")
        self._engine.save(folder, weights)

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Take over weights by name, which every process has whole."""
        own = dict(self.model.state_dict(keep_vars=True))
        if hasattr(self._engine, "adapter_parameters"):
            own |= self._engine.adapter_parameters()
        fit = {n for n, value in weights.items() if n in own and own[n].shape == value.shape}
        cut = {n: cut_like(value, own[n]) if n in fit else value for n, value in weights.items()}
        self._engine.load_weights(cut, version)


def shard_critic(critic: Critic, engine: TrainableEngine, processes: Processes) -> None:
    """Cut a critic in place; its output has numbers of its own kind, so it is a part of its own."""
    _shard(critic, critic.model, [critic.output], processes)
    _try(critic, engine)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a network: those that a transformers model names, or its longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [part for part in model.modules() if type(part).__name__ in names]
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return named or max(lists, key=len, default=[])


class _Scores(nn.Module):
    """The pass that gives scores, as the forward pass of a module around the network."""

    def __init__(self, engine: TrainableEngine) -> None:
        super().__init__()
        self.model = engine.model
        self._engine = engine

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, begins: Tensor | None = None) -> Tensor:
        return self._engine.logits_at(ids, lengths, where, begins)


def _shard(
    root: nn.Module, model: nn.Module, more: Sequence[nn.Module], processes: Processes
) -> list[FSDPModule]:
    """Cut each block of `model`, each of `more`, and what is left of `root`: these parts, the root last.

    Raises:
        ConfigError: a part is of a kind that cannot be cut, or this PyTorch cannot do it.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not all(
        hasattr(FSDPModule, name) for name in ("reset_iter_state", "set_force_sum_reduction_for_comms")
    ):
        raise ConfigError(
            f"trainer.sharding=full needs a newer PyTorch than {torch.__version__} (2.13 is known to do): "
            f"install it, or set trainer.sharding=none"
        )
    parts = [*blocks_of(model), *more]
    _refuse_mixed(root, parts)
    mesh = processes.mesh(next(root.parameters()).device.type)
    cut = [fully_shard(part, mesh=mesh, reshard_after_forward=True) for part in [*parts, root]]
    for part in cut:
        part.set_gradient_divide_factor(1.0)  # weights of tokens are shares of the whole minibatch: a sum
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return cut


def _refuse_mixed(root: nn.Module, parts: Sequence[nn.Module]) -> None:
    for name, part in root.named_modules():
        if name.endswith("experts") and isinstance(part, nn.ModuleList):
            raise ConfigError(
                f"trainer.sharding=full needs the experts of a layer in one tensor, as transformers 5 keeps them, and "
                f"{name} has {len(part)} modules: a process whose samples miss one would have no gradient to sum. "
                f"Set trainer.sharding=none"
            )
    inner = {id(parameter) for part in parts for parameter in part.parameters()}
    rest = [p for p in root.parameters() if id(p) not in inner]
    for group in [*(list(part.parameters()) for part in parts), rest]:
        kinds = {str(p.dtype).removeprefix("torch.") for p in group if p.requires_grad}
        if len(kinds) > 1:
            raise ConfigError(
                f"trainer.sharding=full needs one kind of number for all that is trained in a block, got "
                f"{' and '.join(sorted(kinds))}: set engine.dtype=float32, or trainer.sharding=none"
            )
        if any(p.ndim == 0 for p in group):
            raise ConfigError(
                "this network has a parameter that is a single number, which cannot be cut: set trainer.sharding=none"
            )


def _try(network: Any, engine: TrainableEngine) -> None:
    """One short pass without gradients."""
    device = next(engine.model.parameters()).device
    ids = torch.tensor([[engine.pad_id] * 3], device=device)
    with torch.no_grad():
        network(ids, torch.tensor([3], device=device), torch.tensor([[False, True, True]], device=device))
