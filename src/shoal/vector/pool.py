"""Many environments behind one `gymnasium.vector.VectorEnv`, whatever steps them: what a caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.vector.actions import NOTHING_LOOSE, Loose, write_batch, write_some
from shoal.vector.arguments import Seeds, checked_mask, spread
from shoal.vector.asking import Asking
from shoal.vector.infos import batch_infos
from shoal.vector.results import Ready, Record, StepResult, by_env, merged
from shoal.vector.timing import quantiles


class VectorPool(Asking):
    """A vector environment over lanes; made by `make_vec`."""

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

    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Begin a reset; `reset_wait` returns its result."""
        self._ready("reset_async")
        seeds = spread(seed, self.num_envs)
        chosen: list[int] | None = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            chosen = np.flatnonzero(checked_mask(options.pop("reset_mask"), self.num_envs)).tolist()
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

    def reset_each(
        self, seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all environments: a batch of observations and one info per environment."""
        self._ready("reset_async")
        self._begin_reset(None, spread(list(seeds), self.num_envs), options)
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

    def _able(self) -> list[int]:
        """The envs that a full step steps; what is owed to the others is paid."""
        active = np.flatnonzero(self.active).tolist()
        off = ~self.active
        self.slots.rewards[off], self.slots.terminated[off], self.slots.truncated[off] = 0.0, False, False
        self._paid = self.recovery.pay_owed(active)
        paid = {record[0] for record in self._paid}
        return [i for i in active if i not in paid]

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
