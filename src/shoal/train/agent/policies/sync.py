"""Carries the weights of a policy to what samples by them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.samplers.sampler import capabilities_of
from shoal.train.agent.policies.policy import Policy
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
