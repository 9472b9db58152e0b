"""A share of the environments, stepped one after another in one thread: the loop that every backend runs.

Whoever owns a share (the caller, a thread, a worker process) passes actions in; results land in the share's
rows of the slots, and what does not fit there comes back as `Extras`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
IN_SLOT = "in slot"


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
        self._at = 0
        self._word = progress

    # --- operations
    def step(self, actions: Sequence[Any], members: Sequence[int], ring: int) -> Extras | None:
        """Step the envs `members` (positions in the share) with one action each."""
        extras = Extras()
        rewards = [0.0] * self.count
        self.terminated[...] = False
        self.truncated[...] = False
        columns: dict[int, list[Any]] = {i: [None] * len(members) for i in self._beside}
        todo = iter(zip(range(len(members)), members, actions, strict=True))
        while True:
            try:
                self._step_through(todo, rewards, ring, columns, extras)
                break
            except CATCH as error:
                at = self._at
                extras.failures.append(
                    from_exception(self.first + members[at], "step", error, actions[at], os.getpid())
                )
                self._ended[members[at]] = True
                rewards[members[at]] = 0.0
                self.terminated[members[at]] = self.truncated[members[at]] = False
        self._pay(rewards, actions, members, extras)
        if self.check_nan:
            self._refuse_nan(ring, actions, members, extras)
        extras.columns = columns
        return extras if (columns or extras.infos or extras.failures) else None

    def _step_through(
        self,
        todo: Iterator[tuple[int, int, Any]],
        rewards: list[Any],
        ring: int,
        columns: dict[int, list[Any]],
        extras: Extras,
    ) -> None:
        steps, ended, word = self._steps, self._ended, self._word
        writers = self._writers[ring]
        write = writers[0].write if len(writers) == 1 and writers[0] is not None else None
        next_step = self.autoreset is AutoresetMode.NEXT_STEP
        note = extras.infos.append
        for at, j, action in todo:
            self._at = at
            if word is not None:
                word[0] = j
            if ended[j]:
                if not next_step:
                    raise EnvError("the episode is over; reset it before the next step")
                ended[j] = False
                obs, info = self.envs[j].reset()
            else:
                obs, rewards[j], terminated, truncated, info = steps[j](action)
                if terminated or truncated:
                    self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
                    obs, info = self._end(j, obs, info, extras)
                elif info:
                    note((self.first + j, None, None, info))
                if write is not None:
                    write(j, obs)
                else:
                    self._put(at, j, obs, ring, columns)
                continue
            if info:
                note((self.first + j, None, None, info))
            self._put(at, j, obs, ring, columns)

    def _end(self, j: int, obs: Any, info: dict[str, Any], extras: Extras) -> tuple[Any, dict[str, Any]]:
        """What happens when an episode ends: nothing, or a reset now with the end kept aside."""
        if self.autoreset is not AutoresetMode.SAME_STEP:
            self._ended[j] = True
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
            if self._word is not None:
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
                columns[i][at] = _own(self.layout.leaves[i], values[i])

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
        self._ended[j] = True
        extras.failures.append(from_exception(self.first + j, "step", error, action, os.getpid()))


def _own(leaf: Leaf, value: Any) -> Any:
    if leaf.kind == "text" and not isinstance(value, str):
        raise EnvError(f"observation must be str in a Text space, got {type(value).__name__}")
    return value


class _Writer:
    """Puts values of one fixed leaf into rows, refusing what does not fit."""

    def __init__(self, leaf: Leaf, rows: np.ndarray[Any, Any], first: int, count: int) -> None:
        self.dtype, self.shape = leaf.dtype, leaf.shape
        self.array = rows
        self.rows = [rows[j, ...] for j in range(count)]
        self.flat = rows.reshape(-1)
        self.first = first

    def write(self, j: int, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
            self.rows[j][...] = value
        else:
            self._convert(j, value)

    def _convert(self, j: int, value: Any) -> None:
        array = np.asarray(value)
        if array.shape != self.shape:
            raise EnvError(f"observation must have shape {self.shape}, got {array.shape}")
        if array.dtype != self.dtype and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise EnvError(f"observation must have dtype {self.dtype}, got {array.dtype} ({value!r:.80})")
        self.rows[j][...] = array


def members_of(mask: Iterable[bool]) -> list[int]:
    """Positions where a mask is set."""
    return [j for j, on in enumerate(mask) if on]
