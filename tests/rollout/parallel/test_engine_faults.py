"""What may go wrong around a shared engine: odd answers, reports, connections and descriptors."""

import contextlib
import os
import resource
import threading
import time

import numpy as np
import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, config

from shoal import envs
from shoal.core.errors import EngineError
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.transport import Ask, SocketLink
from shoal.rollout.samplers.sampler import Completion, Key, Request

BACKENDS = ("serial", "threads", "processes")


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


def request(member=0):
    return Request((1, 2, 3), Key(1, 0, 0, member, 0))


def play(backend, engine=None, **changes):
    with ParallelRolloutManager(config(**changes), engine or HashEngine(), backend=backend) as manager:
        return manager.collect(4)


@pytest.fixture(scope="module")
def calm(_counter):
    return play("serial")


class NumpyEngine(HashEngine):
    def _answer(self, request):
        plain = super()._answer(request)
        ids, logprobs = np.array(plain.token_ids), np.array(plain.logprobs)
        if request.key.member:
            ids, logprobs = tuple(ids), list(logprobs)
        return Completion(ids, logprobs, plain.finish, np.int64(plain.weights_version))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_may_answer_in_numbers_of_numpy(calm, backend):
    assert play(backend, NumpyEngine()) == calm


class OddEngine(HashEngine):
    odd = None

    def _answer(self, request):
        return self.odd if (request.key.group, request.key.turn) == (1, 2) else super()._answer(request)


class Refusing(OddEngine):
    """One whose answers may be exceptions."""

    def generate_each(self, requests):
        return self.generate(requests)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("odd", [None, "text", Completion(None, (), "stop"), Completion(("a",), (), "stop")])
def test_an_answer_that_is_none_ends_its_episode_alone(calm, backend, odd):
    engine = OddEngine()
    engine.odd = odd
    for before, now in zip(calm, play(backend, engine), strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == ("engine_error", before.turns[:2])
        else:
            assert now == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_the_place_of_an_answer_ends_its_episode_alone(calm, backend):
    engine = Refusing()
    engine.odd = ConnectionError("caf\udce9")
    for before, now in zip(calm, play(backend, engine), strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == ("engine_error", before.turns[:2])
            assert "ConnectionError" in now.error
        else:
            assert now == before


class SpeechlessError(Exception):
    def __str__(self):
        raise SystemExit(5)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("error", [SpeechlessError, KeyboardInterrupt])
def test_whatever_an_engine_raises_of_itself_ends_the_episode_alone_that_it_is_about(calm, backend, error):
    def before(requests):
        if any((r.key.group, r.key.turn) == (1, 2) for r in requests):
            raise error

    for usual, now in zip(calm, play(backend, HashEngine(before)), strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == ("engine_error", usual.turns[:2])
            assert error.__name__ in now.error
        else:
            assert now == usual


def test_an_answer_that_cannot_be_sent_fails_alone():
    def reply(number, result):
        if isinstance(result, Completion):
            raise TypeError("cannot be sent")
        refused.append(result)

    refused = []
    with SharedLLMInferenceManager(HashEngine()) as shared:
        shared.submit("somebody", [request()], reply)
        assert len(shared.generate([request()])) == 1
    assert "cannot be sent" in str(refused[0])


def test_what_is_done_with_a_report_may_fail():
    def fail(asker, report):
        raise OSError("no space left")

    with SharedLLMInferenceManager(HashEngine(), on_report=fail) as shared:
        shared.left(request().key, b"report")
        assert len(shared.generate([request()])) == 1


def test_when_the_thread_of_the_engine_fails_nobody_waits_for_it():
    failures = []

    def ask(link):
        try:
            link.generate([request()])
        except EngineError as error:
            failures.append(str(error))

    shared = SharedLLMInferenceManager(HashEngine(), schedule="barrier")
    link = SocketLink(shared.serve())
    shared.entered([request(member).key for member in range(9)])
    threads = [threading.Thread(target=ask, args=(way,), daemon=True) for way in (shared, shared, link, link)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    with shared._lock:
        shared._inbox.extend([lambda: 1 / 0] * 2)  # at the second it is ending already
    shared._connections.ring()
    for thread in threads:
        thread.join(60)
    assert len(failures) == 4
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        shared.generate([request()])
    assert shared.failed
    shared.close()
    link.close()


def test_who_connects_while_no_descriptor_is_free_only_waits():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = []
    with SharedLLMInferenceManager(HashEngine()) as shared:
        address = shared.serve()
        most = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 9, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    used.append(os.open(os.devnull, os.O_RDONLY))
            os.close(used.pop())
            link = SocketLink(address)  # the last descriptor: nothing is left for the other side
            time.sleep(0.3)
        finally:
            for descriptor in used:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert link.generate([request()], timeout=60) == HashEngine().generate([request()])
        link.close()


def test_a_socket_that_could_not_be_made_is_made_the_next_time(monkeypatch):
    from shoal.rollout.parallel import transport

    with SharedLLMInferenceManager(HashEngine()) as shared:
        with monkeypatch.context() as patch:
            patch.setattr(transport.Path, "chmod", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                shared.serve()
        link = SocketLink(shared.serve())
        assert len(link.generate([request()], timeout=60)) == 1
        link.close()


@pytest.mark.parametrize("schedule", ["adaptive", "barrier"])
def test_a_connection_that_is_lost_costs_no_episode(calm, schedule):
    settings = config(parallel={"schedule": schedule})
    with ParallelRolloutManager(settings, HashEngine(), backend="processes") as manager:

        def lose(connection, message):
            if not lost and isinstance(message, Ask) and message.request.key.turn == 2:
                lost.extend(connections._by_descriptor.values())
                for each in lost:
                    connections.drop(each)
            elif connection.open:
                hear(connection, message)

        lost = []
        manager.collect(3)
        connections = manager.inference._connections
        hear, connections._on_message = connections._on_message, lose
        assert manager.collect(4) == calm
        assert lost
        assert manager.report.worker_deaths > 0


def test_who_asks_while_it_closes_gets_an_answer():
    """Between the look whether it is closed and the request, it may close."""
    for _ in range(200):
        shared = SharedLLMInferenceManager(HashEngine())
        ended = threading.Event()

        def ask(shared=shared, ended=ended):
            with contextlib.suppress(EngineError):
                while True:
                    shared.generate([request()])
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.002)
        shared.close()
        assert ended.wait(60)


def test_lockstep_does_not_wait_for_episodes_of_a_connection_that_ended():
    with SharedLLMInferenceManager(HashEngine(), schedule="barrier") as shared:
        link = SocketLink(shared.serve())
        link.entered([request(member).key for member in range(9)])
        end = time.monotonic() + 60
        while len(shared._batcher.at_play) < 9:
            assert time.monotonic() < end
            time.sleep(0.01)
        link.left(request(0).key)
        link.close()
        assert len(shared.generate([request()], timeout=60)) == 1
        assert not shared._batcher.at_play


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_report_that_is_lost_costs_time_and_no_episode(calm, backend, monkeypatch):
    monkeypatch.setattr("shoal.rollout.parallel.rollout.DRAIN_SECONDS", 0.5)
    with ParallelRolloutManager(config(), HashEngine(), backend=backend) as manager:
        real, lost = manager._on_report, []

        def lose(asker, data):
            if len(lost) < 3:
                lost.append(data)
            else:
                real(asker, data)

        manager.inference._on_report = lose
        assert manager.collect(4) == calm
        assert manager.report.replayed_episodes == 3


@pytest.mark.parametrize("schedule", ["greedy", "barrier"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_rollout_whose_shared_engine_failed_goes_on_with_another(calm, backend, schedule):
    failed = []

    def fail(requests):
        if not failed and any(r.key.turn == 2 for r in requests):
            failed.append(manager.inference)
            failed[0]._post(lambda: 1 / 0)

    settings = config(parallel={"schedule": schedule})
    with ParallelRolloutManager(settings, HashEngine(fail), backend=backend) as manager:
        first = manager.inference
        assert manager.collect(4) == calm
        assert failed == [first]
        assert first.failed
        assert manager.inference is not first
        assert manager.report.worker_deaths > 0
        assert manager.collect(4) == calm
