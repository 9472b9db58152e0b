"""The optimizer: AdamW whose float32 masters move weights of fewer bits, its rates and the length of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import DivergedError
from shoal.train.optimizers import AdamW

LOWER = (
    "Go on from the last checkpoint with a lower learning rate (resume=true algorithm.learning_rate=…), or begin anew "
    "in another run_dir (at the start with a lower warmup.learning_rate)"
)
"""The remedy for a run that diverged."""


class MasterAdamW(AdamW):
    """AdamW that steps float32 masters of parameters with fewer bits, and rounds them into the network after.

    A small step is lost when it is added to a bfloat16 weight; in the master it adds up with the next ones. Float32
    parameters are their own masters. Groups are those of `torch.optim.AdamW`, each with `params` and `lr`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], weight_decay: float = 0.0) -> None:
        self._rounded: list[tuple[Tensor, nn.Parameter]] = []  # parameter of the network, its master
        mastered = [{**group, "params": [self._master(p) for p in group["params"]]} for group in groups]
        super().__init__(mastered, weight_decay=weight_decay, fused=True)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = nn.Parameter(parameter.detach().float())
        self._rounded.append((parameter, master))
        return master

    @torch.no_grad()
    def take_weights(self) -> None:
        """Begin anew from the network's weights, which something else has set."""
        for parameter, master in self._rounded:
            master.copy_(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        super().zero_grad(set_to_none)
        for parameter, _ in self._rounded:
            parameter.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the network's gradients to the masters', in float32: call it after each backward pass.

        Left in the network, those of several passes would be summed, and rounded, in as few bits as its weights have.
        """
        for parameter, master in self._rounded:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the masters by the network's gradients, and round them into the network."""
        self.take_gradients()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        result = super().step(closure)
        # the fused kernel leaves versions as they are, by which samplers know that what they kept is out of date
        torch.autograd.graph.increment_version([p for p in stepped if not hasattr(p, "full_tensor")])
        for parameter, master in self._rounded:
            parameter.copy_(master)
            master.grad = None
        return result

    @property
    def stepped(self) -> list[list[nn.Parameter]]:
        """By group, what is stepped and has the gradients: masters, and parameters that need none."""
        return [group["params"] for group in self.param_groups]

    def masters(self) -> dict[str, Tensor]:
        """Those that are no parameters of the network themselves, as `<number of the parameter>.master`."""
        own = {id(master) for _, master in self._rounded}
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return {f"{i}.master": master.detach() for i, master in enumerate(every) if id(master) in own}


def shorten(parameters: Sequence[nn.Parameter], limit: float | None, of: str) -> float:
    """The norm of a gradient, which is no longer than `limit` after; 0 and None are no limit.

    Raises:
        DivergedError: it is NaN or infinite; no step was made with it.
    """
    norm = nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # the former of shards
    if not math.isfinite(size):
        raise DivergedError(
            f"the gradient of the {of} is {size} (its norm): training diverged, and the weights are those from before "
            f"it. {LOWER}"
        )
    return size


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in a fixed order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def split_optimizer(
    policy: list[nn.Parameter], critic: nn.Module | None, rate: float, critic_rate: float, weight_decay: float
) -> MasterAdamW:
    """One Adam for both, each with its own rate."""
    groups: list[dict[str, Any]] = [{"params": policy, "lr": rate}]
    if critic is not None:
        groups.append({"params": trained_parameters(critic), "lr": critic_rate})
    return MasterAdamW(groups, weight_decay=weight_decay)
