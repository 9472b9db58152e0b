"""Where the workers of a rollout run, and how a share of the episodes gets there."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import cloudpickle

from shoal.core.errors import ConfigError
from shoal.core.executors import RayExecutor, make_executor
from shoal.core.processes import by_value
from shoal.rollout.parallel.env_calls import close_all
from shoal.rollout.parallel.inference import SharedLLMInferenceManager
from shoal.rollout.parallel.playing import Here, play_share
from shoal.rollout.parallel.shares import Connect, Played, Share
from shoal.rollout.parallel.workers import WorkerExecutor
from shoal.rollout.settings import ParallelConfig

R = TypeVar("R")
PATIENCE = 5.0
"""Seconds that a worker has to close the envs that it kept."""
GRACE = 5.0
"""Seconds beyond `step_timeout` after which a worker that gives no sign of life is killed."""


class Placement:
    """Starts workers when they are first needed and keeps them for the next rollout.

    Args:
        backend: "threads", "processes", "loky" or "ray".
        n_workers: at most.
        settings: of the rollout.
        inference: gives the shared engine.
    """

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
        self.here = Here()

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
        connect: Connect = self._ray_mailbox().ticket if self.backend == "ray" else self._inference().serve()
        executor = self._fresh() if spare and self.backend == "loky" else self._usual()
        return executor.submit(play_pickled, data, connect)

    def pids(self) -> list[int]:
        """The worker processes that run now (of the "processes" backend and of replays)."""
        executors = [e for e in (self._executor, self._spare) if isinstance(e, WorkerExecutor)]
        return [pid for executor in executors for pid in executor.pids()]

    @property
    def started(self) -> bool:
        """Whether there are workers for the next rollout."""
        return self._executor is not None

    def forget(self) -> None:
        """The executor broke, or holds what hangs: the next rollout starts another."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def abandon(self) -> None:
        """What still runs is of no use any more; processes are killed, threads end at their next turn."""
        self._end_mailbox()
        self.here.stop.set()
        self.here = Here(self.here.kept)
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
                executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._spare = None
        close_all(self.here.kept.clear(), self._settings.step_timeout)
        self.here = Here()

    def _end_mailbox(self) -> None:
        if self._mailbox is not None:  # before Ray itself ends
            self._mailbox.close()
            self._mailbox = None

    def _usual(self) -> Executor:
        if self._executor is None:
            if self.backend == "processes":
                kept = self._settings.keep_envs
                self._executor = WorkerExecutor(
                    self._n_workers, silence=silence(self._settings), patience=PATIENCE if kept else 0.0
                )
            elif self.backend == "threads":
                self._executor = _Threads()
            elif self.backend == "ray":
                self._executor = RayExecutor(self._settings.ray_options)
            else:
                self._executor = make_executor(self.backend, self._n_workers)
        return self._executor

    def _fresh(self) -> WorkerExecutor:
        if self._spare is None:
            self._spare = WorkerExecutor(self._n_workers, silence=silence(self._settings))
        return self._spare

    def _ray_mailbox(self) -> Any:
        if self._mailbox is None:
            from shoal.rollout.parallel.ray_transport import Mailbox

            self._usual()  # starts Ray where it does not run yet
            self._mailbox = Mailbox(self._inference())
        return self._mailbox


class _Threads(Executor):
    """A daemon thread for each share: one that an env does not let go keeps nobody from leaving the program."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, daemon=True, name="shoal-share").start()
        return future


def silence(settings: ParallelConfig) -> float | None:
    """Seconds without a sign of life after which a worker counts as frozen."""
    return None if settings.step_timeout is None else settings.step_timeout + GRACE


def play_pickled(data: bytes, connect: Connect) -> Played:
    """`play_share` in another process."""
    return play_share(pickle.loads(data), connect)
