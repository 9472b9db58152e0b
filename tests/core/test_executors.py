import concurrent.futures
import pickle
import socket
import sys
import threading
import time
import types
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import ClassVar

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import executors
from shoal.core.errors import ConfigError, WorkerDiedError, WorkerError
from shoal.core.executors import RayExecutor, SerialExecutor, enter_ray, leave_ray, make_executor, map_ordered


def square(x):
    return x * x


def fail_on_three(x):
    if x == 3:
        raise KeyError("three")
    return x


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_every_executor_gives_the_results_of_a_plain_loop(backend):
    with make_executor(backend, 2) as executor:
        assert list(map_ordered(executor, square, range(37))) == [x * x for x in range(37)]


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_an_exception_comes_out_where_its_result_would_have(backend):
    with make_executor(backend, 2) as executor:
        results = map_ordered(executor, fail_on_three, range(9))
        assert [next(results), next(results), next(results)] == [0, 1, 2]
        with pytest.raises(KeyError, match="three"):
            next(results)


class UnreadableError(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class UnsendableError(Exception):
    def __init__(self):
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class SpeechlessError(Exception):
    def __str__(self):
        raise SystemExit(5)

    def __reduce__(self):
        raise SystemExit(5)


ODD = {
    1: (UnreadableError, ("the server", "it is gone"), "UnreadableError: the server: it is gone"),
    3: (UnsendableError, (), "UnsendableError: it holds a lock"),
    5: (SpeechlessError, (), "SpeechlessError: its message raises SystemExit"),
    7: (SystemExit, (3,), ""),
    9: (KeyboardInterrupt, (), ""),
}


def raise_at(x, odd):
    if x in odd:
        kind, args, _ = odd[x]
        raise kind(*args)
    return x


@pytest.mark.parametrize(
    "backend", ["process", "loky", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_an_exception_that_cannot_be_sent_or_read_is_told_in_words_and_fails_its_task_alone(backend):
    with make_executor(backend, 2) as executor:
        futures = [executor.submit(raise_at, x, ODD) for x in range(11)]
        errors = {x: future.exception(60) for x, future in enumerate(futures)}
    assert [x for x, error in errors.items() if error is not None] == list(ODD)
    assert {x: str(errors[x]) for x in (1, 3, 5)} == {x: ODD[x][2] for x in (1, 3, 5)}
    assert {type(errors[x]) for x in (1, 3, 5)} == {WorkerError}
    assert (type(errors[7]), errors[7].code, type(errors[9])) == (SystemExit, 3, KeyboardInterrupt)


class HarmfulError(Exception):
    """Harms whoever reads it."""

    harmed: ClassVar[list[int]] = []

    def __reduce__(self):
        return HarmfulError.harm, ()

    @staticmethod
    def harm():
        HarmfulError.harmed.append(1)
        raise SystemExit


def test_an_exception_that_harms_whoever_reads_it_is_read_by_its_sender_alone():
    sent = pickle.dumps(executors.Sent(HarmfulError("words")))
    assert HarmfulError.harmed == [1]
    assert type(pickle.loads(sent)) is WorkerError
    assert HarmfulError.harmed == [1]


class Reduces:
    """Raises when it is sent, or when it is read."""

    def __init__(self, error, *, sent):
        self.error, self.sent = error, sent

    def __reduce__(self):
        if self.sent:
            raise self.error
        return raise_it, (self.error,)


def raise_it(error):
    raise error


def give_odd(x, kind):
    return x if x % 2 else Reduces(kind(f"item {x}"), sent=x % 4 == 0)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
@pytest.mark.parametrize(
    "backend", ["process", "loky", "tasks", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_tasks_and_results_that_cannot_be_sent_or_read_fail_alone(backend, kind, request):
    if backend == "tasks":  # a stand-in for Ray
        backend = request.getfixturevalue(backend) and "ray"
    with make_executor(backend, 2) as executor:
        futures = [executor.submit(give_odd, x, kind) for x in range(6)]
        errors = [future.exception(60) for future in futures]
        asked = executor.submit(square, Reduces(ValueError("of a task"), sent=True))
        read = executor.submit(square, Reduces(kind("of a task"), sent=False))
        told = [future.exception(60) for future in (asked, read)]
        assert executor.submit(square, 3).result(60) == 9
    assert [futures[x].result() for x in (1, 3, 5)] == [1, 3, 5]
    said = [None if error is None else (type(error), str(error)) for error in errors]
    unread = f"the result of this task cannot be read here: {kind.__name__}: item 2"
    assert said == [(kind, "item 0"), None, (WorkerError, unread), None, (kind, "item 4"), None]
    assert [(type(error), str(error)) for error in told] == [(ValueError, "of a task"), (kind, "of a task")]


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


def test_a_pool_whose_last_task_was_cancelled_ends():
    executor = make_executor("process", 1)
    assert executor.submit(square, 3).result() == 9
    for _ in range(3):
        executor.submit(square, 4).cancel()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        executor.submit(square, 5)


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
    with pytest.raises(TypeError, match="workers must be a whole number, got"):
        make_executor("thread", workers)


def test_an_executor_on_ray_refuses_a_senseless_number_of_workers_before_ray_is_started():
    for workers in (0, -1):  # with 0 it would wait for ever
        with pytest.raises(
            ValueError, match=f"at least 1, or None for as many as .* room for, got {workers}"
        ):
            RayExecutor(workers=workers)
    with pytest.raises(TypeError, match=r"workers must be a whole number, got 1\.5"):
        RayExecutor(workers=1.5)


def test_an_unknown_backend_is_named_with_the_closest_one():
    with pytest.raises(ValueError, match="Did you mean 'thread'"):
        make_executor("threads")


class FakeRay:
    """Counts what is done to it; each session has a job of its own."""

    gcs_address = "127.0.0.1:1"  # nobody answers there

    def __init__(self):
        self.job, self.running, self.shutdowns = 0, False, 0

    def is_initialized(self):
        return self.running

    def connect(self, *, wanted_by="Ray"):
        started = not self.running
        self.job += started
        self.running = True
        return self, started

    def get_runtime_context(self):
        return self

    def get_job_id(self):
        return self.job

    def get_node_id(self):
        return "here"

    def shutdown(self):
        self.running = False
        self.shutdowns += 1


@pytest.fixture
def fake_ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(executors, "connect_ray", fake.connect)
    yield fake
    assert not executors._SESSIONS


def test_a_ray_that_was_started_here_ends_with_its_last_user(fake_ray):
    executor = make_executor("ray")
    _, session = enter_ray()
    executor.shutdown()
    executor.shutdown()  # twice is once
    assert fake_ray.running
    leave_ray(session)
    assert (fake_ray.running, fake_ray.shutdowns) == (False, 1)


def test_a_ray_of_somebody_else_is_left_alone(fake_ray):
    fake_ray.connect()
    with make_executor("ray"):
        pass
    assert fake_ray.shutdowns == 0
    fake_ray.shutdown()
    _, mine = enter_ray()
    fake_ray.shutdown()
    fake_ray.connect()  # another session by now
    leave_ray(mine)
    assert fake_ray.shutdowns == 2


def test_a_session_of_ray_ends_with_the_head_of_its_cluster(fake_ray, monkeypatch, caplog):
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(executors, "HEAD_SECONDS", 1.0)
    ended = threading.Event()
    monkeypatch.setattr(fake_ray, "shutdown", lambda: (FakeRay.shutdown(fake_ray), ended.set()))
    with socket.create_server(("127.0.0.1", 0)) as head:
        fake_ray.gcs_address = f"127.0.0.1:{head.getsockname()[1]}"
        sessions = [enter_ray()[1], enter_ray()[1]]
        for _ in range(5):  # a head that answers is looked at again and again
            head.accept()[0].close()
        assert fake_ray.running
    assert ended.wait(60)
    for session in sessions:
        leave_ray(session)
    assert fake_ray.shutdowns == 1
    assert "the head of the Ray cluster at 127.0.0.1" in caplog.text


def test_a_session_that_began_meanwhile_is_not_ended_for_one_whose_head_is_gone(fake_ray, monkeypatch):
    knocks = []

    def knock(*_):
        knocks.append(1)
        if len(knocks) > 1:
            fake_ray.job += 1  # somebody ends the session and begins another
            raise OSError

    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(executors, "HEAD_SECONDS", -1.0)
    monkeypatch.setattr(executors, "_knock", knock)
    _, session = enter_ray()
    for thread in threading.enumerate():
        if thread.name.startswith("shoal-ray-head"):
            thread.join(60)
    assert len(knocks) == 2
    assert fake_ray.shutdowns == 0
    leave_ray(session)


def test_a_head_that_never_answered_from_here_says_nothing(fake_ray, monkeypatch):
    monkeypatch.setattr(executors, "HEAD_SECONDS", -1.0)
    _, session = enter_ray()
    for thread in threading.enumerate():
        if thread.name.startswith("shoal-ray-head"):
            thread.join(60)
    assert fake_ray.running
    leave_ray(session)


class Tasks:
    """Ray's tasks as threads of this process; counts how many run at a time."""

    class exceptions:  # noqa: N801
        RayError = RayTaskError = type("RayError", (Exception,), {})

    def __init__(self):
        self.pool, self.lock, self.now, self.most = ThreadPoolExecutor(8), threading.Lock(), 0, 0
        self.thread = ThreadPoolExecutor(1)  # which tells results, and without which nothing is handed over
        self.cancelled, self.deaf, self.gate = 0, False, threading.Event()
        self.gate.set()  # without it tasks begin and do not end

    def options(self, **_):
        return self

    def cancel(self, reference, force):
        self.cancelled += force

    def __call__(self, function):
        def run(*args):
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                assert self.gate.wait(60)
                return function(*args)
            except BaseException as error:
                raise pickle.loads(pickle.dumps(error)) from None  # as it arrives from another process
            finally:
                with self.lock:
                    self.now -= 1

        def tell(told, ended):
            if (error := ended.exception()) is not None:
                told.set_exception(error)
            else:
                told.set_result(ended.result())

        def remote(*args):
            self.thread.submit(time.sleep, 0.001).result(60)
            future, told = self.pool.submit(run, *args), Future()
            if not self.deaf:
                future.add_done_callback(lambda ended: self.thread.submit(tell, told, ended))
            return types.SimpleNamespace(future=lambda: told)

        return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=remote))


@pytest.fixture
def tasks(fake_ray):
    fake_ray.remote = made = Tasks()
    fake_ray.exceptions, fake_ray.cancel = Tasks.exceptions, made.cancel
    fake_ray.cloudpickle = cloudpickle
    yield made
    made.pool.shutdown()
    made.thread.shutdown()


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


def test_tasks_that_wait_for_ray_are_cancelled_with_those_that_run(tasks, fake_ray, monkeypatch):
    def cancel(reference, force):
        tasks.cancel(reference, force)
        tasks.gate.set()

    monkeypatch.setattr(fake_ray, "cancel", cancel)
    tasks.gate.clear()
    executor = make_executor("ray", 1)
    futures = [executor.submit(divmod, k, 3) for k in range(5)]
    executor.shutdown(cancel_futures=True)
    assert [future.cancelled() for future in futures] == [False, True, True, True, True]
    assert tasks.cancelled == 1
    assert futures[0].result() == (0, 0)


class FalsyError(Exception):
    """An error of a list of problems, say, that holds none."""

    def __len__(self):
        return 0


def fail_falsely():
    raise FalsyError


@pytest.mark.parametrize("backend", ["thread", "loky", "tasks"])
def test_an_exception_that_counts_as_false_is_an_exception(backend, request):
    if backend == "tasks":  # a stand-in for Ray
        backend = request.getfixturevalue(backend) and "ray"
    with make_executor(backend, 1) as executor:
        assert isinstance(executor.submit(fail_falsely).exception(60), FalsyError)


def test_nobody_waits_for_a_task_that_the_end_of_ray_cut_off(tasks):
    tasks.gate.clear()
    executor = make_executor("ray", 1)
    running, waiting = executor.submit(divmod, 7, 2), executor.submit(divmod, 7, 3)
    executor.shutdown(wait=False)
    assert isinstance(running.exception(60), WorkerDiedError)
    tasks.gate.set()
    assert waiting.cancelled()
    executor.shutdown()
    assert tasks.cancelled == 1


@pytest.mark.parametrize("again", [False, True])
def test_nobody_waits_for_tasks_of_a_session_of_ray_that_others_shut_down(
    tasks, fake_ray, monkeypatch, again
):
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.02)
    tasks.deaf = True  # Ray says nothing more of its tasks then
    executor = make_executor("ray", 2)
    futures = [executor.submit(divmod, 7, 3) for _ in range(4)]
    fake_ray.shutdown()
    if again:
        fake_ray.connect()
    for future in [*futures, executor.submit(divmod, 7, 3)]:
        error = future.exception(60)
        assert isinstance(error, WorkerDiedError)
        assert isinstance(error, BrokenExecutor)
    executor.shutdown()
    assert fake_ray.running is again


def test_who_hears_that_a_task_of_ray_could_not_be_sent_may_submit_another(tasks, monkeypatch):
    def refused(*_):
        raise TypeError("cannot be sent")

    with make_executor("ray", 1) as executor:
        tasks.gate.clear()
        first, unsent = executor.submit(divmod, 7, 1), executor.submit(divmod, 7, 3)
        remote = executor._ray.remote
        bad = types.SimpleNamespace(remote=refused)
        monkeypatch.setattr(executor._ray, "remote", lambda _: types.SimpleNamespace(options=lambda **_: bad))
        other = Future()

        def instead(_):
            monkeypatch.setattr(executor._ray, "remote", remote)
            other.set_result(executor.submit(divmod, 7, 2))

        unsent.add_done_callback(instead)
        tasks.gate.set()
        assert other.result(60).result(60) == (3, 1)
        assert isinstance(unsent.exception(), TypeError)
        assert first.result() == (7, 0)


# --- which cluster
@pytest.fixture
def starts(monkeypatch, tmp_path):
    """What `ray.init` was given; nothing is started, and no cluster of this machine is seen."""
    ray = pytest.importorskip("ray")
    from ray._private import services

    given = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *args, **options: given.append((*args, options)))
    monkeypatch.setattr(services, "find_gcs_addresses", dict)
    monkeypatch.setattr(executors, "RAY_ANSWERS_SECONDS", 0.5)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return given


def note_cluster(tmp_path, address):
    """As `ray start` does."""
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


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
    assert executors.connect_ray(3)[1]
    ((where, options),) = starts
    assert (where, options["num_cpus"]) == ("local", 3)


def test_a_cluster_that_was_started_here_is_used(starts, tmp_path, port):
    note_cluster(tmp_path, f"127.0.0.1:{port}")
    executors.connect_ray(3)
    ((options,),) = starts
    assert "num_cpus" not in options


def test_a_cluster_that_is_gone_is_not_waited_for(starts, tmp_path, caplog, closed_port):
    """A head node that was killed leaves its address behind, and `ray.init` tries it for twenty minutes."""
    note_cluster(tmp_path, f"127.0.0.1:{closed_port}")
    executors.connect_ray()
    assert starts[0][0] == "local"
    assert "is gone" in caplog.text


@pytest.mark.parametrize("named", ["127.0.0.1:{}", "localhost:{}", "auto"])
def test_a_named_cluster_that_does_not_answer_is_an_error(starts, tmp_path, monkeypatch, named, closed_port):
    note_cluster(tmp_path, f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_ADDRESS", named.format(closed_port))
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS .* nothing answers at .*{closed_port}"):
        executors.connect_ray()
    assert not starts


@pytest.mark.parametrize("named", ["127.0.0.1:65536", "head:99999", "head:0", "ray://head:100001", "auto"])
def test_a_port_that_no_cluster_can_have_is_an_error(starts, tmp_path, monkeypatch, named):
    note_cluster(tmp_path, "127.0.0.1:65536")
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is .*: its port must be from 1 to 65535, got \d+"):
        executors.connect_ray()
    assert not starts


def test_a_port_that_cannot_be_is_passed_over_where_nobody_named_it(starts, tmp_path, caplog):
    note_cluster(tmp_path, "127.0.0.1:65536")
    executors.connect_ray()
    assert starts[0][0] == "local"
    assert "no Ray cluster can be at 127.0.0.1:65536" in caplog.text


def test_auto_without_any_cluster_is_an_error(starts, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="no Ray cluster runs here"):
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
    assert (starts[0][0] == "local") is (named == "local")
