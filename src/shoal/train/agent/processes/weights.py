"""Weights on their way: between networks, files, shards and the optimizer.

Tensors that may lie in shards over several processes are gathered whole, and cut again. One that lies here whole is
what it is: each function is then free, and no process waits for another. So files hold whole tensors, whoever wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.samplers.sampler import refuse_strange


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, in memory of the CPU if it had to be gathered; every process that has a shard must ask."""
    gather = getattr(tensor, "full_tensor", None)  # a `DTensor`'s, whose module takes a second to import
    if gather is None:
        return tensor.detach()
    gathered: Tensor = gather()
    return gathered.detach().cpu()


def cut_like(value: Tensor, tensor: Tensor) -> Tensor:
    """`value`, which every process has whole, as `tensor` lies: this process's shard of it, or itself.

    One that lies so already is given back.
    """
    if not hasattr(tensor, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    here = value.to(tensor.device, tensor.dtype)
    return distribute_tensor(here, tensor.device_mesh, tensor.placements, src_data_rank=None)


def gather(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name; one under two names is one. Every process that has a shard must ask.

    Without `keep` it takes part in gathering, tensor by tensor, and gives nothing.
    """
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            value = whole(tensor)
            known[id(tensor)] = value if keep else tensor
        if keep:
            found[name] = known[id(tensor)]
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State tensors and masters as they lie, as `<number of the parameter>.<name>`."""
    state = optimizer.state_dict()["state"]
    held = {f"{i}.{name}": value for i, values in state.items() for name, value in values.items()}
    return held | getattr(optimizer, "masters", dict)()  # type: ignore[no-any-return]


def without_tied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One name of each object, the first in the alphabet, as files of tensors want it; and for the others, which."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name in sorted(weights):
        known = first.setdefault(id(weights[name]), name)
        if known != name:
            tied[name] = known
    return {name: value.detach() for name, value in weights.items() if name not in tied}, tied


@torch.no_grad()
def fill(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Put weights by name in place of `own`; of tied ones, one is enough.

    Raises:
        DataError: they are of another network; all is as it was.
    """
    refuse_strange(own, weights)
    for name, value in weights.items():
        own[name].copy_(cut_like(value, own[name]))


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; masters that it did not give are the network's weights."""
    state: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    getattr(optimizer, "take_weights", lambda: None)()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)]
        if name == "master":
            with torch.no_grad():
                parameter.copy_(cut_like(value, parameter))
            continue
        same = value.shape == parameter.shape
        state.setdefault(int(index), {})[name] = cut_like(value, parameter) if same else value
    described = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": described["param_groups"]})
