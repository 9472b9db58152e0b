"""How samplers are asked: one loop, one rule for retries; what waits is answered together, what fails fails alone."""

import asyncio
import gc
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from tests.rollout.doubles import HashEngine, each

from shoal.core.errors import EngineError
from shoal.samplers.asking import Loop, RejectedError, RetryPolicy, SamplerClient, retried, run_here
from shoal.samplers.sampler import Key, Request


def request(member=0):
    return Request((1, 2, 3), Key(1, (0, 0, member, 0)))


def test_threads_that_ask_at_once_each_get_their_own_answers_in_few_batches():
    engine = HashEngine(lambda requests: time.sleep(0.05))
    asked = [request(member) for member in range(20)]
    with SamplerClient(engine) as shared, ThreadPoolExecutor(20) as threads:
        found = list(threads.map(lambda one: shared.generate([one])[0], asked))
        assert shared.statistics.requests == 20
    assert found == HashEngine().generate(asked)
    assert len(engine.batches) < 10


def test_one_request_that_cannot_be_answered_fails_alone():
    def refuse(requests):
        if any(r.key.path[2] == 3 for r in requests):
            raise EngineError("not this one")

    answers = each(HashEngine(refuse), [request(member) for member in range(6)])
    assert [member for member, answer in enumerate(answers) if isinstance(answer, EngineError)] == [3]


class Restarted(HashEngine):
    """Crashes or hangs until it is restarted, which ends a call that hangs by an error."""

    def __init__(self, fault):
        super().__init__()
        self.restarts, self.go = 0, threading.Event()
        if fault == "crash":
            self.go.set()

    def generate(self, requests):
        if not self.restarts:
            self.go.wait(60)
            raise RuntimeError("the engine's process died")
        return super().generate(requests)

    def restart(self):
        self.restarts += 1
        self.go.set()


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.flaky(reruns=2)
def test_an_engine_that_crashes_or_hangs_is_restarted_once_and_asked_again(fault):
    engine, asked = Restarted(fault), [request(member) for member in range(3)]
    with SamplerClient(engine, engine_timeout=0.5) as shared:
        assert shared.generate(asked) == HashEngine().generate(asked)
        assert shared.statistics.restarts == engine.restarts == 1
    engine = Restarted(fault)
    with SamplerClient(engine, engine_timeout=0.5, max_restarts=0) as shared:
        with pytest.raises((EngineError, TimeoutError), match="no answer in 2 attempts"):
            shared.generate(asked)
        engine.go.set()
        assert engine.restarts == 0


def test_an_engine_that_hangs_and_cannot_be_restarted_refuses_everybody():
    go = threading.Event()
    with SamplerClient(HashEngine(lambda _: go.wait(60)), engine_timeout=0.3) as shared:
        for _ in range(2):
            with pytest.raises((EngineError, TimeoutError), match="the sampler hangs"):
                shared.generate([request()])
    go.set()


def test_what_waits_when_a_client_is_closed_is_refused_and_what_is_asked_after():
    go = threading.Event()
    shared = SamplerClient(HashEngine(lambda _: go.wait(60)))
    asked = shared.loop.submit(shared.sample(request()))
    other = Loop()
    from_elsewhere = other.submit(shared.sample(request(1)))
    other.run(asyncio.sleep(0.01))
    shared.close()
    with pytest.raises(CancelledError):
        asked.result(60)
    with pytest.raises(RejectedError, match="was closed before it answered"):
        from_elsewhere.result(60)
    shared.close()
    with pytest.raises(RejectedError, match="closed"):
        shared.generate([request()])
    go.set()


# --- one rule for retries
class Failing:
    """Fails so many times, and notes when it was asked."""

    def __init__(self, times, error):
        self.left, self.error, self.asked = times, error, []

    async def __call__(self):
        self.asked.append(time.monotonic())
        if self.left:
            self.left -= 1
            raise self.error
        return "answer"


@pytest.mark.parametrize("error", [EngineError("down"), TimeoutError("late")])
def test_a_request_is_asked_again_up_to_its_retries_and_keeps_its_kind_of_error(error):
    policy = RetryPolicy(retries=3, backoff=0.0, max_backoff=0.0)
    failing = Failing(3, error)
    assert asyncio.run(retried(failing, policy)) == "answer"
    failing = Failing(9, error)
    with pytest.raises(type(error), match=f"no answer in 4 attempts over .* the last: {error}"):
        asyncio.run(retried(failing, policy))
    assert len(failing.asked) == 4


def test_what_would_be_rejected_again_is_asked_once():
    failing = Failing(9, RejectedError("no such model", "404"))
    with pytest.raises(RejectedError, match="^no such model$"):
        asyncio.run(retried(failing, RetryPolicy()))
    assert len(failing.asked) == 1


def test_pauses_between_attempts_double_up_to_a_limit():
    policy = RetryPolicy(1, 9999, 0.1, 0.5)
    pauses = [policy.pause(attempt, "x") for attempt in (1, 2, 3, 4, 5, 9999)]
    for pause, base in zip(pauses, [0.1, 0.2, 0.4, 0.5, 0.5, 0.5], strict=True):
        assert base / 2 <= pause <= base


# --- one loop
def test_owners_share_one_thread_and_closing_one_ends_its_own_work_alone():
    one, other, threads = Loop(), Loop(), []

    async def wait(seconds):
        threads.append(threading.current_thread())
        await asyncio.sleep(seconds)
        return "done"

    long, short = one.submit(wait(60)), other.submit(wait(0.2))
    inside = one.submit(other.within(wait(0.2)))
    other.run(asyncio.sleep(0.01))
    one.close()
    with pytest.raises(CancelledError):
        long.result(0)
    with pytest.raises(CancelledError):
        inside.result(0)
    assert short.result(60) == "done"
    with pytest.raises(RejectedError, match="closed"):
        one.submit(wait(0))
    other.close()
    assert len(set(threads)) == 1


def test_code_that_may_block_runs_in_a_thread_of_its_own():
    async def name():
        return threading.current_thread().name

    with Loop("own") as own, Loop() as shared:
        assert (own.run(name()), shared.run(name())) == ("own", "shoal-loop")


def test_ctrl_c_reaches_the_caller_and_is_logged_by_no_task(caplog):
    def end(number, frame):  # a command has a handler of its own, so that asyncio takes none
        raise KeyboardInterrupt

    async def step():
        signal.raise_signal(signal.SIGTERM)

    async def rollout():
        stepping = asyncio.create_task(step())
        await asyncio.Event().wait()
        await stepping

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_here(rollout())
    finally:
        signal.signal(signal.SIGTERM, before)
    gc.collect()
    assert caplog.text == ""
