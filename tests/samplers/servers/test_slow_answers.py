"""A slow answer holds up no other episode: one that waits until another has ended would wait for ever otherwise."""

import asyncio
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
from tests.rollout.doubles import CounterEnv, FakeServer, HashEngine, config

from shoal import envs
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.servers.openai import OpenAIEngine

SECONDS = 60
"""After which the slow answer is given though no other was, and the test fails."""


def play(sampler):
    """Two episodes of two turns at once; how they ended."""
    envs.register("test_counter", CounterEnv, replace=True)
    settings = config(groups=2, members=1, max_steps=2)
    with ParallelRolloutManager(settings, sampler, backend="thread") as manager:
        return [(t.status, len(t.turns)) for t in manager.collect(4)]


ENDED = [("ok", 2), ("ok", 2)]


class Gate:
    """The first request waits until two others, those of the other episode, have been answered."""

    def __init__(self):
        self.lock, self.open = threading.Lock(), threading.Event()
        self.asked, self.answered = 0, []

    def enter(self):
        with self.lock:
            self.asked += 1
            return self.asked

    def leave(self, number):
        with self.lock:
            self.answered.append(number)
            if len(self.answered) == 2:
                self.open.set()


def test_a_sampler_is_asked_for_each_request_at_once():
    gate = Gate()

    class Patient(HashEngine):
        async def sample(self, request):
            number = gate.enter()
            if number == 1:
                await asyncio.to_thread(gate.open.wait, SECONDS)
            gate.leave(number)
            return self._answer(request)

    assert play(Patient()) == ENDED
    assert gate.answered == [2, 3, 1, 4]


def test_a_slow_answer_of_a_server_holds_up_no_other():
    gate, real = Gate(), FakeServer.reply_to

    def reply_to(path, body):
        number = gate.enter() if body else 0
        if number == 1:
            gate.open.wait(SECONDS)
        if number:
            gate.leave(number)
        return real(server, path, body)

    with FakeServer("openai") as server, OpenAIEngine(server.url) as sampler:
        server.reply_to = reply_to
        server.say = lambda said: "<action>one</action>"
        assert play(sampler) == ENDED
    assert gate.answered == [2, 3, 1, 4]


class Replica(HashEngine):
    """Answers the episode of the first group when that of the second has ended, as files say."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def generate(self, requests):
        for _, group, _, turn in (request.key.path for request in requests):
            end = time.monotonic() + SECONDS
            while group == 0 and not (self.folder / "1 1").exists() and time.monotonic() < end:
                time.sleep(0.01)
            with (self.folder / "order").open("a") as file:
                file.write(f"{group}{turn} ")
            (self.folder / f"{group} {turn}").touch()
        return super().generate(requests)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_slow_replica_on_ray_holds_up_no_other(ray_finds_shoal, tmp_path):
    ray = pytest.importorskip("ray")
    from shoal.samplers.ray import RayEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()  # what a test before left running
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayEngine(partial(Replica, tmp_path), 2) as sampler:
            assert play(sampler) == ENDED
    finally:
        ray.shutdown()
    assert (tmp_path / "order").read_text().split() == ["10", "11", "00", "01"]
