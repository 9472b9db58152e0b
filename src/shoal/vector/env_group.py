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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
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
from shoal.vector.buffers import BUCKETS, LOADING, Array, Buffers, Loose, RowWriter, read, reader
from shoal.vector.failures import Failure, from_exception
from shoal.vector.values import CELLS, IN_BUFFER, Info, Noted, Schema, Table, Told


# --- what a group can be told
@dataclass(slots=True)
class Step:
    """Step `members` (positions in the group; None for all).

    Without `actions`, one for each, they are in the buffers, but for those that are loose.
    """

    members: Sequence[int] | None
    place: int
    loose: Loose
    actions: Sequence[Any] | None = None


@dataclass(slots=True)
class Reset:
    """Reset `members`, each with its seed; those of `ends` are left as if their episodes had just ended."""

    members: Sequence[int]
    seeds: Sequence[int | None]
    options: dict[str, Any] | None
    place: int
    ends: Sequence[int] = ()


@dataclass(slots=True)
class Apply:
    """`function(env, *args)` for each of `members`, which have arguments of their own."""

    doing: str  # in messages
    function: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    members: Sequence[int]


def call_attribute(env: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of an env, or read an attribute, of the wrapper that has it."""
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


@dataclass(slots=True)
class Rebuild:
    """Throw `members` away and make them anew."""

    members: Sequence[int]
    doing: str = "make"


@dataclass(slots=True)
class Trial:
    """Be busy for so many rounds, without touching an env."""

    rounds: int


Command = Step | Reset | Apply | Rebuild | Trial


def ids_of(group: Any, command: Any) -> Sequence[int]:
    """The envs of a group, or of the worker that has it, that a command concerns."""
    members = getattr(command, "members", None)
    if members is None:
        return range(group.first, group.first + group.count)
    return [group.first + j for j in members]


def name_of(command: Any) -> str:
    """What a command does, in the word that messages use."""
    return getattr(command, "doing", None) or type(command).__name__.lower()


@dataclass(slots=True)
class Reply:
    """What a command left beside the buffers."""

    columns: dict[int, list[Any]] = field(default_factory=dict)  # leaf -> values, in the order of the members
    told: list[Told] | Table = field(default_factory=list)  # of those that told something, or of all
    failures: list[Failure] = field(default_factory=list)
    value: Any = None  # what calls returned, or what was said of envs that were made
    schema: tuple[int, Schema] | None = None  # of a table that is new to the reader
    ids: Sequence[int] = ()  # of the envs that took part, in the order of columns and values


@dataclass
class About:
    """One environment as whoever made it describes it."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    identity: tuple[Any, ...]
    """Equal for one and the same object only, in whatever process it is."""


_HERE = os.urandom(8)
"""Of this interpreter, and of those that were forked from it."""


class EnvGroup:
    """Environments `first … first + len(env_fns) - 1`; `progress[0]` always tells which of them is at work."""

    def __init__(self, env_fns: Sequence[EnvFn], first: int, progress: Any = None) -> None:
        self.env_fns, self.first, self.count = list(env_fns), first, len(env_fns)
        self.envs: list[Any] = []
        self.progress = [LOADING] if progress is None else progress
        self._ended = [False] * self.count
        self._ending: tuple[Any, Info] | None = None
        self._schema: Schema = (), ()  # of the last table that it told
        # An env that raises KeyboardInterrupt is as broken as any other; where it may be a real Ctrl-C of the
        # caller's, it passes.
        main = threading.current_thread() is threading.main_thread()
        self.let_pass: tuple[type[BaseException], ...] = (
            (KeyboardInterrupt,) if main and progress is None else ()
        )

    def make(self) -> Reply:
        """Make the environments, until one fails; `value` describes them."""
        reply = Reply(value=[])
        for j, fn in enumerate(self.env_fns):
            self.progress[0] = j
            try:
                env = fn()
                self.envs.append(env)
                spaces = env.observation_space, env.action_space
                who = _HERE, os.getpid(), id(env.unwrapped)
                reply.value.append(About(*spaces, dict(env.metadata), env.render_mode, env.spec, who))
            except BaseException as error:
                self._note(reply.failures, j, "make", error)
                with contextlib.suppress(Exception):
                    self.close()
                break
        return reply

    def attach(self, buffers: Buffers, autoreset: AutoresetMode, check_nan: bool) -> None:
        """Point at the rows of the buffers that results go to; buffers for this group alone are its own."""
        self.buffers, self.autoreset, self.check_nan = buffers, autoreset, check_nan
        self.layout = buffers.observations
        self.own = buffers.n_envs == self.count
        rows = slice(0, None) if self.own else slice(self.first, self.first + self.count)
        self.rewards = buffers.rewards[rows]
        self.terminated, self.truncated = buffers.terminated[rows], buffers.truncated[rows]
        leaves = self.layout.leaves
        fixed = {i: buffers.obs[i] for i in self.layout.fixed}
        self._writers = [
            {i: RowWriter(leaves[i], obs[place, rows]) for i, obs in fixed.items()}
            for place in range(buffers.places)
        ]
        self._floats = [
            [writer for writer in writers.values() if writer.dtype.kind == "f"] for writers in self._writers
        ]
        self._beside = [*self.layout.text, *self.layout.objects]
        self._plain = self.layout.is_leaf and bool(fixed)
        self._only_text = self.layout.is_leaf and leaves[0].kind == "text"
        self._final = None if buffers.final is None else buffers.final[rows]
        self._examines = check_nan and bool(self._floats[0])
        self._times = StepTimes(buffers.times[rows])
        self._read = reader(buffers, self.first, self.count)
        self._all = range(self.count)
        self.take_steps()

    def take_steps(self) -> None:
        """Look up the step functions of the environments anew."""
        self._steps = [env.step for env in self.envs]
        self._times.wrap(self._steps)

    def run(self, command: Command) -> Reply | None:
        """Do what a command says."""
        match command:
            case Step(members=members, actions=actions, place=place):
                if actions is None:
                    actions = self.actions(members, command.loose)
                return self.step(actions, members, place)
            case Reset():
                return self.reset(command)
            case Trial(rounds=rounds):
                be_busy(rounds)
                return None
            case Rebuild():
                work = self._rebuild
            case Apply(function=function, args=args, members=members):
                given = dict(zip(members, args, strict=True))
                work = lambda j: deep_copy(function(self.envs[j], *given[j]))  # noqa: E731
        reply = self._each(command.members, name_of(command), work)
        self.take_steps()
        return reply

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
            if isinstance(error, self.let_pass):
                raise
        self.envs[j] = self.env_fns[j]()
        self._ended[j] = False

    def actions(self, members: Sequence[int] | None, loose: Loose) -> list[Any]:
        """The actions for the members, as the caller left them in the buffers or beside."""
        if members is None:
            return read(self.buffers, self.first, self._all, loose) if loose else self._read()
        return read(self.buffers, self.first, members, loose)

    def reset(self, command: Reset) -> Reply | None:
        """Reset some envs; their rewards are 0 and no ends stand."""
        told: list[Told] = []
        failures: list[Failure] = []
        columns: dict[int, list[Any]] = {i: [None] * self.count for i in self._beside}
        for j, seed in zip(command.members, command.seeds, strict=True):
            self.progress[0] = j
            self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
            try:
                # What one env takes out of the options is there for the next; without any, it need not know of them.
                asked = {} if command.options is None else {"options": deep_copy(command.options)}
                obs, info = check_step_result(self.envs[j].reset(seed=seed, **asked), "reset")
                if self._examines:
                    self._check_whole(obs)
                self._put(j, obs, command.place, columns)
                info = _kept(info)
            except BaseException as error:
                self._ended[j] = True
                self._note(failures, j, "reset", error)
                continue
            self._ended[j] = j in command.ends
            if info:
                told.append(Told(self.first + j, None, None, info))
        return self._reply(columns, told, failures, command.members)

    def step(self, actions: Sequence[Any], members: Sequence[int] | None, place: int) -> Reply | None:
        """Step the members with one action each; the rows of the others stay. Their ends were cleared before."""
        told: list[Noted] = []
        failures: list[Failure] = []
        rewards = [0.0] * self.count
        columns: dict[int, list[Any]] = {i: [None] * self.count for i in self._beside} if self._beside else {}
        chosen = self._all if members is None else members
        done, size = 0, len(chosen)
        while done < size:
            try:
                self._advance(chosen, actions, done, rewards, place, columns, told)
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
                    last = told[-1] if told and told[-1][0] == self.first + j else None
                    ended = (last.final, last.final_info or {}) if isinstance(last, Told) else (IN_BUFFER, {})
                    failures[-1].ending, self._ending = self._ending or ended, None
                else:
                    self.terminated[j] = self.truncated[j] = False
        self._pay(rewards, chosen, failures)
        if self.check_nan and self._floats[place]:
            self._refuse_nan(self._floats[place], chosen, failures)
        for failure in failures:
            failure.action = safe_repr(actions[chosen.index(failure.env - self.first)])
        return self._reply(columns, told, failures, chosen)

    def _reply(
        self,
        columns: dict[int, list[Any]],
        noted: Sequence[Noted],
        failures: list[Failure],
        members: Sequence[int],
    ) -> Reply | None:
        """What a step or reset of the members left beside the buffers; `columns` have entries for all of the group."""
        if not (columns or noted or failures):
            return None
        if len(members) < self.count:
            columns = {i: [values[j] for j in members] for i, values in columns.items()}
        told = Table.of(noted, self.count, self._schema)
        if isinstance(told, Table):
            self._schema = told.schema
        return Reply(columns, told, failures)

    def _advance(
        self,
        members: Sequence[int],
        actions: Sequence[Any],
        start: int,
        rewards: list[Any],
        place: int,
        columns: dict[int, list[Any]],
        told: list[Noted],
    ) -> None:
        """Step the members from the `start`-th on."""
        progress, ended, first, array = self.progress, self._ended, self.first, np.ndarray
        steps = self._times.turn(self._steps)
        if self._plain:
            writer = self._writers[place][0]
            rows, dtype, shape = writer.rows, writer.dtype, writer.shape
        else:
            rows, dtype, shape = [None] * self.count, None, None  # type: ignore[list-item]
        text = columns[0] if self._only_text else None
        if start or len(members) < self.count:
            members, actions = members[start:], actions[start:]
            steps, rows = [steps[j] for j in members], [rows[j] for j in members]
        for j, step, action, row in zip(members, steps, actions, rows, strict=True):
            progress[0] = j
            if ended[j]:
                obs = self._restart(j, told)
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
                    obs = self._end(j, obs, reward, terminated, truncated, info, place, columns, told)
                elif type(info) is not dict or info:
                    told.append(self._noted(first + j, info))
            if row is not None and type(obs) is array and obs.dtype is dtype and obs.shape == shape:
                row[...] = obs
            elif text is not None and type(obs) is str:
                text[j] = obs
            else:
                self._put(j, obs, place, columns)

    def _noted(self, env: int, info: Any) -> Noted:
        """What an env told, its numbers alone where they have the names and types of the last table."""
        if type(info) is dict and (tuple(info), tuple(map(type, info.values()))) == self._schema:
            return env, *info.values()
        return Told(env, None, None, _kept(info))

    def _restart(self, j: int, told: list[Noted]) -> Any:
        """The step after an end, under next-step autoreset: the first observation of a new episode."""
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            raise EnvError(OVER)
        obs, info = check_step_result(self.envs[j].reset(), "reset")
        self._ended[j] = False
        if info := _kept(info):
            told.append(Told(self.first + j, None, None, info))
        return obs

    def _end(
        self, j: int, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Info,
        place: int, columns: dict[int, list[Any]], told: list[Noted],
    ) -> Any:  # fmt: skip
        """What happens when an episode ends: nothing, or a reset now with the end kept aside."""
        info = _kept(info)  # in the same step, reset may change what it holds
        check_flags(terminated, truncated)
        # An end is whole in the buffers, and looked at, before anything else can go wrong: who ends this worker
        # meanwhile leaves it to the caller.
        if type(reward) is float and reward - reward == 0.0:
            self.rewards[j] = reward
        else:
            self._note_reward(j, reward)
        if self._examines:
            if not (self._plain and type(obs) is np.ndarray):
                self._check_whole(obs)
            elif _holds_nan(obs):
                raise EnvError(NAN_OBSERVATION)
        if self.autoreset is not AutoresetMode.SAME_STEP:
            self._put(j, obs, place, columns)
            self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
            if info:
                told.append(Told(self.first + j, None, None, info))
            return obs
        final: Any = IN_BUFFER
        target = self._final
        if (
            target is not None
            and type(obs) is np.ndarray
            and obs.dtype == target.dtype
            and obs.shape == target.shape[1:]
        ):
            target[j] = obs
        else:
            self._check_whole(obs)
            final = copy.deepcopy(obs)  # the env may reuse its buffers in reset
        self.terminated[j], self.truncated[j] = bool(terminated), bool(truncated)
        self._ending = final, info
        obs, first_info = check_step_result(self.envs[j].reset(), "reset")
        first_info = _kept(first_info)
        self._ending, self._ended[j] = None, False
        if final is not IN_BUFFER or info or first_info:
            told.append(Told(self.first + j, final, info, first_info))
        return obs

    def _check_whole(self, obs: Any) -> None:
        """Refuse an observation that does not fit or holds NaN; a last one too: values are learned from it."""
        writers = self._writers[0]
        for i, value in enumerate(self.layout.flatten(obs)):
            if i in writers:
                array = writers[i].checked(value)
                if self.check_nan and array.dtype.kind == "f" and _holds_nan(array):
                    raise EnvError(NAN_OBSERVATION)
            elif self.layout.leaves[i].kind == "text":
                refuse_no_text(value)

    def _put(self, j: int, obs: Any, place: int, columns: dict[int, list[Any]]) -> None:
        """Write an observation of any space."""
        writers = self._writers[place]
        for i, value in enumerate(self.layout.flatten(obs)):
            if i in writers:
                writers[i].write(j, value)
                continue
            if self.layout.leaves[i].kind == "text":
                refuse_no_text(value)
            columns[i][j] = deep_copy(value)

    def _pay(self, rewards: list[Any], members: Sequence[int], failures: list[Failure]) -> None:
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
                self._note_reward(j, rewards[j])
            except EnvError as error:
                self.rewards[j], self.terminated[j], self.truncated[j] = 0.0, False, False
                self._refuse(j, error, failures)

    def _note_reward(self, j: int, reward: Any) -> None:
        """Write one reward, unless it is none."""
        self.rewards[j] = value = reward_of(reward)
        if self.check_nan and not math.isfinite(value):
            self.rewards[j] = 0.0
            raise EnvError(f"reward is {'NaN' if np.isnan(value) else 'infinite'}{IF_MEANT}")

    def _refuse_nan(
        self, writers: Sequence[RowWriter], members: Sequence[int], failures: list[Failure]
    ) -> None:
        for writer in writers:
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
        if isinstance(error, self.let_pass):
            raise error
        failures.append(from_exception(self.first + j, doing, error, os.getpid()))

    def close(self) -> list[Failure]:
        """Close every env, once; one that fails does not keep the others open, and after an interrupt they can be."""
        failures = self._each(range(len(self.envs)), "close", lambda _: self.envs.pop(0).close()).failures
        self._steps = []
        return failures


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
    """An info as it is now: the next env of the group may write into the same dict, or array, before it is told."""
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


# --- how long steps take
def be_busy(rounds: int) -> None:
    """Keep this core busy: the stand-in for environments whose steps must not be taken."""
    for _ in range(rounds):
        pass


class StepTimes:
    """A histogram per environment, `[count, BUCKETS]`, filled by a sample of its steps."""

    EVERY = 17
    """One step in so many is timed, where steps are short; a prime, to fall out of step with the episodes."""
    LONG = 100e-6
    """Seconds from which the clock costs nothing in comparison: then every step is timed."""

    def __init__(self, rows: Array) -> None:
        self._rows = [memoryview(row) for row in rows]
        self._timed: list[Callable[[Any], Any]] = []
        self._rest = 0
        self._longest = 0.0

    def wrap(self, steps: list[Any]) -> None:
        """Take these as the step functions."""
        self._timed = [self._wrapped(row, step) for row, step in zip(self._rows, steps, strict=True)]

    def turn(self, steps: list[Any]) -> list[Any]:
        """The functions to step with this time: `steps`, or the timed ones."""
        if self._rest:
            self._rest -= 1
            return steps
        self._rest = 0 if self._longest > self.LONG else self.EVERY - 1
        self._longest = 0.0
        return self._timed

    def _wrapped(self, row: memoryview, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(action: Any) -> Any:
            start = time.perf_counter()
            result = step(action)
            seconds = time.perf_counter() - start
            row[bucket_of(seconds)] += 1
            self._longest = max(self._longest, seconds)
            return result

        return timed


SHORTEST, PER_OCTAVE = 1e-7, 4
"""Seconds of the first bucket, and buckets to a doubling: the last one is beyond seven minutes."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration.

    >>> bucket_of(0.0), bucket_of(1e-7), bucket_of(2.1e-7), bucket_of(1e9)
    (0, 0, 4, 127)
    """
    if seconds <= SHORTEST:
        return 0
    return min(BUCKETS - 1, int(PER_OCTAVE * math.log2(seconds / SHORTEST)))


def quantiles(rows: Array, *shares: float) -> list[list[float]]:
    """For each share (0.5 is the median) the seconds of every row; NaN where nothing was timed."""
    counts = rows.astype(np.int64).cumsum(axis=1)
    total = counts[:, -1:]
    middles = SHORTEST * 2 ** ((np.arange(BUCKETS) + 0.5) / PER_OCTAVE)
    found = []
    for share in shares:
        at = (counts < np.ceil(share * total)).sum(axis=1)
        found.append(np.where(total[:, 0] > 0, middles[at], np.nan).tolist())
    return found
