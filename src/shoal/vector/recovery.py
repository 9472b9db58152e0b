"""The failure policies: raise the error, replace the environment, or mask it out.

An env that is replaced shows it: its episode is reported truncated with `info["worker_restarted"]`, so that no
trajectory can join two episodes.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np

from shoal.core.data import deep_copy
from shoal.core.errors import WorkerError
from shoal.vector.env_group import Attach, Rebuild, Reply, Reset, Step, ids_of
from shoal.vector.failures import (
    MOST_AT_ONCE,
    WHAT_IS_DONE,
    Failure,
    MaskedEnv,
    describe,
    error_of,
    raise_first,
    reported,
    restart_seed,
    worker_error_of,
)
from shoal.vector.infos import FINAL_IN_BUFFER, EnvInfo, Info
from shoal.vector.workers import Worker, attach_all, collect

if TYPE_CHECKING:
    from shoal.vector.vector_env import VectorPool

logger = logging.getLogger(__name__)
Pending = list[tuple[Worker, Any]]
"""Workers and their commands."""


class End(NamedTuple):
    """How an episode ended, or was cut off because its env had to be replaced."""

    reward: float
    terminated: bool
    truncated: bool
    final: Any  # the last observation
    final_info: Info
    why: Info = {}  # noqa: RUF012  (never written)
    info: Info = {}  # noqa: RUF012  (of the reset that followed)


class FailurePolicy:
    """Replaces failed environments of a vector env, or masks them out, and reports the episodes that were truncated.

    Attributes:
        active: `[n_envs]`; False for environments that were masked out after a failure.
        seeds: what each was seeded with last.
        failed: how often each failed.
        replaced: how often each was made anew.
        masked_by: the last failure for which an env was masked out.
        cut: ends of episodes that their environments have not reported yet: they were replaced outside of a step.
    """

    def __init__(self, pool: VectorPool, attach: Attach, max_restarts: float) -> None:
        # A proxy: a vector env without references is closed at once.
        self.pool, self._attach, self.max_restarts = weakref.proxy(pool), attach, max_restarts
        self.worker_of = [worker for worker in pool.workers for _ in range(worker.count)]
        n_envs = pool.num_envs
        self.active = np.ones(n_envs, dtype=np.bool_)
        self.seeds: list[int | None] = [None] * n_envs
        self.failed, self.replaced = [0] * n_envs, [0] * n_envs
        self.masked_by: Failure | None = None
        self.cut: dict[int, End] = {}
        # What environments showed last, leaf by leaf.
        self._last = [
            list(column) if isinstance(column, tuple) else column for column in pool.shown.some(slice(None))
        ]

    def check_one_is_left(self) -> None:
        """Raise if all environments were masked out."""
        if self.masked_by is not None and not self.active.any():
            raise WorkerError(
                f"none of the {self.pool.num_envs} environments is left: each failed and was masked out; make them "
                "anew, or have those that fail replaced (on_failure='restart')"
            ) from error_of(self.masked_by)

    def by_worker(self, chosen: Iterable[int]) -> list[tuple[Worker, list[int]]]:
        """Environments as (worker, positions in its group)."""
        parts: dict[Worker, list[int]] = {}
        for i in chosen:
            worker = self.worker_of[i]
            parts.setdefault(worker, []).append(i - worker.first)
        return list(parts.items())

    def final(self, i: int) -> Any:
        """The last observation of an episode that was replaced, as an env gave it: of a Box an array."""
        assert self.pool.buffers.final is not None
        value = self.pool.buffers.final[i]
        return np.array(value) if isinstance(self.pool.observation_spaces[i], gymnasium.spaces.Box) else value

    def remember(self, ids: Any = slice(None)) -> None:
        """Remember the current observations, for environments that are replaced in the next operation."""
        for kept, values in zip(self._last, self.pool.shown.some(ids), strict=True):
            if isinstance(kept, list) and not isinstance(ids, slice):
                for i, value in zip(ids, values, strict=True):
                    kept[i] = value
            else:
                kept[ids] = values

    def left_out(self, chosen: Iterable[int], env_infos: Iterable[EnvInfo]) -> list[EnvInfo]:
        """The reports of environments that could not be stepped: they were replaced before, or masked out."""
        known = {item.env for item in env_infos}
        found = []
        for i in chosen:
            if i in known:
                continue
            if i in self.cut:
                found.append(self._ended(i, self.cut.pop(i)))
            elif not self.active[i]:
                self.pool.buffers.rewards[i] = 0.0
                found.append(EnvInfo(i, None, None, {"worker_masked": True}))
        return found

    def recover(self, failures: list[Failure], env_infos: list[EnvInfo], pending: Pending) -> list[EnvInfo]:
        """Replace what failed, by the policy; what all environments of the operation reported then.

        Raises:
            Exception: with the policy "raise", when an env failed too often, or when one was stepped after its end.
        """
        given: dict[int, int | None] = {}
        for worker, command in pending:
            if isinstance(command, Reset):
                given.update(zip(ids_of(worker, command), command.seeds, strict=True))
        stepped = {
            i for worker, command in pending if isinstance(command, Step) for i in ids_of(worker, command)
        }
        ends: dict[int, End] = {}
        affected: dict[int, Failure] = {}
        infos: dict[int, Info] = {}
        attempts = Counter[int]()
        while failures:
            attempts.update(failure.env for failure in failures)
            now = self._affected_by(failures, attempts)
            for i, failure in now.items():
                ends.setdefault(i, self._end_of(i, failure))
            affected |= now
            if self.pool.on_failure == "mask":
                self._mask(failures)
            fresh, failures = self._replace(now, given)
            infos |= fresh
        env_infos = [item for item in env_infos if item.env not in affected]
        for i, failure in affected.items():
            if not self.active[i]:
                why = info = {"worker_masked": True, "worker_error": describe(failure)}
            else:
                why = reported(failure)
                info = {**infos.get(i, {}), **why}
            if i in given and self.active[i]:
                env_infos.append(EnvInfo(i, None, None, info))
                continue
            if not (self.pool.same_step and self.active[i]):
                self.pool.shown.put(i, [column[i] for column in self._last])
            end = ends[i]._replace(why=why, info=info)
            if i in stepped or i in given:
                env_infos.append(self._ended(i, end, in_reset=i in given))
            else:
                self.cut[i] = end
        return env_infos

    def _affected_by(self, failures: Sequence[Failure], attempts: Mapping[int, int]) -> dict[int, Failure]:
        """The environments to be replaced, those of lost workers among them, and why; raises where none may be."""
        for failure in failures:
            self.failed[failure.env] += failure.kind != "over"
        if self.pool.on_failure == "raise" or any(failure.kind == "over" for failure in failures):
            raise_first(failures)
        affected: dict[int, Failure] = {}
        for failure in failures:
            often = self.failed[failure.env] > self.max_restarts
            if self.pool.on_failure == "restart" and (often or attempts[failure.env] > MOST_AT_ONCE):
                error = worker_error_of(failure)
                times = (
                    f"{self.max_restarts} times (max_restarts)" if often else f"{MOST_AT_ONCE} times at once"
                )
                error.add_note(f"env {failure.env} was restarted {times} before this")
                raise error
            worker = self.worker_of[failure.env]
            if worker.lost is not None:
                affected.update(dict.fromkeys(worker.ids, failure))
        if self.pool.warns:
            for failure in failures:
                done = WHAT_IS_DONE[self.pool.on_failure]
                logger.warning("%s; %s (on_failure=%s)", describe(failure), done, self.pool.on_failure)
        return {i: f for i, f in affected.items() if self.active[i]} | {f.env: f for f in failures}

    def _end_of(self, i: int, failure: Failure) -> End:
        """How the episode of an env that is replaced ended: in this step, or cut off after what it showed last."""
        buffers = self.pool.buffers
        if failure.env == i and failure.ending is not None:
            final, info = failure.ending
            if final is FINAL_IN_BUFFER:
                final = self.final(i)
            flags = bool(buffers.terminated[i]), bool(buffers.truncated[i])
            return End(float(buffers.rewards[i]), *flags, final, info)
        last = buffers.observations.rebuild([column[i] for column in self._last])
        return End(0.0, False, True, deep_copy(last), {})

    def _ended(self, i: int, end: End, *, in_reset: bool = False) -> EnvInfo:
        """Show the end of an episode in the flags, and as what the env reported."""
        buffers = self.pool.buffers
        buffers.rewards[i], buffers.terminated[i], buffers.truncated[i] = end[:3]
        if self.pool.same_step and not in_reset:
            return EnvInfo(i, end.final, {**end.final_info, **end.why}, end.info)
        return EnvInfo(i, None, None, end.info)

    def _mask(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            worker = self.worker_of[failure.env]
            self.active[failure.env] = False
            self.masked_by = failure
            worker.env_fns[failure.env - worker.first] = MaskedEnv

    def _replace(
        self, affected: Mapping[int, Failure], given: Mapping[int, int | None]
    ) -> tuple[dict[int, Info], list[Failure]]:
        """Rebuild these environments, all at once; returns the infos of their resets, and what failed again."""
        lost = [w for w in self.pool.workers if w.lost is not None and not affected.keys().isdisjoint(w.ids)]
        failures = self._restart_workers(lost)
        alive = [i for i in sorted(affected) if self.active[i] and self.worker_of[i].lost is None]
        rebuilt = self.by_worker(i for i in alive if self.worker_of[i] not in lost)
        failures += _failures(self._ask([(worker, Rebuild(members)) for worker, members in rebuilt]))
        failed = {failure.env for failure in failures}
        for i in affected:
            self.replaced[i] += 1
        commands: Pending = []
        for worker, members in self.by_worker(i for i in alive if i not in failed):
            ids = [worker.first + j for j in members]
            seeds = [
                restart_seed(self.seeds[i], self.replaced[i]) if given.get(i) is None else given[i]
                for i in ids
            ]
            ends = [i - worker.first for i in ids if not self.pool.same_step and i not in given]
            commands.append((worker, Reset(members, seeds, None, ends)))
        replies = self._ask(commands)
        again = _failures(replies)
        infos: dict[int, Info] = {}
        for (worker, command), reply in zip(commands, replies, strict=True):
            self.pool.shown.take(ids_of(worker, command), reply.columns, {item.env for item in again})
            infos.update({item.env: item.info for item in reply.env_infos})
        return infos, failures + again

    def replace_lost(self, seeds: dict[int, int | None]) -> None:
        """Replace workers that a raised failure left dead; their envs get new seeds if none is given."""
        lost = [worker for worker in self.pool.workers if worker.lost is not None]
        raise_first(self._restart_workers(lost))
        for i in (i for worker in lost for i in worker.ids):
            self.replaced[i] += 1
            if i in seeds and seeds[i] is None:
                seeds[i] = restart_seed(self.seeds[i], self.replaced[i])

    def _restart_workers(self, lost: Sequence[Worker]) -> list[Failure]:
        """Restart lost workers, all at once; returns what failed."""
        for worker in lost:
            worker.start()
        failures = []
        for worker, reply in zip(lost, collect(lost), strict=True):
            failures += reply.failures
            if reply.failures and worker.lost is None:
                worker.lose(reply.failures[0])
        ready = [worker for worker in lost if worker.lost is None]
        return failures + attach_all(ready, self._attach, self.pool.buffers)

    def _ask(self, commands: Pending) -> list[Reply]:
        """Send commands to workers outside of an operation, and wait for all replies."""
        for worker, command in commands:
            worker.begin(command)
        return collect([worker for worker, _ in commands])


def _failures(replies: Iterable[Reply]) -> list[Failure]:
    return [failure for reply in replies for failure in reply.failures]
