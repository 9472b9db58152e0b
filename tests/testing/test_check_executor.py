"""The exported check for executors accepts shoal's own and names each broken promise."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shoal.core.executors import SerialExecutor, make_executor
from shoal.testing import check_executor


@pytest.mark.parametrize(
    "backend",
    ["serial", "thread", "process", "loky", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])],
)
def test_shoals_own_executors_keep_every_promise(backend):
    check_executor(lambda: make_executor(backend, 2))
    if backend == "ray":
        sys.modules["ray"].shutdown()


class OneForAll(ThreadPoolExecutor):
    """Gives the result of whatever finished first."""

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        self.first = getattr(self, "first", None) or future
        return self.first


class Forgetful(SerialExecutor):
    def submit(self, fn, /, *args, **kwargs):
        return super().submit(fn, *args)


class Wrapping(SerialExecutor):
    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        if future.exception() is None:
            return future
        other = Future()
        other.set_exception(RuntimeError("a task failed"))
        return other


class Direct(SerialExecutor):
    def submit(self, fn, /, *args, **kwargs):
        return fn(*args, **kwargs)


class OnceOnly(ThreadPoolExecutor):
    """Ends with its first failure, as a pool of processes does when one of them dies."""

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        if future.exception() is not None:
            self.shutdown()
            self.submit = lambda *_, **__: future
        return future


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (OneForAll, "None must give None"),
        (Forgetful, "arguments as given"),
        (Wrapping, "must give that error"),
        (OnceOnly, "go on after a task that failed"),
        (Direct, "must return a concurrent.futures.Future"),
    ],
)
def test_a_broken_promise_is_named(make, promise):
    with pytest.raises(AssertionError, match=promise):
        check_executor(make)
