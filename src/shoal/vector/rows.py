"""A share's rows of the slots: where the results of its environments go, and what is refused there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.errors import EnvError
from shoal.vector.failures import Failure, from_exception
from shoal.vector.slots import Slots
from shoal.vector.timing import StepClock
from shoal.vector.writers import Writer, refuse_unless_text

EnvFn = Callable[[], gymnasium.Env[Any, Any]]


class Rows:
    """Environments `first … first + len(env_fns) - 1`, and where their results go.

    Args:
        env_fns: makes them.
        first: global index of the first one.
        slots: where results go.
        autoreset: Gymnasium's mode.
        check_nan: treat a NaN in rewards or float observations as a failure of its env.
        progress: a word of memory that always tells which env is at work, or None.
        envs: the environments, when they are made already.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        first: int,
        slots: Slots,
        autoreset: AutoresetMode,
        *,
        check_nan: bool = True,
        progress: Any = None,
        envs: Sequence[gymnasium.Env[Any, Any]] | None = None,
    ) -> None:
        self.first, self.count = first, len(env_fns)
        self.env_fns = list(env_fns)
        self.autoreset, self.check_nan = autoreset, check_nan
        self.envs: list[Any] = list(envs) if envs is not None else [fn() for fn in env_fns]
        self.slots = slots
        self.layout = slots.observations
        self._beside = [*self.layout.text, *self.layout.objects]
        self._plain = self.layout.is_leaf
        self._text = self._plain and bool(self.layout.text)
        self._point_at(slots)
        self._ended = [False] * self.count
        self._word = [0] if progress is None else progress
        self._clock = StepClock(slots.times[first : first + self.count])
        self.take_steps()

    def _point_at(self, slots: Slots) -> None:
        stop = self.first + self.count
        self.rewards = slots.rewards[self.first : stop]
        self.terminated, self.truncated = (
            slots.terminated[self.first : stop],
            slots.truncated[self.first : stop],
        )
        leaves = self.layout.leaves
        self._writers: list[list[Any]] = [
            [
                Writer(leaf, slots.obs[i][ring, self.first : stop], self.count)
                if leaf.kind == "fixed"
                else None
                for i, leaf in enumerate(leaves)
            ]
            for ring in range(slots.ring)
        ]
        self._floats = [
            [writer for writer in writers if writer is not None and writer.dtype.kind == "f"]
            for writers in self._writers
        ]
        fixed = self._plain and leaves[0].kind == "fixed"
        self._final = slots.final[0][self.first : stop] if fixed else None

    def take_steps(self) -> None:
        """Look up the step functions of the environments anew."""
        self._steps = [env.step for env in self.envs]
        self._clock.wrap(self._steps)

    @property
    def at_work(self) -> int:
        """Position of the env that is stepped or reset now."""
        return int(self._word[0])

    def put(self, at: int, j: int, obs: Any, ring: int, columns: dict[int, list[Any]]) -> None:
        """Write an observation of any space."""
        values = self.layout.flatten(obs)
        for i, writer in enumerate(self._writers[ring]):
            if writer is not None:
                writer.write(j, values[i])
            else:
                if self.layout.leaves[i].kind == "text" and type(values[i]) is not str:
                    refuse_unless_text(values[i])
                columns[i][at] = values[i]

    def _pay(
        self, rewards: list[Any], actions: Sequence[Any], members: Sequence[int], failures: list[Failure]
    ) -> None:
        try:
            total = sum(rewards)
            if len(members) == self.count:
                self.rewards[...] = rewards
            else:
                self.rewards[members] = [rewards[j] for j in members]
            if total == total or not self.check_nan:
                return
        except (TypeError, ValueError):
            pass
        for at, j in enumerate(members):
            try:
                self.rewards[j] = rewards[j]
                problem = "reward is NaN" if self.check_nan and self.rewards[j] != self.rewards[j] else ""
            except (TypeError, ValueError):
                problem = f"reward must be a number, got {rewards[j]!r}"
            if problem:
                self.rewards[j] = 0.0
                self._refuse(j, problem, actions[at], failures)

    def _refuse_nan(
        self, ring: int, actions: Sequence[Any], members: Sequence[int], failures: list[Failure]
    ) -> None:
        for writer in self._floats[ring]:
            flat = writer.flat
            square = flat.dot(flat)  # NaN if and only if one of them is: squares cannot cancel
            if square == square:
                continue
            for at, j in enumerate(members):
                if np.isnan(writer.rows[j]).any():
                    self._refuse(j, "observation holds NaN", actions[at], failures)

    def _refuse(self, j: int, problem: str, action: Any, failures: list[Failure]) -> None:
        error = EnvError(
            f"{problem} (pass check_nan=False if that is meant)" if "NaN" in problem else problem
        )
        self._ended[j] = True
        failures.append(from_exception(self.first + j, "step", error, action, os.getpid()))
