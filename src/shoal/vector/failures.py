"""What went wrong in an environment elsewhere, and the error that tells it: which env, where, doing what, why."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.core.processes import RemoteTraceback, describe_exit

MAX_REPR = 300


@dataclass
class Failure:
    """A failure as it crosses the process border: only text and an exception that surely unpickles."""

    env: int
    doing: str  # "step", "reset", "make", "call", …
    summary: str  # one line
    trace: str = ""  # where it happened
    action: str | None = None
    pid: int | None = None
    exception: BaseException | None = None
    kind: str = "exception"  # or "died", "timeout"
    ending: tuple[Any, dict[str, Any]] | None = None
    """Last observation and info of an episode that had ended, reward and flags in the buffers, before the failure."""


def short(value: Any) -> str:
    """A `repr` that never raises and never floods the screen."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else text[: MAX_REPR - 1] + "…"


def from_exception(
    env: int, doing: str, error: BaseException, action: Any = None, pid: int | None = None
) -> Failure:
    """A failure from an exception being handled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = short(str(error))[1:-1] if _str_fails(error) else str(error)
    return Failure(
        env=env,
        doing=doing,
        summary=f"{type(error).__name__}: {message}" if message else type(error).__name__,
        trace=trace,
        action=None if action is None else short(action),
        pid=pid,
        exception=error,
    )


def portable(failure: Failure) -> Failure:
    """The same failure with its exception dropped unless it survives pickling, whatever its class does."""
    try:
        data = pickle.dumps(failure.exception)
        pickle.loads(data)
    except BaseException:
        failure.exception = None
    return failure


def died(
    env: int, doing: str, action: Any, pid: int | None, exit_code: int | None, trace: str = ""
) -> Failure:
    """A failure for a worker process that is gone."""
    summary = f"its worker process {describe_exit(exit_code)}"
    return Failure(env, doing, summary, trace, None if action is None else short(action), pid, None, "died")


def timed_out(env: int, doing: str, action: Any, pid: int | None, seconds: float, trace: str = "") -> Failure:
    """A failure for an environment that did not come back in time."""
    summary = f"no answer within {seconds:g} s"
    return Failure(
        env, doing, summary, trace, None if action is None else short(action), pid, None, "timeout"
    )


def error_of(failure: Failure) -> WorkerError:
    """The exception to raise: a `WorkerError` that is also of the original type where classes allow it."""
    where = f" (pid {failure.pid})" if failure.pid is not None else ""
    acted = f" with action {failure.action}" if failure.action is not None else ""
    message = f"env {failure.env}{where} failed in {failure.doing}{acted}: {failure.summary}"
    base = {"died": WorkerDiedError, "timeout": WorkerTimeoutError}.get(failure.kind, WorkerError)
    error = _typed(base, failure.exception, message)
    original = failure.exception
    if original is not None:
        if failure.trace and original.__traceback__ is None:
            original.__cause__ = RemoteTraceback(failure.trace)
        error.__cause__ = original
    elif failure.trace:
        error.__cause__ = RemoteTraceback(failure.trace)
    return error


def _typed(base: type[WorkerError], original: BaseException | None, message: str) -> WorkerError:
    # `except ValueError` around a vector env must catch a ValueError of its envs, as with a plain loop.
    kind = type(original)
    if isinstance(original, Exception) and not isinstance(original, base):
        try:
            both: Any = type(
                f"{base.__name__}[{kind.__name__}]", (base, kind), {"__str__": lambda _: message}
            )
            error: WorkerError = both.__new__(both, message)
            error.args = (message,)
            return error
        except Exception:  # the classes do not go together: the plain error tells the same
            return base(message)
    return base(message)


def _str_fails(error: BaseException) -> bool:
    try:
        str(error)
    except Exception:
        return True
    return False


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if failures:
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {error_of(other)}")
        raise error
