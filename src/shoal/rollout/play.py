"""One player: groups of episodes, on hosts or in a vector env, each recorded once, returned in the order of the plan.

A driver, in one event loop, hands out episodes to hosts, samples for them, and decides what is played again; resets,
steps, prompts and encoding are the hosts'. Nothing that it decides changes a token: an episode that is played again
says the same words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from shoal.core.data import Status, Trajectory
from shoal.core.errors import ConfigError, EngineError, WorkerError, did_you_mean
from shoal.core.executors import Closing, available_cpus
from shoal.envs.catalogue import resolve_text
from shoal.rollout.episode import Role
from shoal.rollout.factory import NoEnvs, make_roles, validate_environment_config
from shoal.rollout.hosts.episodes import Begin, Ended, Event, Refused, Reply, Sampled, Setup, Use, Used
from shoal.rollout.hosts.host import Host, HostLostError, Hosts, HostsFailedError, InlineHost
from shoal.rollout.hosts.pool import EnvPool, VectorHost
from shoal.rollout.hosts.processes import make_hosts
from shoal.rollout.journal import Journal
from shoal.rollout.plan import Assignment, assignments_of, slot_of
from shoal.rollout.programs import ProgramHosts, Sessions, programs_of
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.report import FailureLog, RolloutReport, report_failures
from shoal.rollout.rewards.judge import Judge, Judging
from shoal.rollout.rewards.scorers import Answers
from shoal.rollout.settings import Backend, ParallelConfig, check_jobs, rollout_config
from shoal.rollout.tools.mcp import ToolsFailedError
from shoal.rollout.tools.toolbox import Toolbox, TurnId
from shoal.samplers.asking import SamplerClient, run_here
from shoal.samplers.sampler import ChatTokenizer, Request, Sampler, Sampling

logger = logging.getLogger(__name__)
NO_LIMITS, ONE_AT_ONCE = ParallelConfig(), ParallelConfig(episodes_at_once=1)
LOOK_SECONDS = 1.0
"""Between two looks at envs that may hang, at most."""
INTERRUPTED_SECONDS = 30.0
"""For which the present steps of envs are waited for after Ctrl-C."""
OTHER_ROLLOUT_SECONDS = 10.0
"""For which a rollout in another thread may end when the player is closed."""
PLURALS = {"threads": "thread", "processes": "process"}
"""How backends were spelled before, which programs still say."""
CLOSED = "the rollout was ended: its manager was closed"


@dataclass(slots=True, eq=False)
class _Job:
    """An episode that is not over."""

    assignment: Assignment
    lost: int = 0  # times that its host was lost
    deaths: int = 0  # of those, times that it was the cause


class Driver:
    """Plays episodes on hosts with one sampler; use each for one rollout.

    `finished` is called with the index of an episode, and how it ended, as soon as it has. `failures` hears of hosts
    that are lost, and `report` counts.
    """

    def __init__(
        self,
        hosts: Hosts,
        sampler: SamplerClient,
        sampling: Sampling,
        finished: Callable[[int, Ended], None],
        limits: ParallelConfig,
        failures: FailureLog,
        toolbox: Toolbox,
        report: RolloutReport,
    ) -> None:
        self._hosts, self._sampler, self._sampling, self._finished = hosts, sampler, sampling, finished
        self._limits, self._failures, self._toolbox, self.report = limits, failures, toolbox, report
        self._todo = asyncio.Queue[_Job]()
        self._left = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._no_hosts: HostsFailedError | None = None  # why there can be no more
        self._in_use: set[Host] = set()

    async def stop(self) -> None:
        """Break off what is played, and wait for its end."""
        self._over.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def play(self, assignments: Sequence[Assignment]) -> None:
        """Play these episodes.

        Raises:
            HostsFailedError: there can be no hosts; what has finished is reported.
        """
        began, before = time.perf_counter(), self._sampler.statistics
        seconds, batches = before.engine_seconds, before.batches
        for assignment in assignments:
            self._todo.put_nowait(_Job(assignment))
        self._left = len(assignments)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spare = asyncio.Semaphore(self._hosts.count)
        count = self._hosts.count
        share = -(-len(assignments) // count)  # of one host
        try:
            for number in range(min(count, len(assignments))):
                self._spawn(self._keep(number, min(share, self._limits.episodes_at_once or share)))
            if self._limits.step_timeout or self._limits.make_timeout:
                self._watching = self._spawn(self._watch())
            await self._over
        finally:
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self._sampler.playing = 0
            after = self._sampler.statistics
            self.report.seconds += time.perf_counter() - began
            self.report.engine_seconds += after.engine_seconds - seconds
            self.report.batches += after.batches - batches

    # --- tasks
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        elif not self._tasks - {self._watching}:
            failed = self._no_hosts or HostsFailedError(f"no host is left for {self._left} episodes")
            suspect = any(self._todo.get_nowait().lost for _ in range(self._todo.qsize()))
            self._over.set_exception(_not_here(failed) if suspect else failed)

    # --- hosts
    async def _keep(self, number: int, share: int) -> None:
        """Keep host `number` busy with so many episodes at once, and replace it when it is lost."""
        while True:
            try:
                host = await self._hosts.host(number)
            except HostsFailedError as error:
                self._no_hosts = error  # the others take its episodes
                return
            self._in_use.add(host)
            await asyncio.wait([self._spawn(self._fill(host, slot)) for slot in range(share)])
            self._in_use.discard(host)

    async def _fill(self, host: Host, slot: int) -> None:
        """Play one episode after another in a slot, up to the end of the host."""
        while not host.lost:
            job = await self._todo.get()
            try:
                await self._play(host, slot, job)
            except HostLostError as error:
                self._lost(host, slot, job, error)

    def _lost(self, host: Host, slot: int, job: _Job, error: HostLostError) -> None:
        """A host is lost with this episode: play that again, alone if it may be the cause."""
        if host in self._in_use:
            self.report.worker_deaths += 1
            self._in_use.discard(host)
            gone = f"a rollout worker is gone, and {error.open_slots} of the episodes were open"
            self._failures.add(gone, str(error), "the finished ones are kept, the open ones are played again")
        if not error.open_slots:  # it was lost before this episode began
            self._todo.put_nowait(job)
            return
        self.report.replayed_episodes += 1
        job.lost += 1
        caused = error.slot == slot or (error.slot is None and error.open_slots == 1)
        job.deaths += caused
        if caused or job.lost > 1:
            self._spawn(self._alone(job, error))
        else:
            self._todo.put_nowait(job)

    async def _alone(self, job: _Job, error: HostLostError) -> None:
        """Play an episode in a host of its own, so often as it may lose one."""
        async with self._spare:
            while job.deaths < self._limits.max_deaths:
                try:
                    host = await self._hosts.spare()
                except HostsFailedError as failed:
                    raise _not_here(failed) from failed
                self._in_use.add(host)
                try:
                    await self._play(host, 0, job)
                    await host.close_envs()
                    return
                except HostLostError as again:
                    error = again
                    job.deaths += 1
                    self.report.worker_deaths += 1
                    self.report.replayed_episodes += 1
                finally:
                    self._in_use.discard(host)
                    host.end()
        status: Status = "timeout" if error.hung else "env_error"
        why = f"{job.deaths} workers that played it were lost, at last: {error}"
        self._end(job, Ended(0, job.assignment.place.record(job.assignment.tag, status, why)))

    async def _watch(self) -> None:
        """Give up envs that do not answer."""
        limits = self._limits
        shortest = min(s for s in (limits.step_timeout, limits.make_timeout) if s is not None)
        while True:
            await asyncio.sleep(min(shortest / 4, LOOK_SECONDS))
            hosts = list(self._in_use)
            found = await asyncio.gather(*(host.overdue() for host in hosts))
            for host, overdue in zip(hosts, found, strict=True):
                for slot, why in overdue:
                    host.lose(why, hung=True, slot=slot)

    # --- one episode
    async def _play(self, host: Host, slot: int, job: _Job) -> None:
        """One episode: its host asks, the model answers, until it is over."""
        place, sampling, limit = job.assignment.place, self._sampling, self._limits.episode_timeout
        began, context, version = time.monotonic(), tuple[int, ...](), 0
        self._sampler.playing += 1
        try:
            event: Event = await host.tell(Begin(slot, job.assignment, sampling))
            while not isinstance(event, Ended):
                if isinstance(event, Use):
                    event = await host.tell(await self._use(job.assignment, event, version))
                    continue
                prompt = context + event.new_ids if event.goes_on else event.new_ids
                request = Request(prompt, place.key(event.turn), sampling, event.images)
                reply: Reply
                if limit is not None and time.monotonic() - began > limit:
                    reply = Refused(slot, "timeout", f"the episode did not end within {limit:g} s")
                else:
                    try:
                        completion = await self._sampler.sample(request)
                        context, version = prompt + completion.token_ids, completion.weights_version
                        reply = Sampled(slot, completion)
                    except (EngineError, TimeoutError) as error:
                        status: Status = "timeout" if isinstance(error, TimeoutError) else "engine_error"
                        reply = Refused(slot, status, str(error))
                event = await host.tell(reply)
        finally:
            self._sampler.playing -= 1
            self._toolbox.end(_turn_id(job.assignment, version, 0))
        self._end(job, event)

    async def _use(self, assignment: Assignment, event: Use, version: int) -> Reply:
        """What came of calls of tools."""
        where = _turn_id(assignment, version, event.turn)
        if event.first:  # maybe of another attempt
            self._toolbox.end(where)
        try:
            return Used(event.slot, await self._toolbox.use(event.calls, where))
        except ToolsFailedError as error:
            return Refused(event.slot, "env_error", str(error))

    def _end(self, job: _Job, event: Ended) -> None:
        if self._over.done():  # the rollout was broken off
            return
        try:
            self._finished(job.assignment.index, event)
        except BaseException as error:
            self._over.set_exception(error)
            return
        self._left -= 1
        if not self._left:
            self._over.set_result(None)


def _turn_id(assignment: Assignment, version: int, turn: int) -> TurnId:
    """A turn as the record of tools names it."""
    place = assignment.place
    return assignment.tag, place.iteration, place.group, place.member, place.env_seed, version, turn


def _not_here(error: HostsFailedError) -> WorkerError:
    """An episode that lost its host is not played in this process, which it may end, too."""
    return WorkerError(f"{error}; and no process can be started for the episodes that lost their host")


# --- rollouts
@dataclass(eq=False)
class Rollout:
    """A rollout that has begun; `wait` for its trajectories."""

    player: TrajectoryCollector
    assignments: Sequence[Assignment]
    sampling: Sampling
    results: dict[int, Trajectory]
    driver: Driver | None = None  # which plays it meanwhile
    playing: Future[None] | None = None
    news: queue.SimpleQueue[tuple[int, Ended] | None] = field(default_factory=queue.SimpleQueue)
    """Episodes that have ended; None behind the last."""

    def wait(self) -> list[Trajectory]:
        """The trajectories in the order of the plan; may be called once."""
        return self.player._wait(self)

    def left(self) -> list[Assignment]:
        """The episodes that have not ended."""
        return [one for one in self.assignments if one.index not in self.results]


class TrajectoryCollector(Closing):
    """Plays groups of episodes, one rollout at a time, in a vector env that is stepped in the caller's thread.

    Args:
        envs: the pool; env `group * group_size + member` is of the kind `tags[group]`.
        tags: the kind of each group.
        roles: what the agent knows of each kind.
        group_size: episodes that share a start state.
        engine: writes the responses.
        prompt: how prompts are made.
        seed: of the run; episodes are named under it by iteration, group and member.
        env_retries: times an episode starts again after its env failed.
        journal: where episodes are written down as they end; those that are there are not played again.
        failures: warns of episodes that fail.
        judge: scores each group; the caller closes it.
        toolbox: the tools that the model may call; the caller closes it.
    """

    def __init__(
        self,
        envs: EnvPool,
        tags: Sequence[str],
        roles: Mapping[str, Role],
        group_size: int,
        engine: Sampler,
        prompt: PromptConfig,
        seed: int,
        *,
        env_retries: int = 1,
        journal: Journal | None = None,
        failures: FailureLog | None = None,
        judge: Judge | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.envs, self.engine, self.seed = envs, engine, seed
        self.tags, self.roles, self.group_size = tuple(tags), dict(roles), group_size
        self.journal, self.failures = journal or Journal(), failures or FailureLog()
        self.toolbox, self._judge = toolbox or Toolbox(()), judge
        own = next((tag for tag, role in self.roles.items() if role.tools is not None), None)
        if self.toolbox.tools and own is not None:
            raise ConfigError(f"custom_envs.{own} has tools of its own: leave agent_proxy.tools out")
        self.prompter = Prompter(prompt, engine.tokenizer, self.toolbox.chat(engine.tokenizer))
        self.settings = self._settings_here = NO_LIMITS
        n = len(self.tags) * group_size
        self._here = Hosts(lambda: VectorHost(envs, n, self.roles, self.prompter, env_retries))
        self._hosts: Hosts | None = None  # beside the caller's thread
        self._workers = 0
        self._inference: SamplerClient | None = None
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._begun: Rollout | None = None  # until it has been waited for
        self.report = RolloutReport()
        self.counts = 0, 0
        """Episodes of the latest rollout that have ended, and all of it; any thread may ask."""

    def _plan(self, iteration: int, first_group: int, n_groups: int | None) -> list[Assignment]:
        """The episodes; in a vector env the index of each is its env's, modulo their number."""
        n, size = len(self.tags), self.group_size
        plan = assignments_of(self.seed, iteration, self.tags, size, first_group, n_groups)
        groups = [slot_of(a.place.group, self.tags) + a.place.group // n * n for a in plan]
        return [replace(a, index=g * size + a.place.member) for a, g in zip(plan, groups, strict=True)]

    def _sampling(self) -> Sampling:
        return Sampling()

    def _task_of(self, assignment: Assignment) -> Any:
        """The task of an episode, where it has one."""

    def _make_hosts(self) -> Hosts | None:
        """Where episodes are played beside the caller's thread, if they are."""
        return None

    def worker_pids(self) -> list[int]:
        """The worker processes that run now (of the "process" backend and of replays)."""
        return [] if self._hosts is None else self._hosts.pids()

    # --- playing
    def collect(
        self,
        iteration: int = 0,
        sampling: Sampling | None = None,
        *,
        first_group: int = 0,
        n_groups: int | None = None,
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member, wherever they are played.

        Args:
            iteration: names the env seeds and the sampling noise.
            sampling: how tokens are picked; as the config says if not given.
            first_group: the number of the first group, for further batches of groups in one iteration.
            n_groups: how many groups, at most as many as there are tags; all if not given.
        """
        return self.play(self._plan(iteration, first_group, n_groups), sampling)

    def play(self, assignments: Sequence[Assignment], sampling: Sampling | None = None) -> list[Trajectory]:
        """Play these episodes, whichever they are, and return their trajectories in the same order.

        Args:
            assignments: which episodes, each of a known kind and with an index of its own: in a vector env its env's.
            sampling: how tokens are picked.
        """
        with self._lock:
            return self._begin(assignments, sampling).wait()

    def begin(
        self,
        iteration: int = 0,
        sampling: Sampling | None = None,
        *,
        first_group: int = 0,
        n_groups: int | None = None,
    ) -> Rollout:
        """Begin what `collect` with the same arguments plays, and return at once; `wait` for it before the next one.

        Hosts play it meanwhile, with the weights that the engine has then. What is played in the caller's thread
        ("serial", a vector env) is played by `wait`, which also writes the journal.
        """
        with self._lock:
            return self._begin(self._plan(iteration, first_group, n_groups), sampling)

    def _begin(self, assignments: Sequence[Assignment], sampling: Sampling | None) -> Rollout:
        if self._begun is not None:
            raise WorkerError("a rollout has begun: wait for its trajectories first")
        if self._closed.is_set():
            raise WorkerError("the rollout did not begin: its manager was closed")
        results = self.journal.known(assignments, self.engine.weights_version)
        begun = Rollout(self, assignments, sampling or self._sampling(), results)
        self.report, self.counts = RolloutReport(workers=self._workers), (len(results), len(assignments))
        if left := begun.left():
            self._hosts = self._hosts or self._make_hosts()
        if left and self._hosts is not None:
            put = begun.news.put
            begun.driver = Driver(
                self._hosts, self.inference, begun.sampling, lambda *item: put(item), self.settings,
                self.failures, self.toolbox, self.report,
            )  # fmt: skip
            begun.playing = self.inference.loop.submit(begun.driver.play(left))
            begun.playing.add_done_callback(lambda _: put(None))
        self._begun = begun
        return begun

    def _wait(self, begun: Rollout) -> list[Trajectory]:
        with self._lock:
            if self._begun is not begun:
                raise WorkerError("this rollout is over: it was waited for, or its manager was closed")
            results = begun.results

            def finished(index: int, ended: Ended) -> None:
                results[index] = ended.trajectory
                self.counts = len(results), len(begun.assignments)
                report_failures(self.failures, index, ended)
                self.toolbox.record(ended.trajectory)
                self.journal.add(ended.trajectory)
                judging.ended(index)
                if self._closed.is_set():
                    raise WorkerError(CLOSED)

            try:
                with Judging(self._judge, begun.assignments, results, self._task_of) as judging:
                    if begun.playing is not None:
                        self._play_on_hosts(begun, begun.playing, finished)
                    if left := begun.left():
                        self._play_here(left, begun.sampling, finished)
                    results |= judging.judged(self.failures)
            finally:
                self._begun = None
            self.failures.sum_up()
            return [results[one.index] for one in begun.assignments]

    def _play_here(
        self, left: Sequence[Assignment], sampling: Sampling, finished: Callable[[int, Ended], None]
    ) -> None:
        """Play in the caller's thread: one episode after another, or all envs of the pool together."""
        sampler = SamplerClient(self.engine, retries=self.settings.engine_retries, inline=True)
        driver = Driver(
            self._here, sampler, sampling, finished, self._settings_here, self.failures, self.toolbox, self.report,
        )  # fmt: skip

        async def play() -> None:
            try:
                await driver.play(left)
            finally:
                await self._here.rest(keep_envs=self.settings.keep_envs)

        run_here(play())

    def _play_on_hosts(
        self, begun: Rollout, playing: Future[None], finished: Callable[[int, Ended], None]
    ) -> None:
        """Keep in this thread what the driver's has played."""
        try:
            while (item := begun.news.get()) is not None:
                finished(*item)
            playing.result()
            if self._hosts is not None:
                self.inference.loop.run(self._hosts.rest(keep_envs=self.settings.keep_envs))
        except HostsFailedError as error:
            left = len(begun.left())
            logger.warning("%s; the %d episodes that are left are played here, in sequence", error, left)
            self._end_hosts()
        except BaseException as error:
            self._end_hosts(INTERRUPTED_SECONDS)
            if isinstance(error, CancelledError):
                raise WorkerError(CLOSED) from None
            raise

    def _end_hosts(self, seconds: float | None = None) -> None:
        """Break off what hosts play, and end them."""
        begun, hosts, self._hosts = self._begun, self._hosts, None
        with contextlib.suppress(TimeoutError):
            if begun is not None and begun.driver is not None:
                self.inference.loop.run(begun.driver.stop(), seconds)
            if hosts is not None:
                self.inference.loop.run(hosts.close(), seconds)

    @property
    def inference(self) -> SamplerClient:
        """The engine for a driver beside the caller's thread, started when first needed."""
        if self._inference is None:
            own = self.settings
            self._inference = SamplerClient(
                self.engine, schedule=own.schedule, max_batch=own.max_batch, engine_timeout=own.engine_timeout,
                retries=own.engine_retries, max_restarts=own.engine_restarts,
            )  # fmt: skip
        return self._inference

    # --- the end
    def close(self) -> None:
        """End envs, hosts and the shared engine's thread; may be called twice.

        A rollout that another thread plays ends with a `WorkerError`.
        """
        self._closed.set()
        begun = self._begun
        if begun is not None and begun.driver is not None:
            self.inference.loop.run(begun.driver.stop())
        alone = self._lock.acquire(timeout=OTHER_ROLLOUT_SECONDS)
        try:
            self._end_hosts()
            self._begun = None
            run_here(self._here.close())
            if self._inference is not None:
                self._inference.close()
            self._inference = None
            self.envs.close()
        finally:
            self._closed = threading.Event()
            if alone:
                self._lock.release()


class ParallelRolloutManager(TrajectoryCollector):
    """Plays groups of episodes on hosts that make their own envs.

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
        chosen = backend or proxy.parallel.backend
        self.backend: str = {"auto": "process", **PLURALS}.get(chosen, chosen)
        if self.backend not in get_args(Backend):
            near = did_you_mean(self.backend, get_args(Backend))
            raise ConfigError(f"no rollout backend named {self.backend!r}.{near}")
        environments = validate_environment_config(self.config)
        if side not in ("train", "val"):
            raise ConfigError(f"side must be 'train' or 'val', got {side!r}")
        groups, kinds = getattr(environments.es_manager, side), environments.custom_envs
        tags = groups.group_tags()
        given = proxy.tools if tools is None else tools
        self._programs = programs_of(kinds, tags, side, with_tools=bool(getattr(given, "tools", given)))
        if self._programs and sessions is None:
            raise ConfigError("programs need a gateway: give ParallelRolloutManager sessions=sessions_of")
        self._sessions = sessions
        check_jobs(n_jobs := proxy.parallel_n_jobs if n_jobs is None else n_jobs, "n_jobs")
        self.n_jobs = available_cpus() if n_jobs == -1 else int(n_jobs)
        self._own: list[Closing] = []  # what the caller does not close
        if not isinstance(given, Toolbox):
            self._own.append(given := Toolbox(given, proxy.max_tool_turns))
        if judge is None and self.config.rewards:
            path = None if journal is None or journal.path is None else journal.path.parent
            self._own.append(judge := Judge(self.config.rewards, Answers(path)))
        super().__init__(
            NoEnvs(), tags, make_roles(kinds, tags, proxy.max_turn), groups.group_size, engine, proxy.prompt,
            self.config.seed if seed is None else seed, journal=journal, failures=failures, judge=judge, toolbox=given,
        )  # fmt: skip
        self.settings = own = proxy.parallel.within(self.config.vector, self.backend, self.n_jobs)
        if self._programs:
            self.settings = replace(own, episodes_at_once=1)
        self._setup = Setup(
            {tag: resolve_text(kinds[tag].env_type, kinds[tag].env_config) for tag in self.roles},
            self.roles, proxy.prompt, engine.tokenizer, own.env_retries, own.step_timeout, own.make_timeout,
            self.prompter.tools,
        )  # fmt: skip
        self._here, self._settings_here = Hosts(partial(InlineHost, self._setup)), ONE_AT_ONCE
        self._workers = 1 if self.backend == "serial" else self.n_jobs

    def _sampling(self) -> Sampling:
        return self.config.agent_proxy.sampling()

    def _task_of(self, assignment: Assignment) -> Any:
        program = self._programs.get(assignment.tag)
        return None if program is None else program.task(assignment.place.env_seed).get("task")

    def _make_hosts(self) -> Hosts | None:
        if self._programs and self._sessions is not None:
            sessions = self._sessions(self.inference, self.engine.tokenizer)
            return ProgramHosts(self._programs, sessions, self._workers, self.settings.env_retries)
        return make_hosts(self.backend, self._setup, self.n_jobs, self.settings.ray_options)

    rollout = TrajectoryCollector.collect

    def close(self) -> None:
        """End hosts, the shared engine's thread, and tools and a judge of its own; may be called twice."""
        super().close()
        for one in self._own:
            one.close()
