"""The loop that steps a share of the environments one after another: what every backend spends its time in.

Fixed per-step work is kept out of it: nothing is made or cleared that the last step has not used, and results
go to the slots with one assignment for all environments where that is possible.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
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
CATCH = (Exception, SystemExit)
Infos = list[tuple[int, Any, dict[str, Any] | None, dict[str, Any]]]


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    SLOT = "slot"


IN_SLOT = Where.SLOT


@dataclass(slots=True)
class Extras:
    """What one operation left beside the slots."""

    columns: dict[int, list[Any]] = field(default_factory=dict)  # leaf -> values of the envs, in their order
    infos: Infos = field(default_factory=list)
    """(env, final observation or IN_SLOT or None, final info, info), where any of them is not empty."""
    failures: list[Failure] = field(default_factory=list)
    value: Any = None  # what a call returned


class Stepping:
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

    def step(self, actions: Sequence[Any], members: Sequence[int], ring: int) -> Extras | None:
        """Step the envs `members` (positions in the share) with one action each; the others' rows stay."""
        infos: Infos = []
        failures: list[Failure] = []
        count = self.count
        rewards = [0.0] * count
        size = len(members)
        columns: dict[int, list[Any]] = {i: [None] * size for i in self._beside} if self._beside else {}
        everyone = size == count
        if everyone:
            self.terminated.fill(False)
            self.truncated.fill(False)
            everyone = self._plain
        else:
            self.terminated[members] = self.truncated[members] = False
        done = 0
        while done < size:
            try:
                if not everyone:
                    self._step_some(members, actions, done, rewards, ring, columns, infos)
                elif columns:
                    self._step_beside(actions, done, rewards, columns[0], infos)
                else:
                    self._step_fixed(actions, done, rewards, ring, infos)
                break
            except CATCH as error:
                j = self.at_work
                done = members.index(j) + 1
                failures.append(from_exception(self.first + j, "step", error, actions[done - 1], os.getpid()))
                self._ended[j] = True
                rewards[j] = 0.0
                self.terminated[j] = self.truncated[j] = False
        self._pay(rewards, actions, members, failures)
        if self.check_nan and self._floats[ring]:
            self._refuse_nan(ring, actions, members, failures)
        return Extras(columns, infos, failures) if (columns or infos or failures) else None

    # --- the loops
    def _step_fixed(
        self, actions: Sequence[Any], start: int, rewards: list[Any], ring: int, infos: Infos
    ) -> None:
        """Every env from `start` on; observations are arrays of one shape."""
        word, ended, first, j = self._word, self._ended, self.first, start
        writer = self._writers[ring][0]
        dtype, shape, convert, array_type = writer.dtype, writer.shape, writer.convert, np.ndarray
        rows, steps = writer.rows, self._clock.turn(self._steps)
        if start:
            rows, steps, actions = rows[start:], steps[start:], actions[start:]
        for step, action, row in zip(steps, actions, rows, strict=True):
            word[0] = j
            if ended[j]:
                obs = self._restart(j, infos)
            else:
                obs, rewards[j], terminated, truncated, info = step(action)
                if terminated or truncated:
                    obs = self._end(j, obs, terminated, truncated, info, infos)
                elif info:
                    infos.append((first + j, None, None, info))
            if type(obs) is array_type and obs.dtype is dtype and obs.shape == shape:
                row[...] = obs
            else:
                convert(j, obs)
            j += 1

    def _step_beside(
        self, actions: Sequence[Any], start: int, rewards: list[Any], column: list[Any], infos: Infos
    ) -> None:
        """Every env from `start` on; observations are text or anything else that is no array."""
        word, ended, first, text = self._word, self._ended, self.first, self._text
        steps = self._clock.turn(self._steps)
        for j in range(start, self.count):
            word[0] = j
            if ended[j]:
                obs = self._restart(j, infos)
            else:
                obs, rewards[j], terminated, truncated, info = steps[j](actions[j])
                if terminated or truncated:
                    obs = self._end(j, obs, terminated, truncated, info, infos)
                elif info:
                    infos.append((first + j, None, None, info))
            if text and type(obs) is not str:
                refuse_unless_text(obs)
            column[j] = obs

    def _step_some(
        self,
        members: Sequence[int],
        actions: Sequence[Any],
        start: int,
        rewards: list[Any],
        ring: int,
        columns: dict[int, list[Any]],
        infos: Infos,
    ) -> None:
        """The same for some of the envs, and for nested spaces."""
        ended, steps = self._ended, self._clock.turn(self._steps)
        for at in range(start, len(members)):
            j = members[at]
            self._word[0] = j
            if ended[j]:
                obs = self._restart(j, infos)
            else:
                obs, rewards[j], terminated, truncated, info = steps[j](actions[at])
                if terminated or truncated:
                    obs = self._end(j, obs, terminated, truncated, info, infos)
                elif info:
                    infos.append((self.first + j, None, None, info))
            self.put(at, j, obs, ring, columns)

    def _restart(self, j: int, infos: Infos) -> Any:
        """The step after an end, under next-step autoreset: the first observation of a new episode."""
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            raise EnvError("the episode is over; reset it before the next step")
        self._ended[j] = False
        obs, info = self.envs[j].reset()
        if info:
            infos.append((self.first + j, None, None, info))
        return obs

    def _end(
        self, j: int, obs: Any, terminated: Any, truncated: Any, info: dict[str, Any], infos: Infos
    ) -> Any:
        """What happens when an episode ends: nothing, or a reset now with the end kept aside."""
        self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
        if self.autoreset is not AutoresetMode.SAME_STEP:
            self._ended[j] = True
            if info:
                infos.append((self.first + j, None, None, info))
            return obs
        final: Any = IN_SLOT
        target = self._final
        if (
            target is not None
            and type(obs) is np.ndarray
            and obs.dtype == target.dtype
            and obs.shape == target.shape[1:]
        ):
            target[j] = obs
        else:
            final = copy.deepcopy(obs)  # the env may reuse its buffers in reset
        final_info = dict(info)
        obs, info = self.envs[j].reset()
        if final is not IN_SLOT or final_info or info:
            infos.append((self.first + j, final, final_info, info))
        return obs

    # --- writing and checking
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
