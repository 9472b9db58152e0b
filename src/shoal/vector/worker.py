"""Where groups of environments work for a caller: the loop that serves one, in a thread or in a worker process.

Environments are made, stepped and closed in the thread that serves their group.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from shoal.core.processes import (
    Channel,
    ChannelClosedError,
    dumps,
    settle,
    write_stacks_on_request,
)
from shoal.envs.catalogue import EnvFn
from shoal.vector import buffers as words
from shoal.vector.buffers import Buffers, Lines, Patience, TableBuffer, TextBuffer
from shoal.vector.env_group import EnvGroup, Reply, Step, Trial, ids_of
from shoal.vector.failures import from_exception
from shoal.vector.values import IN_BUFFER, Layout, Table, Told

STEP, STEP_SOME, MESSAGE, CLOSE, TRIAL = range(1, 6)
"""Operations on a command line; a `MESSAGE` carries any other command."""
HAS_MESSAGE, HAS_TEXT = 1, 2
"""Flags of a reply line."""
TABLE = 8
"""The bits from this one on are the number of the table that the infos are in."""


@dataclass
class Make:
    """The first command of a group: make the environments."""

    first: int
    env_fns: Any  # functions, or their pickle


@dataclass
class Attach:
    """The second command: where results go; a worker process gets the block as a descriptor."""

    n_envs: int
    observations: Layout
    actions: Layout
    autoreset: AutoresetMode
    check_nan: bool
    places: int = 1
    text_bytes: int = 0

    def buffers(self, memory: Any = None, n_envs: int | None = None) -> Buffers:
        """The buffers over some memory, or for so many environments in memory of their own."""
        return Buffers(
            self.n_envs if n_envs is None else n_envs,
            self.observations,
            self.actions,
            places=self.places if n_envs is None else 1,
            text_bytes=self.text_bytes if memory is not None else 0,
            memory=memory,
        )


@dataclass
class Close:
    """The last command."""


def serve(box: QueueBox | LineBox) -> None:
    """Do what a group is told until it is told to close."""
    group: EnvGroup | None = None
    while not isinstance(command := box.next(), Close):
        if isinstance(command, Make):
            group, reply = _made(command, box.progress)
        elif isinstance(command, Attach):
            assert group is not None
            group.attach(box.buffers(command, group), command.autoreset, command.check_nan)
            reply = None
        else:
            assert group is not None
            if group.own and isinstance(command, Step):
                group.buffers.flags.fill(False)
            reply = group.run(command)
        if reply is not None and group is not None:
            reply.ids = ids_of(group, command)
        box.reply(reply)
    failures = group.close() if group is not None else []
    box.reply(Reply(failures=failures) if failures else None)


def _made(command: Make, progress: Any) -> tuple[EnvGroup | None, Reply]:
    env_fns: Sequence[EnvFn] = ()
    try:
        env_fns = pickle.loads(command.env_fns) if isinstance(command.env_fns, bytes) else command.env_fns
    except BaseException as error:
        return None, Reply(failures=[from_exception(command.first, "make", error, os.getpid())])
    group = EnvGroup(env_fns, command.first, progress)
    return group, group.make()


# --- a thread of the caller's process
class QueueBox:
    """The mailbox of a group in a thread of the caller's process; `bell` gets an entry for every reply."""

    def __init__(self, bell: queue.SimpleQueue[None]) -> None:
        self.progress = [words.LOADING]
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: deque[Reply | None] = deque()
        self.bell = bell
        self.own: Buffers | None = None

    def next(self) -> Any:
        """The next command."""
        return self.commands.get()

    def buffers(self, attach: Attach, group: EnvGroup) -> Buffers:
        """Buffers of its own: a thread that hangs cannot be ended, and must not write where others do."""
        self.own = attach.buffers(n_envs=group.count)
        return self.own

    def reply(self, reply: Reply | None) -> None:
        """Hand the reply over."""
        self.replies.append(reply)
        self.bell.put(None)


# --- a worker process
def main(descriptor: int, log: int) -> int:
    """Run a worker process; returns its exit code."""
    write_stacks_on_request(log)
    channel = Channel(socket.socket(fileno=descriptor))
    settle(channel.receive())
    n_groups, numbers = channel.receive()  # of all groups, and the numbers of those that live here
    control, *sockets = channel.receive_descriptors(1 + len(numbers))
    lines = Lines(n_groups, mmap.mmap(control, 0))
    os.close(control)
    alone = len(numbers) == 1
    boxes = [
        LineBox(lines, number, Channel(socket.socket(fileno=item)), alone)
        for number, item in zip(numbers, sockets, strict=True)
    ]
    if alone:
        serve(boxes[0])
        return 0
    sys.setswitchinterval(5e-4)
    threads = [
        threading.Thread(target=serve_or_end, args=(box,), name=f"group-{box.number}") for box in boxes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def serve_or_end(box: QueueBox | LineBox) -> None:
    """A group that cannot be served any more must not be waited for: the whole worker ends."""
    try:
        serve(box)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class LineBox:
    """The mailbox of a group in a worker process: lines in shared memory, and a socket for what is no number.

    It is `alone` where no other group lives in the process.
    """

    def __init__(self, lines: Lines, number: int, channel: Channel, alone: bool) -> None:
        self.number, self.channel, self.alone = number, channel, alone
        self._command, self._reply = lines.command(number), lines.reply(number)
        self._wake, self._ready, self._bell = lines.wake(number), lines.ready(number), lines.bell()
        self.progress = self._reply[words.PROGRESS : words.PROGRESS + 1]
        self._patience = Patience()
        self._parent = os.getppid()
        self._members: Any = None
        self._texts: dict[int, TextBuffer] = {}
        self._tables: TableBuffer | None = None
        self._first = 0
        self._sequence = self._rings = 0

    def next(self) -> Any:
        """Wait for a command; ends the process when its parent is gone."""
        wake = self._wake.acquire
        if not self._patience.look(wake):
            while not wake(True, 1.0):
                if os.getppid() != self._parent:
                    os._exit(1)
        command = self._command
        self._sequence, self._rings = command[words.SEQUENCE], command[words.BELL]
        operation = command[words.OPERATION]
        try:
            message = self.channel.receive() if command[words.HAS_MESSAGE] else None
        except ChannelClosedError:
            os._exit(1)
        if operation == STEP:
            return Step(None, command[words.PLACE], message or {})
        if operation == STEP_SOME:
            return Step(self._members.nonzero()[0].tolist(), command[words.PLACE], message or {})
        if operation == TRIAL:
            return Trial(command[words.PLACE])
        return Close() if operation == CLOSE else message

    def buffers(self, attach: Attach, group: EnvGroup) -> Buffers:
        """The block that the caller shares."""
        (descriptor,) = self.channel.receive_descriptors(1)
        found = attach.buffers(mmap.mmap(descriptor, 0))
        os.close(descriptor)
        self._first = group.first
        self._members = found.members[group.first : group.first + group.count]
        self._texts = TextBuffer.of(found, group.first, group.count)
        self._tables = TableBuffer(found, group.first, group.count)
        if self.alone:
            gc.collect()
            gc.freeze()
        return found

    def reply(self, reply: Reply | None) -> None:
        """Tell that the last command is done, and what it left."""
        flags, data = 0, b""
        if reply is not None:
            if reply.columns and self._pack_text(reply):
                flags = HAS_TEXT
            if isinstance(reply.told, Table) and self._tables is not None and not reply.columns:
                number, schema = self._tables.write(reply.told)
                if number:
                    flags |= number << TABLE
                    reply.told, reply.schema = [], schema and (number, schema)
            if reply.columns or reply.told or reply.failures or reply.schema or reply.value is not None:
                flags |= HAS_MESSAGE
                data = packed(reply, self._sequence, self._first)
        line = self._reply
        line[words.REPLY_FLAGS] = flags
        line[words.REPLY_SEQUENCE] = self._sequence
        (self._bell if self._rings else self._ready).release()
        if data:
            try:
                self.channel.send(data)
            except ChannelClosedError:
                os._exit(1)

    def _pack_text(self, reply: Reply) -> bool:
        """Move the text of a reply into shared memory; all of it or none."""
        if not all(text.pack(reply.columns[leaf]) for leaf, text in self._texts.items()):
            return False
        for leaf in self._texts:
            del reply.columns[leaf]
        return bool(self._texts)


def packed(reply: Reply, sequence: int, first: int) -> bytes:
    """A reply as bytes that are safe to load: what came from elsewhere was loaded here once, for a trial."""
    try:
        return _tried(_plain(sequence, reply))
    except BaseException as error:
        return dumps(_plain(sequence, _without_what_cannot_travel(reply, error, first)))[0]


def _plain(sequence: int, reply: Reply) -> tuple[Any, ...]:
    """A reply of tuples, which are pickled several times faster; without a final observation: in the buffer."""
    tables: dict[Any, tuple[list[int], list[Any]]] = {}
    told = []
    for item in reply.told:
        if item.final_info is None:
            values = tuple(item.info.values())
            kinds = tuple(map(type, values))
            if not SCALARS.isdisjoint(kinds) and SCALARS_AND_NUMBERS.issuperset(kinds):
                ids, rows = tables.setdefault((tuple(item.info), kinds), ([], []))
                ids.append(item.env)
                rows.append(values)
                continue
        told.append((item.env, item.final_info, item.info) if item.final is IN_BUFFER else tuple(item))
    packed_tables = [
        (ids, keys, list(map(_column, kinds, zip(*rows, strict=True))))
        for (keys, kinds), (ids, rows) in tables.items()
    ]
    return sequence, reply.columns, told, packed_tables, reply.failures, reply.value, reply.schema


SCALARS = {np.float64, np.float32, np.int64, np.int32, np.uint8, np.bool_}
"""NumPy's numbers take a hundred times as long to pickle as Python's: infos made of numbers travel as tables."""
SCALARS_AND_NUMBERS = SCALARS | {float, int, bool}


def _column(kind: type, values: Sequence[Any]) -> Any:
    return (np.dtype(kind).str, np.array(values, kind).tobytes()) if kind in SCALARS else values


def unpacked(data: bytes | bytearray) -> tuple[int, Reply]:
    """The sequence number and the reply in what `packed` gave."""
    sequence, columns, plain, tables, failures, value, schema = pickle.loads(data)
    told = [Told(*item) if len(item) == 4 else Told(item[0], IN_BUFFER, item[1], item[2]) for item in plain]
    for ids, keys, packed_columns in tables:
        each = (list(np.frombuffer(c[1], c[0])) if type(c[0]) is str else c for c in packed_columns)
        for i, *row in zip(ids, *each, strict=True):
            told.append(Told(i, None, None, dict(zip(keys, row, strict=True))))
    return sequence, Reply(columns, told, failures, value, schema)


def _tried(value: Any) -> bytes:
    data, plain = dumps(value)
    if not plain:
        pickle.loads(data)
    return data


def _without_what_cannot_travel(reply: Reply, error: BaseException, first: int) -> Reply:
    """The same reply without what cannot be sent, with a failure for each env concerned."""
    failures = {failure.env: failure for failure in reply.failures}

    def travels(env: int, what: str, value: Any) -> bool:
        try:
            _tried(value)
        except BaseException as problem:
            failures.setdefault(env, from_exception(env, f"sending its {what}", problem, os.getpid()))
            return False
        return True

    told = [item for item in reply.told if travels(item.env, "info", item)]
    columns = {
        leaf: [
            value if travels(i, "observation", value) else None
            for i, value in zip(reply.ids, values, strict=True)
        ]
        for leaf, values in reply.columns.items()
    }
    for i, value in zip(reply.ids, reply.value or (), strict=False):
        travels(i, "result", value)
    if len(failures) == len(reply.failures):
        failures[first] = from_exception(first, "sending its results", error, os.getpid())
    return Reply(columns, told, list(failures.values()), None)
