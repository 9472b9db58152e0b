"""Workers as their caller sees them: the caller's own group, a thread, a process.

Each gets one command at a time, is waited for by `collect`, and is given up when it dies or takes too long.
"""
# ruff: noqa: D102 (what is not documented here is in `Worker`)

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import queue
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, safe_repr
from shoal.core.executors import available_cpus
from shoal.core.workers import (
    PRELOAD,
    StartMethod,
    WorkerProcess,
    default_start_method,
    describe_exit,
    dumps,
    portable,
    process_state,
)
from shoal.envs.catalogue import EnvFn
from shoal.vector.buffers import Buffers, read
from shoal.vector.env_group import LOADING, EnvGroup
from shoal.vector.loop import (
    ANSWER,
    COMMAND,
    PROGRESS,
    SMALL,
    STARTED,
    TO_CALLER,
    TO_WORKER,
    WORDS,
    Patience,
    serve,
    unpacked,
)
from shoal.vector.messages import (
    STEP_ALL,
    Attach,
    Close,
    Failure,
    Make,
    Rebuild,
    Reply,
    Reset,
    Step,
    from_exception,
    ids_of,
    where_it_was,
)

PRELOAD.append("shoal.vector.loop")
ORDERED = platform.machine() in ("x86_64", "i686")
"""Whether who sees a word in shared memory sees all that was written ahead of it; elsewhere pipes carry the answers."""
LOADING_SECONDS = 60.0
"""Time for a worker with a time limit to start and import what it needs, before its first constructor begins."""
END_SECONDS = 2.0
"""How long a worker that has nothing left to do may take to end, or a thread to finish its step."""
CHECK_SECONDS = 0.05
"""Between two looks whether the workers that are waited for still live and are in time."""


class Limits(NamedTuple):
    """Seconds that one env may take for a step, a reset or a call, and for its constructor; None for ever."""

    step: float | None = None
    make: float | None = None


class DeadlineError(Exception):
    """A wait with a timeout is over."""


class Worker:
    """Environments `first … first + count - 1` and their present command; here those that the caller itself steps.

    Attributes:
        command: what it is at; None when it is idle.
        lost: why it can no longer work, if so.
    """

    inline = True
    can_be_killed = True

    def __init__(self, first: int, env_fns: Sequence[EnvFn], limits: Limits) -> None:
        self.first, self.env_fns, self.count = first, list(env_fns), len(env_fns)
        self.ids = range(first, first + self.count)
        self.limits = limits
        self.command: Any = None
        self.lost: Failure | None = None
        self.buffers: Buffers | None = None
        self.starts = 0
        self.group: EnvGroup | None = None
        self._seen, self._since = -1, 0.0

    # --- commands
    def start(self) -> None:
        """Begin to make the environments, anew if there were some."""
        self._start()
        self.starts += 1
        self.lost = None
        self.begin(Make(self.env_fns))

    def _start(self) -> None:
        self.group = EnvGroup(self.env_fns, self.first)

    def begin(self, command: Any) -> None:
        """Begin a command."""
        self.command = command
        self._seen, self._since = -1, time.monotonic()
        if self.lost is None:
            self._send(command)

    def _send(self, command: Any) -> None:
        if isinstance(command, Step) and command.actions is None:  # the caller may write the next ones
            assert self.group is not None
            command = Step(command.members, {}, self.group.actions(command.members, command.pickled))
            self.command = command

    def answered(self) -> bool:
        """Whether `receive` does not wait."""
        return True

    def wait(self, workers: Sequence[Any], seconds: float) -> None:
        """Sleep until one of these, which are of its kind, may have answered, or so many seconds."""

    def receive(self) -> Reply:
        """The reply to its command; a lost worker gives its failure."""
        reply = Reply() if self.lost is not None else self._receive()
        self.command = None
        return reply if self.lost is None else Reply(failures=[self.lost])

    def _receive(self) -> Reply:
        assert self.group is not None
        command = self.command
        if isinstance(command, Attach):
            assert self.buffers is not None
            return self.group.attach(command, self.buffers)
        return self.group.run(command)

    # --- deaths and time limits
    def alive(self) -> bool:
        """Whether what it lives in runs."""
        return True

    def progress(self) -> int:
        """Position of the env at work, or `LOADING`."""
        return self.group.progress[0] if self.group is not None else 0

    def overdue(self, now: float) -> float | None:
        """The time limit that the env at work has exceeded, if so."""
        limit = self.limits.make if isinstance(self.command, Make | Rebuild) else self.limits.step
        if limit is None or isinstance(self.command, Attach | Close):
            return None
        at = self.progress()
        if at == LOADING:
            limit = max(limit, LOADING_SECONDS)
        if at != self._seen:
            if self._seen != -1:
                self._since = now
            self._seen = at
        return limit if now - self._since > limit else None

    def lose(self, failure: Failure) -> None:
        """Give it up because of this."""
        self.lost = failure
        self.kill()

    def kill(self) -> None:
        """End what it lives in, if that is possible."""

    def ask_for_stack(self) -> None:
        """Have it write where it is."""

    def stack(self) -> str:
        """Where it was when it was asked, or crashed."""
        return ""

    @property
    def pid(self) -> int | None:
        """Of its process, if it has one of its own."""
        return None

    def death(self) -> Failure:
        """That it is gone."""
        return self.failure("died", "its thread ended")

    def asked(self) -> list[int]:
        """The environments that its command concerns."""
        return list(self.ids if self.command is None else ids_of(self, self.command)) or [self.first]

    def failure(self, kind: str, summary: str) -> Failure:
        """A failure of the env at work, with what its process said."""
        at = self.progress()
        asked = self.asked()
        env = self.first + at if self.first + at in asked else asked[0]
        doing = self.command.doing if self.command is not None else "wait"
        stack = self.stack()
        action = safe_repr(self._action_of(env))
        return Failure(env, doing, summary + where_it_was(stack), stack, action, self.pid, None, kind)

    def _action_of(self, env: int) -> Any:
        command = self.command
        if not isinstance(command, Step) or self.buffers is None:
            return None
        with contextlib.suppress(Exception):  # for a message: what is not known is left out
            if command.actions is not None:
                members = range(self.count) if command.members is None else command.members
                return command.actions[list(members).index(env - self.first)]
            return read(self.buffers, self.first, [env - self.first], command.pickled)[0]
        return None

    def stats(self) -> dict[str, Any]:
        """Process id, memory and restarts of a process."""
        return {}

    def begin_close(self) -> bool:
        """Have it close its environments; whether it can answer."""
        if self.inline and self.group is None:
            return False
        free = self.inline or (self.lost is None and self.command is None)
        if free:
            self.begin(Close())
        return free

    def close(self) -> None:
        """End what it lives in."""


def collect(workers: Sequence[Worker], timeout: float | None = None) -> list[Reply]:
    """The replies of workers to their commands, in order; the caller's own group does its work here.

    A worker that dies or exceeds its time limit replies with a failure.

    Raises:
        DeadlineError: after `timeout` seconds; who has not replied still is at its command.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    own = {worker: worker.receive() for worker in workers if worker.inline}
    wait_for(workers, deadline)
    return [own[worker] if worker.inline else worker.receive() for worker in workers]


def wait_for(workers: Sequence[Worker], deadline: float | None = None, wanted: int | None = None) -> None:
    """Wait until all of these have answered, or those with `wanted` environments.

    Raises:
        DeadlineError: when it is later than `deadline`.
    """
    looked = time.monotonic()
    while waiting := [worker for worker in workers if not worker.answered()]:
        if wanted is not None and sum(w.count for w in workers) - sum(w.count for w in waiting) >= wanted:
            return
        seconds = CHECK_SECONDS
        if deadline is not None:
            seconds = min(seconds, deadline - time.monotonic())
            if seconds <= 0:
                raise DeadlineError
        waiting[0].wait(waiting, seconds)
        now = time.monotonic()
        if now - looked >= CHECK_SECONDS:
            looked = now
            check(workers)


def check(workers: Sequence[Worker]) -> None:
    """Give up workers that are gone, or have exceeded their time limit."""
    waiting = [worker for worker in workers if worker.command is not None and not worker.answered()]
    for worker in waiting:
        if not worker.alive() and not worker.answered():
            worker.lose(worker.death())
    now = time.monotonic()
    late = [(worker, worker.overdue(now)) for worker in waiting if worker.lost is None]
    late = [(worker, limit) for worker, limit in late if limit is not None]
    if not late:
        return
    for worker, _ in late:
        worker.ask_for_stack()
    end, before = now + 0.3, [""]
    while (stacks := [worker.stack() for worker, _ in late]) != before or not all(stacks):
        if time.monotonic() > end:
            break
        before = stacks  # it is written in pieces: whole where it stands still
        time.sleep(0.02)
    for worker, limit in late:
        worker.lose(worker.failure("timeout", f"no answer within {limit:g} s"))


def attach_all(workers: Sequence[Worker], attach: Attach, buffers: Buffers) -> list[Failure]:
    """Tell workers where their results go; what failed."""
    for worker in workers:
        worker.buffers = buffers
        worker.begin(attach)
    return [failure for reply in collect(workers) for failure in reply.failures]


Pending = list[tuple[Worker, Any]]
"""Workers and their commands."""

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


class GroupThread:
    """A thread that executes the commands of one group, one after the other; `done` is released at every reply."""

    def __init__(self, group: EnvGroup, done: threading.Semaphore) -> None:
        self.group, self._done = group, done
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: list[Reply] = []
        self.thread = threading.Thread(target=self._serve, name=f"shoal-envs-{group.first}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        command: Any = None
        while not isinstance(command, Close):
            command = self.commands.get()
            self.replies.append(self.group.run(command))
            self._done.release()


class ThreadWorker(Worker):
    """A group in a thread of the caller's process, for environments that wait: HTTP, browsers, simulators."""

    inline = can_be_killed = False

    def __init__(
        self, done: threading.Semaphore, first: int, env_fns: Sequence[EnvFn], limits: Limits
    ) -> None:
        super().__init__(first, env_fns, limits)
        self._done = done
        self._thread: GroupThread | None = None

    def _start(self) -> None:
        self.begin_close()  # a thread that hangs cannot be killed: a fresh one takes its place
        self._thread = GroupThread(EnvGroup(self.env_fns, self.first, [LOADING]), self._done)

    def _send(self, command: Any) -> None:
        assert self._thread is not None
        self._thread.replies.clear()
        self._thread.commands.put(with_actions(command, self.buffers, self.first, self.count))

    def answered(self) -> bool:
        return self.lost is not None or (self._thread is not None and bool(self._thread.replies))

    def wait(self, workers: Sequence[Any], seconds: float) -> None:
        self._done.acquire(timeout=seconds)

    def _receive(self) -> Reply:
        assert self._thread is not None
        self._done.acquire(False)  # one signal per answer, so that they do not pile up
        if isinstance(self.command, Step | Reset) and self.buffers is not None:
            rows = rows_of(self._thread.group.buffers)
            copy_rows(rows, self.command.members, self.buffers, self.first, self.count)
        return self._thread.replies[0]

    def progress(self) -> int:
        return int(self._thread.group.progress[0]) if self._thread is not None else 0

    def alive(self) -> bool:
        return self._thread is not None and self._thread.thread.is_alive()

    def begin_close(self) -> bool:
        """Have the thread close its environments, when it is free; whether it can answer."""
        if self._thread is None or self._thread.thread is threading.current_thread():
            return False
        if super().begin_close():
            return True
        self._thread.commands.put(Close())
        return False

    def close(self) -> None:
        """Wait for the end of the thread; one that hangs is left behind."""
        thread = self._thread.thread if self._thread is not None else None
        if thread is not None and self.lost is None and thread is not threading.current_thread():
            thread.join(END_SECONDS)


class Signals:
    """What the worker processes of one vector env share: numbers in memory, and semaphores where there are some.

    Args:
        n_workers: how many there are.
        method: how they are started.
    """

    def __init__(self, n_workers: int, method: StartMethod | None) -> None:
        self.method: StartMethod = method or default_start_method()
        self.context: Any = multiprocessing.get_context(self.method)
        self.words = self.context.RawArray("I", n_workers * WORDS)
        self.view = memoryview(self.words).cast("B").cast("I")
        self.done = self.context.Semaphore(0) if ORDERED and not portable() else None
        cores = available_cpus()
        self.lookers = cores - 1  # workers that look before they sleep: a core is left for the caller
        self.patience = Patience() if n_workers < cores else None


class ProcessWorker(Worker):
    """A group in a worker process."""

    inline = False

    def __init__(
        self, signals: Signals, number: int, first: int, env_fns: Sequence[EnvFn], limits: Limits
    ) -> None:
        super().__init__(first, env_fns, limits)
        self._signals, self.number = signals, number
        self._words = signals.view[number * WORDS : (number + 1) * WORDS]
        self._asked = 0
        self._begin: Any = None
        self._state: dict[str, Any] | None = None
        self.process: WorkerProcess | None = None

    def _start(self) -> None:
        self.kill()
        self._asked = self._words[COMMAND] = self._words[STARTED] = self._words[ANSWER] = 0
        self._words[PROGRESS] = LOADING
        signals, semaphores = self._signals, None
        if signals.done is not None:
            self._begin = signals.context.Semaphore(0)
            semaphores = self._begin, signals.done
        looks = self.number < signals.lookers
        args = (signals.words, self.number, semaphores, looks, self.first)
        self._state = self._state or process_state()  # relative names mean the same when it is started anew
        self.process = WorkerProcess(serve, args, signals.method, self._state)

    def _send(self, command: Any) -> None:
        try:
            data = b"" if command is STEP_ALL else dumps(command)
        except BaseException as error:  # what cannot be sent was not begun
            self.command = None
            if isinstance(command, Make) and isinstance(error, Exception):
                raise ConfigError(
                    f"what makes the environments cannot be sent to a worker process ({error}); make it a function "
                    "of a module, without locks, files or generators in its closure, or use backend='serial'"
                ) from error
            raise
        assert self.process is not None
        if self._begin is not None:
            self._asked += 1
            self._words[COMMAND] = self._asked & 0xFFFFFFFF
            self._words[TO_WORKER] = bool(data)
            if len(data) > SMALL or not data:
                self._begin.release()
        if data or self._begin is None:
            with contextlib.suppress(OSError):  # it is gone, as `check` will find
                self.process.pipe.send_bytes(data)
        if self._begin is not None and 0 < len(data) <= SMALL:
            self._begin.release()

    def answered(self) -> bool:
        if self.lost is not None:
            return True
        if self._begin is not None:
            return bool(self._words[ANSWER] == self._asked & 0xFFFFFFFF)
        assert self.process is not None
        return bool(self.process.pipe.poll(0))

    def wait(self, workers: Sequence[Any], seconds: float) -> None:
        if (done := self._signals.done) is not None:
            patience = self._signals.patience
            if patience is None or not patience.take(done.acquire):
                done.acquire(True, seconds)
        else:
            connection.wait([worker.process.pipe for worker in workers], seconds)

    def _receive(self) -> Reply:
        assert self.process is not None
        data = b""
        if self._signals.done is not None:
            self._signals.done.acquire(False)  # one signal per answer, so that they do not pile up
        if self._begin is None or self._words[TO_CALLER]:
            try:
                data = self.process.pipe.recv_bytes()
            except (EOFError, OSError):
                self.process.wait(1.0)
                self.lose(self.death())
                return Reply()
        if not data:
            return Reply()
        try:
            return unpacked(data)
        except Exception as error:  # what its environments gave cannot be read here
            self.lose(from_exception(self.first, f"reading its reply to {self.command.doing}", error))
            return Reply()

    def progress(self) -> int:
        return int(self._words[PROGRESS])

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def kill(self) -> None:
        """Kill the process and the programs that it started."""
        if self.process is not None:
            self.process.close()

    def ask_for_stack(self) -> None:
        if self.process is not None:
            self.process.ask_for_stack()

    def stack(self) -> str:
        return self.process.stack() if self.process is not None else ""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def stats(self) -> dict[str, Any]:
        """Process id, memory in MiB and restarts."""
        memory = self.process.memory() if self.process is not None else 0
        return {"pid": self.pid, "rss_mib": memory / 2**20, "restarts": self.starts - 1}

    def death(self) -> Failure:
        assert self.process is not None
        self.process.wait(1.0)
        failure = self.failure("died", f"its worker process {describe_exit(self.process.exit_code)}")
        if self._begin is not None and self._words[STARTED] != self._asked & 0xFFFFFFFF:
            failure.env, failure.doing, failure.action = self.first, f"its wait for {failure.doing}", None
        return failure

    def begin_close(self) -> bool:
        return self.process is not None and super().begin_close()

    def close(self) -> None:
        """Kill it, unless it ends by itself in a moment because it has closed its environments."""
        if self.process is not None:
            if self.lost is None and self.command is None:
                self.process.wait(END_SECONDS)
            self.kill()
