import queue
import time

import pytest

from shoal.core.errors import WorkerDiedError
from shoal.rollout import workers
from shoal.rollout.workers import WorkerExecutor
from shoal.testing import check_executor


class SlowQueue:
    """A queue whose items take a while to get out, so that a keeper is seen between waiting and working."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self.put, self.get_nowait = self._queue.put, self._queue.get_nowait

    def get(self):
        time.sleep(0.2)
        return self._queue.get()


def meet(folder, me, n):
    """Come to a place and wait until all are there."""
    (folder / str(me)).touch()
    end = time.monotonic() + 20
    while len(list(folder.iterdir())) < n:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_it_is_an_executor_like_the_others():
    check_executor(lambda: WorkerExecutor(2))


def test_tasks_that_wait_for_one_another_all_run_when_there_are_enough_workers(tmp_path):
    executor = WorkerExecutor(3)
    executor._tasks = SlowQueue()
    futures = [executor.submit(meet, tmp_path, me, 3) for me in range(3)]
    assert all(future.result(timeout=60) for future in futures)
    executor.shutdown()


def test_a_worker_that_is_idle_gets_the_next_task():
    with WorkerExecutor(3) as executor:
        for _ in range(5):
            executor.submit(int).result(timeout=60)
        assert len(executor.pids()) == 1


def test_a_shutdown_that_does_not_wait_also_ends_a_worker_that_just_starts(monkeypatch):
    class Slow(workers._Process):
        def __init__(self):
            time.sleep(0.5)
            super().__init__()

    monkeypatch.setattr(workers, "_Process", Slow)
    executor = WorkerExecutor(1)
    future = executor.submit(time.sleep, 1000)
    time.sleep(0.2)
    executor.shutdown(wait=False)
    with pytest.raises(WorkerDiedError, match="shut down"):
        future.result(timeout=0)
