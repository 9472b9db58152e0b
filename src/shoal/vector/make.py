"""`make_vec`: many environments behind one `gymnasium.vector.VectorEnv`, stepped where it is fastest."""

from __future__ import annotations

import contextlib
import copy as copying
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, did_you_mean, format_error
from shoal.core.executors import available_cpus, free_cpus
from shoal.core.workers import START_METHODS, StartMethod, explain_file_limit
from shoal.envs.catalogue import EnvFn, Source, Wrapper, resolve, without_wrappers
from shoal.vector.buffers import Buffers, shared_block
from shoal.vector.env_group import even_cuts
from shoal.vector.failures import OnFailure, failures_of, raise_first
from shoal.vector.messages import Attach
from shoal.vector.spaces import Layout, batched, check_limit, check_whole
from shoal.vector.vector_env import Description, SerialVectorEnv, VectorPool, close_all
from shoal.vector.workers import Limits, ProcessWorker, Signals, ThreadWorker, Worker, attach_all, collect

logger = logging.getLogger(__name__)
BackendName = Literal["auto", "serial", "process", "thread", "ray", "native"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
AUTORESET = {mode.name.lower(): mode for mode in AutoresetMode}


def make_vec(
    env: Source | Sequence[Source],
    num_envs: int | None = None,
    *,
    backend: BackendName = "auto",
    num_workers: int | None = None,
    start_method: StartMethod | None = None,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    autoreset: str | AutoresetMode = "next_step",
    step_timeout: float | None = None,
    make_timeout: float | None = None,
    on_failure: OnFailure = "raise",
    max_restarts: int = 3,
    check_nan: bool = True,
    copy: bool = True,
    ray_options: dict[str, Any] | None = None,
    **unknown: Any,
) -> VectorPool:
    """Many environments as one vector environment.

    All backends but "native" give the same results for the same seeds. An environment is made, stepped and closed
    in one thread.

    Args:
        env: the name of a shoal env, a Gymnasium id or spec, "module:Id-v0", "module:Class", a class or function
            that makes an env, or a sequence of these for different environments.
        num_envs: how many (default: 1); not needed for a sequence.
        backend: "serial" in the caller, "process" in worker processes, "thread" in threads of the caller,
            "ray" on a Ray cluster, "native" for the environment's own batch (another implementation: its
            episodes differ, and it refuses what it cannot honour), or "auto": another env is made, tried for 20 steps
            or 50 ms without its wrappers, and closed; then `choose` says where they go. Where it refuses random
            actions, all are in worker processes. The caller steps a share of the environments, so one that crashes
            takes it along; with `step_timeout` or `on_failure` all are in workers and nothing is tried.
        num_workers: threads (default: one per env), actors (one per CPU of the cluster) or processes: one per core, or
            per env with `step_timeout` or where a trial of another env in a process finds that a step mostly waits.
        start_method: of worker processes: "forkserver" (default on Linux), "spawn" or "fork".
        env_kwargs: passed to what makes each env.
        wrappers: put around each env, the first innermost: callables from env to env, or "module:Name".
        autoreset: "next_step", "same_step" or "disabled", as Gymnasium defines them.
        step_timeout: seconds that one step, reset or call of one env may take; a worker that takes longer is killed.
        make_timeout: seconds that making one env may take; default: `step_timeout`.
        on_failure: what an env's failure does: "raise" an error, or "restart" what failed. After an error reset first.
        max_restarts: per env, after which a failure raises; as does a fourth failure in one operation.
        check_nan: a reward that is NaN or infinite, or an observation with NaN, is a failure of its env.
        copy: return copies of observations, or views that the next step overwrites.
        ray_options: of the actors, such as `{"num_cpus": 1, "resources": {...}}`.
        **unknown: none; the error says which argument was meant.

    Raises:
        UnknownNameError: for an env that is not registered.
        ConfigError: for what cannot run: too little memory, too many files, environments that do not pickle,
            an argument that this backend has no use for.
        TypeError: for an argument that it does not know; says which one was probably meant.
        Exception: when an environment cannot be made; a note says which.
    """
    check_single_agent(env)
    if unknown:
        raise _unknown_argument(*next(iter(unknown.items())))
    options = Options(
        backend, num_workers=num_workers, start_method=start_method, autoreset=autoreset_mode(autoreset),
        step_timeout=step_timeout, make_timeout=make_timeout, on_failure=on_failure, max_restarts=max_restarts,
        check_nan=check_nan, copy=copy, ray_options=ray_options,
    )  # fmt: skip
    if backend == "native":
        from shoal.vector.backends.native import make_native

        native = make_native(env, num_envs, env_kwargs, wrappers, options)
        return cast(VectorPool, native)  # it has the same interface
    env_fns = env_fns_of(env, num_envs, env_kwargs, wrappers)
    plan = planned(env_fns, options)
    kind = SerialVectorEnv if plan.backend == "serial" else VectorPool
    return kind(*open_workers(env_fns, plan, options), **options.policy)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `make_vec`, validated."""

    backend: str = field(default="auto", kw_only=False)
    num_workers: int | None = None
    start_method: StartMethod | None = None
    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP
    step_timeout: float | None = None
    make_timeout: float | None = None
    on_failure: OnFailure = "raise"
    max_restarts: int = 3
    check_nan: bool = True
    copy: bool = True
    ray_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"no vector backend named {self.backend!r}.{did_you_mean(str(self.backend), BACKENDS)}"
            )
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(f"on_failure must be 'raise' or 'restart', got {self.on_failure!r}")
        if self.start_method not in (None, *START_METHODS):
            method = self.start_method
            raise ValueError(f"no start method named {method!r}.{did_you_mean(str(method), START_METHODS)}")
        if self.num_workers is not None:
            check_whole(self.num_workers, "num_workers", 1)
        for name in ("check_nan", "copy"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise TypeError(f"{name} must be True or False, got {value!r:.80}")
        restarts = check_limit(self.max_restarts, "max_restarts")
        if restarts is None:
            raise TypeError("max_restarts must be a number (math.inf for no limit), got None")
        if restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, got {restarts}")
        for name in ("step_timeout", "make_timeout"):
            value = check_limit(getattr(self, name), name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.backend == "serial" and self.step_timeout is not None:
            raise ConfigError(
                "the caller cannot interrupt itself: step_timeout needs backend='process' or 'thread'"
            )
        for name, value in self.given().items():
            backends = USED_BY.get(name, BACKENDS)
            if self.backend not in ("native", *backends, *(["auto"] if "process" in backends else [])):
                raise ConfigError(
                    f"{name}={value!r} means nothing to backend={self.backend!r}, only to "
                    f"{' and '.join(backends)}: leave it out, or choose another backend"
                )

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return {name: value for name, value, default in values if value != default}

    @property
    def policy(self) -> dict[str, Any]:
        """The options that the vector env itself uses."""
        return {"on_failure": self.on_failure, "max_restarts": self.max_restarts, "copy": self.copy}

    @property
    def limits(self) -> Limits:
        """The time limits."""
        return Limits(
            self.step_timeout, self.step_timeout if self.make_timeout is None else self.make_timeout
        )


CONVERTERS = "pettingzoo.utils.conversions"
"""Where its `parallel_env` functions are made."""


def check_single_agent(env: Any) -> None:
    """A `TypeError` for one of PettingZoo's environments, or its class, module or function `parallel_env`."""
    made = getattr(env, "__name__", "") == "parallel_env" or getattr(env, "__module__", "") == CONVERTERS
    if made or hasattr(env, "possible_agents") or hasattr(env, "parallel_env"):
        raise TypeError(
            f"make_vec takes environments of one agent, got {env!r}; use "
            "shoal.vector.PettingZooVectorEnv(function_that_makes_it, num_copies)"
        )


def _unknown_argument(name: str, value: Any) -> TypeError:
    """An error for an argument that `make_vec` does not have, with the one that was meant."""
    known = [field.name for field in fields(Options)] + ["env_kwargs", "wrappers", "num_envs"]
    gymnasiums = {
        "autoreset_mode": f"autoreset={value!r}",
        "vectorization_mode": "backend='process' (Gymnasium's 'async'), 'serial' ('sync') or 'native'",
        "vector_kwargs": "make_vec's own arguments",
    }
    if name in gymnasiums:
        return TypeError(f"make_vec has no argument {name!r}: write {gymnasiums[name]}")
    guess = did_you_mean(name, known).partition(" Known:")[0]
    of_env = f" Arguments of the environment go into env_kwargs={{{name!r}: {value!r:.80}}}"
    return TypeError(f"make_vec has no argument {name!r}.{guess or of_env}")


USED_BY = {
    "num_workers": ("process", "thread", "ray"),
    "start_method": ("process",),
    "make_timeout": ("process", "thread", "ray"),
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
    n_envs = 1 if num_envs is None else check_whole(num_envs, "num_envs", 1)
    return [resolve(env, env_kwargs=env_kwargs, wrappers=wrappers)] * n_envs


# --- starting workers
@explain_file_limit()
def open_workers(
    env_fns: Sequence[EnvFn],
    plan: Plan,
    options: Options,
    describe: Callable[[Description], Description] = lambda found: found,
) -> tuple[list[Worker], Buffers, Attach, Description, Callable[[], None]]:
    """Make the environments according to the plan; `describe` may change or refuse their spaces.

    Returns:
        The arguments of a `VectorPool`; the environments know where their results go.
    """
    share = plan.caller_share
    workers = [Worker(0, env_fns[:share], options.limits)] if share else []
    rest = contextlib.ExitStack()
    try:
        workers += _workers(env_fns[share:], share, plan, options)
        for worker in sorted(workers, key=lambda worker: worker.inline):
            worker.start()
        replies = collect(workers)  # the caller makes its own while the workers make theirs
        raise_first(failures_of(replies))
        made = [item for reply in replies for item in reply.value]
        _check_distinct([item.identity for item in made])
        seen, acts = [item.observation_space for item in made], [item.action_space for item in made]
        one = made[0].metadata, made[0].render_mode, made[0].spec
        description = describe(Description(seen, acts, batched(seen), batched(acts), *one))
        layouts = Layout.shared(description.observation_spaces), Layout.shared(description.action_spaces)
        attach = Attach(len(env_fns), *layouts, options.autoreset, options.check_nan)
        buffers = attach.buffers()
        if any(isinstance(worker, ProcessWorker) for worker in workers):
            block = shared_block(buffers.nbytes)
            rest.callback(_release, block)
            attach.memory = block.name
            buffers = attach.buffers(block.buf)
        raise_first(attach_all(workers, attach, buffers))
    except BaseException:
        close_all(workers, rest.close, 0.0)
        raise
    return workers, buffers, attach, description, rest.close


def _workers(env_fns: Sequence[EnvFn], first: int, plan: Plan, options: Options) -> list[Worker]:
    """The workers for environments that the caller does not step itself."""
    if not env_fns:
        return []
    limits = options.limits
    if plan.backend == "ray":
        from shoal.vector.backends.ray import ray_workers

        return [*ray_workers(env_fns, plan.workers, limits, options.ray_options or {})]
    parts = [(first + lo, env_fns[lo:hi]) for lo, hi in even_cuts(len(env_fns), plan.workers or len(env_fns))]
    if plan.backend == "thread":
        done = threading.Semaphore(0)
        return [ThreadWorker(done, lo, fns, limits) for lo, fns in parts]
    signals = Signals(len(parts), options.start_method)
    return [ProcessWorker(signals, k, lo, fns, limits) for k, (lo, fns) in enumerate(parts)]


def _release(block: Any) -> None:
    """Remove shared memory; arrays over it live on until the last one goes."""
    with contextlib.suppress(FileNotFoundError):  # a worker that could not open it removed it
        block.unlink()
    block._buf = block._mmap = None
    block.close()


def _check_distinct(identities: Sequence[Any]) -> None:
    """Refuse the same env object twice: a step of one would be a step of the other."""
    first: dict[Any, int] = {}
    for i, identity in enumerate(identities):
        if first.setdefault(identity, i) != i:
            raise ConfigError(
                f"environments {first[identity]} and {i} are one object: what makes them must make a new one each "
                "time (lambda: Env(), not lambda: env)"
            )


# --- where environments go
TRIAL_STEPS, TRIAL_SECONDS = 20, 0.05
TRIAL_LIMIT = 5.0
"""Seconds that making an env, and a trial of it, may take in a process of its own."""
WORTH_WORKERS = 80e-6
"""Seconds that the steps of the environments which workers would take over must cost: waking them costs less."""
WAITS = 0.5
"""A step that computes for less than this part of its time is waiting for something."""


@dataclass(frozen=True)
class StepCost:
    """Wall-clock and processor seconds of one step of one environment."""

    wall: float
    cpu: float

    @property
    def waits(self) -> bool:
        """Whether a step mostly waits, long enough that threads are faster."""
        return self.wall > 300e-6 and self.cpu < WAITS * self.wall


@dataclass(frozen=True)
class Plan:
    """Where the environments run: the first `caller_share` in the caller, the others in `workers`."""

    backend: str
    workers: int = 0
    caller_share: int = 0


def planned(env_fns: Sequence[EnvFn], options: Options) -> Plan:
    """The plan that was requested, or that a trial of an env suggests."""
    n_envs, workers, limited = len(env_fns), options.num_workers, options.step_timeout is not None
    if options.backend == "serial":
        return Plan("serial", caller_share=n_envs)
    if options.backend in ("thread", "ray"):
        return Plan(options.backend, workers=min(workers or 0, n_envs))
    # One that hangs or crashes would stop the caller, even in a trial.
    guarded = limited or options.make_timeout is not None or options.on_failure != "raise"
    if options.backend == "auto" and workers is None and not guarded:
        if n_envs == 1:
            return Plan("serial", caller_share=1)
        if (cost := try_env(env_fns[0])) is not None:
            free = free_cpus()
            plan = choose(cost, n_envs, free)
            logger.debug(
                "backend='auto' is %r for %d environments of %.0f us a step, %d of %d cores free",
                plan.backend, n_envs, cost.wall * 1e6, free, available_cpus(),
            )  # fmt: skip
            return plan
    each = limited
    if not limited and workers is None and n_envs > available_cpus():
        cost = try_env(env_fns[0], options)
        each = cost is not None and cost.waits
    return Plan("process", workers=min(workers or (n_envs if each else available_cpus()), n_envs))


def try_env(fn: EnvFn, options: Options | None = None) -> StepCost | None:
    """What a step costs, on an environment that is made for this and closed; None if none could be measured.

    Its wrappers see no episode, and the global generators are left as they were. With `options` it is made in a
    process of its own.
    """
    cost, drawn, bare = None, (random.getstate(), np.random.get_state()), without_wrappers(fn)
    try:
        if options is None:
            with contextlib.closing(bare()) as env:
                cost = step_cost(env)
        else:
            options = replace(options, backend="process", step_timeout=TRIAL_LIMIT, make_timeout=None)
            with VectorPool(*open_workers([bare], Plan("process", 1), options)) as one:
                [cost] = one.apply(step_cost)
    except Exception as error:  # whoever makes them all finds it too, and says more
        logger.debug("the env for the trial of a step failed: %s", format_error(error))
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    return cost


def step_cost(env: Any) -> StepCost | None:
    """What a step of this env costs, played for `TRIAL_STEPS` or `TRIAL_SECONDS`; None if it refuses all actions."""
    times: list[tuple[float, float]] = []
    try:
        env = env.unwrapped
        actions = copying.deepcopy(env.action_space)
        actions.seed(0)
        env.reset()
        start = time.perf_counter()
        while len(times) < TRIAL_STEPS and time.perf_counter() - start < TRIAL_SECONDS:
            action = actions.sample()
            wall, cpu = time.perf_counter(), time.thread_time()
            _, _, terminated, truncated, _ = env.step(action)
            times.append((time.perf_counter() - wall, time.thread_time() - cpu))
            if terminated or truncated:
                env.reset()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        logger.debug("the trial of a step ended after %d steps: %s", len(times), format_error(error))
    return StepCost(*sorted(times)[len(times) // 2]) if times else None


def choose(cost: StepCost, n_envs: int, cpus: int | None = None) -> Plan:
    """The plan for `n_envs` environments of this cost.

    Environments that mostly wait are stepped side by side in threads, none by the caller, whom its wait would keep from
    those that are ready (`send`, `recv`). Others stay with the caller where the steps that
    workers would take over cost less than `WORTH_WORKERS`, or no other core is free; else the caller steps its part,
    one of as many as there are free cores, and a worker on each other one the rest.

    >>> choose(StepCost(1e-6, 1e-6), n_envs=4, cpus=2)
    Plan(backend='serial', workers=0, caller_share=4)
    >>> choose(StepCost(5e-3, 1e-5), n_envs=32, cpus=2)
    Plan(backend='thread', workers=32, caller_share=0)
    >>> choose(StepCost(2e-4, 2e-4), n_envs=32, cpus=2)
    Plan(backend='process', workers=1, caller_share=16)
    """
    cpus = available_cpus() if cpus is None else cpus
    parts = min(cpus, n_envs)
    if cost.waits and n_envs > 1:
        return Plan("thread", workers=n_envs)
    share = n_envs // max(parts, 1)
    if parts == 1 or (n_envs - share) * cost.wall < WORTH_WORKERS:
        return Plan("serial", caller_share=n_envs)
    return Plan("process", workers=parts - 1, caller_share=share)
