"""Many environments behind one `gymnasium.vector.VectorEnv`, whatever steps them.

The pool starts an operation on its lanes, collects their replies and lays the results out; what a backend is
(the caller itself, threads, processes, other machines) is known only to the lanes.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.core.errors import WorkerTimeoutError
from shoal.core.seeding import derive_seed
from shoal.vector.actions import Loose, write_batch, write_some
from shoal.vector.failures import Failure, error_of
from shoal.vector.infos import batch_infos
from shoal.vector.lanes import Lane
from shoal.vector.share import IN_SLOT, Extras
from shoal.vector.slots import Slots

logger = logging.getLogger(__name__)
OnFailure = Literal["raise", "restart", "mask"]
Seeds = int | Sequence[int | None] | None


class PendingTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """A `*_wait(timeout=…)` ran out; the late replies are dropped when they come."""


class StepResult(NamedTuple):
    """What one environment answered to one action."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Description(NamedTuple):
    """What a pool must know of its environments before it can talk to them."""

    observation_spaces: list[gymnasium.Space[Any]]
    action_spaces: list[gymnasium.Space[Any]]
    observation_space: gymnasium.Space[Any]  # batched
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


class VectorPool(VectorEnv[Any, Any, Any]):
    """A vector environment over lanes; made by `make_vec`.

    Args:
        lanes: the shares, in the order of their environments.
        slots: the arrays they share with the pool.
        description: spaces and metadata.
        autoreset: what happens at the end of an episode.
        on_failure: "raise" an error, "restart" what failed, or "mask" it out for good.
        max_restarts: per environment; the next failure raises.
        copy_observations: return copies; else views that the next step overwrites.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        slots: Slots,
        description: Description,
        *,
        autoreset: AutoresetMode,
        on_failure: OnFailure = "raise",
        max_restarts: int = 3,
        copy_observations: bool = True,
        on_close: Callable[[float], None] | None = None,
    ) -> None:
        self.num_envs = slots.n_envs
        self.lanes, self.slots = list(lanes), slots
        self.autoreset_mode = autoreset
        self.metadata = {**description.metadata, "autoreset_mode": autoreset}
        self.render_mode, self.spec = description.render_mode, description.spec
        self.observation_spaces = description.observation_spaces
        self.action_spaces = description.action_spaces
        self.single_observation_space = description.observation_spaces[0]
        self.single_action_space = description.action_spaces[0]
        self.observation_space = description.observation_space
        self.action_space = description.action_space
        self.on_failure, self.max_restarts = on_failure, max_restarts
        self.copy = copy_observations
        self.restarts = [0] * self.num_envs
        self.active = np.ones(self.num_envs, dtype=np.bool_)
        """False for environments that were masked out after a failure."""
        self._seeds: list[int | None] = [None] * self.num_envs
        self._beside: dict[int, list[Any]] = {
            i: [None] * self.num_envs for i in (*slots.observations.text, *slots.observations.objects)
        }
        self._ring = 0
        self._state: str | None = None
        self._pending: list[tuple[Lane, Sequence[int] | None]] = []
        self._lane_of = [lane for lane in self.lanes for _ in range(lane.count)]
        self._on_close = on_close
        self._finalizer = weakref.finalize(self, _close_lanes, self.lanes, on_close)

    # --- gymnasium's synchronous interface
    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`.

        Args:
            seed: None, an int (env i gets `seed + i`) or one seed per env.
            options: passed to every env, without `reset_mask`.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment with its action."""
        self.step_async(actions)
        return self.step_wait()

    # --- in two halves
    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Begin a reset; `reset_wait` returns its result."""
        self._ready("reset")
        seeds = self._spread(seed)
        chosen: list[int] | None = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            chosen = np.flatnonzero(_checked_mask(options.pop("reset_mask"), self.num_envs)).tolist()
        self._begin_reset(chosen, seeds, options)
        self._state = "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observations and infos of the episodes begun by `reset_async`."""
        self._expect("reset")
        records = self._collect(timeout, "reset")
        return self._observations(), batch_infos(self.num_envs, _merged(records))

    def step_async(self, actions: Any) -> None:
        """Begin a step; `step_wait` returns its result."""
        self._ready("step")
        loose = write_batch(self.slots, actions)
        self._turn_ring(None)
        active = None if self.active.all() else self.active
        for lane in self.lanes:
            members = None
            if active is not None:
                members = np.flatnonzero(active[lane.first : lane.first + lane.count]).tolist()
                if not members:
                    continue
            lane.start_step(members, _for_lane(loose, lane), self._ring)
            self._pending.append((lane, members))
        self._state = "step"

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`."""
        self._expect("step")
        records = self._collect(timeout, "step")
        slots = self.slots
        infos = batch_infos(self.num_envs, _merged(records)) if records else {}
        return (
            self._observations(),
            slots.rewards.copy(),
            slots.terminated.copy(),
            slots.truncated.copy(),
            infos,
        )

    # --- some of the environments
    def reset_some(
        self, indices: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> list[tuple[Any, dict[str, Any]]]:
        """Reset the environments `indices`, each with its seed; one `(observation, info)` for each."""
        self._ready("reset")
        chosen = self._indices(indices, seeds, "seeds")
        everyone: list[int | None] = [None] * self.num_envs
        for i, seed in zip(chosen, seeds, strict=True):
            everyone[i] = seed
        self._begin_reset(sorted(chosen), everyone, options)
        self._state = "reset"
        infos = _by_env(self._collect(None, "reset"))
        return [(self._observation(i), infos.get(i, {})) for i in chosen]

    def step_some(self, indices: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
        """Step only the environments `indices`, with one action each; the others are left alone.

        An action may be anything: what is not in the action space reaches the env as it is.
        """
        self._ready("step")
        chosen = self._indices(indices, actions, "actions")
        loose = write_some(self.slots, chosen, actions)
        self._turn_ring(chosen)
        for lane, members in self._by_lane(sorted(chosen)):
            lane.start_step(members, _for_lane(loose, lane), self._ring)
            self._pending.append((lane, members))
        self._state = "step"
        infos = _by_env(self._collect(None, "step"))
        slots = self.slots
        return [
            StepResult(
                self._observation(i),
                float(slots.rewards[i]),
                bool(slots.terminated[i]),
                bool(slots.truncated[i]),
                infos.get(i, {}),
            )
            for i in chosen
        ]

    # --- methods and attributes of the environments
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result per environment."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `call_wait` returns its results."""
        self._ready("call")
        if name in ("reset", "step", "close"):
            raise ValueError(f"{name!r} has a method of its own on the vector environment; use that")
        for lane in self.lanes:
            lane.start("call", name, args, kwargs, list(range(lane.count)))
            self._pending.append((lane, None))
        self._state = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the order of the environments."""
        self._expect("call")
        pending = self._take_pending()
        replies = self._gather(pending, timeout, "call")
        self._raise_first([f for reply in replies if reply for f in reply.failures])
        return tuple(value for reply in replies if reply for value in reply.value)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: one value for all, or a list or tuple of one for each."""
        self._ready("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                f"values must be a list or tuple of one value per environment ({self.num_envs}), "
                f"got {len(values)}"
            )
        pending: list[tuple[Lane, Sequence[int] | None]] = []
        for lane in self.lanes:
            part = values[lane.first : lane.first + lane.count]
            lane.start("set_attr", name, list(part), list(range(lane.count)))
            pending.append((lane, None))
        replies = self._gather(pending, None, "set_attr")
        self._raise_first([f for reply in replies if reply for f in reply.failures])

    def call_some(self, indices: Sequence[int], name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`call` for some of the environments."""
        self._ready("call")
        chosen = self._indices(indices, indices, "indices")
        pending: list[tuple[Lane, Sequence[int] | None]] = []
        for lane, members in self._by_lane(sorted(chosen)):
            lane.start("call", name, args, kwargs, members)
            pending.append((lane, members))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, self._gather(pending, None, "call"), strict=True):
            assert members is not None
            if reply is not None:
                failures += reply.failures
                results.update(zip([lane.first + j for j in members], reply.value or [], strict=False))
        self._raise_first(failures)
        return [results[i] for i in chosen]

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    @property
    def np_random_seed(self) -> Any:
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> Any:
        """Every environment's generator (from other processes: copies)."""
        return self.get_attr("np_random")

    # --- the end
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments; a worker that does not follow is killed, so this takes a few seconds at most."""
        self._pending, self._state = [], None
        self._finalizer.detach()
        _close_lanes(self.lanes, self._on_close, 0.0 if terminate else (2.0 if timeout is None else timeout))

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and hasattr(self, "_finalizer"):
            self._finalizer()

    # --- inside
    def _ready(self, operation: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._state is not None:
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while waiting for a pending call to `{self._state}` to complete.",
                self._state,
            )

    def _expect(self, operation: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._state != operation:
            raise NoAsyncCallError(
                f"Calling `{operation}_wait` without any prior call to `{operation}_async`.", operation
            )

    def _spread(self, seed: Seeds) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        seeds = [None if item is None else int(item) for item in seed]
        if len(seeds) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seeds)}."
            )
        return seeds

    def _indices(self, indices: Sequence[int], partners: Sequence[Any], word: str) -> list[int]:
        chosen = [int(i) for i in indices]
        if len(chosen) != len(partners):
            raise ValueError(f"expected as many {word} as indices, got {len(partners)} and {len(chosen)}")
        if len(set(chosen)) != len(chosen) or any(not 0 <= i < self.num_envs for i in chosen):
            raise ValueError(f"indices must be different numbers in [0, {self.num_envs}), got {chosen}")
        masked = [i for i in chosen if not self.active[i]]
        if masked:
            raise ValueError(f"environments {masked} were masked out after a failure")
        return chosen

    def _by_lane(self, chosen: Iterable[int]) -> list[tuple[Lane, list[int]]]:
        groups: dict[int, tuple[Lane, list[int]]] = {}
        for i in chosen:
            lane = self._lane_of[i]
            groups.setdefault(lane.first, (lane, []))[1].append(i - lane.first)
        return list(groups.values())

    def _begin_reset(
        self, chosen: list[int] | None, seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        everyone = range(self.num_envs) if chosen is None else chosen
        alive = [i for i in everyone if self.active[i]]
        self._turn_ring(None if len(alive) == self.num_envs else alive)
        for i in alive:
            self._seeds[i] = seeds[i]
        for lane, members in self._by_lane(alive):
            lane.start("reset", members, [seeds[lane.first + j] for j in members], options, self._ring)
            self._pending.append((lane, members))

    def _turn_ring(self, chosen: Sequence[int] | None) -> None:
        """Go to the next place of the ring; environments that do not step are carried over."""
        before, self._ring = self._ring, (self._ring + 1) % self.slots.ring
        if before == self._ring or chosen is None:
            return
        rest = np.ones(self.num_envs, dtype=np.bool_)
        rest[list(chosen)] = False
        for array in self.slots.obs:
            if array is not None and array.shape[0] == self.slots.ring:
                array[self._ring, rest] = array[before, rest]

    def _take_pending(self) -> list[tuple[Lane, Sequence[int] | None]]:
        pending, self._pending = self._pending, []
        self._state = None
        return pending

    def _gather(
        self, pending: list[tuple[Lane, Sequence[int] | None]], timeout: float | None, word: str
    ) -> list[Extras | None]:
        """The replies of lanes at work: first the caller's own share, then the others as they come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Extras | None] = [None] * len(pending)
        order = sorted(range(len(pending)), key=lambda k: not pending[k][0].inline)
        for k in order:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                replies[k] = pending[k][0].finish(left)
            except TimeoutError:
                raise PendingTimeoutError(
                    f"The call to `{word}_wait` has timed out after {timeout} second(s)."
                ) from None
        return replies

    def _collect(self, timeout: float | None, word: str) -> list[_Record]:
        """Finish a reset or step: keep what came beside the slots, deal with failures, return the infos."""
        pending = self._take_pending()
        replies = self._gather(pending, timeout, word)
        records: list[_Record] = []
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, replies, strict=True):
            if reply is None:
                continue
            for leaf, values in reply.columns.items():
                kept = self._beside[leaf]
                for j, value in zip(range(lane.count) if members is None else members, values, strict=True):
                    kept[lane.first + j] = value
            records += reply.infos
            failures += reply.failures
        if word == "step" and self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._add_plain_ends(records)
        self._raise_first(failures)
        return records

    def _add_plain_ends(self, records: list[_Record]) -> None:
        """Ends without any info are not sent: the flags tell of them."""
        ended = self.slots.terminated | self.slots.truncated
        if not ended.any():
            return
        told = {record[0] for record in records if record[1] is not None}
        for i in np.flatnonzero(ended).tolist():
            if i not in told:
                records.append((i, IN_SLOT, {}, {}))
        for k, (i, final, final_info, info) in enumerate(records):
            if final is IN_SLOT:
                records[k] = (i, self.slots.final[0][i].copy(), final_info, info)
        records.sort(key=lambda record: record[0])

    def _raise_first(self, failures: list[Failure]) -> None:
        if not failures:
            return
        error = error_of(failures[0])
        for other in failures[1:]:
            error.add_note(f"also: {error_of(other)}")
        raise error

    def _observations(self) -> Any:
        columns: list[Any] = []
        for i, array in enumerate(self.slots.obs):
            if i in self._beside:
                columns.append(tuple(self._beside[i]))
            else:
                columns.append(array[self._ring].copy() if self.copy else array[self._ring])
        return self.slots.observations.rebuild(columns)

    def _observation(self, i: int) -> Any:
        values: list[Any] = []
        for leaf, array in enumerate(self.slots.obs):
            if leaf in self._beside:
                values.append(self._beside[leaf][i])
            else:
                value = array[self._ring, i]
                values.append(value.copy() if isinstance(value, np.ndarray) else value)
        return self.slots.observations.rebuild(values)


_Record = tuple[int, Any, dict[str, Any] | None, dict[str, Any]]


def groups(seed: int, n_groups: int, group_size: int, *, iteration: int = 0) -> list[int]:
    """Seeds for `reset` in which the environments of a group start alike and groups differ.

    Group g holds environments `g * group_size … (g + 1) * group_size - 1`.

    >>> a, b, c, d = groups(7, n_groups=2, group_size=2)
    >>> a == b, c == d, a == c
    (True, True, False)
    """
    if n_groups < 1 or group_size < 1:
        raise ValueError(f"n_groups and group_size must be at least 1, got {n_groups} and {group_size}")
    return [derive_seed(seed, "env", iteration, g) for g in range(n_groups) for _ in range(group_size)]


def _merged(records: list[_Record]) -> list[tuple[int, dict[str, Any]]]:
    merged: list[tuple[int, dict[str, Any]]] = []
    for env, final, final_info, info in records:
        if final_info is not None:
            merged.append((env, {"final_obs": final, "final_info": final_info}))
        merged.append((env, info))
    return merged


def _by_env(records: list[_Record]) -> dict[int, dict[str, Any]]:
    infos: dict[int, dict[str, Any]] = {}
    for env, final, final_info, info in records:
        ended = {} if final_info is None else {"final_obs": final, "final_info": final_info}
        infos[env] = {**ended, **info}
    return infos


def _for_lane(loose: Loose, lane: Lane) -> Loose:
    if not loose:
        return loose
    stop = lane.first + lane.count
    return {
        leaf: {i: value for i, value in values.items() if lane.first <= i < stop}
        for leaf, values in loose.items()
    }


def _checked_mask(mask: Any, n_envs: int) -> Any:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (n_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({n_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError("`options['reset_mask']` must contain at least one True value, got none")
    return mask


def _close_lanes(lanes: list[Lane], on_close: Callable[[float], None] | None, seconds: float = 2.0) -> None:
    for lane in lanes:
        with contextlib.suppress(Exception):
            lane.close(seconds)
    lanes.clear()
    if on_close is not None:
        on_close(seconds)
