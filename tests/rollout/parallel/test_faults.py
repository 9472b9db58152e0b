"""Faults that come together, and what calls leave behind that were given up: each costs its own episode alone."""

import os
import socket
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future
from types import SimpleNamespace

import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, config

from shoal import envs
from shoal.core.errors import EngineError, WorkerDiedError, WorkerTimeoutError
from shoal.rollout.parallel import pool
from shoal.rollout.parallel.ray import Mailbox
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.transport import READ, Address, Ask, Hello, LinkLostError, SocketLink, frame
from shoal.rollout.samplers.sampler import Completion, Key, Request
from shoal.rollout.samplers.tokenizers import TinyTokenizer

BACKENDS = ("serial", "threads", "processes")


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


def request(member=0, turn=0, length=3):
    return Request(tuple(range(length)), Key(1, 0, 0, member, turn))


def play(backend, engine=None, env=None, **changes):
    with ParallelRolloutManager(config(**changes), engine or HashEngine(), backend=backend) as manager:
        if env is not None:
            manager._env_fns["Counter"] = env
        return manager.collect(4), manager.report


@pytest.fixture(scope="module")
def calm(_counter):
    return play("serial")[0]


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(calm, played, ends, status, turns):
    """The episodes of which `ends` says so have this status and so many turns; all others are as in calm."""
    assert len(played) == len(calm)
    for before, now in zip(calm, played, strict=True):
        if ends(now):
            assert (now.status, now.turns) == (status, before.turns[:turns]), now.error
        else:
            assert now == before


# --- answers and records that cannot be carried
class Odd(HashEngine):
    def _answer(self, request):
        answer = super()._answer(request)
        if (request.key.group, request.key.turn) == (1, 2):
            return Completion(answer.token_ids, answer.logprobs, "banana", 0)
        return answer


def test_an_answer_that_cannot_be_read_fails_its_request_alone_and_no_worker():
    with SharedLLMInferenceManager(Odd()) as shared:
        link = SocketLink(shared.serve())
        with pytest.raises(EngineError, match="banana|finish"):
            link.generate([Request((1,), Key(1, 0, 1, 0, 2))], timeout=100)
        assert link.generate([request()], timeout=100) == HashEngine().generate([request()])
        link.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_worker_and_no_env_is_blamed_for_what_the_engine_answers(calm, backend):
    played, report = play(backend, Odd())
    ended(calm, played, lambda t: t.group == 1, "engine_error", 2)
    assert report.worker_deaths == 0


class Fussy(TinyTokenizer):
    def decode(self, ids):
        text = super().decode(ids)
        if "three" in text:
            raise KeyError(f"no such token in {text}")
        return text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_that_cannot_decode_ends_its_episode_alone(calm, backend):
    engine = HashEngine()
    engine.tokenizer = Fussy(("one", "two", "three"))
    played, report = play(backend, engine)
    for before, now in zip(calm, played, strict=True):
        first = next((n for n, turn in enumerate(before.turns) if "three" in turn.response), None)
        if first is None:
            assert now == before
        else:
            assert (now.status, now.turns) == ("engine_error", before.turns[:first])
            assert "no such token" in now.error
    assert report.worker_deaths == 0


class OddPicture(CounterEnv):
    """Names its picture by half a character, which no file can hold."""

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, ({**info, "image": "\ud800"} if self._faulty else info)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_episode_whose_record_cannot_be_written_is_still_counted(backend):
    played, report = play(backend, env=OddPicture)
    lost = [t for t in played if t.env_seed % 4 == 0]
    assert 0 < len(lost) < len(played) == 16
    assert all(t.status == "env_error" and "cannot be written" in t.error for t in lost)
    assert all(t.status == "ok" for t in played if t.env_seed % 4)
    assert report.worker_deaths == 0


# --- waits have an end
def test_an_engine_that_reads_nothing_is_given_up_in_time(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "deaf"))
        listener.listen()
        link = SocketLink(Address(str(tmp_path / "deaf"), b"x"))
        clock = time.monotonic()
        with pytest.raises(TimeoutError, match="in time"):
            link.generate([request(length=2_000_000)], timeout=0.3)
        with pytest.raises(LinkLostError):  # half a request was sent: nothing can follow it
            link.generate([request()], timeout=100)
        with pytest.raises(LinkLostError):
            link.left(request().key)
        assert time.monotonic() - clock < 60
        link.close()


def test_an_engine_that_hangs_without_a_limit_of_its_own_is_no_reason_to_wait_for_ever():
    release = threading.Event()

    with SharedLLMInferenceManager(HashEngine(lambda _: release.wait(60)), request_timeout=0.5) as shared:
        replies = []
        shared.submit("somebody", [request(9)], lambda *reply: replies.append(reply))
        for member in range(2):
            with pytest.raises(TimeoutError, match="no answer within 0.5 s"):
                shared.generate([request(member)])
        release.set()
        until(lambda: shared._running is None)
        assert [type(result) for _, result in replies] == [TimeoutError]  # and no late answer behind it
        shared._request_timeout = None  # what is asked now is answered, however busy the machine is
        assert shared.generate([request(2)]) == HashEngine().generate([request(2)])


def test_a_request_that_was_given_up_is_not_asked_of_the_engine():
    gate = threading.Semaphore(0)

    class Gated(HashEngine):
        seen: list[int]

        def generate(self, requests):
            gate.acquire(timeout=100)
            self.seen += [r.key.member for r in requests]
            return super().generate(requests)

    engine = Gated()
    engine.seen = []
    with SharedLLMInferenceManager(engine) as shared:
        answers = []
        shared.submit("first", [request(0)], lambda *_: answers.append(_))
        until(lambda: shared._running is not None)
        with pytest.raises(TimeoutError, match="did not answer within 0.1 s"):
            shared.generate([request(1)], timeout=0.1)
        until(lambda: not len(shared._batcher))
        gate.release(9)
        shared.generate([request(2)], timeout=100)
    assert engine.seen == [0, 2]


def test_a_worker_that_asks_more_than_is_read_counts_as_alive(monkeypatch):
    """What it says is not read meanwhile, its signs of life neither."""
    killed, looked = [], threading.Semaphore(0)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))

    def connections():
        return list(shared._connections._by_descriptor.values())

    def look():
        for connection in connections():
            connection.since -= 100  # for so long it was not read
        shared._connections.sweep(time.monotonic())
        looked.release()

    def answer(requests):
        if requests[0].key.turn < 3:  # more was asked
            until(lambda: not any(connection.events & READ for connection in connections()))
            shared._post(look)
            assert looked.acquire(timeout=60)

    with SharedLLMInferenceManager(HashEngine(answer), silence=50.0, max_pending=1, max_batch=1) as shared:
        link = SocketLink(shared.serve())
        many = tuple(range(2**33, 2**33 + 7_000))  # of nine bytes each
        asked = [Request(many, Key(1, 0, 0, 0, turn)) for turn in range(4)]
        assert link.generate(asked, timeout=60) == HashEngine().generate(asked)
        link.close()
    assert killed == []


def test_a_worker_is_not_killed_because_the_machine_stood_still(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with SharedLLMInferenceManager(HashEngine(), silence=5.0) as shared:
        link = SocketLink(shared.serve())
        assert link.generate([request(1)], timeout=100) == HashEngine().generate([request(1)])
        shared._post(lambda: shared._keep_time(time.monotonic() + 100))  # as it is after Ctrl-Z and `fg`
        assert link.generate([request(2)], timeout=100) == HashEngine().generate([request(2)])
        link.close()
    assert killed == []


def test_the_clock_of_a_silent_worker_process_stands_still_with_us(monkeypatch):
    now, process = [0.0], object.__new__(pool._Process)
    process.pid, process.alive, process.end = 1, lambda: True, lambda: None
    process._heartbeat_timeout, process._heard, process._looked = 5.0, 0.0, 0.0
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for passed in (0.1, 100.0, 0.5, 60.0, *[0.5] * 8):
        now[0] += passed
        process._check()
    now[0] += 0.5
    with pytest.raises(WorkerTimeoutError, match="no sign of life for 5 s"):
        process._check()


# --- two faults at once
@pytest.mark.flaky(reruns=2)
def test_a_worker_that_dies_while_the_engine_hangs_costs_time_and_no_episode(calm, tmp_path):
    class HangsOnce(HashEngine):
        hung = threading.Event()

        def generate(self, requests):
            if not self.hung.is_set() and any(r.key.turn == 2 for r in requests):
                self.hung.set()
                time.sleep(3)
            return super().generate(requests)

        def restart(self):
            pass

    for schedule in ("greedy", "barrier"):
        HangsOnce.hung.clear()
        settings = {"schedule": schedule, "engine_timeout": 0.5, "max_deaths": 9}
        played, report = play(
            "processes", HangsOnce(), parallel=settings, fault="kill", once=str(tmp_path / schedule)
        )
        assert played == calm
        assert report.worker_deaths >= 1


def test_an_engine_that_fails_while_a_connection_is_closed_half_way_fails_nobody_else():
    def fail(requests):
        if any(r.key.member == 7 for r in requests):
            time.sleep(0.2)
            raise EngineError("not this one")

    with SharedLLMInferenceManager(HashEngine(fail)) as shared:
        address = shared.serve()
        for cut in (0, 1, 30):
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(address.path)
                data = frame(Ask(0, request(7))) + frame(Ask(1, request(8)))
                gone.sendall(frame(Hello(address.token, 1)) + data[: len(data) - cut])
            link = SocketLink(address)
            assert link.generate([request(1), request(2)], timeout=100)
            with pytest.raises(EngineError, match="not this one"):
                link.generate([request(7)], timeout=100)
            link.close()
        until(lambda: not shared._connections._by_descriptor)
        assert not len(shared._batcher)


def test_it_may_be_closed_by_who_gets_an_answer():
    refused, closed = [], []
    shared = SharedLLMInferenceManager(HashEngine(), max_batch=1)
    done = threading.Event()
    shared.submit("a", [request(0)], lambda _, result: closed.append((shared.close(), type(result))))
    try:
        shared.submit("b", [request(1)], lambda _, result: (refused.append(result), done.set()))
    except EngineError:
        done.set()
    assert done.wait(60)
    shared._thread.join(60)
    assert not shared._thread.is_alive()
    assert closed == [(None, Completion)]
    with pytest.raises(EngineError, match="closed"):
        shared.generate([request(2)])


def test_an_asker_whose_answer_ends_the_thread_ends_nothing_else():
    def leave(*_):
        raise SystemExit("enough")

    with SharedLLMInferenceManager(HashEngine()) as shared:
        shared.submit("somebody", [request()], leave)
        assert shared.generate([request(1)], timeout=100) == HashEngine().generate([request(1)])


def test_the_engine_and_not_the_env_is_blamed_where_the_way_to_it_is_lost_again_and_again(calm):
    settings = config(parallel={"max_deaths": 1})
    with ParallelRolloutManager(settings, HashEngine(), backend="processes") as manager:
        shared = manager.inference
        hear = shared._connections._on_message

        def drop(connection, message):
            if isinstance(message, Ask) and (message.request.key.group, message.request.key.turn) == (3, 1):
                shared._connections.drop(connection)
            elif connection.open:
                hear(connection, message)

        shared._connections._on_message = drop
        played = manager.collect(4)
    ended(calm, played, lambda t: t.group == 3, "engine_error", 0)
    assert "connection" in played[6].error


def test_an_engine_whose_own_worker_is_late_ends_episodes_and_not_the_rollout(calm):
    class Late(HashEngine):
        def _answer(self, request):
            return (
                WorkerTimeoutError("its replica is late")
                if request.key.group == 2
                else super()._answer(request)
            )

        def generate_each(self, requests):
            return self.generate(requests)

    for backend in BACKENDS:
        ended(calm, play(backend, Late())[0], lambda t: t.group == 2, "timeout", 0)


# --- envs that are kept
class Counted(CounterEnv):
    made = os.devnull

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with open(self.made, "a") as file:
            file.write("x")


@pytest.mark.parametrize("backend", ["serial", "threads", "processes"])
def test_envs_made_by_functions_that_travel_by_value_are_kept_and_used_again(backend, tmp_path):
    made = str(tmp_path / "made")
    with ParallelRolloutManager(
        config(groups=4, members=1, parallel={"keep_envs": True}), HashEngine(), backend=backend
    ) as manager:
        manager._env_fns["Counter"] = _named_file(made)
        for iteration in range(4):
            assert all(t.status == "ok" for t in manager.collect(iteration))
    assert len((tmp_path / "made").read_text()) == (1 if backend == "serial" else 4)


def _named_file(made):
    class Here(Counted):
        pass

    Here.made = made
    return lambda: Here()


# --- a Ray whose node here is gone
class RayDiedError(WorkerDiedError, BrokenExecutor):
    pass


class GoneRay(Executor):
    """A Ray whose part on this machine was killed: each task ends so."""

    made = 0

    def __init__(self, options):
        GoneRay.made += 1

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_exception(RayDiedError("a Ray worker was lost: the task's local raylet died"))
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


def test_a_mailbox_that_ray_ends_is_known_to_be_gone(caplog):
    def exchange():
        raise SystemExit(0)  # what Ray raises in threads that wait when it is shut down

    box = object.__new__(Mailbox)
    box._closed, box._exchange = False, exchange
    box._carry()
    assert box.gone
    assert "the mailbox of the rollout is gone" in caplog.text


class NoMailbox:
    """Its place on that Ray."""

    ticket, gone = None, False

    def __init__(self, inference):
        pass

    def close(self):
        pass


def test_a_ray_that_is_gone_from_this_machine_costs_no_episode(calm, monkeypatch):
    monkeypatch.setattr("shoal.rollout.parallel.pool.RayExecutor", GoneRay)
    monkeypatch.setattr(GoneRay, "made", 0)
    monkeypatch.setattr("shoal.rollout.parallel.ray.Mailbox", NoMailbox)
    with ParallelRolloutManager(config(n_jobs=2), HashEngine(), backend="ray") as manager:
        for n in range(1, 3):  # each rollout tries another Ray first
            assert manager.collect(4) == calm
            assert GoneRay.made == n
            assert (manager.report.worker_deaths, manager.report.replayed_episodes) == (2, len(calm))
