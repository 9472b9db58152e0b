"""Rollouts on parallel workers that share one engine: the same trajectories as in sequence, sooner.

Workers make and close their own envs and report every episode when it is over. A worker that dies costs only
its unfinished episodes: they are played again, in fresh processes, and the rollout says so.
"""

from __future__ import annotations

import logging
import math
import pickle
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle

from shoal.core.data import Status, Trajectory
from shoal.core.errors import ConfigError, WorkerDiedError, WorkerError, WorkerTimeoutError, did_you_mean
from shoal.core.executors import RayExecutor, available_cpus, make_executor
from shoal.envs.catalogue import env_class
from shoal.rollout.capabilities import Restartable
from shoal.rollout.collector import group_numbers, place_of
from shoal.rollout.engine import Engine, Sampling
from shoal.rollout.episode import Episode
from shoal.rollout.factory import make_roles, validate_environment_config
from shoal.rollout.inference import SharedLLMInferenceManager
from shoal.rollout.playing import (
    Assignment,
    Connect,
    Limits,
    LocalLink,
    Played,
    Share,
    decode_report,
    play_share,
)
from shoal.rollout.prompts import Prompter
from shoal.rollout.settings import BACKENDS, Backend, rollout_config
from shoal.rollout.workers import WorkerExecutor
from shoal.vector.launch import by_value

logger = logging.getLogger(__name__)


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


class ParallelRolloutManager:
    """Plays groups of episodes on workers; the counterpart of `TrajectoryCollector`.

    Args:
        config: with the keys `es_manager`, `custom_envs`, `agent_proxy` and `seed`; a training config has them.
        engine: what writes the responses; it stays in this process.
        n_jobs: workers; -1 adapts to the machine and the envs (at most one per core), None takes
            `agent_proxy.parallel_n_jobs`.
        side: "train" or "val": which groups of `es_manager`.
        seed: names the episodes; `config.seed` if not given.
        backend: "serial", "threads", "processes", "loky" or "ray"; `agent_proxy.parallel.backend` if not given.

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
    ) -> None:
        self.config = rollout_config(config)
        proxy = self.config.agent_proxy
        self.settings = proxy.parallel
        environments = validate_environment_config(self.config)
        groups = getattr(environments.es_manager, side)
        self.engine = engine
        self.tags: tuple[str, ...] = groups.group_tags()
        self.group_size: int = groups.group_size
        self.roles = make_roles(environments.custom_envs, self.tags, proxy.max_turn)
        self.seed = self.config.seed if seed is None else seed
        self.prompter = Prompter(proxy.prompt, engine.tokenizer)
        self.report = RolloutReport()
        self.n_jobs = proxy.parallel_n_jobs if n_jobs is None else n_jobs
        if self.n_jobs != -1 and self.n_jobs < 1:
            raise ConfigError(f"n_jobs must be -1 (as many as pay) or at least 1, got {self.n_jobs}")
        self._workers = available_cpus() if self.n_jobs == -1 else self.n_jobs
        chosen = backend or self.settings.backend
        self.backend: str = "processes" if chosen == "auto" else chosen
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"no rollout backend named {self.backend!r}.{did_you_mean(self.backend, BACKENDS)}"
            )
        kinds = environments.custom_envs
        self._env_fns: dict[str, Callable[[], Any]] = {
            tag: partial(env_class(kinds[tag].env_type), **kinds[tag].env_config) for tag in self.roles
        }
        self._limits = Limits(
            self.settings.step_timeout,
            self.settings.episode_timeout,
            self.settings.request_timeout,
            self.settings.env_retries,
        )
        self._executor: Executor | None = None
        self._spare: WorkerExecutor | None = None
        self._inference: SharedLLMInferenceManager | None = None
        self._mailbox: Any = None
        self._reports: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()

    def __enter__(self) -> ParallelRolloutManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End workers and the shared engine's thread; may be called twice."""
        for executor in (self._executor, self._spare):
            if isinstance(executor, WorkerExecutor):
                executor.shutdown(wait=False)
            elif executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)
        if self._mailbox is not None:
            self._mailbox.close()
        if self._inference is not None:
            self._inference.close()
        self._executor = self._spare = self._inference = self._mailbox = None

    @property
    def inference(self) -> SharedLLMInferenceManager:
        """The shared engine, started when first needed."""
        if self._inference is None:
            settings = self.settings
            self._inference = SharedLLMInferenceManager(
                self.engine,
                schedule=settings.schedule,
                max_batch=settings.max_batch,
                engine_timeout=settings.engine_timeout,
                request_timeout=settings.request_timeout,
                retries=settings.engine_retries,
                restart=self._restarted if isinstance(self.engine, Restartable) else None,
                max_restarts=settings.engine_restarts,
                silence=self._silence() if self.backend == "loky" else None,  # "processes" watches its own
                on_report=self._on_report,
            )
        return self._inference

    def _restarted(self) -> Engine:
        assert isinstance(self.engine, Restartable)
        self.engine.restart()
        return self.engine

    def worker_pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        executors = [e for e in (self._executor, self._spare) if isinstance(e, WorkerExecutor)]
        return [pid for executor in executors for pid in executor.pids()]

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
        assignments = [
            Assignment(index, place_of(self.seed, iteration, g, member), self.tags[g % len(self.tags)])
            for index, (g, member) in enumerate(
                (g, member)
                for g in group_numbers(first_group, n_groups, len(self.tags))
                for member in range(self.group_size)
            )
        ]
        return self.play(assignments, sampling)

    rollout = collect

    def play(self, assignments: Sequence[Assignment], sampling: Sampling) -> list[Trajectory]:
        """Play these episodes, whichever they are, and return their trajectories in the same order.

        Args:
            assignments: which episodes, of the config's kinds of env, numbered without gaps from 0.
            sampling: how tokens are picked.
        """
        assignments = list(assignments)
        clock = time.perf_counter()
        self.report = report = RolloutReport(workers=1 if self.backend == "serial" else self._workers)
        self._reports = queue.SimpleQueue()
        if self.backend == "serial":
            results = self._play_here(assignments, sampling)
        else:
            before = self.inference.statistics
            seconds, batches = before.engine_seconds, before.batches
            self.inference.expect(len(assignments))
            results = _Rollout(self, assignments, sampling).run()
            report.engine_seconds = before.engine_seconds - seconds
            report.batches = before.batches - batches
        report.seconds = time.perf_counter() - clock
        if self.n_jobs == -1 and self.backend != "serial":
            self._workers = worthwhile_workers(report, available_cpus())
        return [results[assignment.index] for assignment in assignments]

    def _play_here(self, assignments: list[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        """One episode after another in the caller: the reference that the other backends equal."""
        results: dict[int, Trajectory] = {}
        link = LocalLink(
            self.engine, lambda _, data: results.update([decode_report(data)]), self.settings.engine_retries
        )
        share = self.share(0, assignments, sampling, threads=1)
        self.report.worker_cpu_seconds = play_share(share, link).cpu_seconds
        return results

    def share(
        self, number: int, assignments: Sequence[Assignment], sampling: Sampling, threads: int | None = None
    ) -> Share:
        """What one worker gets."""
        tags = {assignment.tag for assignment in assignments}
        return Share(
            number,
            tuple(assignments),
            {tag: self._env_fns[tag] for tag in tags},
            {tag: self.roles[tag] for tag in tags},
            self.config.agent_proxy.prompt,
            self.engine.tokenizer,
            sampling,
            self._limits,
            threads or self.settings.episodes_at_once,
            self.settings.keep_envs,
        )

    def _on_report(self, asker: Any, data: bytes) -> None:
        del asker
        self._reports.put(("report", data, None))

    # --- where
    def submit(self, share: Share, *, spare: bool = False) -> Future[Played]:
        """Start a share on a worker; `spare` takes fresh processes instead of an executor that broke."""
        if self.backend == "threads":
            return self._executor_for().submit(play_share, share, self.inference)
        with by_value([*share.env_fns.values(), type(share.tokenizer)]):
            try:
                data = cloudpickle.dumps(share, protocol=5)
            except Exception as error:
                raise ConfigError(
                    f"this rollout cannot be sent to a worker process ({error}); use backend='threads'"
                ) from error
        connect: Connect = self._ray_mailbox().ticket if self.backend == "ray" else self.inference.serve()
        executor = self._spare_executor() if spare and self.backend == "loky" else self._executor_for()
        return executor.submit(play_pickled, data, connect)

    def _executor_for(self) -> Executor:
        if self._executor is None:
            if self.backend == "processes":
                self._executor = WorkerExecutor(self._workers, silence=self._silence())
            elif self.backend == "ray":
                self._executor = RayExecutor(self.settings.ray_options)
            else:
                name = {"threads": "thread"}.get(self.backend, self.backend)
                self._executor = make_executor(name, self._workers)
        return self._executor

    def _spare_executor(self) -> WorkerExecutor:
        if self._spare is None:
            self._spare = WorkerExecutor(self._workers, silence=self._silence())
        return self._spare

    def _silence(self) -> float | None:
        return None if self.settings.step_timeout is None else self.settings.step_timeout + 5.0

    def _ray_mailbox(self) -> Any:
        if self._mailbox is None:
            from shoal.rollout.ray_transport import Mailbox

            self._executor_for()  # starts Ray where it does not run yet
            self._mailbox = Mailbox(self.inference)
        return self._mailbox

    def forget_executor(self) -> None:
        """The executor broke: the next rollout starts another."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


def play_pickled(data: bytes, connect: Connect) -> Played:
    """`play_share` in another process."""
    return play_share(pickle.loads(data), connect)


class _Rollout:
    """One rollout while it runs: which episodes are open, and on which workers."""

    def __init__(
        self, manager: ParallelRolloutManager, assignments: list[Assignment], sampling: Sampling
    ) -> None:
        self.manager = manager
        self.sampling = sampling
        self.by_index = {assignment.index: assignment for assignment in assignments}
        self.results: dict[int, Trajectory] = {}
        self.deaths: dict[int, int] = {}
        self.running: dict[Future[Played], Share] = {}
        self.events = manager._reports
        self.number = 0
        self.broken = False
        self.hung = 0

    def run(self) -> dict[int, Trajectory]:
        for part in spread(list(self.by_index.values()), self.manager._workers):
            self._start(part)
        try:
            while len(self.results) < len(self.by_index):
                kind, first, second = self.events.get()
                if kind == "report":
                    index, trajectory = decode_report(first)
                    self.results.setdefault(index, trajectory)
                else:
                    self._ended(first, second)
        finally:
            for future in self.running:
                future.cancel()
        self._drain()
        if self.hung and self.manager.backend == "loky":  # its processes would keep the threads that hang
            self.manager.forget_executor()
        return self.results

    def _start(self, part: list[Assignment], *, spare: bool = False) -> None:
        share = self.manager.share(self.number, part, self.sampling)
        self.number += 1
        events = self.events
        future = self.manager.submit(share, spare=spare)
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
            self.manager.forget_executor()
        left = [a for a in share.assignments if a.index not in self.results]
        if not left:
            return
        self.manager.report.worker_deaths += 1
        self.manager.report.replayed_episodes += len(left)
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

    def _played(self, played: Played) -> None:
        self.manager.report.worker_cpu_seconds += played.cpu_seconds
        self.hung += played.hung

    def _again_alone(self, assignment: Assignment, error: BaseException) -> None:
        deaths = self.deaths[assignment.index] = self.deaths.get(assignment.index, 0) + 1
        if deaths <= self.manager.settings.max_deaths:
            self._start([assignment], spare=True)
            return
        status: Status = "timeout" if isinstance(error, WorkerTimeoutError) else "env_error"
        why = f"{deaths} workers that played it were lost, at last: {error}"
        role = self.manager.roles[assignment.tag]
        episode = Episode(assignment.place, role, self.manager.prompter, self.sampling)
        self.results[assignment.index] = episode.trajectory(status, why)
        logger.error("episode %d is given up: %s", assignment.index, why)

    def _drain(self) -> None:
        """Wait for the workers to be done, so that none still writes when the next rollout begins."""
        for future in list(self.running):
            try:
                self._played(future.result(timeout=10.0))
            except Exception as error:  # all episodes are there: how a worker ended no longer matters
                logger.debug("a worker ended badly after its last episode: %s", error)


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
