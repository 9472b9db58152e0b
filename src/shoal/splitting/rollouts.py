"""Token ids and log-probabilities that a sampler recorded beside the messages, one file per step.

`data_for_step_<k>.pt` or `.safetensors` holds `token_ids`, `logp` and, where known, `prompt_token_ids`; k
counts from 0 or from 1. `.pt` files are read with `weights_only=True`: tensors and lists, no objects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import write_bytes
from shoal.splitting.recordings import RolloutTokens

_NAME = re.compile(r"data_for_step_(\d+)\.(pt|safetensors)")


def read_rollout(folder: Path) -> tuple[RolloutTokens, ...]:
    """The recorded steps in order; a gap, a broken file or a length that does not match is a `DataError`."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            number = int(match[1])
            if number in found:
                raise DataError(f"{path} and {found[number].name} are both step {number}; remove one")
            found[number] = path
    if not found:
        raise DataError(f"{folder} has no data_for_step_<k>.pt or .safetensors, which use_vllm_logp reads")
    first = min(found)
    if first > 1 or sorted(found) != list(range(first, first + len(found))):
        raise DataError(f"{folder}: data_for_step files must count up from 0 or 1, got {sorted(found)}")
    return tuple(_read_step(found[number]) for number in sorted(found))


def write_rollout(folder: Path, steps: Sequence[RolloutTokens]) -> None:
    """Write `data_for_step_<k>.safetensors`, k from 0; only the arrays, no pickle."""
    import numpy as np
    from safetensors.numpy import save

    for number, step in enumerate(steps):
        tensors = {
            "token_ids": np.asarray(step.response_ids, np.int64),
            "logp": np.asarray(step.logprobs, np.float32),
            "prompt_token_ids": np.asarray(step.prompt_ids, np.int64),
        }
        write_bytes(folder / f"data_for_step_{number}.safetensors", save(tensors))


def _read_step(path: Path) -> RolloutTokens:
    values = _load(path)
    if not isinstance(values, dict):
        raise DataError(f"{path} must hold token_ids and logp by name, got {type(values).__name__}")
    for name in ("token_ids", "logp"):
        if name not in values:
            raise DataError(f"{path} has no {name!r}, only {sorted(map(str, values))}")
    token_ids, logp = _flat(values["token_ids"], path), _flat(values["logp"], path)
    prompt_ids = _flat(values["prompt_token_ids"], path) if "prompt_token_ids" in values else []
    if len(token_ids) != len(logp):
        raise DataError(
            f"{path}: {len(token_ids)} token_ids but {len(logp)} logp; record the step again, since a "
            "missing log-probability cannot be made up"
        )
    if not token_ids:
        raise DataError(f"{path}: the step has no tokens; remove it")
    if not all(value <= 1e-3 for value in logp):  # also catches NaN; sampling kernels round slightly above 0
        raise DataError(f"{path}: logp must be log-probabilities, at most 0; got {max(logp)}")
    return RolloutTokens(
        tuple(int(token) for token in prompt_ids),
        tuple(int(token) for token in token_ids),
        tuple(logp),
        str(path),
    )


def _load(path: Path) -> Any:
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise a dozen kinds for a broken file
        raise DataError(
            f"{path} cannot be read as plain tensors ({type(error).__name__}: {str(error)[:200]}); "
            "write token ids and log-probabilities as tensors, without Python objects"
        ) from error


def _flat(value: Any, path: Path) -> list[Any]:
    import torch

    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, int | float) for item in values):
        raise DataError(
            f"{path}: token_ids, logp and prompt_token_ids must be flat lists or tensors of numbers"
        )
    return list(values)
