"""The loop of a worker process: commands come in, its group of environments does them, replies go out."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import sys
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from shoal.core.seeding import derive_seed
from shoal.core.workers import dumps
from shoal.vector.buffers import TextBuffer
from shoal.vector.env_group import (
    NOTHING,
    STEP_ALL,
    Attach,
    Close,
    EnvGroup,
    Make,
    Reply,
    Reset,
)
from shoal.vector.failures import Failure, from_exception
from shoal.vector.infos import EnvInfo, InfoTable
from shoal.vector.threads import ThreadedGroup

COMMAND, ANSWER, TO_WORKER, TO_CALLER, TEXT, PROGRESS = range(6)
"""Words that a worker shares with its caller: numbers of the latest command and answer; whether a message goes with
the command and with the answer; whether text is in shared memory; which env is at work."""
WORDS = 16
"""Room per worker: a cache line."""


class Link:
    """A worker's side of what connects it with its caller.

    With semaphores a command is a number in shared memory and a signal, and the pipe carries only what does not
    fit there. Without them (macOS has none with a time limit) every command is a message, an empty one for a plain
    step.
    """

    def __init__(self, pipe: Any, words: Any, number: int, semaphores: tuple[Any, Any] | None) -> None:
        self.pipe, self._semaphores = pipe, semaphores
        self.words = memoryview(words).cast("B").cast("I")[number * WORDS : (number + 1) * WORDS]

    def receive(self) -> bytes:
        """The next command, which may be empty.

        Raises:
            EOFError: when the caller is gone.
        """
        if self._semaphores is None:
            return self.pipe.recv_bytes()  # type: ignore[no-any-return]
        self._semaphores[0].acquire()
        return self.pipe.recv_bytes() if self.words[TO_WORKER] else b""

    def send(self, data: bytes, *, text: bool) -> None:
        """Answer the last command."""
        words = self.words
        words[TEXT] = text
        if self._semaphores is None:
            self.pipe.send_bytes(data)
            return
        words[TO_CALLER] = bool(data)
        words[ANSWER] = words[COMMAND]
        self._semaphores[1].release()
        if data:
            self.pipe.send_bytes(data)


def serve(
    pipe: Any, words: Any, number: int, semaphores: tuple[Any, Any] | None, first: int, threads: bool
) -> None:
    """Run a worker process until it is told to close, or its caller is gone."""
    link = Link(pipe, words, number, semaphores)
    group: Any = None
    texts: dict[int, TextBuffer] = {}
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
                    command.env_fns = pickle.loads(command.env_fns)
                    group = _group(command.env_fns, first, link.words[PROGRESS : PROGRESS + 1], threads)
            except BaseException as error:
                doing = "make" if group is None else "reading a command"
                ids = range(first, first + (1 if group is None else group.count))
                failures = [from_exception(i, doing, error, os.getpid()) for i in ids]
                link.send(dumps(Reply(failures=failures)), text=False)
                continue
            if isinstance(command, Close):
                break
            if isinstance(command, Attach):
                assert command.memory is not None
                memory = SharedMemory(command.memory)
                found = command.buffers(memory.buf)
                group.attach(found, command.autoreset, command.check_nan)
                texts = TextBuffer.of(found, first, group.count)
                gc.collect()
                gc.freeze()
                reply = NOTHING
            else:
                if isinstance(command, Reset) and not seeded:
                    seeded = seed_globals(command.seeds, first)
                reply = group.run(command)
            text = _pack_text(reply, texts) if reply.columns and texts else False
            link.send(b"" if is_empty(reply) else packed(reply, first), text=text)
    if group is not None:
        group.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # a thread that an environment left running must not hold it up


def _group(env_fns: Sequence[Any], first: int, progress: Any, threads: bool) -> Any:
    return (ThreadedGroup if threads else EnvGroup)(env_fns, first, progress)


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
    return not (reply.columns or reply.told or reply.failures) and reply.value is None


def _pack_text(reply: Reply, texts: dict[int, TextBuffer]) -> bool:
    """Move the text of a reply into shared memory; all of it or none."""
    if not all(text.pack(reply.columns[leaf]) for leaf, text in texts.items()):
        return False
    for leaf in texts:
        del reply.columns[leaf]
    return True


# --- replies as bytes
def packed(reply: Reply, first: int) -> bytes:
    """A reply as bytes; what cannot be sent becomes a failure of its env."""
    parts = _plain(reply)
    try:
        return pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            return dumps(parts)
        except Exception as error:
            return dumps(_plain(_without_what_cannot_travel(reply, error, first)))


def _plain(reply: Reply) -> tuple[Any, ...]:
    """A reply of tuples, which pickle faster."""
    told: Any = reply.told
    if isinstance(told, InfoTable):
        told = (told.first, told.count, told.keys, told.kinds, told.columns)
    else:
        told = [tuple(item) for item in told]
    return reply.columns, told, reply.failures, reply.value


def unpacked(data: bytes) -> Reply:
    """The reply in what `packed` gave."""
    columns, told, failures, value = pickle.loads(data)
    if isinstance(told, tuple):
        return Reply(columns, InfoTable(*told), failures, value)
    return Reply(columns, [EnvInfo(*item) for item in told], failures, value)


def _without_what_cannot_travel(reply: Reply, error: BaseException, first: int) -> Reply:
    """The same reply without what cannot be sent, with a failure for each env concerned."""
    failures: dict[int, Failure] = {failure.env: failure for failure in reply.failures}

    def travels(env: int, what: str, value: Any) -> bool:
        try:
            dumps(value)
        except Exception as problem:
            failures.setdefault(env, from_exception(env, f"sending its {what}", problem, os.getpid()))
            return False
        return True

    told = [item for item in reply.told if travels(item.env, "info", item)]
    columns = {
        leaf: [value if travels(first + j, "observation", value) else None for j, value in enumerate(values)]
        for leaf, values in reply.columns.items()
    }
    for j, value in enumerate(reply.value or ()):
        travels(first + j, "result", value)
    if len(failures) == len(reply.failures):
        failures[first] = from_exception(first, "sending its results", error, os.getpid())
    return Reply(columns, told, list(failures.values()))
