"""Where work runs: `concurrent.futures.Executor`s that all give the results of the serial one, in order.

The reference is `SerialExecutor`; a parallel executor is right when `map_ordered` over it equals
`[function(item) for item in items]`, exceptions included.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import operator
import os
import pickle
import queue
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

from shoal.core.errors import ConfigError, WorkerDiedError, did_you_mean, needs_extra
from shoal.core.workers import dumps, without_main

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)
BACKENDS = ("serial", "thread", "process", "loky", "ray")
CGROUP = Path("/sys/fs/cgroup")


class Closing:
    """Holds workers, files or connections, and releases them when it is closed, as at the end of a `with`."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class OwnThread:
    """A daemon thread that runs calls one after another, for what must live and die in one thread.

    No exit waits for it: with a call that hangs it is left behind.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        Thread(target=self._work, daemon=True, name=name).start()

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Run `call` after those before it."""
        future: Future[R] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # SystemExit too: it ends the call, not the thread
                future.set_exception(error)
            del item, future, call  # what they hold ends with them


def in_own_thread(call: Callable[[], R], name: str) -> Future[R]:
    """Run `call` in a thread of that name alone, which is left behind if it hangs."""
    thread = OwnThread(name)
    future = thread.submit(call)
    thread.end()
    return future


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
    """CPU cores this process may use, by its affinity mask and the quota of the control group that it runs in."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
            quota, period = map(int, " ".join((CGROUP / name).read_text() for name in files).split())
            if quota > 0:
                found = max(1, min(found, round(quota / period)))
    return found


LOAD_SAMPLES, LOAD_PAUSE = 10, 2e-3
"""How often, and in what distance in seconds, `free_cpus` looks."""


def free_cpus() -> int:
    """Cores that this process may use and nobody else keeps busy now; at least 1."""
    others: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):  # only Linux says how many threads want a core
        for _ in range(LOAD_SAMPLES):
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            others.append(int(running) - 1)  # without this one
            time.sleep(LOAD_PAUSE)
    busy = round(sum(others) / len(others)) if others else 0
    return max(1, min(available_cpus(), (os.cpu_count() or 1) - busy))


def available_memory() -> int:
    """Bytes that can be had, of the machine and of the control group we run in.

    What a group uses to cache files does not count as used: the kernel gives it back when memory is needed.
    """
    import psutil

    found: int = psutil.virtual_memory().available
    for folder, most, used, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit, usage = (int((CGROUP / f"{folder}{name}").read_text()) for name in (most, used))
            stat = dict(line.split() for line in (CGROUP / f"{folder}memory.stat").read_text().splitlines())
            cached = int(stat.get(f"{prefix}{'cache' if prefix else 'file'}", 0))
            shared = int(stat.get(f"{prefix}shmem", 0))  # which cannot be given back
            found = min(found, limit - max(usage - cached + shared, 0))
    return found


def make_executor(backend: str = "serial", workers: int = -1) -> Executor:
    """An executor by name: "serial", "thread", "process" (spawned, not forked), "loky" (joblib's) or "ray".

    Args:
        backend: where tasks run.
        workers: number of threads or processes, or of tasks that run on Ray at a time; -1 for one per available
            core (on Ray: as many as the cluster has room for). The serial one has no use for it.

    Raises:
        ValueError: on an unknown backend or a number of workers that is neither -1 nor positive.
        TypeError: on a number of workers that is not whole.
    """
    workers = operator.index(workers)
    if workers != -1 and workers < 1:
        raise ValueError(f"workers must be -1 (one per core) or at least 1, got {workers}")
    count = available_cpus() if workers == -1 else workers
    if backend == "serial":
        return SerialExecutor()
    if backend == "thread":
        return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="shoal")
    if backend == "process":
        return ProcessExecutor(count)
    if backend == "loky":
        return LokyExecutor(count)
    if backend == "ray":
        return RayExecutor(workers=None if workers == -1 else workers)
    raise ValueError(f"no executor backend named {backend!r}.{did_you_mean(backend, BACKENDS)}")


class _Process(SpawnProcess):
    """Does not import the caller's main file, which need not guard what it does."""

    def start(self) -> None:
        with without_main():
            super().start()


class _Context(SpawnContext):
    Process = _Process


class ProcessExecutor(concurrent.futures.ProcessPoolExecutor):
    """Python's process pool, with processes that are spawned; lambdas and what is defined in `__main__` go by value."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, mp_context=_Context())

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a process of the pool."""
        return super().submit(_called, dumps((fn, args, kwargs)))


def _called(data: bytes) -> Any:
    fn, args, kwargs = pickle.loads(data)
    return fn(*args, **kwargs)


class LokyExecutor(Executor):
    """joblib's process pool: when one process dies, all its open tasks fail with a `BrokenExecutor`."""

    def __init__(self, workers: int) -> None:
        with needs_extra("the loky executor", "parallel"):
            from joblib.externals.loky import ProcessPoolExecutor
        self._pool = ProcessPoolExecutor(workers)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a process of the pool."""
        return self._pool.submit(fn, *args, **kwargs)  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; without `wait`, or with `cancel_futures`, by force."""
        self._pool.shutdown(wait=wait, kill_workers=cancel_futures or not wait)


# --- Ray
MOST_RAY_TASKS = 256
"""Tasks that are on Ray at a time where `workers` is not given."""
TOKEN_WANTED = (
    "it wants a token (Ray checks one where the head found ~/.ray/auth_token, which any local Ray leaves): set "
    "RAY_AUTH_MODE=token, with the same ~/.ray/auth_token or RAY_AUTH_TOKEN on every machine, or start the head with "
    "RAY_AUTH_MODE=disabled"
)


def connect_ray(num_cpus: int | None = None, *, wanted_by: str = "Ray") -> Any:
    """The `ray` module, connected; what is started here stays until the program ends or calls `ray.shutdown()`.

    The cluster is the one that is connected, else the one that `RAY_ADDRESS` names ("auto": what `ray start` left on
    this machine), else a local one.

    Args:
        num_cpus: of a local one; the machine's if not given.
        wanted_by: what to name where Ray is not installed.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: nothing answers where `RAY_ADDRESS` says, or it wants a token.
    """
    with needs_extra(wanted_by, "parallel"):
        import ray
    if not ray.is_initialized():
        address = ray_address()
        local = {"num_cpus": num_cpus, "include_dashboard": False} if address == "local" else {}
        try:
            ray.init(
                address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True, **local
            )
        except Exception as error:  # Ray raises its own, Python's and plain ones
            if local:
                raise ConfigError(
                    f"a local Ray did not start: {error}; the machine may be too busy, or short of memory"
                ) from error
            token = "AuthToken" in f"{error}{error.__cause__}"
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and Ray cannot join that cluster: "
                + (TOKEN_WANTED if token else f"{error}; `ray status` says more")
            ) from error
    return ray


def ray_reason(error: BaseException) -> str:
    """Ray's reason for a death in one line, and what to do where only this machine has a module."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "\t"))]
    cause = next((line for line in lines if "dead because" in line), (lines or [type(error).__name__])[-1])
    cause = cause.partition("dead because ")[2].partition(". ")[0] or cause[:300]
    if cause.startswith("ModuleNotFoundError"):
        cause += " (install it on every node, or call ray.init(runtime_env={'working_dir': FOLDER}) before)"
    return cause


def ray_address() -> str:
    """What `RAY_ADDRESS` names, "local" if nothing; a `ConfigError` where nothing answers at a host and port."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    if not host and address not in ("local", "auto"):
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}: write HOST:PORT, such as 127.0.0.1:6379, auto, or local"
        )
    if host and "://" not in address:  # Ray itself would try for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, but nothing answers there ({error}): start the cluster "
                "(`ray start --head`), name another one, or unset RAY_ADDRESS for a local one"
            ) from error
    return address


class RayExecutor(Executor):
    """Runs tasks on a Ray cluster (see `connect_ray`): a thread here waits for each.

    Args:
        options: of each task, such as `{"num_cpus": 1, "resources": {"env": 1}}`.
        workers: how many tasks may run at a time; None for as many as the cluster has room for.

    Raises:
        ValueError: on less than one worker.
        TypeError: on a number of workers that is not whole.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, workers: int | None = None) -> None:
        if workers is not None and operator.index(workers) < 1:
            raise ValueError(
                f"workers must be at least 1, or None for as many as the cluster has room for, got {workers}"
            )
        self._ray = connect_ray()
        # A task that ran in part must not run again by itself: the caller decides.
        self._task = self._ray.remote(_call).options(**{"num_cpus": 1, "max_retries": 0, **(options or {})})
        self._threads = concurrent.futures.ThreadPoolExecutor(workers or MOST_RAY_TASKS, "shoal-ray")
        self._running: set[Any] = set()
        self._cancelled = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` somewhere on the cluster; a worker or node that is lost shows as `WorkerDiedError`."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        reference = self._task.remote(fn, args, kwargs)
        self._running.add(reference)
        try:
            if self._cancelled:
                self._ray.cancel(reference, force=True)
            return self._ray.get(reference)  # type: ignore[no-any-return]
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, BaseException) else error) from None
        except self._ray.exceptions.RayError as error:
            # A cancelled task's error is empty.
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise WorkerDiedError(f"a Ray worker was lost: {first}") from error
        finally:
            self._running.discard(reference)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks, or cancel them: with `cancel_futures`, and without `wait`."""
        self._cancelled = self._cancelled or cancel_futures or not wait
        self._threads.shutdown(wait=False, cancel_futures=self._cancelled)
        if self._cancelled and self._ray.is_initialized():
            for reference in list(self._running):
                self._ray.cancel(reference, force=True)
        self._threads.shutdown(wait=wait)


def _call(fn: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    # Ray takes Python functions only, not built-in ones or partials.
    return fn(*args, **kwargs)


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
