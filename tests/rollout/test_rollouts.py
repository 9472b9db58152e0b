import contextlib
import functools
import logging
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from tests.rollout.doubles import (
    CounterEnv,
    HashEngine,
    InterruptingEngine,
    check_faulty,
    config,
    in_lockstep,
    until,
    with_env,
)

from shoal.core.data import encode_trajectory, read_trajectories, write_trajectories
from shoal.core.errors import ConfigError, WorkerError
from shoal.envs.text import Outcome
from shoal.rollout.hosts import episodes
from shoal.rollout.hosts.host import HostsFailedError
from shoal.rollout.hosts.processes import ProcessHosts
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Completion, Sampling
from shoal.train.agent.run.filters import filter_groups

SAMPLING = Sampling(16, 1.0, ("</action>",))


def play(backend, settings=None, engine=None, **changes):
    with ParallelRolloutManager(settings or config(**changes), engine or HashEngine(), backend=backend) as m:
        return m.collect(4), m.report


@pytest.fixture(scope="module")
def calm():
    return play("serial")[0]


@pytest.mark.parametrize(("backend", "n_jobs"), [("thread", 1), ("thread", 8), ("process", 3)])
def test_the_barrier_changes_no_trajectory_whatever_the_number_of_workers(calm, backend, n_jobs):
    assert play(backend, n_jobs=n_jobs, parallel={"schedule": "barrier"})[0] == calm


def test_a_serial_rollout_tells_how_busy_its_engine_was(calm):
    played, report = play("serial")
    assert played == calm
    assert report.batches == sum(len(t.turns) for t in played)
    assert 0 < report.engine_seconds <= report.seconds
    assert report.metrics()["engine_busy"] > 0


def test_the_barrier_runs_one_batch_a_turn_and_the_lock_one_request():
    engine = HashEngine()
    play("thread", parallel={"schedule": "barrier"}, engine=engine)
    assert engine.batches == [16] * 6
    engine = HashEngine()
    play("thread", parallel={"max_batch": 1}, engine=engine)
    assert engine.batches == [1] * 96


@pytest.mark.parametrize("at_once", [1, 3])
def test_few_envs_that_play_many_episodes_give_the_same(calm, at_once):
    settings = {"episodes_at_once": at_once, "keep_envs": True}
    with ParallelRolloutManager(config(parallel=settings), HashEngine(), backend="process") as manager:
        assert manager.collect(4) == calm
        assert manager.collect(5) != calm
        assert manager.collect(4) == calm


class Marking(CounterEnv):
    """Leaves a file in a folder when it is first reset."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self._mark = folder / f"{os.getpid()}-{id(self)}"

    def reset(self, **settings):
        self._mark.touch()
        return super().reset(**settings)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_barrier_waits_for_no_episode_that_cannot_begin_yet(calm, backend, at_once, tmp_path):
    def both_have_begun(requests):  # else one worker may play it all before the other is there
        until(lambda: len(list(tmp_path.iterdir())) == 2 * at_once)

    engine, parallel = HashEngine(both_have_begun), {"schedule": "barrier", "episodes_at_once": at_once}
    settings = with_env(functools.partial(Marking, tmp_path), parallel=parallel)
    assert play(backend, settings, engine)[0] == calm
    assert max(engine.batches) == 2 * at_once  # two workers, in lockstep


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [("thread", "adaptive"), ("thread", "barrier"), ("process", "barrier"), ("loky", "adaptive")],
)
def test_a_rollout_after_an_interrupted_one_is_not_mixed_up_with_it(calm, backend, schedule):
    settings = config(nap=0.02, parallel={"schedule": schedule, "episodes_at_once": 2})
    with ParallelRolloutManager(settings, InterruptingEngine(), backend=backend) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.collect(3)
        assert manager.collect(4) == calm


# --- faults
@pytest.mark.parametrize(
    ("backend", "of"),
    [("thread", "parallel"), ("process", "parallel"), ("loky", "parallel"), ("thread", "vector")],
)
@pytest.mark.flaky(reruns=2)
def test_an_env_that_hangs_is_given_up_in_time_by_the_limit_of_workers_or_else_that_of_the_envs(
    calm, backend, of
):
    clock, limit = time.monotonic(), {"step_timeout": 0.6}
    settings = config(fault="hang", parallel=limit if of == "parallel" else None)
    played, _ = play(backend, settings | ({"vector": limit} if of == "vector" else {}))
    assert time.monotonic() - clock < 60
    check_faulty(calm, played, "timeout", r"step\(\d\) failed: no answer within 0.6 s", 0)


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.flaky(reruns=2)
def test_a_constructor_may_have_more_time_than_a_step(calm, backend):
    limits = {"step_timeout": 0.5, "make_timeout": 30}
    played, report = play(backend, make_nap=1.0, parallel={**limits, "keep_envs": True})
    assert played == calm
    assert report.worker_deaths == 0


class SlowInThreads(CounterEnv):
    """Is made at once where a config is checked, and slowly where it plays."""

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        if threading.current_thread().name == "shoal-episode":
            time.sleep(5.0)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_constructor_that_takes_too_long_is_given_up_though_steps_may_take_for_ever(n_jobs):
    parallel = {"make_timeout": 0.3, "episodes_at_once": 1}
    settings = with_env(SlowInThreads, groups=1, n_jobs=n_jobs, parallel=parallel)
    with ParallelRolloutManager(settings, HashEngine(), backend="thread") as m:
        began = time.monotonic()
        played = m.collect(4)
        assert time.monotonic() - began < 18
    assert {t.status for t in played} == {"timeout"}
    assert all(re.search(r"make failed: no answer within 0.3 s .*make_timeout", t.error) for t in played)


@pytest.mark.parametrize(
    "limits", [{"make_timeout": 0.3}, {"step_timeout": 0.3}, {"make_timeout": 0.3, "step_timeout": 9}]
)
@pytest.mark.parametrize("place", ["vector", "parallel"])
def test_a_config_whose_env_is_not_made_in_time_is_refused(place, limits):
    settings = config(make_nap=20.0, parallel=limits if place == "parallel" else None)
    settings |= {"vector": limits} if place == "vector" else {}
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"custom_envs.Counter: .*'.*:CounterEnv' took longer than 0.3 s"):
        ParallelRolloutManager(settings, HashEngine())
    assert time.monotonic() - began < 18


def test_an_env_whose_constructor_hangs_holds_up_no_other_kind():
    with pytest.raises(ConfigError, match="took longer than 0.3 s"):
        ParallelRolloutManager(config(make_nap=9.0, parallel={"make_timeout": 0.3}), HashEngine())
    with ParallelRolloutManager(config(parallel={"make_timeout": 4.0}), HashEngine()):
        pass  # while the first is still being made


@pytest.fixture
def lives(monkeypatch):
    """The envs that were made, and those that were closed."""
    made, closed, start = [], [], CounterEnv.__init__
    monkeypatch.setattr(CounterEnv, "__init__", lambda env, *a, **k: made.append(env) or start(env, *a, **k))
    monkeypatch.setattr(CounterEnv, "close", lambda env: closed.append(env))
    return made, closed


@pytest.mark.parametrize("limit", [None, 20.0])
def test_envs_that_are_made_to_look_at_them_are_closed(limit, lives):
    made, closed = lives
    with ParallelRolloutManager(config(parallel={"step_timeout": limit}), HashEngine()):
        until(lambda: set(map(id, made)) <= set(map(id, closed)))  # one of a test before may be closed late
    assert made


@pytest.mark.parametrize("keep", [False, True])
def test_envs_of_a_rollout_are_closed_with_it_or_kept_until_the_manager_is(keep, lives):
    made, closed = lives
    settings = config(groups=3, parallel={"keep_envs": keep})
    with ParallelRolloutManager(settings, HashEngine(), backend="thread") as manager:
        looked_at = len(made)
        manager.collect(0)
        played = set(map(id, made[looked_at:]))
        assert played
        assert len(played & set(map(id, closed))) == (0 if keep else len(played))
    assert played <= set(map(id, closed))


@pytest.mark.parametrize("limit", [None, 20.0])
def test_what_a_constructor_raises_is_told(limit):
    settings = config(parallel={"make_timeout": limit})
    settings["custom_envs"]["Counter"]["env_config"]["fault"] = "make"
    with pytest.raises(OSError, match="no such world"):
        ParallelRolloutManager(settings, HashEngine())


def test_an_env_that_cannot_be_made_is_data(calm):
    class Unmakable(CounterEnv):
        def __init__(self, config=None, **settings):
            super().__init__(config, **settings)
            if threading.current_thread().name == "shoal-episode":
                raise OSError("no such world")

    played, _ = play("thread", with_env(Unmakable))
    assert all(t.status == "env_error" and "make failed: OSError: no such world" in t.error for t in played)
    assert len(played) == len(calm)


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_the_first_failure_is_told_with_its_line_and_those_like_it_are_counted(backend, caplog):
    played, _ = play(backend, fault="raise", parallel={"env_retries": 2})
    failed = sum(t.status == "env_error" for t in played)
    first, more = caplog.messages
    assert re.search(r"failed: .*doubles.py:\d+ in .*; it is played again$", first)
    assert more.startswith(
        f"{3 * failed - 1} more times an episode failed the same way; {failed} episodes are"
    )


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_whatever_goes_wrong_in_a_host_ends_its_episode_with_the_reason(backend, monkeypatch):
    """No error may be lost in a thread: the driver would wait for ever."""

    def without_words(error):
        raise RuntimeError("there are no words for it")

    monkeypatch.setattr(episodes, "with_frames", without_words)
    played, _ = play(backend, fault="raise")
    failed = [t for t in played if t.status != "ok"]
    assert len(failed) == 2
    assert all(t.status == "engine_error" and "there are no words for it" in t.error for t in failed)


@pytest.mark.parametrize("backend", ["process", "loky"])
def test_an_env_that_kills_its_worker_costs_only_its_own_episode(calm, backend, caplog):
    with caplog.at_level(logging.WARNING, "shoal.rollout"):
        played, report = play(backend, fault="kill", parallel={"max_deaths": 1})
    check_faulty(calm, played, "env_error", "workers that played it were lost", 0)
    assert report.worker_deaths > 0
    assert "the open ones are played again" in caplog.text


def test_a_worker_that_dies_once_changes_nothing(calm, tmp_path):
    played, report = play("process", fault="kill", once=str(tmp_path / "once"))
    assert played == calm
    assert report.worker_deaths == 1
    assert 0 < report.replayed_episodes <= 8


def test_where_no_worker_can_be_started_episodes_are_played_here(calm, monkeypatch, caplog):
    async def fails(hosts, number):
        raise HostsFailedError("there is no room")

    monkeypatch.setattr(ProcessHosts, "_start", fails)
    assert play("process")[0] == calm
    assert "there is no room; the 16 episodes that are left are played here, in sequence" in caplog.text


def test_an_episode_that_may_have_ended_its_worker_is_not_played_here(monkeypatch):
    start, started = ProcessHosts._start, []

    async def once(hosts, number):
        started.append(number)
        if len(started) > 1:
            raise HostsFailedError("there is no room")
        return await start(hosts, number)

    monkeypatch.setattr(ProcessHosts, "_start", once)
    with pytest.raises(WorkerError, match="there is no room; and no process can be started for the episodes"):
        play("process", fault="kill", every=1)


@pytest.mark.slow
def test_two_hundred_killed_workers_leave_the_calm_result():
    shape = {"groups": 16, "members": 4, "n_jobs": 4, "max_steps": 12, "every": 10**9}
    serial = play("serial", config(**shape))[0]
    kills = 0
    draw = random.Random(1)
    settings = config(**shape, nap=0.03, parallel={"max_deaths": 1000})
    with ParallelRolloutManager(settings, HashEngine()) as manager:

        def kill():
            nonlocal kills
            while kills < 200:
                pids = manager.worker_pids()
                if pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        kills += 1
                time.sleep(0.02)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        played = manager.collect(4)
        assert kills == 200
        assert played == serial
        assert manager.report.worker_deaths > 20


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "loky"])
def test_an_env_that_freezes_its_whole_process_is_given_up(calm, backend):
    settings = {"step_timeout": 3.0, "max_deaths": 1}
    played, report = play(backend, fault="freeze", parallel=settings)
    assert report.worker_deaths > 0
    check_faulty(calm, played, "timeout", "gave no sign of life", 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "loky"])
def test_the_limits_of_envs_do_not_count_what_their_process_imports(tmp_path, monkeypatch, backend):
    """Elsewhere than here, the module of the env takes longer than its limit and what is added for a sign of life."""
    (tmp_path / "slow_to_import.py").write_text(
        "import os, time\n"
        "from tests.rollout.doubles import CounterEnv\n"
        f"time.sleep(0 if os.getpid() == {os.getpid()} else 9)\n"
        "class SlowToImport(CounterEnv): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = config(groups=1, n_jobs=1, parallel={"step_timeout": 3.0, "make_timeout": 3.0})
    settings["custom_envs"]["Counter"]["env_type"] = "slow_to_import:SlowToImport"
    played, report = play(backend, settings)
    assert {episode.status for episode in played} == {"ok"}
    assert report.worker_deaths == 0


# --- small things
def test_settings_that_cannot_run_are_refused():
    with pytest.raises(ConfigError, match="no rollout backend named 'proceses'. Did you mean 'process'"):
        ParallelRolloutManager(config(), HashEngine(), backend="proceses")
    for wrong in (0, "2", 1.5, True):
        with pytest.raises(ConfigError, match=f"n_jobs must be -1 .* got {wrong!r}"):
            ParallelRolloutManager(config(), HashEngine(), n_jobs=wrong)
    with pytest.raises(ConfigError, match="side must be 'train' or 'val', got 'test'"):
        ParallelRolloutManager(config(), HashEngine(), side="test")
    for plural, backend in (("threads", "thread"), ("processes", "process")):  # as they were spelled before
        with ParallelRolloutManager(config(), HashEngine(), backend=plural) as manager:
            assert manager.backend == backend


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_numbers_that_cannot_reach_workers_are_refused_on_every_backend(backend):
    with ParallelRolloutManager(config(), HashEngine(), seed=2**64, backend=backend) as manager:
        with pytest.raises(
            ValueError, match=r"must be in \[-2\*\*63, 2\*\*64\) to reach workers, got 18446744"
        ):
            manager.collect(0)
        manager.seed = 2**64 - 1
        with pytest.raises(ValueError, match="to reach workers"):
            manager.collect(-(2**64))
        with pytest.raises(ValueError, match="first_group must be at least 0, got -1"):
            manager.collect(0, first_group=-1)
        assert all(t.status == "ok" for t in manager.collect(0))


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_numbers_of_numpy_name_the_same_episodes(backend):
    with ParallelRolloutManager(config(), HashEngine(), seed=np.int64(7), backend=backend) as manager:
        played = manager.collect(np.int32(2), first_group=np.uint8(1), n_groups=np.int64(2))
        manager.seed = 7
        expected = manager.collect(2, first_group=1, n_groups=2)
    assert list(map(encode_trajectory, played)) == list(map(encode_trajectory, expected))


def test_an_episode_that_kills_its_worker_is_given_up_after_as_many_deaths_as_allowed():
    settings = config(groups=2, members=1, n_jobs=1, fault="kill", every=1, parallel={"max_deaths": 2})
    played, report = play("process", settings)
    assert [t.error.startswith("2 workers that played it were lost") for t in played] == [True, True]
    assert 4 <= report.worker_deaths <= 6  # at most twice both in one, then each alone twice
    assert report.seconds > 0


@pytest.mark.parametrize("turn", [1, 2])
def test_rewards_that_are_too_large_together_end_their_episode_and_can_be_read_again(turn, tmp_path):
    """Each is finite; their sum is not, so the record had no number there, or no group could be compared."""

    class Rich(CounterEnv):
        def _advance(self, action):
            return Outcome(1e308)

    class Says(HashEngine):
        def _answer(self, request):
            ids = self.tokenizer.encode("<action>one||two</action>")
            return Completion(ids, (-0.5,) * len(ids), "stop", 0)

    settings = with_env(Rich, groups=1)
    settings["custom_envs"]["Counter"]["max_actions_per_turn"] = turn
    lockstep = in_lockstep(settings, Says())
    for played in (play("serial", settings, Says())[0], lockstep.collect(4, Sampling(40))):
        write_trajectories(tmp_path / "t.jsonl", played)
        assert list(read_trajectories(tmp_path / "t.jsonl")) == played
        assert {t.status for t in played} == {"env_error"}
        assert "must sum to at most 3.4e+38" in played[0].error
        assert filter_groups(played)[1].too_few == 1
