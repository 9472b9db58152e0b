"""Asynchronous stepping: environments are sent off with an action and come back when they are ready.

Lanes answer as a whole; an environment whose lane is at work for others waits for its turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.vector.actions import WHOLE, Loose, write_some
from shoal.vector.lanes import Lane
from shoal.vector.results import Ready, Record, by_env
from shoal.vector.share import Extras
from shoal.vector.waiting import SLICE

if TYPE_CHECKING:
    from shoal.vector.operations import Operations


class Flight:
    """The environments of a pool that are on their way."""

    def __init__(self, pool: Operations) -> None:
        self.pool = pool
        self.ids: dict[int, float] = {}
        """env -> when it was sent."""
        self._at_work: dict[int, tuple[Lane, list[int], str]] = {}  # by first env of the lane
        self._waiting: dict[int, dict[int, tuple[str, Any]]] = {}  # first env of the lane -> env -> job
        self._ready: list[tuple[int, list[Any], float, bool, bool, dict[str, Any]]] = []

    def send(self, ids: list[int], actions: Sequence[Any]) -> None:
        """Queue a step for each env and set idle lanes to work."""
        self._enqueue(ids, [("step", action) for action in actions])

    def send_reset(self, ids: list[int], seeds: Sequence[int | None]) -> None:
        """Queue a reset for each env and set idle lanes to work."""
        for i, seed in zip(ids, seeds, strict=True):
            self.pool.seeds[i] = seed
        self._enqueue(ids, [("reset", seed) for seed in seeds])

    def _enqueue(self, ids: list[int], jobs: list[tuple[str, Any]]) -> None:
        busy = [i for i in ids if i in self.ids]
        if busy:
            raise ValueError(f"environments {busy} are still in flight: recv them before sending them again")
        now = time.monotonic()
        touched: dict[int, Lane] = {}
        for i, job in zip(ids, jobs, strict=True):
            lane = self.pool.lane_of(i)
            self.ids[i] = now
            self._waiting.setdefault(lane.first, {})[i] = job
            touched[lane.first] = lane
        for first, lane in touched.items():
            if first not in self._at_work:
                self._set_to_work(lane)

    def _set_to_work(self, lane: Lane) -> None:
        queue = self._waiting.get(lane.first)
        if not queue:
            return
        word = next(iter(queue.values()))[0]
        chosen = sorted(i for i, job in queue.items() if job[0] == word)
        jobs = [queue.pop(i)[1] for i in chosen]
        pool = self.pool
        if word == "step":
            paid = pool.recovery.pay_owed(chosen)
            if paid:
                self._deliver([record[0] for record in paid], paid)
                gone = {record[0] for record in paid}
                jobs = [job for i, job in zip(chosen, jobs, strict=True) if i not in gone]
                chosen = [i for i in chosen if i not in gone]
                if not chosen:
                    self._set_to_work(lane)
                    return
        else:
            pool.recovery.forget(chosen)
        members = [i - lane.first for i in chosen]
        stepping = np.zeros(lane.count, dtype=np.bool_)
        stepping[members] = True
        pool.turn_lane(lane, stepping, (lane.ring + 1) % pool.slots.ring)
        lane.rings_bell = True
        if word == "step":
            loose: Loose = write_some(pool.slots, chosen, jobs)
            everyone = len(chosen) == lane.count and WHOLE not in loose
            lane.start_step(None if everyone else members, loose, lane.ring)
        else:
            lane.start("reset", members, jobs, None, lane.ring)
        lane.rings_bell = False
        self._at_work[lane.first] = (lane, members, word)

    def recv(self, min_envs: int, timeout: float | None) -> Ready:
        """Wait for at least `min_envs` of those in flight, or the timeout."""
        if min_envs < 1:
            raise ValueError(f"min_envs must be at least 1, got {min_envs}")
        if not self.ids:
            raise ValueError("no environment is in flight: send some actions first")
        wanted = min(min_envs, len(self.ids))
        start = looked = time.monotonic()
        while True:
            self._collect_finished()
            now = time.monotonic()
            if len(self._ready) >= wanted or (timeout is not None and now - start >= timeout):
                break
            if now - looked >= SLICE:
                looked = now
                for lane, _, _ in self._at_work.values():
                    lane.check()
            pause = SLICE if timeout is None else min(SLICE, timeout - (now - start))
            if self.pool.backend is not None:
                self.pool.backend.wait_bell(pause)
        return self._take(timeout)

    def _collect_finished(self) -> None:
        for first, (lane, members, word) in list(self._at_work.items()):
            if first in self._at_work and lane.finished():
                del self._at_work[first]
                reply = lane.finish(None)
                self._land(lane, members, word, reply)
                self._set_to_work(lane)

    def _land(self, lane: Lane, members: list[int], word: str, reply: Extras | None) -> None:
        chosen = [lane.first + j for j in members]
        try:
            records = self.pool.take([(lane, members)], [reply], [], word)
        except BaseException:
            for i in chosen:
                self.ids.pop(i, None)
            raise
        self._deliver(chosen, records, fresh=word == "reset")

    def _deliver(self, chosen: list[int], records: list[Record], *, fresh: bool = False) -> None:
        pool, slots = self.pool, self.pool.slots
        infos = by_env(records)
        for i in chosen:
            values = pool.results.values(i, pool.lane_of(i).ring)
            if fresh:
                self._ready.append((i, values, 0.0, False, False, infos.get(i, {})))
            else:
                flags = (bool(slots.terminated[i]), bool(slots.truncated[i]))
                self._ready.append((i, values, float(slots.rewards[i]), *flags, infos.get(i, {})))

    def _take(self, timeout: float | None) -> Ready:
        ready, self._ready = self._ready, []
        now = time.monotonic()
        for entry in ready:
            self.ids.pop(entry[0], None)
        late = [i for i, sent in self.ids.items() if timeout is not None and now - sent >= timeout]
        layout = self.pool.slots.observations
        columns: list[Any] = []
        for leaf, kind in enumerate(layout.leaves):
            column = [entry[1][leaf] for entry in ready]
            if kind.kind == "fixed":
                columns.append(np.array(column, dtype=kind.dtype).reshape((len(ready), *kind.shape)))
            else:
                columns.append(tuple(column))
        return Ready(
            np.array([entry[0] for entry in ready], dtype=np.int64),
            layout.rebuild(columns),
            np.array([entry[2] for entry in ready], dtype=np.float64),
            np.array([entry[3] for entry in ready], dtype=np.bool_),
            np.array([entry[4] for entry in ready], dtype=np.bool_),
            [entry[5] for entry in ready],
            sorted(late),
        )
