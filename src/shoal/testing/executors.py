"""What every executor promises: the results of a plain loop, in order, and an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from shoal.core.executors import map_ordered
from shoal.testing.promises import expect


def check_executor(make: Callable[[], Executor]) -> None:
    """Give an executor work and compare what comes back with a plain loop.

    Args:
        make: makes the executor; called once. Its tasks are functions of shoal and plain data, so that
            executors which send tasks elsewhere can be checked too.

    Raises:
        AssertionError: which promise broke.
    """
    executor = make()
    name = type(executor).__name__
    expect(isinstance(executor, Executor), f"{name} must be a concurrent.futures.Executor")
    try:
        future = executor.submit(_describe, 1, 2, last=3)
        expect(isinstance(future, Future), f"{name}.submit must return a concurrent.futures.Future")
        got = future.result()
        expect(got == ((1, 2), {"last": 3}), f"{name}: a task must get its arguments as given, got {got}")
        expect(executor.submit(_nothing).result() is None, f"{name}: a task that returns None must give None")
        items = list(range(12))
        # The first tasks take longest: an executor that answers in order of arrival shows it here.
        found = list(map_ordered(executor, _slow_square, items, in_flight=6))
        expect(
            found == [item * item for item in items], f"{name}: results must come in input order, got {found}"
        )
        block = bytes(range(256)) * 4096
        expect(
            executor.submit(_reversed, block).result() == block[::-1], f"{name}: a megabyte came back changed"
        )
        _check_failure(executor, name)
    finally:
        executor.shutdown()
    executor.shutdown()  # a second time must do nothing


def _check_failure(executor: Executor, name: str) -> None:
    error = executor.submit(_fail, "seven").exception()
    expect(
        type(error) is KeyError and error.args == ("seven",),
        f"{name}: a task that raises KeyError('seven') must give that error, got {error!r}",
    )
    later = executor.submit(_slow_square, 20)
    expect(
        later.exception() is None,
        f"{name}: it must go on after a task that failed, got {later.exception()!r}",
    )
    expect(later.result() == 400, f"{name}: the task after one that failed gave {later.result()!r}")


def _describe(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _nothing() -> None:
    return None


def _slow_square(item: int) -> int:
    time.sleep(max(0.0, 0.03 - 0.005 * item))
    return item * item


def _reversed(block: bytes) -> bytes:
    return block[::-1]


def _fail(word: str) -> None:
    raise KeyError(word)
