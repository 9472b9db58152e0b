"""How samplers are asked: what waits is answered together, and what fails fails alone."""

import threading
import time

import pytest
from tests.rollout.doubles import HashEngine

from shoal.core.errors import EngineError
from shoal.samplers.batching import SharedLLMInferenceManager
from shoal.samplers.sampler import Key, Request


def request(member=0):
    return Request((1, 2, 3), Key(1, (0, 0, member, 0)))


def test_threads_that_ask_at_once_each_get_their_own_answers_in_few_batches():
    engine = HashEngine(lambda requests: time.sleep(0.05))
    found = {}
    with SharedLLMInferenceManager(engine) as shared:

        def ask(member):
            found[member] = shared.generate([request(member)])[0]

        threads = [threading.Thread(target=ask, args=(member,)) for member in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert shared.statistics.requests == 20
    assert found == {member: HashEngine().generate([request(member)])[0] for member in range(20)}
    assert len(engine.batches) < 10


def test_one_request_that_cannot_be_answered_fails_alone():
    def refuse(requests):
        if any(r.key.path[2] == 3 for r in requests):
            raise EngineError("not this one")

    with SharedLLMInferenceManager(HashEngine(refuse)) as shared:
        answers = shared.generate_each([request(member) for member in range(6)])
    assert [member for member, answer in enumerate(answers) if isinstance(answer, EngineError)] == [3]


def test_an_engine_that_hangs_and_cannot_be_restarted_refuses_everybody():
    go = threading.Event()
    with SharedLLMInferenceManager(HashEngine(lambda _: go.wait(60)), engine_timeout=0.3) as shared:
        for _ in range(2):
            with pytest.raises((EngineError, TimeoutError), match="the sampler hangs"):
                shared.generate([request()])
    go.set()


def test_who_asks_waits_no_longer_than_it_said():
    engine = HashEngine(lambda _: time.sleep(1.0))
    late = pytest.raises(TimeoutError, match="did not answer within 0.2 s")
    with SharedLLMInferenceManager(engine, request_timeout=0.2) as shared, late:
        shared.generate([request()])


def test_after_closing_nothing_is_answered():
    shared = SharedLLMInferenceManager(HashEngine())
    shared.close()
    shared.close()
    with pytest.raises(EngineError, match="closed"):
        shared.generate([request()])
