"""Weights of several versions at once: each request is answered by the version that it names, here and elsewhere."""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from shoal.core.errors import EngineError
from shoal.samplers import folders
from shoal.samplers.process import ProcessSampler
from shoal.samplers.registry import EngineConfig, close_engine, make_engine, make_versions
from shoal.samplers.sampler import Capabilities, Key, Request, Sampling
from shoal.samplers.versions import At, OneCopy, Versions

SMALL = EngineConfig(width=16, layers=1, heads=2)
WORDS = ("up", "down")


def weights(seed):
    return {
        name: tensor.clone() for name, tensor in make_engine(SMALL, WORDS, seed).model.state_dict().items()
    }


def requests(version, count=6):
    return [Request((3, 4, 5 + n), Key(1, (n,)), Sampling(8), version=version) for n in range(count)]


def alone(version):
    """What one engine with these weights says."""
    engine = make_engine(SMALL, WORDS, version)
    return [(a.token_ids, a.logprobs) for a in engine.generate(requests(None))]


def said(sampler, version):
    answers = sampler.generate(requests(version))
    assert {answer.weights_version for answer in answers} == {version}
    return [(answer.token_ids, answer.logprobs) for answer in answers]


class Served:
    """One copy of the weights, asked for each request at once, that notes its loads."""

    def __init__(self, pause=0.0):
        self.inner = make_engine(SMALL, WORDS, 0)
        self.tokenizer, self.level, self.context = self.inner.tokenizer, self.inner.level, self.inner.context
        self.loads, self.under_way, self.pause, self.closed = [], 0, pause, False

    capabilities = Capabilities(token_ids=True, logprobs=True, weights=True)

    async def sample(self, request):
        self.under_way += 1
        await asyncio.sleep(0.002)
        answer = self.inner.generate([request])[0]
        self.under_way -= 1
        return answer

    def load_weights(self, weights, version):
        assert self.under_way == 0
        time.sleep(self.pause)
        self.loads.append(version)
        if weights is None:
            raise EngineError("no weights")
        self.inner.load_weights(weights, version)

    def close(self):
        self.closed = True


@pytest.fixture(params=["thread", "process", "one copy"])
def two(request):
    if request.param == "one copy":
        sampler = OneCopy(Served(), 2)
    else:
        sampler = make_versions(dataclasses.replace(SMALL, copy=request.param), WORDS, 0, 2)
    yield sampler
    close_engine(sampler)


def test_a_request_is_answered_by_the_version_that_it_names(two):
    two.load_weights(weights(1), 1)
    two.load_weights(weights(2), 2)
    assert said(two, 1) == alone(1) != alone(2) == said(two, 2)
    two.load_weights(weights(3), 3)  # in the place of the oldest
    assert said(two, 2) == alone(2)
    assert said(two, 3) == alone(3)
    with pytest.raises(EngineError, match=r"weights of version 1 are not held, only \[2, 3\]"):
        two.generate(requests(1, 1))
    assert [a.weights_version for a in two.generate(requests(None, 2))] == [3, 3]  # the newest
    two.load_weights(weights(4), 3)  # a version anew
    assert [tokens for tokens, _ in said(two, 3)] == [tokens for tokens, _ in alone(4)]


def test_a_sampler_at_a_version_is_a_sampler(two):
    two.load_weights(weights(1), 1)
    two.load_weights(weights(2), 2)
    one = At(two)
    one.weights_version = 1
    assert one.context == make_engine(SMALL, WORDS).context
    assert [(a.token_ids, a.logprobs) for a in one.generate(requests(None))] == alone(1)


def test_weights_that_are_in_use_are_not_replaced():
    begun, go = threading.Event(), threading.Event()

    class Slow:
        level, weights_version = "L1", 0
        tokenizer = make_engine(SMALL, WORDS).tokenizer

        def generate(self, requests):
            begun.set()
            go.wait(30)
            raise EngineError("over")

        def load_weights(self, weights, version):
            self.weights_version = version

    with Versions(Slow, 1) as sampler:
        sampler.load_weights({}, 1)

        def ask():
            with pytest.raises(EngineError, match="over"):
                sampler.generate(requests(1, 1))

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(30)
        with pytest.raises(
            EngineError, match="cannot replace those of version 1, which 1 requests are still"
        ):
            sampler.load_weights({}, 2)
        go.set()
        asking.join()
        sampler.load_weights({}, 2)
        assert sampler.weights_version == 2


# --- one copy
def test_one_copy_answers_by_several_versions_in_turn():
    with OneCopy(Served(), 2) as sampler:
        for version in (1, 2):
            sampler.load_weights(weights(version), version)
        assert sampler.inner.loads == [1]  # the first at once, the others when they are wanted

        async def both():
            return await asyncio.gather(
                *(sampler.sample(r) for pair in zip(requests(1), requests(2), strict=True) for r in pair)
            )

        answers = [(a.token_ids, a.logprobs) for a in asyncio.run(both())]
        assert answers[::2] == alone(1)
        assert answers[1::2] == alone(2)
        assert sampler.inner.loads == [1, 2]
    assert sampler.inner.closed


def test_one_copy_is_not_changed_at_each_pause_of_who_plays():
    with OneCopy(Served(pause=0.3), 2) as sampler:
        for version in (1, 2):
            sampler.load_weights(weights(version), version)

        async def plays():
            for request in requests(1):
                await sampler.sample(request)
                await asyncio.sleep(0.05)  # a step of its env
            return time.monotonic()

        async def both():
            ended, answer = await asyncio.gather(plays(), sampler.sample(requests(2, 1)[0]))
            assert answer.weights_version == 2
            return ended

        asyncio.run(both())
        assert sampler.inner.loads == [1, 2]


def test_one_copy_that_does_not_take_a_version_refuses_its_requests_alone():
    with OneCopy(Served(), 2) as sampler:
        with pytest.raises(EngineError, match="no weights"):
            sampler.load_weights(None, 1)  # the first is tried at once
        sampler.load_weights(weights(2), 2)
        with pytest.raises(EngineError, match="no weights"):
            sampler.generate(requests(1, 1))
        assert said(sampler, 2) == alone(2)
        sampler.load_weights(weights(1), 1)
        assert said(sampler, 1) == alone(1)


def test_a_version_that_is_waited_for_is_not_replaced():
    go = asyncio.Event()

    class Slow(Served):
        async def sample(self, request):
            await go.wait()
            return await super().sample(request)

    with OneCopy(Slow(), 2) as sampler:
        for version in (1, 2):
            sampler.load_weights(weights(version), version)

        async def asked():
            waiting = [asyncio.ensure_future(sampler.sample(requests(v, 1)[0])) for v in (2, 1)]
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match="cannot replace those of version 1, which 1 requests are"):
                await asyncio.to_thread(sampler.load_weights, weights(3), 3)
            sampler._loop.loop.call_soon_threadsafe(go.set)
            return await asyncio.gather(*waiting)

        assert [a.weights_version for a in asyncio.run(asked())] == [2, 1]
        sampler.load_weights(weights(3), 3)
        assert said(sampler, 3) == alone(3)


# --- a process
def test_a_process_that_is_killed_is_replaced_with_the_weights_it_had():
    with ProcessSampler(partial(make_versions, SMALL, WORDS, 0, 2), 2) as sampler:
        sampler.load_weights(weights(1), 1)
        sampler.load_weights(weights(2), 2)
        for _ in range(2):
            os.kill(sampler.pids()[0], signal.SIGKILL)
            assert said(sampler, 1) == alone(1)
            assert said(sampler, 2) == alone(2)


def test_weights_of_another_network_are_refused_and_those_before_stay():
    with ProcessSampler(partial(make_engine, SMALL, WORDS, 0)) as sampler:
        sampler.load_weights(weights(1), 1)
        with pytest.raises(EngineError, match="these weights are of another network"):
            sampler.load_weights({"strange": next(iter(weights(1).values()))}, 2)
        os.kill(sampler.pids()[0], signal.SIGKILL)
        answers = sampler.generate([replace(one, version=None) for one in requests(None)])
        assert [(a.token_ids, a.logprobs) for a in answers] == alone(1)


def test_weights_travel_in_memory_where_there_is_room_as_in_few_containers(monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "MEMORY", tmp_path)
    for free in (0, 2**30):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with ProcessSampler(partial(make_engine, SMALL, WORDS, 0)) as sampler:
            sampler.load_weights(weights(1), 1)
            assert len(list(tmp_path.iterdir())) == bool(free)
    assert not list(tmp_path.iterdir())


def test_a_sampler_that_cannot_begin_in_its_process_says_why():
    with pytest.raises(EngineError, match=r"could not begin in its process: ZeroDivisionError"):
        ProcessSampler(lambda: 1 / 0)
