import concurrent.futures
import socket
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import executors
from shoal.core.errors import ConfigError, WorkerDiedError
from shoal.core.executors import RayExecutor, SerialExecutor, available_memory, make_executor, map_ordered


def square(x):
    return x * x


def fail_on_three(x):
    if x == 3:
        raise KeyError("three")
    return x


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_every_executor_gives_the_results_of_a_plain_loop(backend):
    with make_executor(backend, 2) as executor:
        assert list(map_ordered(executor, square, range(37))) == [x * x for x in range(37)]


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_an_exception_comes_out_where_its_result_would_have(backend):
    with make_executor(backend, 2) as executor:
        results = map_ordered(executor, fail_on_three, range(9))
        assert [next(results), next(results), next(results)] == [0, 1, 2]
        with pytest.raises(KeyError, match="three"):
            next(results)


def wait_until_there(path):
    while not path.exists():
        time.sleep(0.01)


def test_a_task_of_a_pool_that_has_not_begun_can_be_cancelled(tmp_path):
    with make_executor("process", 1) as executor:
        futures = [executor.submit(wait_until_there, tmp_path / "cancelled") for _ in range(8)]
        assert futures[-1].cancel()
        (tmp_path / "cancelled").touch()
        assert futures[-1].cancelled()
        assert concurrent.futures.wait(futures, timeout=60).not_done == set()
        assert not futures[0].cancel()
        assert [future.cancelled() for future in futures] == [False] * 7 + [True]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_shutdown_waits_for_what_was_submitted(backend):
    executor = make_executor(backend, 1)
    futures = [executor.submit(time.sleep, 0.05) for _ in range(3)]
    executor.shutdown()
    assert all(future.done() and not future.cancelled() for future in futures)


@given(st.lists(st.integers()), st.integers(1, 5))
@settings(max_examples=30)
def test_order_holds_for_any_bound(items, bound):
    assert list(map_ordered(SerialExecutor(), square, items, in_flight=bound)) == [x * x for x in items]


def test_input_is_read_no_further_ahead_than_the_bound():
    read = []

    def items():
        for x in range(100):
            read.append(x)
            yield x

    results = map_ordered(SerialExecutor(), square, items(), in_flight=3)
    next(results)
    assert read == [0, 1, 2]


def test_tasks_that_have_not_started_are_cancelled_when_one_fails():
    gate, started = threading.Event(), []

    def work(x):
        started.append(x)
        if x == 0:
            raise ValueError("first")
        gate.wait(5)

    with make_executor("thread", 1) as executor:
        with pytest.raises(ValueError, match="first"):
            list(map_ordered(executor, work, range(50), in_flight=50))
        gate.set()
    assert len(started) < 50


@pytest.mark.parametrize("workers", [0, -2])
def test_a_senseless_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match=f"at least 1, got {workers}"):
        make_executor("thread", workers)


@pytest.mark.parametrize("workers", [1.5, float("nan"), "2", None])
def test_workers_are_a_whole_number(workers):
    with pytest.raises(TypeError):
        make_executor("thread", workers)


def test_an_executor_on_ray_refuses_a_senseless_number_of_workers_before_ray_is_started():
    for workers in (0, -1):  # with 0 it would wait for ever
        with pytest.raises(
            ValueError, match=f"at least 1, or None for as many as .* room for, got {workers}"
        ):
            RayExecutor(workers=workers)
    with pytest.raises(TypeError):
        RayExecutor(workers=1.5)


def test_an_unknown_backend_is_named_with_the_closest_one():
    with pytest.raises(ValueError, match="Did you mean 'thread'"):
        make_executor("threads")


class Tasks:
    """Ray's tasks as threads of this process; counts how many run at a time."""

    class exceptions:  # noqa: N801
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {"cause": property(lambda error: error.args[0])})

    def __init__(self):
        self.pool, self.lock, self.now, self.most = ThreadPoolExecutor(8), threading.Lock(), 0, 0
        self.lost, self.gate = False, threading.Event()
        self.gate.set()  # without it tasks begin and do not end

    def is_initialized(self):
        return True

    def remote(self, function):
        def run(*args):
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            assert self.gate.wait(60)
            with self.lock:
                self.now -= 1
            return function(*args)

        remote = types.SimpleNamespace(remote=lambda *args: self.pool.submit(run, *args))
        return types.SimpleNamespace(options=lambda **_: remote)

    def get(self, reference):
        try:
            result = reference.result(60)
        except Exception as error:
            raise self.exceptions.RayTaskError(error) from error
        if self.lost:
            raise self.exceptions.RayError("the node is gone\nand more")
        return result

    def cancel(self, reference, force):
        self.lost = force
        self.gate.set()


@pytest.fixture
def tasks(monkeypatch):
    made = Tasks()
    monkeypatch.setitem(sys.modules, "ray", made)
    yield made
    made.pool.shutdown()


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 2), (-1, 8)])
def test_ray_runs_as_many_tasks_at_a_time_as_there_are_workers(tasks, workers, most):
    with make_executor("ray", workers) as executor:
        tasks.gate.clear()
        futures = [executor.submit(divmod, k, 3) for k in range(16)]
        while tasks.now < most:
            time.sleep(0.01)
        assert futures[-1].cancel() is (workers != -1)
        tasks.gate.set()
        assert list(map_ordered(executor, int, range(4), in_flight=4)) == [0, 1, 2, 3]
        left = executor.submit(divmod, 7, 0)
    assert [future.result() for future in futures[:-1]] == [divmod(k, 3) for k in range(15)]
    assert isinstance(left.exception(0), ZeroDivisionError)
    assert tasks.most == most
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)


@pytest.mark.parametrize("wait", [True, False])
def test_a_shutdown_cancels_what_waits_and_what_runs_on_ray(tasks, wait):
    tasks.gate.clear()
    executor = make_executor("ray", 1)
    futures = [executor.submit(divmod, k, 3) for k in range(5)]
    while not tasks.now:
        time.sleep(0.01)
    executor.shutdown(wait=wait, cancel_futures=wait)
    with pytest.raises(WorkerDiedError, match="a Ray worker was lost: the node is gone$"):
        futures[0].result(60)
    assert [future.cancelled() for future in futures] == [False, True, True, True, True]


# --- which cluster
@pytest.fixture
def starts(monkeypatch, tmp_path):
    """What `ray.init` was given; nothing is started, and no cluster of this machine is seen."""
    given = []
    monkeypatch.setitem(
        sys.modules,
        "ray",
        types.SimpleNamespace(
            is_initialized=lambda: False, init=lambda address, **options: given.append((address, options))
        ),
    )
    monkeypatch.setattr(executors, "RAY_ANSWERS_SECONDS", 0.5)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return given


def note_cluster(tmp_path, address):
    """As `ray start` does."""
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)


@pytest.fixture
def closed():
    """A socket at a port where nothing answers until it listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


@pytest.fixture
def closed_port(closed):
    return closed.getsockname()[1]


def test_without_a_cluster_a_local_ray_is_started(starts):
    executors.connect_ray(3)
    ((where, options),) = starts
    assert (where, options["num_cpus"], options["include_dashboard"]) == ("local", 3, False)


def test_a_cluster_that_was_started_here_is_used(starts, tmp_path, closed, closed_port):
    closed.listen()
    note_cluster(tmp_path, f"127.0.0.1:{closed_port}")
    executors.connect_ray(3)
    ((where, options),) = starts
    assert where == f"127.0.0.1:{closed_port}"
    assert "num_cpus" not in options


def test_a_cluster_that_is_gone_is_not_waited_for(starts, tmp_path, caplog, closed_port):
    """A head node that was killed leaves its address behind, and `ray.init` tries it for twenty minutes."""
    note_cluster(tmp_path, f"127.0.0.1:{closed_port}")
    executors.connect_ray()
    assert starts[0][0] == "local"
    assert "is gone" in caplog.text


@pytest.mark.parametrize("named", ["127.0.0.1:{}", "localhost:{}", "auto", "127.0.0.1:65536", "head"])
def test_a_named_cluster_that_does_not_answer_is_an_error(starts, tmp_path, monkeypatch, named, closed_port):
    note_cluster(tmp_path, f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_ADDRESS", named.format(closed_port))
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is .* nothing answers at .*: start the cluster"):
        executors.connect_ray()
    assert not starts


def test_auto_without_any_cluster_is_an_error(starts, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="no cluster was started on this machine"):
        executors.connect_ray()


def test_a_named_cluster_that_is_just_starting_is_waited_for(starts, monkeypatch, closed, closed_port):
    monkeypatch.setattr(executors, "RAY_ANSWERS_SECONDS", 60.0)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    timer = threading.Timer(0.6, closed.listen)
    timer.start()
    executors.connect_ray()
    timer.join()
    assert len(starts) == 1


@pytest.mark.parametrize("named", ["local", "ray://head:10001"])
def test_other_names_are_left_to_ray(starts, monkeypatch, named):
    monkeypatch.setenv("RAY_ADDRESS", named)
    executors.connect_ray()
    assert starts[0][0] == named


# --- memory
@pytest.mark.parametrize(
    ("folder", "most", "used", "cache", "shared"),
    [
        (".", "memory.max", "memory.current", "file", "shmem"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    ],
)
def test_files_that_the_kernel_caches_do_not_count_as_memory_in_use(
    tmp_path, monkeypatch, folder, most, used, cache, shared
):
    machine = available_memory()
    monkeypatch.setattr(executors, "CGROUP", tmp_path)
    assert available_memory() > machine / 2
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / most).write_text("1000\n")
    (tmp_path / folder / used).write_text("900\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 200\n{cache} 600\n{shared} 50\n")
    assert available_memory() == 1000 - (900 - (600 - 50))  # shared memory cannot be given back
    (tmp_path / folder / most).write_text("max\n")
    assert available_memory() > machine / 2
