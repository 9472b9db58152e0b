"""Setting up what a pool stands on: environments with the caller, in threads, or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from shoal.core.errors import did_you_mean
from shoal.core.executors import available_cpus
from shoal.vector.lanes import InlineLane, Lane
from shoal.vector.launch import START_METHODS
from shoal.vector.plan import Plan, even_cuts, shares_of
from shoal.vector.process import ProcessBackend
from shoal.vector.results import RECYCLE_FROM
from shoal.vector.share import EnvFn, Share
from shoal.vector.slots import Slots
from shoal.vector.spaces import Layout, batch_action_space, batch_observation_space
from shoal.vector.standing import Description, OnFailure
from shoal.vector.threads import ThreadBackend
from shoal.vector.waiting import MAX_SPIN
from shoal.vector.worker import Attach

HANDOUT_PLACES = 5
Parts = dict[str, Any]
"""The arguments of a `VectorPool`."""


@dataclass(frozen=True)
class Rules:
    """What holds for every environment of a pool, wherever it runs; `make_vec` explains each."""

    autoreset: AutoresetMode
    check_nan: bool = True
    on_failure: OnFailure = "raise"
    max_restarts: int = 3
    ring: int | None = None

    @property
    def places(self) -> int:
        """Observations that are kept: what is replaced must still show its last one."""
        return self.ring or (1 if self.on_failure == "raise" else 2)


def open_processes(
    env_fns: Sequence[EnvFn],
    rules: Rules,
    *,
    plan: Plan | None = None,
    num_workers: int | None = None,
    method: str = "forkserver",
    step_timeout: float | None = None,
    text_bytes: int = 2048,
    describe: Callable[[Description], Description] = lambda found: found,
) -> Parts:
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
            ring=rules.places,
            text_bytes=text_bytes,
            autoreset=rules.autoreset,
            check_nan=rules.check_nan,
            spin=MAX_SPIN,
        )
        slots, opened = backend.open(attach, step_timeout)
        lanes: list[Lane] = list(opened)
        if own:
            share = Share(env_fns[rest:], rest, slots, rules.autoreset, check_nan=rules.check_nan, envs=own)
            lanes.append(InlineLane(share))
    except BaseException:
        backend.close(0.0)
        for env in own:
            env.close()
        raise
    return parts_of(lanes, slots, description, rules, backend)


def open_serial(env_fns: Sequence[EnvFn], rules: Rules) -> Parts:
    """All environments in the caller's own thread: the reference that the others equal."""
    envs = [fn() for fn in env_fns]
    description = description_of(envs)
    handouts = rules.ring is None and rules.on_failure == "raise"
    if handouts and rules.autoreset is not AutoresetMode.DISABLED:
        slots = private_slots(description, _handout_places(description))
    else:
        slots = private_slots(description, rules.places)
    share = Share(env_fns, 0, slots, rules.autoreset, check_nan=rules.check_nan, envs=envs)
    return parts_of([InlineLane(share)], slots, description, rules, None)


def open_threads(
    env_fns: Sequence[EnvFn], rules: Rules, *, num_workers: int | None, step_timeout: float | None
) -> Parts:
    """Threads of the calling process with a share each; by default one per environment."""
    envs = [fn() for fn in env_fns]
    description = description_of(envs)
    slots = private_slots(description, rules.places)
    backend = ThreadBackend(step_timeout)
    cuts = even_cuts(len(envs), min(num_workers or len(envs), len(envs)))
    lanes = backend.lanes(env_fns, envs, cuts, slots, rules.autoreset, rules.check_nan)
    return parts_of(lanes, slots, description, rules, backend)


def parts_of(
    lanes: Sequence[Lane], slots: Slots, description: Description, rules: Rules, backend: Any
) -> Parts:
    """The arguments of a `VectorPool` over what was opened."""
    return {
        "lanes": lanes,
        "slots": slots,
        "description": description,
        "autoreset": rules.autoreset,
        "on_failure": rules.on_failure,
        "max_restarts": rules.max_restarts,
        "backend": backend,
    }


def private_slots(description: Description, ring: int) -> Slots:
    """Slots in the memory of this process."""
    observations = Layout.shared(description.observation_spaces)
    return Slots(
        len(description.observation_spaces), observations, Layout.shared(description.action_spaces), ring=ring
    )


def _handout_places(description: Description) -> int:
    """Places for large observations of one array; other observations are cheap to copy."""
    layout = Layout.shared(description.observation_spaces)
    large = layout.is_leaf and layout.leaves[0].nbytes * len(description.observation_spaces) >= RECYCLE_FROM
    return HANDOUT_PLACES if layout.fixed and large else 1


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
