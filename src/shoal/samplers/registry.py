"""Which sampler a run uses: the `engine` part of the YAML, and what makes the sampler that it names.

A sampler is registered by name, next to what makes it from the settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shoal.core.configuration import check_settings
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.registry import Registry
from shoal.samplers.sampler import ChatTokenizer, Sampler

logger = logging.getLogger(__name__)
Server = Literal["auto", "vllm", "sglang", "llama.cpp", "openai"]
LogprobsMode = Literal["raw", "processed"]
EngineName = str
"""One of `SAMPLERS`: tiny, huggingface, vllm, ray, openai, or a registered one."""

Make = Callable[["EngineConfig", Sequence[str], int], Sampler]
"""From the `engine` part of a run's settings, the action words and the seed of the run to a sampler."""
SAMPLERS: Registry[Make] = Registry("engine")
"""What `engine.name` may say."""


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
    weights: str | None = None
    """Where training writes weights for the server, `WEIGHTS-VERSION`; it must find them by the same path, and no other
    run may write there. `server` in the run folder if not given."""
    tolerance: float = 0.1
    """By how much its log-probabilities of a fixed prompt may differ from the policy's on average, in training."""

    def __post_init__(self) -> None:
        check_settings(self, ["timeout", "tolerance"], concurrency=1, retries=0, context=1)


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
    """tiny and huggingface run and train here; vllm, ray and openai (a server: vLLM or SGLang) sample for a model that
    trains here; others are registered by `@sampler(name)`."""
    model: str | None = None
    """A folder, or a name that `shoal model get` knows; the server's name for it where none is trained (openai)."""
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
    """Threads of the network's arithmetic in training and evaluation; with 1, log-probs are bit-equal (level L2)."""
    copy: Literal["thread", "process"] = "thread"
    """Where the copies of the weights compute that play beside learning (with `trainer.lag`): in threads of this
    process, or in a process of their own (tiny, huggingface)."""
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


# --- by name
def sampler(name: str, *, replace: bool = False) -> Callable[[Make], Make]:
    """Register the function below it as what makes the sampler of `engine.name: NAME`.

    Args:
        name: under which the YAML and the command line know it.
        replace: whether the name may be taken already.
    """
    return partial(SAMPLERS.register, name, replace=replace)


def make_engine(config: EngineConfig, words: Sequence[str] = (), seed: int = 0) -> Sampler:
    """The sampler of a config for playing, with fresh or pretrained weights; close it if it has `close`.

    Args:
        config: the `engine` part of a run's settings.
        words: action words that are one token each (tiny).
        seed: of fresh weights (tiny).
    """
    return SAMPLERS[config.name](config, words, seed)


def make_versions(config: EngineConfig, words: Sequence[str], seed: int, held: int) -> Sampler:
    """A sampler of a config that holds the weights of so many versions, once it is given them; close it."""
    from shoal.samplers.versions import OneCopy, Versions

    if config.name == "ray":
        return _replicas(config, words, seed, held)
    if config.name in ("vllm", "openai"):
        return OneCopy(make_engine(config, words, seed), held)
    if config.copy == "process":
        from shoal.samplers.process import ProcessSampler

        return ProcessSampler(partial(_elsewhere, config, tuple(words), seed, held), held)
    return Versions(partial(make_engine, config, words, seed), held)


def close_engine(sampler: Any) -> None:
    """End what a sampler started, if it started anything."""
    close = getattr(sampler, "close", None)
    if close is not None:
        close()


@sampler("tiny")
def _tiny(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.samplers.tiny import TinyEngine, TinyShape

    shape = TinyShape(config.width, config.layers, config.heads, config.context)
    return TinyEngine(words, shape, seed=seed, device=config.device)


@sampler("huggingface")
def _huggingface(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.samplers.huggingface.engine import HuggingFaceEngine

    options = {"max_batch": config.max_batch, "cache_tokens": config.cache_tokens, **config.template}
    options["batch_invariant"] = config.batch_invariant
    return HuggingFaceEngine.load(_folder(config), device=config.device, dtype=config.dtype, **options)


@sampler("vllm")
def _vllm(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    folder = _folder(config)
    from shoal.samplers.vllm import VllmEngine

    gpu = config.device.partition(":")[2]
    options = {"dtype": config.dtype, "batch_invariant": config.batch_invariant, **config.vllm}
    return VllmEngine(folder, gpu=int(gpu) if gpu else None, template=config.template, **options)


@sampler("ray")
def _ray(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    return _replicas(config, words, seed, 1)


def _replicas(config: EngineConfig, words: Sequence[str], seed: int, held: int) -> Sampler:
    replicas = config.replicas
    if replicas.engine != "tiny":
        _folder(config)
    from shoal.core.executors import connect_ray
    from shoal.samplers.ray import RayEngine

    connect_ray()
    device = config.device.partition(":")[0]  # Ray says which GPUs a replica sees
    alike = replace(config, name=replicas.engine, copy="thread", device=device)
    make = partial(_elsewhere, alike, tuple(words), seed, held)
    resources, timeout, retries = replicas.resources, replicas.timeout, replicas.retries
    return RayEngine(make, replicas.count, held=held, resources=resources, timeout=timeout, retries=retries)


def _elsewhere(config: EngineConfig, words: Sequence[str], seed: int, held: int) -> Sampler:
    """A sampler in a process of its own, where threads are its own business too."""
    import torch

    torch.set_num_threads(config.threads)
    if held == 1:
        return make_engine(config, words, seed)
    return make_versions(replace(config, copy="thread"), words, seed, held)


@sampler("openai")
def _openai(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.samplers.asking import RetryPolicy
    from shoal.samplers.servers.openai import OpenAIEngine

    server = config.server
    if server.url is None:
        raise ConfigError(
            "engine.name=openai needs the address of a server: engine.server.url=http://HOST:PORT"
        )
    weights = None if server.weights is None else Path(server.weights)
    return OpenAIEngine(
        server.url.rstrip("/").removesuffix("/v1"),
        _name_there(config),
        tokenizer=None if server.tokenizer is None else load_tokenizer(server.tokenizer, **config.template),
        server=server.kind,
        concurrency=server.concurrency,
        context=server.context,
        retry_policy=RetryPolicy(server.timeout, server.retries),
        api_key=_api_key(server.api_key_env),
        logprobs=server.logprobs,
        model_folder=None if weights is None else _folder(config),
        weights_folder=weights,
        tolerance=server.tolerance,
    )


def _name_there(config: EngineConfig) -> str | None:
    """The server's name for its model; None for the first that it lists."""
    from shoal.samplers.models import KNOWN

    model = config.model
    if config.server.model is not None or model is None:
        return config.server.model
    if model not in KNOWN and not Path(model).is_dir():
        return model
    if config.server.weights is None:  # else it is trained, and the server has the same
        instead = "the first model of the server is played instead, or the one that engine.server.model names"
        logger.warning("engine.model=%s is a model of this machine: %s", model, instead)
    return None


def load_tokenizer(model: str, **template_settings: Any) -> ChatTokenizer:
    """The tokenizer of a model folder (or of a name that `shoal model get` knows), without its weights."""
    from shoal.samplers.models import resolve_model
    from shoal.samplers.tokenizers import TemplateTokenizer, read_tokenizer

    return TemplateTokenizer(read_tokenizer(resolve_model(model)), **template_settings)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"engine.server.api_key_env names {variable}, which is not set: export {variable}=…, or leave it "
            f"out for a server without keys"
        )
    return key


def _folder(config: EngineConfig) -> Path:
    from shoal.samplers.models import resolve_model

    if config.model is None:
        raise ConfigError(
            f"engine.model must be a model folder or a name that `shoal model get` knows, for engine.name="
            f"{config.name}, got none"
        )
    return resolve_model(config.model)
