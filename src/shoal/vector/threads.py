"""Groups of environments in threads, for environments that wait: HTTP, browsers, simulators.

An environment is made, stepped and closed in one thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.envs.catalogue import EnvFn
from shoal.vector.buffers import Buffers, read
from shoal.vector.env_group import Attach, Close, EnvGroup, Make, Reply, Reset, Step


class GroupThread:
    """A thread that executes the commands of one group, one after the other.

    Args:
        group: its environments.
        done: released at every reply.
        name: of the thread.
    """

    def __init__(self, group: EnvGroup, done: threading.Semaphore, name: str) -> None:
        self.group, self._done = group, done
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: list[Reply] = []
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        command: Any = None
        while not isinstance(command, Close):
            command = self.commands.get()
            if isinstance(command, Attach):
                own = command.buffers(n_envs=self.group.count)
                self.group.attach(own, command.autoreset, command.check_nan)
                reply = Reply()
            else:
                reply = self.group.run(command)
            self.replies.append(reply)
            self._done.release()


# --- rows of a group that has buffers of its own
Rows = tuple[Sequence[Any], Any, Any, Any, Any]
"""Observations by leaf, rewards, terminated, truncated, final observations: `[count, ...]` each."""


def rows_of(own: Buffers) -> Rows:
    """What a group wrote into buffers of its own."""
    return own.obs, own.rewards, own.terminated, own.truncated, own.final


def copy_rows(rows: Rows, members: Sequence[int] | None, buffers: Buffers, first: int, count: int) -> None:
    """Copy the rows that a step or reset of some members wrote to where the caller looks."""
    obs, rewards, terminated, truncated, final = rows
    chosen: Any = slice(None) if members is None else np.asarray(members, dtype=np.intp)
    ids: Any = slice(first, first + count) if members is None else first + chosen
    for target, source in zip(buffers.obs, obs, strict=True):
        if source is not None:
            target[ids] = source[chosen]
    buffers.rewards[ids] = rewards[chosen]
    buffers.terminated[ids], buffers.truncated[ids] = terminated[chosen], truncated[chosen]
    if final is not None and buffers.final is not None:
        buffers.final[ids] = final[chosen]


def with_actions(command: Any, buffers: Buffers | None, first: int, count: int) -> Any:
    """The command as a group with buffers of its own gets it: a step brings its actions along."""
    if not isinstance(command, Step) or command.actions is not None:
        return command
    assert buffers is not None
    members = range(count) if command.members is None else command.members
    return Step(command.members, {}, read(buffers, first, members, command.pickled))


class ThreadedGroup:
    """A group in a worker process whose environments are stepped side by side, each in a thread of its own."""

    def __init__(self, env_fns: Sequence[EnvFn], first: int, progress: Any) -> None:
        self.first, self.count, self._progress = first, len(env_fns), progress
        self._done = threading.Semaphore(0)
        self._threads = [
            GroupThread(EnvGroup([fn], first + j, [0]), self._done, f"env-{first + j}")
            for j, fn in enumerate(env_fns)
        ]
        self.buffers: Buffers | None = None

    def attach(self, buffers: Buffers, autoreset: Any, check_nan: bool) -> None:
        """Point at the rows of the buffers that results go to."""
        self.buffers = buffers
        for thread in self._threads:
            thread.group.attach(buffers, autoreset, check_nan)

    def run(self, command: Any) -> Reply:
        """Execute a command; a failure of one env does not affect the others."""
        members = range(self.count) if getattr(command, "members", None) is None else command.members
        commands = self._split(command, members)
        self._done = done = threading.Semaphore(0)
        for j, own in zip(members, commands, strict=True):
            thread = self._threads[j]
            thread._done = done
            thread.replies.clear()
            thread.commands.put(own)
        replies = []
        for j in members:
            self._progress[0] = j
            while not self._threads[j].replies:
                done.acquire()
            replies.append(self._threads[j].replies[0])
        return self._joined(replies)

    def _split(self, command: Any, members: Sequence[int]) -> list[Any]:
        """The command for each of the members."""
        if isinstance(command, Make):
            return [Make(None) for _ in members]
        if isinstance(command, Close):
            return [Close() for _ in members]
        if isinstance(command, Step):
            assert self.buffers is not None
            actions = read(self.buffers, self.first, members, command.pickled)
            return [Step(None, {}, [action]) for action in actions]
        if isinstance(command, Reset):
            return [
                Reset([0], [seed], command.options, [0] if j in command.ends else ())
                for j, seed in zip(members, command.seeds, strict=True)
            ]
        if hasattr(command, "args"):
            return [type(command)(command.doing, command.function, [args], [0]) for args in command.args]
        return [type(command)([0], command.doing) for _ in members]

    @staticmethod
    def _joined(replies: Sequence[Reply]) -> Reply:
        columns: dict[int, list[Any]] = {}
        for reply in replies:
            for leaf, values in reply.columns.items():
                columns.setdefault(leaf, []).extend(values)
        value = [item for reply in replies for item in reply.value or ()]
        return Reply(
            columns,
            [item for reply in replies for item in reply.env_infos],
            [failure for reply in replies for failure in reply.failures],
            value if any(reply.value is not None for reply in replies) else None,
        )

    def close(self) -> None:
        """Close every env in its own thread, unless that was done."""
        for thread in self._threads:
            thread.commands.put(Close())
        for thread in self._threads:
            thread.thread.join()
