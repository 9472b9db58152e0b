"""Functions and commands of a user, run in worker processes that end with this one.

A worker process calls one function again and again, or runs one command after another and ends what it left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import numbers
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil

from shoal.core.data import MOST_REWARD, Status
from shoal.core.errors import EnvError, WorkerDiedError, whole_characters, with_frames
from shoal.core.streams import framed, received, streams_of
from shoal.core.workers import WorkerProcess, ended_how, kill_descendants
from shoal.envs.catalogue import function_named

PARAMETERS = ("task", "base_url", "variables")
"""What a function may ask for; it names those that it takes."""
MOST_OUTPUT = 1 << 20
"""Bytes at the end of a command's output in which its last line is looked for."""
LOOK_SECONDS = 0.5
"""Between two looks at how much a command has printed."""

Failing = Literal["raised", "no result", "fault"]
"""How a program comes to no result: it raises, ends by itself without a reward, or dies, is ended, or never runs."""


class ProgramFailedError(EnvError):
    """A program that came to no result; `status` is that of its episode where it does not count."""

    def __init__(self, text: str, how: Failing = "fault", status: Status = "env_error") -> None:
        super().__init__(whole_characters(text))
        self.how: Failing = how
        self.status: Status = status


class Result(NamedTuple):
    """The result of a program."""

    reward: float
    success: bool = False


class FunctionProcesses:
    """Worker processes that answer one question after another; one that fails or is too slow is ended.

    Args:
        serve: what each of them does, called with its pipe and `args`.
        args: of `serve`.
        started: called with the process id of each.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        args: tuple[Any, ...],
        started: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._serve, self._args, self._started = serve, args, started
        self._idle: list[WorkerProcess] = []

    async def ask(self, given: Any, seconds: float) -> Any:
        """What a process that is free, or a new one, answers to JSON values; all calls are made in one loop.

        Raises:
            TimeoutError: it does not answer within so many seconds.
            ProgramFailedError: it answers with `{how: text}`, which says what failed; or it died, or cannot be started.
        """
        process = self._idle.pop() if self._idle else None
        try:
            async with asyncio.timeout(seconds):
                if process is None:  # in a thread, since the first start of all takes a while
                    process = await asyncio.to_thread(WorkerProcess, self._serve, self._args)
                    self._started(process.pid)
                answer = await _answer_of(process, given)
        except BaseException as error:
            if process is not None:
                process.close()
            if isinstance(error, WorkerDiedError):
                raise ProgramFailedError(str(error)) from error
            raise
        self._idle.append(process)
        return answer

    def pids(self) -> list[int]:
        """Those that are free."""
        return [process.pid for process in self._idle]

    def end(self) -> None:
        """Kill those that are free, with all that they started; may be called twice."""
        while self._idle:
            self._idle.pop().close()


async def _answer_of(process: WorkerProcess, given: Any) -> Any:
    reader, writer = await streams_of(process.pipe)
    try:
        writer.write(framed(json.dumps(given).encode()))
        answer = json.loads(await received(reader))
    except (OSError, EOFError) as error:
        raise ProgramFailedError(f"the process of the function {ended_how(process)}") from error
    finally:
        writer.transport.abort()
    if isinstance(answer, dict):
        ((how, text),) = answer.items()
        raise ProgramFailedError(text, how)
    return answer


def serve_function(pipe: Any, name: str, folder: str | None) -> None:
    """Be the process: answer each task with a reward and success, or with what failed as `{how: text}`."""
    if folder is not None:
        os.chdir(folder)
    sys.path.insert(0, os.getcwd())
    function: Callable[..., Any] | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            task, variables = json.loads(pipe.recv_bytes())
            os.environ.update(variables)
            answer: Any
            try:
                function = function or function_named(name, "the function")
                value = _play(function, task, variables)
            except BaseException as error:  # the user's code may raise anything, `SystemExit` too
                answer = {"raised": f"the function failed: {with_frames(error)}"}
            else:
                try:
                    answer = result_of(value)
                except Exception as error:  # what it returned is the user's, too
                    answer = {"no result": f"the function failed: {with_frames(error)}"}
            pipe.send_bytes(json.dumps(answer).encode())


def _play(function: Callable[..., Any], task: Any, variables: Mapping[str, str]) -> Any:
    given = {"task": task, "base_url": variables["OPENAI_BASE_URL"], "variables": variables}
    signature = inspect.signature(function)
    wanted = {key: given[key] for key in PARAMETERS if key in signature.parameters}
    try:
        signature.bind(**wanted)
    except TypeError as error:
        raise TypeError(f"{error}; it may take {', '.join(PARAMETERS)}") from None
    value = function(**wanted)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def serve_command(
    pipe: Any,
    words: Sequence[str],
    folder: str | None = None,
    memory: int | None = None,
    most: int | None = None,
) -> None:
    """Be the process: run a command on each text, and answer `[status, last line, last line of its errors]`.

    What failed otherwise is answered as `{how: text}`.

    Args:
        pipe: where texts come from, each with variables for the command's environment.
        words: the command; `{python}` stands for this Python.
        folder: where it runs.
        memory: MiB of address space that it may have.
        most: bytes that it may print.
    """
    words = [sys.executable if word == "{python}" else word for word in words]
    with contextlib.suppress(EOFError, OSError):
        while True:
            given, variables = json.loads(pipe.recv_bytes())
            answer: Any
            try:
                answer = _run(words, given, {**os.environ, **variables}, folder, memory, most)
            except OSError as error:
                answer = {"fault": f"{words[0]} cannot be started: {error}"}
            except ProgramFailedError as error:
                answer = {error.how: str(error)}
            pipe.send_bytes(json.dumps(answer).encode())


def _run(
    words: Sequence[str],
    given: str,
    environ: Mapping[str, str],
    folder: str | None,
    memory: int | None,
    most: int | None,
) -> tuple[int, str, str]:
    with contextlib.ExitStack() as files:  # and no pipes, which others that it started may keep open
        task, output, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        task.write(f"{given}\n".encode())
        task.seek(0)
        process = subprocess.Popen(words, stdin=task, stdout=output, stderr=errors, cwd=folder, env=environ)
        try:
            limit_memory(process.pid, memory)
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
                if most is not None and os.fstat(output.fileno()).st_size > most:
                    raise ProgramFailedError(f"the program printed more than {most} bytes (output)")
                if process.returncode is None and os.fstat(errors.fileno()).st_size > MOST_OUTPUT:
                    os.ftruncate(errors.fileno(), 0)  # the disk is not for a log without end
        finally:
            _end_others()
            process.wait()
        return process.returncode, _last_line(output), _last_line(errors)


def _end_others() -> None:
    """Kill all that this process started, and what is left of its group."""
    kill_descendants(os.getpid())
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != os.getpid() and os.getpgid(pid) == os.getpgid(0):
                os.kill(pid, signal.SIGKILL)


def _last_line(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_OUTPUT))
    text: str = file.read().decode(errors="replace").strip()
    return (text.splitlines() or [""])[-1]


def limit_memory(pid: int, mebibytes: int | None) -> None:
    """Limit the address space of a process, and of those that it starts.

    Raises:
        ProgramFailedError: it cannot be limited.
    """
    if mebibytes is None:
        return
    try:
        import resource

        resource.prlimit(pid, resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        raise ProgramFailedError(
            "memory: this system cannot limit the memory of a process; leave it out"
        ) from None
    except (OSError, ValueError) as error:
        raise ProgramFailedError(f"memory: the limit cannot be set: {error}") from error


def result_of(value: Any) -> Result:
    """Reward and success that a program or a function names; a reward of 1 or more is a success if it does not say so.

    >>> result_of(0.5), result_of({"reward": 0, "success": True})
    (Result(reward=0.5, success=False), Result(reward=0.0, success=True))

    Raises:
        ValueError: it is no result.
    """
    named = value if isinstance(value, Mapping) else {"reward": value}
    given: Any = named.get("reward")
    success = named.get("success")
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not (is_number and abs(given) <= MOST_REWARD):
        raise ValueError(f'the result must be a reward or such as {{"reward": 1.0}}, got {value!r:.200}')
    if not isinstance(success, numbers.Real | np.bool_ | None):
        raise ValueError(f"success must be true or false, got {success!r:.200}")
    return Result(float(given), bool(given >= 1 if success is None else success))
