"""`make_vec`: many environments behind one `gymnasium.vector.VectorEnv`, stepped where it is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.executors import available_cpus
from shoal.vector.lanes import InlineLane, Lane
from shoal.vector.launch import START_METHODS, StartMethod
from shoal.vector.plan import Plan, choose, even_cuts, probe, shares_of
from shoal.vector.pool import Description, OnFailure, VectorPool
from shoal.vector.process import ProcessBackend
from shoal.vector.results import RECYCLE_FROM, Handouts
from shoal.vector.share import EnvFn, Share
from shoal.vector.slots import Slots
from shoal.vector.sources import Source, env_fns_of
from shoal.vector.spaces import Layout, batch_action_space, batch_observation_space
from shoal.vector.threads import ThreadBackend
from shoal.vector.waiting import MAX_SPIN
from shoal.vector.worker import Attach

Backend = Literal["auto", "serial", "process", "thread", "ray"]
HANDOUT_PLACES = 5
BACKENDS = ("auto", "serial", "process", "thread", "ray")
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

    All backends give the same results for the same seeds.

    Args:
        env: the name of a shoal env, a Gymnasium id or spec, a class or function that makes an env, or a
            sequence of these for different environments.
        num_envs: how many; not needed for a sequence.
        backend: "serial" in the caller, "process" in worker processes, "thread" in threads of the caller,
            "ray" on a Ray cluster, or "auto": one environment is tried for a moment and what suits it is
            taken (the caller steps a share of CPU-bound environments, so one that crashes takes it along;
            asking for restarts or a timeout keeps all of them in workers).
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
    if backend not in BACKENDS:
        raise ValueError(f"no vector backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    if on_failure not in ("raise", "restart", "mask"):
        raise ValueError(f"on_failure must be 'raise', 'restart' or 'mask', got {on_failure!r}")
    if step_timeout is not None and step_timeout <= 0:
        raise ValueError(f"step_timeout must be positive, got {step_timeout}")
    if ring is not None and ring < 2:
        raise ValueError(f"ring must be at least 2, got {ring}")
    if backend == "serial" and step_timeout is not None:
        raise ConfigError("the caller cannot interrupt itself: step_timeout needs backend='process'")
    env_fns = env_fns_of(env, num_envs, env_kwargs)
    common: dict[str, Any] = {
        "autoreset": autoreset_mode(autoreset),
        "on_failure": on_failure,
        "max_restarts": max_restarts,
        "check_nan": check_nan,
        "ring": ring,
    }
    copies = ring is None if copy_observations is None else copy_observations
    plan = _plan(env_fns, backend, num_workers, threads, step_timeout, on_failure)
    if plan.backend == "ray":
        from shoal.vector.remote import open_ray

        parts = open_ray(env_fns, num_workers=num_workers, step_timeout=step_timeout, **common)
    elif plan.backend == "serial":
        parts = open_serial(env_fns, **common)
    elif plan.backend == "thread":
        parts = open_threads(env_fns, num_workers=num_workers, step_timeout=step_timeout, **common)
    else:
        parts = open_processes(
            env_fns,
            plan=plan,
            method=start_method or "forkserver",
            step_timeout=step_timeout,
            text_bytes=text_bytes,
            **common,
        )
    pool = VectorPool(**parts, copy_observations=copies)
    if plan.backend == "serial" and copies and pool.slots.ring == HANDOUT_PLACES:
        pool.handouts = Handouts(pool.slots)
    return pool


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


def open_processes(
    env_fns: Sequence[EnvFn],
    *,
    autoreset: AutoresetMode,
    plan: Plan | None = None,
    num_workers: int | None = None,
    method: str = "forkserver",
    step_timeout: float | None = None,
    text_bytes: int = 2048,
    check_nan: bool = True,
    on_failure: OnFailure = "raise",
    max_restarts: int = 3,
    ring: int | None = None,
    describe: Callable[[Description], Description] = lambda found: found,
) -> dict[str, Any]:
    """Worker processes (and perhaps a share for the caller), as the arguments of a `VectorPool`."""
    if method not in START_METHODS:
        raise ValueError(f"no start method named {method!r}.{did_you_mean(method, START_METHODS)}")
    if plan is None:
        plan = Plan("process", workers=min(num_workers or available_cpus(), len(env_fns)))
    shares, rest = shares_of(env_fns, plan)
    backend = ProcessBackend(shares, method)  # type: ignore[arg-type]
    own: list[Any] = []
    try:
        backend.start()
        own += [fn() for fn in env_fns[rest:]]  # while the workers make theirs
        description = describe(description_of([*backend.describe(), *own]))
        attach = Attach(
            len(env_fns),
            Layout.shared(description.observation_spaces),
            Layout.shared(description.action_spaces),
            n_lanes=sum(map(len, shares)),
            lane_numbers=[],
            ring=_ring(ring, on_failure),
            text_bytes=text_bytes,
            autoreset=autoreset,
            check_nan=check_nan,
            spin=MAX_SPIN,
        )
        slots, opened = backend.open(attach, step_timeout)
        lanes: list[Lane] = list(opened)
        if own:
            share = Share(env_fns[rest:], rest, slots, autoreset, check_nan=check_nan, envs=own)
            lanes.append(InlineLane(share))
    except BaseException:
        backend.close(0.0)
        for env in own:
            env.close()
        raise
    return _parts(lanes, slots, description, autoreset, on_failure, max_restarts, backend)


def open_serial(
    env_fns: Sequence[EnvFn],
    *,
    autoreset: AutoresetMode,
    check_nan: bool,
    on_failure: OnFailure,
    max_restarts: int,
    ring: int | None,
) -> dict[str, Any]:
    """All environments in the caller's own thread: the reference that the others equal."""
    envs = [fn() for fn in env_fns]
    description = description_of(envs)
    depth = _ring(ring, on_failure)
    if ring is None and on_failure == "raise" and autoreset is not AutoresetMode.DISABLED:
        depth = _handout_places(description)
    slots = _private_slots(description, depth)
    share = Share(env_fns, 0, slots, autoreset, check_nan=check_nan, envs=envs)
    return _parts([InlineLane(share)], slots, description, autoreset, on_failure, max_restarts, None)


def open_threads(
    env_fns: Sequence[EnvFn],
    *,
    num_workers: int | None,
    step_timeout: float | None,
    autoreset: AutoresetMode,
    check_nan: bool,
    on_failure: OnFailure,
    max_restarts: int,
    ring: int | None,
) -> dict[str, Any]:
    """Threads of the calling process with a share each; by default one per environment."""
    envs = [fn() for fn in env_fns]
    description = description_of(envs)
    slots = _private_slots(description, _ring(ring, on_failure))
    backend = ThreadBackend(step_timeout)
    cuts = even_cuts(len(envs), min(num_workers or len(envs), len(envs)))
    lanes = backend.lanes(env_fns, envs, cuts, slots, autoreset, check_nan)
    return _parts(lanes, slots, description, autoreset, on_failure, max_restarts, backend)


def _parts(
    lanes: Sequence[Lane],
    slots: Slots,
    description: Description,
    autoreset: AutoresetMode,
    on_failure: OnFailure,
    max_restarts: int,
    backend: Any,
) -> dict[str, Any]:
    return {
        "lanes": lanes,
        "slots": slots,
        "description": description,
        "autoreset": autoreset,
        "on_failure": on_failure,
        "max_restarts": max_restarts,
        "backend": backend,
    }


def _private_slots(description: Description, ring: int) -> Slots:
    observations = Layout.shared(description.observation_spaces)
    return Slots(
        len(description.observation_spaces), observations, Layout.shared(description.action_spaces), ring=ring
    )


def _handout_places(description: Description) -> int:
    """Places for large observations of one array; other observations are cheap to copy."""
    layout = Layout.shared(description.observation_spaces)
    large = layout.is_leaf and layout.leaves[0].nbytes * len(description.observation_spaces) >= RECYCLE_FROM
    return HANDOUT_PLACES if layout.fixed and large else 1


def _ring(ring: int | None, on_failure: str) -> int:
    # What is replaced must still show its last observation, so one step back is kept.
    return ring or (1 if on_failure == "raise" else 2)


def description_of(envs: Sequence[Any]) -> Description:
    """Spaces and metadata of environments, or of what workers say about theirs."""
    observation_spaces = [env.observation_space for env in envs]
    action_spaces = [env.action_space for env in envs]
    return Description(
        observation_spaces,
        action_spaces,
        batch_observation_space(observation_spaces)[1],
        batch_action_space(action_spaces),
        dict(envs[0].metadata),
        envs[0].render_mode,
        envs[0].spec,
    )


def autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Gymnasium's mode for a name."""
    if isinstance(mode, AutoresetMode):
        return mode
    try:
        return AUTORESET[mode]
    except KeyError:
        raise ValueError(f"no autoreset mode {mode!r}.{did_you_mean(mode, AUTORESET)}") from None
