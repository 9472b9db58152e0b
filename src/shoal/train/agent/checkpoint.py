"""Checkpoints of agent training: weights, optimizer and place in the run, committed as one folder.

Randomness is counter-based, so no generator state is stored: the iteration says it all.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.core.errors import DataError
from shoal.core.files import MANIFEST, read_json, restore_folders, verify_folder, write_folder
from shoal.train.agent.config import comparable
from shoal.train.agent.distributed import ShardedPolicy
from shoal.train.agent.policy import Policy
from shoal.train.agent.weights import fill, fill_optimizer, whole_optimizer, whole_weights, without_twins

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    iteration: int  # iterations done
    best_success: float
    episodes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is trained, whole; without content in a process that does not write."""

    policy: dict[str, Tensor] | None
    """Weights for `policy.save`; None: its network is whole, and it takes its own."""
    critic: dict[str, Tensor] | None
    optimizer: dict[str, Tensor]


def take_snapshot(
    policy: Policy, critic: nn.Module | None, optimizer: torch.optim.Optimizer, keep: bool = True
) -> Snapshot:
    """What a checkpoint holds; where networks lie in shards, all processes ask and those that `keep` it get it."""
    return Snapshot(
        policy.gathered(keep) if isinstance(policy, ShardedPolicy) else None,
        None if critic is None else whole_weights(critic, keep),
        whole_optimizer(optimizer, keep),
    )


def save_checkpoint(
    folder: Path,
    policy: Policy,
    snapshot: Snapshot,
    progress: Progress,
    config: dict[str, Any],
    keep: int,
    *,
    best: bool = False,
) -> Path:
    """Commit `folder/step-<iteration>` and drop all but the newest `keep`.

    With `best`, `folder/best` is replaced first: a run that ends between the two comes by the same best again.
    """
    target = folder / f"step-{progress.iteration:06d}"
    if best:
        with write_folder(folder / "best") as temporary:
            _fill(temporary, policy, snapshot, progress, config)
    with write_folder(target) as temporary:
        if best:
            ignored = shutil.ignore_patterns(MANIFEST)
            shutil.copytree(folder / "best", temporary, dirs_exist_ok=True, ignore=ignored)
        else:
            _fill(temporary, policy, snapshot, progress, config)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def _fill(
    folder: Path, policy: Policy, snapshot: Snapshot, progress: Progress, config: dict[str, Any]
) -> None:
    (folder / "engine").mkdir()
    policy.save(folder / "engine", snapshot.policy)
    save_file(snapshot.optimizer, folder / "optimizer.safetensors")
    if snapshot.critic is not None:
        single, twins = without_twins(snapshot.critic)
        save_file(single, folder / "critic.safetensors", twins)
    state = {**asdict(progress), "weights_version": policy.weights_version, "config": config}
    (folder / "state.json").write_text(json.dumps(state, indent=2))


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
        raise DataError(f"no checkpoint in {folder}: start without resume")
    try:
        return verify_folder(found[-1])
    except DataError as error:
        hint = f"; remove {found[-1]} to go on from {found[-2].name}" if len(found) > 1 else ""
        raise DataError(f"{error}{hint}") from error


def load_checkpoint(
    path: Path,
    policy: Policy,
    critic: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
) -> Progress:
    """Put a checkpoint's weights and optimizer state in place and say where the run stands.

    Raises:
        DataError: the checkpoint is of a run with other settings; the first differing key is named.
    """
    state = read_json(path / "state.json")
    before = state["config"] and comparable(state["config"])
    difference = _first_difference(before, json.loads(json.dumps(config)))
    if difference:
        raise DataError(f"{path} is of a run with other settings: {difference}; use them, or another run_dir")
    policy.load_weights(policy.read(path / "engine"), state["weights_version"])
    if critic is not None:
        fill(critic.state_dict(keep_vars=True), load_file(path / "critic.safetensors"))
    fill_optimizer(optimizer, load_file(path / "optimizer.safetensors"))
    return Progress(**{item.name: state[item.name] for item in fields(Progress)})


def _first_difference(old: Any, new: Any, path: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            found = _first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return ""
    return "" if old == new else f"{path} was {old!r} and is {new!r}"
