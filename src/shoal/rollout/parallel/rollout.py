"""Rollouts on parallel workers that share one engine: the same trajectories as in sequence, sooner.

Workers make and close their own envs and report every episode when it is over. A worker that dies costs only
its unfinished episodes: they are played again, in fresh processes, and the rollout says so.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, WorkerError, did_you_mean
from shoal.core.executors import available_cpus
from shoal.envs.catalogue import resolve_text
from shoal.rollout.collector import group_numbers, place_of, slot_of
from shoal.rollout.episode import Episode
from shoal.rollout.factory import make_roles, validate_environment_config
from shoal.rollout.parallel.dispatch import Dispatch, Events, RolloutReport, spread, worthwhile_workers
from shoal.rollout.parallel.inference import SharedLLMInferenceManager
from shoal.rollout.parallel.local_link import LocalLink
from shoal.rollout.parallel.placement import Placement, silence
from shoal.rollout.parallel.playing import play_share
from shoal.rollout.parallel.shares import Assignment, Limits, Share, decode_report
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Engine, Restartable, Sampling
from shoal.rollout.settings import BACKENDS, Backend, rollout_config

PATIENCE = 10.0
"""Seconds that a rollout in another thread has to end when the manager is closed."""


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
            tag: resolve_text(kinds[tag].env_type, kinds[tag].env_config) for tag in self.roles
        }
        self._limits = Limits(
            self.settings.step_timeout,
            self.settings.episode_timeout,
            self.settings.request_timeout,
            self.settings.env_retries,
        )
        self._inference: SharedLLMInferenceManager | None = None
        self._placement = Placement(self.backend, self._workers, self.settings, lambda: self.inference)
        self._reports: Events = queue.SimpleQueue()
        self._number = 0  # of rollouts so far
        self._playing = threading.Lock()
        self._player: int | None = None  # the thread that plays
        self._closes = 0

    def __enter__(self) -> ParallelRolloutManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End workers and the shared engine's thread; may be called twice.

        A rollout that another thread plays ends with a `WorkerError`.
        """
        self._closes += 1
        self._reports.put(("closed", None, None))
        self._placement.here.stop.set()
        alone = self._player != threading.get_ident() and self._playing.acquire(timeout=PATIENCE)
        try:
            self._placement.close(gently=alone)
            if self._inference is not None:
                self._inference.close()
            self._inference = None
        finally:
            if alone:
                self._playing.release()

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
                silence=silence(self.settings)
                if self.backend == "loky"
                else None,  # "processes" watches its own
                on_report=self._on_report,
            )
        return self._inference

    def _restarted(self) -> Engine:
        assert isinstance(self.engine, Restartable)
        self.engine.restart()
        return self.engine

    def worker_pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        return self._placement.pids()

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
            Assignment(index, place_of(self.seed, iteration, g, member), self.tags[slot_of(g, self.tags)])
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
        closes = self._closes
        with self._playing:  # one rollout at a time, whoever asks
            self._player = threading.get_ident()
            self._reports = queue.SimpleQueue()
            try:
                if closes != self._closes:
                    raise WorkerError("the rollout did not begin: its manager was closed")
                return self._play(list(assignments), sampling)
            except BaseException:
                self._placement.abandon()
                self._lost(assignments)
                raise
            finally:
                self._player = None

    def _play(self, assignments: list[Assignment], sampling: Sampling) -> list[Trajectory]:
        clock = time.perf_counter()
        self.report = report = RolloutReport(workers=1 if self.backend == "serial" else self._workers)
        self._number += 1
        if self.backend == "serial":
            results = self._play_here(assignments, sampling)
        else:
            results = self._play_on_workers(assignments, sampling)
        report.seconds = time.perf_counter() - clock
        if self.n_jobs == -1 and self.backend != "serial":
            self._workers = worthwhile_workers(report, available_cpus())
        return [results[assignment.index] for assignment in assignments]

    def _play_here(self, assignments: list[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        """One episode after another in the caller: the reference that the other backends equal."""
        results: dict[int, Trajectory] = {}
        link = LocalLink(
            self.engine,
            lambda _, data: results.update([decode_report(data)[1:]]),
            self.settings.engine_retries,
        )
        share = self._share(0, assignments, sampling, threads=1)
        self.report.worker_cpu_seconds = play_share(share, link, self._placement.here).cpu_seconds
        return results

    def _play_on_workers(self, assignments: list[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        inference, report = self.inference, self.report
        before = inference.statistics
        seconds, batches = before.engine_seconds, before.batches
        dispatch = Dispatch(
            self._placement,
            self._reports,
            report,
            number=self._number,
            share_of=lambda number, part: self._share(number, part, sampling),
            lost=self._lost,
            give_up=lambda assignment, status, why: Episode(
                assignment.place, self.roles[assignment.tag], self.prompter, sampling
            ).trajectory(status, why),
            max_deaths=self.settings.max_deaths,
        )
        if self.settings.schedule == "barrier" and self.backend != "ray":  # where all workers run at once
            at_once = self.settings.episodes_at_once
            parts = spread(assignments, self._workers)
            inference.entered([a.place.key() for part in parts for a in part[:at_once]])
        results = dispatch.run(assignments, self._workers)
        report.engine_seconds = before.engine_seconds - seconds
        report.batches = before.batches - batches
        return results

    def _lost(self, assignments: Sequence[Assignment]) -> None:
        """These episodes do not ask for now."""
        inference = self._inference
        if inference is not None:
            for assignment in assignments:
                inference.left(assignment.place.key())

    def _share(
        self, number: int, assignments: Sequence[Assignment], sampling: Sampling, threads: int | None = None
    ) -> Share:
        """What one worker gets."""
        tags = {assignment.tag for assignment in assignments}
        return Share(
            self._number,
            number,
            tuple(assignments),
            {tag: self._env_fns[tag] for tag in tags},
            {tag: self.roles[tag] for tag in tags},
            self.config.agent_proxy.prompt,
            self.engine.tokenizer,
            sampling,
            self._limits,
            threads or self.settings.episodes_at_once,
            lockstep=self.settings.schedule == "barrier",
            keep_envs=self.settings.keep_envs,
        )

    def _on_report(self, asker: Any, data: bytes) -> None:
        del asker
        self._reports.put(("report", data, None))
