"""What went wrong in an environment elsewhere, the error that tells it, and what is to be done about it.

What is done (give up, replace the env, leave it out from now on) is only decided here; the vector env carries it out.
A replaced environment shows it: its step is reported truncated with `info["worker_restarted"]`, so that no trajectory
can join two episodes.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gymnasium

from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.core.processes import RemoteTraceback
from shoal.core.seeding import derive_seed
from shoal.vector.values import Told

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
    kind: str = "exception"  # or "died", "timeout", "over" (the caller forgot a reset: the env is whole)
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
    try:
        message = str(error)
    except Exception as problem:
        message = f"its message raises {type(problem).__name__}"
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


def raise_first(failures: Sequence[Failure]) -> None:
    """Raise the first failure, with a note for each other one."""
    if failures:
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {error_of(other)}")
        raise error


# --- what is to be done
OnFailure = Literal["raise", "restart", "mask"]


class Owed(NamedTuple):
    """What an env's next step reports instead of being taken: an end that the caller has not seen yet."""

    reward: float
    terminated: bool
    truncated: bool
    told: Told


@dataclass(frozen=True)
class Decision:
    """What to do about some failures."""

    hurt: dict[int, Failure]  # envs that have to be made anew, and why
    masked: tuple[int, ...] = ()  # those of them that are left out from now on
    error: WorkerError | None = None  # or this is raised


MOST_AT_ONCE = 3
"""Restarts of an env in one operation, whatever `max_restarts` says: it may be that it can never begin."""


def decide(
    failures: Iterable[Failure],
    policy: OnFailure,
    blamed: Mapping[int, int],
    max_restarts: int,
    lost_with: Callable[[int], Sequence[int]],
    at_once: Mapping[int, int] | None = None,
) -> Decision:
    """What a policy says about these failures.

    Args:
        failures: one for each env that failed.
        policy: "restart" or "mask".
        blamed: how often each env failed, these failures included.
        max_restarts: how often one may.
        lost_with: the envs that are lost with one because its worker is; empty if it is not.
        at_once: how often each failed in this one operation, which gives up after `MOST_AT_ONCE` restarts.

    >>> failures = [Failure(2, "step", "no answer")]
    >>> sorted(decide(failures, "restart", {2: 1}, 3, lambda env: [2, 3]).hurt)
    [2, 3]
    >>> print(decide(failures, "restart", {2: 4}, 3, lambda env: []).error)
    env 2 failed in step: no answer
    """
    hurt: dict[int, Failure] = {}
    masked: list[int] = []
    named = {failure.env: failure for failure in failures}
    for env, failure in named.items():
        often = blamed[env] > max_restarts
        if policy == "restart" and (often or (at_once or {}).get(env, 0) > MOST_AT_ONCE):
            error = error_of(failure)
            times = f"{max_restarts} times (max_restarts)" if often else f"{MOST_AT_ONCE} times at once"
            error.add_note(f"env {env} was restarted {times} before this")
            return Decision({}, error=error)
        if policy == "mask":
            masked.append(env)
        hurt.update(dict.fromkeys(lost_with(env), failure))
    hurt.update(named)
    return Decision(hurt, tuple(masked))


def restart_seed(seed: int | None, replaced: int) -> int | None:
    """The seed of an env's first episode after it was replaced so often; 31 bits, which all generators take."""
    return None if seed is None else derive_seed(seed, "restart", replaced) >> 32


def told_of(failure: Failure) -> dict[str, Any]:
    """What the info of a replaced env says."""
    told = {"worker_restarted": True, "worker_error": str(error_of(failure))}
    return {**told, "worker_timeout": True} if failure.kind == "timeout" else told


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Stands where an env was that is left out: it is made in its place and never stepped."""

    observation_space = action_space = gymnasium.spaces.Discrete(1)

    def close(self) -> None:
        """Nothing to close."""
