"""The next rollout begins in the hosts while its caller does something else: nothing that it plays depends on it."""

import asyncio
import os
import signal
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.rollout.doubles import CounterConfig, CounterEnv, HashEngine, config, makes

from shoal import derive_seed, envs
from shoal.rollout.collector import collect_with_signal
from shoal.rollout.hosts.host import LocalHosts, ThreadHost
from shoal.rollout.rollouts import ParallelRolloutManager
from shoal.samplers.sampler import Sampling

PATIENCE = 60
"""Seconds within which what was begun has happened."""


@dataclass(frozen=True)
class NotingConfig(CounterConfig):
    """Settings of `NotingEnv`."""

    folder: str = ""
    """Where each reset and each end of an env leaves a file."""
    at_reset: str = ""
    """What the first reset of a faulty episode does (with `once`), or each one."""


class NotingEnv(CounterEnv):
    """Notes what is done to it, for whoever looks from another process."""

    Config = NotingConfig

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        self._note("made")

    def _note(self, what):
        if self.config.folder:
            (Path(self.config.folder) / f"{what} {uuid.uuid4().hex}").touch()

    def _start(self, rng):
        super()._start(rng)
        self._note(f"reset {self._seed}")
        if self._faulty and self.config.at_reset and (not self.config.once or makes(self.config.once)):
            self._fail(self.config.at_reset)

    def close(self):
        self._note("closed")


@pytest.fixture(autouse=True, scope="module")
def _noting():
    envs.register("test_noting", NotingEnv, replace=True)


def settings(folder="", **changes):
    found = config(folder=str(folder), **changes)
    found["custom_envs"]["Counter"]["env_type"] = "test_noting"
    return found


@pytest.fixture(scope="module")
def calm(_noting):
    with ParallelRolloutManager(settings(), HashEngine(), backend="serial") as manager:
        return [manager.collect(iteration) for iteration in range(6)]


def notes(folder, what):
    return sorted(name.rpartition(" ")[0] for name in os.listdir(folder) if name.startswith(what))


def wait_for(happened):
    end = time.monotonic() + PATIENCE
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    assert happened()


def resets_of(iteration, times=1):
    """What 8 groups of 2 members note."""
    seeds = [derive_seed(7, "env", iteration, group) for group in range(8)]
    return sorted(f"reset {seed}" for seed in seeds for _ in range(2 * times))


@pytest.mark.parametrize("changes", [{}, {"keep_envs": True}, {"schedule": "barrier"}])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_what_has_begun_is_played_to_the_same_end_and_reset_once(calm, backend, changes, tmp_path):
    shape, engine = settings(tmp_path, parallel=changes), HashEngine()
    with ParallelRolloutManager(shape, engine, backend=backend) as manager:
        for iteration in range(3):
            asked = len(engine.batches)
            manager.prepare(iteration)
            wait_for(lambda: notes(tmp_path, "reset") == resets_of(iteration))  # noqa: B023
            assert len(engine.batches) == asked
            assert manager.collect(iteration) == calm[iteration]
            assert notes(tmp_path, "reset") == resets_of(iteration)
            for path in tmp_path.glob("reset *"):
                path.unlink()
        assert manager.report.worker_deaths == manager.report.replayed_episodes == 0
    wait_for(lambda: len(notes(tmp_path, "made")) == len(notes(tmp_path, "closed")))


def test_a_host_begins_no_more_episodes_than_it_plays_at_once(calm, tmp_path):
    shape = settings(tmp_path, parallel={"episodes_at_once": 3})
    with ParallelRolloutManager(shape, HashEngine(), backend="processes") as manager:
        manager.prepare(4)
        wait_for(lambda: len(notes(tmp_path, "reset")) == 6)
        assert manager.collect(4) == calm[4]
    assert notes(tmp_path, "reset") == resets_of(4)


@pytest.mark.parametrize(
    ("backend", "how"), [("serial", {}), ("loky", {}), ("threads", {"parallel": {"reset_ahead": False}})]
)
def test_nothing_begins_in_the_callers_thread_in_joblib_or_where_it_may_not(calm, backend, how, tmp_path):
    with ParallelRolloutManager(settings(tmp_path, **how), HashEngine(), backend=backend) as manager:
        manager.collect(3)
        made = len(notes(tmp_path, "made"))
        manager.prepare(4)
        assert manager.collect(4) == calm[4]
    assert notes(tmp_path, "reset") == sorted(resets_of(3) + resets_of(4))
    assert len(notes(tmp_path, "made")) > made


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_another_rollout_than_the_one_that_has_begun_is_played_all_the_same(calm, backend, tmp_path):
    with ParallelRolloutManager(settings(tmp_path), HashEngine(), backend=backend) as manager:
        manager.prepare(3)
        manager.prepare(4)
        assert manager.collect(5) == calm[5]
        manager.prepare(4)
        greedy = Sampling(16, 0.0, ("</action>",))
        assert len(manager.collect(4, greedy)) == 16
        manager.prepare(4)
        assert manager.collect(4, n_groups=3) == calm[4][:6]
        assert manager.collect(4) == calm[4]
    wait_for(lambda: len(notes(tmp_path, "made")) == len(notes(tmp_path, "closed")))


class Roomless(LocalHosts):
    """Has room for one host; the others never come."""

    async def host(self, number):
        if number:
            await asyncio.Event().wait()
        return await super().host(number)


def test_a_host_that_does_not_come_holds_nothing_up(calm, tmp_path, monkeypatch):
    def hosts(backend, setup, count, options):
        return Roomless(partial(ThreadHost, setup), count)

    monkeypatch.setattr("shoal.rollout.rollouts.make_hosts", hosts)
    with ParallelRolloutManager(settings(tmp_path), HashEngine(), backend="threads") as manager:
        manager.prepare(4)
        wait_for(lambda: len(notes(tmp_path, "reset")) == 8)
        assert manager.collect(4) == calm[4]
        assert notes(tmp_path, "reset") == resets_of(4)
        manager.prepare(5)
    wait_for(lambda: len(notes(tmp_path, "made")) == len(notes(tmp_path, "closed")))


def test_further_groups_of_an_iteration_follow_those_that_had_begun():
    def play(ahead):
        with ParallelRolloutManager(settings(), HashEngine(), backend="processes") as manager:
            if ahead:
                manager.prepare(4)
            return collect_with_signal(manager, 4, Sampling(16, 1.0, ("</action>",)), max_batches=4)

    assert play(ahead=True) == play(ahead=False)


def test_a_worker_that_is_killed_while_it_is_ahead_changes_nothing(calm, tmp_path):
    with ParallelRolloutManager(settings(tmp_path), HashEngine(), backend="processes") as manager:
        assert manager.collect(3) == calm[3]
        manager.prepare(4)
        wait_for(lambda: len(notes(tmp_path, "reset")) == 32)
        killed = manager.worker_pids()[0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: killed not in manager.worker_pids())
        assert manager.collect(4) == calm[4]
        assert manager.report.worker_deaths == 1


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("fault", ["raise", "hang", "kill"])
def test_a_reset_that_fails_once_while_it_is_ahead_changes_nothing(calm, backend, fault, tmp_path):
    if (backend, fault) == ("threads", "kill"):
        pytest.skip("it would end this process")
    (tmp_path / "notes").mkdir()
    shape = settings(
        tmp_path / "notes", at_reset=fault, once=str(tmp_path / "once"), parallel={"step_timeout": 1.0}
    )
    with ParallelRolloutManager(shape, HashEngine(), backend=backend) as manager:
        manager.prepare(4)
        wait_for(lambda: (tmp_path / "once").exists())
        assert manager.collect(4) == calm[4]


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_reset_that_always_fails_is_told_as_in_sequence(backend):
    shape = settings(at_reset="raise")
    with ParallelRolloutManager(shape, HashEngine(), backend="serial") as manager:
        serial = manager.collect(4)
    assert {t.status for t in serial} == {"ok", "env_error"}
    with ParallelRolloutManager(shape, HashEngine(), backend=backend) as manager:
        manager.prepare(4)
        assert [(t.status, t.turns) for t in manager.collect(4)] == [(t.status, t.turns) for t in serial]


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("at_once", [True, False])
def test_closing_a_manager_ends_what_has_begun(backend, at_once, tmp_path):
    manager = ParallelRolloutManager(settings(tmp_path), HashEngine(), backend=backend)
    manager.prepare(4)
    if not at_once:
        wait_for(lambda: notes(tmp_path, "reset") == resets_of(4))
    manager.close()
    assert manager.worker_pids() == []
    wait_for(lambda: len(notes(tmp_path, "made")) == len(notes(tmp_path, "closed")))
