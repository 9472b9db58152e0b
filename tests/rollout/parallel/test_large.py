"""Very many episodes, and very large ones."""

import functools
import threading

import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, config

from shoal import envs
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.transport import SocketLink
from shoal.rollout.samplers.sampler import Key, Request


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


def play(backend, env=CounterEnv, **changes):
    engine = HashEngine()
    with ParallelRolloutManager(config(**changes), engine, backend=backend) as manager:
        manager._env_fns["Counter"] = env
        return manager.collect(4), engine.batches


@pytest.mark.parametrize("schedule", ["adaptive", "barrier"])
@pytest.mark.parametrize(("groups", "pending"), [(120, 32), pytest.param(1100, 1024, marks=pytest.mark.slow)])
def test_one_worker_plays_more_episodes_at_once_than_its_connection_may_have_waiting(
    schedule, groups, pending, monkeypatch
):
    limited = functools.partial(SharedLLMInferenceManager, max_pending=pending)
    monkeypatch.setattr("shoal.rollout.parallel.rollout.SharedLLMInferenceManager", limited)
    shape = {"groups": groups, "members": 1, "max_steps": 2, "n_jobs": 1}
    played, batches = play("processes", **shape, parallel={"schedule": schedule})
    assert played == play("serial", **shape)[0]
    if schedule == "barrier":
        assert batches == [groups, groups]


class Verbose(CounterEnv):
    def step(self, action):
        *answer, info = super().step(action)
        return *answer, {**info, "anchor": str(self._total) * 2**21}


def test_the_record_of_an_episode_may_be_as_large_as_it_is():
    shape = {"groups": 2, "members": 1, "max_steps": 12}
    played, _ = play("processes", Verbose, **shape)
    assert sum(len(turn.anchor) for turn in played[0].turns) > 16 * 2**20
    assert played == play("serial", Verbose, **shape)[0]


class Counting(HashEngine):
    def generate(self, requests):
        assert [len(r.images[0]) for r in requests] == [20 * 2**20]
        return super().generate([Request(r.prompt_ids, r.key) for r in requests])


def test_a_prompt_may_show_many_pictures():
    with SharedLLMInferenceManager(Counting()) as shared:
        link = SocketLink(shared.serve())
        (answer,) = link.generate([Request((1, 2), Key(1, 0, 0, 0, 0), images=("x" * 20 * 2**20,))])
        link.close()
    assert answer.token_ids


@pytest.mark.parametrize("schedule", ["adaptive", "barrier"])
def test_where_few_threads_can_be_started_fewer_episodes_are_played_at_once(schedule, monkeypatch):
    class Thread(threading.Thread):
        started = 0

        def start(self):
            if self.name == "shoal-episode":
                Thread.started += 1
                if Thread.started > 5:
                    raise RuntimeError("can't start new thread")
            super().start()

    expected = play("serial")[0]
    monkeypatch.setattr("shoal.rollout.parallel.worker.threading.Thread", Thread)
    assert play("threads", n_jobs=1, parallel={"schedule": schedule})[0] == expected
