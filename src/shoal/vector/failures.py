"""What went wrong in an environment elsewhere, the error that tells it, and what stands in its place.

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
from typing import Any, Literal, NamedTuple

import gymnasium

from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError, where_it_hangs, with_frames
from shoal.core.processes import RemoteTraceback
from shoal.core.seeding import derive_seed
from shoal.vector.values import Told


@dataclass
class Failure:
    """What went wrong in an env; it crosses the border of a process, whatever its exception is."""

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
            data = pickle.dumps(self.exception)
            pickle.loads(data)
        except BaseException:
            data = pickle.dumps(None)
        return {**vars(self), "exception": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An exception of a class that only its worker knows is told by its text."""
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


def error_of(failure: Failure) -> WorkerError:
    """The exception to raise: a `WorkerError` that is also of the original type where classes allow it."""
    where = f" (pid {failure.pid})" if failure.pid is not None else ""
    acted = f" with action {failure.action}" if failure.action is not None else ""
    limit = "make_timeout, else step_timeout" if failure.doing == "make" else "step_timeout"
    named = f" ({limit})" if failure.kind == "timeout" else ""
    message = f"env {failure.env}{where} failed in {failure.doing}{acted}: {failure.summary}{named}"
    base = {"died": WorkerDiedError, "timeout": WorkerTimeoutError}.get(failure.kind, WorkerError)
    error = _typed(base, failure.exception, message)
    told = {"worker_restarted": True, "worker_error": message, "worker_env": failure.env}
    told["worker_summary"] = failure.summary
    error.told = {**told, "worker_timeout": True} if failure.kind == "timeout" else told
    original = failure.exception
    if isinstance(original, BaseException):
        if failure.trace and original.__traceback__ is None:
            original.__cause__ = RemoteTraceback(failure.trace)
        error.__cause__ = original
    elif failure.trace:
        error.__cause__ = RemoteTraceback(failure.trace)
    return error


def _typed(base: type[WorkerError], original: Any, message: str) -> WorkerError:
    # `except ValueError` around a vector env must catch a ValueError of its envs, as with a plain loop.
    # (But for those that end whatever loop or generator they come by: there it would be lost.)
    if not isinstance(original, Exception) or isinstance(original, base | StopIteration | StopAsyncIteration):
        return base(message)
    return _of_both(base, type(original), message)


def _of_both(base: type[WorkerError], kind: type[BaseException], message: str) -> WorkerError:
    """An error of two classes; it can be sent to another process, as the first one where the second cannot."""

    def reduced(error: WorkerError) -> Any:
        state = {key: value for key, value in vars(error).items() if key == "__notes__"}
        try:
            pickle.dumps(kind)
        except Exception:
            return base, (message,), state
        return _of_both, (base, kind, message), state

    try:
        told = {"__str__": lambda _: message, "__reduce__": reduced}
        both: Any = type(f"{base.__name__}[{kind.__name__}]", (base, kind), told)
        error: WorkerError = both.__new__(both, message)
        error.args = (message,)
        return error
    except Exception:  # the classes do not go together: the plain error tells the same
        return base(message)


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if failures:
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {error_of(other)}")
        raise error


# --- what is done about it
OnFailure = Literal["raise", "restart", "mask"]
DEALT_WITH = {"restart": "the environment is restarted", "mask": "the environment is left out"}
"""What an env's failure does, in messages."""


class Owed(NamedTuple):
    """What an env's next step reports instead of being taken: an end that the caller has not seen yet."""

    reward: float
    terminated: bool
    truncated: bool
    told: Told


MOST_AT_ONCE = 3
"""Restarts of an env in one operation, whatever `max_restarts` says: it may be that it can never begin."""


def restart_seed(seed: int | None, replaced: int) -> int | None:
    """The seed of an env's first episode after it was replaced so often; 31 bits, which all generators take."""
    return None if seed is None else derive_seed(seed, "restart", replaced) >> 32


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Stands where an env was that is left out: it is made in its place and never stepped."""

    observation_space = action_space = gymnasium.spaces.Discrete(1)

    def close(self) -> None:
        """Nothing to close."""
