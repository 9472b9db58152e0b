"""The sampler that a config names.

A sampler is registered by name, next to what makes it from the settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.rollout.samplers.sampler import ChatTokenizer, Sampler
from shoal.rollout.samplers.settings import EngineConfig

logger = logging.getLogger(__name__)

Make = Callable[[EngineConfig, Sequence[str], int], Sampler]
"""From the `engine` part of a run's settings, the action words and the seed of the run to a sampler."""
SAMPLERS: Registry[Make] = Registry("engine")
"""What `engine.name` may say."""


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


def close_engine(sampler: Any) -> None:
    """End what a sampler started, if it started anything."""
    close = getattr(sampler, "close", None)
    if close is not None:
        close()


@sampler("tiny")
def _tiny(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.rollout.samplers.tiny import TinyEngine, TinyShape

    shape = TinyShape(config.width, config.layers, config.heads, config.context)
    return TinyEngine(words, shape, seed=seed, device=config.device)


@sampler("huggingface")
def _huggingface(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine

    options = {"max_batch": config.max_batch, "cache_tokens": config.cache_tokens, **config.template}
    options["batch_invariant"] = config.batch_invariant
    return HuggingFaceEngine.load(_folder(config), device=config.device, dtype=config.dtype, **options)


@sampler("vllm")
def _vllm(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    folder = _folder(config)
    from shoal.rollout.samplers.vllm import VllmEngine

    gpu = config.device.partition(":")[2]
    options = {"dtype": config.dtype, "batch_invariant": config.batch_invariant, **config.vllm}
    return VllmEngine(folder, gpu=int(gpu) if gpu else None, template=config.template, **options)


@sampler("ray")
def _ray(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    replicas = config.replicas
    if replicas.engine != "tiny":
        _folder(config)
    from shoal.core.executors import connect_ray
    from shoal.rollout.samplers.ray import RayEngine

    connect_ray()
    make = partial(_replica, replace(config, name=replicas.engine), tuple(words), seed)
    resources, timeout, retries = replicas.resources, replicas.timeout, replicas.retries
    return RayEngine(make, replicas.count, resources=resources, timeout=timeout, retries=retries)


def _replica(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    """A sampler in a process of its own, where threads are its own business too, and Ray says which GPUs it sees."""
    import torch

    torch.set_num_threads(config.threads)
    return make_engine(replace(config, device=config.device.partition(":")[0]), words, seed)


@sampler("openai")
def _openai(config: EngineConfig, words: Sequence[str], seed: int) -> Sampler:
    from shoal.rollout.samplers.http import RetryPolicy
    from shoal.rollout.samplers.openai import OpenAIEngine

    server = config.server
    if server.url is None:
        raise ConfigError(
            "engine.name=openai needs the address of a server: engine.server.url=http://HOST:PORT"
        )
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
    )


def _name_there(config: EngineConfig) -> str | None:
    """The server's name for its model; None for the first that it lists."""
    from shoal.rollout.samplers.models import KNOWN

    model = config.model
    if config.server.model is not None or model is None:
        return config.server.model
    if model in KNOWN or Path(model).is_dir():  # what the config trains, say: no server's name for anything
        instead = "the first model of the server is played instead, or the one that engine.server.model names"
        logger.warning("engine.model=%s is a model of this machine: %s", model, instead)
        return None
    return model


def load_tokenizer(model: str, **template_settings: Any) -> ChatTokenizer:
    """The tokenizer of a model folder (or of a name that `shoal model get` knows), without its weights."""
    from shoal.rollout.samplers.models import resolve_model
    from shoal.rollout.samplers.tokenizers import TemplateTokenizer, read_tokenizer

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
    from shoal.rollout.samplers.models import resolve_model

    if config.model is None:
        raise ConfigError(
            f"engine.model must be a model folder or a name that `shoal model get` knows, for engine.name="
            f"{config.name}, got none"
        )
    return resolve_model(config.model)
