"""The engine's own thread: what goes on meanwhile, and what becomes of an engine that fails in it."""

import gc
import os
import random
import sys
import threading
import time
from _thread import allocate_lock

import pytest
from tests.rollout.doubles import HashEngine

from shoal.core.errors import EngineError
from shoal.rollout.parallel import server
from shoal.rollout.parallel.server import KNOWN, SharedLLMInferenceManager
from shoal.rollout.parallel.transport import SocketLink, _Call
from shoal.rollout.samplers.sampler import Key, Request, Sampling


def request(member=0, turn=0):
    return Request(tuple(range(20)), Key(1, 0, 0, member, turn), Sampling(16))


class Gated(HashEngine):
    """Answers when it may."""

    def __init__(self):
        super().__init__()
        self.may, self.asked = threading.Semaphore(0), threading.Semaphore(0)

    def generate(self, requests):
        self.asked.release()
        assert self.may.acquire(timeout=60)
        return super().generate(requests)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask_in_thread(asker, member, found):
    def ask():
        try:
            found[member] = asker.generate([request(member)])[0]
        except Exception as error:
            found[member] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_requests_are_read_while_the_engine_answers_others():
    engine = Gated()
    with SharedLLMInferenceManager(engine, schedule="greedy") as manager:
        link, found = SocketLink(manager.serve()), {}
        first = ask_in_thread(link, 0, found)
        assert engine.asked.acquire(timeout=60)
        others = [ask_in_thread(link, member, found) for member in range(1, 6)]
        until(lambda: len(manager._batcher) == 5)
        assert engine.batches == []
        engine.may.release(2)
        for thread in (first, *others):
            thread.join(60)
        link.close()
    assert engine.batches == [1, 5]
    assert found == {m: HashEngine().generate([request(m)])[0] for m in range(6)}


def test_a_request_is_refused_in_time_while_the_engine_is_at_another():
    engine = Gated()
    with SharedLLMInferenceManager(engine, schedule="greedy", request_timeout=1.0) as manager:
        found = {}
        first = ask_in_thread(manager, 0, found)
        assert engine.asked.acquire(timeout=60)
        ask_in_thread(manager, 1, found).join(60)
        assert isinstance(found[1], TimeoutError)
        first.join(60)
        assert isinstance(found[0], TimeoutError)  # what the engine is at is refused in time too
        manager._request_timeout = None  # what is asked now is answered, however busy the machine is
        engine.may.release(2)
        assert manager.generate([request(2)]) == HashEngine().generate([request(2)])
    assert engine.batches == [1, 1]  # nobody waited for the second any more


def test_the_next_batch_is_launched_before_the_answers_of_the_last_are_sent():
    engine, seen = Gated(), []
    with SharedLLMInferenceManager(engine, schedule="greedy") as manager:
        manager.submit("first", [request(0)], lambda *_: seen.append(engine.asked.acquire(timeout=30)))
        assert engine.asked.acquire(timeout=60)
        second = threading.Event()
        manager.submit("second", [request(1)], lambda *_: second.set())
        until(lambda: len(manager._batcher) == 1)
        engine.may.release()
        until(lambda: seen)
        engine.may.release()
        assert second.wait(60)
    assert seen == [True]  # while the answer was sent, the engine was already asked for the second


def test_an_engine_that_answers_at_once_needs_no_thread_of_its_own(monkeypatch):
    class Named(HashEngine):
        names: list[str]

        def generate(self, requests):
            self.names.append(threading.current_thread().name)
            time.sleep(self.nap)
            return super().generate(requests)

    for nap, quick, at_once in ((0.0, 60.0, True), (0.02, 0.01, False)):
        monkeypatch.setattr(server, "QUICK", quick)  # however busy the machine is
        engine = Named()
        engine.names, engine.nap = [], nap
        with SharedLLMInferenceManager(engine) as manager:
            for turn in range(KNOWN + 2):
                manager.generate([request(0, turn)])
        assert engine.names[0] == "shoal-engine"
        assert ("shoal-inference" in engine.names) == at_once


def test_an_engine_that_ends_its_thread_ends_nothing_else():
    def leave(requests):
        if requests[0].key.member == 0:
            sys.exit("enough")

    with SharedLLMInferenceManager(HashEngine(leave)) as manager:
        with pytest.raises(EngineError, match="SystemExit: enough"):
            manager.generate([request(0)])
        assert manager.generate([request(1)]) == HashEngine().generate([request(1)])


def test_making_a_new_engine_may_take_longer_than_an_answer():
    def crash(_):
        raise RuntimeError("lost")

    def restart():
        time.sleep(1.5)
        return HashEngine()

    with SharedLLMInferenceManager(HashEngine(crash), engine_timeout=1.0, restart=restart) as manager:
        assert manager.generate([request()]) == HashEngine().generate([request()])
        assert manager.statistics.restarts == 1


def test_closing_refuses_what_an_engine_that_hangs_was_asked(monkeypatch):
    monkeypatch.setattr("shoal.rollout.parallel.server.ENGINE_END_SECONDS", 0.2)
    engine, found = Gated(), {}
    manager = SharedLLMInferenceManager(engine)
    thread = ask_in_thread(manager, 0, found)
    assert engine.asked.acquire(timeout=60)
    manager.close()
    thread.join(60)
    assert isinstance(found[0], EngineError)
    engine.may.release()  # its late answer finds nobody, and no descriptor that was closed
    until(lambda: not any(t.name == "shoal-engine" for t in threading.enumerate()))


def test_closing_waits_for_an_answer_that_is_being_made():
    engine, found = Gated(), {}
    manager = SharedLLMInferenceManager(engine)
    thread = ask_in_thread(manager, 0, found)
    assert engine.asked.acquire(timeout=60)
    threading.Timer(0.3, engine.may.release).start()
    manager.close()
    thread.join(60)
    assert found[0] == HashEngine().generate([request(0)])[0]


def test_threads_that_give_up_at_any_moment_leave_none_asleep():
    with SharedLLMInferenceManager(
        HashEngine(lambda requests: time.sleep(0.001 * (len(requests) % 3))), schedule="greedy"
    ) as manager:
        link, outcomes = SocketLink(manager.serve()), []

        def ask(member):
            rng = random.Random(member)
            for turn in range(60):
                patience = rng.choice((0.001, 0.002, 0.004, 20.0))
                try:
                    answer = link.generate([request(member, turn)], patience)
                    outcomes.append(answer == HashEngine().generate([request(member, turn)]))
                except TimeoutError:
                    outcomes.append(None)
                    assert patience < 1

        threads = [threading.Thread(target=ask, args=(m,), daemon=True) for m in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
        link.close()
    assert len(outcomes) == 24 * 60
    assert {True, None} == set(outcomes)


def test_whoever_left_already_is_passed_over_when_the_next_is_woken():
    with SharedLLMInferenceManager(HashEngine()) as manager:
        link = SocketLink(manager.serve())
        gone, asleep = _Call(range(1)), _Call(range(1))
        for call in (gone, asleep):
            call.bell = allocate_lock()
            call.bell.acquire()
        gone.over = True
        link._ready.extend((gone, asleep))
        link._ring_next()
        assert not asleep.bell.locked()
        link.close()


# --- what is counted, and what is let go
def test_seconds_batches_and_requests_of_the_engine_are_counted():
    with SharedLLMInferenceManager(
        HashEngine(lambda _: time.sleep(0.02)), schedule="greedy", max_batch=4
    ) as manager:
        manager.generate([request(m) for m in range(8)])
        found = manager.statistics
    assert (found.requests, found.batches, list(found.batch_sizes)) == (8, 2, [4, 4])
    assert found.engine_seconds >= 0.04
    assert (found.failures, found.restarts, found.refused_connections) == (0, 0, 0)


def test_an_engine_that_always_crashes_is_made_anew_three_times_and_no_more():
    made = []

    def crash(_):
        raise RuntimeError("lost")

    def restart():
        made.append(1)
        return HashEngine(crash)

    with SharedLLMInferenceManager(HashEngine(crash), retries=9, restart=restart) as manager:
        with pytest.raises(EngineError, match="lost"):
            manager.generate([request(0)])
        assert manager.statistics.restarts == len(made) == 3


def test_a_worker_hears_at_once_that_its_request_took_too_long():
    """Also when nothing else happens that would have answers sent."""
    release = threading.Event()
    with SharedLLMInferenceManager(HashEngine(lambda _: release.wait(60)), request_timeout=0.2) as manager:
        link = SocketLink(manager.serve())
        with pytest.raises(
            TimeoutError, match="no answer within 0.2 s"
        ):  # says the engine's thread, not this one
            link.generate([request(0)], timeout=60)
        release.set()
        link.close()


def test_what_goes_wrong_with_a_report_is_logged_and_costs_nothing_else(caplog):
    def report(asker, data):
        raise KeyError("no such place")

    with SharedLLMInferenceManager(HashEngine(), on_report=report) as manager:
        manager.left(request(0).key, b"a report")
        assert manager.generate([request(1)]) == HashEngine().generate([request(1)])
    assert "what was to be done with a report failed" in caplog.text


def test_no_descriptor_is_left_open():
    def open_ones():
        return len(os.listdir("/proc/self/fd"))

    def use():
        with SharedLLMInferenceManager(HashEngine()) as manager:
            link = SocketLink(manager.serve())
            link.generate([request(0)])
            link.close()

    use()
    gc.collect()  # what earlier tests left in cycles is no loss of these
    before = open_ones()
    for _ in range(5):
        use()
    gc.collect()
    assert open_ones() <= before
