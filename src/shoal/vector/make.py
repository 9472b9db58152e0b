"""`make_vec`: many environments behind one `gymnasium.vector.VectorEnv`, stepped where it is fastest."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.executors import available_cpus
from shoal.core.processes import START_METHODS, StartMethod, files_told
from shoal.envs.catalogue import EnvFn, Source, Wrapper, resolve
from shoal.vector.buffers import HANDOUTS, RECYCLE_FROM, Buffers
from shoal.vector.env_group import Trial, be_busy
from shoal.vector.failures import OnFailure, raise_first
from shoal.vector.multi_agent import MULTI_AGENT, is_multi_agent
from shoal.vector.native import make_native
from shoal.vector.process import Backend, Limits, ProcessBackend, ThreadBackend, Worker, replies_of
from shoal.vector.values import Layout, batched, limit, whole
from shoal.vector.vector_env import Description, VectorPool, close_all, distinct
from shoal.vector.worker import Attach, Make

BackendName = Literal["auto", "serial", "process", "thread", "ray", "native"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
AUTORESET = {mode.name.lower(): mode for mode in AutoresetMode}
TEXT_BYTES = 2048


def make_vec(
    env: Source | Sequence[Source],
    num_envs: int | None = None,
    *,
    backend: BackendName = "auto",
    num_workers: int | None = None,
    start_method: StartMethod | None = None,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    autoreset: str | AutoresetMode = "same_step",
    step_timeout: float | None = None,
    make_timeout: float | None = None,
    on_failure: OnFailure = "raise",
    max_restarts: int = 3,
    check_nan: bool = True,
    threads: bool = False,
    ring: int | None = None,
    copy_observations: bool | None = None,
    text_bytes: int = TEXT_BYTES,
    ray_options: dict[str, Any] | None = None,
) -> VectorPool:
    """Many environments as one vector environment.

    All backends but "native" give the same results for the same seeds. An environment is made, stepped and closed
    in one thread.

    Args:
        env: the name of a shoal env, a Gymnasium id or spec, "module:Id-v0", "module:Class", a class or function
            that makes an env, or a sequence of these for different environments.
        num_envs: how many; not needed for a sequence.
        backend: "serial" in the caller, "process" in worker processes, "thread" in threads of the caller,
            "ray" on a Ray cluster, "native" for the environment's own batch (another implementation: its
            episodes differ, and it refuses what it cannot honour), or "auto": one environment is tried for a
            moment and what suits it is taken (the caller steps a share of CPU-bound environments, so one that
            crashes takes it along; asking for restarts or a timeout keeps all of them in workers).
        num_workers: processes, threads or actors; default: one per core (with `step_timeout`: per env; with
            `threads`: at least one per eight envs).
        start_method: of worker processes: "forkserver" (default), "spawn" or "fork".
        env_kwargs: passed to what makes each env.
        wrappers: put around each env, the first innermost: callables from env to env, or "module:Name".
        autoreset: "same_step", "next_step" or "disabled", as Gymnasium defines them.
        step_timeout: seconds that one step, reset or call of one env may take; a worker that takes longer is killed.
        make_timeout: seconds that making one env may take; default: `step_timeout`.
        on_failure: what an env's failure does: "raise" an error, "restart" what failed, or "mask" it out; once all are
            masked out, stepping and resetting them raises.
        max_restarts: per env, after which a failure raises; as does a fourth failure in one operation.
        check_nan: a reward that is NaN or infinite, or an observation with NaN, is a failure of its env.
        threads: in worker processes, one thread per env: for environments that wait (HTTP, browsers).
        ring: keep the last so many observations in place: `observation_ring()` shows them as one array
            `[ring, num_envs, ...]`, and what `step` returns is a view of it, valid for `ring - 1` more steps.
        copy_observations: return copies (default, without a ring) or views that the next step overwrites. By default
            the serial backend hands large observations over where they were written: no step overwrites them, but
            what the caller writes into the latest is seen in `observations()`, and by a masked reset of others; True
            always copies.
        text_bytes: of worker processes: room per env for text observations; longer text goes by message.
        ray_options: of the actors, such as `{"num_cpus": 1, "resources": {...}}`.

    Raises:
        UnknownNameError: for an env nobody registered.
        ConfigError: for what cannot run: too little memory, too many files, environments that do not pickle,
            an argument that this backend has no use for.
        WorkerError: when an environment cannot be made; it says which.
    """
    if is_multi_agent(env):
        raise TypeError(f"make_vec takes environments of one agent; for {env!r} use {MULTI_AGENT}")
    options = Options(
        backend, num_workers=num_workers, start_method=start_method, autoreset=autoreset_mode(autoreset),
        step_timeout=step_timeout, make_timeout=make_timeout, on_failure=on_failure, max_restarts=max_restarts,
        check_nan=check_nan, threads=threads, ring=ring, copy_observations=copy_observations, text_bytes=text_bytes,
        ray_options=ray_options,
    )  # fmt: skip
    if backend == "native":
        native = make_native(env, num_envs, env_kwargs, wrappers, options)
        return cast(VectorPool, native)  # it has the same interface
    return _pool(env_fns_of(env, num_envs, env_kwargs, wrappers), options)


def _pool(env_fns: Sequence[EnvFn], options: Options) -> VectorPool:
    """The environments where they were planned to be, or with the caller if its workers turn out not to pay."""
    plan = planned(env_fns, options)
    opened = open_workers(env_fns, plan, options)
    try:
        if plan.cost is not None and not pays(opened.workers, plan.cost):
            opened.close()
            opened = open_workers(env_fns, Plan("serial"), options)
        policy: dict[str, Any] = {"on_failure": options.on_failure, "max_restarts": options.max_restarts}
        return VectorPool(*opened[:5], **policy, copy_observations=options.copies, handouts=opened.handouts)
    except BaseException:
        opened.close()
        raise


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a vector env is to be like, checked; `make_vec` explains each."""

    backend: str = field(default="auto", kw_only=False)
    num_workers: int | None = None
    start_method: StartMethod | None = None
    autoreset: AutoresetMode = AutoresetMode.SAME_STEP
    step_timeout: float | None = None
    make_timeout: float | None = None
    on_failure: OnFailure = "raise"
    max_restarts: int = 3
    check_nan: bool = True
    threads: bool = False
    ring: int | None = None
    copy_observations: bool | None = None
    text_bytes: int = TEXT_BYTES
    ray_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"no vector backend named {self.backend!r}.{did_you_mean(str(self.backend), BACKENDS)}"
            )
        if self.on_failure not in ("raise", "restart", "mask"):
            raise ValueError(f"on_failure must be 'raise', 'restart' or 'mask', got {self.on_failure!r}")
        if self.start_method not in (None, *START_METHODS):
            method = self.start_method
            raise ValueError(f"no start method named {method!r}.{did_you_mean(str(method), START_METHODS)}")
        for name, least in (("num_workers", 1), ("text_bytes", 0), ("ring", 2)):
            if getattr(self, name) is not None:
                whole(getattr(self, name), name, least)
        for name in ("check_nan", "threads", "copy_observations"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_) and (value is not None or name != "copy_observations"):
                raise TypeError(f"{name} must be True or False, got {value!r:.80}")
        restarts = limit(self.max_restarts, "max_restarts")
        if restarts is None:
            raise TypeError("max_restarts must be a number (math.inf for no limit), got None")
        if restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, got {restarts}")
        for name in ("step_timeout", "make_timeout"):
            value = limit(getattr(self, name), name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.backend == "serial" and self.step_timeout is not None:
            raise ConfigError("the caller cannot interrupt itself: step_timeout needs backend='process'")
        for name, value in self.given().items():
            backends = USED_BY.get(name, BACKENDS)
            if self.backend not in ("native", *backends, *(["auto"] if "process" in backends else [])):
                raise ConfigError(
                    f"{name}={value!r} means nothing to backend={self.backend!r}, only to "
                    f"{' and '.join(backends)}: leave it out, or choose another backend"
                )

    def given(self) -> dict[str, Any]:
        """What is not the default."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return {name: value for name, value, default in values if value != default}

    @property
    def limits(self) -> Limits:
        """Of time."""
        return Limits(
            self.step_timeout, self.step_timeout if self.make_timeout is None else self.make_timeout
        )

    @property
    def guarded(self) -> bool:
        """Whether no env may run in the caller, for a trial neither: what hangs or fails would take it along."""
        return self.step_timeout is not None or self.make_timeout is not None or self.on_failure != "raise"

    @property
    def places(self) -> int:
        """Batches of observations that are kept: with the last one, where an env may be replaced."""
        return self.ring or (1 if self.on_failure == "raise" else 2)

    @property
    def copies(self) -> bool:
        """Whether observations are given as copies."""
        return self.ring is None if self.copy_observations is None else self.copy_observations


USED_BY = {
    "num_workers": ("process", "thread", "ray"),
    "start_method": ("process",),
    "make_timeout": ("process", "thread", "ray"),
    "threads": ("process",),
    "text_bytes": ("process",),
    "ray_options": ("ray",),
}
"""The backends that have a use for an option, if not all; "auto" may come to have, where "process" has."""


def autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Gymnasium's mode for a name."""
    if isinstance(mode, AutoresetMode):
        return mode
    if str(mode) not in AUTORESET:
        raise ValueError(f"no autoreset mode {mode!r}.{did_you_mean(str(mode), AUTORESET)}")
    return AUTORESET[mode]


def env_fns_of(
    env: Source | Sequence[Source],
    num_envs: int | None,
    env_kwargs: dict[str, Any] | None,
    wrappers: Sequence[Wrapper],
) -> list[EnvFn]:
    """One function per environment; a sequence of sources gives different environments."""
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs is not None and num_envs != len(env):
            raise ValueError(f"got {len(env)} environments but num_envs={num_envs}; leave num_envs out")
        if not env:
            raise ValueError("at least one environment is needed, got an empty sequence")
        return [resolve(item, env_kwargs=env_kwargs, wrappers=wrappers) for item in env]
    if num_envs is None:
        raise ValueError("num_envs is needed unless a sequence of environments is given")
    n_envs = whole(num_envs, "num_envs", 1)
    return [resolve(env, env_kwargs=env_kwargs, wrappers=wrappers)] * n_envs


# --- opening what a vector env stands on
class Opened(NamedTuple):
    """Environments that are made and know where their results go; the first five are a `VectorPool`'s arguments."""

    workers: list[Worker]
    backend: Backend | None
    buffers: Buffers
    attach: Attach
    description: Description
    handouts: bool

    def close(self) -> None:
        """End it all."""
        close_all(self.workers, self.backend, os.getpid())


@files_told()
def open_workers(
    env_fns: Sequence[EnvFn],
    plan: Plan,
    options: Options,
    describe: Callable[[Description], Description] = lambda found: found,
) -> Opened:
    """Make the environments where the plan says; `describe` may refuse or change what they say of their spaces."""
    own = len(env_fns) if plan.backend == "serial" else plan.caller_share
    rest = len(env_fns) - own
    backend = _backend(env_fns[:rest], plan, options) if rest else None
    workers: list[Worker] = [*backend.workers] if backend is not None else []
    try:
        if backend is not None:
            backend.start(backend.workers)
        if own:
            workers.append(Worker(rest, env_fns[rest:]))
            workers[-1].begin(Make(rest, ()))
        replies = replies_of(workers)  # the caller makes its own while the workers make theirs
        raise_first(distinct([failure for reply in replies for failure in reply.failures]))
        told = [about for reply in replies for about in reply.value]
        _refuse_twins([about.identity for about in told])
        seen, acts = [about.observation_space for about in told], [about.action_space for about in told]
        one = told[0].metadata, told[0].render_mode, told[0].spec
        description = describe(Description(seen, acts, batched(seen), batched(acts), *one))
        observations = Layout.shared(description.observation_spaces)
        large = observations.is_leaf and observations.leaves[0].nbytes * len(env_fns) >= RECYCLE_FROM
        handouts = backend is None and bool(observations.fixed) and large
        handouts = handouts and options.copy_observations is None and options.places == 1
        handouts = handouts and options.autoreset is not AutoresetMode.DISABLED
        attach = Attach(
            len(env_fns),
            observations,
            Layout.shared(description.action_spaces),
            options.autoreset,
            options.check_nan,
            HANDOUTS if handouts else options.places,
            options.text_bytes,
        )
        buffers = backend.share(attach) if backend is not None else attach.buffers()
        if backend is not None:
            backend.attach(backend.workers, attach, buffers)
            raise_first([failure for reply in replies_of(backend.workers) for failure in reply.failures])
        for worker in workers:
            if worker.group is not None:
                worker.group.attach(buffers, attach.autoreset, attach.check_nan)
                worker.buffers = buffers
    except BaseException:
        close_all(workers, backend, os.getpid(), 0.0)
        raise
    return Opened(workers, backend, buffers, attach, description, handouts)


def _refuse_twins(identities: Sequence[Any]) -> None:
    """Refuse one env in two places: each step of the one would be a step of the other."""
    first: dict[Any, int] = {}
    for i, identity in enumerate(identities):
        if first.setdefault(identity, i) != i:
            raise ConfigError(
                f"environments {first[identity]} and {i} are one object: what makes them must make a new one each "
                "time (lambda: Env(), not lambda: env)"
            )


def _backend(env_fns: Sequence[EnvFn], plan: Plan, options: Options) -> Backend:
    n_workers = min(plan.workers or len(env_fns), len(env_fns))
    if plan.backend == "thread":
        return ThreadBackend(env_fns, n_workers, options.limits)
    if plan.backend == "ray":
        from shoal.vector.ray import RayBackend

        return RayBackend(env_fns, plan.workers or None, options.limits, options.ray_options or {})
    method = options.start_method or "forkserver"
    return ProcessBackend(env_fns, n_workers, plan.threads, method, options.limits)


# --- which backend suits: one environment is measured for a moment before the others are made
PROBE_SECONDS, PROBE_STEPS, LONG_PROBE = 0.05, 300, 0.5
HANDOVER = 10e-6
"""Seconds that a vector step with workers takes beyond its longest share."""
WRITE, READ = 0.4e-9, 0.1e-9
"""Seconds per byte to write memory that another core has just read, and to read what it has just written."""
TEXT = 1e-6
"""Seconds to pack a text where it was made and to unpack it where it is read."""
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
    texts: int = 0  # in it

    @property
    def waits(self) -> bool:
        """Most of it is waiting, long enough for threads to pay."""
        return self.wall > 300e-6 and self.cpu < WAITS * self.wall


@dataclass(frozen=True)
class Plan:
    """Where the environments go: `workers` processes, or threads, and a share for the caller."""

    backend: str
    workers: int = 0
    threads: bool = False  # in the processes, one for each env
    caller_share: int = 0
    cost: StepCost | None = field(default=None, repr=False, compare=False)
    """What the plan was made for, where it was measured."""


def planned(env_fns: Sequence[EnvFn], options: Options) -> Plan:
    """Where the environments go, by what was asked for or by a trial."""
    n_envs, workers, limited = len(env_fns), options.num_workers, options.step_timeout is not None
    if options.backend in ("serial", "thread", "ray"):
        return Plan(options.backend, workers=workers or 0)
    if options.backend == "auto" and workers is None and not options.threads and not options.guarded:
        cost = probe(env_fns[0])
        return Plan("serial") if cost is None else choose(cost, n_envs)
    default = n_envs if limited and not options.threads else default_workers(n_envs, options.threads)
    return Plan("process", workers=min(workers or default, n_envs), threads=options.threads)


def default_workers(n_envs: int, threads: bool, cpus: int | None = None) -> int:
    """Worker processes where nobody says how many: one per core, and with `threads` at least one per `THREADS` envs.

    Threads of one process take turns at waking up: many of them would begin and end their waits in a queue.
    """
    cpus = available_cpus() if cpus is None else cpus
    return min(max(cpus, n_envs // THREADS) if threads else cpus, n_envs)


THREADS = 8
"""Envs to a worker process that steps each in a thread, where that takes more processes than there are cores."""


def probe(fn: EnvFn) -> StepCost | None:
    """Make one environment, step it with random actions for a moment, and close it; None if it fails at that."""
    best: list[tuple[float, float]] = []
    clocks = min(map(_clocks, range(20)))
    try:
        env = fn()
        try:
            actions = copy.deepcopy(env.action_space)
            actions.seed(0)
            layout = Layout.of(env.observation_space)
            env.reset(seed=0)
            start = time.perf_counter()
            while not best or (
                len(best) < PROBE_STEPS
                and time.perf_counter() - start < (LONG_PROBE if len(best) < 3 else PROBE_SECONDS)
            ):
                action = actions.sample()
                wall, cpu = time.perf_counter(), time.thread_time()
                obs, _, terminated, truncated, _ = env.step(action)
                copy.copy(obs)  # what a vector env does with it at least
                best.append((time.perf_counter() - wall - clocks, time.thread_time() - cpu - clocks))
                if terminated or truncated:
                    env.reset()
            leaves = layout.flatten(obs)
            nbytes = sum(len(leaves[i]) for i in layout.text)
            nbytes += sum(layout.leaves[i].nbytes for i in layout.fixed)
        finally:
            env.close()
    except KeyboardInterrupt:
        raise
    except BaseException:  # it is told by whoever makes or steps it in earnest, with its number
        return None
    best.sort()
    middle = best[: max(1, len(best) * 3 // 4)]  # without the outliers of a busy machine
    wall, cpu = (sum(times) / len(middle) for times in zip(*middle, strict=True))
    return StepCost(max(wall, 0.0), max(cpu, 0.0), nbytes, len(layout.text))


def _clocks(_: int) -> float:
    """Seconds that looking at both clocks takes."""
    wall, _cpu = time.perf_counter(), time.thread_time()
    return time.perf_counter() - wall


def choose(cost: StepCost, n_envs: int, cpus: int | None = None) -> Plan:
    """The plan for `n_envs` environments of this cost.

    >>> choose(StepCost(1e-6, 1e-6), n_envs=4, cpus=2).backend
    'serial'
    >>> choose(StepCost(5e-3, 1e-5), n_envs=32, cpus=2)
    Plan(backend='process', workers=4, threads=True, caller_share=0)
    >>> choose(StepCost(2e-4, 2e-4), n_envs=32, cpus=2)
    Plan(backend='process', workers=1, threads=False, caller_share=16)
    """
    cpus = available_cpus() if cpus is None else cpus
    if n_envs == 1:
        return Plan("serial")
    if cost.waits:
        if not sys.platform.startswith("linux"):
            return Plan("thread")
        return Plan("process", workers=default_workers(n_envs, True, cpus), threads=True)
    parts = min(cpus, n_envs)
    if parts == 1 or not sys.platform.startswith("linux"):
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
    return max(worker, caller) + HANDOVER + moved * (cost.nbytes * READ + cost.texts * TEXT)


# --- whether workers that are started already make steps faster here and now, before anything depends on it
TRIAL_SECONDS = 0.15
"""A shorter one ends before the scheduler takes a core from those that had been waiting for work."""
LONGEST = 20e-3
"""Seconds of a vector step from which waking a worker costs little in comparison: no trial then."""
CLEARLY = 0.8
"""Workers are kept when a trial with them takes less than this part: it knows nothing of caches that cores share."""
LEAST = 8
"""Rounds of a trial, however long they take."""


def pays(
    workers: Sequence[Any],
    cost: StepCost,
    *,
    work: Callable[[int], None] = be_busy,
    now: Callable[[], float] = time.perf_counter,
) -> bool:
    """Whether stepping with these workers takes clearly less time than the caller stepping all itself.

    A count of cores promises nothing: others may keep them busy, and then each wake-up of a worker takes longer than
    a step of a cheap environment. So all do what a step would cost, without touching an environment.

    Args:
        workers: all of them, the caller's own group included.
        cost: of one env's step.
        work: what the caller does for so many rounds.
        now: the clock.
    """
    n_envs = sum(worker.count for worker in workers)
    others = [worker for worker in workers if not worker.inline]
    moved = sum(worker.count for worker in others)
    if n_envs * cost.wall > LONGEST:
        return True
    per_env = cost.wall * _rounds_per_second(work, now)
    shared: list[float] = []
    single: list[float] = []
    end = now() + TRIAL_SECONDS
    while len(shared) < LEAST or now() < end:
        start = now()
        for worker in others:
            worker.begin(Trial(int(per_env * worker.count)))
        work(int(per_env * (n_envs - moved)))
        replies_of(others)
        middle = now()
        work(int(per_env * n_envs))
        shared.append(middle - start)
        single.append(now() - middle)
    carrying = -(-moved // len(others)) * cost.nbytes * WRITE
    carrying += moved * (cost.nbytes * READ + cost.texts * TEXT)
    return bool(_mean(shared) + carrying < CLEARLY * _mean(single))


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
