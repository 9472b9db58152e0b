"""Infos of single environments as the dict of arrays that Gymnasium's vector environments return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

PLAIN = (int, float, bool)


def batch_infos(n_envs: int, records: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Each key of any env's info becomes an array over envs, with a mask `_key` of who had it.

    Equal to what `gymnasium.vector.SyncVectorEnv` builds, key order included.
    """
    out: dict[str, Any] = {}
    for env, info in records:
        _add(out, info, env, n_envs)
    return out


def _add(out: dict[str, Any], info: dict[str, Any], env: int, n_envs: int) -> None:
    for key, value in info.items():
        mask_key = f"_{key}"
        if key == "final_obs":
            array = out[key] if key in out else np.full(n_envs, None, dtype=object)
            array[env] = value
        elif isinstance(value, dict):
            array = out.get(key, {})
            _add(array, value, env, n_envs)
        else:
            array = out[key] if key in out else _empty_like(value, n_envs)
            array[env] = value
        mask = out.get(mask_key)
        if mask is None:
            mask = np.zeros(n_envs, dtype=np.bool_)
        mask[env] = True
        out[key], out[mask_key] = array, mask


def _empty_like(value: Any, n_envs: int) -> Any:
    kind = type(value)
    if kind in PLAIN or issubclass(kind, np.number):
        return np.zeros(n_envs, dtype=kind)
    if isinstance(value, np.ndarray):
        return np.zeros((n_envs, *value.shape), dtype=value.dtype)
    return np.full(n_envs, None, dtype=object)
