"""Carries the weights of a policy to what samples by them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.samplers.sampler import capabilities_of
from shoal.train.agent.policies.policy import Policy, prompt_logprobs
from shoal.train.agent.processes.weights import gather


class WeightSync:
    """Carries the weights of a policy to what samples by them, and only when they have changed.

    A sampler that writes with the policy's own network sees every change and gets the version. Where LoRA adapters
    are trained, they alone are carried. Where networks lie in shards, all processes carry at once. One sampler follows
    one policy.

    Args:
        policy: what is trained.
        sampler: what writes; `load_weights(weights, version)` takes weights in memory of the CPU, and
            `load_adapter(folder, version)` a LoRA folder.
        lag: versions before the present one that are kept, in `earlier`.

    Raises:
        ConfigError: the policy trains adapters, and the sampler takes none.
    """

    def __init__(self, policy: Policy, sampler: Any, lag: int = 0) -> None:
        self._policy, self._sampler, self._lag = policy, sampler, lag
        self.shared = getattr(sampler, "model", None) is policy.module
        self._adapters = not self.shared and hasattr(policy, "without_adapters")
        if self._adapters and not capabilities_of(sampler).adapters:
            raise ConfigError(
                f"{type(sampler).__name__} takes no LoRA adapters: set model.lora.rank to 0, or use a sampler that "
                f"does (huggingface, vllm with enable_lora, or a vLLM or SGLang server)"
            )
        self._carried: tuple[int, int] | None = None
        self.earlier: dict[int, dict[str, Tensor]] = {}
        """What was carried, by version, as far as it may be played by still."""

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
            weights = {name: tensor.cpu() for name, tensor in gather(self._state()).items()}
            if self._lag:
                # tied ones are one
                copies = {id(tensor): tensor.detach().clone() for tensor in weights.values()}
                weights = {name: copies[id(tensor)] for name, tensor in weights.items()}
            self._give(weights, version)
            if self._lag:
                self.earlier[version] = weights
                for old in sorted(self.earlier)[: -self._lag - 1]:
                    del self.earlier[old]
            self._carried = stamp

    def restore(self, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """Let the sampler hold weights of versions before the present one, as `earlier` had them."""
        for version, weights in sorted(earlier.items()):
            with self._set_to(weights) if hasattr(self._sampler, "confirm") else nullcontext():
                self._give(weights, version)
        self.earlier = dict(earlier)

    @contextmanager
    def _set_to(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """For as long as this lasts the network has these weights."""
        module = self._policy.module
        present = {name: tensor.clone() for name, tensor in module.state_dict().items() if name in weights}
        module.load_state_dict(weights, strict=False)
        try:
            yield
        finally:
            module.load_state_dict(present, strict=False)

    def _state(self) -> dict[str, Any]:
        """What is carried: all weights, or the adapters, which alone have changed."""
        state = self._policy.module.state_dict(keep_vars=True)
        if not self._adapters:
            return state
        trained = {name for name, one in self._policy.module.named_parameters() if one.requires_grad}
        return {name: tensor for name, tensor in state.items() if name in trained}

    def _give(self, weights: dict[str, Tensor], version: int) -> None:
        """Give the sampler weights; one that is checked by the network's answers gets those that the network has."""
        module: Any = self._policy.module
        if not self._adapters:
            self._sampler.load_weights(weights, version)
        else:
            with tempfile.TemporaryDirectory(prefix="shoal-adapter-") as folder:
                module.save_pretrained(folder, state_dict=weights)
                self._sampler.load_adapter(Path(folder), version)
        if hasattr(self._sampler, "confirm"):  # a server, of which it is not known what it did
            self._sampler.confirm(prompt_logprobs(self._policy, self._sampler.probe))
