"""Which sampler a run uses: the `engine` part of the YAML; and how all settings of rollouts are checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

import numpy as np

from shoal.core.configuration import check_fields
from shoal.core.errors import ConfigError, did_you_mean

Server = Literal["auto", "vllm", "sglang", "llama.cpp", "openai"]
LogprobsMode = Literal["raw", "processed"]
EngineName = str
"""One of `shoal.rollout.samplers.registry.SAMPLERS`: tiny, huggingface, vllm, ray, openai, or a registered one."""


MOST_SECONDS = 1e6
"""Of a time limit; the system cannot wait much longer in one go."""


def check_settings(settings: Any, seconds: Collection[str] = (), **least: float) -> None:
    """Refuse settings that cannot be meant, be they of YAML or of Python.

    Args:
        settings: a dataclass.
        seconds: its time limits.
        **least: the least that a number may be.

    Raises:
        ConfigError: a number is too small, NaN or infinite, a word unknown, or a value of another type.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not isinstance(value, int | float | np.number):
            continue
        end = ", or null" if type(None) in get_args(hint) else ""
        if name in seconds and not value > 0:
            raise ConfigError(f"{name} must be positive{end}, got {value}")
        if name in seconds and value > MOST_SECONDS:
            raise ConfigError(f"{name} must be at most {MOST_SECONDS:.0f} seconds{end}, got {value}")
        if name in least and not value >= least[name]:
            raise ConfigError(f"{name} must be at least {least[name]}{end}, got {value}")
    check_fields(settings)


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server (`engine.name: openai`)."""

    url: str | None = None
    """Its address, such as http://127.0.0.1:8000."""
    model: str | None = None
    """The server's name for its model; the first that it lists if not given, or `engine.model` where that is no
    model of this machine."""
    context: int | None = None
    """Longest prompt and response together, in tokens; what the server says if not given."""
    kind: Server = "auto"
    """What runs there; "auto" asks it."""
    api_key_env: str | None = None
    """The environment variable that holds the key; the key itself is never written anywhere."""
    tokenizer: str | None = None
    """A model folder (or a name that `shoal model get` knows) for exact tokens; messages travel without it."""
    logprobs: LogprobsMode | None = None
    """Which log-probabilities it was started to give; the default of its kind if not given."""
    concurrency: int = 64
    """Requests under way at once."""
    timeout: float = 120.0
    """Seconds of one attempt."""
    retries: int = 4
    """Attempts after the first, for connection errors, timeouts and HTTP 408, 425, 429 and 5xx."""

    def __post_init__(self) -> None:
        check_settings(self, ["timeout"], concurrency=1, retries=0, context=1)


@dataclass(frozen=True)
class ReplicaConfig:
    """Copies of a sampler on a Ray cluster (`engine.name: ray`)."""

    engine: Literal["tiny", "huggingface", "vllm"] = "huggingface"
    """What each of them is; the other `engine` settings are theirs."""
    count: int = 1
    """How many copies there are."""
    resources: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """Of each, for Ray: `num_cpus`, `num_gpus`, `resources`."""
    timeout: float | None = None
    """Seconds of one request, after which a replica is replaced."""
    retries: int = 2
    """Attempts after the first, when a replica dies or exceeds `timeout`."""

    def __post_init__(self) -> None:
        check_settings(self, ["timeout"], count=1, retries=0)


@dataclass(frozen=True)
class EngineConfig:
    """The language model."""

    name: EngineName = "tiny"
    """tiny and huggingface run and train here; vllm and ray sample for a model that trains here; openai is a
    server, for rollouts and evaluation; others are registered by `@sampler(name)`."""
    model: str | None = None
    """A folder, or a name that `shoal model get` knows (huggingface, vllm); the server's name for it (openai)."""
    width: int = 64
    """Size of a token's vector (tiny)."""
    layers: int = 2
    """Transformer layers (tiny)."""
    heads: int = 4
    """Attention heads of a layer (tiny); they divide `width`."""
    context: int = 256
    """Longest prompt and response together, in tokens (tiny)."""
    device: str = "cpu"
    """Where the network computes: cpu, cuda, cuda:1 or mps."""
    deterministic: bool | Literal["auto"] = "auto"
    """Train by PyTorch's deterministic algorithms, so that one seed gives the same weights, also after a resume; a bit
    slower, and an operation without one is an error. `auto`: on CUDA devices."""
    threads: int = 1
    """Threads of the network's arithmetic, set by `shoal train`; with 1, log-probs are bit-equal (level L2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights (huggingface, vllm)."""
    batch_invariant: bool = False
    """Compute each token alike whatever else is in the batch (huggingface, and vllm on GPUs): the log-probs of the
    sampler are then those of the update, bit for bit (huggingface, float32 or bfloat16), and a token does not change
    with `max_batch` or micro-batches. Slower, see docs/engines.md."""
    train_last_layers: int | None = None
    """Train only that many of the last layers and the final norm (huggingface, without LoRA); None trains all."""
    max_batch: int = 32
    """Answers that are written at once (huggingface)."""
    cache_tokens: int = 262_144
    """Tokens of all answers under way, prompts included, that the static cache of a GPU holds: each step is a CUDA
    graph, and waiting requests enter between two steps; 0 decodes without graphs (huggingface)."""
    template: dict[str, Any] = field(default_factory=dict)
    """Settings of the chat template, such as `enable_thinking: false` (huggingface, vllm, openai with a tokenizer)."""
    server: ServerConfig = ServerConfig()
    replicas: ReplicaConfig = ReplicaConfig()
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.AsyncEngineArgs`: `max_model_len`, `gpu_memory_utilization`, `enforce_eager`, …"""

    def __post_init__(self) -> None:
        from shoal.rollout.samplers.registry import SAMPLERS  # which reads these settings

        if self.name not in SAMPLERS:
            raise ConfigError(f"no engine named {self.name!r}.{did_you_mean(self.name, SAMPLERS)}")
        check_settings(self, width=1, layers=1, heads=1, context=1, threads=1, max_batch=1, cache_tokens=0)
        if self.batch_invariant and self.played_by not in ("huggingface", "vllm"):
            raise ConfigError(
                f"engine.batch_invariant=true is of huggingface and vllm, and engine.name={self.name} has "
                f"no such setting: leave it out"
            )

    @property
    def played_by(self) -> str:
        """What samples: `name`, or with Ray what its replicas are."""
        return self.replicas.engine if self.name == "ray" else self.name
