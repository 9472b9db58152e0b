"""Large values on their way to workers and back.

An executor pickles the arguments of every task. A tokenizer or a policy among them would be packed and
unpacked for each; a `Shared` is a few bytes that a worker resolves once and then keeps. And it sends results
through a pipe; `spill` writes the arrays of a result to memory once, and they are mapped where they are wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import pickle
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEPT = 4
"""Values a worker keeps; the one used longest ago goes first."""

_resolved: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


class Shared(Generic[T]):
    """A value that travels as a key: stored where workers find it the first time it leaves the process.

    The key is that of its pickled bytes, so a worker that has met an equal value does not load it again. The file
    goes away with the last reference in the process that made it, so keep the object alive while tasks that use it
    are under way.

    Args:
        value: anything that cloudpickle can pack.
        put: stores bytes where workers can reach them and returns a picklable function that loads them;
            the default is a temporary file, which serves workers on the same machine.
    """

    def __init__(self, value: T, put: Callable[[bytes], Callable[[], bytes]] | None = None) -> None:
        self._value = value
        self._put = put
        self._packed: tuple[str, Callable[[], bytes]] | None = None
        self._packing = threading.Lock()

    def get(self) -> T:
        """The value."""
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        with self._packing:
            if self._packed is None:
                import cloudpickle

                data = cloudpickle.dumps(self._value, protocol=pickle.HIGHEST_PROTOCOL)
                self._packed = (
                    hashlib.blake2b(data, digest_size=16).hexdigest(),
                    (self._put or self._to_file)(data),
                )
        return _Reference, self._packed

    def _to_file(self, data: bytes) -> Callable[[], bytes]:
        descriptor, name = tempfile.mkstemp(prefix="shoal-shared-", suffix=".pickle")
        weakref.finalize(self, _remove, name, os.getpid())  # before the disk may be full
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        return Path(name).read_bytes


def shared_by_ray(value: T) -> Shared[T]:
    """`value` through Ray's object store, so that workers on other machines reach it too."""
    import ray

    return Shared(value, put=lambda data: _FromRay(ray.put(data)))


class _FromRay:
    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def __call__(self) -> bytes:
        import ray

        data: bytes = ray.get(self.reference)
        return data


class _Reference:
    """What a worker gets in place of a `Shared`."""

    def __init__(self, key: str, load: Callable[[], bytes]) -> None:
        self._key, self._load = key, load

    def get(self) -> Any:
        with _lock:  # two threads of one worker must not both pay for loading
            if self._key not in _resolved:
                _resolved[self._key] = pickle.loads(self._load())
                while len(_resolved) > KEPT:
                    _resolved.popitem(last=False)
            _resolved.move_to_end(self._key)
            return _resolved[self._key]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reference, (self._key, self._load)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take the file from its parent
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# --- results
ALIGNED = 64
"""Bytes at whose multiples arrays begin in a file."""
SMALL = 2**16
"""Bytes of arrays that go through a pipe as fast."""


@dataclass(frozen=True, slots=True)
class SpilledResult(Generic[T]):
    """A value without its arrays, which are in a file."""

    head: bytes
    path: str
    spans: tuple[tuple[int, int], ...]

    def fetched(self) -> T:
        """The value, its arrays mapped from the file, which goes away; they can be written to."""
        with open(self.path, "rb") as file:
            room = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        os.unlink(self.path)
        value: T = pickle.loads(self.head, buffers=[room[first:last] for first, last in self.spans])
        return value


def spill(value: T, folder: str) -> T | SpilledResult[T]:
    """A value with its arrays in a file of `folder`, or as it is where they are small or there is no room."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    if sum(len(part) for part in parts) <= SMALL:
        return value
    spans, path = [], ""
    try:
        descriptor, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            end = 0
            for part in parts:
                first = -(-end // ALIGNED) * ALIGNED
                end = first + len(part)
                spans.append((first, end))
                file.seek(first)
                while part:
                    part = part[file.write(part) :]
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        logger.warning("results are sent through a pipe, since %s has no room for them (%s)", folder, error)
        return value
    return SpilledResult(head, path, tuple(spans))


@contextlib.contextmanager
def spill_folder() -> Iterator[str]:
    """A folder for results on their way between processes, in memory where there is such a place."""
    import psutil

    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for left in base.glob("shoal-spilled-*-*"):  # of a run that was killed
        number = left.name.split("-")[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"shoal-spilled-{os.getpid()}-", dir=base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
