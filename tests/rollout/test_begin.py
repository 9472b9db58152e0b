"""A rollout is begun, and waited for later: hosts play it meanwhile, and nothing that it plays depends on it."""

import os
import threading

import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, config, in_lockstep, until, with_env

from shoal import ParallelRolloutManager
from shoal.core.errors import WorkerError
from shoal.samplers.sampler import Sampling

SAMPLING = Sampling(16, 1.0, ("</action>",))


def player(backend, engine, **changes):
    settings = config(**changes)
    if backend != "vector":
        return ParallelRolloutManager(settings, engine, backend=backend)
    return in_lockstep(settings, engine)


@pytest.fixture(scope="module")
def calm():
    with player("serial", HashEngine()) as playing:
        return {iteration: playing.collect(iteration, SAMPLING) for iteration in (3, 4)}


@pytest.mark.parametrize("backend", ["thread", "process", "loky"])
def test_hosts_play_what_has_begun_while_its_caller_does_something_else(calm, backend):
    engine = HashEngine()
    with player(backend, engine) as playing:
        for iteration in calm:
            asked = sum(engine.batches)
            begun = playing.begin(iteration, SAMPLING)
            until(lambda: sum(engine.batches) == asked + 16 * 6)  # noqa: B023
            assert playing.counts == (0, 16)  # what has ended is recorded when it is waited for
            assert begun.wait() == calm[iteration]
            assert playing.counts == (16, 16)


@pytest.mark.parametrize("backend", ["serial", "vector"])
def test_what_the_callers_thread_plays_is_played_when_it_is_waited_for(calm, backend):
    engine = HashEngine()
    with player(backend, engine) as playing:
        begun = playing.begin(4, SAMPLING)
        assert engine.batches == []
        assert begun.wait() == calm[4]


@pytest.mark.parametrize("backend", ["vector", "serial", "thread"])
def test_one_rollout_is_begun_at_a_time_and_waited_for_once(calm, backend):
    with player(backend, HashEngine()) as playing:
        begun = playing.begin(3, SAMPLING)
        for another in (playing.begin, playing.collect):
            with pytest.raises(WorkerError, match="a rollout has begun: wait for its trajectories first"):
                another(4, SAMPLING)
        assert begun.wait() == calm[3]
        with pytest.raises(WorkerError, match="this rollout is over"):
            begun.wait()
        assert playing.collect(4, SAMPLING) == calm[4]


@pytest.mark.parametrize("backend", ["vector", "thread", "process"])
def test_closing_ends_what_has_begun(backend):
    before = set(threading.enumerate())
    playing = player(backend, HashEngine(), nap=0.05)
    begun = playing.begin(4, SAMPLING)
    pids = playing.worker_pids()
    playing.close()
    with pytest.raises(WorkerError, match="this rollout is over"):
        begun.wait()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    until(lambda: not {t.name for t in set(threading.enumerate()) - before} & {"shoal-episode"})


class Living(CounterEnv):
    """Counts those that have been reset and not closed, in this process."""

    living, most = set(), 0

    def _start(self, rng):
        Living.living.add(id(self))
        Living.most = max(Living.most, len(Living.living))
        return super()._start(rng)

    def close(self):
        Living.living.discard(id(self))


@pytest.mark.parametrize("given", [None, 5])
def test_live_envs_and_threads_are_bounded_and_change_no_record(given):
    settings = with_env(Living, groups=80, members=2, max_steps=2, parallel={"episodes_at_once": given})
    with ParallelRolloutManager(settings, HashEngine(), backend="serial") as playing:
        serial = playing.collect(4)
    Living.most, threads, own = 0, [0], threading.active_count()

    def before(requests):
        threads[0] = max(threads[0], threading.active_count() - own)

    with ParallelRolloutManager(settings, HashEngine(before), 2, backend="thread") as playing:
        assert playing.collect(4) == serial  # 160 episodes, 80 of each host
    bound = 2 * (given or 64)  # fewer than 64 where memory is short
    assert Living.most <= bound
    assert threads[0] <= bound + 2  # and the driver's and the engine's
    assert Living.living == set()
