"""The memory through which environments and their caller talk: one block, each env in its own rows.

The block is plain memory for environments in this process and a shared mapping for worker processes; the code that
reads and writes rows is the same.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import errno
import functools
import itertools
import math
import mmap
import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.data import deep_copy
from shoal.core.errors import ConfigError, EnvError
from shoal.core.executors import available_memory
from shoal.vector.values import Layout, Leaf, Schema, Table, refuse_loss

Array = np.ndarray[Any, Any]
LINE = 64
"""Bytes of a group's command line and of its reply line: one cache line each, so they never share one."""
TOLD_BYTES = 128
"""Room per environment for the numbers that it tells in its infos, 8 bytes each."""
BUCKETS = 128
"""Of the histogram of step times that each env has."""
RECYCLE_FROM = 65_536
"""Bytes from which the memory of copies is used again: fresh memory costs a page fault per 4 KiB, which is several
times the copying itself."""
HANDOUTS = 5
"""Places for large observations that are handed to the caller where they were written."""


class Buffers:
    """Named arrays over one block; the same arguments give the same places in every process.

    Args:
        n_envs: number of environments.
        observations: layout of one.
        actions: layout of one.
        places: how many batches of observations there is room for.
        text_bytes: room for text per env and leaf; longer text goes by message.
        memory: the block, None for private memory, or False for `nbytes` only.
    """

    rewards: Array  # [n_envs] float64
    terminated: Array  # [n_envs] bool
    truncated: Array  # [n_envs] bool
    members: Array  # [n_envs] bool  who takes part in a step of some
    times: Array  # [n_envs, BUCKETS] uint32
    told: Array  # [n_envs, TOLD_BYTES] uint8: see `TableBuffer`
    act: list[Any]  # per leaf of an action [n_envs, *shape], None if it has no fixed size
    obs: list[
        Any
    ]  # per leaf of an observation [places, n_envs, *shape]; text: bytes [n_envs, 16 + text_bytes]
    final: Array | None  # [n_envs, *shape]  the last of episodes that ended, where they are one array

    def __init__(
        self,
        n_envs: int,
        observations: Layout,
        actions: Layout,
        *,
        places: int = 1,
        text_bytes: int = 0,
        memory: Any = None,
    ) -> None:
        self.n_envs, self.places, self.text_bytes = n_envs, places, text_bytes
        self.observations, self.actions = observations, actions
        plan = _Plan()
        vectors = [plan.add(code, (n_envs,)) for code in ("f8", "?", "?", "?")]
        times, told = plan.add("u4", (n_envs, BUCKETS)), plan.add("u1", (n_envs, TOLD_BYTES))
        act = [plan.leaf(leaf, (n_envs,), 0) for leaf in actions.leaves]
        obs = [plan.leaf(leaf, (places, n_envs), text_bytes) for leaf in observations.leaves]
        final = plan.leaf(observations.leaves[0], (n_envs,), 0) if observations.is_leaf else None
        self.nbytes = plan.size
        if memory is False:  # only the size was asked for
            return
        view = memoryview(mmap.mmap(-1, self.nbytes) if memory is None else memory)
        self.rewards, self.terminated, self.truncated, self.members = (plan.array(view, v) for v in vectors)
        self.flags = np.frombuffer(view[vectors[1][0] : vectors[2][0] + n_envs], np.bool_)
        """Both kinds of ends in one array, with what lies between them."""
        self.times, self.told = plan.array(view, times), plan.array(view, told)
        self.act = [plan.array(view, place) for place in act]
        self.obs = [plan.array(view, place) for place in obs]
        self.final = plan.array(view, final)
        self._memory, self._first = view, obs[0] if obs else None

    def any_end(self) -> bool:
        """Whether an episode ended in the last step."""
        return b"\x01" in self.flags.tobytes()

    def handout(self, place: int) -> Array:
        """The only leaf of the observations at one place, as an array that all views of it refer to."""
        assert self._first is not None
        offset, kind, (_, *shape) = self._first
        step = math.prod(shape) * kind.itemsize
        return np.ndarray(shape, kind, self._memory, offset + place * step)


_Place = tuple[int, np.dtype[Any], tuple[int, ...]]


class _Plan:
    """Hands out aligned places in a block that does not exist yet."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, dtype: Any, shape: tuple[int, ...]) -> _Place:
        kind = np.dtype(dtype)
        offset = self.size
        self.size = -(-(offset + math.prod(shape) * kind.itemsize) // LINE) * LINE
        return offset, kind, shape

    def leaf(self, leaf: Leaf, lead: tuple[int, ...], text_bytes: int) -> _Place | None:
        if leaf.kind == "fixed":
            return self.add(leaf.dtype, (*lead, *leaf.shape))
        if leaf.kind == "text" and text_bytes:
            # per env its room, and 16 bytes for the lengths at the head of its group's text
            return self.add("u1", (lead[-1], 16 + text_bytes))
        return None

    @staticmethod
    def array(memory: memoryview, place: _Place | None) -> Any:
        if place is None:
            return None
        offset, kind, shape = place
        return np.frombuffer(memory, kind, math.prod(shape), offset).reshape(shape)


class RowWriter:
    """Puts values of one fixed leaf into the `rows` of a group, `[count, *shape]`."""

    def __init__(self, leaf: Leaf, rows: Array) -> None:
        # NumPy's own object for this type: unpickled ones are copies, and `is` is how the hot loop compares
        self.dtype, self.shape = np.dtype(leaf.dtype.str), leaf.shape
        self.rows = [rows[j, ...] for j in range(len(rows))]
        self.flat = rows.reshape(-1)
        self._scalars: tuple[type, ...] = ()
        if not leaf.shape:  # what needs no conversion: numbers of the space's own type, and Python's own
            self._scalars = (leaf.dtype.type, *((int,) if leaf.dtype.kind in "iu" else ()))

    def write(self, j: int, value: Any) -> None:
        """Write one value, converted if that loses nothing."""
        self.rows[j][...] = value if self._is_plain(value) else self.checked(value)

    def _is_plain(self, value: Any) -> bool:
        if type(value) is np.ndarray:
            return bool(value.dtype == self.dtype and value.shape == self.shape)
        return type(value) in self._scalars

    def checked(self, value: Any) -> Array:
        """The value as an array, if it fits; else an `EnvError` says what was expected."""
        given = np.asarray(value)
        if given.shape != self.shape:
            raise EnvError(f"observation must have shape {self.shape}, got {given.shape}")
        if type(value) not in self._scalars:
            refuse_loss(given, self.dtype)
        return given


class TextBuffer:
    """The strings of one leaf of one group, `most` of them: joined, encoded once, with their lengths in front."""

    def __init__(self, memory: memoryview, most: int) -> None:
        head = 4 * (most + 2)
        self._head = memory[:head].cast("I")
        self._body = memory[head:]
        self.capacity = len(self._body)

    @classmethod
    def of(cls, buffers: Buffers, first: int, count: int) -> dict[int, TextBuffer]:
        """By leaf, those of the group with the environments `first … first + count - 1`."""
        rows = {leaf: buffers.obs[leaf] for leaf in buffers.observations.text}
        return {
            leaf: cls(row[first : first + count].reshape(-1).data, count)
            for leaf, row in rows.items()
            if row is not None
        }

    def pack(self, texts: Sequence[str]) -> bool:
        """Write the strings; False when they do not fit or are not all strings."""
        try:
            data = "".join(texts).encode("utf-8", "surrogatepass")
        except TypeError:
            return False
        size, count = len(data), len(texts)
        if size > self.capacity:
            return False
        head = self._head
        head[0], head[1] = count, size
        head[2 : 2 + count] = memoryview(array("I", map(len, texts)))
        self._body[:size] = data
        return True

    def unpack(self) -> list[str]:
        """The strings last written."""
        head = self._head
        count = head[0]
        whole = str(self._body[: head[1]], "utf-8", "surrogatepass")
        texts: list[str] = []
        start = 0
        for length in head[2 : 2 + count]:
            texts.append(whole[start : start + length])
            start += length
        return texts


class TableBuffer:
    """The numbers that the infos of one group hold: a message tells once what they are, then only they are written."""

    MOST = 64
    """Different tables; what tells more kinds of them goes by message."""

    def __init__(self, buffers: Buffers, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._cells = buffers.told[first : first + count].reshape(-1)
        self._numbers: dict[Schema, int] = {}
        self._tables: dict[int, Table] = {}

    def write(self, table: Table) -> tuple[int, Schema | None]:
        """Write what all envs of the group told.

        Returns:
            the number of the kind of table, 0 if there is no room; its names and types where they are new to who reads.
        """
        if len(table.keys) * 8 > TOLD_BYTES:
            return 0, None
        schema = table.schema
        number, new = self._numbers.get(schema, 0), None
        if not number:
            if len(self._numbers) == self.MOST:
                return 0, None
            number, new = len(self._numbers) + 1, schema
        where = self._tables.get(number) or self._made(schema)
        try:
            for cells, values in zip(where.columns, table.columns, strict=True):
                cells[...] = values
        except OverflowError:  # an int without room
            return 0, None
        if new:
            self.know(number, schema)
        return number, new

    def know(self, number: int, schema: Schema) -> None:
        """Take the names and types of a kind of table."""
        self._numbers[schema], self._tables[number] = number, self._made(schema)

    def read(self, number: int) -> Table:
        """The table last written; it is overwritten by the group's next command."""
        return self._tables[number]

    def _made(self, schema: Schema) -> Table:
        keys, kinds = schema
        size = 8 * self.count
        columns: list[Any] = [
            self._cells[k * size : (k + 1) * size].view(kind)[: self.count] for k, kind in enumerate(kinds)
        ]
        return Table(self.first, self.count, keys, kinds, columns)


class Observations:
    """What the caller sees of the observations: leaves of fixed size in the buffers, the others as values here.

    Args:
        buffers: of the vector env.
        copy: give copies; else views that later steps overwrite.
        handouts: give large observations where they were written, and write elsewhere while the caller keeps them.
    """

    def __init__(self, buffers: Buffers, *, copy: bool, handouts: bool = False) -> None:
        self.buffers, self.layout, self.copy = buffers, buffers.observations, copy
        self.values: dict[int, list[Any]] = {
            i: [None] * buffers.n_envs for i in (*self.layout.text, *self.layout.objects)
        }
        one = self.layout.is_leaf and bool(self.layout.fixed)
        small = one and buffers.obs[0][0].nbytes < RECYCLE_FROM
        self._small = list(buffers.obs[0]) if small and copy else None
        self._text_alone = self.values[0] if self.layout.is_leaf and self.layout.text else None
        self.handouts = handouts
        self._kept: list[Any] | None = [None] * buffers.places if handouts else None
        self._spares: dict[int, list[tuple[Array, Any]]] = {}

    def next_place(self, place: int) -> int:
        """Where to write the observations after those at `place`; never where the caller may still look."""
        if self._kept is None:
            return (place + 1) % self.buffers.places
        # Place 0 is copied when it is given. Of the others it is known from a weak reference when nobody looks.
        for place, given in enumerate(self._kept):
            if place and (given is None or given() is None):
                return place
        return 0

    def batch(self, place: int) -> Any:
        """The observations of all environments at one place."""
        if self._small is not None:
            return self._small[place].copy()
        if self._text_alone is not None:
            return tuple(self._text_alone)
        if self._kept is not None and place:
            given = self.buffers.handout(place)
            self._kept[place] = weakref.ref(given)
            return given
        copy = self.copy or self._kept is not None
        columns: list[Any] = []
        for i, rows in enumerate(self.buffers.obs):
            if i in self.values:
                columns.append(tuple(map(deep_copy, self.values[i]) if copy else self.values[i]))
            else:
                columns.append(self._copied(i, rows[place]) if copy else rows[place])
        return self.layout.rebuild(columns)

    def _copied(self, leaf: int, rows: Array) -> Array:
        """A copy; of large arrays into memory that an earlier copy had and nobody looks at any more."""
        if rows.nbytes < RECYCLE_FROM:
            return rows.copy()
        spares = self._spares.setdefault(leaf, [])
        k = next((k for k, (_, user) in enumerate(spares) if user() is None), len(spares))
        if k == HANDOUTS:
            return rows.copy()
        block = spares.pop(k)[0] if k < len(spares) else np.empty(rows.nbytes, np.uint8)
        owner = np.frombuffer(block.data, rows.dtype)
        spares.append((block, weakref.ref(owner)))
        copied = owner.reshape(rows.shape)
        copied[...] = rows
        return copied

    def columns(self, ids: Sequence[int], places: Sequence[int]) -> list[Any]:
        """The observations of some environments, each at its place, a column for each leaf; always copies."""
        where = np.asarray(places, dtype=np.intp), np.asarray(ids, dtype=np.intp)
        return [
            tuple(deep_copy(self.values[leaf][i]) for i in ids) if leaf in self.values else rows[where]
            for leaf, rows in enumerate(self.buffers.obs)
        ]

    def joined(self, parts: Sequence[Sequence[Any]]) -> Any:
        """A batch of observations of what `columns` gave at several times."""
        if len(parts) == 1:
            return self.layout.rebuild(parts[0])
        columns = [
            tuple(itertools.chain.from_iterable(column)) if leaf in self.values else np.concatenate(column)
            for leaf, column in enumerate(zip(*parts, strict=True))
        ]
        return self.layout.rebuild(columns)

    def leaves(self, i: int, place: int) -> list[Any]:
        """The leaf values of one environment's observation; copies."""
        return [column[0] for column in self.columns([i], [place])]

    def one(self, i: int, place: int) -> Any:
        """One environment's observation."""
        return self.layout.rebuild(self.leaves(i, place))

    def put(self, i: int, place: int, leaves: Sequence[Any]) -> None:
        """Make these leaf values the observation of one environment."""
        for leaf, rows in enumerate(self.buffers.obs):
            if leaf in self.values:
                self.values[leaf][i] = leaves[leaf]
            else:
                rows[place, i] = leaves[leaf]

    def carry(self, ids: Any, before: int, place: int) -> None:
        """Take the observations of some environments along to another place."""
        if before != place:
            for leaf in self.layout.fixed:
                rows = self.buffers.obs[leaf]
                rows[place, ids] = rows[before, ids]

    def keep(self, ids: Sequence[int], columns: dict[int, list[Any]], but: Iterable[int] = ()) -> None:
        """Take over the values that came by message, except those of the envs `but`."""
        for leaf, values in columns.items():
            kept = self.values[leaf]
            if not but and isinstance(ids, range):
                kept[ids.start : ids.stop] = values
                continue
            for i, value in zip(ids, values, strict=True):
                if i not in but:
                    kept[i] = value


# --- actions: written once into the buffers, read by whoever steps the environments. What does not fit there (text,
# custom spaces, another type than the space says) is loose: it goes by message and reaches the env as it is.
Loose = dict[int, dict[int, Any]]
"""leaf -> {env: value}; leaf `WHOLE` holds whole actions."""
WHOLE = -1
NOTHING_LOOSE: Loose = {}


def split(layout: Layout, batch: Any, n: int) -> list[Any]:
    """A batch of n actions as one entry per leaf: an array of length n if fixed, else a list of n.

    Raises:
        ValueError: for another number of actions.
        TypeError: for a single action.
    """
    return [_column(leaf, part, n) for leaf, part in zip(layout.leaves, layout.flatten(batch), strict=True)]


def one_each(given: Any, n: int, word: str = "actions") -> list[Any]:
    """A list of n actions, or whatever the `word` says.

    Raises:
        ValueError: for another number of them.
        TypeError: for a number, text, dict or set: as many letters, or keys in any order, as environments are no batch.
    """
    try:
        each = None if isinstance(given, str | bytes | dict | set | frozenset) else list(given)
    except TypeError:  # a number
        each = None
    if each is None:
        raise TypeError(
            f"expected one {word[:-1]} for each of {n} environments, got the single {given!r:.80}"
        )
    if len(each) != n:
        raise ValueError(f"expected {n} {word}, one for each environment, got {len(each)}")
    return each


def _column(leaf: Leaf, part: Any, n: int) -> Any:
    if leaf.kind != "fixed":
        return one_each(part, n)
    column = np.asarray(part)
    if column.ndim == 0:  # what can only be gone through, or a single action
        column = np.asarray(one_each(part, n))
    if len(column) != n:
        raise ValueError(
            f"expected actions of shape {(n, *leaf.shape)} for {n} environments, got {column.shape}"
        )
    return column


def write_batch(buffers: Buffers, columns: Sequence[Any]) -> Loose:
    """Put the actions of all envs, split by leaf, into the buffers; returns what must go by message."""
    loose: Loose = {}
    for i, (target, column) in enumerate(zip(buffers.act, columns, strict=True)):
        if target is None or not _same(column, target):
            loose[i] = dict(enumerate(deep_copy(column)))
        else:
            target[...] = column
    return loose


def _same(column: Array, target: Array) -> bool:
    if column.shape != target.shape:
        return False
    if column.dtype == target.dtype:
        return True
    integers = column.dtype.kind in "iu" and target.dtype.kind in "iu"
    return integers and bool((column.astype(target.dtype) == column).all())


def write_some(buffers: Buffers, ids: Sequence[int], actions: Sequence[Any]) -> Loose:
    """Put one action for each of the envs `ids` into the buffers; returns what must go by message."""
    loose: Loose = {}
    target = plain_target(buffers)
    if target is not None and target.ndim == 1 and set(map(type, actions)) == {target.dtype.type}:
        target[ids] = actions
        return loose
    for i, action in zip(ids, actions, strict=True):
        if target is not None and _fits(action, target.shape[1:], target.dtype):
            target[i] = action
        else:
            loose.setdefault(WHOLE, {})[i] = deep_copy(action)
    return loose


def plain_target(buffers: Buffers) -> Array | None:
    """The array that a batch of the space's own type is simply copied to, if actions are one array."""
    return buffers.act[0] if buffers.actions.is_leaf else None


def _fits(action: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    # What is not already of the space's own type (an int, say) reaches the env as it is.
    if not isinstance(action, np.ndarray if shape else np.generic):
        return False
    return bool(action.dtype == dtype and action.shape == shape)


def reader(buffers: Buffers, first: int, count: int) -> Callable[[], list[Any]]:
    """`read` for all environments of a group whose actions are all in the buffers."""
    target = plain_target(buffers)
    if target is None:
        return lambda: read(buffers, first, range(count), {})
    rows = target[first : first + count]
    if rows.ndim == 1:
        return functools.partial(list, rows)  # of scalars, which are copies
    return lambda: list(rows.copy())


def read(
    buffers: Buffers, first: int, members: Sequence[int], loose: Mapping[int, Mapping[int, Any]]
) -> list[Any]:
    """The actions of the envs `first + j` for each j in `members`, safe to keep."""
    if not len(members):
        return []
    layout = buffers.actions
    whole = loose.get(WHOLE)
    if whole is not None and len(whole) == len(members):
        return [whole[first + j] for j in members]
    stop = first + members[-1] + 1
    columns: list[Any] = []
    for i, leaf in enumerate(layout.leaves):
        if i in loose:
            columns.append([loose[i][first + j] for j in members])
        elif leaf.kind == "fixed":
            rows = buffers.act[i][first:stop].copy()
            columns.append(list(rows) if len(rows) == len(members) else [rows[j] for j in members])
        else:
            columns.append([None] * len(members))
    if layout.is_leaf:
        actions = columns[0]
    else:  # (a space of no parts has an action, too)
        each = zip(*columns, strict=True) if columns else [()] * len(members)
        actions = [layout.rebuild(values) for values in each]
    if whole is not None:
        actions = [whole.get(first + j, action) for j, action in zip(members, actions, strict=True)]
    return list(actions)


def of_group(loose: Loose, first: int, count: int) -> Loose:
    """The part of loose actions that concerns the envs `first … first + count - 1`."""
    if not loose:
        return loose
    stop = first + count
    return {
        leaf: {i: value for i, value in values.items() if first <= i < stop} for leaf, values in loose.items()
    }


# --- lines and signals: how a group in another process is told and tells
SEQUENCE, OPERATION, HAS_MESSAGE, PLACE, BELL = range(5)
"""32-bit words of a command line."""
REPLY_SEQUENCE, REPLY_FLAGS, PROGRESS = range(3)
"""32-bit words of a reply line."""
LOADING = 0xFFFFFFFF
"""Progress of a group that does not have its environments yet; else the position of the env it is at."""


class Lines:
    """In shared memory: a command line, a reply line and two signals for each group, and one bell that all can ring."""

    def __init__(self, n_groups: int, memory: Any) -> None:
        self.n_groups = n_groups
        self._view = memoryview(memory)
        self._base = int(np.frombuffer(self._view, np.uint8).ctypes.data)

    @staticmethod
    def nbytes(n_groups: int) -> int:
        """Bytes that so many groups take."""
        return (4 * n_groups + 1) * LINE

    def command(self, number: int) -> memoryview:
        """Words that the caller writes: faster to index than an array."""
        return self._words(4 * number)

    def reply(self, number: int) -> memoryview:
        """Words that the group writes."""
        return self._words(4 * number + 1)

    def replied(self) -> Array:
        """The command that each group answered last, `[n_groups]`, as it stands there now."""
        lines = np.frombuffer(
            self._view, np.uint32, self.n_groups * LINE
        )  # four lines of LINE / 4 words a group
        return lines.reshape(self.n_groups, LINE)[:, LINE // 4 + REPLY_SEQUENCE]

    def _words(self, line: int) -> memoryview:
        return self._view[line * LINE : (line + 1) * LINE].cast("I")

    def wake(self, number: int, *, new: bool = False) -> Signal:
        """There is a command."""
        return Signal(self._base + (4 * number + 2) * LINE, new=new)

    def ready(self, number: int, *, new: bool = False) -> Signal:
        """There is a reply."""
        return Signal(self._base + (4 * number + 3) * LINE, new=new)

    def bell(self, *, new: bool = False) -> Signal:
        """There is a reply somewhere."""
        return Signal(self._base + 4 * self.n_groups * LINE, new=new)


class Signal:
    """One side of a semaphore at an address in shared memory; it has no name, so nothing can be left behind."""

    def __init__(self, address: int, *, new: bool = False) -> None:
        if new:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
            if libc.sem_init(address, 1, 0) != 0:
                raise OSError(ctypes.get_errno(), "worker processes need Linux semaphores in shared memory")
        lock = _multiprocessing.SemLock._rebuild(address, 1, 2**31 - 1, None)
        self.acquire: Callable[..., bool] = lock.acquire
        self.release: Callable[[], None] = lock.release

    def drain(self) -> None:
        """Back to zero."""
        while self.acquire(False):
            pass


class Patience:
    """How long to look before sleeping: long while looking pays, rarely when it does not.

    Looking takes `most` seconds and yields the core each time, so that it costs little where cores are few.
    """

    def __init__(self, most: float = 200e-6) -> None:
        self.most = most
        self._misses = 0
        self._skips = 0

    def look(self, acquire: Callable[..., bool]) -> bool:
        """Try to take a semaphore for a while; True when it was taken."""
        if acquire(False):
            return True
        if self._skips:
            self._skips -= 1
            return False
        give_way, now = os.sched_yield, time.perf_counter
        end = now() + self.most
        while now() < end:
            give_way()
            if acquire(False):
                self._misses = 0
                return True
        self._misses = min(self._misses + 1, 6)
        self._skips = (1 << self._misses) - 1  # after a miss, sleep at once the next 1, 3, 7 … 63 times
        return False


# --- shared memory
def shared_file(nbytes: int) -> int:
    """The descriptor of `nbytes` of shared memory without a name: nothing is left behind, however we end.

    Raises:
        ConfigError: when the memory is not there; asked for up front, so that no later write can fault.
    """
    available = available_memory()
    if nbytes > available:
        raise ConfigError(_too_little(nbytes, f"{available / 2**20:.0f} MiB are available"))
    descriptor = os.memfd_create("shoal-vector", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ConfigError(_too_little(nbytes, error.strerror or "no space")) from error
        raise
    return descriptor


def _too_little(nbytes: int, why: str) -> str:
    return (
        f"not enough shared memory for {nbytes / 2**20:.0f} MiB of observations and actions ({why}): use fewer "
        f"environments, smaller observations or a shorter ring"
    )
