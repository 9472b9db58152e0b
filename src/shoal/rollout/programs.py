"""Episodes that programs play by asking the model themselves; their calls are the record.

A command is a process an episode; a Python function is called in a process that plays many. Where its calls go is a
session, which the caller's factory opens: the gateway, mostly.

How an episode ends is decided in `ended`: a budget that is used up truncates it, what a program raises after an answer
is the agent's failure, and both count. A program that dies, hangs or returns nonsense is killed with all that it
started, and its episode is played once more with the same noise, as for any env.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from shoal.core.data import Call, Ending, Requests, Status, Trajectory, Turn
from shoal.core.errors import ConfigError, EngineError
from shoal.envs.program import ProgramEnv
from shoal.rollout.episode import anchor_of
from shoal.rollout.factory import EnvTag, program_tags
from shoal.rollout.functions import (
    FunctionProcesses,
    ProgramFailedError,
    Result,
    limit_memory,
    result_of,
    serve_command,
    serve_function,
)
from shoal.rollout.hosts.episodes import CLOSE_SECONDS, Begin, Ended, Event, Message
from shoal.rollout.hosts.host import Host, Hosts
from shoal.rollout.plan import Assignment
from shoal.samplers.sampler import Key, Sampling

KILLED = range(129, 193)
"""Statuses with which a shell ends whose command a signal has ended."""


class Exchanged(NamedTuple):
    """A call of a session, and its text."""

    call: Call
    prompt: str
    response: str


class SessionRecord(NamedTuple):
    """What came of a session."""

    # Each behind its parent; in the order in which they were asked, unless parallel.
    exchanged: Sequence[Exchanged]
    requests: Requests | None  # those that were not answered as the program asked
    budget: Ending | None  # that ended it: a request was refused for it, and none was answered after
    failed: EngineError | None  # why a request has no answer


class ProgramSession(Protocol):
    """Where the calls of one program go."""

    variables: Mapping[str, str]
    """Environment variables by which the program finds it."""

    async def exhausted(self) -> None:
        """Return when the program asks on and on though a budget is used up."""

    def close(self, *, parallel: bool) -> SessionRecord:
        """End it; with `parallel` no result depends on the order in which calls arrived."""


class Sessions(Protocol):
    """Opens sessions; all calls of it are made in the loop of the driver."""

    async def open(self, name: str, key: Key, sampling: Sampling, most_calls: int) -> ProgramSession:
        """A session whose noise `key` names, with what programs may not change of the sampling."""

    async def close(self) -> None:
        """End all sessions."""


def programs_of(
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


class ProgramHosts(Hosts):
    """Hosts of programs, all in the loop of the driver; the sessions end with them."""

    def __init__(
        self, programs: Mapping[str, ProgramEnv], sessions: Sessions, count: int, retries: int
    ) -> None:
        super().__init__(lambda: ProgramHost(programs, sessions, retries), count)
        self._sessions = sessions

    async def close(self) -> None:
        """End the programs, and the sessions."""
        try:
            await super().close()
        finally:
            await self._sessions.close()


class End(NamedTuple):
    """How an episode of a program ends; `ended` says why, where its status does not."""

    status: Status
    why: str | None = None
    result: Result = Result(0.0)
    ended: Ending = "env"


def ended(
    came: Result | ProgramFailedError,
    *,
    answered: bool,
    budget: Ending | None,
    refused: Requests | None,
    on_error: float,
) -> End:
    """How an episode ends.

    Args:
        came: what the program came to.
        answered: whether the model answered it at all.
        budget: that was used up when it ended.
        refused: its requests that were refused.
        on_error: reward of a program that raises after an answer.
    """
    failed = came if isinstance(came, ProgramFailedError) else None
    if budget is not None and (failed is None or failed.how != "fault"):
        result = came if answered and isinstance(came, Result) else Result(0.0)
        return End("ok", None, result, budget)
    if answered and isinstance(came, Result):
        return End("ok", None, came)
    if answered and failed is not None and failed.how == "raised":
        return End("ok", str(failed), Result(on_error), "fault")
    reasons = refused.refused if refused is not None else ()
    why = str(failed) if failed is not None else "the program ended without asking the model"
    if reasons and failed is None:
        why = "the program ended without an answer of the model"
    if reasons:
        why += f"; the gateway refused {sum(one.count for one in reasons)} of its requests, such as {reasons[0].what}"
    return End("env_error" if failed is None else failed.status, why)


class ProgramHost(Host):
    """Plays episodes of programs in processes; it lives in the loop of the driver.

    Args:
        programs: by tag.
        sessions: where their calls go.
        retries: further tries at an episode whose program failed.
    """

    def __init__(self, programs: Mapping[str, ProgramEnv], sessions: Sessions, retries: int) -> None:
        super().__init__()
        self._programs, self._sessions, self._retries = programs, sessions, retries
        self._tasks: set[asyncio.Task[Event]] = set()
        self._processes: dict[str, FunctionProcesses] = {}  # by tag

    def tell(self, message: Message) -> Awaitable[Event]:
        """The end of an episode that begins."""
        assert isinstance(message, Begin), "a program asks the model by itself"
        task: asyncio.Task[Event] = asyncio.ensure_future(self._play(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _play(self, begin: Begin) -> Event:
        failed: list[str] = []
        while True:
            trajectory = await self._try(begin.assignment, begin.sampling, len(failed))
            if trajectory.status in ("ok", "engine_error") or len(failed) >= self._retries:
                return Ended(begin.slot, trajectory, tuple(failed))
            failed.append(str(trajectory.error))

    async def _try(self, assignment: Assignment, sampling: Sampling, attempt: int) -> Trajectory:
        """One try at an episode."""
        place, program = assignment.place, self._programs[assignment.tag]
        name = f"{place.iteration}-{place.group}-{place.member}-{place.env_seed % 2**32:x}-{attempt}"
        key = Key(place.seed, (place.iteration, place.group, place.member))
        session = await self._sessions.open(name, key, sampling, program.config.max_steps)
        parallel = program.config.parallel
        came: Result | ProgramFailedError
        try:
            came = await self._result(assignment, session)
        except ProgramFailedError as error:
            came = error
        except BaseException:
            session.close(parallel=parallel)
            raise
        exchanged, requests, budget, failed = session.close(parallel=parallel)
        end = ended(
            came, answered=bool(exchanged), budget=budget, refused=requests, on_error=program.config.on_error
        )
        if failed is not None:
            exchanged, end = (), End("engine_error", str(failed))
        turns = [
            Turn(one.prompt, number, one.response, one.response, True, 0.0, anchor_of({}, one.prompt))
            for number, one in enumerate(exchanged)
        ]
        if turns:
            turns[-1] = replace(turns[-1], reward=end.result.reward)
        truncated = end.ended in ("calls", "context")
        return place.record(
            assignment.tag, end.status, end.why, end.ended, [one.call for one in exchanged], turns,
            success=end.result.success, terminated=end.status == "ok" and not truncated, truncated=truncated,
            requests=msgspec.UNSET if requests is None else requests,
        )  # fmt: skip

    async def _result(self, assignment: Assignment, session: ProgramSession) -> Result:
        """What a program comes to; one that asks on and on behind the end of its budget is ended.

        Raises:
            ProgramFailedError: it comes to no result.
        """
        task = self._programs[assignment.tag].task(assignment.place.env_seed)
        work = self._run(assignment.tag, task, session.variables)
        playing, asking_on = asyncio.ensure_future(work), asyncio.ensure_future(session.exhausted())
        try:
            await asyncio.wait((playing, asking_on), return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            raise ProgramFailedError("the program asked on and on though its budget is used up", "no result")
        finally:
            playing.cancel()
            asking_on.cancel()
            await asyncio.wait((playing, asking_on))

    async def _run(self, tag: str, task: Mapping[str, Any], variables: Mapping[str, str]) -> Result:
        """Call a function or run a command in a process that waits, or a new one.

        Raises:
            ProgramFailedError: it failed, was too slow or too loud, or gave no result.
        """
        config = self._programs[tag].config
        if tag not in self._processes:
            if config.function is None:
                arguments = config.command, config.folder, config.memory, config.output
                self._processes[tag] = FunctionProcesses(serve_command, arguments)
            else:
                limit = partial(limit_memory, mebibytes=config.memory)
                called = config.function, config.folder
                self._processes[tag] = FunctionProcesses(serve_function, called, limit)
        given = json.dumps(task) if config.function is None else task
        try:
            answer = await self._processes[tag].ask([given, dict(variables)], config.timeout)
        except TimeoutError:
            what = "program did not end" if config.function is None else "function did not return"
            raise ProgramFailedError(
                f"the {what} within {config.timeout:g} s (timeout)", status="timeout"
            ) from None
        return command_result(*answer) if config.function is None else Result(*answer)

    def pids(self) -> list[int]:
        """The worker processes that wait for an episode."""
        return [pid for processes in self._processes.values() for pid in processes.pids()]

    async def close_envs(self) -> None:
        """End the programs that run."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    def end(self) -> None:
        """End the worker processes."""
        for processes in self._processes.values():
            processes.end()


def command_result(status: int, output: str, errors: str) -> Result:
    """The result in the last line of a command's output.

    >>> command_result(0, '{"reward": 0.5}', "")
    Result(reward=0.5, success=False)

    Args:
        status: with which it ended.
        output: its last line.
        errors: the last line of its standard error.

    Raises:
        ProgramFailedError: it failed, or that is no result.
    """
    if status:
        raise ProgramFailedError(
            f"the program ended with status {status}: {(errors or 'nothing on standard error')[:300]}",
            "fault" if status < 0 or status in KILLED else "raised",
        )
    try:
        value = json.loads(output)
        if isinstance(value, dict):
            return result_of(value)
    except (ValueError, RecursionError):
        pass
    raise ProgramFailedError(
        f'the last line must be JSON such as {{"reward": 1.0}}, got {output[:200]!r}', "no result"
    )
