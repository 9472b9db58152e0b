"""Worker processes as an executor in which a worker that dies costs only the task it was at.

(`concurrent.futures.ProcessPoolExecutor` and loky give up all their tasks when one process dies.) Workers are
forked from a small process without threads, die with their parent, and are kept for the next task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle

from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.core.executors import available_cpus
from shoal.core.processes import (
    Channel,
    ChannelClosedError,
    RemoteTraceback,
    Zygote,
    by_value,
    describe_exit,
    kill_group,
)

R = TypeVar("R")
PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds before another attempt to start a process."""
logger = logging.getLogger(__name__)


class WorkerExecutor(Executor):
    """Runs tasks in worker processes, each in one at a time; results are futures.

    Args:
        workers: processes, started when first needed; -1 for one per available core.
        silence: seconds without a sign of life (a worker whose interpreter is stuck in C code gives none) after
            which a worker is killed.
        patience: seconds that an idle worker has to end by itself; then, or at once, it is killed.
    """

    def __init__(self, workers: int = -1, *, silence: float | None = None, patience: float = 0.0) -> None:
        if workers != -1 and workers < 1:
            raise ValueError(f"workers must be -1 (one per core) or at least 1, got {workers}")
        self.n_workers = available_cpus() if workers == -1 else workers
        self._silence, self._patience = silence, patience
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._keepers: list[_Keeper] = []
        self._lock = threading.Lock()
        self._open = 0  # tasks that are not over
        self._closed = self._killed = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run `fn` in a worker; the future fails with `WorkerDiedError` when that worker dies."""
        future: Future[R] = Future()
        with by_value([fn]):
            task = _Task(future, cloudpickle.dumps((fn, args, kwargs), protocol=5))
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot submit to an executor that was shut down")
            self._tasks.put(task)
            self._open += 1
            if len(self._keepers) < min(self._open, self.n_workers):
                keeper = _Keeper(self)
                self._keepers.append(keeper)
                keeper.thread.start()
        return future

    def pids(self) -> list[int]:
        """The worker processes that run now."""
        return [process.pid for keeper in self._keepers if (process := keeper.process) is not None]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; without `wait`, those at work are killed."""
        with self._lock:
            if self._closed and not self._keepers:
                return
            self._closed, self._killed = True, not wait
            if cancel_futures or not wait:
                with contextlib.suppress(queue.Empty):
                    while (task := self._tasks.get_nowait()) is not None:
                        task.future.cancel()
            for _ in self._keepers:
                self._tasks.put(None)
            keepers = list(self._keepers)
        for keeper in keepers:
            if not wait:
                keeper.kill()
        for keeper in keepers:
            keeper.thread.join()
        self._keepers.clear()


@dataclass(slots=True)
class _Task:
    future: Future[Any]
    data: bytes


class _Keeper:
    """A thread of the caller that keeps one worker process busy, and replaces it when it dies."""

    def __init__(self, executor: WorkerExecutor) -> None:
        self.executor = executor
        self.process: _Process | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="shoal-worker-keeper")

    def kill(self) -> None:
        """Kill the process, if there is one."""
        process = self.process
        if process is not None:
            kill_group(process.pid)

    def _run(self) -> None:
        executor = self.executor
        while (task := executor._tasks.get()) is not None:
            runs = task.future.set_running_or_notify_cancel()
            ok, value = self._do(task) if runs else (False, None)
            with executor._lock:
                executor._open -= 1
            if not runs:
                continue
            if ok:
                task.future.set_result(value)
            else:
                task.future.set_exception(value)
        self._let_go(executor._patience)

    def _do(self, task: _Task) -> tuple[bool, Any]:
        """Whether a task returned, and what it returned or raised."""
        try:
            if self.process is None or not self.process.alive():
                self._let_go()
                self.process = self._started()
            if self.executor._killed:  # while the process started, so that it was not killed with the others
                raise WorkerDiedError("the executor was shut down")
            ok, value, recycle = self.process.call(task.data, self.executor._silence)
        except BaseException as error:  # whatever it is: somebody waits for the future
            self._let_go()
            return False, error
        if recycle:
            self._let_go()
        return ok, value

    def _started(self) -> _Process:
        """A new process; where there can be none just now, it is tried again for some seconds."""
        for pause in PAUSES:
            try:
                return _Process()
            except (WorkerDiedError, OSError) as error:
                if self.executor._killed:
                    raise
                logger.warning("%s; it is tried again in %g s", error, pause)
                time.sleep(pause)
        try:
            return _Process()
        except (WorkerDiedError, OSError) as error:
            raise WorkerError(f"no worker process can be started: {error}") from error

    def _let_go(self, patience: float = 0.0) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end(patience)


class _Process:
    """One worker process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, 0.1)
        self._zygote = Zygote.running()
        request = {"do": "start", "method": "forkserver", "entry": "shoal.rollout.parallel.worker_main:main"}
        try:
            self.pid = int(self._zygote.ask(request, [theirs.fileno(), 2])["pid"])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            kill_group(self.pid)
            ours.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._heard = time.monotonic()
        self._silence: float | None = None
        with contextlib.suppress(ChannelClosedError, WorkerError):
            self._channel.send(cloudpickle.dumps(_surroundings()), self._check)

    def alive(self) -> bool:
        """Whether it runs."""
        return not self._poll.poll(0)

    def call(self, data: bytes, silence: float | None) -> tuple[bool, Any, bool]:
        """Run one task: (whether it returned, its result or exception, whether the process is used up)."""
        self._silence, self._heard = silence, time.monotonic()
        try:
            self._channel.send(data, self._check)
            while (answer := self._channel.receive(self._check)) is None:
                self._heard = time.monotonic()
        except ChannelClosedError:
            self._poll.poll(1000)
            raise WorkerDiedError(f"worker process {self.pid} {describe_exit(self.end())}") from None
        ok, value, trace, recycle = answer
        if not ok and trace:
            value.__cause__ = RemoteTraceback(trace)
        return ok, value, recycle

    def _check(self) -> None:
        if self._poll.poll(0):
            raise WorkerDiedError(f"worker process {self.pid} {describe_exit(self.end())}")
        if self._silence is not None and time.monotonic() - self._heard > self._silence:
            self.end()
            raise WorkerTimeoutError(
                f"worker process {self.pid} gave no sign of life for {self._silence:g} s and was killed"
            )

    def end(self, patience: float = 0.0) -> int | None:
        """Kill it if need be, or when it does not end by itself in so many seconds, and return its exit code."""
        if self._pidfd < 0:
            return None
        if patience:
            self._channel.close()
            self._poll.poll(1000 * patience)
        kill_group(self.pid)
        try:
            code: int | None = self._zygote.ask({"do": "reap", "pid": self.pid, "wait": True})["code"]
        except WorkerDiedError:
            code = None
        self._channel.close()
        os.close(self._pidfd)
        self._pidfd = -1
        return code


def _surroundings() -> tuple[list[str], list[str], dict[str, str], str]:
    return list(sys.path), list(sys.argv), dict(os.environ), os.getcwd()
