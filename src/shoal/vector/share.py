"""A share of the environments, stepped one after another in one thread: the loop that every backend runs.

Whoever owns a share (the caller, a thread, a worker process) passes actions in; results land in the share's
rows of the slots, and what does not fit there comes back as `Extras`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.errors import EnvError
from shoal.vector.failures import Failure, from_exception
from shoal.vector.slots import Slots
from shoal.vector.spaces import Leaf

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
CATCH = (Exception, SystemExit)


class Where(Enum):
    """Where a final observation is, when it is not in the message."""

    SLOT = "slot"


IN_SLOT = Where.SLOT


@dataclass
class Extras:
    """What one operation left beside the slots."""

    columns: dict[int, list[Any]] = field(default_factory=dict)  # leaf -> values of the envs, in their order
    infos: list[tuple[int, Any, dict[str, Any] | None, dict[str, Any]]] = field(default_factory=list)
    """(env, final observation or IN_SLOT or None, final info, info), where any of them is not empty."""
    failures: list[Failure] = field(default_factory=list)
    value: Any = None  # what a call returned


class Share:
    """Environments `first … first + len(env_fns) - 1`.

    Args:
        env_fns: makes them.
        first: global index of the first one.
        slots: where results go.
        autoreset: Gymnasium's mode.
        check_nan: treat a NaN in rewards or float observations as a failure of its env.
        progress: a word of memory that always tells which env is at work, or None.
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
        stop = first + self.count
        self.rewards = slots.rewards[first:stop]
        self.terminated, self.truncated = slots.terminated[first:stop], slots.truncated[first:stop]
        layout = slots.observations
        self.layout = layout
        self._beside = [*layout.text, *layout.objects]
        self._writers = [
            [
                _Writer(leaf, slots.obs[i][ring, first:stop], first, self.count)
                if leaf.kind == "fixed"
                else None
                for i, leaf in enumerate(layout.leaves)
            ]
            for ring in range(slots.ring)
        ]
        self._final = (
            slots.final[0][first:stop] if layout.is_leaf and layout.leaves[0].kind == "fixed" else None
        )
        self._floats = [
            [writer for writer in writers if writer is not None and writer.dtype.kind == "f"]
            for writers in self._writers
        ]
        self._steps = [env.step for env in self.envs]
        self._ended = [False] * self.count
        self._some_ended = False
        self._plain = layout.is_leaf
        self._word = [0] if progress is None else progress

    # --- operations
    def step(self, actions: Sequence[Any], members: Sequence[int], ring: int) -> Extras | None:
        """Step the envs `members` (positions in the share) with one action each."""
        extras = Extras()
        rewards = [0.0] * self.count
        self.terminated.fill(False)
        self.truncated.fill(False)
        columns: dict[int, list[Any]] = {i: [None] * len(members) for i in self._beside}
        done = 0
        while done < len(members):
            try:
                if len(members) == self.count and not self._some_ended and self._plain:
                    self._step_all(actions, done, rewards, ring, columns, extras)
                else:
                    self._step_any(members, actions, done, rewards, ring, columns, extras)
                break
            except CATCH as error:
                j = self.at_work
                done = members.index(j) + 1
                extras.failures.append(
                    from_exception(self.first + j, "step", error, actions[done - 1], os.getpid())
                )
                self._ended[j] = self._some_ended = True
                rewards[j] = 0.0
                self.terminated[j] = self.truncated[j] = False
        self._pay(rewards, actions, members, extras)
        if self.check_nan:
            self._refuse_nan(ring, actions, members, extras)
        extras.columns = columns
        return extras if (columns or extras.infos or extras.failures) else None

    def _step_all(
        self,
        actions: Sequence[Any],
        start: int,
        rewards: list[Any],
        ring: int,
        columns: dict[int, list[Any]],
        extras: Extras,
    ) -> None:
        """The hot loop: every env from `start` on, none of them at an end, observations of one leaf."""
        word, first, note = self._word, self.first, extras.infos.append
        writer = self._writers[ring][0]
        if writer is None:
            texts, text = columns[0], self.layout.leaves[0].kind == "text"
            for j in range(start, self.count):
                word[0] = j
                obs, rewards[j], terminated, truncated, info = self._steps[j](actions[j])
                if terminated or truncated:
                    self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
                    obs, info = self._end(j, obs, info, extras)
                elif info:
                    note((first + j, None, None, info))
                if text and type(obs) is not str:
                    _refuse_text(obs)
                texts[j] = obs
            return
        rows, dtype, shape, convert = writer.rows, writer.dtype, writer.shape, writer.convert
        steps, array = self._steps, np.ndarray
        for j in range(start, self.count):
            word[0] = j
            obs, rewards[j], terminated, truncated, info = steps[j](actions[j])
            if terminated or truncated:
                self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
                obs, info = self._end(j, obs, info, extras)
            elif info:
                note((first + j, None, None, info))
            if type(obs) is array and obs.dtype is dtype and obs.shape == shape:
                rows[j][...] = obs
            else:
                convert(j, obs)

    def _step_any(
        self,
        members: Sequence[int],
        actions: Sequence[Any],
        start: int,
        rewards: list[Any],
        ring: int,
        columns: dict[int, list[Any]],
        extras: Extras,
    ) -> None:
        """The same for some of the envs, for ends left over from the last step, and for nested spaces."""
        ended, note = self._ended, extras.infos.append
        for at in range(start, len(members)):
            j = members[at]
            self._word[0] = j
            if ended[j]:
                if self.autoreset is not AutoresetMode.NEXT_STEP:
                    raise EnvError("the episode is over; reset it before the next step")
                ended[j] = False
                obs, info = self.envs[j].reset()
                if info:
                    note((self.first + j, None, None, info))
            else:
                obs, rewards[j], terminated, truncated, info = self._steps[j](actions[at])
                if terminated or truncated:
                    self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
                    obs, info = self._end(j, obs, info, extras)
                elif info:
                    note((self.first + j, None, None, info))
            self._put(at, j, obs, ring, columns)
        self._some_ended = any(ended)

    def _end(self, j: int, obs: Any, info: dict[str, Any], extras: Extras) -> tuple[Any, dict[str, Any]]:
        """What happens when an episode ends: nothing, or a reset now with the end kept aside."""
        if self.autoreset is not AutoresetMode.SAME_STEP:
            self._ended[j] = self._some_ended = True
            if info:
                extras.infos.append((self.first + j, None, None, info))
            return obs, info
        final: Any = IN_SLOT
        target = self._final
        if (
            target is not None
            and type(obs) is np.ndarray
            and obs.dtype == target.dtype
            and (obs.shape == target.shape[1:])
        ):
            target[j] = obs
        else:
            final = copy.deepcopy(obs)  # the env may reuse its buffers in reset
        final_info = dict(info)
        obs, info = self.envs[j].reset()
        if final is not IN_SLOT or final_info or info:
            extras.infos.append((self.first + j, final, final_info, info))
        return obs, info

    def reset(
        self, members: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None, ring: int
    ) -> Extras | None:
        """Reset the envs `members`, each with its seed."""
        extras = Extras()
        columns: dict[int, list[Any]] = {i: [None] * len(members) for i in self._beside}
        for at, (j, seed) in enumerate(zip(members, seeds, strict=True)):
            self._word[0] = j
            try:
                obs, info = self.envs[j].reset(seed=seed, options=options)
                self._put(at, j, obs, ring, columns)
            except CATCH as error:
                extras.failures.append(from_exception(self.first + j, "reset", error, None, os.getpid()))
                continue
            self._ended[j] = False
            self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
            if info:
                extras.infos.append((self.first + j, None, None, info))
        extras.columns = columns
        return extras if (columns or extras.infos or extras.failures) else None

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], members: Sequence[int]) -> Extras:
        """Call a method, or read an attribute, of each of the envs."""
        extras = Extras(value=[])
        for j in members:
            try:
                attribute = self.envs[j].get_wrapper_attr(name)
                result = attribute(*args, **kwargs) if callable(attribute) else attribute
            except CATCH as error:
                extras.failures.append(
                    from_exception(self.first + j, f"call {name}", error, None, os.getpid())
                )
                result = None
            extras.value.append(result)
        return extras

    def apply(self, function: Callable[..., Any], args: Sequence[Any], members: Sequence[int]) -> Extras:
        """`function(env, *args)` for each of the envs."""
        extras = Extras(value=[])
        for j in members:
            result = None
            try:
                result = function(self.envs[j], *args)
            except CATCH as error:
                name = getattr(function, "__name__", "apply")
                extras.failures.append(from_exception(self.first + j, name, error, None, os.getpid()))
            extras.value.append(result)
        self._steps = [env.step for env in self.envs]
        return extras

    def set_attr(self, name: str, values: Sequence[Any], members: Sequence[int]) -> Extras:
        """Set an attribute of each of the envs, on the wrapper that has it."""
        extras = Extras()
        for j, value in zip(members, values, strict=True):
            try:
                self.envs[j].set_wrapper_attr(name, value)
            except CATCH as error:
                extras.failures.append(
                    from_exception(self.first + j, f"set {name}", error, None, os.getpid())
                )
        self._steps = [env.step for env in self.envs]
        return extras

    def rebuild(self, members: Sequence[int]) -> Extras:
        """Throw these envs away and make them anew."""
        extras = Extras()
        for j in members:
            with contextlib.suppress(Exception):
                self.envs[j].close()
            try:
                self.envs[j] = self.env_fns[j]()
                self._steps[j] = self.envs[j].step
                self._ended[j] = False
            except CATCH as error:
                extras.failures.append(from_exception(self.first + j, "make", error, None, os.getpid()))
        return extras

    def await_reset(self, members: Sequence[int]) -> None:
        """Treat the episodes of these envs as ended."""
        for j in members:
            self._ended[j] = self._some_ended = True

    @property
    def at_work(self) -> int:
        """Position of the env that is stepped or reset now."""
        return int(self._word[0])

    def detach(self) -> None:
        """Point everything it writes to elsewhere: its thread hangs, and its rows belong to a successor."""
        self.rewards, self.terminated, self.truncated = (
            item.copy() for item in (self.rewards, self.terminated, self.truncated)
        )
        if self._final is not None:
            self._final = self._final.copy()
        for writers in self._writers:
            for writer in writers:
                if writer is not None:
                    writer.rows = [row.copy() for row in writer.rows]

    def close(self) -> None:
        """Close every env; one that fails does not keep the others open."""
        problems: list[BaseException] = []
        for env in self.envs:
            try:
                env.close()
            except CATCH as error:
                problems.append(error)
        self.envs, self._steps = [], []
        if problems:
            raise problems[0]

    # --- writing and checking
    def _put(self, at: int, j: int, obs: Any, ring: int, columns: dict[int, list[Any]]) -> None:
        values = self.layout.flatten(obs)
        for i, writer in enumerate(self._writers[ring]):
            if writer is not None:
                writer.write(j, values[i])
            else:
                if self.layout.leaves[i].kind == "text" and type(values[i]) is not str:
                    _refuse_text(values[i])
                columns[i][at] = values[i]

    def _pay(
        self, rewards: list[Any], actions: Sequence[Any], members: Sequence[int], extras: Extras
    ) -> None:
        try:
            total = sum(rewards)
            self.rewards[...] = rewards
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
                self._refuse(j, problem, actions[at], extras)

    def _refuse_nan(self, ring: int, actions: Sequence[Any], members: Sequence[int], extras: Extras) -> None:
        for writer in self._floats[ring]:
            flat = writer.flat
            square = np.dot(flat, flat)  # NaN if and only if one of them is: squares cannot cancel
            if square == square:
                continue
            for at, j in enumerate(members):
                if np.isnan(writer.rows[j]).any():
                    self._refuse(j, "observation holds NaN", actions[at], extras)

    def _refuse(self, j: int, problem: str, action: Any, extras: Extras) -> None:
        error = EnvError(
            f"{problem} (pass check_nan=False if that is meant)" if "NaN" in problem else problem
        )
        self._ended[j] = self._some_ended = True
        extras.failures.append(from_exception(self.first + j, "step", error, action, os.getpid()))


def _refuse_text(value: Any) -> None:
    if not isinstance(value, str):
        raise EnvError(f"observation must be str in a Text space, got {type(value).__name__}")


class _Writer:
    """Puts values of one fixed leaf into rows, refusing what does not fit."""

    def __init__(self, leaf: Leaf, rows: np.ndarray[Any, Any], first: int, count: int) -> None:
        self.dtype, self.shape = leaf.dtype, leaf.shape
        self.array = rows
        self.rows = [rows[j, ...] for j in range(count)]
        self.flat = rows.reshape(-1)
        self.first = first

    def write(self, j: int, value: Any) -> None:
        """Write one value."""
        if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
            self.rows[j][...] = value
        else:
            self.convert(j, value)

    def convert(self, j: int, value: Any) -> None:
        """Write a value that is not an array of exactly the right kind, if it can be one."""
        array = np.asarray(value)
        if array.shape != self.shape:
            raise EnvError(f"observation must have shape {self.shape}, got {array.shape}")
        if array.dtype != self.dtype and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise EnvError(f"observation must have dtype {self.dtype}, got {array.dtype} ({value!r:.80})")
        self.rows[j][...] = array


def members_of(mask: Iterable[bool]) -> list[int]:
    """Positions where a mask is set."""
    return [j for j, on in enumerate(mask) if on]
