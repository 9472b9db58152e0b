"""The loop that steps a share of the environments one after another: what every backend spends its time in.

Fixed per-step work is kept out of it: nothing is made or cleared that the last step has not used, and results
go to the slots with one assignment for all environments where that is possible.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.errors import EnvError
from shoal.vector.extras import IN_SLOT, Extras, Infos
from shoal.vector.failures import Failure, from_exception
from shoal.vector.rows import Rows
from shoal.vector.writers import refuse_unless_text

CATCH = (Exception, SystemExit)


class Stepping(Rows):
    """A share that steps its environments."""

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
