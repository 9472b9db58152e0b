"""What environments report in their infos: kept per environment, sent as columns, batched as Gymnasium does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from shoal.core.data import NUMBERS

Info = dict[str, Any]
Array = np.ndarray[Any, Any]
PLAIN = (int, float, bool)
CELLS = NUMBERS - {np.longdouble, np.complex64, np.complex128, np.clongdouble}
"""Types of numbers that fit into 8 bytes."""


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    BUFFER = "buffer"


FINAL_IN_BUFFER = Where.BUFFER


class EnvInfo(NamedTuple):
    """What one environment reported in one step or reset."""

    env: int
    final: Any  # the last observation of an episode that was replaced in this step, or FINAL_IN_BUFFER
    final_info: Info | None  # of that last step; None where no episode was replaced
    info: Info


class StepResult(NamedTuple):
    """The result of one action in one environment."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info


class Ready(NamedTuple):
    """The environments that were ready first.

    `observations` is batched like those of `step`, with one row per entry of `ids`.
    """

    ids: Array
    observations: Any
    rewards: Array
    terminated: Array
    truncated: Array
    infos: list[Info]


def by_env(env_infos: Iterable[EnvInfo]) -> dict[int, Info]:
    """One info per environment."""
    infos: dict[int, Info] = {}
    for env, final, final_info, info in env_infos:
        if final_info is not None:
            info = {"final_obs": final, "final_info": final_info, **info}
        infos[env] = info
    return infos


@dataclass(slots=True)
class InfoTable:
    """The infos of consecutive environments that all hold numbers of the same types under the same keys.

    Iterating gives the `EnvInfo` of each.
    """

    first: int
    count: int
    keys: tuple[str, ...]
    kinds: tuple[type, ...]
    columns: Sequence[Array]  # one per key, [count]

    @classmethod
    def of(cls, env_infos: Sequence[EnvInfo], count: int) -> InfoTable | None:
        """The table of `count` environments, None where their infos are not all alike."""
        if len(env_infos) != count:
            return None
        keys, kinds = tuple(env_infos[0].info), tuple(map(type, env_infos[0].info.values()))
        if not CELLS.issuperset(kinds) or not keys or "final_obs" in keys:
            return None
        rows = []
        for _, _, final_info, info in env_infos:
            if final_info is not None or tuple(info) != keys or tuple(map(type, info.values())) != kinds:
                return None
            rows.append(info.values())
        if not all(type(key) is str for key in keys):
            return None
        try:
            columns: list[Array] = [
                np.array(column, kind) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)
            ]
        except OverflowError:  # an int without room
            return None
        return cls(env_infos[0].env, count, keys, kinds, columns)

    @classmethod
    def joined(cls, tables: Sequence[InfoTable], n_envs: int) -> InfoTable | None:
        """One table of all environments; None if their tables differ or do not cover all."""
        first, *others = tables
        if sum(table.count for table in tables) != n_envs:
            return None
        if not all(table.keys == first.keys and table.kinds == first.kinds for table in others):
            return None
        if others:
            tables = sorted(tables, key=lambda table: table.first)
            columns = list(map(np.concatenate, zip(*(table.columns for table in tables), strict=True)))
            return cls(0, n_envs, first.keys, first.kinds, columns)
        return first

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[EnvInfo]:
        plain = [
            column.tolist() if kind in PLAIN else list(column)
            for kind, column in zip(self.kinds, self.columns, strict=True)
        ]
        for i, *row in zip(range(self.first, self.first + self.count), *plain, strict=True):
            yield EnvInfo(i, None, None, dict(zip(self.keys, row, strict=True)))


def batch_infos(n_envs: int, env_infos: Iterable[EnvInfo] | InfoTable) -> Info:
    """Each key of any env's info becomes an array over envs, with a mask `_key` of who had it.

    Equal to what `gymnasium.vector.SyncVectorEnv` builds, key order included. Where that fails, because some give
    a dict and others none, a number that does not fit, or a dict that holds itself, the array holds each value as
    it is.
    """
    if isinstance(env_infos, InfoTable):
        batch: Info = {}
        everyone = np.ones((len(env_infos.keys), n_envs), dtype=np.bool_)
        for key, column, mask in zip(env_infos.keys, env_infos.columns, everyone, strict=True):
            batch[key], batch[f"_{key}"] = column, mask
        return batch
    env_infos = list(env_infos)
    told = any(item.info or item.final_info or item.final_info is None for item in env_infos)
    if env_infos and not told:  # ends alone
        final, mask = np.full(n_envs, None), np.zeros(n_envs, dtype=np.bool_)
        for item in env_infos:
            final[item.env], mask[item.env] = item.final, True
        return {"final_obs": final, "_final_obs": mask, "final_info": {}, "_final_info": mask.copy()}
    each = by_env(env_infos)
    ids = sorted(each)
    return _batched_infos(n_envs, ids, [each[i] for i in ids])


def _batched_infos(n_envs: int, ids: Sequence[int], infos: Sequence[Info], *, inner: bool = False) -> Info:
    columns: dict[str, tuple[Any, Any]] = {}
    keys = set(map(tuple, infos))
    if len(keys) == 1:  # all have the same key
        rows = zip(*(info.values() for info in infos), strict=True)
        columns = {key: (ids, row) for key, row in zip(keys.pop(), rows, strict=True)}
    else:
        for i, info in zip(ids, infos, strict=True):
            for key, value in info.items():
                if key in columns:
                    columns[key][0].append(i)
                    columns[key][1].append(value)
                else:
                    columns[key] = [i], [value]
    out: Info = {}
    masked, mask = None, np.zeros(n_envs, dtype=np.bool_)
    for key, (who, values) in columns.items():
        if who is not masked:
            masked, mask = who, np.zeros(n_envs, dtype=np.bool_)
            mask[who] = True
        out[key], out[f"_{key}"] = _info_column(n_envs, key, who, values, inner), mask.copy()
    return out


def _info_column(n_envs: int, key: str, ids: Sequence[int], values: Sequence[Any], inner: bool) -> Any:
    kinds = set(map(type, values)) if key != "final_obs" else {object}
    if len(ids) == n_envs and len(kinds) == 1 and (kind := next(iter(kinds))) in NUMBERS:
        try:
            return np.array(values, dtype=kind)
        except OverflowError:  # kept as objects
            pass
    dicts = [kind for kind in kinds if issubclass(kind, dict)]
    if len(dicts) == len(kinds):
        try:
            return _batched_infos(n_envs, ids, values, inner=True)
        except RecursionError:  # one holds itself: kept as it is
            if inner:
                raise
    first, column = values[0], np.empty(n_envs, dtype=object)
    if not dicts and key != "final_obs":
        if type(first) in PLAIN or isinstance(first, np.number):
            column = np.zeros(n_envs, dtype=type(first))
        elif isinstance(first, np.ndarray):
            column = np.zeros((n_envs, *first.shape), first.dtype)
    try:
        if len(ids) > 16 and len(kinds) == 1 and column.ndim == 1 and column.dtype != object:
            column[ids] = values
            return column
        for i, value in zip(ids, values, strict=True):
            column[i] = value
    except (TypeError, ValueError, OverflowError):  # they are of different kinds: any object fits
        column = np.empty(n_envs, dtype=object)
        for i, value in zip(ids, values, strict=True):
            column[i] = value
    return column
