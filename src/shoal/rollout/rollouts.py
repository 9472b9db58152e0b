"""Rollouts of a config on hosts that make their own envs: the same trajectories as in sequence, sooner."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, WorkerError, did_you_mean
from shoal.core.executors import Closing, available_cpus
from shoal.envs.catalogue import resolve_text
from shoal.envs.program import ProgramEnv
from shoal.rollout.driver import Driver, RolloutReport, report_failures
from shoal.rollout.factory import EnvTag, make_roles, program_tags, validate_environment_config
from shoal.rollout.failures import FailureLog
from shoal.rollout.hosts.episodes import Ended, Setup
from shoal.rollout.hosts.host import Hosts, HostsFailedError, InlineHost, LocalHosts, ThreadHost
from shoal.rollout.journal import Journal
from shoal.rollout.plan import Assignment, assignments_of
from shoal.rollout.programs import ProgramHosts, Sessions
from shoal.rollout.prompts import Prompter
from shoal.rollout.rewards.judge import Judge, Judging
from shoal.rollout.rewards.scorers import Answers
from shoal.rollout.settings import Backend, ParallelConfig, check_jobs, rollout_config
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.asking import SamplerClient, run_here
from shoal.samplers.sampler import ChatTokenizer, Sampler, Sampling

logger = logging.getLogger(__name__)
ONE_AT_ONCE = ParallelConfig(episodes_at_once=1)
AHEAD = ("threads", "processes", "ray")
"""Backends whose hosts are there between rollouts."""
INTERRUPTED_SECONDS = 30.0
"""For which the present steps of envs are waited for after Ctrl-C."""
OTHER_ROLLOUT_SECONDS = 10.0
"""For which a rollout in another thread may end when the manager is closed."""


class ParallelRolloutManager(Closing):
    """Plays groups of episodes on hosts; the counterpart of `TrajectoryCollector`.

    Args:
        config: with the keys `es_manager`, `custom_envs`, `agent_proxy` and `seed`; a training config has them.
        engine: what writes the responses; it stays in this process.
        n_jobs: hosts; -1 is one per core, None takes `agent_proxy.parallel_n_jobs`.
        side: "train" or "val": which groups of `es_manager`.
        seed: names the episodes; `config.seed` if not given.
        backend: where episodes are played, see `Backend`; `agent_proxy.parallel.backend` if not given.
        journal: where episodes are written down as they end; those that are there are not played again.
        failures: warns of episodes that fail.
        sessions: where programs (`env_type: program`) find the model: `shoal.gateway.sessions_of`.
        judge: scores each group; the caller closes it. If not given, one is made of `config.rewards`, whose answers
            are kept beside the journal.
        tools: what the model may call, see `Toolbox`, which may be one that is open: the caller closes it;
            `agent_proxy.tools` if not given.

    Use it as a context manager, or call `close`, so that hosts end.
    """

    def __init__(
        self,
        config: Any,
        engine: Sampler,
        n_jobs: int | None = None,
        *,
        side: str = "train",
        seed: int | None = None,
        backend: Backend | None = None,
        journal: Journal | None = None,
        failures: FailureLog | None = None,
        sessions: Callable[[SamplerClient, ChatTokenizer], Sessions] | None = None,
        judge: Judge | None = None,
        tools: Sequence[Any] | Toolbox | None = None,
    ) -> None:
        self.config = rollout_config(config)
        proxy = self.config.agent_proxy
        self.settings = own = proxy.parallel
        chosen = backend or own.backend
        self.backend: str = "processes" if chosen == "auto" else chosen
        if self.backend not in get_args(Backend):
            raise ConfigError(
                f"no rollout backend named {self.backend!r}.{did_you_mean(self.backend, get_args(Backend))}"
            )
        if own.step_timeout is None and own.make_timeout is None:  # those of the envs, whoever steps them
            limits = self.config.vector
            self.settings = replace(own, step_timeout=limits.limit, make_timeout=limits.make_timeout)
        environments = validate_environment_config(self.config)
        if side not in ("train", "val"):
            raise ConfigError(f"side must be 'train' or 'val', got {side!r}")
        groups = getattr(environments.es_manager, side)
        self.engine = engine
        self.tags: tuple[str, ...] = groups.group_tags()
        self.group_size: int = groups.group_size
        kinds = environments.custom_envs
        given = proxy.tools if tools is None else tools
        programs = _programs_of(kinds, self.tags, side, with_tools=bool(getattr(given, "tools", given)))
        if programs and sessions is None:
            raise ConfigError("programs need a gateway: give ParallelRolloutManager sessions=sessions_of")
        self._programs = programs
        self._sessions = sessions
        self.roles = make_roles(kinds, self.tags, proxy.max_turn)
        self.seed = self.config.seed if seed is None else seed
        self._own_toolbox = not isinstance(given, Toolbox)
        self.toolbox = given if isinstance(given, Toolbox) else Toolbox(given, proxy.max_tool_turns)
        tokenizer = self.toolbox.chat(engine.tokenizer)
        self.prompter = Prompter(proxy.prompt, tokenizer)
        self.report = RolloutReport()
        self.journal = journal or Journal()
        self.failures = failures or FailureLog()
        self._judge, self._own_judge = judge, judge is None
        if judge is None and self.config.rewards:
            path = self.journal.path
            self._judge = Judge(self.config.rewards, Answers(None if path is None else path.parent))
        check_jobs(n_jobs := proxy.parallel_n_jobs if n_jobs is None else n_jobs, "n_jobs")
        self.n_jobs = available_cpus() if n_jobs == -1 else int(n_jobs)
        self._setup = Setup(
            {tag: resolve_text(kinds[tag].env_type, kinds[tag].env_config) for tag in self.roles},
            self.roles,
            proxy.prompt,
            tokenizer,
            self.settings.env_retries,
            self.settings.step_timeout,
            self.settings.make_timeout,
        )
        self._inference: SamplerClient | None = None
        self._hosts: Hosts | None = None
        self._here: Hosts | None = None  # the caller's thread
        self._ahead: _Begun | None = None  # what `prepare` has begun
        self._playing = threading.Lock()
        self._closed = threading.Event()
        self._results: dict[int, Trajectory] = {}  # of the latest rollout, which grow while it lasts
        self._wanted = 0

    def close(self) -> None:
        """End hosts and the shared engine's thread; may be called twice.

        A rollout that another thread plays ends with a `WorkerError`.
        """
        self._closed.set()
        if self._judge is not None and self._own_judge:
            self._judge.close()
        alone = self._playing.acquire(timeout=OTHER_ROLLOUT_SECONDS)
        try:
            self._end_hosts()
            if self._inference is not None:
                self._inference.close()
            self._inference = None
            if self._own_toolbox:
                self.toolbox.close()
        finally:
            self._closed = threading.Event()
            if alone:
                self._playing.release()

    def _end_hosts(self) -> None:
        hosts, self._hosts = self._hosts, None
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.inference.loop.run(ahead.driver.stop())
        if hosts is not None:
            self.inference.loop.run(hosts.close())
        here, self._here = self._here, None
        if here is not None:
            run_here(here.close())

    @property
    def inference(self) -> SamplerClient:
        """The shared engine, started when first needed."""
        if self._inference is None:
            settings = self.settings
            self._inference = SamplerClient(
                self.engine,
                schedule=settings.schedule,
                max_batch=settings.max_batch,
                engine_timeout=settings.engine_timeout,
                retries=settings.engine_retries,
                max_restarts=settings.engine_restarts,
            )
        return self._inference

    def worker_pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        return [] if self._hosts is None else self._hosts.pids()

    @property
    def counts(self) -> tuple[int, int]:
        """Episodes of the latest rollout that have ended, and all of it; may be asked while it lasts."""
        return len(self._results), self._wanted

    # --- playing
    def collect(
        self,
        iteration: int = 0,
        sampling: Sampling | None = None,
        *,
        first_group: int = 0,
        n_groups: int | None = None,
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, whatever the hosts did.

        Args:
            iteration: names the env seeds and the sampling noise.
            sampling: how tokens are picked; as `agent_proxy` says if not given.
            first_group: the number of the first group, for further batches of groups in one iteration.
            n_groups: how many groups, at most as many as there are tags; all if not given.
        """
        sampling = sampling or self.config.agent_proxy.sampling()
        return self.play(
            assignments_of(self.seed, iteration, self.tags, self.group_size, first_group, n_groups), sampling
        )

    rollout = collect

    def prepare(
        self,
        iteration: int,
        sampling: Sampling | None = None,
        *,
        first_group: int = 0,
        n_groups: int | None = None,
    ) -> None:
        """Let the hosts begin what the next `collect` with the same arguments plays; returns at once.

        They reset its envs and write its first prompts while the caller does something else. The trajectories are the
        same without it; with other arguments the hosts begin anew. Nothing is prepared in the caller's thread
        ("serial"), by joblib, whose workers are not this rollout's own, with `reset_ahead: false`, or as long as the
        journal may hold what comes next.
        """
        ahead = self.settings.reset_ahead and self.backend in AHEAD
        if not ahead or self._programs or self.journal.count:  # a program would ask the model at once
            return
        sampling = sampling or self.config.agent_proxy.sampling()
        assignments = assignments_of(self.seed, iteration, self.tags, self.group_size, first_group, n_groups)
        with self._playing:
            if self._ahead is not None:
                self._end_hosts()
            self._ahead = self._begin(assignments, sampling, held=True)

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
        closed = self._closed
        with self._playing:  # one rollout at a time, whoever asks
            if closed.is_set():
                raise WorkerError("the rollout did not begin: its manager was closed")
            return self._play(list(assignments), sampling, closed)

    def _play(
        self, assignments: list[Assignment], sampling: Sampling, closed: threading.Event
    ) -> list[Trajectory]:
        began = time.perf_counter()
        self._wanted = len(assignments)
        self._results = results = self.journal.known(assignments, self.engine.weights_version)
        self.report = RolloutReport(workers=1 if self.backend == "serial" else self.n_jobs)

        def finished(index: int, ended: Ended) -> None:
            results[index] = ended.trajectory
            report_failures(self.failures, index, ended)
            self.toolbox.record(ended.trajectory)
            self.journal.add(ended.trajectory)
            judging.ended(index)
            if closed.is_set():
                raise WorkerError("the rollout was ended: its manager was closed")

        def left() -> list[Assignment]:
            return [a for a in assignments if a.index not in results]

        if self._ahead is not None and (self._ahead.assignments, self._ahead.sampling) != (left(), sampling):
            self._end_hosts()
        with Judging(self._judge, assignments, results, self._task_of) as judging:
            if left() and (self.backend != "serial" or self._programs):
                try:
                    self._play_on_hosts(left(), sampling, finished, closed)
                except HostsFailedError as error:
                    logger.warning(
                        "%s; the %d episodes that are left are played here, in sequence", error, len(left())
                    )
                    self._end_hosts()
            if left():
                self._play_here(left(), sampling, finished)
            results |= judging.judged(self.failures)
        self.failures.sum_up()
        self.report.seconds = time.perf_counter() - began
        return [results[assignment.index] for assignment in assignments]

    def _play_here(
        self, assignments: list[Assignment], sampling: Sampling, finished: Callable[[int, Ended], None]
    ) -> None:
        """One episode after another in the caller: the reference that the others equal."""
        sampler = SamplerClient(self.engine, retries=self.settings.engine_retries, inline=True)
        hosts = self._here = self._here or LocalHosts(partial(InlineHost, self._setup))
        driver = Driver(hosts, sampler, sampling, finished, ONE_AT_ONCE, toolbox=self.toolbox)

        async def play() -> None:
            try:
                await driver.play(assignments)
            finally:
                await hosts.rest(keep_envs=self.settings.keep_envs)

        self._count(driver)
        run_here(play())

    def _count(self, driver: Driver) -> None:
        """Add up what several drivers did in one rollout."""
        before, self.report = self.report, driver.report
        for name in ("worker_deaths", "replayed_episodes", "batches", "engine_seconds"):
            setattr(driver.report, name, getattr(before, name) + getattr(driver.report, name))

    def _make_hosts(self) -> Hosts:
        if not self._programs or self._sessions is None:
            return make_hosts(self.backend, self._setup, self.n_jobs, self.settings.ray_options)
        sessions = self._sessions(self.inference, self.engine.tokenizer)
        count = 1 if self.backend == "serial" else self.n_jobs
        return ProgramHosts(self._programs, sessions, count, self.settings.env_retries)

    def _task_of(self, assignment: Assignment) -> Any:
        """The task of an episode's program; None of an env."""
        program = self._programs.get(assignment.tag)
        return None if program is None else program.task(assignment.place.env_seed).get("task")

    def _play_on_hosts(
        self,
        assignments: list[Assignment],
        sampling: Sampling,
        finished: Callable[[int, Ended], None],
        closed: threading.Event,
    ) -> None:
        """Play in the driver's thread, and keep in this one what has finished."""
        ahead, self._ahead = self._ahead, None
        begun = ahead or self._begin(assignments, sampling)
        loop, hosts = self.inference.loop, self._own_hosts()
        self._count(begun.driver)
        try:
            loop.run(begun.driver.release())
            while True:
                try:
                    item = begun.news.get(timeout=0.5)
                except queue.Empty:
                    if closed.is_set():
                        raise WorkerError("the rollout was ended: its manager was closed") from None
                    continue
                if item is None:
                    break
                finished(*item)
            begun.playing.result()
            loop.run(hosts.rest(keep_envs=self.settings.keep_envs))
        except BaseException:
            if self._hosts is not None:  # else the manager is closed
                self._hosts = None
                with contextlib.suppress(TimeoutError):
                    loop.run(begun.driver.stop(), INTERRUPTED_SECONDS)
                    loop.run(hosts.close(), INTERRUPTED_SECONDS)
            raise

    def _begin(self, assignments: Sequence[Assignment], sampling: Sampling, *, held: bool = False) -> _Begun:
        """Let a driver play on the hosts; `held`, up to the first prompts."""
        news = queue.SimpleQueue[tuple[int, Ended] | None]()
        limits = replace(self.settings, episodes_at_once=1) if self._programs else self.settings
        driver = Driver(
            self._own_hosts(), self.inference, sampling, lambda *item: news.put(item), limits,
            self.failures, self.toolbox, held=held,
        )  # fmt: skip
        playing = self.inference.loop.submit(driver.play(assignments))
        playing.add_done_callback(lambda _: news.put(None))
        return _Begun(list(assignments), sampling, driver, news, playing)

    def _own_hosts(self) -> Hosts:
        """The hosts, made when first needed."""
        if self._hosts is None:
            self._hosts = self._make_hosts()
        return self._hosts


class _Begun(NamedTuple):
    """A rollout that a driver plays."""

    assignments: list[Assignment]
    sampling: Sampling
    driver: Driver
    news: queue.SimpleQueue[tuple[int, Ended] | None]
    """Episodes that have ended; None when all have."""
    playing: Future[None]


def _programs_of(
    kinds: Mapping[str, EnvTag], tags: Sequence[str], side: str, *, with_tools: bool
) -> dict[str, ProgramEnv]:
    """The programs that these tags name.

    Raises:
        ConfigError: programs are mixed with envs or tools.
    """
    programs = program_tags(kinds, tags)
    if programs and len(programs) < len(set(tags)):
        raise ConfigError(
            f"custom_envs.{programs[0]} is a program, and the other kinds of the {side} side are none: a rollout "
            f"plays either programs or envs"
        )
    if programs and with_tools:
        raise ConfigError(
            f"custom_envs.{programs[0]}: a program calls its own tools: leave agent_proxy.tools out"
        )
    return {tag: ProgramEnv(**kinds[tag].env_config) for tag in programs}


def make_hosts(backend: str, setup: Setup, count: int, ray_options: dict[str, Any]) -> Hosts:
    """The hosts of a backend."""
    if backend == "threads":
        return LocalHosts(partial(ThreadHost, setup), count, setup.close_seconds)
    if backend == "processes":
        from shoal.rollout.hosts.processes import ProcessHosts

        return ProcessHosts(setup, count)
    if backend == "ray":
        from shoal.rollout.hosts.ray import RayHosts

        return RayHosts(setup, count, ray_options)
    from shoal.rollout.hosts.joblib import JoblibHosts

    return JoblibHosts(setup, count, backend)
