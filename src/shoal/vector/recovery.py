"""What a pool does about environments that failed: give up, replace them, or leave them out from now on.

A replaced environment shows it: its step is reported truncated with `info["worker_restarted"]`, so that no
trajectory can join two episodes. Environments that lived in the same worker are replaced with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from shoal.core.seeding import derive_seed
from shoal.vector.failures import Failure, error_of
from shoal.vector.lanes import Lane
from shoal.vector.results import Record
from shoal.vector.share import Extras

if TYPE_CHECKING:
    from shoal.vector.operations import Operations

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces failed environments of a pool.

    Args:
        pool: the pool.
        policy: "raise", "restart" or "mask".
        max_restarts: of one environment; the next failure raises.
        revive: gives a lost lane a fresh worker and returns all lanes that lived in the old one.
    """

    def __init__(
        self,
        pool: Operations,
        policy: str,
        max_restarts: int,
        revive: Callable[[Any], Sequence[Lane]] | None,
    ) -> None:
        self.pool, self.policy, self.max_restarts, self.revive = pool, policy, max_restarts, revive
        self.blamed = [0] * pool.num_envs
        """How often each env made its worker fail."""
        self.replaced = [0] * pool.num_envs
        """How often each env was replaced, its own fault or not."""
        self._infos: dict[int, dict[str, Any]] = {}
        self.owed: dict[int, Record] = {}
        """Envs that were replaced while nobody stepped them: their next step reports it."""

    def revive_lost(self) -> None:
        """Fresh workers for lanes that a raised failure left without one; a full reset follows."""
        for lane in self.pool.lanes:
            if lane.lost is not None and self.revive is not None:
                self.revive(lane)

    def handle(self, failures: list[Failure], stepped: set[int], word: str) -> list[Record]:
        """Deal with the failures of one step or reset; returns the infos of the replaced envs.

        Args:
            failures: what failed.
            stepped: the envs that took part.
            word: "step" or "reset".

        Raises:
            WorkerError: with the policy "raise", or when an env failed too often.
        """
        if self.policy == "raise":
            raise_first(failures)
        records: dict[int, Record] = {}
        last: dict[int, list[Any]] = {}
        while failures:
            hurt = self._count(failures)
            last.update({i: self.pool.last_values(i) for i in hurt if i not in last})
            members = self._make_anew(hurt)
            failures = self._reset(members, word)
            failed = {failure.env for failure in failures}
            for i, failure in hurt.items():
                if i in members and i not in failed:
                    records[i] = self._record(i, failure, last[i], word)
                elif i not in members:
                    records[i] = self._masked(i, failure, last[i])
        for i in [i for i in records if i not in stepped]:
            self.owed[i] = records.pop(i)
        return list(records.values())

    def _count(self, failures: list[Failure]) -> dict[int, Failure]:
        hurt: dict[int, Failure] = {}
        for failure in failures:
            i = failure.env
            self.blamed[i] += 1
            logger.warning("%s; policy: %s", error_of(failure), self.policy)
            if self.policy == "restart" and self.blamed[i] > self.max_restarts:
                error = error_of(failure)
                error.add_note(f"env {i} was restarted {self.max_restarts} times (max_restarts) before this")
                raise error
            if self.policy == "mask":
                self.pool.active[i] = False
                self.pool.all_active = False
            lane = self.pool.lane_of(i)
            if lane.lost is not None:
                for other in self.pool.lanes:
                    if other is lane or (other.home is not None and other.home is lane.home):
                        hurt.update(dict.fromkeys(range(other.first, other.first + other.count), failure))
        hurt.update({failure.env: failure for failure in failures})
        return hurt

    def _make_anew(self, hurt: dict[int, Failure]) -> list[int]:
        """Rebuild the hurt envs that go on; returns them in order."""
        pool, fresh = self.pool, set()
        for i in sorted(hurt):
            lane = pool.lane_of(i)
            if lane.lost is not None:
                assert self.revive is not None
                fresh |= {other.first for other in self.revive(lane)}
        going_on = [i for i in sorted(hurt) if pool.active[i]]
        for lane, members in pool.by_lane(going_on):
            if lane.first not in fresh:
                lane.start("rebuild", members)
                raise_first((lane.finish(None) or Extras()).failures)
        for i in hurt:
            self.replaced[i] += 1
        return going_on

    def _reset(self, members: list[int], word: str) -> list[Failure]:
        pool = self.pool
        failures: list[Failure] = []
        for lane, positions in pool.by_lane(members):
            seeds = [self._seed(lane.first + j, word) for j in positions]
            lane.start("reset", positions, seeds, None, lane.ring)
            reply = lane.finish(None) or Extras()
            pool.results.keep(lane, positions, reply, {failure.env for failure in reply.failures})
            self._infos.update({i: info for i, _, _, info in reply.infos})
            failures += reply.failures
            if word == "step" and pool.autoreset_mode is not AutoresetMode.SAME_STEP and lane.lost is None:
                lane.start("await_reset", positions)
                lane.finish(None)
        return failures

    def _seed(self, i: int, word: str) -> int | None:
        seed = self.pool.seeds[i]
        if seed is None or word == "reset":
            return seed
        return derive_seed(seed, "restart", self.replaced[i])

    def _record(self, i: int, failure: Failure, last: list[Any], word: str) -> Record:
        told = {"worker_restarted": True, "worker_error": str(error_of(failure))}
        info = {**self._infos.pop(i, {}), **told}
        if word == "reset":
            return i, None, None, info
        self._flag(i)
        if self.pool.autoreset_mode is AutoresetMode.SAME_STEP:
            return i, self.pool.slots.observations.rebuild(last), dict(told), info
        self.pool.put_values(i, last)
        return i, None, None, dict(told)

    def _masked(self, i: int, failure: Failure, last: list[Any]) -> Record:
        self._flag(i)
        self.pool.put_values(i, last)
        return i, None, None, {"worker_masked": True, "worker_error": str(error_of(failure))}

    def _flag(self, i: int) -> None:
        slots = self.pool.slots
        slots.rewards[i], slots.terminated[i], slots.truncated[i] = 0.0, False, True

    def pay_owed(self, chosen: Sequence[int]) -> list[Record]:
        """The reports that are due for envs which are stepped now; those envs must not step."""
        due = [self.owed.pop(i) for i in chosen if i in self.owed]
        for record in due:
            self._flag(record[0])
        return due

    def forget(self, chosen: Sequence[int]) -> None:
        """Nothing is owed to an env that is reset."""
        for i in chosen:
            self.owed.pop(i, None)


def raise_first(failures: list[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if not failures:
        return
    error = error_of(failures[0])
    for other in failures[1:]:
        error.add_note(f"also: {error_of(other)}")
    raise error
