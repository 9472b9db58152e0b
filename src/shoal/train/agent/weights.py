"""Weights on their way: between networks and samplers, files, shards and the optimizer.

Tensors that may lie in shards over several processes are gathered whole, and cut again. One that lies here whole is
what it is: each function is then free, and no process waits for another. So files hold whole tensors, whoever wrote.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.samplers.sampler import capabilities_of, refuse_strange

if TYPE_CHECKING:
    from shoal.train.agent.policy import Policy


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
    """Whole tensors by name; one under two names is one.

    Args:
        tensors: of which every process that has a shard must ask.
        keep: False takes part in gathering, tensor by tensor, and gives nothing.
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


class WeightSync:
    """Carries the weights of a policy to what samples by them, and only when they have changed.

    A sampler that writes with the policy's own network sees every change and gets the version. Where LoRA adapters
    are trained, they alone are carried. Where networks lie in shards, all processes carry at once. One sampler follows
    one policy.

    Args:
        policy: what is trained.
        sampler: what writes; `load_weights(weights, version)` takes weights in memory of the CPU, and
            `load_adapter(folder, version)` a LoRA folder.

    Raises:
        ConfigError: the policy trains adapters, and the sampler takes none.
    """

    def __init__(self, policy: Policy, sampler: Any) -> None:
        self._policy, self._sampler = policy, sampler
        self.shared = getattr(sampler, "model", None) is policy.module
        self._adapters = not self.shared and hasattr(policy, "without_adapters")
        if self._adapters and not capabilities_of(sampler).adapters:
            raise ConfigError(
                f"{type(sampler).__name__} takes no LoRA adapters: set model.lora.rank to 0, or use a sampler that "
                f"does (huggingface, or vllm with enable_lora)"
            )
        self._carried: tuple[int, int] | None = None

    def changed(self) -> None:
        """Weights were set by something else than an update, which raises their version."""
        self._carried = None

    def carry(self) -> None:
        """Let the sampler write by the weights as they are now."""
        version = self._policy.weights_version
        if self.shared:
            self._sampler.weights_version = version
            return
        parameters = list(self._policy.module.parameters())
        in_shards = any(hasattr(parameter, "full_tensor") for parameter in parameters)
        stamp = (version, 0 if in_shards else sum(parameter._version for parameter in parameters))
        if stamp != self._carried:
            self._carried = None  # if it fails midway, who knows what is there
            if self._adapters:
                self._carry_adapter(version)
            else:
                weights = gather(self._policy.module.state_dict(keep_vars=True))
                self._sampler.load_weights({name: tensor.cpu() for name, tensor in weights.items()}, version)
            self._carried = stamp

    def _carry_adapter(self, version: int) -> None:
        """Let the sampler load the adapters, which alone have changed: its base model is that of the policy."""
        module: Any = self._policy.module
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        with tempfile.TemporaryDirectory(prefix="shoal-adapter-") as folder:
            kept = {name: t for name, t in module.state_dict(keep_vars=True).items() if name in trained}
            module.save_pretrained(folder, state_dict=gather(kept))
            self._sampler.load_adapter(Path(folder), version)


def without_twins(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One name of each object, the first in the alphabet, as files of tensors want it; and for the others, which."""
    first: dict[int, str] = {}
    twins: dict[str, str] = {}
    for name in sorted(weights):
        known = first.setdefault(id(weights[name]), name)
        if known != name:
            twins[name] = known
    return {name: value.detach() for name, value in weights.items() if name not in twins}, twins


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
