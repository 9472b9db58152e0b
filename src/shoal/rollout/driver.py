"""The driver of a rollout: it hands out episodes to hosts, samples for them, and decides what is played again.

It runs in one event loop; resets, steps, prompts and encoding are the hosts', the model is the sampler's. Nothing that
it decides changes a token: an episode that is played again says the same words.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.data import Status, Trajectory
from shoal.core.errors import EngineError, WorkerError
from shoal.rollout.failures import COUNTED, LEFT_OUT, PLAYED_AGAIN, FailureLog
from shoal.rollout.hosts.episodes import Answer, Begin, Ended, Refused, Reply, Use, Used
from shoal.rollout.hosts.host import Host, HostLostError, Hosts, HostsFailedError
from shoal.rollout.plan import Assignment
from shoal.rollout.settings import ParallelConfig
from shoal.rollout.tools.mcp import ToolsFailedError
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import Request, Sampling

logger = logging.getLogger(__name__)
NO_LIMITS = ParallelConfig()
LOOK_SECONDS = 1.0
"""Between two looks at envs that may hang, at most."""


@dataclass(slots=True)
class RolloutReport:
    """How a rollout went."""

    seconds: float = 0.0
    workers: int = 0
    """Hosts with envs of their own; none where a vector env was stepped."""
    engine_seconds: float = 0.0
    batches: int = 0
    worker_deaths: int = 0
    replayed_episodes: int = 0

    def metrics(self) -> dict[str, float]:
        """As numbers for `metrics.jsonl`."""
        found = {"engine_busy": round(self.engine_seconds / self.seconds if self.seconds else 0.0, 4)}
        if self.workers:
            found["rollout_workers"] = float(self.workers)
            found["rollout_batches"] = float(self.batches)
            found["worker_deaths"] = float(self.worker_deaths)
            found["replayed_episodes"] = float(self.replayed_episodes)
        return found


@dataclass(slots=True, eq=False)
class _Job:
    """An episode that is not over."""

    assignment: Assignment
    lost: int = 0  # times that its host was lost
    deaths: int = 0  # of those, times that it was the cause


class Driver:
    """Plays episodes on hosts with one sampler; use each for one rollout.

    Args:
        hosts: where episodes are played.
        sampler: what the model says.
        sampling: how tokens are picked.
        finished: called with the index of an episode, and how it ended, as soon as it has.
        limits: how long is waited, how many episodes a host plays at once, and how many hosts one may end.
        failures: hears of hosts that are lost.
        toolbox: the tools that run beside the driver.
        own_slots: whether each episode has a slot of its own, that of its index.
        held: whether the model is asked only from `release` on: hosts reset envs and write first prompts meanwhile.
    """

    def __init__(
        self,
        hosts: Hosts,
        sampler: SamplerClient,
        sampling: Sampling,
        finished: Callable[[int, Ended], None],
        limits: ParallelConfig = NO_LIMITS,
        failures: FailureLog | None = None,
        toolbox: Toolbox | None = None,
        *,
        own_slots: bool = False,
        held: bool = False,
    ) -> None:
        self._toolbox = toolbox
        self.report = RolloutReport(workers=hosts.count)
        self._hosts, self._sampler, self._sampling = hosts, sampler, sampling
        self._finished, self._limits, self._failures = finished, limits, failures or FailureLog()
        self._own_slots = own_slots
        self._todo: deque[_Job] = deque()
        self._left = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._no_hosts: HostsFailedError | None = None  # why there can be no more
        self._in_use: set[Host] = set()
        self._more_slots = itertools.count(-1, -1)  # beside those of a host's share
        self._released = asyncio.Event()
        if not held:
            self._released.set()

    async def release(self) -> None:
        """Let the model be asked."""
        self._released.set()

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
        self._todo.extend(map(_Job, assignments))
        self._left = len(assignments)
        self._changed = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spare = asyncio.Semaphore(self._hosts.count)
        count = self._hosts.count
        share = self._limits.episodes_at_once or -(-len(assignments) // count)  # of one host
        try:
            for number in range(min(count, len(assignments))):
                self._spawn(self._keep(number, share))
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
            self.report.seconds = time.perf_counter() - began
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
        elif not self._left:
            self._over.set_result(None)
        elif not self._tasks - {self._watching}:
            failed = self._no_hosts or HostsFailedError(f"no host is left for {self._left} episodes")
            suspect = any(job.lost for job in self._todo)
            self._over.set_exception(_not_here(failed) if suspect else failed)

    # --- hosts
    async def _keep(self, number: int, share: int) -> None:
        """Keep host `number` busy with so many episodes at once, and replace it when it is lost."""
        while self._left:
            try:
                host = await self._hosts.host(number)
            except HostsFailedError as error:
                self._no_hosts = error  # the others take its episodes
                return
            self._in_use.add(host)
            if self._own_slots:
                slots = [self._spawn(self._play(host, job.assignment.index, job)) for job in self._todo]
                self._todo.clear()
            else:
                slots = [self._spawn(self._fill(host, slot)) for slot in range(share)]
            await asyncio.wait(slots)
            self._in_use.discard(host)

    async def _fill(self, host: Host, slot: int) -> None:
        """Play one episode after another in a slot, as long as some are left."""
        while (job := await self._take(host)) is not None:
            try:
                await self._play(host, slot, job)
            except HostLostError as error:
                self._lost(host, slot, job, error)

    async def _take(self, host: Host) -> _Job | None:
        """The next episode; None when all are over, or the host is lost."""
        while not host.lost and self._left:
            if self._todo:
                return self._todo.popleft()
            await self._changed.wait()
        return None

    def _news(self) -> None:
        """Let the slots that have nothing to do look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _lost(self, host: Host, slot: int, job: _Job, error: HostLostError) -> None:
        """A host is lost with this episode: play that again, alone if it may be the cause."""
        if host in self._in_use and (host.lost or error.hung):
            self.report.worker_deaths += 1
            if host.lost:
                self._in_use.discard(host)
            gone = f"a rollout worker is gone, and {error.open_slots} of the episodes were open"
            self._failures.add(gone, str(error), "the finished ones are kept, the open ones are played again")
        if not error.open_slots:  # it was lost before this episode began
            self._todo.appendleft(job)
            return
        self.report.replayed_episodes += 1
        job.lost += 1
        caused = error.slot == slot or (error.slot is None and error.open_slots == 1)
        job.deaths += caused
        if caused or job.lost > 1:
            self._spawn(self._alone(job, error))
        else:
            self._todo.append(job)
        self._news()

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
                    await self._play(host, next(self._more_slots), job)
                    await self._hosts.dismiss(host)
                    return
                except HostLostError as again:
                    error = again
                    job.deaths += 1
                    self.report.worker_deaths += 1
                    self.report.replayed_episodes += 1
                finally:
                    if host.lost:
                        self._in_use.discard(host)
        status: Status = "timeout" if error.hung else "env_error"
        why = f"{job.deaths} workers that played it were lost, at last: {error}"
        self._end(job, Ended(0, without_turns(job.assignment, status, why)))

    async def _watch(self) -> None:
        """Give up envs that do not answer."""
        limits = self._limits
        shortest = min(s for s in (limits.step_timeout, limits.make_timeout) if s is not None)
        while True:
            await asyncio.sleep(min(shortest / 4, LOOK_SECONDS))
            hosts = list(self._in_use)
            for host, overdue in zip(
                hosts, await asyncio.gather(*(host.overdue() for host in hosts)), strict=True
            ):
                for slot, why in overdue:
                    host.give_up(slot, why)

    # --- one episode
    async def _play(self, host: Host, slot: int, job: _Job) -> None:
        """The story of an episode: the host asks, the model answers, until it is over."""
        place, sampling, limit = job.assignment.place, self._sampling, self._limits.episode_timeout
        began, context = time.monotonic(), tuple[int, ...]()
        self._sampler.playing += 1
        try:
            event, version = await host.tell(Begin(slot, job.assignment, sampling)), 0
            if not self._released.is_set():
                await self._released.wait()
                began = time.monotonic()
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
                        reply = Answer(slot, completion)
                    except (EngineError, TimeoutError) as error:
                        status: Status = "timeout" if isinstance(error, TimeoutError) else "engine_error"
                        reply = Refused(slot, status, str(error))
                if isinstance(reply, Answer):
                    context, version = prompt + reply.completion.token_ids, reply.completion.weights_version
                event = await host.tell(reply)
        finally:
            self._sampler.playing -= 1
        self._end(job, event)

    async def _use(self, assignment: Assignment, event: Use, version: int) -> Reply:
        """What came of calls of tools."""
        assert self._toolbox is not None, "there are no tools"
        tag, place = assignment.tag, assignment.place
        where = tag, place.iteration, place.group, place.member, place.env_seed, version, event.turn
        try:
            uses = await self._toolbox.use(event.calls, where)
        except ToolsFailedError as error:
            return Refused(event.slot, "env_error", str(error))
        return Used(event.slot, uses)

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
            self._news()
            self._over.set_result(None)


def _not_here(error: HostsFailedError) -> WorkerError:
    """An episode that lost its host is not played in this process, which it may end, too."""
    return WorkerError(f"{error}; and no process can be started for the episodes that lost their host")


def without_turns(assignment: Assignment, status: Status, why: str) -> Trajectory:
    """The record of an episode of which nothing is known but why it failed."""
    place = assignment.place
    return Trajectory(
        env=assignment.tag, iteration=place.iteration, group=place.group, member=place.member,
        env_seed=place.env_seed, calls=(), turns=(), success=False, terminated=False, truncated=False, status=status,
        error=why,
    )  # fmt: skip


def report_failures(log: FailureLog, index: int, ended: Ended) -> None:
    """Warn of what the tries at an episode failed with, the last one included."""
    trajectory = ended.trajectory
    episode = f"episode {index} of {trajectory.env}"
    for why in ended.failed:
        log.add(episode, why, PLAYED_AGAIN)
    if trajectory.status != "ok":
        log.add(episode, trajectory.error or trajectory.status, LEFT_OUT)
    elif trajectory.program_failed:
        log.add(episode, str(trajectory.error), COUNTED)
    if trajectory.requests:
        for setting in trajectory.requests.overridden:
            log.note(f"a program asks for {setting.what}: the run decides it, so the run's own value is used")
        for refused in () if trajectory.truncated else trajectory.requests.refused:
            log.note(f"the gateway refused a request of a program: {refused.what}")
