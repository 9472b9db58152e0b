"""One rollout over workers: who plays what, and what is played again when a worker is lost."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.core.data import Status, Trajectory
from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.rollout.parallel.placement import Placement
from shoal.rollout.parallel.shares import Assignment, Played, Share, decode_report

logger = logging.getLogger(__name__)
PATIENCE = 10.0
"""Seconds within which a worker must be done after the last episode, and its reports here when it is done."""
Events = queue.SimpleQueue[tuple[str, Any, Any]]


@dataclass(slots=True)
class RolloutReport:
    """How a rollout went."""

    seconds: float = 0.0
    workers: int = 0
    worker_cpu_seconds: float = 0.0
    engine_seconds: float = 0.0
    batches: int = 0
    worker_deaths: int = 0
    replayed_episodes: int = 0

    def metrics(self) -> dict[str, float]:
        """As numbers for `metrics.jsonl`."""
        busy = self.engine_seconds / self.seconds if self.seconds else 0.0
        return {
            "rollout_workers": float(self.workers),
            "rollout_batches": float(self.batches),
            "engine_busy": round(busy, 4),
            "worker_deaths": float(self.worker_deaths),
            "replayed_episodes": float(self.replayed_episodes),
        }


class Dispatch:
    """One rollout while it runs: which episodes are open, and on which workers.

    Args:
        placement: where workers run.
        events: what workers report, and what happens to them.
        report: where it is told how the rollout goes.
        number: of this rollout; reports of another one, which was interrupted, are not mixed up with it.
        share_of: what the worker of a number needs to play these episodes.
        lost: told the episodes that a lost worker left open.
        give_up: the record of an episode that cannot be played.
        max_deaths: workers that may be lost while they play one episode alone.
    """

    def __init__(
        self,
        placement: Placement,
        events: Events,
        report: RolloutReport,
        *,
        number: int,
        share_of: Callable[[int, list[Assignment]], Share],
        lost: Callable[[list[Assignment]], None],
        give_up: Callable[[Assignment, Status, str], Trajectory],
        max_deaths: int,
    ) -> None:
        self.placement, self.events, self.report = placement, events, report
        self.number = number
        self.share_of, self.lost, self.give_up, self.max_deaths = share_of, lost, give_up, max_deaths
        self.results: dict[int, Trajectory] = {}
        self.deaths: dict[int, int] = {}
        self.running: dict[Future[Played], Share] = {}
        self.started = 0
        self.broken = False
        self.unreported = 0  # times that workers were done and episodes missing
        self.hung = 0

    def run(self, assignments: list[Assignment], n_workers: int) -> dict[int, Trajectory]:
        """Play these episodes on so many workers; their trajectories by index."""
        for part in spread(assignments, n_workers):
            self._start(part)
        try:
            while len(self.results) < len(assignments):
                try:
                    kind, first, second = self.events.get(timeout=None if self.running else PATIENCE)
                except queue.Empty:
                    self._unreported(assignments)
                    continue
                if kind == "report":
                    rollout, index, trajectory = decode_report(first)
                    if rollout == self.number:
                        self.results.setdefault(index, trajectory)
                elif kind == "closed":
                    raise WorkerError("the rollout was ended: its manager was closed")
                else:
                    self._ended(first, second)
        finally:
            for future in self.running:
                future.cancel()
        self._drain()
        if self.hung and self.placement.backend == "loky":  # its processes would keep the threads that hang
            self.placement.forget()
        return self.results

    def _start(self, part: list[Assignment], *, spare: bool = False) -> None:
        share = self.share_of(self.started, part)
        self.started += 1
        events = self.events
        future = self.placement.submit(share, spare=spare)
        self.running[future] = share
        future.add_done_callback(lambda future: events.put(("ended", future, share)))

    def _ended(self, future: Future[Played], share: Share) -> None:
        """A worker is done, or dead: then what it left open is played again elsewhere."""
        del self.running[future]
        error = future.exception() if not future.cancelled() else WorkerDiedError("its task was cancelled")
        if error is None:
            self._played(future.result())
            return
        if not isinstance(error, WorkerDiedError | WorkerTimeoutError | BrokenExecutor):
            raise WorkerError(f"a rollout worker failed: {type(error).__name__}: {error}") from error
        if isinstance(error, BrokenExecutor) and not self.broken:
            self.broken = True
            self.placement.forget()
        left = [a for a in share.assignments if a.index not in self.results]
        if not left:
            return
        self.lost(left)
        self.report.worker_deaths += 1
        self.report.replayed_episodes += len(left)
        logger.warning(
            "a rollout worker is gone with %d of its %d episodes open: %s. The finished ones are kept, the open "
            "ones are played again in fresh processes",
            len(left),
            len(share.assignments),
            error,
        )
        if len(left) > 1:  # in halves, so that an episode that kills its worker is soon alone
            half = (len(left) + 1) // 2
            self._start(left[:half], spare=True)
            self._start(left[half:], spare=True)
        else:
            self._again_alone(left[0], error)

    def _unreported(self, assignments: list[Assignment]) -> None:
        """All workers are done, but not all that they played has arrived: play that again."""
        left = [a for a in assignments if a.index not in self.results]
        if self.unreported >= self.max_deaths:
            raise WorkerError(
                f"{len(left)} episodes were played {self.unreported + 1} times but never reported"
            )
        self.unreported += 1
        self.lost(left)
        self.report.replayed_episodes += len(left)
        logger.warning("%d episodes were played, but never reported: they are played again", len(left))
        self._start(left, spare=True)

    def _played(self, played: Played) -> None:
        self.report.worker_cpu_seconds += played.cpu_seconds
        self.hung += played.hung

    def _again_alone(self, assignment: Assignment, error: BaseException) -> None:
        deaths = self.deaths[assignment.index] = self.deaths.get(assignment.index, 0) + 1
        if deaths <= self.max_deaths:
            self._start([assignment], spare=True)
            return
        status: Status = "timeout" if isinstance(error, WorkerTimeoutError) else "env_error"
        why = f"{deaths} workers that played it were lost, at last: {error}"
        self.results[assignment.index] = self.give_up(assignment, status, why)
        logger.error("episode %d is given up: %s", assignment.index, why)

    def _drain(self) -> None:
        """Wait for the workers to be done, so that none still writes when the next rollout begins."""
        done, stuck = wait(self.running, PATIENCE)
        for future in done:
            error = None if future.cancelled() else future.exception()
            if error is not None:  # all episodes are there: how a worker ended no longer matters
                logger.debug("a worker ended badly after its last episode: %s", error)
            elif not future.cancelled():
                self._played(future.result())
        if stuck:
            logger.warning(
                "%d rollout workers are not done %g s after their last episode (an env that does not close, say) "
                "and are left behind",
                len(stuck),
                PATIENCE,
            )
            self.placement.abandon()


def spread(items: list[Any], n_parts: int) -> list[list[Any]]:
    """Contiguous parts whose sizes differ by one at most, the larger ones first; no part is empty.

    >>> [len(part) for part in spread(list(range(64)), 3)]
    [22, 21, 21]
    """
    n_parts = max(1, min(n_parts, len(items)))
    size, rest = divmod(len(items), n_parts)
    cuts = [k * size + min(k, rest) for k in range(n_parts + 1)]
    return [items[lo:hi] for lo, hi in pairwise(cuts)]


def worthwhile_workers(report: RolloutReport, most: int) -> int:
    """How many workers the next rollout should have, by what the envs of this one needed.

    Workers whose envs sleep or are quick need few processes; as many are kept as would be busy half of the time.

    >>> worthwhile_workers(RolloutReport(seconds=10.0, worker_cpu_seconds=1.0), most=8)
    1
    >>> worthwhile_workers(RolloutReport(seconds=10.0, worker_cpu_seconds=35.0), most=8)
    7
    """
    if report.seconds <= 0:
        return most
    return max(1, min(most, math.ceil(report.worker_cpu_seconds / (0.5 * report.seconds))))
