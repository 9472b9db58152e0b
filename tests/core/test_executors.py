import socket
import subprocess
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
from shoal.core.executors import (
    RayExecutor,
    SerialExecutor,
    available_cpus,
    available_memory,
    make_executor,
    map_ordered,
)


def square(x):
    return x * x


def fail_on_three(x):
    if x == 3:
        raise KeyError("three")
    return x


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_every_executor_gives_the_results_of_a_plain_loop_and_exceptions_in_their_place(backend):
    with make_executor(backend, 2) as executor:
        assert list(map_ordered(executor, square, range(37))) == [x * x for x in range(37)]
        results = map_ordered(executor, fail_on_three, range(9))
        assert [next(results), next(results), next(results)] == [0, 1, 2]
        with pytest.raises(KeyError, match="three"):
            next(results)


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


@pytest.mark.parametrize(
    "make", [lambda workers: make_executor("thread", workers), lambda workers: RayExecutor(workers=workers)]
)
def test_a_senseless_number_of_workers_is_refused_before_anything_is_started(make):
    for workers in (0, -2):  # with 0 Ray would wait for ever
        with pytest.raises(ValueError, match=f"at least 1.*, got {workers}"):
            make(workers)
    for workers in (1.5, float("nan"), "2"):
        with pytest.raises(TypeError):
            make(workers)


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
def starts(monkeypatch):
    """What `ray.init` was given; nothing is started."""
    given = []
    monkeypatch.setitem(
        sys.modules,
        "ray",
        types.SimpleNamespace(
            is_initialized=lambda: False, init=lambda address, **options: given.append((address, options))
        ),
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return given


def test_a_named_cluster_is_used_where_something_answers(starts, monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        named = f"127.0.0.1:{held.getsockname()[1]}"
        for silent in ("127.0.0.1:65536", "head:port", named):
            monkeypatch.setenv("RAY_ADDRESS", silent)
            with pytest.raises(
                ConfigError, match=r"RAY_ADDRESS is .* nothing answers there .*: start the cluster"
            ):
                executors.connect_ray(3)
        assert not starts
        held.listen()
        executors.connect_ray(3)
    ((where, options),) = starts
    assert where == named
    assert "num_cpus" not in options


@pytest.mark.parametrize("named", [None, "local", "auto", "ray://head:10001"])
def test_other_names_are_left_to_ray_and_without_one_a_local_ray_is_started(starts, monkeypatch, named):
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    executors.connect_ray(3)
    ((where, options),) = starts
    assert where == (named or "local")
    of_a_local_one = {key: options[key] for key in ("num_cpus", "include_dashboard") if key in options}
    assert of_a_local_one == ({"num_cpus": 3, "include_dashboard": False} if where == "local" else {})


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


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({}, 64),
    ],
    ids=str,
)
def test_a_container_with_a_quota_has_as_many_cores(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(executors, "CGROUP", tmp_path)
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda _: range(64), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cpus() == cores


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("RPC error: InvalidAuthToken", "wants a token.*RAY_AUTH_MODE=token"),
        ("no node", "Failed.*ray status"),
    ],
)
def test_a_cluster_that_cannot_be_joined_says_why(starts, monkeypatch, cause, told):
    def refused(address, **options):
        raise ConnectionError("Failed to connect") from RuntimeError(cause)

    monkeypatch.setattr(sys.modules["ray"], "init", refused)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is 'auto', and Ray cannot join.*{told}"):
        executors.connect_ray()


def test_an_address_without_a_port_and_a_local_ray_that_does_not_start_are_explained(starts, monkeypatch):
    def late(address, **options):
        raise Exception("The current node timed out during startup.")  # as Ray raises it

    monkeypatch.setattr(sys.modules["ray"], "init", late)
    with pytest.raises(ConfigError, match="local Ray did not start: The current node timed out.*busy"):
        executors.connect_ray()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is '127.0.0.1': write HOST:PORT, such as"):
        executors.connect_ray()


def test_a_program_need_not_guard_what_it_does(tmp_path):
    program = tmp_path / "bare.py"
    program.write_text(
        "from shoal.core.executors import make_executor\n"
        "def twice(x):\n    return 2 * x\n"
        "with make_executor('process', 1) as pool:\n"
        "    print(list(pool.map(twice, [1, 2])), pool.submit(lambda: 'three').result())\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[2, 4] three\n", done.stderr
