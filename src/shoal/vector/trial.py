"""Whether workers that are started already make vector steps faster here and now, before anything depends on it.

A count of cores promises nothing: others may keep them busy, and then each wake-up of a worker takes longer than
a step of a cheap environment. So worker and caller do what a step would cost, without touching an environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.vector.plan import WORTH_IT, StepCost, carrying
from shoal.vector.timing import turn_over

TRIAL_SECONDS = 0.05
LONGEST = 5e-3
"""Seconds of a vector step from which waking a worker costs little in comparison: no trial then."""
LEAST = 8
"""Rounds of a trial, however long they take."""


class Busy(Protocol):
    """A lane of a worker that can be kept busy."""

    count: int

    def start_trial(self, rounds: int) -> None:
        """Begin to be busy."""

    def finish(self, timeout: float | None = None) -> object:
        """Wait until it is no longer."""


def pays(
    lanes: Sequence[Busy],
    cost: StepCost,
    n_envs: int,
    *,
    work: Callable[[int], None] = turn_over,
    now: Callable[[], float] = time.perf_counter,
) -> bool:
    """Whether stepping with these workers takes clearly less time than the caller stepping all itself.

    Args:
        lanes: of the workers.
        cost: of one env's step.
        n_envs: with the caller's own.
        work: what the caller does for so many rounds.
        now: the clock.
    """
    alone = n_envs * cost.wall
    if alone > LONGEST:
        return True
    per_second = _rounds_per_second(work, now)
    per_env = cost.wall * per_second
    own = n_envs - sum(lane.count for lane in lanes)
    shared: list[float] = []
    single: list[float] = []
    end = now() + TRIAL_SECONDS
    while len(shared) < LEAST or now() < end:
        start = now()
        for lane in lanes:
            lane.start_trial(int(per_env * lane.count))
        work(int(per_env * own))
        for lane in lanes:
            lane.finish()
        middle = now()
        work(int(per_env * n_envs))
        shared.append(middle - start)
        single.append(now() - middle)
    return _mean(shared) + carrying(cost, n_envs - own, len(lanes)) < WORTH_IT * _mean(single)


def _rounds_per_second(work: Callable[[int], None], now: Callable[[], float]) -> float:
    """How fast the caller works."""
    rounds = 2000
    best = 1.0
    for _ in range(5):
        start = now()
        work(rounds)
        best = min(best, now() - start)
    return rounds / best


def _mean(times: list[float]) -> float:
    """Without the first two, which wake up; all others count, for it is the rare long wait that costs."""
    return sum(times[2:]) / (len(times) - 2)
