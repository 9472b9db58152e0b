"""Networks in shards, one a process (`trainer.sharding: full`): FSDP2, whose passes are those of all processes.

Weights are gathered whole where they are written or handed on, see `shoal.train.agent.processes.weights`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.samplers.sampler import of_inner
from shoal.train.agent.policies.policy import Policy, WrappedPolicy
from shoal.train.agent.processes.distributed import Processes

if TYPE_CHECKING:  # FSDP takes a second to import, and few runs need it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class ShardedPolicy(WrappedPolicy):
    """A policy whose network lies in shards (`fully_shard`); it computes scores with all processes.

    It is made of one with a whole network, the same in every process, which is cut in place. What samples from the
    network itself can do so for as long as `whole` lasts.
    """

    def __init__(self, policy: Policy, processes: Processes) -> None:
        super().__init__(policy)
        with torch.no_grad():
            policy.logits(*_short(policy))  # it finds out what its network is like while that is whole
        self._scores = _Scores(policy)
        self._parts = shard(self._scores, policy, processes)
        self._root = self._parts[-1]

    @property
    def head(self) -> None:
        """A part of the pass of all processes: scores are made at once."""
        return None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every process has all parameters for as long as this lasts, and may use them without the others.

        Their versions have changed, so nothing that was computed from earlier ones is taken for theirs.
        """
        self._root.set_reshard_after_forward(False)
        for part in self._parts:
            part.unshard()
        for parameter in self._scores.parameters():  # PyTorch does not count gathering as a change
            torch.autograd.graph.increment_version(parameter)
        try:
            yield
        finally:
            self._root.set_reshard_after_forward(True)
            self._root.reset_iter_state()

    without_adapters = of_inner("without_adapters")

    def logits(self, *read: Any) -> Tensor:
        """As the inner one's, with all processes at once."""
        scores: Tensor = self._scores(*read)
        if not torch.is_grad_enabled():  # else a backward pass is expected
            self._root.reset_iter_state()
        return scores


class _Scores(nn.Module):
    """The pass that gives scores, as the forward pass of a module around the network."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.module
        self._policy = policy

    def forward(self, *read: Any) -> Tensor:
        return self._policy.logits(*read)


def shard(
    root: nn.Module, policy: Policy, processes: Processes, more: Sequence[nn.Module] = ()
) -> list[FSDPModule]:
    """Cut the parts of a network in place: its blocks, each of `more`, and what is left; the root is the last.

    Blocks are those that a transformers model names, or the longest list of modules.

    Args:
        root: a module whose `model` is the network; its forward pass reads what `Policy.logits` does.
        policy: of the same tokens.
        processes: who holds the shards.
        more: parts of `root` with numbers of their own kind.

    Raises:
        ConfigError: FSDP cannot cut this network.
    """
    from torch.distributed.fsdp import fully_shard

    lists = [list(part) for part in root.modules() if isinstance(part, nn.ModuleList)]
    names = set(getattr(root.model, "_no_split_modules", None) or ())
    blocks = [part for part in root.modules() if type(part).__name__ in names] or max(
        lists, key=len, default=[]
    )
    for name, part in root.named_modules():
        if name.endswith("experts") and isinstance(part, nn.ModuleList):
            raise ConfigError(
                f"trainer.sharding=full needs the experts of a layer in one tensor, as transformers 5 keeps them: a "
                f"process whose samples miss one of the {len(part)} modules of {name} would have no gradient to sum. "
                f"Set trainer.sharding=none"
            )
    mesh = _mesh(next(root.parameters()).device.type, processes.count)
    try:
        cut = [fully_shard(part, mesh=mesh, reshard_after_forward=True) for part in [*blocks, *more, root]]
        for part in cut:
            part.set_gradient_divide_factor(1.0)  # weights of tokens are shares of the whole minibatch: a sum
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        with torch.no_grad():
            root(*_short(policy))  # from the first pass on, the outermost module is known as such
    except (ValueError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"trainer.sharding=full cannot cut this network with PyTorch {torch.__version__} (2.13 is known to do): "
            f"{error}. Set trainer.sharding=none, or engine.dtype=float32 if dtypes differ"
        ) from error
    return cut


@functools.cache
def _mesh(device: str, count: int) -> DeviceMesh:
    """The processes in a row; one object, so that weights can go from shard to shard."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (count,))


def _short(policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """What the shortest pass reads."""
    device = next(policy.module.parameters()).device
    ids, where = torch.tensor([[policy.pad_id] * 3]), torch.tensor([[False, True, True]])
    return ids.to(device), torch.tensor([3], device=device), where.to(device)
