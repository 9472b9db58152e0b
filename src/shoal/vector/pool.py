"""Many environments behind one `gymnasium.vector.VectorEnv`, whatever steps them.

The pool starts an operation on its lanes, collects their replies and lays the results out; what a backend is
(the caller itself, threads, processes, other machines) is known only to the lanes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
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
from shoal.vector.actions import NOTHING_LOOSE, Loose, plain_target, write_batch, write_some
from shoal.vector.failures import Failure
from shoal.vector.flight import Flight
from shoal.vector.infos import batch_infos
from shoal.vector.lanes import Backend, Lane
from shoal.vector.recovery import Recovery, raise_first
from shoal.vector.results import Handouts, Ready, Record, Results, StepResult, by_env, merged
from shoal.vector.share import Extras
from shoal.vector.slots import Slots
from shoal.vector.timing import quantiles

OnFailure = Literal["raise", "restart", "mask"]
Seeds = int | Sequence[int | None] | None
Pending = tuple[Lane, Sequence[int]]


class PendingTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """A `*_wait(timeout=…)` ran out; the late replies are dropped when they come."""


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
        copy_observations: return copies; else views that later steps overwrite.
        backend: what the lanes stand on, if they stand on something.
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
        backend: Backend | None = None,
    ) -> None:
        self.num_envs = slots.n_envs
        self.lanes, self.slots = list(lanes), slots
        self.autoreset_mode = autoreset
        self._same_step = autoreset is AutoresetMode.SAME_STEP
        self.metadata = {**description.metadata, "autoreset_mode": autoreset}
        self.render_mode, self.spec = description.render_mode, description.spec
        self.observation_spaces = description.observation_spaces
        self.action_spaces = description.action_spaces
        self.single_observation_space = description.observation_spaces[0]
        self.single_action_space = description.action_spaces[0]
        self.observation_space = description.observation_space
        self.action_space = description.action_space
        self.copy = copy_observations
        self.active = np.ones(self.num_envs, dtype=np.bool_)
        """False for environments that were masked out after a failure."""
        self.all_active = True
        self.seeds: list[int | None] = [None] * self.num_envs
        self.results = Results(slots)
        self.backend = backend
        self.handouts: Handouts | None = None
        self.recovery = Recovery(
            weakref.proxy(self), on_failure, max_restarts, backend.revive if backend else None
        )
        self.flight = Flight(weakref.proxy(self))
        self._ring = 0
        self._waited = self._stepping = 0.0
        self._step_begun = 0.0
        self._state: str | None = None
        self._pending: list[Pending] = []
        self._paid: list[Record] = []
        self._lane_of = [lane for lane in self.lanes for _ in range(lane.count)]
        self._whole: list[Pending] = [
            (lane, range(lane.count)) for lane in sorted(self.lanes, key=lambda lane: not lane.inline)
        ]
        """Every lane with all of its envs; the caller's own first, to be finished first."""
        self._plain_actions = plain_target(slots)
        self._small = self.results.small_places() if copy_observations else None
        self._finalizer = weakref.finalize(self, _close, self.lanes, backend, os.getpid())

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
        self._ready("reset_async")
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
        return self._batch(), batch_infos(self.num_envs, merged(records))

    def step_async(self, actions: Any) -> None:
        """Begin a step; `step_wait` returns its result."""
        if self.closed or self._state is not None or self.flight.ids:
            self._ready("step_async")
        target = self._plain_actions
        if (
            target is not None
            and type(actions) is np.ndarray
            and actions.dtype is target.dtype
            and actions.shape == target.shape
        ):
            target[...] = actions
            self._step_all(NOTHING_LOOSE)
        else:
            self._step_all(write_batch(self.slots, actions))

    def step_async_each(self, actions: Sequence[Any]) -> None:
        """`step_async` with one action per environment, not batched."""
        self._ready("step_async")
        if len(actions) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} actions, got {len(actions)}")
        self._step_all(write_some(self.slots, range(self.num_envs), actions))

    def _step_all(self, loose: Loose) -> None:
        chosen: list[int] | None = None
        if self.recovery.owed or not self.all_active:
            chosen = self._able()
        self._begin_step(chosen, loose)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminations, truncations and infos of the step begun by `step_async`."""
        if self.closed or self._state != "step":
            self._expect("step")
        records = self._collect(timeout, "step")
        slots = self.slots
        return (
            self._batch(),
            slots.rewards.copy(),
            slots.terminated.copy(),
            slots.truncated.copy(),
            batch_infos(self.num_envs, merged(records)) if records else {},
        )

    def step_wait_each(self) -> tuple[Any, Any, Any, Any, list[Record]]:
        """`step_wait` with the infos as they came: `(env, final observation, final info or None, info)`."""
        self._expect("step")
        records = self._collect(None, "step")
        slots = self.slots
        flags = slots.terminated.copy(), slots.truncated.copy()
        return self._batch(), slots.rewards.copy(), *flags, records

    # --- some of the environments
    def reset_each(
        self, seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all environments: a batch of observations and one info per environment."""
        self._ready("reset_async")
        self._begin_reset(None, self._spread(list(seeds)), options)
        self._state = "reset"
        infos = by_env(self._collect(None, "reset"))
        return self._batch(), [infos.get(i, {}) for i in range(self.num_envs)]

    def reset_some(
        self, indices: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> list[tuple[Any, dict[str, Any]]]:
        """Reset the environments `indices`, each with its seed; one `(observation, info)` for each."""
        self._ready("reset_async")
        chosen = self._indices(indices, seeds, "seeds")
        everyone: list[int | None] = [None] * self.num_envs
        for i, seed in zip(chosen, seeds, strict=True):
            everyone[i] = seed
        self._begin_reset(sorted(chosen), everyone, options)
        self._state = "reset"
        infos = by_env(self._collect(None, "reset"))
        return [(self._observation(i), infos.get(i, {})) for i in chosen]

    def step_some(self, indices: Sequence[int], actions: Sequence[Any]) -> list[StepResult]:
        """Step only the environments `indices`, with one action each; the others are left alone.

        An action may be anything: what is not in the action space reaches the env as it is.
        """
        self._ready("step_async")
        chosen = self._indices(indices, actions, "actions")
        loose = write_some(self.slots, chosen, actions)
        self._paid = self.recovery.pay_owed(chosen)
        paid = {record[0] for record in self._paid}
        self._begin_step(sorted(i for i in chosen if i not in paid), loose)
        infos = by_env(self._collect(None, "step"))
        return [self.result(i, infos) for i in chosen]

    def observation_ring(self) -> Any:
        """The observations of the last `ring` steps, batched `[ring, num_envs, ...]`: views, not copies.

        `ring_position` is where the latest ones are; they go round, the next place after the last is the first.
        """
        if self.slots.observations.text or self.slots.observations.objects:
            raise ValueError("a ring holds observations of fixed size only, not text or custom spaces")
        return self.slots.observations.rebuild(self.slots.obs)

    @property
    def ring_position(self) -> int:
        """The place of the latest observations in `observation_ring()`."""
        return self._ring

    def stats(self) -> dict[str, Any]:
        """What is known of speed, memory and failures.

        `step_p50` and `step_p99` are seconds per step of each env, from a sample of its steps (NaN before the
        first; within 10 %); `wait_share` is the part of the time spent in steps in which the caller waited for
        others; `restarts` and `failures` count per env; `workers` has a row with pid and memory for each.
        """
        p50, p99 = quantiles(self.slots.times, 0.5, 0.99)
        return {
            "step_p50": p50,
            "step_p99": p99,
            "wait_share": self._waited / self._stepping if self._stepping else 0.0,
            "restarts": list(self.recovery.replaced),
            "failures": list(self.recovery.blamed),
            "active": int(self.active.sum()),
            "workers": self.backend.stats() if self.backend is not None else [],
        }

    def observations(self) -> Any:
        """The present observations of all environments."""
        return self.results.rows(range(self.num_envs), [lane.ring for lane in self._lane_of])

    # --- whichever are ready first
    def send(self, env_ids: Sequence[int], actions: Sequence[Any]) -> None:
        """Begin to step these environments; `recv` returns each when it is ready.

        An environment takes its next action only after `recv` has returned its last result.
        """
        self._ready("send")
        self.flight.send(self._indices(env_ids, actions, "actions"), actions)

    def send_reset(self, env_ids: Sequence[int], seeds: Sequence[int | None] | None = None) -> None:
        """Begin to reset these environments; `recv` returns their first observations."""
        self._ready("send_reset")
        chosen = self._indices(env_ids, env_ids, "ids")
        self.flight.send_reset(chosen, list(seeds) if seeds is not None else [None] * len(chosen))

    def recv(self, min_envs: int = 1, timeout: float | None = None) -> Ready:
        """The environments that are ready, at least `min_envs` of those in flight.

        After `timeout` seconds it returns what there is, perhaps nothing; `late` names who kept it waiting.
        """
        self._ready("recv", in_flight=True)
        return self.flight.recv(min_envs, timeout)

    # --- methods and attributes of the environments
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result per environment."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `call_wait` returns its results."""
        self._ready("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"{name!r} has a method of its own on the vector environment; use that")
        for lane in self.lanes:
            lane.start("call", name, args, kwargs, list(range(lane.count)))
            self._pending.append((lane, range(lane.count)))
        self._state = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the order of the environments."""
        self._expect("call")
        pending, self._pending, self._state = self._pending, [], None
        replies = self._gather(pending, timeout, "call")
        raise_first([f for reply in replies if reply for f in reply.failures])
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
        pending: list[Pending] = []
        for lane in self.lanes:
            part = values[lane.first : lane.first + lane.count]
            lane.start("set_attr", name, list(part), list(range(lane.count)))
            pending.append((lane, range(lane.count)))
        replies = self._gather(pending, None, "set_attr")
        raise_first([f for reply in replies if reply for f in reply.failures])

    def apply(
        self, function: Callable[..., Any], *args: Any, indices: Sequence[int] | None = None
    ) -> list[Any]:
        """`function(env, *args)` for each environment, or some of them, where they live."""
        self._ready("apply")
        chosen = list(range(self.num_envs)) if indices is None else self._indices(indices, indices, "indices")
        pending: list[Pending] = []
        for lane, part in self.by_lane(sorted(chosen)):
            lane.start("apply", function, args, part)
            pending.append((lane, part))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, self._gather(pending, None, "apply"), strict=True):
            if reply is not None:
                failures += reply.failures
                results.update(zip([lane.first + j for j in members], reply.value or [], strict=False))
        raise_first(failures)
        return [results[i] for i in chosen]

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    @property  # type: ignore[override]
    def np_random_seed(self) -> Any:
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """Every environment's generator (from other processes: copies)."""
        return self.get_attr("np_random")

    # --- the end
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments; a worker that does not follow is killed, so this takes a few seconds at most."""
        self._pending, self._state = [], None
        self._finalizer.detach()
        _close(
            self.lanes, self.backend, os.getpid(), 0.0 if terminate else (2.0 if timeout is None else timeout)
        )

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and hasattr(self, "_finalizer"):
            self._finalizer()

    # --- inside
    def _ready(self, operation: str, *, in_flight: bool = False) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._state is not None:
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while waiting for a pending call to `{self._state}` to complete.",
                self._state,
            )
        if self.flight.ids and not (in_flight or operation in ("send", "send_reset")):
            raise AlreadyPendingCallError(
                f"Calling `{operation}` while environments {sorted(self.flight.ids)[:8]} are in flight; `recv` them.",
                "recv",
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

    def lane_of(self, i: int) -> Lane:
        """The lane of one environment."""
        return self._lane_of[i]

    def by_lane(self, chosen: Iterable[int]) -> list[tuple[Lane, list[int]]]:
        """Environments as (lane, positions in its share)."""
        parts: dict[int, tuple[Lane, list[int]]] = {}
        for i in chosen:
            lane = self._lane_of[i]
            parts.setdefault(lane.first, (lane, []))[1].append(i - lane.first)
        return list(parts.values())

    def _able(self) -> list[int]:
        """The envs that a full step steps; what is owed to the others is paid."""
        active = np.flatnonzero(self.active).tolist()
        off = ~self.active
        self.slots.rewards[off], self.slots.terminated[off], self.slots.truncated[off] = 0.0, False, False
        self._paid = self.recovery.pay_owed(active)
        paid = {record[0] for record in self._paid}
        return [i for i in active if i not in paid]

    def _begin_step(self, chosen: list[int] | None, loose: Loose) -> None:
        if self.slots.ring > 1:
            self._turn_ring(chosen)
        if chosen is None:
            self._step_begun = time.perf_counter()
            for lane in self.lanes:
                lane.start_step(None, for_lane(loose, lane) if loose else loose, self._ring)
            self._pending = self._whole
        else:
            for lane, members in self.by_lane(chosen):
                lane.start_step(members, for_lane(loose, lane), self._ring)
                self._pending.append((lane, members))
        self._state = "step"

    def _begin_reset(
        self, chosen: list[int] | None, seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        everyone = range(self.num_envs) if chosen is None else chosen
        alive = [i for i in everyone if self.active[i]]
        if len(alive) == self.num_envs:
            self.recovery.revive_lost()
        self.recovery.forget(alive)
        self._turn_ring(None if len(alive) == self.num_envs else alive)
        for i in alive:
            self.seeds[i] = seeds[i]
        for lane, members in self.by_lane(alive):
            lane.start("reset", members, [seeds[lane.first + j] for j in members], options, self._ring)
            self._pending.append((lane, members))

    def _turn_ring(self, chosen: Sequence[int] | None) -> None:
        """Go to the next place of the ring; environments that do not step are carried over."""
        if self.handouts is not None:
            self._ring = self.handouts.next_place()
        else:
            self._ring = (self._ring + 1) % self.slots.ring
        if chosen is None:
            for lane in self.lanes:
                lane.ring = self._ring
            return
        stepping = np.zeros(self.num_envs, dtype=np.bool_)
        stepping[list(chosen)] = True
        for lane in self.lanes:
            self.turn_lane(lane, stepping[lane.first : lane.first + lane.count], self._ring)

    def turn_lane(self, lane: Lane, stepping: np.ndarray[Any, Any], ring: int) -> None:
        """Move one lane to a place of the ring, with the observations of those that do not step."""
        before, lane.ring = lane.ring, ring
        if before != ring and not stepping.all():
            rest = lane.first + np.flatnonzero(~stepping)
            for leaf in self.slots.observations.fixed:
                array = self.slots.obs[leaf]
                array[ring, rest] = array[before, rest]

    def _gather(self, pending: list[Pending], timeout: float | None, word: str) -> list[Extras | None]:
        """The replies of lanes at work: first the caller's own share, then the others as they come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Extras | None] = [None] * len(pending)
        try:
            for inline in (True, False):
                for k, (lane, _) in enumerate(pending):
                    if lane.inline is inline:
                        left = None if deadline is None else max(0.0, deadline - time.monotonic())
                        replies[k] = lane.finish(left)
        except TimeoutError:
            raise PendingTimeoutError(
                f"The call to `{word}_wait` has timed out after {timeout} second(s)."
            ) from None
        return replies

    def _collect(self, timeout: float | None, word: str) -> list[Record]:
        """Finish a reset or step: keep what came beside the slots, deal with failures, return the infos."""
        pending, self._pending, self._state = self._pending, [], None
        if pending is self._whole and timeout is None:
            replies = self._finish_whole(pending)
        else:
            replies = self._gather(pending, timeout, word)
        records, self._paid = self._paid, []
        return self.take(pending, replies, records, word)

    def _finish_whole(self, pending: list[Pending]) -> list[Extras | None]:
        """The replies of a full step, the caller's own share first; notes how long it waited for others."""
        replies: list[Extras | None] = []
        now = time.perf_counter
        waiting = 0.0
        for lane, _ in pending:
            if not waiting and not lane.inline:
                waiting = now()
            replies.append(lane.finish())
        end = now()
        if waiting:
            self._waited += end - waiting
        self._stepping += end - self._step_begun
        return replies

    def take(
        self, pending: list[Pending], replies: list[Extras | None], records: list[Record], word: str
    ) -> list[Record]:
        """Take over the replies of lanes; returns the infos, completed by those of replaced environments."""
        failures: list[Failure] = []
        for (lane, members), reply in zip(pending, replies, strict=True):
            if reply is not None:
                but = {failure.env for failure in reply.failures}
                self.results.keep(lane, members, reply, but)
                records += reply.infos
                failures += reply.failures
        if self._same_step and word == "step" and self.slots.any_end():
            self.results.add_plain_ends(
                records, (lane.first + j for lane, members in pending for j in members)
            )
        if failures:
            failures.sort(key=lambda failure: failure.env)
            self.tell(failures)
            stepped = {lane.first + j for lane, members in pending for j in members}
            replaced = self.recovery.handle(failures, stepped, word)
            told = {record[0] for record in replaced}
            records = [record for record in records if record[0] not in told] + replaced
        return records

    def tell(self, failures: list[Failure]) -> None:
        """Called with the failures of an operation before they are dealt with; for subclasses."""

    def result(self, i: int, infos: dict[int, dict[str, Any]]) -> StepResult:
        """One environment's part of the latest step."""
        slots = self.slots
        return StepResult(
            self._observation(i),
            float(slots.rewards[i]),
            bool(slots.terminated[i]),
            bool(slots.truncated[i]),
            infos.get(i, {}),
        )

    def _batch(self) -> Any:
        if self.handouts is not None:
            return self.handouts.give(self._ring)
        if self._small is not None:
            return self._small[self._ring].copy()
        return self.results.batch(self._ring, self.copy)

    def _observation(self, i: int) -> Any:
        return self.slots.observations.rebuild(self.results.values(i, self._lane_of[i].ring))

    def last_values(self, i: int) -> list[Any]:
        """The leaf values that an environment showed before the operation now under way."""
        return self.results.values(i, (self._lane_of[i].ring - 1) % self.slots.ring)

    def put_values(self, i: int, values: Sequence[Any]) -> None:
        """Make these an environment's present observation."""
        self.results.put(i, self._lane_of[i].ring, values)


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


def for_lane(loose: Loose, lane: Lane) -> Loose:
    """The part of loose actions that concerns a lane."""
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
        raise ValueError(  # (its users look for Gymnasium's words)
            "`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return mask


def _close(lanes: list[Lane], backend: Backend | None, owner: int, seconds: float = 2.0) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that made them: they are not ours to end
    for lane in lanes:
        with contextlib.suppress(Exception):
            lane.close(seconds)
    if backend is not None:
        backend.close(seconds)
