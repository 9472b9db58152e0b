"""What a failure of an environment does: it is raised, or the environment is replaced and its episode truncated.

A replaced environment shows it, by the flag `truncated` and `info["worker_restarted"]`, so that no trajectory can join
two episodes.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.data import deep_copy
from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.core.seeding import derive_seed
from shoal.core.workers import RemoteTraceback
from shoal.vector.infos import FINAL_IN_BUFFER, EnvInfo, Info, StepResult
from shoal.vector.messages import Attach, Failure, Rebuild, Reply, Reset, Step, ids_of
from shoal.vector.workers import Pending, Worker, attach_all, collect

if TYPE_CHECKING:
    from shoal.vector.vector_env import VectorPool

logger = logging.getLogger(__name__)
OnFailure = Literal["raise", "restart"]
MOST_AT_ONCE = 3
"""Restarts of an env in one operation, whatever `max_restarts` says: it may be that it can never begin."""


# --- in words
def describe(failure: Failure) -> str:
    """The failure in one line."""
    where = f" (pid {failure.pid})" if failure.pid is not None else ""
    acted = f" with action {failure.action}" if failure.action is not None else ""
    limit = "make_timeout, else step_timeout" if failure.doing == "make" else "step_timeout"
    named = f" ({limit})" if failure.kind == "timeout" else ""
    return f"env {failure.env}{where} failed in {failure.doing}{acted}: {failure.summary}{named}"


def reported(failure: Failure) -> dict[str, Any]:
    """The infos that a replaced environment reports about its failure."""
    info = {"worker_restarted": True, "worker_error": describe(failure), "worker_env": failure.env}
    info["worker_summary"] = failure.summary
    return {**info, "worker_timeout": True} if failure.kind == "timeout" else info


def error_of(failure: Failure) -> Exception:
    """The exception to raise: the env's own, with a note that names the env; of a death or a hang a `WorkerError`."""
    original, message = failure.exception, describe(failure)
    # Those that end a loop or generator would be lost there.
    if not isinstance(original, Exception) or isinstance(original, StopIteration | StopAsyncIteration):
        return worker_error_of(failure)
    if message not in getattr(original, "__notes__", ()):
        original.add_note(message)
    if failure.trace and original.__traceback__ is None and original.__cause__ is None:
        original.__cause__ = RemoteTraceback(failure.trace)
    return original


def worker_error_of(failure: Failure, note: str = "") -> WorkerError:
    """The failure as an error of shoal's, caused by the env's own."""
    kinds = {"died": WorkerDiedError, "timeout": WorkerTimeoutError}
    error = kinds.get(failure.kind, WorkerError)(describe(failure))
    error.details = reported(failure)
    error.__cause__ = failure.exception or (RemoteTraceback(failure.trace) if failure.trace else None)
    if note:
        error.add_note(note)
    return error


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if failures:
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {describe(other)}")
        raise error


# --- the policy
class FailurePolicy:
    """Raises the failures of a vector env, or replaces what failed and reports the episodes that were truncated.

    Attributes:
        seeds: what each was seeded with last.
        failed: how often each failed.
        replaced: how often each was made anew.
    """

    def __init__(self, pool: VectorPool, attach: Attach, max_restarts: float) -> None:
        # A proxy: a vector env without references is closed at once.
        self.pool, self._attach, self.max_restarts = weakref.proxy(pool), attach, max_restarts
        n_envs = pool.num_envs
        self.seeds: list[int | None] = [None] * n_envs
        self.failed, self.replaced = [0] * n_envs, [0] * n_envs
        # What environments showed last, leaf by leaf.
        self._last = [
            list(column) if isinstance(column, tuple) else column for column in pool.shown.some(slice(None))
        ]

    def final(self, i: int) -> Any:
        """The last observation of an episode that was replaced, as an env gave it: of a Box an array."""
        assert self.pool.buffers.final is not None
        return self.pool.shown.layout.leaves[0].of(self.pool.buffers.final[[i]], 0)

    def remember(self, ids: Any = slice(None)) -> None:
        """Remember the current observations, for environments that are replaced in the next operation."""
        for kept, values in zip(self._last, self.pool.shown.some(ids), strict=True):
            if isinstance(kept, list) and not isinstance(ids, slice):
                for i, value in zip(ids, values, strict=True):
                    kept[i] = value
            else:
                kept[ids] = values

    def recover(self, failures: list[Failure], env_infos: list[EnvInfo], pending: Pending) -> list[EnvInfo]:
        """Replace what failed; returns what all environments of the operation reported then.

        Environments that were lost beside it, with their worker, are made anew and have to be reset first.

        Raises:
            Exception: with the policy "raise", when an env failed too often, or when one was stepped after its end.
        """
        given: dict[int, int | None] = {}
        stepped: set[int] = set()
        for worker, command in pending:
            if isinstance(command, Reset):
                given.update(zip(ids_of(worker, command), command.seeds, strict=True))
            elif isinstance(command, Step):
                stepped.update(ids_of(worker, command))
        ends: dict[int, StepResult] = {}  # the last step of episodes that ended or were cut off
        affected: dict[int, Failure] = {}
        infos: dict[int, Info] = {}
        attempts = Counter[int]()
        while failures:
            attempts.update(failure.env for failure in failures)
            now = self._affected_by(failures, attempts)
            for i, failure in now.items():
                ends.setdefault(i, self._end_of(i, failure))
            affected |= now
            fresh, failures = self._replace(now, given, stepped)
            infos |= fresh
        env_infos = [item for item in env_infos if item.env not in affected]
        for i, failure in affected.items():
            why = reported(failure)
            info = {**infos.get(i, {}), **why}
            if i in given:
                env_infos.append(EnvInfo(i, None, None, info))
                continue
            if not (self.pool.same_step and i in stepped):
                self.pool.shown.put(i, [column[i] for column in self._last])
            if i not in stepped:
                self.pool.undone[i] = failure
                continue
            end, buffers = ends[i], self.pool.buffers
            buffers.rewards[i], buffers.terminated[i], buffers.truncated[i] = end[1:4]
            final, final_info = (
                (end.observation, {**end.info, **why}) if self.pool.same_step else (None, None)
            )
            env_infos.append(EnvInfo(i, final, final_info, info))
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
            if often or attempts[failure.env] > MOST_AT_ONCE:
                times = (
                    f"{self.max_restarts} times (max_restarts)" if often else f"{MOST_AT_ONCE} times at once"
                )
                note = f"env {failure.env} was restarted {times} before this"
                raise worker_error_of(failure, note)
            worker = self.pool.worker_of[failure.env]
            if worker.lost is not None:
                affected.update(dict.fromkeys(worker.ids, failure))
            if self.pool.warns:
                told = "%s; the environment is restarted (on_failure='restart')"
                logger.warning(told, describe(failure))
        return affected | {failure.env: failure for failure in failures}

    def _end_of(self, i: int, failure: Failure) -> StepResult:
        """How the episode of an env that is replaced ended: in this step, or cut off after what it showed last."""
        buffers = self.pool.buffers
        if failure.env == i and failure.ending is not None:
            final, info = failure.ending
            if final is FINAL_IN_BUFFER:
                final = self.final(i)
            flags = bool(buffers.terminated[i]), bool(buffers.truncated[i])
            return StepResult(final, float(buffers.rewards[i]), *flags, info)
        last = buffers.observations.rebuild([column[i] for column in self._last])
        return StepResult(deep_copy(last), 0.0, False, True, {})

    def _replace(
        self, affected: Mapping[int, Failure], given: Mapping[int, int | None], stepped: set[int]
    ) -> tuple[dict[int, Info], list[Failure]]:
        """Rebuild these environments, all at once; returns the infos of their resets, and what failed again."""
        by_worker = self.pool.by_worker
        lost = [worker for worker, _ in by_worker(affected) if worker.lost is not None]
        failures = self.restart(lost)
        rebuilt = by_worker(i for i in sorted(affected) if self.pool.worker_of[i] not in lost)
        failures += failures_of(self._ask([(worker, Rebuild(members)) for worker, members in rebuilt]))
        failed = {failure.env for failure in failures}
        for i in affected:
            self.replaced[i] += 1
        commands: Pending = []
        begun = [i for i in sorted(affected) if i in given or i in stepped]
        for worker, members in by_worker(i for i in begun if i not in failed):
            if worker.lost is not None:
                continue
            ids = [worker.first + j for j in members]
            seeds = [self.next_seed(i) if given.get(i) is None else given[i] for i in ids]
            ended = not self.pool.same_step and not given
            commands.append((worker, Reset(members, seeds, None, ended)))
        replies = self._ask(commands)
        again = failures_of(replies)
        infos: dict[int, Info] = {}
        for (worker, command), reply in zip(commands, replies, strict=True):
            self.pool.shown.take(ids_of(worker, command), reply.columns, {item.env for item in again})
            infos.update({item.env: item.info for item in reply.env_infos})
        return infos, failures + again

    def next_seed(self, i: int) -> int | None:
        """The seed of an env's first episode after it was replaced; 31 bits, which all generators take."""
        seed = self.seeds[i]
        return None if seed is None else derive_seed(seed, "restart", self.replaced[i]) >> 32

    def restart(self, lost: Sequence[Worker]) -> list[Failure]:
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


def failures_of(replies: Iterable[Reply]) -> list[Failure]:
    """All failures in some replies."""
    return [failure for reply in replies for failure in reply.failures]
