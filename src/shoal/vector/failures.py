"""Failures of environments in workers: the record, the error that is raised for it, and what replaces the result.

A replaced environment shows it: its step is reported truncated with `info["worker_restarted"]`, so that no trajectory
can join two episodes.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium

from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError, where_it_hangs, with_frames
from shoal.core.seeding import derive_seed
from shoal.core.workers import RemoteTraceback, dumps


@dataclass
class Failure:
    """A failure of an env; it can be sent between processes, whatever its exception is."""

    env: int
    doing: str  # "step", "reset", "make", "call", …
    summary: str  # one line
    trace: str = ""  # where it happened
    action: str | None = None
    pid: int | None = None
    exception: BaseException | None = None
    kind: str = "exception"  # or "died", "timeout", "over" (the caller forgot a reset: the env is whole)
    ending: tuple[Any, dict[str, Any]] | None = None
    """Last observation and info of an episode that had ended, reward and flags in the buffers, before the failure."""

    def __getstate__(self) -> dict[str, Any]:
        """With the exception as a pickle of its own, or dropped where it does not survive that."""
        try:
            data = dumps(self.exception)
            pickle.loads(data)
        except BaseException:
            data = pickle.dumps(None)
        return {**vars(self), "exception": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An exception of a class that only its worker knows is shown by its text."""
        vars(self).update(state, exception=None)
        with contextlib.suppress(Exception):
            self.exception = pickle.loads(state["exception"])


def from_exception(env: int, doing: str, error: BaseException, pid: int | None = None) -> Failure:
    """A failure from an exception being handled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(env, doing, with_frames(error), trace, None, pid, error)


def where_it_was(stack: str) -> str:
    r"""The lines of the user's own code in the text of a stack; of several threads, the first that has some.

    >>> where_it_was('Thread 0x1 (most recent call first):\n  File "bad.py", line 18 in _advance')
    ' (bad.py:18 in _advance)'
    """
    for thread in re.split(r"^(?=Thread|Current thread)", stack, flags=re.MULTILINE):
        found = re.findall(r'^ *File "(.+)", line (\d+),? in (.+)$', thread, re.MULTILINE)
        frames = [traceback.FrameSummary(file, int(line), name, line="") for file, line, name in found]
        if where := where_it_hangs(reversed(frames) if "most recent call first" in thread else frames):
            return where
    return ""


def describe(failure: Failure) -> str:
    """The failure in one line."""
    where = f" (pid {failure.pid})" if failure.pid is not None else ""
    acted = f" with action {failure.action}" if failure.action is not None else ""
    limit = "make_timeout, else step_timeout" if failure.doing == "make" else "step_timeout"
    named = f" ({limit})" if failure.kind == "timeout" else ""
    return f"env {failure.env}{where} failed in {failure.doing}{acted}: {failure.summary}{named}"


def reported(failure: Failure) -> dict[str, Any]:
    """The infos that a replaced environment reports about its failure."""
    info = {"worker_restarted": True, "worker_error": describe(failure), "worker_env": failure.env}
    info["worker_summary"] = failure.summary
    return {**info, "worker_timeout": True} if failure.kind == "timeout" else info


def error_of(failure: Failure) -> Exception:
    """The exception to raise: the env's own, with a note that names the env; of a death or a hang a `WorkerError`."""
    original, message = failure.exception, describe(failure)
    # Those that end a loop or generator would be lost there.
    if not isinstance(original, Exception) or isinstance(original, StopIteration | StopAsyncIteration):
        return worker_error_of(failure)
    if message not in getattr(original, "__notes__", ()):
        original.add_note(message)
    if failure.trace and original.__traceback__ is None and original.__cause__ is None:
        original.__cause__ = RemoteTraceback(failure.trace)
    return original


def worker_error_of(failure: Failure) -> WorkerError:
    """The failure as an error of shoal's, caused by the env's own."""
    kinds = {"died": WorkerDiedError, "timeout": WorkerTimeoutError}
    error = kinds.get(failure.kind, WorkerError)(describe(failure))
    error.details = reported(failure)
    error.__cause__ = failure.exception or (RemoteTraceback(failure.trace) if failure.trace else None)
    return error


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if failures:
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {describe(other)}")
        raise error


# --- policies
OnFailure = Literal["raise", "restart", "mask"]
WHAT_IS_DONE = {"restart": "the environment is restarted", "mask": "the environment is left out"}
"""What an env's failure does, in messages."""


MOST_AT_ONCE = 3
"""Restarts of an env in one operation, whatever `max_restarts` says: it may be that it can never begin."""


def restart_seed(seed: int | None, replaced: int) -> int | None:
    """The seed of an env's first episode after it was replaced so often; 31 bits, which all generators take."""
    return None if seed is None else derive_seed(seed, "restart", replaced) >> 32


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Placeholder for an env that is masked out; it is never stepped."""

    observation_space = action_space = gymnasium.spaces.Discrete(1)

    def close(self) -> None:
        """Nothing to close."""
