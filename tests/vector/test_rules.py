"""The plain rules: after an interruption or an error reset first, one call at a time, a worker is the unit."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, EnvError, WorkerTimeoutError
from shoal.core.executors import available_cpus, free_cpus
from shoal.vector import AsyncVectorEnv, MultiProcessEnvironmentContainer, ParallelEnv, make_vec
from shoal.vector.loop import Patience
from shoal.vector.make import Plan, StepCost, choose
from tests.trace import Tracer
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.living import alive
from tests.vector.scripted import SlowEnv, same

ROOT = Path(__file__).parents[2]
BACKENDS = ["serial", "thread", "process"]
MODES = ["same_step", "next_step", "disabled"]
POLICIES: list[dict[str, Any]] = [{}, {"on_failure": "restart", "max_restarts": 0}]


def only_a_reset_follows(envs: Any) -> None:
    """Everything else is refused in words."""
    n = envs.num_envs
    for ask in (
        lambda: envs.step(np.ones(n, np.int64)),
        lambda: envs.step_async(np.ones(n, np.int64)),
        lambda: envs.step_some([0], [1]),
        lambda: envs.send(range(n), [1] * n),
        lambda: envs.call("length"),
    ):
        with pytest.raises(EnvError, match=r"reset\(\) (all )?environments .*before"):
            ask()
    envs.reset_some([0], [1])
    with pytest.raises(EnvError, match=r"reset\(\) environments \[1.*\] before"):
        envs.step(np.ones(n, np.int64))
    assert envs.step_some([0], [1])[0].reward == 11.0
    assert envs.single_action_space == spaces.Discrete(10)
    assert envs.reset(seed=5)[0][:, 0].tolist() == [5 + i for i in range(n)]
    assert envs.step(np.full(n, 2))[1].tolist() == [21.0] * n


@pytest.mark.parametrize("policy", [{}, {"on_failure": "restart", "max_restarts": 1}], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_error_only_a_reset_follows(backend: Any, mode: str, policy: Any) -> None:
    fns = [functools.partial(Faulty, "raise"), CountEnv, CountEnv]
    with make_vec(fns, backend=backend, autoreset=mode, **policy) as envs:
        envs.reset(seed=0)
        for _ in range(policy.get("max_restarts", 0)):
            assert envs.step(np.array([9, 1, 1]))[3].tolist() == [True, False, False]
        for step in (envs.step, lambda actions: (envs.step_async(actions), envs.step_wait())):
            envs.reset(seed=0)
            with pytest.raises(RuntimeError if policy else ZeroDivisionError) as caught:
                step(np.array([9, 1, 1]))
            said = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert "env 0 " in said
            only_a_reset_follows(envs)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_reset_that_raised_only_a_reset_follows(backend: Any, policy: Any) -> None:
    class Refuses(CountEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            if seed == 77:
                raise ZeroDivisionError("this one never")
            return super().reset(seed=seed, options=options)

    with make_vec(Refuses, 3, backend=backend, **policy) as envs:
        envs.reset(seed=0)
        with pytest.raises(RuntimeError if policy else ZeroDivisionError):
            envs.reset(seed=76)
        only_a_reset_follows(envs)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_error_of_some_these_are_reset_first(backend: Any, mode: str, policy: Any) -> None:
    fns = [functools.partial(Faulty, "raise"), *[functools.partial(CountEnv, 1000)] * 3]
    with make_vec(fns, backend=backend, autoreset=mode, **policy) as envs:
        envs.reset(seed=0)
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            envs.step_some([0, 1], [9, 1])
        for undone, ask in (
            ([0, 1], lambda: envs.step(np.ones(4, np.int64))),
            ([1], lambda: envs.step_some([1, 2], [1, 1])),
            ([0], lambda: envs.step_some([0], [1])),
        ):
            with pytest.raises(EnvError, match=rf"reset\(\) environments {re.escape(str(undone))} before"):
                ask()
        assert [result.reward for result in envs.step_some([2, 3], [1, 1])] == [11.0, 11.0]
        assert envs.reset_some([1], [7])[0][0].tolist()[0] == 7
        assert envs.step_some([1], [1])[0].reward == 11.0
        with pytest.raises(EnvError, match=r"reset\(\) environments \[0\] before"):
            envs.step(np.ones(4, np.int64))
        envs.reset_some([0], [8])
        assert envs.step(np.ones(4, np.int64))[1].tolist() == [11.0, 12.0, 12.0, 12.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_interrupt_only_a_reset_follows(backend: Any) -> None:
    fns = [functools.partial(SlowEnv, 0.3, 8)] * 2
    with make_vec(fns, backend=backend) as envs:
        envs.reset(seed=0)
        handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(KeyboardInterrupt):
                envs.step(np.full(2, 8))
        finally:
            signal.signal(signal.SIGALRM, handler)
        only_a_reset_follows(envs)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_after_a_wait_that_expired_only_a_reset_follows_and_late_answers_are_dropped(backend: Any) -> None:
    with make_vec([functools.partial(SlowEnv, 0.4, 8), CountEnv], backend=backend, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step_async(np.array([8, 1]))
        with pytest.raises(multiprocessing.TimeoutError, match="timed out after"):
            envs.step_wait(timeout=0.05)
        only_a_reset_follows(envs)


def test_a_reset_replaces_a_worker_that_does_not_come_back() -> None:
    fns = [functools.partial(Faulty, "hang"), CountEnv]
    with make_vec(fns, backend="process", num_workers=2, step_timeout=1.0) as envs:
        envs.reset(seed=0)
        before = [row["pid"] for row in envs.stats()["workers"]]
        envs.step_async(np.array([9, 1]))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.1)
        assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4]
        after = [row["pid"] for row in envs.stats()["workers"]]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]


def test_a_reset_waits_for_a_thread_and_names_its_env(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.vector.vector_env.SETTLE_SECONDS", 0.1)
    with make_vec([CountEnv, functools.partial(SlowEnv, 1.0, 8)], backend="thread") as envs:
        envs.reset(seed=0)
        envs.step_async(np.array([1, 8]))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.05)
        assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4]
    assert "reset() waits for env 1" in caplog.text


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_two_calls_at_the_same_time_are_refused_and_any_thread_may_call(backend: Any) -> None:
    with make_vec(functools.partial(SlowEnv, 0.5), 2, backend=backend) as envs:
        envs.reset(seed=0)
        thread = threading.Thread(target=envs.step, args=(np.ones(2, np.int64),))
        thread.start()
        time.sleep(0.1)
        with pytest.raises(AlreadyPendingCallError, match="another call is at work"):
            envs.step(np.ones(2, np.int64))
        thread.join()
        envs.step(np.ones(2, np.int64))


def test_an_env_is_sent_with_all_that_share_its_worker() -> None:
    with make_vec(CountEnv, 4, backend="process", num_workers=2, autoreset="same_step") as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"environments \[1\] share a worker"):
            envs.send([0], [1])
        envs.send([1, 0], [5, 6])
        with pytest.raises(ValueError, match=r"environments \[0, 1\] are still in flight"):
            envs.send([0, 1], [1, 1])
        with pytest.raises(AlreadyPendingCallError, match="in flight"):
            envs.step(np.ones(4, np.int64))
        ready = envs.recv()
        assert dict(zip(ready.ids.tolist(), ready.rewards.tolist(), strict=True)) == {0: 61.0, 1: 51.0}
        assert envs.step(np.ones(4, np.int64))[1].tolist() == [12.0, 12.0, 11.0, 11.0]


def test_recv_takes_whoever_is_ready_and_returns_nothing_in_time() -> None:
    fns = [functools.partial(SlowEnv, 1.0), functools.partial(SlowEnv, 0.0)]
    with make_vec(fns, backend="process", num_workers=2) as envs:
        envs.reset(seed=0)
        envs.send([0, 1], [1, 1])
        assert envs.recv().ids.tolist() == [1]
        ready = envs.recv(timeout=0.05)
        assert (ready.ids.tolist(), envs.in_flight) == ([], [0])
        assert envs.recv().ids.tolist() == [0]


def test_an_env_that_fails_in_flight_is_replaced_or_breaks_all_off() -> None:
    fns = [functools.partial(Faulty, "kill"), functools.partial(CountEnv, 1000)]
    for policy in ("restart", "raise"):
        with make_vec(fns, backend="process", num_workers=2, on_failure=policy) as envs:
            envs.reset(seed=0)
            envs.send([0, 1], [9, 1])
            if policy == "raise":
                with pytest.raises(RuntimeError, match="env 0 .*SIGKILL"):
                    envs.recv(2)
                only_a_reset_follows(envs)
                continue
            ready = envs.recv(2)
            at = ready.ids.tolist().index(0)
            assert ready.truncated.tolist() == [i == at for i in range(2)]
            assert ready.infos[at]["worker_restarted"]


def test_the_default_is_gymnasiums_autoreset_and_faces_keep_their_own() -> None:
    from shoal.vector import SB3VecEnv  # not above: workers import this module, and that imports torch

    fns = [CountEnv] * 2
    with make_vec(CountEnv, 2, backend="serial") as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        for wrapper in (
            gymnasium.wrappers.vector.NormalizeObservation,
            gymnasium.wrappers.vector.FlattenObservation,
        ):
            wrapper(envs)
    assert make_vec("CartPole-v1", 3, backend="native").reset(seed=0)[0].shape == (3, 4)
    for face, mode in (
        (ParallelEnv(fns).envs, AutoresetMode.SAME_STEP),
        (MultiProcessEnvironmentContainer(CountEnv, 1, 2).envs, AutoresetMode.DISABLED),
        (AsyncVectorEnv(fns), AutoresetMode.NEXT_STEP),
        (SB3VecEnv(fns).pool, AutoresetMode.SAME_STEP),
    ):
        assert face.autoreset_mode is mode
        face.close()
    with make_vec(fns, backend="serial") as envs, pytest.raises(ConfigError, match="autoreset='same_step'"):
        SB3VecEnv(envs)


# --- "auto"
class Counted(CountEnv):
    """Leaves a file for each that was made, and takes it away when it is closed; a step is busy for some seconds."""

    def __init__(self, folder: str, seconds: float) -> None:
        super().__init__()
        self.file = Path(folder, f"{os.getpid()}-{id(self)}-{time.monotonic_ns()}")
        self.file.touch()
        self.seconds = seconds

    def misbehave(self, action: Any) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass

    def close(self) -> None:
        self.file.unlink()


@pytest.mark.parametrize(("seconds", "n"), [(0.0, 1), (0.0, 8), (2e-3, 4)])
def test_auto_keeps_nothing_of_its_trial(tmp_path: Path, seconds: float, n: int) -> None:
    drawn = random.getstate(), np.random.get_state()[1].tolist()
    with make_vec(functools.partial(Counted, str(tmp_path), seconds), n) as envs:
        assert len(list(tmp_path.iterdir())) == n
        obs, infos = envs.reset()
        assert obs.tolist() == [[-1, 1, 0, 0]] * n  # no seed, and the first episode of each
        assert infos["episode"].tolist() == [1] * n
    assert list(tmp_path.iterdir()) == []
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn


class Watching(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes what it sees."""

    seen: ClassVar[list[str]] = []

    def reset(self, **more: Any) -> Any:
        self.seen.append("reset")
        return super().reset(**more)

    def step(self, action: Any) -> Any:
        self.seen.append("step")
        return super().step(action)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("inside", [True, False])
def test_wrappers_see_no_episode_but_the_callers(n: int, inside: bool) -> None:
    Watching.seen.clear()
    env: Any = (lambda: Watching(gymnasium.make("CartPole-v1"))) if inside else "CartPole-v1"
    with make_vec(env, n, wrappers=[] if inside else [Watching]) as envs:
        assert Watching.seen == []
        envs.reset(seed=0)
        envs.step(np.zeros(n, np.int64))
    assert sorted(Watching.seen) == ["reset"] * n + ["step"] * n


class RefusesAtRandom(CountEnv):
    """Takes only moves that a player would know."""

    def misbehave(self, action: Any) -> None:
        if int(action) != 9:
            raise ValueError("no such move")


def test_an_env_that_refuses_random_actions_is_stepped_by_workers_and_a_line_says_why(caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG, "shoal.vector.make"), make_vec(RefusesAtRandom, 2) as envs:
        assert envs.stats()["workers"]
        envs.reset(seed=0)
        assert envs.step(np.full(2, 9))[1].tolist() == [91.0, 91.0]
    assert [row.levelno for row in caplog.records] == [logging.DEBUG]
    assert "ValueError: no such move" in caplog.text


# --- what workers take over, and what they draw
class OwnWarning(UserWarning):
    """A user's own."""


class Tells(gymnasium.Env[Any, Any]):
    """Tells of its process."""

    observation_space = spaces.Box(0, 1, ())
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.float32(np.random.rand()), {"random": random.random()}

    def tell(self) -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("meant", UserWarning, stacklevel=1)
            warnings.warn("own", OwnWarning, stacklevel=1)
        return {
            "torch": "torch" in sys.modules,
            "variable": os.environ.get("SHOAL_TEST_VARIABLE"),
            "folder": os.getcwd(),
            "path": "/somewhere/else" in sys.path,
            "warned": len(caught),
            "level": logging.getLogger().level,
            "module": type(self).__module__,
        }


def test_workers_see_the_present_state_of_their_caller(tmp_path: Path, monkeypatch: Any) -> None:
    def told() -> dict[str, Any]:
        with make_vec(Tells, 1, backend="process") as envs:
            return dict(envs.call("tell")[0])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        first = told()
    monkeypatch.setenv("SHOAL_TEST_VARIABLE", "new")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere/else")
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR - 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = told()
    finally:
        root.setLevel(level)
    assert (first["variable"], first["path"], first["warned"]) == (None, False, 2)
    assert (second["variable"], second["folder"], second["path"]) == ("new", str(tmp_path), True)
    assert (second["warned"], second["level"]) == (0, logging.ERROR - 1)


def test_workers_import_no_package_only_to_know_its_warnings() -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", OwnWarning)
        with make_vec(Tells, 1, backend="process") as envs:
            [told] = envs.call("tell")
    assert (told["torch"], told["warned"]) == (False, 1)


def test_global_generators_of_workers_are_seeded_with_their_envs() -> None:
    def drawn(seed: int | None) -> list[Any]:
        with make_vec(Tells, 2, backend="process", num_workers=2) as envs:
            obs, infos = envs.reset(seed=seed)
            return [*obs.tolist(), *infos["random"].tolist()]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert len(set(drawn(3))) == 4  # workers do not draw the same
    assert len({*drawn(None), *drawn(None)}) == 8  # which nobody seeds


# --- the room
FILES_OF_A_STEP = {f"vector/{name}.py" for name in ("vector_env", "buffers", "workers", "loop", "env_group")}


def test_a_warm_step_enters_at_most_five_files_in_all_processes(tmp_path: Path) -> None:
    with Tracer("shoal", tmp_path) as tracer:
        fns = [functools.partial(tracer.installed, CountEnv, 1000)] * 2
        with make_vec(fns, backend="process", num_workers=2) as envs:
            envs.reset(seed=0)
            for _ in range(3):
                envs.step(np.ones(2, np.int64))
            with tracer.piece() as passed:
                envs.step(np.ones(2, np.int64))  # in which they report no infos
    assert len(passed.processes()) == 3
    assert passed.files(leave_out=("core/workers.py",)) <= FILES_OF_A_STEP  # where their processes began


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_of_the_caller_leaves_the_workers_to_it() -> None:
    def child() -> None:
        with pytest.raises(ClosedEnvironmentError, match="forked from: make one here"):
            envs.step(np.ones(2, np.int64))
        envs.close()

    with make_vec(CountEnv, 2, backend="process") as envs:
        envs.reset(seed=0)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert envs.step(np.ones(2, np.int64))[1].tolist() == [11.0, 11.0]


def test_workers_end_with_the_last_reference_to_their_vector_env() -> None:
    envs = make_vec(CountEnv, 2, backend="process", on_failure="restart")
    envs.reset(seed=0)
    envs.step(np.ones(2, np.int64))
    pids = [row["pid"] for row in envs.stats()["workers"]]
    gc.disable()  # nothing else may have to find it
    try:
        del envs
        assert not any(map(alive, pids))
    finally:
        gc.enable()


# --- the same results, and nothing left behind
BUILT_IN = ["bandit", "countdown", "frozen_lake", "metamathqa", "sokoban", "webshop"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_auto_serial_and_processes_give_the_same_over_built_in_envs(name: str, monkeypatch: Any) -> None:
    def played(backend: Any, plan: Plan | None = None) -> list[Any]:
        with monkeypatch.context() as patch:
            if plan is not None:
                patch.setattr("shoal.vector.make.choose", lambda *_: plan)
            with make_vec(name, 4, backend=backend, env_kwargs=given, autoreset="same_step") as envs:
                shown = [envs.reset(seed=3)]
                space = envs.action_space
                space.seed(0)
                return shown + [envs.step(space.sample()) for _ in range(12)]

    given = {"num_products": 100} if name == "webshop" else None
    expected = played("serial")
    assert same(played("process"), expected)
    plans = (
        Plan("serial", caller_share=4),
        Plan("process", workers=1, caller_share=2),
        Plan("thread", workers=4),
    )
    for plan in plans if name == "countdown" else ():
        assert same(played("auto", plan), expected)


class StartsAProgram(CountEnv):
    """Starts a program in a session of its own, then hangs."""

    def misbehave(self, action: Any) -> None:
        program = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        Path(os.environ["SHOAL_TEST_PID"]).write_text(str(program.pid))
        time.sleep(600)


@pytest.mark.flaky(reruns=2)
def test_programs_of_a_worker_that_is_killed_end_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setenv("SHOAL_TEST_PID", str(pid))
    with make_vec(StartsAProgram, 1, backend="process", step_timeout=1.0) as envs:
        envs.reset(seed=0)
        with pytest.raises(WorkerTimeoutError):
            envs.step(np.ones(1, np.int64))
        assert not alive(int(pid.read_text()))


# --- looking before sleeping
def looks(patience: Patience, clock: list[float], ticks: list[float], free_at: int) -> tuple[bool, int]:
    """Whether a semaphore was taken that is free at the n-th try, and after how many tries; each tries take `ticks`."""
    tries = 0

    def acquire(block: bool) -> bool:
        nonlocal tries
        assert not block
        clock[0] += ticks[min(tries, len(ticks) - 1)]
        tries += 1
        return tries > free_at

    return patience.take(acquire), tries


def test_a_worker_looks_before_it_sleeps_only_while_that_pays_and_nobody_wants_its_core() -> None:
    clock = [0.0]
    patience = Patience(lambda: clock[0])
    assert looks(patience, clock, [1e-6], 0) == (True, 1)
    assert looks(patience, clock, [1e-6], 50) == (True, 51)
    taken, tries = looks(patience, clock, [1e-6], 10**6)  # in vain: for 100 us
    assert not taken
    assert 95 < tries < 110
    assert looks(patience, clock, [1e-6], 5) == (False, 1)  # the next time it sleeps at once
    assert looks(patience, clock, [1e-6], 5) == (True, 6)  # and looks again
    clock[0] += 1.0
    assert looks(patience, clock, [1e-6, 1e-6, 2e-4], 50) == (False, 4)  # somebody had the core for 200 us
    assert looks(patience, clock, [1e-6], 5) == (False, 1)
    clock[0] += 0.6
    assert looks(patience, clock, [1e-6], 5) == (True, 6)


def test_auto_takes_the_cores_that_are_free_now_and_stays_with_the_caller_where_none_is() -> None:
    assert 1 <= free_cpus() <= available_cpus()
    step = StepCost(2e-4, 2e-4)
    assert choose(step, 32, cpus=1) == Plan("serial", caller_share=32)
    assert choose(step, 32, cpus=4) == Plan("process", workers=3, caller_share=8)


def test_environments_that_wait_have_a_worker_each_and_none_waits_in_the_caller(monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.vector.make.TRIAL_LIMIT", 1.0)
    n = available_cpus() + 1
    sleeping = functools.partial(SlowEnv, 0.005)
    with make_vec(sleeping, n) as envs:
        assert [(worker.count, worker.inline) for worker in envs.workers] == [(1, False)] * n
    # A trial draws action 9.
    busy = [CountEnv, *(functools.partial(Faulty, fault) for fault in ("kill", "hang"))]
    for env, workers in (sleeping, n), *((env, n - 1) for env in busy):
        with make_vec(env, n, backend="process") as envs:
            assert len(envs.workers) == workers
