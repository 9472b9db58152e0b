"""A manager that is used by several threads, interrupted, closed meanwhile, or used again."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rollout.doubles import (
    CounterEnv,
    HashEngine,
    InterruptingEngine,
    config,
    makes,
    until,
    with_env,
)

from shoal.core.errors import EngineError, WorkerError
from shoal.rollout.play import ParallelRolloutManager

BACKENDS = ("serial", "thread", "process")


def manager_of(backend, engine=None, **changes):
    return ParallelRolloutManager(config(**changes), engine or HashEngine(), backend=backend)


@pytest.fixture(scope="module")
def calm():
    with manager_of("serial") as manager:
        return {iteration: manager.collect(iteration) for iteration in (4, 5, 6)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rollouts_that_several_threads_ask_for_are_played_one_after_another(calm, backend):
    with manager_of(backend, nap=0.005) as manager, ThreadPoolExecutor(len(calm)) as threads:
        assert list(threads.map(manager.collect, calm)) == list(calm.values())


@pytest.mark.parametrize("backend", [*BACKENDS, "loky"])
def test_closing_ends_a_rollout_that_another_thread_plays_and_leaves_no_worker(calm, backend):
    engine = HashEngine()
    manager = manager_of(backend, engine, nap=0.03 if backend == "serial" else 0.3)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(manager.collect, 4)
        until(lambda: engine.batches)
        pids = manager.worker_pids()
        clock = time.monotonic()
        manager.close()
        assert time.monotonic() - clock < 30
        with pytest.raises((WorkerError, EngineError), match="closed"):
            playing.result(60)
    assert not manager.worker_pids()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with manager:  # and it can be used again
        assert manager.collect(4) == calm[4]


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_threads_end_soon_after_an_interruption(backend):
    engine, before = InterruptingEngine(), set(threading.enumerate())
    with manager_of(backend, engine, nap=0.1, groups=30, max_steps=50) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.collect(4)
        until(lambda: "shoal-episode" not in {t.name for t in set(threading.enumerate()) - before})
        asked = len(engine.batches)
        time.sleep(0.5)
        assert len(engine.batches) == asked


class SlowToLoad:
    """Makes envs; a worker process that is not the first waits for a file before it has loaded this."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, **settings):
        return CounterEnv(**settings)

    def __reduce__(self):
        return _loaded, (self.folder, os.getpid())


def _loaded(folder, caller):
    if os.getpid() != caller:
        (folder / f"{os.getpid()}").touch()
        if not makes(folder / "first"):
            until((folder / "go").exists)
    return SlowToLoad(folder)


def test_a_worker_that_still_starts_when_a_rollout_is_over_plays_in_a_later_one(calm, tmp_path):
    settings = with_env(SlowToLoad(tmp_path), parallel={"keep_envs": True})
    with ParallelRolloutManager(settings, HashEngine(), backend="process") as manager:
        assert manager.collect(4) == calm[4]
        assert len(manager.worker_pids()) == 1
        (tmp_path / "go").touch()
        until(lambda: manager.collect(4) == calm[4] and len(manager.worker_pids()) == 2)
        pids = manager.worker_pids()
        assert {path.name for path in tmp_path.iterdir()} == {"first", "go", *map(str, pids)}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
