"""Python functions that play episodes by asking the model, each in a worker process that plays many of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.core.data import MOST_REWARD
from shoal.core.errors import ShoalError, WorkerDiedError, with_frames
from shoal.core.workers import WorkerProcess, describe_exit

PARAMETERS = ("task", "base_url", "variables")
"""What a function may ask for; it names those that it takes."""


class FunctionFailedError(ShoalError):
    """A function raised, or its process died."""


class FunctionProcess:
    """A worker process that calls one function again and again; all calls of it are made in one loop.

    Args:
        process: from `start_function`.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self.pid = process.pid
        self._process = process

    async def call(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[float, bool]:
        """Reward and success of one episode; after an error the process is not used again.

        Raises:
            FunctionFailedError: the function raised, returned no reward, or its process died.
        """
        answer = await self.ask([task, dict(variables)])
        return answer[0], answer[1]

    async def ask(self, given: Any) -> Any:
        """What the process answers; after an error it is not used again.

        Raises:
            FunctionFailedError: it answers with text, which says what failed, or died.
        """
        pipe, loop = self._process.pipe, asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        number = pipe.fileno()
        loop.add_reader(number, _set, arrived)
        try:
            pipe.send_bytes(json.dumps(given).encode())
            await arrived
            answer = json.loads(pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            self._process.wait(1.0)
            how = describe_exit(self._process.exit_code)
            raise FunctionFailedError(f"the process of the function {how}") from None
        finally:
            loop.remove_reader(number)
        if isinstance(answer, str):
            raise FunctionFailedError(answer)
        return answer

    def end(self) -> None:
        """Kill it, with all that it started; may be called twice."""
        self._process.close()


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


async def start_function(name: str, folder: str | None) -> FunctionProcess:
    """A process for the function `module:name`.

    Args:
        name: of the function.
        folder: where it runs and its module is found; the current folder if not given.

    Raises:
        FunctionFailedError: no process can be started.
    """
    try:  # in a thread, since the first start of all takes a while, and the model answers in this loop
        process = await asyncio.to_thread(WorkerProcess, serve_function, (name, folder))
    except WorkerDiedError as error:
        raise FunctionFailedError(str(error)) from error
    return FunctionProcess(process)


def serve_function(pipe: Any, name: str, folder: str | None) -> None:
    """Be the process: answer each task with a reward and success, or with text that says what failed."""
    if folder is not None:
        os.chdir(folder)
    sys.path.insert(0, os.getcwd())
    function: Callable[..., Any] | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            task, variables = json.loads(pipe.recv_bytes())
            os.environ.update(variables)
            try:
                function = function or _load(name)
                answer: Any = _play(function, task, variables)
            except BaseException as error:  # the user's code may raise anything, `SystemExit` too
                answer = f"the function failed: {with_frames(error)}"
            pipe.send_bytes(json.dumps(answer).encode())


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function  # type: ignore[no-any-return]


def _play(function: Callable[..., Any], task: Any, variables: Mapping[str, str]) -> tuple[float, bool]:
    given = {"task": task, "base_url": variables["OPENAI_BASE_URL"], "variables": variables}
    signature = inspect.signature(function)
    wanted = {key: given[key] for key in PARAMETERS if key in signature.parameters}
    try:
        signature.bind(**wanted)
    except TypeError as error:
        raise TypeError(f"{error}; it may take {', '.join(PARAMETERS)}") from None
    value = function(**wanted)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return result_of(value)


async def _awaited(value: Any) -> Any:
    return await value


def result_of(value: Any) -> tuple[float, bool]:
    """Reward and success that a program or a function names; a reward of 1 or more is a success if it does not say so.

    >>> result_of(0.5), result_of({"reward": 0, "success": True})
    ((0.5, False), (0.0, True))

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
    return float(given), bool(given >= 1 if success is None else success)
