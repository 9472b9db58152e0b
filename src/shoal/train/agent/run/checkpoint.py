"""Checkpoints of agent training: weights, optimizer and place in the run, committed as one folder.

Randomness is counter-based, so no generator state is stored: the iteration says it all.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.core.configuration import first_change, from_mapping
from shoal.core.errors import OTHER_CHECKPOINT, DataError, reading
from shoal.core.files import MANIFEST, is_whole, read_json, restore_folders, verify_folder, write_folder
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.policies.policy import Critic, Policy
from shoal.train.agent.processes.distributed import ALONE, Processes
from shoal.train.agent.processes.weights import fill, fill_optimizer, gather, optimizer_tensors, without_tied

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})")
EARLIER = "earlier"
"""The folder of weights before those of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    iteration: int  # iterations done
    best_success: float
    episodes: int
    tokens: int


def save_checkpoint(
    folder: Path,
    policy: Policy,
    critic: Critic | None,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    config: dict[str, Any],
    keep: int,
    *,
    rates: Mapping[str, float] | None = None,
    best: bool = False,
    earlier: Mapping[int, Mapping[str, Tensor]] | None = None,
    processes: Processes = ALONE,
) -> Path:
    """Commit `folder/step-<iteration>` and drop all but the newest `keep`.

    `rates` are the learning rates of the run, by their settings, which may change when it goes on; `earlier` the
    weights of versions before, by which iterations that have begun are played.
    With `best`, `folder/best` is replaced first: a run that ends between the two comes by the same best again.
    All `processes` call this where networks lie in shards: they are gathered whole, and the first writes.
    """
    target, whole = folder / f"step-{progress.iteration:06d}", processes.first
    state = {**asdict(progress), "weights_version": policy.weights_version, "config": config}
    state["rates"] = dict(rates or {})
    weights = gather(policy.saved_weights(), whole)
    moments = gather(optimizer_tensors(optimizer), whole)
    values = gather({} if critic is None else critic.saved_weights(), whole)
    if not processes.first:
        return target

    def fill_folder(temporary: Path) -> None:
        (temporary / "engine").mkdir()
        policy.save(temporary / "engine", weights)
        (temporary / "state.json").write_text(json.dumps(state, indent=2))
        save_file(moments, temporary / "optimizer.safetensors")
        if critic is not None:
            single, tied = without_tied(values)
            save_file(single, temporary / "critic.safetensors", tied)
        for version, before in (earlier or {}).items():
            (temporary / EARLIER).mkdir(exist_ok=True)
            single, tied = without_tied(dict(before))
            save_file(single, temporary / EARLIER / f"{version:06d}.safetensors", tied)

    if best:
        with write_folder(folder / "best") as temporary:
            fill_folder(temporary)
    with write_folder(target) as temporary:
        if best:
            ignored = shutil.ignore_patterns(MANIFEST)
            shutil.copytree(folder / "best", temporary, dirs_exist_ok=True, ignore=ignored)
        else:
            fill_folder(temporary)
    drop_old(folder, keep)
    return target


def drop_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what is left of one whose removal was broken off."""
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest_checkpoint(folder: Path) -> Path:
    """The newest checkpoint whose files are whole; a `DataError` names what is wrong with the newest.

    Raises:
        DataError: there is none, or the newest was altered (an older whole one is named as the way out).
    """
    restore_folders(folder)
    found = list_checkpoints(folder)
    if not found:
        raise DataError(
            f"no checkpoint in {folder}: the run ended before it wrote one. Train it anew, without resume"
        )
    try:
        return verify_folder(found[-1])
    except DataError as error:
        other = next(filter(is_whole, reversed(found[:-1])), None)
        hint = f"; remove what is newer to go on from {other.name}" if other else ""
        raise DataError(f"{error}{hint}") from error


def refuse_other_settings(path: Path, config: AgentConfig) -> None:
    """Check that a checkpoint is of a run with these settings, as far as that is known without its model.

    One that cannot be read is left to `load_checkpoint`, which says what to do about it.

    Raises:
        DataError: it has other settings (the first differing key is named).
    """
    try:
        begun = read_json(path / "state.json")["config"]
        found = begun["agent_proxy"]["max_tokens"]
    except (DataError, OSError, ValueError, LookupError, TypeError):
        return
    wanted = with_tokens(config, found).comparable()
    _refuse_change(path, {name: begun[name] for name in begun if name in wanted}, wanted)


def with_tokens(config: AgentConfig, found: Any) -> AgentConfig:
    """A config that says `max_tokens: auto` with the number that its run has found."""
    if config.agent_proxy.max_tokens != "auto":
        return config
    return replace(config, agent_proxy=replace(config.agent_proxy, max_tokens=found))


def _refuse_change(path: Path, begun: Any, wanted: dict[str, Any]) -> None:
    difference = first_change(begun, json.loads(json.dumps(wanted)))
    if difference:
        raise DataError(
            f"{path} is of a run with other settings: {difference}. Give the settings that it began with, an "
            "algorithm=PRESET too (the run's config.yaml holds all of them), or use another run_dir"
        )


def load_checkpoint(
    path: Path,
    policy: Policy,
    critic: Critic | None,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    rates: Mapping[str, float] | None = None,
) -> Progress:
    """Put a checkpoint's weights and optimizer state in place and say where the run stands; warn of other `rates`.

    Raises:
        DataError: the checkpoint is of a run with other settings (the first differing key is named), or no such thing.
    """
    advice = ": remove it to go on from one before, or begin anew in another run_dir"
    with reading(path, OTHER_CHECKPOINT, advice):
        state = read_json(path / "state.json")
        _refuse_change(path, state["config"], config)
        progress = from_mapping(Progress, {item.name: state[item.name] for item in fields(Progress)})
        policy.load_weights(policy.read(path / "engine"), state["weights_version"])
        if critic is not None:
            fill(critic.saved_weights(), load_file(path / "critic.safetensors"))
        fill_optimizer(optimizer, load_file(path / "optimizer.safetensors"))
        before = dict(state["rates"])
    for name, rate in (rates or {}).items():
        if before.get(name, rate) != rate:
            message = "going on with %s=%g, which was %g: no longer the run that it would have been"
            logger.warning(message, name, rate, before[name])
    return progress


def earlier_weights(path: Path) -> dict[int, dict[str, Tensor]]:
    """The weights before those of a checkpoint that it holds, by version."""
    with reading(path, OTHER_CHECKPOINT):
        files = sorted((path / EARLIER).glob("*.safetensors"))
        return {int(file.stem): load_file(file) for file in files}
