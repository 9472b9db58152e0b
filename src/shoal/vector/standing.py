"""What a pool stands on: its lanes, the slots they share with it, and where in the ring everybody is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.vector.actions import plain_target
from shoal.vector.arguments import checked_indices
from shoal.vector.flight import Flight
from shoal.vector.lanes import Backend, Lane, close
from shoal.vector.recovery import Recovery
from shoal.vector.results import Handouts, Record, Results
from shoal.vector.slots import Slots

OnFailure = Literal["raise", "restart", "mask"]
Pending = tuple[Lane, Sequence[int]]


class Description(NamedTuple):
    """What a pool must know of its environments before it can talk to them."""

    observation_spaces: list[gymnasium.Space[Any]]
    action_spaces: list[gymnasium.Space[Any]]
    observation_space: gymnasium.Space[Any]  # batched
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


class Standing(VectorEnv[Any, Any, Any]):
    """The lanes of a pool and what goes on in them.

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
        self._finalizer = weakref.finalize(self, close, self.lanes, backend, os.getpid())

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

    def _indices(self, indices: Sequence[int], partners: Sequence[Any], word: str) -> list[int]:
        return checked_indices(indices, self.active, partners, word)

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

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments; a worker that does not follow is killed, so this takes a few seconds at most."""
        self._pending, self._state = [], None
        self._finalizer.detach()
        close(
            self.lanes, self.backend, os.getpid(), 0.0 if terminate else (2.0 if timeout is None else timeout)
        )

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and hasattr(self, "_finalizer"):
            self._finalizer()
