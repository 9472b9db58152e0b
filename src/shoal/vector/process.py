"""Workers as their caller sees them: told a command, waited for, and given up when they die or take too long.

There is one wait, `wait_any`. It looks at all workers that are at work, so their time limits run side by side. What
the methods of each kind of worker and backend are for is told where `Worker` and `Backend` have them.
"""
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, WorkerDiedError, safe_repr
from shoal.core.processes import (
    SLICE,
    STANDSTILL,
    Channel,
    ChannelClosedError,
    StartMethod,
    WorkerProcess,
    describe_exit,
    dumps,
    end_all,
    require_linux,
    socket_pair,
)
from shoal.envs.catalogue import EnvFn
from shoal.vector import buffers as words
from shoal.vector import worker as operations
from shoal.vector.buffers import Buffers, Lines, Patience, TableBuffer, TextBuffer, read, shared_file
from shoal.vector.env_group import EnvGroup, Rebuild, Reply, Reset, Step, Trial, even_cuts, ids_of, name_of
from shoal.vector.failures import Failure, from_exception, where_it_was
from shoal.vector.worker import Attach, Close, Make, QueueBox, serve

LOADING_SECONDS = 60.0
"""Time for a worker with a time limit to start and import what it needs, before its first constructor begins."""


class Limits(NamedTuple):
    """Seconds that one env may take for a step, a reset or a call, and for its constructor; None for ever."""

    step: float | None = None
    make: float | None = None

    def of(self, command: Any) -> float | None:
        """The limit for one env in this command."""
        if isinstance(command, Attach):  # nothing of the env's runs
            return None if self.step is None else LOADING_SECONDS
        return self.make if isinstance(command, Make | Rebuild) else self.step


NO_LIMITS = Limits()


class Worker:
    """A group of environments, from the `first` on, and its command; here for a group that the caller itself steps."""

    inline = True
    sends = False
    """Its commands are sent as bytes."""
    home: Any = None
    """What it lives in; workers with the same home are lost together."""

    def __init__(self, first: int, env_fns: Sequence[EnvFn], limits: Limits = NO_LIMITS) -> None:
        self.first, self.env_fns, self.count = first, list(env_fns), len(env_fns)
        self.ids = range(first, first + self.count)
        self.limits, self._limited = limits, limits != NO_LIMITS
        self.place = self.before = 0
        """Where its latest observations are, and where those before them were."""
        self.command: Any = None
        """What it is at, or what it answered as long as nobody took the reply."""
        self.jobs: dict[int, tuple[str, Any]] = {}
        """What waits for it to be free: env -> "step" or "reset", and its action or seed."""
        self.lost: Failure | None = None
        """Why it can no longer work, if so."""
        self.group: EnvGroup | None = None
        self.buffers: Buffers | None = None
        self.looked = 0.0
        """When it was looked at last, whether it still lives and is in time."""
        self._seen = (-1, 0.0)
        self._packed: tuple[Any, bytes] = (None, b"")
        self._answer: Any = None  # the reply, in a tuple

    # --- what each kind of worker does in its own way
    def start(self, command: Any, *, bell: bool = False) -> None:
        """Begin a command; with `bell`, its reply rings for all."""
        del bell
        self.command = command
        if isinstance(command, Step) and command.actions is None:  # now: the caller may write the next ones
            assert self.group is not None
            command.actions = self.group.actions(command.members, command.loose)

    def answered(self) -> bool:
        """The reply is there, or never will be: `take` does not wait."""
        return True

    def silent(self) -> bool:
        """It is sure, now that it has answered, that all of the reply is in the buffers."""
        return False

    def pause(self, seconds: float) -> None:
        """Sleep until there is a reply, or so many seconds."""

    def quick(self) -> bool:
        """`answered`, after a short look where that pays."""
        return self.answered()

    def receive(self) -> Reply | None:
        """The reply, until the next command begins; the caller's own group does its work here."""
        command, self.command = self.command, None
        if isinstance(command, Make):
            self.group = EnvGroup(self.env_fns, self.first)
            return self.group.make()
        assert self.group is not None
        return self.group.run(command)

    def progress(self) -> int:
        """Position of the env that it is at, or `LOADING`."""
        return self.group.progress[0] if self.group is not None else 0

    def own_times(self) -> Any:
        """The histograms of step times of its envs, if they are not in the common buffers."""
        return None

    def is_gone(self) -> bool:
        """It ended by itself."""
        return False

    def give_up(self) -> None:
        """End it if that is possible; it is `lost` from now on."""

    def ask_stack(self) -> None:
        """Have it tell where it is."""

    def stack(self) -> str:
        """Where it was when it was asked, or crashed."""
        return ""

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None

    # --- what is the same for all
    def pack(self, command: Any) -> None:
        """Refuse a command that cannot be sent to it, before it begins."""
        if self.sends:
            self._packed = command, dumps(command)[0]

    def bytes_of(self, message: Any) -> bytes:
        """What a command is sent as."""
        (packed, data), self._packed = self._packed, (None, b"")
        return data if packed is message else dumps(message)[0]

    def begin(self, command: Any, *, bell: bool = False) -> None:
        """Begin a command."""
        if self._limited:
            self._seen = (-1, time.monotonic())
        self._answer = None
        self.start(command, bell=bell)

    def take(self) -> tuple[Any, Reply | None]:
        """The command that is over and its reply; a lost worker gives its failure.

        After an interrupt it gives the same again, but for the work of the caller's own group.
        """
        command = self.command
        if self.lost is None and self._answer is None:
            self._answer = (self.receive(),)
        if self.lost is not None:
            self._answer = (Reply(failures=[self.lost]),)
        self.command = None
        return command, self._answer[0]

    def overdue(self, now: float) -> float | None:
        """The time limit that the env it is at has exceeded, if so."""
        limit = self.limits.of(self.command)
        if limit is None:
            return None
        at = self.progress()
        if at == words.LOADING:
            limit = max(limit, LOADING_SECONDS)
        if at != self._seen[0]:  # since when it is at it, nobody saw
            self._seen = (at, now)
        return limit if now - self._seen[1] > limit else None

    def spare(self, seconds: float) -> None:
        """Take so many seconds off the time of the env that it is at."""
        self._seen = (self._seen[0], self._seen[1] + seconds)

    def excuse(self, now: float) -> None:
        """Start the clock of a constructor anew."""
        if isinstance(self.command, Make) and self.progress() != words.LOADING:
            self._seen = (self.progress(), now)

    def lose(self, failure: Failure) -> None:
        """Give it up because of this."""
        self.lost = failure
        self.give_up()

    def current(self) -> tuple[int, str, Any]:
        """The env that it is at, what it does to it, and with which action."""
        at = self.progress()
        env = self.first + (at if at < self.count else 0)
        return env, name_of(self.command) if self.command is not None else "wait", self.action_of(env)

    def failure(self, kind: str, summary: str) -> Failure:
        """A failure of the env that it is at, with what its process said."""
        env, doing, action = self.current()
        stack = self.stack()
        return Failure(
            env, doing, summary + where_it_was(stack), stack, safe_repr(action), self.pid, None, kind
        )

    def unreadable(self, error: BaseException) -> Reply:
        """Its reply cannot be read here: what it told of any env is lost."""
        doing = f"reading its reply to {name_of(self.command)}"
        return Reply(failures=[from_exception(i, doing, error) for i in ids_of(self, self.command)])

    def death(self) -> Failure:
        """That it is gone."""
        return self.failure("died", "its thread ended")

    def action_of(self, env: int) -> Any:
        """The action that an env was given in the present command, as far as it is known."""
        if not isinstance(self.command, Step) or self.buffers is None:
            return None
        command = self.command
        members = list(range(self.count)) if command.members is None else list(command.members)
        try:
            if command.actions is not None:
                return command.actions[members.index(env - self.first)]
            return read(self.buffers, self.first, [env - self.first], command.loose)[0]
        except Exception:  # for a message: what cannot be told is left out
            return None


def look_at(workers: Sequence[Worker]) -> None:
    """Notice workers that are gone, and give up those that are overdue, all at once."""
    at_work = [worker for worker in workers if worker.lost is None and worker.command is not None]
    waiting = [worker for worker in at_work if not worker.answered()]
    homes: dict[Any, list[Worker]] = {}
    for worker in waiting:
        if worker.is_gone():
            homes.setdefault(worker.home or worker, []).append(worker)
    for suspects in homes.values():
        failure = suspects[0].death()
        if len(suspects) > 1:
            others = ", ".join(str(worker.current()[0]) for worker in suspects[1:9])
            failure.summary += f" (or it was the fault of env {others}, which it stepped at the same time)"
        for worker in suspects:
            worker.lose(failure)
    now = time.monotonic()
    for worker in workers:
        worker.looked = now
    if any(worker.progress() == words.LOADING for worker in waiting):
        # The machine is busy starting processes: constructors have their time after that.
        for worker in waiting:
            worker.excuse(now)
    overdue = [
        (worker, limit) for worker in waiting if worker.lost is None and (limit := worker.overdue(now))
    ]
    if not overdue:
        return
    for worker, _ in overdue:
        worker.ask_stack()
    end, before = now + 0.3, [""]
    while (stacks := [worker.stack() for worker, _ in overdue]) != before or not all(stacks):
        if time.monotonic() > end:
            break
        before = stacks  # it is written in pieces: whole where it stands still
        time.sleep(0.02)
    failures = [worker.failure("timeout", f"no answer within {limit:g} s") for worker, limit in overdue]
    for (worker, _), failure in zip(overdue, failures, strict=True):
        worker.lose(failure)
    for worker in at_work:  # neighbours of those: killed with them, and not to blame
        for (other, _), failure in zip(overdue, failures, strict=True):
            if worker.lost is None and worker.home is not None and worker.home is other.home:
                worker.lose(failure)


class DeadlineError(TimeoutError):
    """A wait is over; a plain `TimeoutError` may be that of a signal's handler."""


def wait_any(
    wanted: Sequence[Worker],
    workers: Sequence[Worker],
    deadline: float | None,
    pause: Any,
    found: Callable[[], list[Worker]] | None = None,
) -> list[Worker]:
    """Those of `wanted` that have an answer, or never will; waits until there is one.

    Args:
        wanted: whom to wait for.
        workers: all at work, whose time runs meanwhile.
        deadline: by `time.monotonic`.
        pause: sleeps until there may be something, or so many seconds.
        found: tells the same of many at less cost.

    Raises:
        DeadlineError: at the deadline.
    """
    looked = time.monotonic()
    while True:
        ready = found() if found is not None else [worker for worker in wanted if worker.answered()]
        if ready:
            return ready
        now = time.monotonic()
        over = deadline is not None and now >= deadline
        # Who asks often, and never waits for long, has them looked at all the same.
        if now - looked >= SLICE or (over and now - workers[0].looked >= SLICE):
            if now - looked >= SLICE + STANDSTILL:  # its workers may have stood still too
                for worker in workers:
                    worker.spare(now - looked - SLICE)
            looked = now
            look_at(workers)
            continue
        if over:
            raise DeadlineError
        left = SLICE - (now - looked)
        pause(left if deadline is None else min(left, deadline - now))


def replies_of(workers: Sequence[Worker]) -> list[Reply]:
    """What all of these answer to what they were told, in their order; the caller's own work is done first."""
    replies: dict[Worker, Reply] = {}
    for worker in sorted(workers, key=lambda worker: not worker.inline):
        if not worker.quick():
            wait_any([worker], workers, None, worker.pause)
        replies[worker] = worker.take()[1] or Reply()
    return [replies[worker] for worker in workers]


class Backend:
    """What workers live in: how it is started, replaced and ended."""

    workers: Sequence[Worker] = ()

    def start(self, workers: Sequence[Any]) -> None:
        """Start what these live in and have them make their environments; `replies_of` tells how that went."""
        for worker in workers:
            worker.lost = worker.command = None
        made: dict[Any, bytes] = {}
        for worker in workers:
            env_fns = worker.env_fns
            if worker.sends:
                key = tuple(map(id, env_fns))
                env_fns = made[key] = made.get(key) or dumps_env_fns(env_fns)
            worker.begin(Make(worker.first, env_fns))

    def attach(self, workers: Sequence[Any], attach: Attach, buffers: Buffers) -> None:
        """Tell them where their results go."""
        for worker in workers:
            worker.buffers = buffers
            worker.begin(attach)

    def share(self, attach: Attach) -> Buffers:
        """The buffers of the vector env, where its workers can reach them."""
        return attach.buffers()

    def housemates(self, worker: Worker) -> list[Worker]:
        """All workers that are lost with this one, itself included."""
        if worker.home is None:
            return [worker]
        return [other for other in self.workers if other.home is worker.home]

    def answered(self) -> Sequence[Any]:
        """All who have an answer, or never will; those who are at nothing may be among them."""
        return [worker for worker in self.workers if worker.answered()]

    def wait_bell(self, seconds: float) -> None:
        """Sleep until a reply rings, or so many seconds."""

    def stats(self) -> list[dict[str, Any]]:
        """One row per process."""
        return []

    def close(self, seconds: float) -> None:
        """End everything, by force after so many seconds."""


# --- groups with rows of their own (threads, other machines): their results are copied over
Rows = tuple[Sequence[Any], Any, Any, Any, Any]
"""Observations by leaf, rewards, terminated, truncated, final observations: `[count, ...]` each."""


def rows_of(own: Buffers) -> Rows:
    """What a group wrote into buffers of its own."""
    obs = [None if rows is None else rows[0] for rows in own.obs]
    return obs, own.rewards, own.terminated, own.truncated, own.final


def land(rows: Rows, command: Any, buffers: Buffers, first: int, count: int) -> None:
    """Copy the rows that a step or reset wrote to where the caller looks."""
    obs, rewards, terminated, truncated, final = rows
    members = np.arange(count) if command.members is None else np.asarray(command.members, dtype=np.intp)
    ids = first + members
    for target, source in zip(buffers.obs, obs, strict=True):
        if source is not None:
            target[command.place, ids] = source[members]
    buffers.rewards[ids] = rewards[members]
    buffers.terminated[ids], buffers.truncated[ids] = terminated[members], truncated[members]
    if final is not None and buffers.final is not None:
        buffers.final[ids] = final[members]


def with_own_rows(worker: Worker, command: Any) -> Any:
    """The command as a group with rows of its own gets it: with its actions, and one place."""
    if isinstance(command, Step):
        assert worker.buffers is not None
        members = range(worker.count) if command.members is None else command.members
        if command.actions is None:
            command.actions = read(worker.buffers, worker.first, members, command.loose)
        return Step(command.members, 0, {}, command.actions)
    if isinstance(command, Reset):
        return Reset(command.members, command.seeds, command.options, 0, command.ends)
    return command


class ThreadWorker(Worker):
    """A group in a thread of the caller's process: for environments that wait and need no isolation."""

    inline = False

    def __init__(self, backend: ThreadBackend, first: int, env_fns: Sequence[EnvFn], limits: Limits) -> None:
        super().__init__(first, env_fns, limits)
        self.backend = backend
        self.box = QueueBox(backend.bell)
        self.thread: threading.Thread | None = None

    def start(self, command: Any, *, bell: bool = False) -> None:
        """Give the command to its thread: to a fresh one to make envs, for one that hangs cannot be killed."""
        del bell
        own = with_own_rows(self, command)
        if isinstance(command, Make):
            self.box, name = QueueBox(self.backend.bell), f"shoal-envs-{self.first}"
            thread = threading.Thread(target=serve, args=(self.box,), name=name, daemon=True)
            thread.start()
            self.thread = thread  # only now: one that could not be started cannot be waited for
        self.box.replies.clear()
        self.command = command
        self.box.commands.put(own)

    def answered(self) -> bool:
        return self.lost is not None or bool(self.box.replies)

    def pause(self, seconds: float) -> None:
        self.backend.wait_bell(seconds)

    def receive(self) -> Reply | None:
        with contextlib.suppress(queue.Empty):
            self.backend.bell.get_nowait()  # as many bells as replies
        if isinstance(self.command, Step | Reset):
            self._land()
        return self.box.replies[0]

    def _land(self) -> None:
        if self.box.own is not None and self.buffers is not None:
            land(rows_of(self.box.own), self.command, self.buffers, self.first, self.count)

    def progress(self) -> int:
        return int(self.box.progress[0])

    def own_times(self) -> Any:
        return None if self.box.own is None else self.box.own.times

    def is_gone(self) -> bool:
        return self.thread is not None and not self.thread.is_alive() and not self.box.replies

    def give_up(self) -> None:
        """Leave the thread behind; ends of episodes that it wrote are kept."""
        if isinstance(self.command, Step):
            self._land()
        self.box.commands.put(Close())


class ThreadBackend(Backend):
    """Threads of the calling process with a group each."""

    def __init__(self, env_fns: Sequence[EnvFn], n_threads: int, limits: Limits) -> None:
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        cuts = even_cuts(len(env_fns), n_threads)
        self.workers: list[ThreadWorker] = [ThreadWorker(self, lo, env_fns[lo:hi], limits) for lo, hi in cuts]

    def wait_bell(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self.bell.get(timeout=max(seconds, 0.0))

    def close(self, seconds: float) -> None:
        """Have the threads close their envs; those that hang are left behind."""
        for worker in self.workers:
            worker.box.commands.put(Close())
        end = time.monotonic() + seconds
        for thread in [worker.thread for worker in self.workers if not worker.lost]:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


class Board(NamedTuple):
    """What is known of all groups in worker processes, one entry each: who has answered is told by one comparison."""

    asked: Any  # the number of its latest command
    told: Any  # the number of the command that it answered last, as it says
    gone: Any  # whether it is lost


class ProcessWorker(Worker):
    """A group in a worker process, or in one of its threads."""

    inline, sends = False, True

    home: WorkerProcess

    def __init__(self, home: WorkerProcess, lines: Lines, number: int, board: Board, *group: Any) -> None:
        self.lines, self.number = lines, number
        self._asked, self._gone = board.asked.data, board.gone.data
        super().__init__(*group)
        self.home = home
        self._command, self._reply = lines.command(number), lines.reply(number)
        self._patience = Patience()
        self._sequence = 0
        self.texts: dict[int, TextBuffer] = {}
        self.tables: TableBuffer | None = None
        self.channel: Channel | None = None
        self._data: bytearray | None = None

    @property  # type: ignore[override]
    def lost(self) -> Failure | None:
        return self._lost

    @lost.setter
    def lost(self, failure: Failure | None) -> None:
        self._lost, self._gone[self.number] = failure, failure is not None

    def connect(self, channel: Channel) -> None:
        """Begin anew with a fresh process."""
        self.let_go()
        self.channel = channel
        self._wake = self.lines.wake(self.number, new=True)
        self._ready = self.lines.ready(self.number, new=True)
        self._reply[words.REPLY_SEQUENCE] = self._command[words.SEQUENCE] = self._sequence
        self._asked[self.number] = self._sequence
        self._reply[words.PROGRESS] = words.LOADING
        self._rings = False

    def let_go(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def start(self, command: Any, *, bell: bool = False) -> None:
        operation, number, message = operations.MESSAGE, 0, command
        if type(command) is Step:
            whole = command.members is None
            operation, number = operations.STEP if whole else operations.STEP_SOME, command.place
            message = command.loose or None
        elif isinstance(command, Trial):
            operation, number, message = operations.TRIAL, command.rounds, None
        elif isinstance(command, Close):
            operation, message = operations.CLOSE, None
        data = b"" if message is None else self.bytes_of(message)  # if that fails, nothing has begun
        if operation == operations.STEP_SOME:
            assert self.buffers is not None
            mask = self.buffers.members[self.first : self.first + self.count]
            mask[...] = False
            mask[command.members] = True
        if data and self.channel is not None:
            self.channel.load(data)
        line = self._command
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        line[words.OPERATION], line[words.PLACE] = operation, number
        line[words.HAS_MESSAGE] = bool(data)
        line[words.BELL] = self._rings = bell
        line[words.SEQUENCE] = self._asked[self.number] = self._sequence
        self._data, self.command = None, command  # now: nobody must wait for what it was not told
        try:
            self._wake.release()
            if data:
                self._tell()
        except BaseException:
            if data:  # half a message would be taken for the beginning of the next one
                self._tell()
            raise

    def _tell(self) -> None:
        if self.lost is None and self.channel is not None:
            with contextlib.suppress(ChannelClosedError, WorkerDiedError):  # who waits finds out and tells
                self.channel.flush(self._still_there)

    def _still_there(self) -> None:
        look_at([self])
        if self.lost is not None:
            raise WorkerDiedError(self.lost.summary)

    def answered(self) -> bool:
        return self.lost is not None or self._reply[words.REPLY_SEQUENCE] == self._sequence

    def silent(self) -> bool:
        return self.lost is None and not self._reply[words.REPLY_FLAGS]

    def quick(self) -> bool:
        if self._rings or self.lost is not None:
            return self.answered()
        return self._patience.look(self._ready.acquire) and self.answered()

    def pause(self, seconds: float) -> None:
        if self._rings:
            time.sleep(min(seconds, 0.001))
        else:
            self._ready.acquire(True, max(seconds, 0.0))

    def receive(self) -> Reply | None:
        flags = self._reply[words.REPLY_FLAGS]
        if not flags:
            return None
        reply = self._message() if flags & operations.HAS_MESSAGE else Reply()
        if flags & operations.HAS_TEXT:
            for leaf, text in self.texts.items():
                reply.columns[leaf] = text.unpack()
        if (number := flags >> operations.TABLE) and self.tables is not None and self.lost is None:
            reply.told = self.tables.read(number)
        return reply

    def _message(self) -> Reply:
        assert self.channel is not None
        while True:
            try:
                if self._data is None:
                    self._data = self.channel.receive_bytes(self._still_there)
            except (ChannelClosedError, WorkerDiedError):
                self.home.make_sure_it_is_gone()
                if self.lost is None:
                    self.lose(self.death())
                return Reply()
            try:
                sequence, reply = operations.unpacked(self._data)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                try:
                    operations.unpacked(self._data)
                except BaseException:  # what came cannot be read here
                    return self.unreadable(error)
                raise  # a signal's handler raised it
            if reply.schema is not None and self.tables is not None:  # of whatever command: it is told once
                self.tables.know(*reply.schema)
            if sequence == self._sequence:
                return reply
            self._data = None

    def progress(self) -> int:
        return int(self._reply[words.PROGRESS])

    def is_gone(self) -> bool:
        return not self.home.alive()

    def give_up(self) -> None:
        self.home.kill()

    def ask_stack(self) -> None:
        self.home.ask_stack()

    def stack(self) -> str:
        return self.home.log_text()

    @property
    def pid(self) -> int | None:
        return self.home.pid

    def death(self) -> Failure:
        if not self.home.alive():
            self.home.reap()
        return self.failure("died", f"its worker process {describe_exit(self.home.exit_code)}")


class ProcessBackend(Backend):
    """Worker processes that share a block of memory with the caller; with `threads`, of one thread for each env."""

    def __init__(
        self, env_fns: Sequence[EnvFn], n_processes: int, threads: bool, method: StartMethod, limits: Limits
    ) -> None:
        require_linux("worker processes")
        cuts = even_cuts(len(env_fns), n_processes)
        n_groups = len(env_fns) if threads else len(cuts)
        self._block = self._control = -1
        self.processes = [WorkerProcess("shoal.vector.worker:main", method) for _ in cuts]
        self.workers: list[ProcessWorker] = []
        self._control = shared_file(Lines.nbytes(n_groups))
        try:
            self.lines = Lines(n_groups, mmap.mmap(self._control, 0))
            self._bell = self.lines.bell(new=True)
            self._board = Board(
                np.zeros(n_groups, np.uint32), self.lines.replied(), np.zeros(n_groups, np.bool_)
            )
            for process, (lo, hi) in zip(self.processes, cuts, strict=True):
                for first, stop in [(i, i + 1) for i in range(lo, hi)] if threads else [(lo, hi)]:
                    number = len(self.workers)
                    fns = env_fns[first:stop]
                    worker = ProcessWorker(process, self.lines, number, self._board, first, fns, limits)
                    self.workers.append(worker)
        except BaseException:
            os.close(self._control)
            raise

    def start(self, workers: Sequence[Worker]) -> None:
        """Fresh processes for these workers and all who live with them."""
        for process in dict.fromkeys(worker.home for worker in workers):
            if process.starts:
                process.kill()
                process.release()
            process.start()
            self._settle([worker for worker in self.workers if worker.home is process])
        super().start(workers)

    def _settle(self, workers: Sequence[ProcessWorker]) -> None:
        process, theirs = workers[0].home, []
        try:
            for worker in workers:
                ours, their = socket_pair()
                theirs.append(their)
                worker.connect(Channel(ours, SLICE))
            with contextlib.suppress(ChannelClosedError, WorkerDiedError):  # who waits finds out and tells
                groups = self.lines.n_groups, [worker.number for worker in workers]
                process.channel.send(dumps(groups)[0], process.check)
                descriptors = [self._control, *[item.fileno() for item in theirs]]
                process.channel.send_descriptors(descriptors, process.check)
        finally:
            for their in theirs:
                their.close()

    def attach(self, workers: Sequence[Any], attach: Attach, buffers: Buffers) -> None:
        super().attach(workers, attach, buffers)
        for worker in workers:
            worker.texts = TextBuffer.of(buffers, worker.first, worker.count)
            worker.tables = TableBuffer(buffers, worker.first, worker.count)
            with contextlib.suppress(ChannelClosedError, WorkerDiedError):
                worker.channel.send_descriptors([self._block], worker.home.check)

    def share(self, attach: Attach) -> Buffers:
        self._block = shared_file(attach.buffers(False).nbytes)
        return attach.buffers(mmap.mmap(self._block, 0))

    def answered(self) -> Sequence[Any]:
        if len(self.workers) <= 16:  # fewer are looked at sooner one by one
            return super().answered()
        asked, told, gone = self._board
        return [self.workers[k] for k in ((asked == told) | gone).nonzero()[0].tolist()]

    def wait_bell(self, seconds: float) -> None:
        """Sleep until a worker rings; one look serves all that rang."""
        if self._bell.acquire(True, max(seconds, 0.0)):
            self._bell.drain()

    def stats(self) -> list[dict[str, Any]]:
        return [
            {"pid": process.pid, "rss_mib": process.rss() / 2**20, "restarts": process.starts - 1}
            for process in self.processes
        ]

    def close(self, seconds: float) -> None:
        """Tell all to close, then kill those that do not."""
        for worker in self.workers:
            if worker.channel is not None and worker.lost is None and worker.home.owner == os.getpid():
                worker.start(Close())
        end_all(self.processes, seconds)
        for worker in self.workers:
            worker.let_go()
        ours, self._control, self._block = (self._control, self._block), -1, -1
        for descriptor in ours:
            if descriptor >= 0:
                os.close(descriptor)


def dumps_env_fns(env_fns: Sequence[EnvFn]) -> bytes:
    """Functions that make environments as bytes for a process that may lack the modules they come from.

    Raises:
        ConfigError: when a function holds something that cannot be sent to another process.
    """
    try:
        return dumps(list(env_fns))[0]
    except Exception as error:
        raise ConfigError(
            f"what makes the environments cannot be sent to a worker process ({error}); make it a function of a "
            f"module, without locks, files or generators in its closure, or use backend='serial'"
        ) from error
