"""Hand one large value to many tasks: by reference inside a process, once per worker elsewhere.

An executor pickles the arguments of every task. A tokenizer or a policy among them would be packed and
unpacked for each; a `Shared` is a few bytes that a worker resolves once and then keeps.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

KEPT = 4
"""Values a worker keeps; the one used longest ago goes first."""

_resolved: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


class Shared(Generic[T]):
    """A value that travels as a key: pickled to a temporary file the first time it leaves the process.

    The file goes away with the last reference in the process that made it, so keep the object alive while
    tasks that use it are under way.

    Args:
        value: anything that cloudpickle can pack.
        put: stores the value where workers can reach it and returns a picklable function that loads it;
            the default is a temporary file, which serves workers on the same machine.
    """

    def __init__(self, value: T, put: Callable[[Any], Callable[[], Any]] | None = None) -> None:
        self._value = value
        self._put = put
        self._key = uuid.uuid4().hex
        self._load: Callable[[], Any] | None = None
        self._packing = threading.Lock()

    def get(self) -> T:
        """The value."""
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        with self._packing:
            if self._load is None:
                self._load = self._put(self._value) if self._put is not None else self._to_file()
        return _Reference, (self._key, self._load)

    def _to_file(self) -> Callable[[], Any]:
        import cloudpickle

        descriptor, path = tempfile.mkstemp(prefix="shoal-shared-", suffix=".pickle")
        with os.fdopen(descriptor, "wb") as file:
            cloudpickle.dump(self._value, file, protocol=pickle.HIGHEST_PROTOCOL)
        weakref.finalize(self, _remove, path, os.getpid())
        return _FromFile(path)


def shared_by_ray(value: T) -> Shared[T]:
    """`value` through Ray's object store, so that workers on other machines reach it too."""
    import ray

    return Shared(value, put=lambda item: _FromRay(ray.put(item)))


class _FromRay:
    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def __call__(self) -> Any:
        import ray

        return ray.get(self.reference)


class _Reference:
    """What a worker gets in place of a `Shared`."""

    def __init__(self, key: str, load: Callable[[], Any]) -> None:
        self._key, self._load = key, load

    def get(self) -> Any:
        with _lock:  # two threads of one worker must not both pay for loading
            if self._key not in _resolved:
                _resolved[self._key] = self._load()
                while len(_resolved) > KEPT:
                    _resolved.popitem(last=False)
            _resolved.move_to_end(self._key)
            return _resolved[self._key]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reference, (self._key, self._load)


class _FromFile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> Any:
        with open(self.path, "rb") as file:
            return pickle.load(file)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take the file from its parent
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
