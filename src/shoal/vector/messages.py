"""What a vector env and its workers say to each other: commands, replies, failures; all can be sent to a process."""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from shoal.core.errors import where_it_hangs, with_frames
from shoal.core.workers import dumps
from shoal.envs.catalogue import EnvFn
from shoal.vector.buffers import NO_PICKLED_ACTIONS, Buffers, PickledActions
from shoal.vector.infos import EnvInfo, InfoTable
from shoal.vector.spaces import Layout


# --- commands
@dataclass(slots=True)
class Make:
    """The first command of a group: make the environments."""

    env_fns: Sequence[EnvFn]
    doing: str = "make"


@dataclass(slots=True)
class Attach:
    """The second command: where results go."""

    n_envs: int
    observations: Layout
    actions: Layout
    autoreset: AutoresetMode
    check_nan: bool
    memory: str | None = None  # the name of a shared block
    doing: str = "attach"

    def buffers(self, memory: Any = None, n_envs: int | None = None) -> Buffers:
        """The buffers over shared memory, or in private memory, there for `n_envs` only."""
        return Buffers(n_envs or self.n_envs, self.observations, self.actions, memory)


@dataclass(slots=True)
class Step:
    """Step `members` (positions in the group; None for all), with the actions in the buffers and those beside."""

    members: Sequence[int] | None = None
    pickled: PickledActions = field(default_factory=dict)
    actions: Sequence[Any] | None = None  # one per member, for a group that does not see the buffers
    doing: str = "step"


STEP_ALL = Step(None, NO_PICKLED_ACTIONS)


@dataclass(slots=True)
class Reset:
    """Reset `members`, each with its seed; with `ended` they are left as if their episodes had just ended."""

    members: Sequence[int]
    seeds: Sequence[int | None]
    options: dict[str, Any] | None
    ended: bool = False
    doing: str = "reset"


@dataclass(slots=True)
class Apply:
    """`function(env, *args)` for each of `members`, which have arguments of their own."""

    doing: str  # in messages
    function: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    members: Sequence[int]


@dataclass(slots=True)
class Rebuild:
    """Close `members` and make them anew."""

    members: Sequence[int]
    doing: str = "make"


@dataclass(slots=True)
class Close:
    """The last command."""

    doing: str = "close"


Command = Make | Attach | Step | Reset | Apply | Rebuild | Close


def ids_of(group: Any, command: Any) -> Sequence[int]:
    """The environments that a command to a group, or to the worker that has it, concerns."""
    members = getattr(command, "members", None)
    first: int = group.first
    return range(first, first + group.count) if members is None else [first + j for j in members]


# --- replies
@dataclass(slots=True)
class Reply:
    """The part of a result that is not in the buffers."""

    columns: dict[int, list[Any]] = field(default_factory=dict)  # leaf -> values, in the order of the members
    env_infos: Sequence[EnvInfo] | InfoTable = ()  # of those that reported something
    failures: list[Failure] = field(default_factory=list)
    value: Any = None  # what calls returned, or descriptions of envs that were made


NOTHING = Reply()


@dataclass
class EnvDescription:
    """Spaces, metadata and render mode of one environment."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    identity: tuple[Any, ...]
    """Equal for one and the same object only, in whatever process it is."""


# --- failures
@dataclass
class Failure:
    """A failure of an env; it can be sent between processes, whatever its exception is."""

    env: int
    doing: str  # "step", "reset", "make", "call", …
    summary: str  # one line
    trace: str = ""  # where it happened
    action: str | None = None
    pid: int | None = None
    exception: BaseException | None = None
    kind: str = "exception"  # or "died", "timeout", "over" (the caller forgot a reset: the env is whole)
    ending: tuple[Any, dict[str, Any]] | None = None
    """Last observation and info of an episode that had ended, reward and flags in the buffers, before the failure."""

    def __getstate__(self) -> dict[str, Any]:
        """With the exception as a pickle of its own, or dropped where it does not survive that."""
        try:
            data = dumps(self.exception)
            pickle.loads(data)
        except BaseException:
            data = pickle.dumps(None)
        return {**vars(self), "exception": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An exception of a class that only its worker knows is shown by its text."""
        vars(self).update(state, exception=None)
        with contextlib.suppress(Exception):
            self.exception = pickle.loads(state["exception"])


def from_exception(env: int, doing: str, error: BaseException, pid: int | None = None) -> Failure:
    """A failure from an exception being handled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(env, doing, with_frames(error), trace, None, pid, error)


def where_it_was(stack: str) -> str:
    r"""The lines of the user's own code in the text of a stack; of several threads, the first that has some.

    >>> where_it_was('Thread 0x1 (most recent call first):\n  File "bad.py", line 18 in _advance')
    ' (bad.py:18 in _advance)'
    """
    for thread in re.split(r"^(?=Thread|Current thread)", stack, flags=re.MULTILINE):
        found = re.findall(r'^ *File "(.+)", line (\d+),? in (.+)$', thread, re.MULTILINE)
        frames = [traceback.FrameSummary(file, int(line), name, line="") for file, line, name in found]
        if where := where_it_hangs(reversed(frames) if "most recent call first" in thread else frames):
            return where
    return ""
