"""The loop of a worker process: commands come in, its group of environments does them, replies go out."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from shoal.core.seeding import derive_seed
from shoal.core.workers import dumps
from shoal.vector.env_group import EnvGroup
from shoal.vector.infos import EnvInfo, InfoTable
from shoal.vector.messages import (
    NOTHING,
    STEP_ALL,
    Attach,
    Close,
    Failure,
    Make,
    Reply,
    Reset,
    from_exception,
    ids_of,
)

COMMAND, STARTED, ANSWER, TO_WORKER, TO_CALLER, PROGRESS = range(6)
"""Words that a worker shares with its caller: numbers of the latest command, and of those started and answered; whether
a message goes with the command and with the answer; which env is at work."""
WORDS = 16
"""Room per worker: a cache line."""


SMALL = 16_384
"""Bytes of a message that every pipe takes at once: it is sent before its signal, so that neither side waits twice."""


LOOK_SECONDS = 100e-6
"""How long to look at a semaphore before sleeping, and a pause between two looks in which somebody had the core."""
QUIET_SECONDS = 0.5


class Patience:
    """Looks at a semaphore for a moment before its owner sleeps: as long as that pays and nobody else wants the core.

    It never yields, which would give a busy neighbour a whole time slice. After a look in vain it sleeps at once the
    next 1, 3, … 63 times; where somebody else had the core meanwhile, for half a second.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._misses, self._skips, self._not_before = clock, 0, 0, float("-inf")

    def take(self, acquire: Callable[[bool], bool]) -> bool:
        """Whether the semaphore could be taken without sleeping."""
        if acquire(False):
            return True
        if self._skips:
            self._skips -= 1
            return False
        last = start = self._clock()
        if start < self._not_before:
            return False
        while not acquire(False):
            now = self._clock()
            if now - last > LOOK_SECONDS:
                self._not_before = now + QUIET_SECONDS
                return acquire(False)
            if now - start > LOOK_SECONDS:
                self._misses = min(self._misses + 1, 6)
                self._skips = (1 << self._misses) - 1
                return False
            last = now
        self._misses = 0
        return True


class Link:
    """A worker's side of what connects it with its caller.

    With semaphores a command is a number in shared memory and a signal, and the pipe carries only what does not
    fit there. Without them (macOS has none with a time limit) every command is a message, an empty one for a plain
    step.
    """

    def __init__(
        self, pipe: Any, words: Any, number: int, semaphores: tuple[Any, Any] | None, looks: bool
    ) -> None:
        self.pipe, self._semaphores = pipe, semaphores
        self._patience = Patience() if looks else None
        self.words = memoryview(words).cast("B").cast("I")[number * WORDS : (number + 1) * WORDS]

    def receive(self) -> bytes:
        """The next command, which may be empty.

        Raises:
            EOFError: when the caller is gone.
        """
        if self._semaphores is None:
            return self.pipe.recv_bytes()  # type: ignore[no-any-return]
        acquire = self._semaphores[0].acquire
        if self._patience is None or not self._patience.take(acquire):
            acquire()
        self.words[STARTED] = self.words[COMMAND]
        return self.pipe.recv_bytes() if self.words[TO_WORKER] else b""

    def send(self, data: bytes) -> None:
        """Answer the last command."""
        words = self.words
        if self._semaphores is None:
            self.pipe.send_bytes(data)
            return
        words[TO_CALLER] = bool(data)
        early = 0 < len(data) <= SMALL
        if early:
            self.pipe.send_bytes(data)
        words[ANSWER] = words[COMMAND]
        self._semaphores[1].release()
        if data and not early:
            self.pipe.send_bytes(data)


def serve(
    pipe: Any, words: Any, number: int, semaphores: tuple[Any, Any] | None, looks: bool, first: int
) -> None:
    """Run a worker process until it receives `close` or its caller is gone."""
    link = Link(pipe, words, number, semaphores, looks)
    group: EnvGroup | None = None
    memory: SharedMemory | None = None
    random.seed()  # a fork of the fork server would draw what its siblings draw
    np.random.seed()
    seeded = False
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            data = link.receive()
            try:
                command = pickle.loads(data) if data else STEP_ALL
                if isinstance(command, Make):
                    group = EnvGroup(command.env_fns, first, link.words[PROGRESS : PROGRESS + 1])
            except BaseException as error:
                doing = "make" if group is None else "reading a command"
                ids = range(first, first + (1 if group is None else group.count))
                failures = [from_exception(i, doing, error, os.getpid()) for i in ids]
                link.send(packed(Reply(failures=failures), None, None))
                continue
            if isinstance(command, Attach):
                assert command.memory is not None
                assert group is not None
                memory = SharedMemory(command.memory)
                reply = group.attach(command, command.buffers(memory.buf))
                gc.collect()
                gc.freeze()
            else:
                if isinstance(command, Reset) and not seeded:
                    seeded = seed_globals(command.seeds, first)
                reply = NOTHING if group is None else group.run(command)
            link.send(b"" if is_empty(reply) else packed(reply, group, command))
            if isinstance(command, Close):
                break
    if group is not None:
        group.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # a thread that an environment left running must not hold it up


def seed_globals(seeds: Sequence[int | None], first: int) -> bool:
    """Seed the global generators, for environments that use them; False where there is no seed."""
    seed = next((seed for seed in seeds if seed is not None), None)
    if seed is None:
        return False
    number = derive_seed(seed, "global", first)
    random.seed(number)
    np.random.seed(number % 2**32)
    return True


def is_empty(reply: Reply) -> bool:
    """Whether all of it is in the buffers."""
    return not (reply.columns or reply.env_infos or reply.failures) and reply.value is None


# --- replies as bytes
def packed(reply: Reply, group: Any, command: Any) -> bytes:
    """The reply of a group to a command, as bytes; what cannot be sent becomes a failure of its env."""
    parts = _plain(reply)
    try:
        return pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            return dumps(parts)
        except Exception as error:
            return dumps(_plain(_without_what_cannot_travel(reply, error, ids_of(group, command))))


def _plain(reply: Reply) -> tuple[Any, ...]:
    """A reply of tuples, which pickle faster."""
    env_infos: Any = reply.env_infos
    if isinstance(env_infos, InfoTable):
        columns = [column.tobytes() for column in env_infos.columns]  # arrays take five times as long
        env_infos = (env_infos.first, env_infos.count, env_infos.keys, env_infos.kinds, columns)
    else:
        env_infos = [tuple(item) for item in env_infos]
    return reply.columns, env_infos, reply.failures, reply.value


def unpacked(data: bytes) -> Reply:
    """The reply in what `packed` gave."""
    columns, env_infos, failures, value = pickle.loads(data)
    if isinstance(env_infos, tuple):
        *about, kinds, packed_columns = env_infos
        values = [np.frombuffer(data, kind).copy() for data, kind in zip(packed_columns, kinds, strict=True)]
        first, count, keys = about
        return Reply(columns, InfoTable(first, count, keys, kinds, values), failures, value)
    return Reply(columns, [EnvInfo(*item) for item in env_infos], failures, value)


def _without_what_cannot_travel(reply: Reply, error: BaseException, ids: Sequence[int]) -> Reply:
    """The same reply without what cannot be sent, with a failure for each env concerned."""
    failures: dict[int, Failure] = {failure.env: failure for failure in reply.failures}

    def travels(env: int, what: str, value: Any) -> bool:
        try:
            dumps(value)
        except Exception as problem:
            failures.setdefault(env, from_exception(env, f"sending its {what}", problem, os.getpid()))
            return False
        return True

    env_infos = [item for item in reply.env_infos if travels(item.env, "info", item)]
    columns = {
        leaf: [
            value if travels(i, "observation", value) else None for i, value in zip(ids, values, strict=True)
        ]
        for leaf, values in reply.columns.items()
    }
    for i, value in zip(ids, reply.value or (), strict=False):
        travels(i, "result", value)
    if len(failures) == len(reply.failures):
        failures[ids[0]] = from_exception(ids[0], "sending its results", error, os.getpid())
    return Reply(columns, env_infos, list(failures.values()))
