"""What is to be done about environments that failed: give up, replace them, or leave them out from now on.

Only decisions are made here; the vector env carries them out. A replaced environment shows it: its step is reported
truncated with `info["worker_restarted"]`, so that no trajectory can join two episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gymnasium

from shoal.core.errors import WorkerError
from shoal.core.seeding import derive_seed
from shoal.vector.failures import Failure, error_of
from shoal.vector.infos import Told

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


def decide(
    failures: Iterable[Failure],
    policy: OnFailure,
    blamed: Mapping[int, int],
    max_restarts: int,
    lost_with: Callable[[int], Sequence[int]],
) -> Decision:
    """What a policy says about these failures.

    Args:
        failures: one for each env that failed.
        policy: "restart" or "mask".
        blamed: how often each env failed, these failures included.
        max_restarts: how often one may.
        lost_with: the envs that are lost with one because its worker is; empty if it is not.

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
        if policy == "restart" and blamed[env] > max_restarts:
            error = error_of(failure)
            error.add_note(f"env {env} was restarted {max_restarts} times (max_restarts) before this")
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
    return {"worker_restarted": True, "worker_error": str(error_of(failure))}


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Stands where an env was that is left out: it is made in its place and never stepped."""

    observation_space = action_space = gymnasium.spaces.Discrete(1)

    def close(self) -> None:
        """Nothing to close."""
