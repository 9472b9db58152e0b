"""Where the workers of a rollout run: threads, worker processes, loky or Ray, and how a share gets there.

Worker processes are forked from a small process without threads, die with their parent and are kept for the next
task; one that dies costs only the task it was at. (`concurrent.futures.ProcessPoolExecutor` and loky give up all their
tasks when one process dies.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from shoal.core.errors import ConfigError, WorkerDiedError, WorkerError, WorkerTimeoutError, format_error
from shoal.core.executors import OwnThread, RayExecutor, available_cpus, make_executor
from shoal.core.processes import (
    STANDSTILL,
    Channel,
    ChannelClosedError,
    RemoteTraceback,
    WorkerProcess,
    by_value,
    describe_exit,
    kill_group,
    settle,
)
from shoal.rollout.parallel.worker import KEPT, Connect, InCaller, ParallelConfig, Played, Share, play_share

if TYPE_CHECKING:  # a worker process does not need it
    from shoal.rollout.parallel.server import SharedLLMInferenceManager

R = TypeVar("R")
PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds before another attempt to start a process."""
BEAT = 0.5
"""Seconds between a busy worker's signs of life."""
CLOSE_SECONDS = 5.0
"""For which a worker may close the envs that it kept."""
GRACE = 5.0
"""Seconds beyond what an env may take, after which a worker that gives no sign of life is killed."""
logger = logging.getLogger(__name__)


class Sent(Exception):  # noqa: N818  (it arrives as what it carries)
    """An exception on its way out of a process: it arrives as itself, or as a `WorkerError` in its words.

    Pools give up all their tasks at an exception that cannot be read.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(format_error(error))
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


class Pool:
    """Starts at most `n_workers` when they are first needed and keeps them for the next rollout."""

    def __init__(
        self,
        backend: str,
        n_workers: int,
        settings: ParallelConfig,
        inference: Callable[[], SharedLLMInferenceManager],
    ) -> None:
        self.backend = backend
        self._n_workers, self._settings, self._inference = n_workers, settings, inference
        self._executor: Executor | None = None
        self._spare: WorkerExecutor | None = None
        self._mailbox: Any = None
        self.here = InCaller(passing=backend == "threads")

    def submit(self, share: Share, *, spare: bool = False) -> Future[Played]:
        """Start a share on a worker; `spare` takes fresh processes instead of an executor that broke."""
        if self.backend == "threads":
            return self._usual().submit(play_share, share, self._inference(), self.here)
        with by_value([*share.env_fns.values(), type(share.tokenizer)]):
            try:
                data = cloudpickle.dumps(share, protocol=5)
            except Exception as error:
                raise ConfigError(
                    f"this rollout cannot be sent to a worker process ({error}); use backend='threads'"
                ) from error
        broken = self.backend == "ray" and self._executor is None
        executor = self._fresh() if spare and (broken or self.backend == "loky") else self._usual()
        on_ray = isinstance(executor, RayExecutor)
        connect: Connect = self._ray_mailbox().ticket if on_ray else self._inference().serve()
        return executor.submit(play_pickled, data, connect)

    def pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        executors = [e for e in (self._executor, self._spare) if isinstance(e, WorkerExecutor)]
        return [pid for executor in executors for pid in executor.pids()]

    def forget(self) -> None:
        """The executor broke, or holds what hangs: the next rollout starts another."""
        self._end_mailbox()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def abandon(self) -> None:
        """What still runs is of no use any more; processes are killed, threads end at their next turn."""
        self.here.stop.set()
        self.here = replace(self.here, stop=threading.Event())
        self.forget()
        if self._spare is not None:
            self._spare.shutdown(wait=False)
            self._spare = None

    def close(self, *, gently: bool) -> None:
        """End the workers and the envs that were kept; `gently` where nothing runs. May be called twice."""
        self._end_mailbox()
        for executor in (self._executor, self._spare):
            if isinstance(executor, WorkerExecutor):
                executor.shutdown(wait=gently and self._settings.keep_envs, cancel_futures=True)
            elif executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)  # they cancel or kill
        self._executor = self._spare = None
        self.here.kept.close(self._settings.step_timeout)
        self.here = InCaller(passing=self.here.passing)

    def _end_mailbox(self) -> None:
        if self._mailbox is not None:  # before Ray itself ends
            self._mailbox.close()
            self._mailbox = None

    def _usual(self) -> Executor:
        if self._executor is None:
            settings = self._settings
            if self.backend == "processes":
                patience = CLOSE_SECONDS if settings.keep_envs else 0.0
                beat = heartbeat_timeout(settings)
                self._executor = WorkerExecutor(self._n_workers, heartbeat_timeout=beat, patience=patience)
            elif self.backend == "threads":
                self._executor = _Threads()
            elif self.backend == "ray":
                self._executor = RayExecutor(settings.ray_options)
            else:
                self._executor = make_executor(self.backend, self._n_workers)
        return self._executor

    def _fresh(self) -> WorkerExecutor:
        if self._spare is None:
            self._spare = WorkerExecutor(self._n_workers, heartbeat_timeout=heartbeat_timeout(self._settings))
        return self._spare

    def _ray_mailbox(self) -> Any:
        if self._mailbox is not None and self._mailbox.gone:
            self._end_mailbox()
        if self._mailbox is None:
            from shoal.rollout.parallel.ray import Mailbox

            self._mailbox = Mailbox(self._inference())
        return self._mailbox


def heartbeat_timeout(settings: ParallelConfig) -> float | None:
    """Seconds without a sign of life after which a worker counts as frozen."""
    if settings.step_timeout is None:
        return None
    return max(settings.step_timeout, settings.make_timeout or 0.0) + GRACE


class _Threads(Executor):
    """A daemon thread for each share: one that an env does not let go keeps nobody from leaving the program."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        thread = OwnThread("shoal-share")
        future = thread.submit(partial(fn, *args, **kwargs))
        thread.end()
        return future


# --- worker processes
class WorkerExecutor(Executor):
    """Runs tasks in worker processes, each in one at a time; results are futures.

    Each process has a thread here that keeps it busy, and replaces it when it dies.

    Args:
        workers: processes, started when first needed; -1 for one per available core.
        heartbeat_timeout: seconds without a sign of life (a worker whose interpreter is stuck in C code gives none)
            after which a worker is killed.
        patience: seconds that an idle worker has to end by itself; then, or at once, it is killed.
    """

    def __init__(
        self, workers: int = -1, *, heartbeat_timeout: float | None = None, patience: float = 0.0
    ) -> None:
        if workers != -1 and workers < 1:
            raise ValueError(f"workers must be -1 (one per core) or at least 1, got {workers}")
        self.n_workers = available_cpus() if workers == -1 else workers
        self._heartbeat_timeout, self._patience = heartbeat_timeout, patience
        self._tasks: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, _Process] = {}  # by the number of their thread
        self._lock = threading.Lock()
        self._open = 0  # tasks that are not over
        self._closed = self._killed = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a worker; the future fails with `WorkerDiedError` when that worker dies."""
        future: Future[R] = Future()
        with by_value([fn]):
            data = cloudpickle.dumps((fn, args, kwargs), protocol=5)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot submit to an executor that was shut down")
            self._tasks.put((future, data))
            self._open += 1
            number = len(self._threads)
            if number < min(self._open, self.n_workers):
                thread = threading.Thread(
                    target=self._keep, args=(number,), daemon=True, name="shoal-worker-keeper"
                )
                self._threads.append(thread)
                thread.start()
        return future

    def pids(self) -> list[int]:
        """The worker processes that run now."""
        return [process.pid for process in list(self._processes.values())]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; without `wait`, those at work are killed."""
        with self._lock:
            if self._closed and not self._threads:
                return
            self._closed, self._killed = True, not wait
            if cancel_futures or not wait:
                with contextlib.suppress(queue.Empty):
                    while (task := self._tasks.get_nowait()) is not None:
                        task[0].cancel()
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        if not wait:
            for pid in self.pids():
                kill_group(pid)
        for thread in threads:
            thread.join()
        self._threads.clear()

    # in the thread of a process
    def _keep(self, number: int) -> None:
        while (task := self._tasks.get()) is not None:
            future, data = task
            runs = future.set_running_or_notify_cancel()
            ok, value = self._do(number, data) if runs else (False, None)
            with self._lock:
                self._open -= 1
            if runs and ok:
                future.set_result(value)
            elif runs:
                future.set_exception(value)
        self._let_go(number, self._patience)

    def _do(self, number: int, data: bytes) -> tuple[bool, Any]:
        """Whether a task returned, and what it returned or raised."""
        try:
            process = self._processes.get(number)
            if process is None or not process.alive():
                self._let_go(number)
                process = self._processes[number] = self._started()
            if self._killed:  # while the process started, so that it was not killed with the others
                raise WorkerDiedError("the executor was shut down")
            ok, value, recycle = process.call(data, self._heartbeat_timeout)
        except BaseException as error:  # whatever it is: somebody waits for the future
            self._let_go(number)
            return False, error
        if recycle:
            self._let_go(number)
        return ok, value

    def _started(self) -> _Process:
        """A new process; where there can be none just now, it is tried again for some seconds."""
        for pause in PAUSES:
            try:
                return _Process()
            except (WorkerDiedError, ConfigError, OSError) as error:
                if self._killed:
                    raise
                logger.warning("%s; it is tried again in %g s", error, pause)
                time.sleep(pause)
        try:
            return _Process()
        except (WorkerDiedError, ConfigError, OSError) as error:
            raise WorkerError(f"no worker process can be started: {error}") from error

    def _let_go(self, number: int, patience: float = 0.0) -> None:
        process = self._processes.pop(number, None)
        if process is not None:
            process.end(patience)


class _Process:
    """A worker process, which runs one task at a time."""

    def __init__(self) -> None:
        self._worker = WorkerProcess(f"{__name__}:worker_main")
        self._worker.start()
        self.pid, self.alive = self._worker.pid, self._worker.alive
        self._heard = self._looked = time.monotonic()
        self._heartbeat_timeout: float | None = None

    def call(self, data: bytes, heartbeat_timeout: float | None) -> tuple[bool, Any, bool]:
        """Run one task: (whether it returned, its result or exception, whether the process is used up)."""
        self._heartbeat_timeout = heartbeat_timeout
        self._heard = self._looked = time.monotonic()
        channel = self._worker.channel
        try:
            channel.send(data, self._check)
            while (answer := channel.receive(self._check)) is None:
                self._heard = self._looked = time.monotonic()
        except ChannelClosedError:
            self._worker.wait(1.0)
            raise WorkerDiedError(f"worker process {self.pid} {describe_exit(self.end())}") from None
        ok, value, trace, recycle = answer
        if not ok and trace:
            value.__cause__ = RemoteTraceback(trace)
        return ok, value, recycle

    def _check(self) -> None:
        timeout, since, self._looked = self._heartbeat_timeout, self._looked, time.monotonic()
        if self._looked - since >= STANDSTILL:  # the worker may have stood still too
            self._heard += self._looked - since
        if not self.alive():
            raise WorkerDiedError(f"worker process {self.pid} {describe_exit(self.end())}")
        if timeout is not None and self._looked - self._heard > timeout:
            self.end()
            raise WorkerTimeoutError(
                f"worker process {self.pid} gave no sign of life for {timeout:g} s and was killed"
            )

    def end(self, patience: float = 0.0) -> int | None:
        """Kill it, unless it ends by itself in so many seconds, with what its envs started; return its exit code."""
        if patience:
            self._worker.channel.close()
            self._worker.wait(patience)
        self._worker.reap()
        self._worker.release()
        return self._worker.exit_code


# --- in a worker process
def play_pickled(data: bytes, connect: Connect) -> Played:
    """`play_share` in another process."""
    return play_share(pickle.loads(data), connect)


def worker_main(descriptor: int, log: int) -> int:
    """Run tasks until the other side is gone; returns the exit code."""
    channel = Channel(socket.socket(fileno=descriptor))
    sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
    lock = threading.Lock()
    busy = threading.Event()
    threading.Thread(target=_beat, args=(channel, lock, busy), daemon=True).start()
    try:
        settle(channel.receive())
        while True:
            task = channel.receive_bytes()
            busy.set()
            answer = _answer(task)
            busy.clear()
            with lock:
                channel.send(answer)
    except ChannelClosedError:
        return 0
    finally:
        KEPT.close()


def _answer(task: bytes | bytearray) -> bytes:
    """The outcome of a task as bytes, whatever it is."""
    try:
        fn, args, kwargs = cloudpickle.loads(task)
        value = fn(*args, **kwargs)
        recycle = bool(getattr(value, "hung", 0))
        whole: bytes = cloudpickle.dumps((True, value, "", recycle), protocol=5)
        return whole
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        data: bytes = cloudpickle.dumps((False, Sent(error), trace, False), protocol=5)
        return data


def _beat(channel: Channel, lock: threading.Lock, busy: threading.Event) -> None:
    sign = cloudpickle.dumps(None)
    while True:
        busy.wait()
        time.sleep(BEAT)
        with lock:
            if busy.is_set():
                try:
                    channel.send(sign)
                except ChannelClosedError:
                    os._exit(0)
