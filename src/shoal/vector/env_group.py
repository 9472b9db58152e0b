"""A group of environments that one thread makes, steps, resets, asks and closes, one after another.

Results go to the group's rows of the buffers, with one assignment for all environments where that is possible; what
has no fixed size, and what went wrong, comes back as a `Reply`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.data import (
    UNCHANGING,
    check_flags,
    check_step_result,
    deep_copy,
    info_of,
    refuse_no_text,
    reward_of,
)
from shoal.core.errors import EnvError, safe_repr
from shoal.envs.catalogue import EnvFn
from shoal.vector.buffers import Array, Buffers, PickledActions, RowWriter, is_array_of, read, reader
from shoal.vector.infos import CELLS, FINAL_IN_BUFFER, EnvInfo, Info, InfoTable
from shoal.vector.messages import (
    NOTHING,
    Apply,
    Attach,
    Close,
    Command,
    EnvDescription,
    Failure,
    Make,
    Rebuild,
    Reply,
    Reset,
    Step,
    from_exception,
)

LOADING = 0xFFFFFFFF
"""Progress of a group that does not have its environments yet; else the position of the env at work."""


def call_attribute(env: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of an env, or read an attribute, of the wrapper that has it."""
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


_PROCESS = os.urandom(8)
"""Of this interpreter, and of those that were forked from it."""


class EnvGroup:
    """Environments `first … first + len(env_fns) - 1`; `progress[0]` always holds which of them is at work.

    Args:
        env_fns: functions that make the environments.
        first: number of the first one.
        progress: where to write the position of the env at work; None for the caller's own group.
    """

    def __init__(self, env_fns: Sequence[EnvFn], first: int, progress: Any = None) -> None:
        self.env_fns, self.first, self.count = list(env_fns), first, len(env_fns)
        self.envs: list[Any] = []
        self.progress = [LOADING] if progress is None else progress
        self._ended = [False] * self.count
        self._ending: tuple[Any, Info] | None = None
        # An env that raises KeyboardInterrupt is as broken as any other; where it may be a real Ctrl-C of the
        # caller's, it passes.
        main = threading.current_thread() is threading.main_thread()
        self.reraise: tuple[type[BaseException], ...] = (
            (KeyboardInterrupt,) if main and progress is None else ()
        )

    def run(self, command: Command) -> Reply:
        """Execute a command."""
        match command:
            case Step():
                actions = command.actions
                if actions is None:
                    actions = self.actions(command.members, command.pickled)
                return self.step(actions, command.members)
            case Reset():
                return self.reset(command)
            case Make():
                return self.make()
            case Attach():
                return self.attach(command)
            case Close():
                return self.close()
            case Rebuild():
                work = self._rebuild
            case Apply(function=function, args=args, members=members):
                given = dict(zip(members, args, strict=True))
                work = lambda j: deep_copy(function(self.envs[j], *given[j]))  # noqa: E731
            case _:
                raise TypeError(f"a group cannot do {command!r:.200}")
        reply = self._each(command.members, command.doing, work)
        self._steps = [env.step for env in self.envs]
        return reply

    def make(self) -> Reply:
        """Make the environments, until one fails; `value` describes them."""
        reply = Reply(value=[])
        for j, fn in enumerate(self.env_fns):
            self.progress[0] = j
            try:
                env = fn()
                self.envs.append(env)
                spaces = env.observation_space, env.action_space
                identity = _PROCESS, os.getpid(), id(env.unwrapped)
                reply.value.append(
                    EnvDescription(*spaces, dict(env.metadata), env.render_mode, env.spec, identity)
                )
            except BaseException as error:
                self._note(reply.failures, j, "make", error)
                with contextlib.suppress(Exception):
                    self.close()
                break
        return reply

    def attach(self, command: Attach, buffers: Buffers | None = None) -> Reply:
        """Write results into these buffers from now on; into its own where none are given or they are for it alone."""
        buffers = command.buffers(n_envs=self.count) if buffers is None else buffers
        self.buffers, self.autoreset, self.check_nan = buffers, command.autoreset, command.check_nan
        self.layout = buffers.observations
        self.has_own_buffers = buffers.n_envs == self.count
        rows = slice(0, None) if self.has_own_buffers else slice(self.first, self.first + self.count)
        self.rewards = buffers.rewards[rows]
        self.terminated, self.truncated = buffers.terminated[rows], buffers.truncated[rows]
        leaves = self.layout.leaves
        self._writers = {i: RowWriter(leaves[i], buffers.obs[i][rows]) for i in self.layout.fixed}
        self._floats = [writer for writer in self._writers.values() if writer.dtype.kind == "f"]
        self._by_message = [i for i in range(len(leaves)) if i not in self._writers]
        self._plain = self._writers[0] if self.layout.is_leaf and self._writers else None
        self._only_text = self.layout.is_leaf and leaves[0].kind == "text"
        self._final = None if buffers.final is None else buffers.final[rows]
        self._checks_observations = self.check_nan and bool(self._floats)
        self._read = reader(buffers, 0 if self.has_own_buffers else self.first, self.count)
        self._all = range(self.count)
        self._steps = [env.step for env in self.envs]
        return NOTHING

    def actions(self, members: Sequence[int] | None, pickled: PickledActions) -> list[Any]:
        """The actions for the members, as the caller left them in the buffers or beside."""
        if members is None:
            return read(self.buffers, self.first, self._all, pickled) if pickled else self._read()
        return read(self.buffers, self.first, members, pickled)

    def _each(self, members: Sequence[int], doing: str, work: Callable[[int], Any]) -> Reply:
        """`work` for each of the members; one that fails leaves None."""
        reply = Reply(value=[])
        for j in members:
            self.progress[0] = j
            result = None
            try:
                result = work(j)
            except BaseException as error:
                self._note(reply.failures, j, doing, error)
            reply.value.append(result)
        return reply

    def _rebuild(self, j: int) -> Any:
        try:
            self.envs[j].close()
        except BaseException as error:  # it is thrown away, whatever it raises
            if isinstance(error, self.reraise):
                raise
        self.envs[j] = self.env_fns[j]()
        self._ended[j] = False

    # --- reset
    def reset(self, command: Reset) -> Reply:
        """Reset some envs; their rewards are 0 and no ends stand."""
        env_infos: list[EnvInfo] = []
        failures: list[Failure] = []
        columns: dict[int, list[Any]] = {i: [None] * self.count for i in self._by_message}
        for j, seed in zip(command.members, command.seeds, strict=True):
            self.progress[0] = j
            self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
            try:
                # What one env takes out of the options is there for the next; without any, it need not know of them.
                asked = {} if command.options is None else {"options": deep_copy(command.options)}
                obs, info = check_step_result(self.envs[j].reset(seed=seed, **asked), "reset")
                if self._checks_observations:
                    self._check(obs)
                self._put(j, obs, columns)
                info = _kept(info)
            except BaseException as error:
                self._ended[j] = True
                self._note(failures, j, "reset", error)
                continue
            self._ended[j] = command.ended
            if info:
                env_infos.append(EnvInfo(self.first + j, None, None, info))
        return self._reply(columns, env_infos, failures, command.members)

    # --- step
    def step(self, actions: Sequence[Any], members: Sequence[int] | None = None) -> Reply:
        """Step the members with one action each; the rows of the others stay. Their ends were cleared before."""
        env_infos: list[EnvInfo] = []
        failures: list[Failure] = []
        rewards = [0.0] * self.count
        columns: dict[int, list[Any]] = (
            {i: [None] * self.count for i in self._by_message} if self._by_message else {}
        )
        if self.has_own_buffers:
            self.buffers.flags.fill(False)
        chosen = self._all if members is None else members
        done, size = 0, len(chosen)
        while done < size:
            try:
                self._advance(chosen, actions, done, rewards, columns, env_infos)
                break
            except BaseException as error:
                j = self.progress[0]
                done = chosen.index(j) + 1
                self._note(failures, j, "step", error)
                if self.autoreset is AutoresetMode.DISABLED and error.args == (OVER,):
                    failures[-1].kind = "over"
                self._ended[j] = True
                over = self.terminated[j] or self.truncated[j]
                if over and self.autoreset is AutoresetMode.SAME_STEP:  # its successor could not begin
                    failures[-1].ending, self._ending = self._ending or (FINAL_IN_BUFFER, {}), None
                else:
                    self.terminated[j] = self.truncated[j] = False
        self._write_rewards(rewards, chosen, failures)
        if self._checks_observations:
            self._refuse_nan(chosen, failures)
        if not (columns or env_infos or failures):
            return NOTHING
        for failure in failures:
            failure.action = safe_repr(actions[chosen.index(failure.env - self.first)])
        return self._reply(columns, env_infos, failures, chosen)

    def _reply(
        self,
        columns: dict[int, list[Any]],
        env_infos: Sequence[EnvInfo],
        failures: list[Failure],
        members: Sequence[int],
    ) -> Reply:
        """What a step or reset of the members left beside the buffers; `columns` have entries for all of the group."""
        if len(members) < self.count:
            columns = {i: [values[j] for j in members] for i, values in columns.items()}
        table = InfoTable.of(env_infos, self.count) if env_infos and not failures else None
        return Reply(columns, env_infos if table is None else table, failures)

    def _advance(
        self,
        members: Sequence[int],
        actions: Sequence[Any],
        start: int,
        rewards: list[Any],
        columns: dict[int, list[Any]],
        env_infos: list[EnvInfo],
    ) -> None:
        """Step the members from the `start`-th on."""
        progress, ended, first, array = self.progress, self._ended, self.first, np.ndarray
        steps, writer = self._steps, self._plain
        rows: Sequence[Any] = self._all if writer is None else writer.rows
        dtype, shape = (None, None) if writer is None else (writer.dtype, writer.shape)
        text = columns[0] if self._only_text else None
        if start or len(members) < self.count:
            members, actions = members[start:], actions[start:]
            steps, rows = [steps[j] for j in members], [rows[j] for j in members]
        for j, step, action, row in zip(members, steps, actions, rows, strict=True):
            progress[0] = j
            if ended[j]:
                obs = self._restart(j, env_infos)
            else:
                answer = step(action)
                try:
                    obs, reward, terminated, truncated, info = answer
                except (TypeError, ValueError):  # (a try costs nothing where nothing is raised)
                    obs, reward, terminated, truncated, info = check_step_result(answer, "step")
                if over := terminated or truncated:
                    ended[j] = True  # first: whatever comes before its next episode has begun
                rewards[j] = reward.copy() if type(reward) is array else reward  # as with infos, see `_kept`
                if over:
                    obs = self._end(j, obs, terminated, truncated, info, env_infos)
                elif type(info) is not dict or info:
                    env_infos.append(EnvInfo(first + j, None, None, _kept(info)))
            if type(obs) is array and obs.dtype is dtype and obs.shape == shape:
                row[...] = obs
            elif text is not None and type(obs) is str:
                text[j] = obs
            else:
                self._put(j, obs, columns)

    def _restart(self, j: int, env_infos: list[EnvInfo]) -> Any:
        """The step after an end, under next-step autoreset: the first observation of a new episode."""
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            raise EnvError(OVER)
        obs, info = check_step_result(self.envs[j].reset(), "reset")
        self._ended[j] = False
        if info := _kept(info):
            env_infos.append(EnvInfo(self.first + j, None, None, info))
        return obs

    def _end(
        self, j: int, obs: Any, terminated: Any, truncated: Any, info: Info, env_infos: list[EnvInfo]
    ) -> Any:
        """The end of an episode: nothing, or with same-step autoreset a reset now, keeping the final observation."""
        check_flags(terminated, truncated)
        info = _kept(info)  # in the same step, reset may change what it holds
        if self.autoreset is not AutoresetMode.SAME_STEP:
            self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
            if info:
                env_infos.append(EnvInfo(self.first + j, None, None, info))
            return obs
        final: Any = FINAL_IN_BUFFER
        last = self._final
        if last is not None and is_array_of(obs, last.dtype, last.shape[1:]):
            last[j] = obs
            if self._checks_observations and _holds_nan(obs):
                raise EnvError(NAN_OBSERVATION)
        else:
            self._check(obs)
            final = copy.deepcopy(obs)  # the env may reuse its buffers in reset
        self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
        self._ending = final, info
        obs, first_info = check_step_result(self.envs[j].reset(), "reset")
        first_info = _kept(first_info)
        self._ending, self._ended[j] = None, False
        env_infos.append(EnvInfo(self.first + j, final, info, first_info))
        return obs

    # --- checks
    def _check(self, obs: Any) -> None:
        """Refuse an observation that does not fit or holds NaN; a final one too: values are bootstrapped from it."""
        for i, value in enumerate(self.layout.flatten(obs)):
            if i in self._writers:
                array = self._writers[i].checked(value)
                if self.check_nan and array.dtype.kind == "f" and _holds_nan(array):
                    raise EnvError(NAN_OBSERVATION)
            elif self.layout.leaves[i].kind == "text":
                refuse_no_text(value)

    def _put(self, j: int, obs: Any, columns: dict[int, list[Any]]) -> None:
        """Write an observation of any space."""
        for i, value in enumerate(self.layout.flatten(obs)):
            if i in self._writers:
                self._writers[i].write(j, value)
                continue
            if self.layout.leaves[i].kind == "text":
                refuse_no_text(value)
            columns[i][j] = deep_copy(value)

    def _write_rewards(self, rewards: list[Any], members: Sequence[int], failures: list[Failure]) -> None:
        """Write the rewards of a step at once; one by one where that shows a wrong one."""
        try:
            total = sum(rewards)
            if len(members) == self.count:
                self.rewards[...] = rewards
            else:
                self.rewards[members] = [rewards[j] for j in members]
            if type(total) in CELLS and (total - total == 0.0 or not self.check_nan):
                return
        except Exception:  # whatever what an env gave raises: it is looked at one by one
            pass
        for j in members:
            try:
                self.rewards[j] = value = reward_of(rewards[j])
                if self.check_nan and not math.isfinite(value):
                    raise EnvError(f"reward is {'NaN' if np.isnan(value) else 'infinite'}{IF_MEANT}")
            except EnvError as error:
                self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
                self._refuse(j, error, failures)

    def _refuse_nan(self, members: Sequence[int], failures: list[Failure]) -> None:
        for writer in self._floats:
            for j in members if _holds_nan(writer.flat) else ():
                if np.isnan(writer.rows[j]).any():
                    if self.autoreset is not AutoresetMode.SAME_STEP:  # else it is of the next episode
                        self.terminated[j] = self.truncated[j] = False
                    self._refuse(j, EnvError(NAN_OBSERVATION), failures)

    def _refuse(self, j: int, problem: EnvError, failures: list[Failure]) -> None:
        self._ended[j] = True
        if all(failure.env != self.first + j for failure in failures):
            self._note(failures, j, "step", problem)

    def _note(self, failures: list[Failure], j: int, doing: str, error: BaseException) -> None:
        if isinstance(error, self.reraise):
            raise error
        failures.append(from_exception(self.first + j, doing, error, os.getpid()))

    def close(self) -> Reply:
        """Close every env, once; one that fails does not keep the others open."""
        reply = Reply()
        for j in range(len(self.envs)):
            self.progress[0] = j
            try:
                self.envs.pop(0).close()
            except BaseException as error:
                self._note(reply.failures, j, "close", error)
        self._steps = []
        return reply


IF_MEANT = " (pass check_nan=False if that is meant)"
OVER = "the episode is over; reset it before the next step"
NAN_OBSERVATION = f"observation holds NaN{IF_MEANT}"


def _holds_nan(values: Array) -> bool:
    flat = values.reshape(-1)
    try:
        square = flat.dot(flat)  # NaN if and only if one of them is: squares cannot cancel
    except (FloatingPointError, RuntimeWarning):  # where the caller has NumPy raise what it would only note
        return bool(np.isnan(flat).any())
    return bool(square != square)


def _kept(info: Any) -> Info:
    """An info as it is now: the next env of the group may write into the same dict or array before it is sent."""
    try:
        info = info if type(info) is dict else dict(info_of(info))
        still = UNCHANGING.issuperset(map(type, info.values()))
        return info.copy() if still else deep_copy(info)  # type: ignore[no-any-return]
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(f"copying its info: {type(error).__name__}: {error}") from error


def even_cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """`n` things in contiguous parts whose sizes differ by at most one.

    >>> even_cuts(5, 2)
    [(0, 2), (2, 5)]
    """
    return list(itertools.pairwise(n * k // parts for k in range(parts + 1)))
