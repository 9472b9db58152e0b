"""`make_vec`: many environments behind one `gymnasium.vector.VectorEnv`, stepped where it is fastest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast

from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.executors import available_cpus
from shoal.vector.lanes import close
from shoal.vector.launch import StartMethod
from shoal.vector.multi_agent import MULTI_AGENT, is_multi_agent
from shoal.vector.native import make_native
from shoal.vector.opening import HANDOUT_PLACES, Parts, Rules, open_processes, open_serial, open_threads
from shoal.vector.plan import Plan, choose, probe
from shoal.vector.pool import VectorPool
from shoal.vector.results import Handouts
from shoal.vector.share import EnvFn
from shoal.vector.sources import Source, env_fns_of
from shoal.vector.standing import OnFailure
from shoal.vector.trial import pays

Backend = Literal["auto", "serial", "process", "thread", "ray", "native"]
BACKENDS = ("auto", "serial", "process", "thread", "ray", "native")
AUTORESET = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}


def make_vec(
    env: Source | Sequence[Source],
    num_envs: int | None = None,
    *,
    backend: Backend = "auto",
    num_workers: int | None = None,
    start_method: StartMethod | None = None,
    env_kwargs: dict[str, Any] | None = None,
    autoreset: str | AutoresetMode = "same_step",
    step_timeout: float | None = None,
    on_failure: OnFailure = "raise",
    max_restarts: int = 3,
    check_nan: bool = True,
    threads: bool = False,
    ring: int | None = None,
    copy_observations: bool | None = None,
    text_bytes: int = 2048,
) -> VectorPool:
    """Many environments as one vector environment.

    All backends but "native" give the same results for the same seeds.

    Args:
        env: the name of a shoal env, a Gymnasium id or spec, a class or function that makes an env, or a
            sequence of these for different environments.
        num_envs: how many; not needed for a sequence.
        backend: "serial" in the caller, "process" in worker processes, "thread" in threads of the caller,
            "ray" on a Ray cluster, "native" for the environment's own batch (another implementation: its
            episodes differ, and it refuses what it cannot honour), or "auto": one environment is tried for a
            moment and what suits it is taken (the caller steps a share of CPU-bound environments, so one that
            crashes takes it along; asking for restarts or a timeout keeps all of them in workers).
        num_workers: processes, threads or actors; default: one per core (with `step_timeout`: per env).
        start_method: "forkserver" (default), "spawn" or "fork".
        env_kwargs: passed to what makes each env.
        autoreset: "same_step", "next_step" or "disabled", as Gymnasium defines them.
        step_timeout: seconds that one step or reset of one env may take; a worker that takes longer is killed.
        on_failure: what an env's failure does: "raise" an error, "restart" what failed, or "mask" it out.
        max_restarts: per env, after which a failure raises.
        check_nan: a NaN reward or observation is a failure of its env.
        threads: in worker processes, one thread per env: for environments that wait (HTTP, browsers).
        ring: keep the last so many observations in place: `observation_ring()` shows them as one array
            `[ring, num_envs, ...]`, and what `step` returns is a view of it, valid for `ring - 1` more steps.
        copy_observations: return copies (default, without a ring) or views that the next step overwrites.
        text_bytes: room per env for text observations; longer text goes by message.

    Raises:
        UnknownNameError: for an env nobody registered.
        ConfigError: for what cannot run: too little memory, too many files, environments that do not pickle.
        WorkerError: when an environment cannot be made.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    if ring is not None and ring < 2:
        raise ValueError(f"ring must be at least 2, got {ring}")
    _check(backend, on_failure, step_timeout)
    if is_multi_agent(env):
        raise TypeError(f"make_vec takes environments of one agent; for {env!r} use {MULTI_AGENT}")
    if backend == "native":
        asked = {"num_workers": num_workers, "start_method": start_method, "step_timeout": step_timeout,
                 "on_failure": on_failure, "max_restarts": max_restarts, "threads": threads, "ring": ring,
                 "text_bytes": text_bytes}  # fmt: skip
        native = make_native(env, num_envs, env_kwargs=env_kwargs, autoreset=autoreset_mode(autoreset),
                             check_nan=check_nan, copy_observations=copy_observations, **asked)  # fmt: skip
        return cast(VectorPool, native)  # the same interface
    env_fns = env_fns_of(env, num_envs, env_kwargs)
    plan = _plan(env_fns, backend, num_workers, threads, step_timeout, on_failure)
    rules = Rules(autoreset_mode(autoreset), check_nan, on_failure, max_restarts, ring)
    shared = {"method": start_method or "forkserver", "text_bytes": text_bytes}
    parts = _open(env_fns, rules, plan, num_workers, step_timeout, shared)
    copies = ring is None if copy_observations is None else copy_observations
    pool = VectorPool(**parts, copy_observations=copies)
    if parts["backend"] is None and copies and pool.slots.ring == HANDOUT_PLACES:
        pool.handouts = Handouts(pool.slots)
    return pool


def _check(backend: str, on_failure: str, step_timeout: float | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"no vector backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if on_failure not in ("raise", "restart", "mask"):
        raise ValueError(f"on_failure must be 'raise', 'restart' or 'mask', got {on_failure!r}")
    if step_timeout is not None and step_timeout <= 0:
        raise ValueError(f"step_timeout must be positive, got {step_timeout}")
    if backend == "serial" and step_timeout is not None:
        raise ConfigError("the caller cannot interrupt itself: step_timeout needs backend='process'")


def _open(
    env_fns: Sequence[EnvFn],
    rules: Rules,
    plan: Plan,
    num_workers: int | None,
    step_timeout: float | None,
    shared: dict[str, Any],
) -> Parts:
    """What the plan says; where it was made from a guess of what workers gain, that is tried first."""
    if plan.backend == "ray":
        from shoal.vector.remote import open_ray

        return open_ray(env_fns, rules, num_workers=num_workers, step_timeout=step_timeout)
    if plan.backend == "thread":
        return open_threads(env_fns, rules, num_workers=num_workers, step_timeout=step_timeout)
    if plan.backend == "process":
        parts = open_processes(env_fns, rules, plan=plan, step_timeout=step_timeout, **shared)
        if plan.cost is None or pays(_workers_of(parts), plan.cost, len(env_fns)):
            return parts
        close(parts["lanes"], parts["backend"], os.getpid())
    return open_serial(env_fns, rules)


def _workers_of(parts: Parts) -> list[Any]:
    return [lane for lane in parts["lanes"] if not lane.inline]


def _plan(
    env_fns: Sequence[EnvFn],
    backend: str,
    num_workers: int | None,
    threads: bool,
    step_timeout: float | None,
    on_failure: str,
) -> Plan:
    n_envs = len(env_fns)
    if backend in ("serial", "thread", "ray"):
        return Plan(backend)
    guarded = step_timeout is not None or on_failure != "raise"
    if backend == "auto" and num_workers is None and not threads and not guarded:
        return choose(probe(env_fns[0]), n_envs)
    default = n_envs if step_timeout is not None and not threads else available_cpus()
    return Plan("process", workers=min(num_workers or default, n_envs), threads=threads)


def autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Gymnasium's mode for a name."""
    if isinstance(mode, AutoresetMode):
        return mode
    try:
        return AUTORESET[mode]
    except KeyError:
        raise ValueError(f"no autoreset mode {mode!r}.{did_you_mean(mode, AUTORESET)}") from None
