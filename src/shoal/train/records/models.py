"""What answers in an evaluation, a replay or a gateway: a run, an exported model, one by name, a server's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import sha256_of_folder
from shoal.samplers.models import KNOWN, resolve_model
from shoal.samplers.registry import ServerConfig, make_engine
from shoal.train.agent.config import AgentConfig, AgentProxy, EngineConfig
from shoal.train.agent.policies.loading import load_engine
from shoal.train.records.checkpoints import read_checkpoint
from shoal.train.records.exported import FILE, read_play
from shoal.train.records.read import agent_config_of

SERVER = "openai:"
"""What the name of a model on a server begins with."""
LOCAL = ServerConfig(url="http://127.0.0.1:8000/v1", concurrency=16)
"""The server that is asked if none is named."""


class Opened(NamedTuple):
    """A model that is ready to answer; whoever opened it closes its engine."""

    engine: Any  # a sampler with a tokenizer
    settings: AgentConfig  # of its run or export; of another model defaults
    weights: str  # what tells them from others; "" if that was not asked for


def is_server(model: Path | str) -> bool:
    """Whether a name is that of a model on a server."""
    return str(model).startswith(SERVER)


def has_checkpoints(model: Path | str) -> bool:
    """Whether it is the folder of a run, which has checkpoints."""
    return not is_server(model) and (Path(model) / "checkpoints").is_dir()


def brings_prompts(model: Path | str) -> bool:
    """Whether a model is one of which something says how it is prompted: a run, an export of one, or a server's."""
    return is_server(model) or has_checkpoints(model) or (Path(model) / FILE).is_file()


def open_model(
    model: Path | str,
    *,
    checkpoint: str = "newest",
    device: str | None = None,
    seed: int = 0,
    server: ServerConfig = LOCAL,
    identify: bool = False,
) -> Opened:
    """Load a model to play with.

    Args:
        model: a run folder, a folder that `shoal export` wrote, another Hugging Face model folder, a name of
            `shoal model list`, or "openai:MODEL" on a server ("openai:" alone takes the first that it lists).
        checkpoint: of a run: "newest", "best", or an iteration.
        device: such as "cuda:1"; where the run was trained, or the CPU, if not given.
        seed: of an engine that draws weights.
        server: of "openai:MODEL".
        identify: also tell the weights from others, by the sum of their files.

    Raises:
        DataError: there is no such model, or it is damaged.
        ConfigError: its settings are not those of this version, or a device is given for a server's model.
    """
    if is_server(model):
        return _on_server(str(model), device, server)
    folder = Path(model)
    if has_checkpoints(folder):
        run = agent_config_of(folder)

        def read(place: Path) -> Opened:
            inner, where = place / "engine", device or run.engine.device
            weights = weights_at(inner) if identify else ""
            return Opened(load_engine(inner, device=where, config=run.engine), run, weights)

        return read_checkpoint(folder, checkpoint, read)
    _refuse_no_model(folder)
    weights = weights_at(model) if identify else ""
    device = device or "cpu"
    settings = read_play(folder) or AgentConfig(
        engine=EngineConfig(name="huggingface", threads=2), agent_proxy=AgentProxy(max_tokens=64)
    )
    if settings.engine.name == "huggingface":
        settings = replace(settings, engine=replace(settings.engine, model=str(model), device=device))
    if _is_described(folder):
        return Opened(load_engine(folder, device=device, config=settings.engine), settings, weights)
    return Opened(make_engine(settings.engine, (), seed), settings, weights)


def weights_at(place: Path | str | None) -> str:
    """What tells the weights in a folder, or of a model by its name, from others: a sum of their bytes.

    A name alone where they are on a server, "" where they follow from settings.
    """
    if place is None:
        return ""
    if Path(place).is_dir() or place in KNOWN:
        return f"sha256 {sha256_of_folder(resolve_model(str(place)))}"
    return str(place)


def _is_described(folder: Path) -> bool:
    """Whether it is as in a checkpoint, and as `export --to shoal` writes it."""
    return (folder / "engine.json").is_file()


def _refuse_no_model(folder: Path) -> None:
    if not folder.exists():
        if str(folder) in KNOWN:
            return
        raise DataError(
            f"there is no run folder and no model folder {folder}, nor is it one of {', '.join(KNOWN)} "
            f"(shoal model list) or openai:MODEL; shoal runs lists the runs"
        )
    if _is_described(folder) or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise DataError(
            f"{folder} is an adapter alone: export the run without --adapter, which merges it, and evaluate that"
        )
    raise DataError(f"{folder} is neither a run folder (no checkpoints/) nor a model folder (no config.json)")


def _on_server(model: str, device: str | None, server: ServerConfig) -> Opened:
    """A server by messages. No stop text is sent: servers leave it out of what they return, closing tag and all."""
    if device is not None:
        raise ConfigError(f"--device {device} has no effect on a server's model: leave it out")
    engine = EngineConfig(name="openai", model=model.removeprefix(SERVER) or None, server=server)
    settings = AgentConfig(engine=engine, agent_proxy=AgentProxy(max_tokens=512, stop=()))
    opened: Any = make_engine(engine)
    return Opened(opened, settings, f"{SERVER}{opened.model}")
