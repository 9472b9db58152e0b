"""What environments tell beside arrays: ends of episodes and infos, on their way to the caller's dicts."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

PLAIN = (int, float, bool)


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    BUFFER = "buffer"


IN_BUFFER = Where.BUFFER


class Told(NamedTuple):
    """What one environment told in one step or reset."""

    env: int
    final: Any  # the last observation of an episode that was replaced in this step, or IN_BUFFER
    final_info: dict[str, Any] | None  # of that last step; None where no episode was replaced
    info: dict[str, Any]


class StepResult(NamedTuple):
    """What one environment answered to one action."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Ready(NamedTuple):
    """The environments that answered, whichever were first.

    `observations` is batched like those of `step`, with one row per entry of `ids`; `late` names the
    environments that have been at work for longer than the `timeout` of `recv`.
    """

    ids: np.ndarray[Any, Any]
    observations: Any
    rewards: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    infos: list[dict[str, Any]]
    late: list[int]


def by_env(told: Iterable[Told]) -> dict[int, dict[str, Any]]:
    """One info per environment."""
    infos: dict[int, dict[str, Any]] = {}
    for env, final, final_info, info in told:
        ended = {} if final_info is None else {"final_obs": final, "final_info": final_info}
        infos[env] = {**ended, **info}
    return infos


def batch_infos(n_envs: int, told: Iterable[Told]) -> dict[str, Any]:
    """Each key of any env's info becomes an array over envs, with a mask `_key` of who had it.

    Equal to what `gymnasium.vector.SyncVectorEnv` builds, key order included.
    """
    ordered = sorted(told, key=lambda item: item.env)
    out = _of_numbers(n_envs, ordered)
    if out is not None:
        return out
    out = {}
    for env, final, final_info, info in ordered:
        if final_info is not None:
            _add(out, {"final_obs": final, "final_info": final_info}, env, n_envs)
        _add(out, info, env, n_envs)
    return out


def _of_numbers(n_envs: int, told: list[Told]) -> dict[str, Any] | None:
    """The same in one go where all tell numbers of the same kinds under the same keys; else None."""
    keys = tuple(told[0].info) if told else ()
    kinds = tuple(map(type, told[0].info.values())) if told else ()
    if not keys or not all(kind in PLAIN or issubclass(kind, np.number) for kind in kinds):
        return None
    rows = []
    for item in told:
        values = tuple(item.info.values())
        if item.final_info is not None or tuple(item.info) != keys or tuple(map(type, values)) != kinds:
            return None
        rows.append(values)
    ids = [item.env for item in told]
    out: dict[str, Any] = {}
    for key, kind, values in zip(keys, kinds, zip(*rows, strict=True), strict=True):
        column: Any = np.zeros(n_envs, dtype=kind)
        mask = np.zeros(n_envs, dtype=np.bool_)
        try:
            column[ids] = values
        except OverflowError:
            return None
        mask[ids] = True
        out[key], out[f"_{key}"] = column, mask
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
            try:
                array[env] = value
            except (TypeError, ValueError):  # not of the kind that another env told: any object fits then
                array = _as_objects(array)
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


def _as_objects(values: Any) -> Any:
    loose = np.full(len(values), None, dtype=object)
    for i, value in enumerate(values):
        loose[i] = value
    return loose
