import json
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.core.errors import WorkerDiedError, WorkerError
from shoal.core.executors import available_cpus
from shoal.core.processes import kill_group
from shoal.rollout.parallel import pool
from shoal.rollout.parallel.pool import WorkerExecutor
from shoal.rollout.parallel.worker import ParallelConfig
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
    end = time.monotonic() + 60
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


@pytest.mark.parametrize("wait", [True, False])
def test_programs_that_a_task_started_end_with_its_worker(wait):
    executor = WorkerExecutor(1)
    started = lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid  # noqa: E731
    program = Path("/proc", str(executor.submit(started).result(timeout=60)), "stat")
    executor.shutdown(wait=wait)
    end = time.monotonic() + 60
    while program.exists() and program.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it outlives the worker"
        time.sleep(0.05)


def test_a_shutdown_that_does_not_wait_also_ends_a_worker_that_just_starts(monkeypatch):
    begun = threading.Event()

    class Slow(pool._Process):
        def __init__(self):
            begun.set()
            while not executor._killed:
                time.sleep(0.01)
            super().__init__()

    monkeypatch.setattr(pool, "_Process", Slow)
    executor = WorkerExecutor(1)
    future = executor.submit(time.sleep, 1000)
    assert begun.wait(60)
    executor.shutdown(wait=False)
    with pytest.raises(WorkerDiedError, match="shut down"):
        future.result(timeout=0)


@pytest.mark.parametrize(
    "error", [WorkerDiedError("the process that starts workers is gone"), OSError(24, "full")]
)
def test_a_process_that_cannot_be_started_just_now_is_started_later(monkeypatch, error):
    class Stubborn(pool._Process):
        attempts = 0

        def __init__(self):
            Stubborn.attempts += 1
            if Stubborn.attempts < 4:
                raise error
            super().__init__()

    monkeypatch.setattr(pool, "_Process", Stubborn)
    with WorkerExecutor(1) as executor:
        assert executor.submit(int).result(timeout=60) == 0
    assert Stubborn.attempts == 4
    monkeypatch.setattr(pool, "PAUSES", (0.01, 0.01, 0.01))
    Stubborn.attempts = 0
    with WorkerExecutor(1) as executor:  # the attempt after the last pause is the last one
        assert executor.submit(int).result(timeout=60) == 0
    Stubborn.attempts = -1
    with WorkerExecutor(1) as executor, pytest.raises(WorkerError, match="no worker process can be started"):
        executor.submit(int).result(timeout=60)


def test_where_no_process_can_be_forked_the_forking_one_says_so_and_lives_on():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import os\ndef fork(): raise OSError(11, 'no more')\nos.fork = fork\n"
    program += f"from shoal.core.processes import zygote_main; zygote_main({theirs.fileno()})"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=environ)
    theirs.close()
    with ours:
        assert ours.recv(64) == b"ready"
        for number in range(2):
            request = {"do": "start", "method": "forkserver", "entry": "os:getpid", "number": number}
            ours.send(json.dumps(request).encode())
            assert json.loads(ours.recv(4096)) == {"number": number, "error": "[Errno 11] no more"}
    assert process.wait(60) == 0


@pytest.mark.parametrize("pid", [1, 0, -1])
def test_numbers_that_mean_many_processes_are_never_killed(pid):
    with pytest.raises(ValueError, match="is no worker"):
        kill_group(pid)


@pytest.mark.parametrize(("workers", "fine"), [(-1, True), (1, True), (0, False), (-2, False)])
def test_workers_are_one_a_core_or_as_many_as_are_asked_for(workers, fine):
    if fine:
        executor = WorkerExecutor(workers)
        assert executor.n_workers == (available_cpus() if workers == -1 else workers)
        executor.shutdown()
        executor.shutdown()  # as often as one likes
        with pytest.raises(RuntimeError, match="cannot submit to an executor that was shut down"):
            executor.submit(int)
    else:
        with pytest.raises(ValueError, match=f"must be -1 .one per core. or at least 1, got {workers}"):
            WorkerExecutor(workers)


def test_a_worker_counts_as_frozen_some_seconds_after_its_env_should_have_answered():
    for settings, seconds in (({}, None), ({"make_timeout": 9}, None), ({"step_timeout": 2}, 7.0),
                              ({"step_timeout": 2, "make_timeout": 9}, 14.0)):  # fmt: skip
        assert pool.heartbeat_timeout(ParallelConfig(**settings)) == seconds


def test_a_worker_gives_signs_of_life_while_it_works_and_only_then(monkeypatch):
    monkeypatch.setattr(pool, "BEAT", 0.01)
    sent, lock, busy = queue.SimpleQueue(), threading.Lock(), threading.Event()
    channel = SimpleNamespace(send=sent.put)
    threading.Thread(target=pool._beat, args=(channel, lock, busy), daemon=True).start()
    busy.set()
    assert [pickle.loads(sent.get(timeout=60)) for _ in range(3)] == [None] * 3
    with lock:
        busy.clear()
        while not sent.empty():
            sent.get()
    time.sleep(0.1)
    assert sent.empty()
