"""Ray as a `concurrent.futures.Executor`: the same tasks and results as on any other executor.

Ray itself is imported when an executor is made, never before.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from shoal.core.errors import WorkerDiedError, missing_extra
from shoal.core.executors import available_cpus
from shoal.core.sharing import Shared

R = TypeVar("R")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def start_ray(num_cpus: int | None = None) -> bool:
    """Start a local Ray without dashboard unless one is running; returns whether this call started it.

    Where `RAY_ADDRESS` names a cluster, that one is joined and `num_cpus` is its own business.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("the Ray executor", "parallel") from error
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        ray.init(
            num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
        )
        logger.info("started a local Ray with %s CPUs; ray.shutdown() ends it", num_cpus or "all")
    return True


class RayExecutor(Executor):
    """Runs tasks as Ray tasks of one CPU each, at most `workers` at a time.

    Leaving the executor waits for its tasks and leaves Ray running, whoever started it.
    """

    def __init__(self, workers: int = -1) -> None:
        if workers != -1 and workers < 1:
            raise ValueError(f"workers must be -1 (one per core) or at least 1, got {workers}")
        self.workers = available_cpus() if workers == -1 else workers
        start_ray(self.workers)
        import ray

        self._remote = ray.remote(num_cpus=1)(_outcome)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = (
            deque()
        )
        self._running = 0
        self._closed = False

    def share(self, value: T) -> Shared[T]:
        """`value` through Ray's object store, so that workers on other machines reach it too."""
        import ray

        return Shared(value, put=lambda item: _FromRay(ray.put(item)))

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Queue a call; it starts as soon as fewer than `workers` are running."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this RayExecutor is shut down")
            self._waiting.append((future, fn, args, kwargs))
        self._start_waiting()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; wait for those that were taken, or cancel what has not started."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                while self._waiting:
                    self._waiting.popleft()[0].cancel()
            while wait and (self._running or self._waiting):
                self._idle.wait()

    def _start_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._running >= self.workers:
                    return
                future, fn, args, kwargs = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    self._idle.notify_all()
                    continue
                self._running += 1
            try:
                reference = self._remote.remote(fn, args, kwargs)
            except Exception as error:  # arguments that cannot be pickled fail here, and only this task
                self._done(future, False, error)
                continue
            reference.future().add_done_callback(lambda reply, future=future: self._arrived(future, reply))

    def _arrived(self, future: Future[Any], reply: Future[Any]) -> None:
        error = reply.exception()
        if error is not None:
            died = WorkerDiedError(f"a Ray task did not come back: {error}")
            died.__cause__ = error
            self._done(future, False, died)
        else:
            self._done(future, *reply.result())
        self._start_waiting()

    def _done(self, future: Future[Any], succeeded: bool, value: Any) -> None:
        if succeeded:
            future.set_result(value)
        else:
            future.set_exception(value)
        with self._lock:
            self._running -= 1
            self._idle.notify_all()


class _FromRay:
    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def __call__(self) -> Any:
        import ray

        return ray.get(self.reference)


def _outcome(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Runs in the worker; exceptions travel as values, so that they arrive with their own type."""
    try:
        return True, fn(*args, **kwargs)
    except Exception as error:
        return False, error
