"""Which backend suits an environment: measured on one of them, for a moment, before the others are made."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.executors import available_cpus
from shoal.vector.share import EnvFn

PROBE_SECONDS = 0.05
PROBE_STEPS = 300
HANDOVER = 10e-6
"""Seconds that a vector step with workers takes beyond its longest share."""
WRITE, READ = 0.4e-9, 0.1e-9
"""Seconds per byte to write memory that another core has just read, and to read what it has just written."""
WORTH_IT = 0.9
"""Workers are used when a vector step with them takes less than this part of the time without."""
WAITS = 0.5
"""A step that computes for less than this part of its time is waiting for something."""


@dataclass(frozen=True)
class StepCost:
    """What a step of one environment takes, by the clock and of the processor, in seconds."""

    wall: float
    cpu: float
    nbytes: int = 0  # of an observation

    @property
    def waits(self) -> bool:
        """Most of it is waiting, long enough for threads to pay."""
        return self.wall > 300e-6 and self.cpu < WAITS * self.wall


@dataclass(frozen=True)
class Plan:
    """Where the environments go: `workers` processes of `lanes` threads each, and a share for the caller."""

    backend: str  # "serial" or "process"
    workers: int = 0
    threads: bool = False
    caller_share: int = 0
    cost: StepCost | None = field(default=None, repr=False, compare=False)
    """What the plan was made for, where it was measured."""


def probe(fn: EnvFn) -> StepCost:
    """Make one environment, step it with random actions for a moment, and close it."""
    env = fn()
    try:
        actions = copy.deepcopy(env.action_space)
        actions.seed(0)
        obs, _ = env.reset(seed=0)
        best: list[tuple[float, float]] = []
        end = time.perf_counter() + PROBE_SECONDS
        while len(best) < PROBE_STEPS and (len(best) < 3 or time.perf_counter() < end):
            action = actions.sample()
            wall, cpu = time.perf_counter(), time.thread_time()
            obs, _, terminated, truncated, _ = env.step(action)
            copy.copy(obs)  # what a vector env does with it at least
            best.append((time.perf_counter() - wall, time.thread_time() - cpu))
            if terminated or truncated:
                env.reset()
    finally:
        env.close()
    best.sort()
    middle = best[: max(1, len(best) * 3 // 4)]  # without the outliers of a busy machine
    wall, cpu = (sum(times) / len(middle) for times in zip(*middle, strict=True))
    return StepCost(wall, cpu, _nbytes(obs))


def choose(cost: StepCost, n_envs: int, cpus: int | None = None) -> Plan:
    """The plan for `n_envs` environments of this cost.

    >>> choose(StepCost(1e-6, 1e-6), n_envs=4, cpus=2).backend
    'serial'
    >>> choose(StepCost(5e-3, 1e-5), n_envs=32, cpus=2)
    Plan(backend='process', workers=2, threads=True, caller_share=0)
    >>> choose(StepCost(2e-4, 2e-4), n_envs=32, cpus=2)
    Plan(backend='process', workers=1, threads=False, caller_share=16)
    """
    cpus = available_cpus() if cpus is None else cpus
    if n_envs == 1:
        return Plan("serial")
    if cost.waits:
        return Plan("process", workers=min(cpus, n_envs), threads=True)
    parts = min(cpus, n_envs)
    if parts == 1:
        return Plan("serial")
    alone = n_envs * cost.wall
    caller_share = min(range(1, n_envs // parts + 1), key=lambda share: _together(cost, n_envs, parts, share))
    if _together(cost, n_envs, parts, caller_share) > WORTH_IT * alone:
        return Plan("serial")
    return Plan("process", workers=parts - 1, caller_share=caller_share, cost=cost)


def _together(cost: StepCost, n_envs: int, parts: int, caller_share: int) -> float:
    """Seconds of one vector step when the caller steps `caller_share` envs and workers the others."""
    moved = n_envs - caller_share
    worker = -(-moved // (parts - 1)) * (cost.wall + cost.nbytes * WRITE)
    caller = caller_share * cost.wall
    return max(worker, caller) + HANDOVER + moved * cost.nbytes * READ


def carrying(cost: StepCost, moved: int, workers: int) -> float:
    """Seconds of a vector step that go into moving the observations of `moved` envs."""
    return -(-moved // workers) * cost.nbytes * WRITE + moved * cost.nbytes * READ


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_nbytes, value))
    return 8


def shares_of(env_fns: Sequence[EnvFn], plan: Plan) -> tuple[list[list[tuple[int, Sequence[EnvFn]]]], int]:
    """For each worker its lanes as (first env, functions), and where the caller's share begins."""
    n_envs = len(env_fns) - plan.caller_share
    cuts = [n_envs * k // plan.workers for k in range(plan.workers + 1)]
    shares: list[list[tuple[int, Sequence[EnvFn]]]] = []
    for k in range(plan.workers):
        lo, hi = cuts[k], cuts[k + 1]
        if plan.threads:
            shares.append([(i, env_fns[i : i + 1]) for i in range(lo, hi)])
        else:
            shares.append([(lo, env_fns[lo:hi])])
    return shares, n_envs


def even_cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """`n` things in contiguous parts whose sizes differ by at most one."""
    return list(itertools.pairwise(n * k // parts for k in range(parts + 1)))
