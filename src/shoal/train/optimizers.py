"""Optimizers of torch that leave its compiler alone: importing it takes 2 s, and no optimizer here is compiled."""

from __future__ import annotations

import inspect

import torch


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
