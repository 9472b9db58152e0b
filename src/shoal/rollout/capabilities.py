"""What an engine can promise and do, so that a run that needs more is refused before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shoal.core.errors import ConfigError
from shoal.rollout.samplers.sampler import Engine, Level


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can promise and do."""

    level: Level  # how exactly completions repeat
    token_ids: bool  # prompts and responses are the model's own tokens
    logprobs: bool  # completions carry the log-probability of each token
    gradients: bool = False  # its network is here (`model`), so it can be trained itself
    weights: bool = False  # takes weights by name: `load_weights(weights, version)`
    adapters: bool = False  # takes a LoRA folder between two calls: `load_adapter(folder, version)`
    images: bool = False  # shows pictures to the model

    @property
    def trainable(self) -> bool:
        """Whether its completions may be learned from: exact tokens with their log-probabilities."""
        return self.token_ids and self.logprobs


@runtime_checkable
class TakesWeights(Protocol):
    """An engine whose weights can be replaced."""

    weights_version: int

    def load_weights(self, weights: Any, version: int) -> None:
        """Take over weights by name; `version` marks the completions they produce."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """An engine that can begin anew after it crashed or hung."""

    def restart(self) -> None:
        """Leave behind what hangs or broke and go on with the last weights; called from another thread."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that can swap a LoRA adapter while it runs."""

    weights_version: int

    def load_adapter(self, folder: Path, version: int) -> None:
        """Take over the adapter in a folder (`adapter_config.json`, `adapter_model.safetensors`)."""
        ...


def capabilities_of(engine: Engine) -> Capabilities:
    """What an engine states of itself, or what can be seen of one that states nothing."""
    stated = getattr(engine, "capabilities", None)
    if isinstance(stated, Capabilities):
        return stated
    return Capabilities(
        level=engine.level,
        token_ids=True,
        logprobs=True,
        gradients=hasattr(getattr(engine, "model", None), "parameters"),
        weights=isinstance(engine, TakesWeights),
        adapters=isinstance(engine, TakesAdapters),
        images=bool(getattr(engine.tokenizer, "takes_images", False)),
    )


def require_trainable(engine: Engine) -> None:
    """Raise a `ConfigError` that says why the completions of this engine may not be learned from."""
    known = capabilities_of(engine)
    lacking = [name for name in ("token_ids", "logprobs") if not getattr(known, name)]
    if lacking:
        raise ConfigError(
            f"{type(engine).__name__} is for evaluation only: its completions lack {' and '.join(lacking)}. "
            f"Use a server that returns them (vLLM, SGLang, llama.cpp with a tokenizer here), or a local engine"
        )


def require_weights(engine: Engine) -> None:
    """Raise a `ConfigError` unless the engine can follow the updates of a training run."""
    if not capabilities_of(engine).weights:
        raise ConfigError(
            f"{type(engine).__name__} cannot take over weights between batches, so it would go on sampling from "
            f"the first ones while another model is trained: use an engine that can (vllm in process, ray with "
            f"tiny, huggingface or vllm replicas), or one that is trained itself (tiny, huggingface)"
        )
