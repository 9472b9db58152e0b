"""`make_vec`: many environments behind one `gymnasium.vector.VectorEnv`, stepped where it is fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from shoal.core.errors import did_you_mean
from shoal.core.executors import available_cpus
from shoal.vector.lanes import InlineLane
from shoal.vector.launch import StartMethod
from shoal.vector.pool import Description, OnFailure, VectorPool
from shoal.vector.process import ProcessBackend
from shoal.vector.share import EnvFn, Share
from shoal.vector.slots import Slots
from shoal.vector.sources import Source, env_fns_of
from shoal.vector.spaces import Layout, batch_action_space, batch_observation_space
from shoal.vector.waiting import MAX_SPIN
from shoal.vector.worker import Attach

Backend = Literal["auto", "serial", "process", "thread", "ray"]
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
    env_kwargs: dict[str, Any] | None = None,
    autoreset: str | AutoresetMode = "same_step",
    on_failure: OnFailure = "raise",
    max_restarts: int = 3,
    check_nan: bool = True,
    num_workers: int | None = None,
    start_method: StartMethod | None = None,
    step_timeout: float | None = None,
    text_bytes: int = 2048,
) -> VectorPool:
    """Many environments as one vector environment.

    Args:
        env: the name of a shoal env, a Gymnasium id or spec, a class or function that makes an env, or a
            sequence of these for different environments.
        num_envs: how many; not needed for a sequence.
        backend: where they run.
        env_kwargs: passed to what makes each env.
        autoreset: "same_step", "next_step" or "disabled".
        on_failure: what an env's failure does: "raise" an error, "restart" that env, or "mask" it out.
        max_restarts: per env, after which a failure raises.
        check_nan: a NaN reward or observation is a failure of its env.
    """
    mode = _autoreset(autoreset)
    if backend not in BACKENDS:
        raise ValueError(f"no vector backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")
    env_fns = env_fns_of(env, num_envs, env_kwargs)
    policy: dict[str, Any] = {"autoreset": mode, "on_failure": on_failure, "max_restarts": max_restarts}
    if backend == "serial":
        return serial_pool(env_fns, check_nan=check_nan, **policy)
    return process_pool(
        env_fns,
        num_workers=num_workers,
        method=start_method or "forkserver",
        step_timeout=step_timeout,
        text_bytes=text_bytes,
        check_nan=check_nan,
        **policy,
    )


def process_pool(
    env_fns: Sequence[EnvFn],
    *,
    num_workers: int | None,
    method: StartMethod,
    step_timeout: float | None,
    text_bytes: int,
    autoreset: AutoresetMode,
    check_nan: bool,
    **policy: Any,
) -> VectorPool:
    """All environments in worker processes, a contiguous share in each."""
    n_envs = len(env_fns)
    n_workers = min(num_workers or available_cpus(), n_envs)
    cuts = [n_envs * k // n_workers for k in range(n_workers + 1)]
    shares = [[(lo, env_fns[lo:hi])] for lo, hi in itertools.pairwise(cuts)]
    backend = ProcessBackend(shares, method)
    description = describe(backend.describe())
    attach = Attach(
        n_envs,
        Layout.shared(description.observation_spaces),
        Layout.shared(description.action_spaces),
        n_lanes=n_workers,
        lane_numbers=[],
        ring=1,
        text_bytes=text_bytes,
        autoreset=autoreset,
        check_nan=check_nan,
        spin=MAX_SPIN,
    )
    slots, lanes = backend.open(attach, step_timeout)
    return VectorPool(lanes, slots, description, autoreset=autoreset, on_close=backend.close, **policy)


def serial_pool(
    env_fns: Sequence[EnvFn], *, autoreset: AutoresetMode, check_nan: bool, **policy: Any
) -> VectorPool:
    """All environments in the caller's own thread: the reference that the others equal."""
    envs = [fn() for fn in env_fns]
    description = describe(envs)
    slots = Slots(
        len(envs),
        Layout.shared(description.observation_spaces),
        Layout.shared(description.action_spaces),
    )
    share = Share(env_fns, 0, slots, autoreset, check_nan=check_nan, envs=envs)
    return VectorPool([InlineLane(share)], slots, description, autoreset=autoreset, **policy)


def describe(envs: Sequence[Any]) -> Description:
    """Spaces and metadata of live environments."""
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


def _autoreset(mode: str | AutoresetMode) -> AutoresetMode:
    if isinstance(mode, AutoresetMode):
        return mode
    try:
        return AUTORESET[mode]
    except KeyError:
        raise ValueError(f"no autoreset mode {mode!r}.{did_you_mean(mode, AUTORESET)}") from None
