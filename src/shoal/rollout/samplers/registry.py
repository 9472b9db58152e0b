"""The sampler that a config names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.rollout.samplers.sampler import ChatTokenizer, Engine
from shoal.rollout.samplers.settings import EngineConfig


def make_engine(config: EngineConfig, words: Sequence[str] = (), seed: int = 0) -> Engine:
    """The engine of a config for playing, with fresh or pretrained weights; close it if it has `close`.

    Args:
        config: the `engine` part of a run's settings.
        words: action words that are one token each (tiny engine).
        seed: of fresh weights (tiny engine).
    """
    makers = {"huggingface": _huggingface, "vllm": _vllm, "openai": _openai}
    if config.name == "tiny":
        return _tiny(config, words, seed)
    if config.name == "ray":
        return _ray(config, words, seed)
    return makers[config.name](config)


def close_engine(engine: Any) -> None:
    """End what an engine started, if it started anything."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def _tiny(config: EngineConfig, words: Sequence[str], seed: int) -> Engine:
    from shoal.rollout.samplers.tiny import TinyEngine
    from shoal.rollout.samplers.tiny_network import TinyShape

    shape = TinyShape(config.width, config.layers, config.heads, config.context)
    return TinyEngine(words, shape, seed=seed, device=config.device)


def _huggingface(config: EngineConfig) -> Engine:
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine

    engine = HuggingFaceEngine.load(_folder(config), device=config.device, dtype=config.dtype)
    return engine


def _vllm(config: EngineConfig) -> Engine:
    folder = _folder(config)
    from shoal.rollout.samplers.vllm import VllmEngine

    gpu = config.device.partition(":")[2]
    return VllmEngine(folder, gpu=int(gpu) if gpu else None, **{"dtype": config.dtype, **config.vllm})


def _ray(config: EngineConfig, words: Sequence[str], seed: int) -> Engine:
    replicas = config.replicas
    if replicas.engine != "tiny":
        _folder(config)
    from shoal.core.executors import connect_ray
    from shoal.rollout.samplers.ray import RayEngine

    connect_ray()
    return RayEngine(
        partial(_replica, replace(config, name=replicas.engine), tuple(words), seed),
        replicas.count,
        resources=replicas.resources,
        timeout=replicas.timeout,
        retries=replicas.retries,
    )


def _replica(config: EngineConfig, words: Sequence[str], seed: int) -> Engine:
    """An engine in a process of its own, where threads are its own business too, and Ray says which GPUs it sees."""
    import torch

    torch.set_num_threads(config.threads)
    return make_engine(replace(config, device=config.device.partition(":")[0]), words, seed)


def _openai(config: EngineConfig) -> Engine:
    from shoal.rollout.samplers.http import Patience
    from shoal.rollout.samplers.openai import OpenAIEngine

    server = config.server
    if server.url is None:
        raise ConfigError(
            "engine.name=openai needs the address of a server: engine.server.url=http://HOST:PORT"
        )
    return OpenAIEngine(
        server.url.rstrip("/").removesuffix("/v1"),
        config.model,
        tokenizer=None if server.tokenizer is None else load_tokenizer(server.tokenizer),
        server=server.kind,
        concurrency=server.concurrency,
        patience=Patience(server.timeout, server.retries),
        api_key=_api_key(server.api_key_env),
        logprobs=server.logprobs,
    )


def load_tokenizer(model: str) -> ChatTokenizer:
    """The tokenizer of a model folder (or of a name that `shoal model get` knows), without its weights."""
    from shoal.core.errors import missing_extra
    from shoal.rollout.samplers.models import resolve_model
    from shoal.rollout.samplers.tokenizers import TemplateTokenizer

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("exact tokens with a server", "llm") from error
    folder = resolve_model(model)
    return TemplateTokenizer(
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    )


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
