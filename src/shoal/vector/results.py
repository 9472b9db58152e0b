"""From slots and replies to what callers see: batches of observations, per-env results, infos."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.vector.extras import IN_SLOT, Extras
from shoal.vector.lanes import Lane
from shoal.vector.slots import Slots

Record = tuple[int, Any, dict[str, Any] | None, dict[str, Any]]
"""(env, final observation, final info or None, info)."""


RECYCLE_FROM = 65_536
"""Bytes from which the memory of copies is used again."""


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


class Handouts:
    """Large observations handed to the caller where they were written, as long as places last.

    A place is written again only when the caller holds neither what it was given nor any view of it; when
    all are held, place 0 is used and copied. So what was given never changes.
    """

    def __init__(self, slots: Slots) -> None:
        self._owners = slots.handouts(0)
        shape = slots.obs[0].shape[1:]
        self._given = [owner.reshape(shape) for owner in self._owners]

    def next_place(self) -> int:
        """A place that nobody holds; 0 when all others are held."""
        for place in range(1, len(self._given)):
            # the list's own reference, and getrefcount's; the owner has its view's besides
            if sys.getrefcount(self._given[place]) == 2 and sys.getrefcount(self._owners[place]) == 3:
                return place
        return 0

    def give(self, place: int) -> np.ndarray[Any, Any]:
        """The observations at a place, as the caller's own."""
        return self._given[place].copy() if place == 0 else self._given[place]


class Results:
    """The observations of a pool: fixed-size leaves in the slots, the others as Python values here."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._spares: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.beside: dict[int, list[Any]] = {
            i: [None] * slots.n_envs for i in (*slots.observations.text, *slots.observations.objects)
        }

    def keep(self, lane: Lane, members: Sequence[int], reply: Extras, but: set[int]) -> None:
        """Take over the values that came by message, except those of the envs `but`, which failed."""
        for leaf, values in reply.columns.items():
            kept = self.beside[leaf]
            if not but and len(values) == lane.count:
                kept[lane.first : lane.first + lane.count] = values
                continue
            for j, value in zip(members, values, strict=True):
                if lane.first + j not in but:
                    kept[lane.first + j] = value

    def small_places(self) -> list[np.ndarray[Any, Any]] | None:
        """The places of the ring, where observations are one array that is cheap to copy."""
        layout = self.slots.observations
        if not (layout.is_leaf and layout.fixed) or self.slots.obs[0][0].nbytes >= RECYCLE_FROM:
            return None
        return list(self.slots.obs[0])

    def batch(self, ring: int, copy: bool) -> Any:
        """The observations of all environments at one place of the ring."""
        columns = [
            tuple(self.beside[i])
            if i in self.beside
            else (self._copy(i, array[ring]) if copy else array[ring])
            for i, array in enumerate(self.slots.obs)
        ]
        return self.slots.observations.rebuild(columns)

    def _copy(self, leaf: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy; of large arrays into memory that an earlier copy had and nobody uses any more.

        Fresh memory costs a page fault per 4 KiB, several times the copying itself.
        """
        if array.nbytes < RECYCLE_FROM:
            return array.copy()
        spares = self._spares.setdefault(leaf, [])
        for spare in spares:
            if sys.getrefcount(spare) == 3:  # the list, the loop and the call: no caller, and no view of it
                np.copyto(spare, array)
                return spare
        fresh = array.copy()
        if len(spares) < 4:
            spares.append(fresh)
        return fresh

    def rows(self, ids: Sequence[int], rings: Sequence[int]) -> Any:
        """The observations of some environments, each at its place of the ring."""
        columns = [
            tuple(self.beside[leaf][i] for i in ids)
            if leaf in self.beside
            else array[np.asarray(rings, dtype=np.intp), np.asarray(ids, dtype=np.intp)]
            for leaf, array in enumerate(self.slots.obs)
        ]
        return self.slots.observations.rebuild(columns)

    def values(self, i: int, ring: int) -> list[Any]:
        """The leaf values of one environment's observation; arrays are copies."""
        values: list[Any] = []
        for leaf, array in enumerate(self.slots.obs):
            if leaf in self.beside:
                values.append(self.beside[leaf][i])
            else:
                value = array[ring, i]
                values.append(value.copy() if isinstance(value, np.ndarray) else value)
        return values

    def put(self, i: int, ring: int, values: Sequence[Any]) -> None:
        """Make these leaf values the observation of one environment."""
        for leaf, array in enumerate(self.slots.obs):
            if leaf in self.beside:
                self.beside[leaf][i] = values[leaf]
            else:
                array[ring, i] = values[leaf]

    def add_plain_ends(self, records: list[Record], chosen: Iterable[int]) -> None:
        """Complete the ends of episodes under same-step autoreset: those without any info were not sent."""
        told = {record[0] for record in records if record[2] is not None}
        slots = self.slots
        for i in chosen:
            if (slots.terminated[i] or slots.truncated[i]) and i not in told:
                records.append((i, IN_SLOT, {}, {}))
        for k, (i, final, final_info, info) in enumerate(records):
            if final is IN_SLOT:
                records[k] = (i, slots.final[0][i].copy(), final_info, info)


def merged(records: Iterable[Record]) -> list[tuple[int, dict[str, Any]]]:
    """Records as the sequence of infos that Gymnasium adds one after the other."""
    out: list[tuple[int, dict[str, Any]]] = []
    for env, final, final_info, info in sorted(records, key=lambda record: record[0]):
        if final_info is not None:
            out.append((env, {"final_obs": final, "final_info": final_info}))
        out.append((env, info))
    return out


def by_env(records: Iterable[Record]) -> dict[int, dict[str, Any]]:
    """Records as one info per environment."""
    infos: dict[int, dict[str, Any]] = {}
    for env, final, final_info, info in records:
        ended = {} if final_info is None else {"final_obs": final, "final_info": final_info}
        infos[env] = {**ended, **info}
    return infos
