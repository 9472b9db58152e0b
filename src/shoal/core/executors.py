"""Where work runs: `concurrent.futures.Executor`s that all give the results of the serial one, in order.

The reference is `SerialExecutor`; a parallel executor is right when `map_ordered` over it equals
`[function(item) for item in items]`, exceptions included.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from shoal.core.errors import did_you_mean

T = TypeVar("T")
R = TypeVar("R")

BACKENDS = ("serial", "thread", "process")


class SerialExecutor(Executor):
    """Runs each task at once in the calling thread; `submit` returns a finished future."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call `fn` now and wrap what it returned or raised."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def available_cpus() -> int:
    """CPU cores this process may use (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_executor(backend: str = "serial", workers: int = -1) -> Executor:
    """An executor by name: "serial", "thread" or "process" (spawned, not forked).

    Args:
        backend: where tasks run.
        workers: number of threads or processes; -1 for one per available core.

    Raises:
        ValueError: on an unknown backend or a number of workers that is neither -1 nor positive.
    """
    if workers != -1 and workers < 1:
        raise ValueError(f"workers must be -1 (one per core) or at least 1, got {workers}")
    count = available_cpus() if workers == -1 else workers
    if backend == "serial":
        return SerialExecutor()
    if backend == "thread":
        return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="shoal")
    if backend == "process":
        return concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    raise ValueError(f"no executor backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")


def map_ordered(
    executor: Executor, function: Callable[[T], R], items: Iterable[T], *, in_flight: int | None = None
) -> Iterator[R]:
    """Yield `function(item)` for each item, in input order, with at most `in_flight` submitted ahead.

    The bound keeps memory flat over long inputs (default: 2 per core, at least 4). When a task raises, the
    tasks not yet started are cancelled and the exception comes out where its result would have.
    """
    limit = in_flight if in_flight is not None else max(4, 2 * available_cpus())
    if limit < 1:
        raise ValueError(f"in_flight must be at least 1, got {limit}")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= limit:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
