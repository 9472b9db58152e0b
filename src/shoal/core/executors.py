"""Where work runs: `concurrent.futures.Executor`s that all give the results of the serial one, in order.

The reference is `SerialExecutor`; a parallel executor is right when `map_ordered` over it equals
`[function(item) for item in items]`, exceptions included.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
import operator
import os
import pickle
import queue
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import cloudpickle

from shoal.core.errors import (
    ConfigError,
    WorkerDiedError,
    WorkerError,
    did_you_mean,
    in_words,
    needs_extra,
)

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)
BACKENDS = ("serial", "thread", "process", "loky", "ray")
CANCEL_SECONDS = 10.0
"""For which tasks on Ray that were cancelled are waited for."""
LOOK_SECONDS = 1.0
"""After which without news it is looked at whether Ray's session is still there: nobody says that it ended."""


class Closing:
    """What holds workers, files or connections, and gives them up when it is closed: at the end of a `with`."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""

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
        threading.Thread(target=self._work, daemon=True, name=name).start()

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
            except BaseException as error:  # SystemExit, say: whoever waits is to be told
                future.set_exception(error)
            del item, future, call  # what they hold ends with them


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


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had, of the machine and of the control group we run in.

    What a group uses to cache files does not count as used: the kernel gives it back when memory is needed.
    """
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for folder, most, used, cache, shared in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "file", "shmem"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_cache",
            "total_shmem",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit, usage = (int((root / folder / name).read_text()) for name in (most, used))
            with contextlib.suppress(OSError, ValueError):
                lines = (root / folder / "memory.stat").read_text().splitlines()
                stat = {name: int(value) for name, value in (line.split() for line in lines)}
                usage -= stat.get(cache, 0) - stat.get(shared, 0)
            found.append(limit - max(usage, 0))
    return min(found)


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
    workers = _whole(workers)
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


def _whole(workers: int) -> int:
    try:
        return operator.index(workers)
    except TypeError:
        raise TypeError(f"workers must be a whole number, got {workers!r:.80}") from None


class Sent(Exception):  # noqa: N818  (it arrives as what it carries)
    """An exception on its way out of a process: it arrives as itself, or as a `WorkerError` in its words.

    Pools give up all their tasks at an exception that cannot be read.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(in_words(error))
        try:
            self._data = cloudpickle.dumps(error, protocol=5)
            pickle.loads(self._data)  # what harms whoever reads it does so here
        except BaseException:
            self._data = b""

    def __reduce__(self) -> Any:
        return _arrived, (self._data, *self.args)


def _arrived(data: bytes, words: str) -> BaseException:
    with contextlib.suppress(BaseException):
        error = pickle.loads(data)
        if isinstance(error, BaseException):
            return error
    return WorkerError(words)


def _call(fn: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    # Ray takes Python functions only, not built-in ones or partials.
    try:
        return fn(*args, **kwargs)
    except BaseException as error:
        raise Sent(error) from error


class _Delivered(Future[R]):
    """The future of a pool whose result comes as bytes: they are read here, and fail their own task alone.

    Pools give up all their tasks at a task or result that cannot be read.
    """

    def __init__(self, sent: Future[bytes]) -> None:
        super().__init__()
        self._sent: Future[bytes] | None = sent
        sent.add_done_callback(self._open)

    def cancel(self) -> bool:
        return super().cancel() if (sent := self._sent) is None else sent.cancel()

    def running(self) -> bool:
        return (sent := self._sent) is not None and sent.running()

    def _open(self, sent: Future[bytes]) -> None:
        self._sent = None  # the bytes are not kept beside what they hold
        if sent.cancelled():
            self.cancel()
        if not self.set_running_or_notify_cancel():
            return
        if (error := sent.exception()) is not None:
            self.set_exception(error)
        else:
            _settle(self, sent.result())


def _settle(future: Future[Any], data: bytes) -> None:
    """Give a future the result in these bytes, or why they cannot be read."""
    try:
        result = pickle.loads(data)
    except BaseException as problem:
        unread = WorkerError(f"the result of this task cannot be read here: {in_words(problem)}")
        unread.__cause__ = problem
        future.set_exception(unread)
    else:
        future.set_result(result)


def _deliver(
    submit: Callable[..., Future[bytes]],
    dumps: Callable[[Any], Any],
    fn: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Future[R]:
    """Run `fn` in the pool that `submit` is of; task and result are bytes there, as `dumps` makes them."""
    try:
        task = bytes(dumps((fn, args, kwargs)))
    except Exception as error:
        unsent: Future[R] = Future()
        unsent.set_exception(error)
        return unsent
    return _Delivered(submit(_call, _run, (task, dumps), {}))


def _run(task: bytes, dumps: Callable[[Any], Any]) -> bytes:
    fn, args, kwargs = pickle.loads(task)
    return bytes(dumps(fn(*args, **kwargs)))


class ProcessExecutor(concurrent.futures.ProcessPoolExecutor):
    """Python's process pool, with processes that are spawned."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, mp_context=multiprocessing.get_context("spawn"))
        self._workers, self._used = workers, False

    def renew(self) -> None:
        """Have processes again after one died, which ends the pool."""
        super().shutdown()
        ProcessExecutor.__init__(self, self._workers)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a process of the pool."""
        self._used = True
        return _deliver(super().submit, ForkingPickler.dumps, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes.

        Before Python 3.11.3 the pool waits for ever when only cancelled tasks are left in it (gh-94440). They are not
        the last when another one comes behind them.
        """
        if wait and not cancel_futures and self._used:
            with contextlib.suppress(RuntimeError):  # it is broken or shut down already
                super().submit(int).result()
        super().shutdown(wait, cancel_futures=cancel_futures)


class LokyExecutor(Executor):
    """joblib's process pool: when one process dies, all its open tasks fail with a `BrokenExecutor`."""

    def __init__(self, workers: int) -> None:
        with needs_extra("the loky executor", "parallel"):
            from joblib.externals.loky import ProcessPoolExecutor
            from joblib.externals.loky.backend.reduction import dumps
        self._workers, self._pool, self._dumps = workers, ProcessPoolExecutor(workers), dumps

    def renew(self) -> None:
        """Have processes again after one died, which ends the pool."""
        self.shutdown(cancel_futures=True)
        LokyExecutor.__init__(self, self._workers)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a process of the pool."""
        return _deliver(self._pool.submit, self._dumps, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; without `wait`, or with `cancel_futures`, by force."""
        self._pool.shutdown(wait=wait, kill_workers=cancel_futures or not wait)


RAY_ANSWERS_SECONDS = 10.0
"""Within which a Ray cluster that is named must take a connection; `ray.init` itself would try for twenty minutes."""


def connect_ray(num_cpus: int | None = None, *, wanted_by: str = "Ray") -> tuple[Any, bool]:
    """The `ray` module, connected, and whether that was done here.

    The cluster is the one that is connected, else the one that `RAY_ADDRESS` names, else the one that `ray start` left
    on this machine, else a local one.

    Args:
        num_cpus: of a local one; the machine's if not given.
        wanted_by: what to name where Ray is not installed.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster is where `RAY_ADDRESS` says.
    """
    with needs_extra(wanted_by, "parallel"):
        import ray
    if ray.is_initialized():
        return ray, False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if find_ray_cluster():
        ray.init(**options)
    else:
        logger.info("starting a local Ray (no dashboard); connect to a cluster first to use that one")
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, **options)
    return ray, True


def find_ray_cluster() -> str | None:
    """The address of the cluster that `ray.init` would connect to, if it answers; None: it is to start a local one.

    `ray.init` would also try a cluster that is gone, whose address is still written down.

    Raises:
        ConfigError: no cluster is where `RAY_ADDRESS` says, or can be.
    """
    from ray._private import services

    named = os.environ.get("RAY_ADDRESS")
    try:
        found: str | None = services.get_ray_address_from_environment(None, None)
    except ConnectionError as error:
        raise ConfigError(f"RAY_ADDRESS is {named!r}, but no Ray cluster runs here: {error}") from error
    if found is None or found == "local":
        return None
    host, _, port = found.rpartition(":")
    if port.isdecimal() and not 1 <= int(port) <= 65535:
        if named:
            raise ConfigError(f"RAY_ADDRESS is {named!r}: its port must be from 1 to 65535, got {port}")
        logger.warning("no Ray cluster can be at %s, which is noted down: a local one is started", found)
        return None
    end = time.monotonic() + (RAY_ANSWERS_SECONDS if named else 0.0)
    while port.isdecimal() and "://" not in host:
        try:
            _knock(host, port)
            break
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(0.2)
            elif named:
                raise ConfigError(
                    f"RAY_ADDRESS is {named!r}, but nothing answers at {found} ({error}): start the cluster "
                    "(`ray start --head`), name another one, or unset RAY_ADDRESS for a local one"
                ) from error
            else:
                logger.warning(
                    "the Ray cluster that was started at %s is gone: a local one is started", found
                )
                return None
    return found


def _knock(host: str, port: str) -> None:
    """`OSError` where nothing answers."""
    socket.create_connection((host.strip("[]"), int(port)), 2.0).close()


_SESSIONS: dict[Any, int] = {}
"""The sessions of Ray that were started here, and how many use each: the last one ends it."""
_SESSIONS_LOCK = threading.RLock()


def ray_session(ray: Any) -> Any:
    """What tells the session that is connected now from all others; None if there is none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


def ray_lives(ray: Any, session: Any) -> bool:
    """Whether a session goes on; where nobody is connected, most calls of Ray would start another one."""
    try:
        return bool(ray_session(ray) == session)
    except Exception:  # it ends just now
        return False


HEAD_SECONDS = 30.0
"""Without an answer of a cluster's head after which its session is ended: after 60 Ray ends the whole process."""


def _watch_head(ray: Any, session: Any, address: str) -> None:
    """End a session whose head is gone, so that its users see it end and go on elsewhere."""
    host, _, port = address.rpartition(":")
    answered = None  # from elsewhere, as for a client, it may never be reached: that says nothing
    while ray_lives(ray, session):
        try:
            _knock(host, port)
            answered = time.monotonic()
        except OSError as error:
            if answered is None:
                return
            if time.monotonic() - answered > HEAD_SECONDS:
                with _SESSIONS_LOCK:  # nobody enters another session meanwhile, which would be ended
                    if ray_lives(ray, session):
                        said = "the head of the Ray cluster at %s is gone (%s): its session is ended"
                        logger.warning(said, address, error)
                        ray.shutdown()
                return
        time.sleep(LOOK_SECONDS)


def enter_ray(*, wanted_by: str = "Ray") -> tuple[Any, Any]:
    """The `ray` module, connected, and its session, for `leave_ray`; the session ends with the cluster's head."""
    with _SESSIONS_LOCK:
        ray, started = connect_ray(wanted_by=wanted_by)
        session = ray_session(ray)
        name = f"shoal-ray-head-{session}"
        if all(thread.name != name for thread in threading.enumerate()):
            address = ray.get_runtime_context().gcs_address
            threading.Thread(target=_watch_head, args=(ray, session, address), daemon=True, name=name).start()
        if started or session in _SESSIONS:
            _SESSIONS[session] = _SESSIONS.get(session, 0) + 1
        return ray, session


def leave_ray(session: Any) -> None:
    """End a session that `enter_ray` started, if nobody else who entered it is left."""
    with _SESSIONS_LOCK:
        if session not in _SESSIONS:
            return
        _SESSIONS[session] -= 1
        if not _SESSIONS[session]:
            import ray

            del _SESSIONS[session]
            if ray_lives(ray, session):
                ray.shutdown()


class RayDiedError(WorkerDiedError, BrokenExecutor):
    """What runs Ray on this machine is gone, or was shut down: the executor can start nothing any more."""


class RayExecutor(Executor):
    """Runs tasks on a Ray cluster (see `connect_ray`).

    Args:
        options: of each task, such as `{"num_cpus": 1, "resources": {"env": 1}}`.
        workers: how many tasks may run at a time; None for as many as the cluster has room for.

    Raises:
        ValueError: on less than one worker.
        TypeError: on a number of workers that is not whole.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, workers: int | None = None) -> None:
        if workers is not None and _whole(workers) < 1:
            raise ValueError(
                f"workers must be at least 1, or None for as many as the cluster has room for, got {workers}"
            )
        self._ray, self._session = enter_ray()
        self._home = self._session
        # A task that ran half must not run again behind our back: who submitted it decides.
        self._options = {"num_cpus": 1, "max_retries": 0, **(options or {})}
        self._workers = workers
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], tuple[Any, ...]]] = deque()
        self._running: dict[Future[Any], Any] = {}  # and what Ray calls each, None until it is handed over
        self._ended: SimpleQueue[tuple[Future[Any], Future[Any]] | None] = SimpleQueue()
        self._listens = self._cancelled = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` somewhere on the cluster; a worker or node that is lost shows as `WorkerDiedError`.

        If that node is this one, the error is a `BrokenExecutor` too.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._session is None:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append((future, (fn, args, kwargs)))
        self._start_waiting()
        return future

    def _start_waiting(self) -> None:
        """Hand over tasks that wait, as long as more may run."""
        while True:
            with self._lock:
                if not self._waiting or len(self._running) == self._workers:
                    return
                future, task = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._running[future] = None
            try:  # not under the lock: Ray may wait for a thread of its own here
                if not ray_lives(self._ray, self._home):
                    raise RayDiedError("Ray was shut down")
                dumps = self._ray.cloudpickle.dumps
                # As bytes, like the result: at what cannot be read Ray forgets its futures, or loses the worker.
                task = _run, (dumps(task), dumps), {}
                reference = self._ray.remote(_call).options(**self._options).remote(*task)
                with self._lock:
                    if not self._listens:
                        threading.Thread(target=self._listen, daemon=True, name="shoal-ray-results").start()
                        self._listens = True
                    self._running[future] = reference
                    cancelled = self._cancelled
            except BaseException as error:  # it cannot be sent
                with self._lock:
                    del self._running[future]
                future.set_exception(error)  # who hears of it may submit another one
                if not isinstance(error, Exception):
                    raise
                continue
            # A thread of Ray's says that it ended, which waits for nobody: others wait for it inside of Ray.
            reference.future().add_done_callback(
                lambda inner, future=future: self._ended.put((future, inner))
            )
            if cancelled:
                self._ray.cancel(reference, force=True)
                self._ended.put(None)

    def _listen(self) -> None:
        """Give futures their results, and start what waits, in a thread that lives while tasks run."""
        while True:
            try:
                if (ended := self._ended.get(timeout=LOOK_SECONDS)) is None:
                    break
                self._finish(*ended)
            except queue.Empty:
                if ray_lives(self._ray, self._home):
                    continue
                break
            except BaseException:  # of who hears of it
                logger.exception("what was to be done at the end of a task on Ray failed")
            with self._lock:
                if not self._running and not self._waiting:
                    self._listens = False
                    return
        with self._lock:  # the session is over, nothing more is heard of these
            self._listens = False
            left = [future for future, reference in self._running.items() if reference is not None]
            for future in left:
                del self._running[future]
        for future in left:
            future.set_exception(RayDiedError("the executor, or Ray, was shut down before this task ended"))
        self._start_waiting()

    def _finish(self, future: Future[Any], inner: Future[Any]) -> None:
        try:
            if (error := inner.exception()) is not None:
                future.set_exception(self._translate(error))
            else:
                _settle(future, inner.result())
        finally:
            with self._lock:
                self._running.pop(future, None)
            self._start_waiting()

    def _translate(self, error: BaseException) -> BaseException:
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, BaseException):
            error.cause.__cause__ = None
            return error.cause
        if isinstance(error, exceptions.RayError):
            said = str(error).splitlines() or [type(error).__name__]  # a cancelled task's error says nothing
            lost = RayDiedError if isinstance(error, exceptions.LocalRayletDiedError) else WorkerDiedError
            return lost(f"a Ray worker was lost: {said[0]}")
        return error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks, or cancel them; a Ray that was started here is stopped by its last user."""
        cancel = cancel_futures or not wait
        with self._lock:
            session, self._session = self._session, None
            self._cancelled |= cancel
            waiting, running = [future for future, _ in self._waiting], dict(self._running)
            if cancel:
                self._waiting.clear()
        if cancel:
            for future in waiting:
                future.cancel()
                future.set_running_or_notify_cancel()
            for reference in running.values():
                if reference is not None:
                    self._ray.cancel(reference, force=True)
        if wait:
            concurrent.futures.wait([*waiting, *running], CANCEL_SECONDS if cancel else None)
        leave_ray(session)
        self._ended.put(None)


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
