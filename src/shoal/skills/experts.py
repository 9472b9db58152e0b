"""Experts as files, and the mixture a training loads: few global experts under contiguous local numbers.

An expert file is safetensors, never changed once written. Keys are compared whole: `expert_1` is not a prefix
of `expert_11`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean, missing_extra

Arrays = dict[str, NDArray]
_MIXTURE_KEY = re.compile(r"expert_(0|[1-9][0-9]*)/(.+)")
_NOTE = "shoal"  # all metadata under one key: with several, the order in the file, and its sha256, would vary


def remap(indices: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Global expert indices to contiguous local ones and back, in ascending order.

    >>> remap([50, 0, 10, 5])
    ({0: 0, 5: 1, 10: 2, 50: 3}, {0: 0, 1: 5, 2: 10, 3: 50})
    """
    chosen = sorted(set(indices))
    if chosen and chosen[0] < 0:
        raise ValueError(f"expert indices must not be negative, got {chosen[0]}")
    return {index: local for local, index in enumerate(chosen)}, dict(enumerate(chosen))


def build_remapping(
    dependency_skill_names: Sequence[str],
    new_skill_global_expert_idx: int,
    completed_skills: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Global to local and local to global indices of the experts that a training loads.

    Args:
        dependency_skill_names: skills whose experts the training needs.
        new_skill_global_expert_idx: expert of the skill to train.
        completed_skills: `{name: {"expert_idx": …}}`.

    Raises:
        ValueError: a dependency that is not among the completed skills.

    >>> done = {"Collect Wood": {"expert_idx": 0}, "Collect Stone": {"expert_idx": 2}}
    >>> build_remapping(["Collect Wood", "Collect Stone"], 7, done)
    ({0: 0, 2: 1, 7: 2}, {0: 0, 1: 2, 2: 7})
    """
    for name in dependency_skill_names:
        if name not in completed_skills:
            raise ValueError(
                f"dependency {name!r} is not among the completed skills.{did_you_mean(name, completed_skills)}"
            )
    needed = [int(completed_skills[name]["expert_idx"]) for name in dependency_skill_names]
    return remap([*needed, new_skill_global_expert_idx])


def join_mixture(experts: Mapping[int, Mapping[str, NDArray]]) -> Arrays:
    """One flat set of arrays `expert_<local>/<key>` of several experts."""
    return {
        f"expert_{local}/{key}": array for local, params in experts.items() for key, array in params.items()
    }


def split_mixture(arrays: Mapping[str, NDArray]) -> dict[int, Arrays]:
    """The experts in what `join_mixture` made, by local index."""
    experts: dict[int, Arrays] = {}
    for key, array in arrays.items():
        match = _MIXTURE_KEY.fullmatch(key)
        if not match:
            raise DataError(f"{key!r} is not an expert's array; expected expert_<number>/<name>")
        experts.setdefault(int(match[1]), {})[match[2]] = array
    return dict(sorted(experts.items()))


def average(one: Mapping[str, NDArray], other: Mapping[str, NDArray]) -> Arrays:
    """The mean of two experts of the same shape."""
    if {key: array.shape for key, array in one.items()} != {key: array.shape for key, array in other.items()}:
        raise ValueError("experts of different shapes cannot be averaged")
    return {key: ((array + other[key]) / 2).astype(array.dtype) for key, array in one.items()}


def encode(arrays: Mapping[str, NDArray], note: Mapping[str, Any] | None = None) -> bytes:
    """A safetensors file; equal arrays and notes give equal bytes."""
    data: bytes = _safetensors().save(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        metadata={_NOTE: json.dumps(dict(note or {}), sort_keys=True)},
    )
    return data


def decode(data: bytes, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and note of a safetensors file; a `DataError` names the file that is broken."""
    try:
        arrays = _safetensors().load(data)
        size = int.from_bytes(data[:8], "little")
        note = json.loads(json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(_NOTE, "{}"))
    except Exception as error:
        raise DataError(f"{name} is not a safetensors file of shoal: {error}") from error
    return arrays, note


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise missing_extra("training skills", "train") from error
    return safetensors.numpy
