"""Optimizers of torch that leave its compiler alone: importing it takes 2 s, and no optimizer here is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Uncompiled(torch.optim.Optimizer):
    """Beside one of torch's optimizers, and in front of it, its plain methods in place of the wrapped ones.

    Torch wraps what `torch.compile` must not look into, and the wraps import `torch._dynamo` when they are first
    called. An optimizer of this kind is not differentiable.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Uncompiled, torch.optim.Adam):
    """Adam (arXiv:1412.6980) as torch has it."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Uncompiled, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) as torch has it."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class MasterAdamW(AdamW):
    """AdamW that steps float32 masters of parameters with fewer bits, and rounds them into the network after.

    A small step is lost when it is added to a bfloat16 weight; in the master it adds up with the next ones. Float32
    parameters are their own masters.

    Args:
        groups: as of `torch.optim.AdamW`, each with `params` and `lr`.
        weight_decay: of all groups.
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
