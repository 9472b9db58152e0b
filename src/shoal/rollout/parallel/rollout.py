"""Rollouts on parallel workers that share one engine: the same trajectories as in sequence, sooner.

Workers make and close their own envs and report every episode when it is over. A worker that dies costs only
its unfinished episodes: they are played again, in fresh processes, and the rollout says so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, wait
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, get_args

from shoal.core.data import Status, Trajectory
from shoal.core.errors import (
    ConfigError,
    EngineError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    did_you_mean,
    format_error,
)
from shoal.core.executors import Closing, available_cpus
from shoal.envs.catalogue import resolve_text
from shoal.rollout.collector import LEFT_OUT, PLAYED_AGAIN, FailureLog, group_numbers, place_of, slot_of
from shoal.rollout.episode import Episode
from shoal.rollout.factory import make_roles, validate_environment_config
from shoal.rollout.journal import Journal
from shoal.rollout.parallel.pool import Pool, heartbeat_timeout
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.worker import (
    Assignment,
    Backend,
    LocalLink,
    Played,
    Share,
    decode_report,
    play_share,
)
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Engine, Sampling
from shoal.rollout.settings import check_jobs, rollout_config

logger = logging.getLogger(__name__)
OTHER_ROLLOUT_SECONDS = 10.0
"""For which a rollout in another thread may end when the manager is closed."""
DRAIN_SECONDS = 10.0
"""Within which a worker must be done after the last episode, and its reports here when it is done."""
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


class ParallelRolloutManager(Closing):
    """Plays groups of episodes on workers; the counterpart of `TrajectoryCollector`.

    Args:
        config: with the keys `es_manager`, `custom_envs`, `agent_proxy` and `seed`; a training config has them.
        engine: what writes the responses; it stays in this process.
        n_jobs: workers; -1 adapts to the machine and the envs (at most one per core), None takes
            `agent_proxy.parallel_n_jobs`.
        side: "train" or "val": which groups of `es_manager`.
        seed: names the episodes; `config.seed` if not given.
        backend: "serial", "threads", "processes", "loky" or "ray"; `agent_proxy.parallel.backend` if not given.
        journal: where episodes are written down as they end; those that are there are not played again.
        failures: warns of episodes that fail.

    Use it as a context manager, or call `close`, so that workers end.
    """

    def __init__(
        self,
        config: Any,
        engine: Engine,
        n_jobs: int | None = None,
        *,
        side: str = "train",
        seed: int | None = None,
        backend: Backend | None = None,
        journal: Journal | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.config = rollout_config(config)
        proxy = self.config.agent_proxy
        self.settings = own = proxy.parallel
        if own.step_timeout is None and own.make_timeout is None:
            # then those of the envs, whoever steps them
            limits = self.config.vector
            if (backend or own.backend) == "serial":
                limits = replace(limits, backend="serial")
            self.settings = replace(own, step_timeout=limits.limit, make_timeout=limits.make_timeout)
        environments = validate_environment_config(self.config)
        if side not in ("train", "val"):
            raise ConfigError(f"side must be 'train' or 'val', got {side!r}")
        groups = getattr(environments.es_manager, side)
        self.engine = engine
        self.tags: tuple[str, ...] = groups.group_tags()
        self.group_size: int = groups.group_size
        self.roles = make_roles(environments.custom_envs, self.tags, proxy.max_turn)
        self.seed = self.config.seed if seed is None else seed
        self.prompter = Prompter(proxy.prompt, engine.tokenizer)
        self.report = RolloutReport()
        self.journal = journal or Journal()
        self.failures = failures or FailureLog()
        check_jobs(n_jobs := proxy.parallel_n_jobs if n_jobs is None else n_jobs, "n_jobs")
        self.n_jobs = int(n_jobs)
        self._workers = available_cpus() if self.n_jobs == -1 else self.n_jobs
        chosen = backend or self.settings.backend
        self.backend: str = "processes" if chosen == "auto" else chosen
        if self.backend not in get_args(Backend):
            raise ConfigError(
                f"no rollout backend named {self.backend!r}.{did_you_mean(self.backend, get_args(Backend))}"
            )
        kinds = environments.custom_envs
        self._env_fns: dict[str, Callable[[], Any]] = {
            tag: resolve_text(kinds[tag].env_type, kinds[tag].env_config) for tag in self.roles
        }
        self._inference: SharedLLMInferenceManager | None = None
        self._pool = Pool(self.backend, self._workers, self.settings, lambda: self.inference)
        self._reports: Events = queue.SimpleQueue()
        self._name = secrets.token_hex(8)  # of this manager among all whose envs a process may keep
        self._number = 0  # of rollouts so far
        self._playing = threading.Lock()
        self._at_engine = threading.Lock()  # on "serial", also of an episode that an earlier rollout gave up
        self._player: int | None = None  # the thread that plays
        self._closes = 0
        self._results: dict[int, Trajectory] = {}  # of the latest rollout, which grow while it lasts
        self._known = self._wanted = 0  # episodes of it that were played before, and all

    def close(self) -> None:
        """End workers and the shared engine's thread; may be called twice.

        A rollout that another thread plays ends with a `WorkerError`.
        """
        self._closes += 1
        self._reports.put(("closed", None, None))
        self._pool.here.stop.set()
        alone = self._player != threading.get_ident() and self._playing.acquire(timeout=OTHER_ROLLOUT_SECONDS)
        try:
            self._pool.close(gently=alone)
            if self._inference is not None:
                self._inference.close()
            self._inference = None
        finally:
            if alone:
                self._playing.release()

    @property
    def inference(self) -> SharedLLMInferenceManager:
        """The shared engine, started when first needed."""
        if self._inference is None or self._inference.failed:
            settings = self.settings
            # "processes" watches its own
            silence = heartbeat_timeout(settings) if self.backend == "loky" else None
            self._inference = SharedLLMInferenceManager(
                self.engine,
                schedule=settings.schedule,
                max_batch=settings.max_batch,
                engine_timeout=settings.engine_timeout,
                request_timeout=settings.request_timeout,
                retries=settings.engine_retries,
                restart=self._restarted if hasattr(self.engine, "restart") else None,
                max_restarts=settings.engine_restarts,
                silence=silence,
                on_report=self._on_report,
            )
        return self._inference

    def _restarted(self) -> Engine:
        self.engine.restart()  # type: ignore[attr-defined]
        return self.engine

    def worker_pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        return self._pool.pids()

    @property
    def counts(self) -> tuple[int, int]:
        """Episodes of the latest rollout that have ended, and all of it; may be asked while it lasts."""
        return self._known + len(self._results), self._wanted

    # --- playing
    def collect(
        self,
        iteration: int = 0,
        sampling: Sampling | None = None,
        *,
        first_group: int = 0,
        n_groups: int | None = None,
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, whatever the workers did.

        Args:
            iteration: names the env seeds and the sampling noise.
            sampling: how tokens are picked; as `agent_proxy` says if not given.
            first_group: the number of the first group, for further batches of groups in one iteration.
            n_groups: how many groups, at most as many as there are tags; all if not given.
        """
        sampling = sampling or self.config.agent_proxy.sampling()
        groups = group_numbers(first_group, n_groups, len(self.tags))
        assignments = [
            Assignment(index, place_of(self.seed, iteration, g, member), self.tags[slot_of(g, self.tags)])
            for index, (g, member) in enumerate(product(groups, range(self.group_size)))
        ]
        return self.play(assignments, sampling)

    rollout = collect

    def play(self, assignments: Sequence[Assignment], sampling: Sampling) -> list[Trajectory]:
        """Play these episodes, whichever they are, and return their trajectories in the same order.

        Args:
            assignments: which episodes, of the config's kinds of env, numbered without gaps from 0.
            sampling: how tokens are picked.
        """
        for number in {n for a in assignments for n in (a.place.seed, a.place.iteration)}:
            if not -(2**63) <= number < 2**64:
                raise ValueError(
                    f"a seed or iteration must be in [-2**63, 2**64) to reach workers, got {number}"
                )
        closes = self._closes
        with self._playing:  # one rollout at a time, whoever asks
            self._player = threading.get_ident()
            self._reports = queue.SimpleQueue()
            try:
                if closes != self._closes:
                    raise WorkerError("the rollout did not begin: its manager was closed")
                return self._play(list(assignments), sampling)
            except BaseException:
                self._pool.abandon()
                if self._inference is not None:
                    leave(self._inference, assignments)
                raise
            finally:
                self._player = None

    def _play(self, assignments: list[Assignment], sampling: Sampling) -> list[Trajectory]:
        clock = time.perf_counter()
        self.report = report = RolloutReport(workers=1 if self.backend == "serial" else self._workers)
        self._number += 1
        results: dict[int, Trajectory] = {}
        for assignment in assignments:
            if (before := self.journal.find(assignment.tag, assignment.place)) is not None:
                results[assignment.index] = before
        todo = [assignment for assignment in assignments if assignment.index not in results]
        self._results, self._known, self._wanted = {}, len(results), len(assignments)
        if todo:
            play = self._play_here if self.backend == "serial" else self._play_on_workers
            results |= play(todo, sampling)
            self.failures.sum_up()
        report.seconds = time.perf_counter() - clock
        if self.n_jobs == -1 and self.backend != "serial":
            self._workers = worthwhile_workers(report, available_cpus())
        return [results[assignment.index] for assignment in assignments]

    def _play_here(self, assignments: list[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        """One episode after another in the caller: the reference that the other backends equal."""
        results = self._results

        def on_report(_: Any, data: bytes) -> None:
            _number, index, trajectory, failed = decode_report(data)
            results[index] = trajectory
            tell_failures(self.failures, index, trajectory, failed)
            self.journal.add(trajectory)

        link = LocalLink(self.engine, on_report, self.settings.engine_retries, self._at_engine)
        share, report = self._share(assignments, sampling, threads=1), self.report
        report.worker_cpu_seconds = play_share(share, link, self._pool.here).cpu_seconds
        report.engine_seconds, report.batches = link.engine_seconds, link.batches
        return results

    def _play_on_workers(self, assignments: list[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        inference, report = self.inference, self.report
        before = inference.statistics
        seconds, batches = before.engine_seconds, before.batches
        if self.settings.schedule == "barrier" and self.backend != "ray":  # where all workers run at once
            at_once = self.settings.episodes_at_once
            parts = spread(assignments, self._workers)
            inference.entered([a.place.key() for part in parts for a in part[:at_once]])
        share = self._share(assignments, sampling, self.settings.episodes_at_once)
        deaths = self.settings.max_deaths
        logs = self.journal, self.failures
        rollout = _Rollout(share, self._pool, inference, self._reports, report, deaths, *logs)
        self._results = rollout.results
        results = rollout.run(self._workers)
        report.engine_seconds = before.engine_seconds - seconds
        report.batches = before.batches - batches
        return results

    def _share(self, assignments: Sequence[Assignment], sampling: Sampling, threads: int | None) -> Share:
        """What a worker gets that plays all of these."""
        tags = {assignment.tag for assignment in assignments}
        return Share(
            self._number,
            0,
            tuple(assignments),
            {tag: self._env_fns[tag] for tag in tags},
            {tag: self.roles[tag] for tag in tags},
            self.config.agent_proxy.prompt,
            self.engine.tokenizer,
            sampling,
            self.settings,
            threads,
            lockstep=self.settings.schedule == "barrier",
            kinds={tag: (self._name, tag) for tag in tags} if self.settings.keep_envs else None,
        )

    def _on_report(self, asker: Any, data: bytes) -> None:
        self._reports.put(("report", data, None))


class _Rollout:
    """One rollout on workers while it runs: which episodes are open, and on which workers.

    `whole` is what a worker would get that plays all episodes; its number tells its reports from those of another
    rollout, which was interrupted. The engine is told the episodes that a lost worker left open.
    """

    def __init__(
        self,
        whole: Share,
        pool: Pool,
        inference: SharedLLMInferenceManager,
        events: Events,
        report: RolloutReport,
        max_deaths: int,
        journal: Journal,
        failures: FailureLog,
    ) -> None:
        self.whole, self.pool, self.inference = whole, pool, inference
        self.events, self.report, self.max_deaths = events, report, max_deaths
        self.journal, self.failures = journal, failures
        self.results: dict[int, Trajectory] = {}
        self.deaths: dict[int, int] = {}
        self.running: dict[Future[Played], Share] = {}
        self.started = 0
        self.unreported = 0  # times that workers were done and episodes missing
        self.hung = 0

    def run(self, n_workers: int) -> dict[int, Trajectory]:
        """Play the episodes on so many workers; their trajectories by index."""
        assignments = self.whole.assignments
        for part in spread(assignments, n_workers):
            self._start(part)
        try:
            while len(self.results) < len(assignments):
                try:
                    kind, first, second = self.events.get(timeout=None if self.running else DRAIN_SECONDS)
                except queue.Empty:
                    self._unreported()
                    continue
                if kind == "report":
                    rollout, index, trajectory, failed = decode_report(first)
                    if rollout == self.whole.rollout and index not in self.results:
                        self.results[index] = trajectory
                        tell_failures(self.failures, index, trajectory, failed)
                        self.journal.add(trajectory)
                elif kind == "closed":
                    raise WorkerError("the rollout was ended: its manager was closed")
                else:
                    self._ended(first, second)
        finally:
            for future in self.running:
                future.cancel()
        self._drain()
        if self.hung and self.pool.backend == "loky":  # its processes would keep the threads that hang
            self.pool.forget()
        return self.results

    def _start(self, part: Sequence[Assignment], *, spare: bool = False) -> None:
        share = self.whole.part(self.started, part)
        self.started += 1
        events = self.events
        future = self.pool.submit(share, spare=spare)
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
            raise WorkerError(f"a rollout worker failed: {format_error(error)}") from error
        if isinstance(error, BrokenExecutor):
            self.pool.forget()
        left = [a for a in share.assignments if a.index not in self.results]
        if not left:
            return
        leave(self.inference, left)
        self.report.worker_deaths += 1
        self.report.replayed_episodes += len(left)
        gone = f"a rollout worker is gone with {len(left)} of its {len(share.assignments)} episodes open"
        then = "the finished ones are kept, the open ones are played again in fresh processes"
        self.failures.add(gone, str(error), then)
        if len(left) > 1:  # in halves, so that an episode that kills its worker is soon alone
            half = (len(left) + 1) // 2
            self._start(left[:half], spare=True)
            self._start(left[half:], spare=True)
        else:
            self._again_alone(left[0], error)

    def _unreported(self) -> None:
        """All workers are done, but not all that they played has arrived: play that again."""
        left = [a for a in self.whole.assignments if a.index not in self.results]
        if self.unreported >= self.max_deaths:
            raise WorkerError(
                f"{len(left)} episodes were played {self.unreported + 1} times but never reported"
            )
        self.unreported += 1
        leave(self.inference, left)
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
        status: Status = "env_error"
        if isinstance(error, WorkerTimeoutError):
            status = "timeout"
        elif isinstance(error, EngineError):  # its worker was fine, the way to the engine was not
            status = "engine_error"
        why = f"{deaths} workers that played it were lost, at last: {error}"
        whole, tag = self.whole, assignment.tag
        prompter = Prompter(whole.prompt, whole.tokenizer)
        episode = Episode(assignment.place, whole.roles[tag], prompter, whole.sampling)
        self.results[assignment.index] = episode.trajectory(status, why)
        tell_failures(self.failures, assignment.index, self.results[assignment.index], ())

    def _drain(self) -> None:
        """Wait for the workers to be done, so that none still writes when the next rollout begins."""
        done, stuck = wait(self.running, DRAIN_SECONDS)
        for future in done:
            error = None if future.cancelled() else future.exception()
            if error is not None:  # all episodes are there: how a worker ended no longer matters
                logger.debug("a worker ended badly after its last episode: %s", error)
            elif not future.cancelled():
                self._played(future.result())
        if stuck:
            late = f"{len(stuck)} rollout workers are not done {DRAIN_SECONDS:g} s after their last episode"
            logger.warning("%s (an env that does not close, say) and are left behind", late)
            self.pool.abandon()


def tell_failures(log: FailureLog, index: int, trajectory: Trajectory, failed: Sequence[str]) -> None:
    """Tell what the tries at an episode failed with, the last one included."""
    episode = f"episode {index} of {trajectory.env}"
    for why in failed:
        log.add(episode, why, PLAYED_AGAIN)
    if trajectory.status != "ok":
        log.add(episode, trajectory.error or trajectory.status, LEFT_OUT)


def leave(inference: SharedLLMInferenceManager, assignments: Sequence[Assignment]) -> None:
    """Tell the engine that these episodes do not ask for now."""
    with contextlib.suppress(EngineError):  # it was closed, or failed: it waits for nobody
        for assignment in assignments:
            inference.left(assignment.place.key())


def spread(items: Sequence[Any], n_parts: int) -> list[Sequence[Any]]:
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
