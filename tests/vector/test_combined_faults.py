"""Faults that come together, at bad moments or from outside: no call hangs, and nothing is lost or mixed up.

Only what a user sees is used. `test_faults.py` has the single faults; here are their combinations.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

import shoal.envs
from shoal.core.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from shoal.core.processes import Channel
from shoal.vector import AsyncVectorEnv, make_vec
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.living import SLACK, alive, children, within
from tests.vector.misbehaving import (
    BASE_EXCEPTIONS,
    FAULT,
    RELEASED,
    Dawdling,
    EndsThenFails,
    FailsWhenMadeAgain,
    Located,
    Misbehaving,
    Nonsense,
    Pays,
    Picture,
    SlowToMake,
    StartsAProgram,
    TellsItsSeed,
    Unspeakable,
    do,
)
from tests.vector.model import SLOW, Encoded

ROOT = Path(__file__).parents[2]
LIMIT = 0.5
"""The `step_timeout` of these tests."""


def slow_unless(quick: bool, *values: Any) -> Any:
    """A case that runs with the slow tests, unless it is one of the quick ones."""
    return pytest.param(*values, marks=[] if quick else [pytest.mark.slow])


QUICK_EXCEPTIONS = [
    slow_unless(name not in ("GeneratorExit", "SystemExit"), name) for name in BASE_EXCEPTIONS
]
HEALTHY = functools.partial(CountEnv, 1000)
LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    "process": {"backend": "process"},
    "process+threads": {"backend": "process", "threads": True, "num_workers": 2},
}
PARALLEL = ["thread", "process", "process+threads"]


@pytest.fixture(autouse=True)
def _hung_threads_end() -> Iterator[None]:
    RELEASED.clear()
    yield
    RELEASED.set()


@contextlib.contextmanager
def closing(envs: Any) -> Iterator[Any]:
    """Closes the envs at the end, which must be quick in every state."""
    try:
        yield envs
    finally:
        start = time.monotonic()
        envs.close()
        took = time.monotonic() - start
    assert took < 2.0 + SLACK, f"close() took {took:.1f} s"


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """A KeyboardInterrupt of an env that gets through is a failure of the test, not the end of the test run."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise AssertionError("the KeyboardInterrupt of an env went through") from error


def faulty(fault: str, which: Any, n: int, **options: Any) -> list[Any]:
    """Functions for `n` envs of which those in `which` misbehave."""
    return [functools.partial(Misbehaving, fault, **options) if i in which else HEALTHY for i in range(n)]


def told(error: BaseException) -> str:
    """All that an error says, its notes included."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def named(text: str) -> set[int]:
    """The envs that a message names."""
    return {int(number) for number in re.findall(r"env (\d+)\b", text)}


def gone(pids: Any, seconds: float = SLACK) -> bool:
    """Whether none of these processes is left after a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.02)
    return not any(map(alive, pids))


def script(
    program: str, tmp_path: Path, *args: str, seconds: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run a user's script, as a file outside of the repository."""
    path = tmp_path / "script.py"
    path.write_text(program)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(path), *args],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environ,
        cwd=tmp_path,
        start_new_session=True,
    )


# recv after failures


def drain(envs: Any) -> tuple[dict[int, float], list[WorkerError]]:
    """Receive until nothing is in flight: the reward of each env, and the errors that came on the way."""
    rewards: dict[int, float] = {}
    errors: list[WorkerError] = []
    for _ in range(50):
        try:
            ready = envs.recv(timeout=60.0)
        except WorkerError as error:
            errors.append(error)
        except ValueError:  # nothing is in flight
            return rewards, errors
        else:
            assert len(ready.ids), f"recv hangs: {ready.late} do not come"
            rewards.update(zip(ready.ids.tolist(), ready.rewards.tolist(), strict=True))
    raise AssertionError(f"still in flight after {len(rewards)} results and errors {errors}")


RECV_FAULTS = [
    slow_unless(fault == "raise" or which in ((1,), (0, 1)), layout, fault, which)
    for layout in ("serial", "thread", "process", "one process", "process+threads")
    for fault in ("raise", "kill", "hang")
    if not (layout in ("serial", "thread") and fault == "kill")
    if not (layout == "serial" and fault == "hang")
    for which in ((0,), (1,), (0, 1), (0, 1, 2))
]


@pytest.mark.parametrize(("layout", "fault", "which"), RECV_FAULTS)
@pytest.mark.flaky(reruns=2)
def test_after_a_failure_in_flight_all_others_are_received_and_a_reset_repairs_the_rest(
    layout: str, fault: str, which: tuple[int, ...]
) -> None:
    options = (
        {"backend": "process", "num_workers": 1}
        if layout == "one process"
        else {**LAYOUTS[layout], **({"num_workers": 4} if layout == "process" else {})}
    )
    if fault == "hang":
        options["step_timeout"] = LIMIT
    with closing(make_vec(faulty(fault, which, 4), **options)) as envs:
        envs.reset(seed=0)
        for i in (1, 0, 3, 2):  # one by one: the later ones wait for their worker
            envs.send([i], [FAULT if i in which else i])
        with within(LIMIT * (len(which) if layout == "one process" else 1)):
            rewards, errors = drain(envs)
        assert errors
        blamed = set().union(*(named(told(error)) for error in errors))
        shared = layout in ("one process", "process+threads") and fault != "raise"
        if not shared:  # else neighbours are lost with their worker, and faulty ones before they came to it
            assert blamed == set(which)
            assert rewards == {i: 1.0 + 10 * i for i in range(4) if i not in which}
        assert blamed
        assert all(rewards[i] == 1.0 + 10 * i for i in rewards)
        assert not blamed & set(rewards)
        with pytest.raises(ValueError, match="in flight"):
            envs.recv()
        obs, _ = envs.reset(seed=5)
        assert obs.tolist() == [[5 + i, 1, 0, 0] for i in range(4)]
        assert envs.step([2] * 4)[1].tolist() == [21.0] * 4
        envs.send([3, 1], [1, 1])
        assert drain(envs) == ({1: 12.0, 3: 12.0}, [])


@pytest.mark.parametrize("fault", ["kill", "hang"])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.flaky(reruns=2)
def test_an_env_that_was_lost_while_others_were_in_flight_tells_what_it_showed_last(
    fault: str, steps: int
) -> None:
    options = {"num_workers": 1, "threads": True, "on_failure": "restart", "step_timeout": 0.5}
    with closing(make_vec([functools.partial(Misbehaving, fault)] * 2, backend="process", **options)) as envs:
        envs.reset(seed=5)
        for _ in range(steps):
            envs.step([1, 2])
        envs.send([1], [FAULT])
        while envs.in_flight:
            envs.recv()
        _, _, _, truncated, infos = envs.step([3, 4])
        assert truncated.tolist() == [True, False]
        assert infos["final_obs"][0].tolist() == [5, 1, steps, 1 if steps else 0]


class KillsAmidARestart(CountEnv):
    """Env 0 raises, and takes a while to be made anew; env 1 ends their process meanwhile."""

    made: ClassVar[int] = 0

    def __init__(self, index: int) -> None:
        super().__init__(1000)
        self.number = index
        if index == 0:
            type(self).made += 1
            time.sleep(0.6 if type(self).made > 1 else 0.0)

    def misbehave(self, action: Any) -> None:
        if int(action) == FAULT and self.number == 1:
            time.sleep(0.3)
        if int(action) == FAULT:
            do("raise" if self.number == 0 else "kill")


@pytest.mark.parametrize("pause", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("what", ["step", "reset"])
def test_an_env_whose_worker_is_replaced_while_it_is_in_flight_is_received_all_the_same(
    what: str, pause: float
) -> None:
    """Received at once, when two have answered and the third has not, and when all is over."""
    fns = [functools.partial(KillsAmidARestart, i) for i in (0, 1, 2)]
    options = {"num_workers": 1, "threads": True, "on_failure": "restart", "max_restarts": 5}
    with closing(make_vec(fns, backend="process", **options)) as envs:
        envs.reset(seed=5)
        envs.send([0, 1], [FAULT, FAULT])
        if what == "step":
            envs.send([2], [3])
        else:
            envs.send_reset([2], [50])
        time.sleep(pause)
        seen: dict[int, Any] = {}
        while envs.in_flight:
            ready = envs.recv(timeout=60.0)
            assert not ready.late, f"never received: {ready.late}"
            seen.update(
                {int(i): (ready.observations[k], ready.truncated[k]) for k, i in enumerate(ready.ids)}
            )
        assert sorted(seen) == [0, 1, 2]
        assert seen[0][1]
        assert seen[1][1]
        if what == "reset":
            assert seen[2][0].tolist() == [50, 1, 0, 0]
        assert envs.step([1, 1, 1])[1][:2].tolist() == [
            11.0,
            11.0,
        ]  # env 2 may have been lost after it was received


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_end_is_received_with_its_last_observation_though_a_neighbour_ended_their_worker(
    mode: str,
) -> None:
    fns = [functools.partial(CountEnv, 1), functools.partial(Misbehaving, "kill"), HEALTHY]
    with closing(make_vec(fns, backend="process", num_workers=1, autoreset=mode)) as envs:
        envs.reset(seed=5)
        envs.send([0, 1, 2], [3, FAULT, 4])
        with pytest.raises(WorkerDiedError, match="env 1"):
            envs.recv(timeout=60.0)
        ready = envs.recv(timeout=60.0)
        assert ready.ids.tolist() == [0]
        assert (ready.rewards[0], ready.terminated[0]) == (31.0, True)
        if mode == "same_step":
            assert ready.infos[0]["final_obs"].tolist() == [5, 1, 1, 3]
            assert ready.observations[0].tolist() == [5, 2, 0, 0]
        else:
            assert ready.observations[0].tolist() == [5, 1, 1, 3]


def test_while_others_are_in_flight_a_failed_env_can_be_reset_and_sent_again() -> None:
    with closing(make_vec(faulty("raise", [0], 3), backend="process", num_workers=1)) as envs:
        envs.reset(seed=0)
        envs.send([0], [FAULT])
        envs.send([1, 2], [1, 2])
        with pytest.raises(ZeroDivisionError, match="env 0"):
            envs.recv(timeout=60.0)
        envs.send_reset([0], [7])
        rewards, errors = drain(envs)
        assert not errors
        assert rewards == {0: 0.0, 1: 11.0, 2: 21.0}
        envs.send([0], [3])
        assert drain(envs) == ({0: 31.0}, [])


@pytest.mark.parametrize("policy", ["restart", "mask"])
@pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.flaky(reruns=2)
def test_several_failures_in_flight_are_all_replaced_or_masked(fault: str, policy: str, workers: int) -> None:
    limit = LIMIT if fault == "hang" else None
    fns = faulty(fault, [0, 1], 4)
    options: Any = {"num_workers": workers, "step_timeout": limit, "on_failure": policy}
    with closing(make_vec(fns, backend="process", **options)) as envs:
        envs.reset(seed=0)
        for i in range(4):
            envs.send([i], [FAULT if i < 2 else 1])
        seen: dict[int, Any] = {}
        start = time.monotonic()
        while len(seen) < 4 and time.monotonic() - start < 60:
            ready = envs.recv(timeout=60.0)
            seen.update(zip(ready.ids.tolist(), zip(ready.truncated, ready.infos, strict=True), strict=True))
        assert sorted(seen) == [0, 1, 2, 3]
        word = "worker_restarted" if policy == "restart" else "worker_masked"
        hurt = [i for i in range(4) if seen[i][0]]
        if (
            policy == "restart" or workers == 4
        ):  # else one of the two was lost with the other, before its turn
            assert all(word in seen[i][1] for i in hurt if i < 2)
        assert 0 in hurt
        if workers == 4 or fault == "raise":
            assert hurt == [0, 1]
        envs.reset(seed=0)
        expected = [11.0 if envs.active[i] else 0.0 for i in range(4)]
        assert envs.step([1] * 4)[1].tolist() == expected


# time limits


BRIEF = 3.0
"""Seconds of slack that are less than what limits which add up would take."""


def limit_for(k: int) -> float:
    """A `step_timeout` of which `k` in a row take longer than one and `BRIEF`."""
    return 1.5 if k == 4 else LIMIT


HANGS = [
    slow_unless((policy == "raise" and k > 1) or (layout, k) == ("process", 4), layout, k, policy)
    for layout, k, policy in itertools.product(PARALLEL, (1, 4, 32), ("raise", "restart", "mask"))
]


@pytest.mark.parametrize(("layout", "k", "policy"), HANGS)
@pytest.mark.flaky(reruns=2)
def test_the_limits_of_hung_envs_do_not_add_up(layout: str, k: int, policy: str) -> None:
    n, limit = max(4, k), limit_for(k)
    start = time.monotonic()
    with closing(
        make_vec(faulty("hang", range(k), n), **LAYOUTS[layout], step_timeout=limit, on_failure=policy)
    ) as envs:
        envs.reset(seed=0)
        anew = 2 * (time.monotonic() - start)  # new processes take about what the first ones took
        actions = [FAULT if i < k else 1 for i in range(n)]
        with within(limit + (anew if policy != "raise" else 0.0), BRIEF):
            if policy == "raise":
                with pytest.raises(WorkerTimeoutError, match=r"env \d+") as caught:
                    envs.step(actions)
                hung = named(told(caught.value))
                assert hung & set(range(k))
                if layout != "process+threads":  # there one may speak for all that its worker took along
                    assert hung == set(range(k))
            else:
                truncated = envs.step(actions)[3]
                assert truncated[:k].all()
        if policy == "raise":
            with within(anew, BRIEF):
                obs, _ = envs.reset(seed=3)
            assert obs[:, 0].tolist() == [3 + i for i in range(n)]


CONSTRUCTORS = [
    slow_unless(k == 1 or (k == 4 and argument == "step_timeout"), layout, k, argument)
    for layout, k, argument in itertools.product(PARALLEL, (1, 4, 32), ("step_timeout", "make_timeout"))
]


@pytest.mark.parametrize(("layout", "k", "argument"), CONSTRUCTORS)
@pytest.mark.flaky(reruns=2)
def test_hanging_constructors_are_named_in_time(layout: str, k: int, argument: str) -> None:
    n = max(4, k)
    first = n - k
    make_vec(HEALTHY, 2, backend="process").close()  # what is started once is not counted
    start = time.monotonic()
    make_vec(HEALTHY, n, **LAYOUTS[layout], step_timeout=60.0).close()
    healthy = time.monotonic() - start  # on a busy machine long
    before = children()
    fns = faulty("hang", range(first, n), n, where="init")
    with within(limit_for(k) + 2 * healthy, BRIEF), pytest.raises(WorkerTimeoutError) as caught:
        make_vec(fns, **LAYOUTS[layout], **{argument: limit_for(k)})
    hung = named(told(caught.value))
    assert hung
    assert hung <= set(range(first, n))
    left = children() - before
    assert gone(left)


@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.flaky(reruns=2)
def test_making_an_env_may_take_longer_than_a_step(layout: str) -> None:
    options = {**LAYOUTS[layout], "step_timeout": 0.5, "make_timeout": 60.0}
    with closing(make_vec([functools.partial(SlowToMake, 0.9)] * 2, **options)) as envs:
        envs.reset(seed=0)
        assert envs.step([1, 1])[1].tolist() == [11.0, 11.0]


@pytest.mark.parametrize("argument", ["step_timeout", "make_timeout"])
@pytest.mark.parametrize(
    "make", [functools.partial(make_vec, backend="auto"), AsyncVectorEnv], ids=["auto", "async"]
)
def test_a_constructor_that_hangs_is_not_tried_by_the_caller(make: Callable[..., Any], argument: str) -> None:
    fns = faulty("hang", [0], 3, where="init")
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"env 0\b.* make"):
        make(fns, **{argument: 0.5})
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("policy", ["restart", "mask"])
def test_where_failures_are_replaced_no_env_is_tried_by_the_caller(policy: str, tmp_path: Path) -> None:
    program = f"""
import os
from shoal.vector import AsyncVectorEnv
from tests.vector.faulty import CountEnv
class Dies(CountEnv):
    def misbehave(self, action):
        os._exit(7)
envs = AsyncVectorEnv([Dies] * 2, on_failure={policy!r}, num_workers=None)
envs.reset(seed=0)
print(envs.step([1, 1])[3].tolist())
envs.close()
"""
    done = script(program, tmp_path)
    assert done.stdout == "[True, True]\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.flaky(reruns=2)
def test_restarts_whose_constructors_hang_end_in_time(layout: str, k: int, tmp_path: Path) -> None:
    fns = [functools.partial(FailsWhenMadeAgain, "hang", str(tmp_path / str(i))) for i in range(k)]
    options = {**LAYOUTS[layout], "step_timeout": LIMIT, "on_failure": "restart", "max_restarts": 1}
    with closing(make_vec([*fns, *[HEALTHY] * (4 - k)], **options)) as envs:
        envs.reset(seed=0)
        with within(LIMIT), pytest.raises(WorkerTimeoutError, match=r"env [0123]"):
            envs.step([FAULT] * k + [1] * (4 - k))


@pytest.mark.parametrize(("backend", "first"), [("process", "kill"), ("thread", "raise")])
def test_restarts_of_several_workers_go_on_side_by_side(backend: str, first: str, tmp_path: Path) -> None:
    fns = [
        functools.partial(FailsWhenMadeAgain, "meet", str(tmp_path / str(i)), 60.0, first) for i in range(4)
    ]
    with closing(make_vec(fns, backend=backend, num_workers=4, on_failure="restart")) as envs:
        envs.reset(seed=0)
        assert envs.step([FAULT] * 4)[3].all()
    assert len(list(tmp_path.glob("*-met"))) == 4


# what a script defines

HOMEMADE = """
import sys
import gymnasium
import numpy as np

class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)
    level = 0
    def reset(self, seed=None, options=None):
        return np.array([1.0]), {}
    def step(self, action):
        return np.array([2.0]), float(getattr(action, "value", action)) + self.level, False, False, {}
    def add(self, value):
        return value.value + 1
"""
IMPORTED = """
import importlib.util
found = importlib.util.spec_from_file_location("homemade", "folder/homemade.py")
module = importlib.util.module_from_spec(found)
sys.modules["homemade"] = module
found.loader.exec_module(module)
MyEnv = module.MyEnv
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("where", ["script", "elsewhere"])
def test_an_env_class_that_a_script_registers_runs_in_workers(
    method: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "homemade.py").write_text(HOMEMADE)
    program = f"""
import sys
import shoal.envs
from shoal.vector import make_vec
{HOMEMADE if where == "script" else IMPORTED}
shoal.envs.register("my_env", MyEnv)
envs = make_vec("my_env", 4, backend="process", num_workers=2, start_method={method!r})
envs.reset(seed=0)
print(envs.step([1, 2, 3, 4])[1].tolist())
envs.close()
direct = make_vec(MyEnv, 2, backend="process", start_method={method!r})
direct.reset(seed=0)
print(direct.step([1, 2])[1].tolist())
direct.close()
"""
    done = script(program, tmp_path)
    assert done.stdout.split("\n")[:2] == ["[1.0, 2.0, 3.0, 4.0]", "[1.0, 2.0]"], done.stderr


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("threads", [False, slow_unless(False, True)])
def test_functions_and_values_of_a_script_reach_the_workers(
    method: str, threads: bool, tmp_path: Path
) -> None:
    program = f"""
from shoal.vector import make_vec
{HOMEMADE}
class Value:
    def __init__(self, value): self.value = value
    def __float__(self): return float(self.value)

def level_of(env, more):
    return env.unwrapped.level + more.value

envs = make_vec(MyEnv, 2, backend="process", num_workers=2, start_method={method!r}, threads={threads})
envs.reset(seed=0)
print(envs.apply(level_of, Value(5)))
print(envs.call("add", Value(6)))
envs.set_attr("thing", Value(7))
print([thing.value for thing in envs.get_attr("thing")])
print([result.reward for result in envs.step_some([1, 0], [Value(8), Value(9)])])
envs.send([0], [Value(3)])
print(envs.recv().rewards.tolist())
envs.close()
"""
    done = script(program, tmp_path)
    expected = ["[5, 5]", "(7, 7)", "[7, 7]", "[8.0, 9.0]", "[3.0]"]
    assert done.stdout.split("\n")[:5] == expected, done.stderr


# steps that the caller gave up waiting for


def test_an_abandoned_step_runs_with_its_own_actions_and_the_next_with_its_own() -> None:
    for layout in PARALLEL:
        fns = [functools.partial(Dawdling, 0.01 * (i + 1)) for i in range(4)]
        options = {**LAYOUTS[layout], "num_workers": 2}
        with closing(make_vec(fns, **options)) as envs:
            envs.reset(seed=0)
            sent: list[list[int]] = []
            for k in range(25):
                abandoned, following = [Dawdling.SLOW] * 4, [(k + i) % 7 for i in range(4)]
                envs.step_async(abandoned)
                with contextlib.suppress(multiprocessing.TimeoutError):
                    envs.step_wait(timeout=0.001)
                assert envs.step(following)[0][:, 3].tolist() == following
                sent += [abandoned, following]
            played = envs.get_attr("actions")
            expected = [[row[i] for row in sent] for i in range(4)]
            wrong = sum(
                a != b
                for mine, want in zip(played, expected, strict=True)
                for a, b in zip(mine, want, strict=False)
            )
            assert (wrong, list(map(len, played))) == (0, [50] * 4), layout


class PaysAndEnds(CountEnv):
    """Every step ends the episode and pays the same."""

    def __init__(self, pays: float) -> None:
        super().__init__(1)
        self.pays = pays

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.pays, *rest


SECONDS = {"timeout": 0.4, "interrupt": 1.0}
"""What a step takes, so that it is not over when it is given up in this way."""


def given_up(envs: Any, actions: list[int], how: str) -> None:
    """Begin a step and give up waiting for it: by a timeout, or by an interrupt."""
    if how == "timeout":
        envs.step_async(actions)
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.0)
        assert isinstance(caught.value, WorkerTimeoutError)
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            envs.step(actions)
            timer.join()  # it comes to this test alone
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        slow_unless(how == "timeout" or mode == "same_step", mode, how)
        for mode in ("same_step", "next_step", "disabled")
        for how in ("timeout", "interrupt")
    ],
)
@pytest.mark.parametrize("layout", PARALLEL)
def test_an_episode_that_ends_in_an_abandoned_step_is_told_by_the_next_one(
    layout: str, mode: str, how: str
) -> None:
    slow = Dawdling.SLOW
    fns = [functools.partial(Dawdling, SECONDS[how], length) for length in (2, 100, 2, 100)]
    with closing(make_vec(fns, **LAYOUTS[layout], autoreset=mode)) as envs:
        envs.reset(seed=10)
        envs.step([1, 1, 1, 1])
        given_up(envs, [slow, slow, 3, 3], how)
        obs, rewards, terminated, truncated, infos = envs.step([5, 6, 5, 6])
        # t + 10 * action: envs 0 and 2 ended at t=2 with actions 8 and 3, the others go on to t=3
        assert rewards.tolist() == [82.0, 63.0, 32.0, 63.0]
        assert terminated.tolist() == [True, False, True, False]
        assert not truncated.any()
        assert infos["late"].tolist() == [True, False, True, False]
        ends = [[10, 1, 2, slow], [12, 1, 2, 3]]
        if mode == "same_step":
            assert [infos["final_obs"][i].tolist() for i in (0, 2)] == ends
            assert "final_info" in infos
            assert obs.tolist() == [[10, 2, 0, 0], [11, 1, 3, 6], [12, 2, 0, 0], [13, 1, 3, 6]]
        else:
            assert obs.tolist() == [ends[0], [11, 1, 3, 6], ends[1], [13, 1, 3, 6]]
        if mode == "disabled":
            envs.reset(options={"reset_mask": np.array([True, False, True, False])})
            expected = [[10, 2, 1, 1], [11, 1, 4, 2], [12, 2, 1, 1], [13, 1, 4, 2]]
        elif mode == "same_step":
            expected = [[10, 2, 1, 1], [11, 1, 4, 2], [12, 2, 1, 1], [13, 1, 4, 2]]
        else:
            expected = [[10, 2, 0, 0], [11, 1, 4, 2], [12, 2, 0, 0], [13, 1, 4, 2]]
        obs, *_, infos = envs.step([1, 2, 1, 2])
        assert obs.tolist() == expected
        assert "late" not in infos


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_an_end_in_an_abandoned_step_outlives_a_reset_that_cannot_be_sent(mode: str) -> None:
    fns = [functools.partial(Dawdling, 0.4, length) for length in (1, 100)]
    with closing(make_vec(fns, backend="process", num_workers=1, autoreset=mode)) as envs:
        envs.reset(seed=10)
        given_up(envs, [3, Dawdling.SLOW], "timeout")
        with pytest.raises(TypeError, match="pickle"):
            envs.reset(seed=20, options={"lock": threading.Lock()})
        _, rewards, terminated, _, infos = envs.step([5, 6])
        assert (rewards.tolist(), terminated.tolist()) == ([31.0, 62.0], [True, False])
        assert infos["late"].tolist() == [True, False]
        assert envs.reset()[0][:, 0].tolist() == [10, 11]


@pytest.mark.parametrize("layout", PARALLEL)
def test_step_some_and_send_tell_late_ends_too_and_a_reset_forgets_them(layout: str) -> None:
    fns = [functools.partial(Dawdling, 0.3, 1)] * 4
    with closing(make_vec(fns, **LAYOUTS[layout])) as envs:
        envs.reset(seed=0)
        given_up(envs, [Dawdling.SLOW] * 4, "timeout")
        (one,) = envs.step_some([1], [4])
        assert (one.reward, one.terminated, one.info["late"]) == (81.0, True, True)
        assert one.info["final_obs"].tolist() == [1, 1, 1, Dawdling.SLOW]
        envs.send([2], [4])
        ready = envs.recv(timeout=60.0)
        assert (ready.rewards.tolist(), ready.terminated.tolist()) == ([81.0], [True])
        assert ready.infos[0]["late"] is True
        envs.reset(options={"reset_mask": np.array([True, False, False, False])})  # settles env 0
        _, rewards, terminated, _, infos = envs.step([2] * 4)
        assert rewards.tolist() == [21.0, 21.0, 21.0, 81.0]
        assert terminated.all()
        assert infos["late"].tolist() == [False, False, False, True]
        envs.step_async([Dawdling.SLOW] * 4)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.0)
        assert envs.reset(seed=4)[0].tolist() == [[4 + i, 1, 0, 0] for i in range(4)]
        assert "late" not in envs.step([1] * 4)[4]
        given_up(envs, [Dawdling.SLOW] * 4, "timeout")
        envs.send_reset([2, 0], [7, 8])
        seen = dict[int, float]()
        while envs.in_flight:
            ready = envs.recv(timeout=60.0)
            seen.update(zip(ready.ids.tolist(), ready.observations[:, 0].tolist(), strict=True))
        assert seen == {2: 7.0, 0: 8.0}
        late = [result.info.get("late", False) for result in envs.step_some(range(4), [1] * 4)]
        assert late == [False, True, False, True]


def test_an_end_in_an_abandoned_step_is_told_though_another_worker_is_replaced_meanwhile() -> None:
    fns = [functools.partial(Dawdling, 0.5, 1), functools.partial(Misbehaving, "kill")]
    with closing(make_vec(fns, backend="process", num_workers=2, on_failure="restart")) as envs:
        envs.reset(seed=0)
        given_up(envs, [Dawdling.SLOW, 1], "timeout")
        (lost,) = envs.step_some([1], [FAULT])
        assert lost.info["worker_restarted"]
        (late,) = envs.step_some([0], [4])
        assert (late.reward, late.terminated, late.info["late"]) == (81.0, True, True)


def test_what_a_neighbour_of_the_one_that_died_showed_last_is_what_the_caller_saw() -> None:
    fns = [
        HEALTHY,
        functools.partial(Dawdling, 0.3),
        functools.partial(Misbehaving, "kill"),
    ]  # by one and two
    with closing(make_vec(fns, backend="process", num_workers=2, on_failure="restart")) as envs:
        envs.reset(seed=0)
        envs.step([1, 1, 1])
        both = envs.step_some([1, 2], [2, FAULT])
        assert [result.info["worker_restarted"] for result in both] == [True, True]
        assert [result.info["final_obs"].tolist() for result in both] == [[1, 1, 1, 1], [2, 1, 1, 1]]
        envs.reset(seed=0)
        given_up(envs, [1, Dawdling.SLOW, 1], "timeout")
        envs.step_some([0], [3])  # the others have not answered yet, and stay where they were
        both = envs.step_some([1, 2], [2, FAULT])
        assert [result.info["worker_restarted"] for result in both] == [True, True]
        assert [result.info["final_obs"].tolist() for result in both] == [
            [1, 1, 1, Dawdling.SLOW],
            [2, 1, 1, 1],
        ]


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        slow_unless(how == "timeout" or policy == "raise", policy, how)
        for policy in ("raise", "restart", "mask")
        for how in ("timeout", "interrupt")
    ],
)
@pytest.mark.parametrize("layout", PARALLEL)
def test_a_failure_in_an_abandoned_step_comes_with_the_next_operation(
    layout: str, policy: str, how: str
) -> None:
    fns = [functools.partial(Dawdling, SECONDS[how])] * 3
    with closing(make_vec(fns, **LAYOUTS[layout], on_failure=policy)) as envs:
        envs.reset(seed=0)
        given_up(envs, [1, FAULT, 1], how)
        if policy == "raise":
            with pytest.raises(ZeroDivisionError, match="env 1"):
                envs.step([2, 2, 2])
            envs.reset(seed=0)
            assert envs.step([2, 2, 2])[1].tolist() == [21.0] * 3
            return
        _, rewards, terminated, truncated, infos = envs.step([2, 2, 2])
        assert rewards.tolist() == [22.0, 0.0, 22.0]
        assert truncated.tolist() == [False, True, False]
        assert not terminated.any()
        assert (
            infos["worker_restarted" if policy == "restart" else "worker_masked"].tolist()
            == truncated.tolist()
        )
        assert envs.active.tolist() == [True, policy == "restart", True]
        assert envs.step([3, 3, 3])[1].tolist() == [33.0, 31.0 if policy == "restart" else 0.0, 33.0]


@pytest.mark.parametrize("between", ["a call", "nothing"])
@pytest.mark.parametrize(
    ("policy", "mode"), [("restart", "same_step"), ("restart", "next_step"), ("mask", "next_step")]
)
@pytest.mark.parametrize("layout", PARALLEL)
def test_what_an_env_showed_before_it_failed_in_an_abandoned_step_is_its_last_observation(
    layout: str, policy: str, mode: str, between: str
) -> None:
    fns = [functools.partial(Dawdling, 0.2)] * 4
    options = {**LAYOUTS[layout], "num_workers": 2, "on_failure": policy, "autoreset": mode}
    with closing(make_vec(fns, **options)) as envs:
        envs.reset(seed=5)
        given_up(envs, [FAULT, Dawdling.SLOW, 1, FAULT], "timeout")
        if between == "a call":
            envs.get_attr("actions")
        obs, _, _, truncated, infos = envs.step([2] * 4)
        assert truncated.tolist() == [True, False, False, True]
        last = infos["final_obs"] if mode == "same_step" else obs
        assert [last[i].tolist() for i in (0, 3)] == [[5, 1, 0, 0], [8, 1, 0, 0]]
        assert obs[1:3].tolist() == [[6, 1, 2, 2], [7, 1, 2, 2]]


@pytest.mark.parametrize("layout", PARALLEL)
def test_what_is_given_up_before_it_could_begin_runs_nowhere(layout: str) -> None:
    fns = [functools.partial(Dawdling, seconds) for seconds in (0.6, 0.0, 0.0, 0.0)]
    slow = Dawdling.SLOW
    with closing(make_vec(fns, **LAYOUTS[layout])) as envs:
        envs.reset(seed=0)
        given_up(envs, [slow, 1, 1, 1], "timeout")
        given_up(envs, [2, 2, 2, 2], "timeout")  # env 0 is at the first one
        batch = np.array([3, 4, 5, 6])
        envs.step_async(batch)
        batch[:] = 7  # of no use any more
        assert envs.step_wait()[1].tolist() == [32.0, 42.0, 52.0, 62.0]  # t + 10 * action
        assert envs.get_attr("actions") == ([slow, 3], [1, 4], [1, 5], [1, 6])


def test_envs_that_are_lost_with_a_neighbour_in_an_abandoned_step_are_reset_with_seeds() -> None:
    class DiesLater(Misbehaving):
        def misbehave(self, action: Any) -> None:
            if int(action) == FAULT:
                time.sleep(0.3)  # by then nobody waits for the step any more
            super().misbehave(action)

    seeds = []
    for _ in range(2):
        fns = [functools.partial(DiesLater, "kill")] * 4
        options = {"num_workers": 2, "threads": True, "on_failure": "restart"}
        with closing(make_vec(fns, backend="process", **options)) as envs:
            envs.reset(seed=5)
            envs.step_async([1, 1, 1, FAULT])
            with pytest.raises(multiprocessing.TimeoutError) as caught:
                envs.step_wait(timeout=0.0)
            assert caught.value.begun
            seeds.append(envs.reset()[0][:, 0].tolist())
    first, again = seeds
    assert first == again
    assert first[:2] == [5, 6]
    assert -1 not in first  # not seeded


def test_a_step_that_waited_for_an_abandoned_one_says_that_it_never_began() -> None:
    with closing(make_vec([functools.partial(Dawdling, 0.4)] * 2, backend="process", num_workers=2)) as envs:
        envs.reset(seed=5)
        envs.step_async([Dawdling.SLOW, 1])
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.0)
        assert caught.value.begun
        envs.step_async([2, 2])
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.0)
        assert not caught.value.begun
        assert envs.get_attr("actions") == ([Dawdling.SLOW], [1])
        assert envs.step([3, 3])[0].tolist() == [[5, 1, 2, 3], [6, 1, 2, 3]]


@pytest.mark.parametrize("pays", [math.nan, math.inf, 1.0])
@pytest.mark.flaky(reruns=2)
def test_an_end_that_pays_no_number_is_no_end_even_when_a_neighbour_hangs_before_anyone_looks(
    pays: float,
) -> None:
    fns = [functools.partial(PaysAndEnds, pays), functools.partial(Misbehaving, "hang")]
    options = {"backend": "thread", "num_workers": 1, "step_timeout": 0.3, "on_failure": "restart"}
    with closing(make_vec(fns, **options)) as envs:
        envs.reset(seed=5)
        _, rewards, terminated, truncated, infos = envs.step([1, FAULT])
        assert infos["worker_restarted"].all()
        assert rewards.tolist() == [1.0 if pays == 1.0 else 0.0, 0.0]
        assert terminated.tolist() == [pays == 1.0, False]
        assert truncated.tolist() == [pays != 1.0, True]
        assert infos["final_obs"][0].tolist() == ([5, 1, 1, 1] if pays == 1.0 else [5, 1, 0, 0])


@pytest.mark.parametrize("layout", PARALLEL)
def test_abandoned_resets_and_calls_do_not_answer_for_later_ones(layout: str) -> None:
    class Slow(CountEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            time.sleep(0.2 if seed is not None and seed < 10 else 0.0)
            return super().reset(seed=seed)

        def wait(self, seconds: float) -> float:
            time.sleep(seconds)
            return seconds

    with closing(make_vec([functools.partial(Slow, 1000)] * 3, **LAYOUTS[layout])) as envs:
        envs.reset_async(seed=0)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.reset_wait(timeout=0.0)
        assert envs.reset(seed=20)[0].tolist() == [[20 + i, 1, 0, 0] for i in range(3)]
        envs.call_async("wait", 0.2)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.call_wait(timeout=0.0)
        assert envs.call("wait", 0.0) == (0.0, 0.0, 0.0)
        assert envs.step([1, 2, 3])[1].tolist() == [11.0, 21.0, 31.0]


# what the caller keeps


@pytest.mark.parametrize("size", [4, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_observations_that_the_caller_keeps_never_change(layout: str, mode: str, size: int) -> None:
    kept: list[tuple[str, Any, Any]] = []

    def keep(way: str, value: Any) -> None:
        kept.append((way, value, np.array(value, copy=True)))

    with closing(make_vec(functools.partial(Picture, size), 3, **LAYOUTS[layout], autoreset=mode)) as envs:
        for turn in range(4):
            keep("reset", envs.reset(seed=turn)[0])
            for _ in range(5):
                obs, *_, infos = envs.step([1] * 3)
                keep("step", obs)
                for final in infos.get("final_obs", ()):
                    keep("final_obs", final)
            envs.send(range(3), [1] * 3)
            flown = 0
            while flown < 3:
                ready = envs.recv()
                keep("recv", ready.observations)
                flown += len(ready.ids)
            envs.send_reset([0, 2])
            flown = 0
            while flown < 2:
                ready = envs.recv()
                keep("recv after send_reset", ready.observations)
                flown += len(ready.ids)
            for result in envs.step_some([2, 0], [1, 1]):
                keep("step_some", result.observation)
            for obs, _ in envs.reset_some([1, 2], [1, 1]):
                keep("reset_some", obs)
            keep("masked reset", envs.reset(options={"reset_mask": np.array([True, False, True])})[0])
    changed = collections.Counter(way for way, value, copy in kept if not np.array_equal(value, copy))
    assert changed == {}
    assert all((row == row.flat[0]).all() for _, _, copy in kept for row in copy.reshape(-1, size))


# restarts


@pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.flaky(reruns=2)
def test_a_fault_in_the_reset_after_a_rewarded_end_loses_neither_reward_nor_end(
    layout: str, fault: str
) -> None:
    if layout in ("serial", "thread") and fault != "raise":
        pytest.skip("this fault would end the caller, or is one of processes")
    options = {**LAYOUTS[layout], **({"step_timeout": LIMIT} if fault == "hang" else {})}
    if layout == "process":
        options["num_workers"] = 2
    fns = [functools.partial(EndsThenFails, fault), HEALTHY]
    with closing(make_vec(fns, **options, on_failure="restart")) as envs:
        envs.reset(seed=4)
        for _ in range(2):
            envs.step([1, 1])
        obs, rewards, terminated, truncated, infos = envs.step([6, 1])
        assert rewards[0] == 1.0
        assert terminated[0]
        assert not truncated[0]
        assert infos["worker_restarted"][0]
        assert infos["final_obs"][0].tolist() == [4, 1, 3, 6]
        assert obs[0, 1:].tolist() == [1, 0, 0]  # a new episode of a new env
        _, rewards, *_ = envs.step([1, 1])
        assert rewards[0] == 0.0


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_env_that_is_masked_out_tells_its_end_and_what_it_showed_last_like_any_other(mode: Any) -> None:
    fns = [functools.partial(EndsThenFails, "raise"), functools.partial(Misbehaving, "raise"), HEALTHY]
    with closing(make_vec(fns, backend="serial", on_failure="mask", autoreset=mode)) as envs:
        envs.reset(seed=4)
        for _ in range(2):
            envs.step([1, 1, 1])
        obs, rewards, terminated, truncated, infos = envs.step([6, FAULT, 1])
        assert rewards.tolist() == [1.0, 0.0, 13.0]
        assert (terminated.tolist(), truncated.tolist()) == ([True, False, False], [False, True, False])
        last = {0: [4, 1, 3, 6], 1: [5, 1, 2, 1]}
        if mode == "next_step":
            assert obs[:2].tolist() == [*last.values()]
            return
        assert {i: infos["final_obs"][i].tolist() for i in (0, 1)} == last
        assert (
            infos["final_info"]["worker_masked"].tolist()
            == infos["worker_masked"].tolist()
            == [True, True, False]
        )
        assert infos["final_obs"][2] is None
        assert envs.reset(seed=1)[1].get("final_obs") is None


class FailsOnceAllowed(CountEnv):
    """Where the step is `FAULT` it fails, but not before a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__(length=1000)
        self.gate = gate

    def step(self, action: Any) -> Any:
        if action == FAULT:
            while not self.gate.exists():
                time.sleep(0.01)
            raise RuntimeError("at last")
        return super().step(action)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_env_that_an_operation_of_its_neighbour_masks_out_tells_its_end_in_the_next_step(
    mode: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    fns = [functools.partial(FailsOnceAllowed, gate)] * 2
    with closing(make_vec(fns, backend="process", num_workers=1, on_failure="mask", autoreset=mode)) as envs:
        envs.reset(seed=0)
        shown = envs.step([1, 1])[0][0].tolist()
        envs.step_async([FAULT, 1])
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.01)
        gate.touch()
        (neighbour,) = envs.step_some([1], [1])
        assert not neighbour.truncated
        for truncated in (True, False):
            obs, _, terminated, cut, infos = envs.step([1, 1])
            assert (terminated.tolist(), cut.tolist()) == ([False, False], [truncated, False])
            assert obs[0].tolist() == shown
            assert infos["worker_masked"].tolist() == [True, False]
            if truncated and mode == "same_step":
                assert infos["final_obs"][0].tolist() == shown


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("some", [True, False])
def test_an_env_that_is_masked_out_tells_its_end_once_though_its_worker_dies_after_it(
    mode: Any, some: bool
) -> None:
    fns = [functools.partial(Misbehaving, "raise"), functools.partial(Misbehaving, "exit"), HEALTHY]
    with closing(make_vec(fns, backend="process", num_workers=1, on_failure="mask", autoreset=mode)) as envs:
        envs.reset(seed=0)
        shown = envs.step([1, 1, 1])[0][0].tolist()
        assert envs.step([FAULT, 1, 1])[3].tolist() == [True, False, False]
        if some:
            assert envs.step_some([1], [FAULT])[0].truncated
        else:
            assert envs.step([1, FAULT, 1])[3].tolist() == [False, True, True]
        envs.reset(options={"reset_mask": np.array([False, False, True])})
        for _ in range(2):
            obs, rewards, terminated, truncated, infos = envs.step([1, 1, 1])
            assert (rewards[0], terminated[0], truncated[0], obs[0].tolist()) == (0.0, False, False, shown)
            assert infos["worker_masked"].tolist()[:2] == [True, True]


class AwaitsFile(CountEnv):
    """A step with the action `FAULT` waits until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__(length=1000)
        self.gate = gate

    def step(self, action: Any) -> Any:
        while action == FAULT and not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


@contextlib.contextmanager
def users_limit() -> Iterator[None]:
    """`TimeoutError` after a moment, as who uses `signal.alarm` limits a call."""

    def over(*_: Any) -> None:
        raise TimeoutError("the user's limit")

    before = signal.signal(signal.SIGALRM, over)
    left = signal.setitimer(signal.ITIMER_REAL, 0.1)  # of the limit that the test itself has
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("wait", ["step", "step_wait", "recv"])
def test_the_timeout_error_of_a_users_handler_is_not_taken_for_the_end_of_a_wait(
    backend: Any, wait: str, tmp_path: Path
) -> None:
    """`recv` came back empty-handed, `step` had "timed out after None second(s)"."""
    gate = tmp_path / "gate"
    fns = [functools.partial(AwaitsFile, gate)] * 2
    with closing(make_vec(fns, backend=backend, num_workers=2)) as envs:
        envs.reset(seed=0)
        if wait == "recv":
            envs.send([0, 1], [FAULT, FAULT])
        elif wait == "step_wait":
            envs.step_async([FAULT, FAULT])
        actions = [[FAULT, FAULT]] if wait == "step" else []
        with pytest.raises(TimeoutError, match="the user's limit"), users_limit():
            getattr(envs, wait)(*actions)
        gate.touch()
        if wait == "recv":
            assert sorted(envs.recv(min_envs=2).ids.tolist()) == [0, 1]
        assert envs.step([1, 1])[0][:, 2].tolist() == [2, 2]


def test_a_users_handler_may_break_off_a_wait_for_a_message() -> None:
    """It was tried again, as if the socket itself had waited for too long."""
    ours, theirs = socket.socketpair()
    receiver, sender = Channel(ours, 60.0), Channel(theirs, 60.0)

    def waited() -> None:
        raise AssertionError("it was taken for a wait of the socket")

    with pytest.raises(TimeoutError, match="the user's limit"), users_limit():
        receiver.receive_bytes(waited)
    sender.send(b"whole")
    assert receiver.receive_bytes() == b"whole"
    receiver.close()
    sender.close()


class EndsWorkerAtEnd(CountEnv):
    """Its last observation ends the process of whoever reads it."""

    def step(self, action: Any) -> Any:
        class Last:
            def __array__(self, *args: Any, **kwargs: Any) -> Any:
                os._exit(7)

        return Last(), 7.0, True, False, {}


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_an_end_whose_last_observation_never_came_is_not_told_as_one(mode: Any) -> None:
    """Under next-step and disabled autoreset it was, with the observation before it."""
    options: Any = {"num_workers": 1, "on_failure": "mask", "autoreset": mode, "check_nan": False}
    with closing(make_vec([HEALTHY, EndsWorkerAtEnd], backend="process", **options)) as envs:
        envs.reset(seed=0)
        _, rewards, terminated, truncated, _ = envs.step([1, 1])
        assert (rewards[1], terminated[1], truncated[1]) == (0.0, False, True)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_restarted_envs_take_seeds_from_the_last_ones_given_the_same_every_time(fault: str) -> None:
    def seeds_seen(seed: Any, way: str) -> list[list[float]]:
        fns = [functools.partial(TellsItsSeed, fault)] * 3
        with closing(make_vec(fns, backend="process", num_workers=3, on_failure="restart")) as envs:
            match way:
                case "reset":
                    envs.reset(seed=seed)
                case "reset_some":
                    envs.reset(seed=99)
                    envs.reset_some([0, 1, 2], [seed, seed + 1, seed + 2])
                case "send_reset":
                    envs.reset(seed=99)
                    envs.send_reset([0, 1, 2], [seed, seed + 1, seed + 2])
                    got = 0
                    while got < 3:
                        got += len(envs.recv().ids)
                case "mask":
                    envs.reset(seed=99)
                    envs.reset(seed=seed, options={"reset_mask": np.array([True, True, True])})
            envs.reset()  # without seeds: the generators go on
            seen = []
            for _ in range(3):
                obs, *_ = envs.step([FAULT, 1, FAULT])
                assert obs[1, 0] == seed + 1
                seen.append(obs[[0, 2], 0].tolist())
            return seen

    first = seeds_seen(5, "reset")
    flat = [number for row in first for number in row]
    assert len(set(flat)) == 6  # every restart of every env has its own
    assert all(0 <= number < 2**31 for number in flat)
    assert not set(flat) & {5.0, 6.0, 7.0}
    for way in ("reset", "reset_some", "send_reset", "mask"):
        assert seeds_seen(5, way) == first, way
    assert seeds_seen(6, "reset") != first


# threads and numbers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limited", [False, True], ids=["unlimited", "limited"])
def test_an_env_lives_and_dies_in_the_thread_that_steps_it(
    layout: str, limited: bool, tmp_path: Path
) -> None:
    if layout == "serial" and limited:
        pytest.skip("the caller cannot interrupt itself")
    options = {**LAYOUTS[layout], "on_failure": "restart", **({"step_timeout": 20.0} if limited else {})}
    fns = [functools.partial(Located, str(tmp_path), "raise" if i == 1 else "") for i in range(3)]
    with closing(make_vec(fns, **options)) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step([1, 1, 1])
        envs.call("method")
        envs.apply(lambda env: env.unwrapped.note("apply"))
        envs.send([0, 1, 2], [1, 1, 1])
        got = 0
        while got < 3:
            got += len(envs.recv(timeout=60.0).ids)
        envs.step_some([2], [1])
        assert envs.step([1, FAULT, 1])[3].tolist() == [False, True, False]
        envs.step([1, 1, 1])
        envs.call("method")
    lives = [[line.split() for line in path.read_text().splitlines()] for path in tmp_path.iterdir()]
    assert len(lives) == 4  # one was replaced
    for life in lives:
        assert [life[0][0], life[-1][0]] == ["init", "close"]
        assert {"reset", "step", "method"} <= {what for what, _, _ in life}
        places = {(pid, thread) for _, pid, thread in life}
        assert len(places) == 1, life
        if layout == "serial":
            assert places == {(str(os.getpid()), str(threading.get_ident()))}


@pytest.mark.parametrize(
    ("n", "workers"), [(300, 1), pytest.param(600, 2, marks=pytest.mark.slow)], ids=["300 in 1", "600 in 2"]
)
def test_one_worker_holds_more_envs_than_a_message_holds_descriptors(n: int, workers: int) -> None:
    with closing(make_vec(HEALTHY, n, backend="process", num_workers=workers, threads=True)) as envs:
        assert envs.reset(seed=0)[0][:, 0].tolist() == [i % 1000 for i in range(n)]
        assert envs.step([i % 10 for i in range(n)])[1].tolist() == [1.0 + 10 * (i % 10) for i in range(n)]


@pytest.mark.slow
def test_auto_takes_hundreds_of_waiting_envs() -> None:
    class Waits(CountEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.005)
            return super().step(action)

    with closing(make_vec(functools.partial(Waits, 1000), 600)) as envs:
        envs.reset(seed=0)
        assert envs.step([1] * 600)[1].tolist() == [11.0] * 600


def test_without_what_only_linux_has_everything_but_processes_works(tmp_path: Path) -> None:
    program = """
import os, signal, socket
missing = {signal: ["SIGRTMIN", "SIGRTMAX", "pidfd_send_signal"], socket: ["SOCK_SEQPACKET"],
           os: ["memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity", "eventfd"]}
for module, names in missing.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
import shoal.vector
from shoal.core.errors import ConfigError
from tests.vector.faulty import CountEnv
envs = shoal.vector.make_vec(CountEnv, 2, backend="serial")
envs.reset(seed=0)
print(envs.step([1, 2])[1].tolist())
envs.close()
try:
    shoal.vector.make_vec(CountEnv, 2, backend="process")
except ConfigError as error:
    print("refused:", error)
"""
    done = script(program, tmp_path)
    first, second, *_ = [*done.stdout.split("\n"), "", ""]
    assert first == "[11.0, 21.0]", done.stderr
    assert second.startswith("refused:"), done.stderr
    assert "process" in second
    assert re.search("platform|Linux|memfd|SEQPACKET|system", second)


def test_two_threads_at_one_vector_env_never_see_each_others_results() -> None:
    for layout in LAYOUTS:
        with closing(make_vec(functools.partial(CountEnv, 10**6), 4, **LAYOUTS[layout])) as envs:
            envs.reset(seed=0)
            steps: list[int] = [0, 0]
            wrong: list[Any] = []

            def play(me: int, envs: Any = envs, steps: Any = steps, wrong: Any = wrong) -> None:
                for _ in range(150):
                    try:
                        obs, rewards, *_ = envs.step([me + 1] * 4)
                    except AlreadyPendingCallError:
                        time.sleep(1e-4)
                        continue
                    except BaseException as error:
                        wrong.append(error)
                        return
                    steps[me] += 1
                    if obs[:, 3].tolist() != [me + 1] * 4 or len(set(obs[:, 2].tolist())) != 1:
                        wrong.append(obs)
                    if rewards.tolist() != [obs[0, 2] + 10 * (me + 1)] * 4:
                        wrong.append(rewards)

            threads = [threading.Thread(target=play, args=(me,), daemon=True) for me in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60.0)
            assert not any(thread.is_alive() for thread in threads), layout
            assert not wrong, layout
            assert envs.step([0] * 4)[0][:, 2].tolist() == [sum(steps) + 1.0] * 4, layout
            assert sum(steps) > 0


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_nothing_begins_before_the_caller_has_what_the_last_operation_shows(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(make_vec(CountEnv, 2, backend=backend)) as envs:
        shown = []

        def amid(take: Any) -> Any:
            def taken(*args: Any) -> Any:
                with pytest.raises(AlreadyPendingCallError):
                    envs.step_async([0, 0])
                shown.append(take(*args))
                return shown[-1]

            return taken

        for name in ("batch", "one"):
            monkeypatch.setattr(envs._observations, name, amid(getattr(envs._observations, name)))
        envs.reset(seed=0)
        envs.step(np.array([1, 2]))
        envs.reset_each([1, 2])
        envs.step_some([1], [1])
        envs.reset_some([0], [5])
        assert len(shown) == 5


def test_a_thread_that_cannot_be_started_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shoal-envs-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        make_vec(CountEnv, 3, backend="thread", num_workers=3)


# exceptions of every kind


@pytest.mark.parametrize("name", QUICK_EXCEPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@contained()
def test_an_exception_of_any_kind_names_its_env_wherever_it_comes(layout: str, name: str) -> None:
    bare = layout == "serial" and name == "KeyboardInterrupt"
    expected: Any = KeyboardInterrupt if bare else WorkerError
    match = None if bare else "env 1.*"
    with pytest.raises(expected, match=match):
        make_vec(faulty(name, [1], 3, where="init"), **LAYOUTS[layout])
    with closing(make_vec(faulty(name, [1], 3), **LAYOUTS[layout])) as envs:
        envs.reset(seed=0)
        with within(1.0), pytest.raises(expected, match=match) as caught:
            envs.step([1, FAULT, 1])
        if not bare:
            assert name in str(caught.value)
        assert envs.reset(seed=3)[0].tolist() == [[3 + i, 1, 0, 0] for i in range(3)]
        assert envs.step([2, 2, 2])[1].tolist() == [21.0] * 3
        envs.send([0, 2], [1, 1])
        if bare:
            with pytest.raises(KeyboardInterrupt):
                envs.send([1], [FAULT]) or drain(envs)
            drain(envs)
        else:
            envs.send([1], [FAULT])
            rewards, errors = drain(envs)
            assert rewards == {0: 12.0, 2: 12.0}
            assert named(told(errors[0])) == {1}
        assert envs.reset(seed=3)[0].tolist() == [[3 + i, 1, 0, 0] for i in range(3)]
    with closing(make_vec(faulty(name, [1], 3, where="reset"), **LAYOUTS[layout])) as envs:
        with within(1.0), pytest.raises(expected, match=match):
            envs.reset(seed=0, options={"fail": True})
        assert envs.reset(seed=3)[0].tolist() == [[3 + i, 1, 0, 0] for i in range(3)]
    with closing(
        make_vec(
            [functools.partial(Misbehaving, name if i == 1 else "", "method") for i in range(3)],
            **LAYOUTS[layout],
        )
    ) as envs:
        envs.reset(seed=0)
        with within(1.0), pytest.raises(expected, match=match):
            envs.call("method")
        assert envs.get_attr("t") == (0, 0, 0)
        assert envs.step([1, 1, 1])[1].tolist() == [11.0] * 3
    envs = make_vec(faulty(name, [1], 3, where="close"), **LAYOUTS[layout])
    envs.reset(seed=0)
    with within(2.0), contextlib.suppress(WorkerError, *([KeyboardInterrupt] if bare else [])):
        envs.close()


@pytest.mark.parametrize("name", QUICK_EXCEPTIONS)
@pytest.mark.parametrize("policy", ["restart", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
@contained()
def test_an_exception_of_any_kind_is_replaced_or_masked(layout: str, policy: str, name: str) -> None:
    if layout == "serial" and name == "KeyboardInterrupt":
        pytest.skip("in the caller's own thread this is the user's")
    with closing(make_vec(faulty(name, [1], 3), **LAYOUTS[layout], on_failure=policy)) as envs:
        envs.reset(seed=0)
        with within(1.0):
            _, rewards, _, truncated, infos = envs.step([1, FAULT, 1])
        assert rewards.tolist() == [11.0, 0.0, 11.0]
        assert truncated.tolist() == [False, True, False]
        assert name in infos["worker_error"][1]
        assert envs.step([1, 1, 1])[1].tolist() == [12.0, 11.0 if policy == "restart" else 0.0, 12.0]


class ExitsWhenClosed(Misbehaving):
    """Raises in a step with action `FAULT`, and `SystemExit` whenever it is closed."""

    def close(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_env_is_replaced_whatever_it_raises_while_it_is_closed(layout: str) -> None:
    fns = [HEALTHY, functools.partial(ExitsWhenClosed, "raise")]
    with closing(make_vec(fns, **LAYOUTS[layout], on_failure="restart")) as envs:
        envs.reset(seed=0)
        assert envs.step([1, FAULT])[3].tolist() == [False, True]
        assert envs.step([1, 1])[1].tolist() == [12.0, 11.0]


@pytest.mark.parametrize("fault", ["exit", "kill"])
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"num_workers": 4}, {"num_workers": 32}, {"num_workers": 2, "threads": True}],
    ids=["1 worker", "4 workers", "32 workers", "2 workers with threads"],
)
def test_a_death_in_the_constructor_of_one_of_32_names_that_one(fault: str, options: Any) -> None:
    fns = faulty(fault, [17], 32, where="init")
    with pytest.raises(WorkerDiedError) as caught:
        make_vec(fns, backend="process", **options)
    message = str(caught.value)
    if "threads" in options:  # they are made at one time: whoever was at it may be named beside
        assert 17 in named(told(caught.value))
    else:
        assert named(message) == {17}
    assert {"kill": "SIGKILL", "exit": "code 7"}[fault] in message


@pytest.mark.parametrize(
    ("fault", "way", "threads"),
    [
        slow_unless(fault == "exit" or (way == "info" and not threads), fault, way, threads)
        for fault in ("exit", "raise", "nonsense", "hang", "SystemExit")
        for way in ("info", "result")
        for threads in (False, True)
    ],
)
@pytest.mark.flaky(reruns=2)
def test_what_is_harmful_to_unpickle_never_harms_the_caller(
    fault: str, way: str, threads: bool, tmp_path: Path
) -> None:
    act = f"envs.step([1, {FAULT}, 1])" if way == "info" else "envs.call('method')"
    program = f"""
import functools
import gc
from shoal.core.errors import WorkerError
from shoal.vector import make_vec
from tests.vector.misbehaving import Bombing
fns = [functools.partial(Bombing, {fault!r}, {way!r}) if i == 1 else Bombing for i in range(3)]
envs = make_vec(fns, backend="process", num_workers=3, threads={threads}, step_timeout=0.5)
envs.reset(seed=0)
try:
    {act}
except WorkerError as error:
    print("refused", error)
print(envs.reset(seed=3)[0][:, 0].tolist())
envs.close()
"""
    done = script(program, tmp_path)
    first, second, *_ = [*done.stdout.split("\n"), "", ""]
    assert first.startswith("refused"), (done.returncode, done.stdout, done.stderr)
    assert named(first) == {1}
    assert second == "[3.0, 4.0, 5.0]"


def test_an_exception_that_is_harmful_to_unpickle_is_a_failure_of_its_env(tmp_path: Path) -> None:
    program = f"""
import functools
import gc
from shoal.core.errors import WorkerError
from shoal.vector import make_vec
from tests.vector.misbehaving import Bombing
fns = [functools.partial(Bombing, "exit", "exception") if i == 1 else Bombing for i in range(3)]
envs = make_vec(fns, backend="process", num_workers=3)
envs.reset(seed=0)
try:
    envs.step([1, {FAULT}, 1])
except WorkerError as error:
    print("refused", error)
envs.close()
"""
    done = script(program, tmp_path)
    assert named(done.stdout) == {1}, (done.returncode, done.stderr)


# programs that envs start


@pytest.mark.parametrize("session", [False, True], ids=["same session", "new session"])
@pytest.mark.parametrize("end", ["close", "kill", "restart"])
def test_programs_that_an_env_starts_end_with_it(session: bool, end: str) -> None:
    fns = [functools.partial(StartsAProgram, session)] * 2
    policy = "restart" if end == "restart" else "raise"
    envs = make_vec(fns, backend="process", num_workers=2, on_failure=policy)
    pids = list(envs.get_attr("pid"))
    assert all(map(alive, pids))
    try:
        envs.reset(seed=0)
        if end == "kill":
            with pytest.raises(WorkerDiedError):
                envs.step([FAULT, 1])
            assert gone(pids[:1])
            assert alive(pids[1])
        elif end == "restart":
            envs.step([FAULT, 1])
            assert gone(pids[:1])
            assert alive(pids[1])
            fresh = envs.get_attr("pid")
            assert alive(fresh[0])
            pids.append(fresh[0])
    finally:
        with within(2.0):
            envs.close()
        left = not gone(pids)
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("session", [False, True], ids=["same session", "new session"])
@pytest.mark.parametrize("method", ["forkserver", slow_unless(False, "spawn")])
def test_programs_that_an_env_starts_end_when_the_caller_is_killed(
    session: bool, method: str, tmp_path: Path
) -> None:
    program = f"""
import functools, time
from shoal.vector import make_vec
from tests.vector.misbehaving import StartsAProgram
envs = make_vec([functools.partial(StartsAProgram, {session})] * 2, backend="process", num_workers=2,
                start_method={method!r})
print(*envs.get_attr("pid"), *[row["pid"] for row in envs.stats()["workers"]], flush=True)
time.sleep(60)
"""
    path = tmp_path / "script.py"
    path.write_text(program)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    caller = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, env=environ)
    assert caller.stdout is not None
    pids = [int(word) for word in caller.stdout.readline().split()]
    caller.kill()
    caller.wait(60)
    caller.stdout.close()
    ended = len(pids) == 4 and gone(pids)
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)
    assert ended


# auto, and arguments


@pytest.mark.parametrize(
    "how",
    [
        "init raises",
        "reset raises",
        "step raises",
        "reset returns None",
        "step returns three things",
        "step returns None as observation",
    ],
)
@contained()
def test_auto_shows_no_raw_error_of_the_env_that_it_tries(how: str, tmp_path: Path) -> None:
    def play(fn: Any) -> list[float]:
        with closing(make_vec(fn, 4)) as envs:
            envs.reset(seed=0)
            rewards: list[float] = envs.step([1] * 4)[1].tolist()
            return rewards

    with pytest.raises(WorkerError, match=r"env \d"):
        play(functools.partial(Nonsense, how))
    # where only the one that is tried is at fault, the others are as good as ever
    assert play(functools.partial(Nonsense, how, only_first=str(tmp_path / "tried"))) == [11.0] * 4


def test_auto_does_not_try_a_slow_env_for_long() -> None:
    tried = []

    class Slow(CountEnv):
        def step(self, action: Any) -> Any:
            tried.append(action)
            time.sleep(1.0)
            return super().step(action)

    with closing(make_vec(Slow, 2)) as envs:
        assert len(tried) == 1
        envs.reset(seed=0)
        assert envs.step([1, 2])[1].tolist() == [11.0, 21.0]


def test_gymnasiums_constructor_takes_what_applies_and_refuses_what_does_not() -> None:
    with pytest.raises(ValueError, match="restrat.*|on_failure"):
        AsyncVectorEnv([CountEnv] * 2, on_failure="restrat").close()  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="step_timeouts"):
        AsyncVectorEnv([CountEnv] * 2, step_timeouts=3).close()
    with closing(AsyncVectorEnv([HEALTHY] * 4, threads=True)) as envs:
        envs.reset(seed=0)
        assert envs.step(np.array([1, 2, 3, 4]))[1].tolist() == [11.0, 21.0, 31.0, 41.0]
    for strange in (float("nan"), float("inf")):
        with closing(AsyncVectorEnv([functools.partial(Pays, strange)] * 2)) as envs:
            envs.reset(seed=0)
            assert not np.isfinite(envs.step(np.array([FAULT, FAULT]))[1]).any()


def test_gymnasiums_constructor_takes_an_env_of_shoals_own() -> None:
    with closing(AsyncVectorEnv([functools.partial(shoal.envs.make, "countdown")] * 2)) as envs:
        obs, _ = envs.reset(seed=3)
        assert all(isinstance(text, str) for text in obs)
        envs.step(("<answer>1</answer>", "nothing"))


def test_sb3_takes_only_pools_that_reset_in_the_same_step_and_no_options_beside() -> None:
    pytest.importorskip("stable_baselines3")
    from shoal.vector import SB3VecEnv

    for mode in ("next_step", "disabled"):
        pool = make_vec(CountEnv, 2, backend="serial", autoreset=mode)
        with closing(pool), pytest.raises(ValueError, match="same.step"):
            SB3VecEnv(pool)
    for option in (
        {"step_timeout": 3.0},
        {"num_workers": 2},
        {"backend": "thread"},
        {"start_method": "spawn"},
    ):
        pool = make_vec(CountEnv, 2, backend="serial")
        with closing(pool), pytest.raises((ValueError, TypeError), match=next(iter(option))):
            SB3VecEnv(pool, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_tells_which_envs_are_masked(layout: str) -> None:
    with closing(make_vec(faulty("raise", [1], 3), **LAYOUTS[layout], on_failure="mask")) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            infos = envs.step([1, FAULT, 1])[4]
            assert infos["worker_masked"].tolist() == [False, True, False]
        envs.reset(seed=1)
        assert envs.step([1, 1, 1])[4]["worker_masked"].tolist() == [False, True, False]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("reward", "word"),
    [
        (float("inf"), "inf"),
        (float("-inf"), "inf"),
        (float("nan"), "nan"),
        ("5", "5"),
        ([1.0, 2.0], "reward must be a number"),
        (None, "reward must be a number, got none"),
        (np.complex64(1 + 2j), "reward must be a number, got"),
        (np.datetime64(50, "Y"), "reward must be a number, got"),
        (10**400, "the reward must fit into a float, got a whole number too large for one"),
        (Unspeakable(), "reward must be a number"),
    ],
    ids=["inf", "-inf", "nan", "text", "list", "none", "complex", "date", "huge", "unspeakable"],
)
def test_a_reward_that_is_no_number_is_refused_with_its_env(layout: str, reward: Any, word: str) -> None:
    fns = [HEALTHY, functools.partial(Pays, reward)]
    for policy in ("raise", "restart"):
        with closing(make_vec(fns, **LAYOUTS[layout], on_failure=policy)) as envs:
            envs.reset(seed=0)
            if policy == "raise":
                with pytest.raises(WorkerError, match=r"env 1\b") as caught:
                    envs.step([1, FAULT])
                message = str(caught.value)
            else:
                _, rewards, _, truncated, infos = envs.step([1, FAULT])
                assert rewards.tolist() == [11.0, 0.0]
                assert truncated.tolist() == [False, True]
                message = infos["worker_error"][1]
            assert word in message.lower()


# --- ends of episodes whose env is lost before they are told
KILL = np.int64(12)


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@contextlib.contextmanager
def housemates(mode: str) -> Iterator[Any]:
    """Envs 0 and 1 live in one process, each in a thread; env 0 has episodes of one step."""
    makers = [functools.partial(Encoded, i) for i in range(4)]
    with contextlib.closing(
        make_vec(
            makers, backend="process", num_workers=2, threads=True, on_failure="restart", autoreset=mode,
            max_restarts=9, step_timeout=10.0,
        )
    ) as envs:  # fmt: skip
        envs.reset(seed=3)
        yield envs


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_episode_ends_with_what_was_seen_of_it_however_often_its_env_is_lost(mode):
    with housemates(mode) as envs:
        shown = envs.observations()[0]
        for _ in range(3):
            envs.step_some([1], [KILL])
        (end,) = envs.step_some([0], [np.int64(1)])
        assert (end.reward, end.terminated, end.truncated) == (0.0, False, True)
        assert np.array_equal(end.info["final_obs"] if mode == "same_step" else end.observation, shown)
        assert end.info["worker_restarted"]


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("lost", ["before it is told", "as it is told"])
def test_an_end_in_an_abandoned_step_is_told_though_its_env_is_lost(mode, lost):
    with housemates(mode) as envs:
        envs.step_async(np.array([5, 0, 0, SLOW]))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.0)
        if lost == "before it is told":
            until(envs.workers[0].answered)
            time.sleep(0.1)  # the rest of its answer travels
            envs.step_some([1], [KILL])
            (end,) = envs.step_some([0], [np.int64(1)])
        else:
            end, _ = envs.step_some([0, 1], [np.int64(1), KILL])
        assert (end.reward, end.terminated, end.truncated) == (51.0, True, False)
        assert end.info["late"]
        assert end.info["worker_restarted"]
        final = end.info["final_obs"] if mode == "same_step" else end.observation
        assert final.tolist() == [0, 3, 1, 1, 5, 1, 0]
        if mode == "same_step":
            assert end.info["final_info"] == {"t": 1}
            begun = end.observation
        else:
            begun = envs.step_some([0], [np.int64(1)])[0].observation
        assert begun[[3, 4, 6]].tolist() == [0, 0, 0]  # the first observation of an env made anew
        assert begun[1] > 10


@pytest.mark.parametrize("policy", ["raise", "restart"])
@contained()
def test_an_action_that_cannot_be_sent_leaves_everything_as_it_was(policy: Any) -> None:
    locked = threading.Lock()
    with closing(make_vec(CountEnv, 4, backend="process", num_workers=2, on_failure=policy)) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([1, 2, 3, 4])
        before = envs.observations()
        with pytest.raises(TypeError, match="cannot pickle"):
            envs.step_some([1], [locked])
        assert envs.observations().tolist() == before.tolist()
        before = envs.step([1, 2, 3, 4])[0]
        envs.send([0, 1, 2, 3], [1, locked, 3, 4])  # 0 and 1 live together, and are told together
        with pytest.raises(TypeError, match="cannot pickle") as caught, within(2.0):
            envs.recv(4)
        assert "environments [0, 1]" in caught.value.__notes__[0]
        assert envs.in_flight == [2, 3]
        with within(2.0):
            assert sorted(envs.recv(2).ids.tolist()) == [2, 3]
        assert envs.observations()[:2].tolist() == before[:2].tolist()
        assert envs.step([1, 1, 1, 1])[1].tolist() == [14.0, 14.0, 15.0, 15.0]


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_amid_a_step_it_shows_what_was_seen_before(backend: Any) -> None:
    workers = None if backend == "serial" else 2
    with closing(make_vec(CountEnv, 4, backend=backend, num_workers=workers, on_failure="restart")) as envs:
        envs.reset(seed=0)
        for k in range(3):
            before = envs.step([1, 2, 3, 4])[0]
            assert envs.observations().tolist() == before.tolist()
            envs.step_async([3, 4, 5, 6])
            if k == 1:
                with pytest.raises(TypeError):
                    envs.step_wait("soon")
            until(lambda: all(worker.answered() for worker in envs.workers))
            assert envs.observations().tolist() == before.tolist()
            after = envs.step_wait()[0]
            assert after.tolist() != before.tolist()
            assert envs.observations().tolist() == after.tolist()
        envs.send([1], [7])
        until(envs.workers[0].answered)
        assert envs.observations().tolist() == after.tolist()
        shown = envs.recv(1).observations[0]
        assert envs.observations()[1].tolist() == shown.tolist() != after[1].tolist()
        envs.call_async("get_wrapper_attr", "spec")
        assert envs.observations()[1].tolist() == shown.tolist()
        envs.call_wait()


@pytest.mark.parametrize("flying", [True, False])
@pytest.mark.parametrize("options", [{"ring": 3}, {"on_failure": "restart", "max_restarts": 0}])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_after_an_error_it_shows_what_was_seen_before(
    backend: Any, options: dict[str, Any], flying: bool
) -> None:
    fns = [functools.partial(Faulty, "raise"), CountEnv]
    with closing(make_vec(fns, backend=backend, **options)) as envs:
        envs.reset(seed=0)
        for k in range(4):
            before = envs.step([k, k])[0].copy()
        if flying:
            envs.send([0], [9])
        with pytest.raises(WorkerError, match="env 0"):
            _ = envs.recv() if flying else envs.step([9, 1])
        assert envs.observations()[0].tolist() == before[0].tolist()


def test_a_step_that_the_caller_never_did_leaves_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make_vec(CountEnv, 2, backend="serial", on_failure="restart")) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            before = envs.step([1, 2])[0]
        envs.step_async([3, 4])
        (worker,) = envs.workers
        with monkeypatch.context() as patched:
            patched.setattr(worker, "take", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                envs.step_wait()
        assert envs.observations().tolist() == before.tolist()
        assert envs.step([1, 2])[0][:, 2].tolist() == (before[:, 2] + 1).tolist()


@pytest.mark.filterwarnings("ignore:.*fork")  # of Python 3.12, where threads run
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_fork_of_the_caller_cannot_step_its_environments(backend: Any) -> None:
    envs = make_vec(CountEnv, 2, backend=backend, num_workers=2)
    envs.reset(seed=0)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        told = b"stepped"
        try:
            envs.step([9, 9])
        except ClosedEnvironmentError as error:
            told = str(error).encode()
            envs.close()
        finally:
            os.write(writing, told)
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as told_by_child:
        assert "forked" in told_by_child.read()
    assert [envs.step([k, k])[1].tolist() for k in (1, 2)] == [[11.0, 11.0], [22.0, 22.0]]
    envs.close()


class Patient(CountEnv):
    """Waits before every step, and with the action `FAULT` for long."""

    wait = 0.0

    def misbehave(self, action: Any) -> None:
        RELEASED.wait(3600 if int(action) == FAULT else self.wait)


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("waits", ["step", "recv", "call"])
def test_who_waits_while_another_thread_closes_is_told_so(waits: str, policy: Any, backend: Any) -> None:
    envs = make_vec(Patient, 2, backend=backend, num_workers=2, on_failure=policy)
    before = children() - {row.get("pid") for row in envs.stats()["workers"]}
    envs.reset(seed=0)
    another = threading.Timer(0.2, envs.close, kwargs={"timeout": 0.3})
    another.start()
    if waits == "recv":
        envs.send([0, 1], [FAULT, FAULT])
    wait: Any = {
        "step": lambda: envs.step([FAULT, FAULT]),
        "recv": lambda: envs.recv(2),
        "call": lambda: envs.call("misbehave", FAULT),
    }
    with pytest.raises(ClosedEnvironmentError, match="close"):
        wait[waits]()
    another.join()
    until(lambda: not children() - before)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call gives, or raises, where each has a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def test_threads_that_close_at_the_same_time_all_succeed() -> None:
    for _ in range(2):
        envs = make_vec(CountEnv, 2, backend="process", num_workers=2)
        workers = {row["pid"] for row in envs.stats()["workers"]}
        assert at_once(*[envs.close] * 4) == [None] * 4
        assert not workers & children()


def test_one_thread_gets_what_was_begun_and_another_is_told_that_it_waits() -> None:
    with closing(make_vec(Patient, 2, backend="process", num_workers=2)) as envs:
        envs.reset(seed=0)
        envs.set_attr("wait", 1.5)
        envs.step_async([2, 3])
        one, other = sorted(
            at_once(envs.step_wait, envs.step_wait), key=lambda got: isinstance(got, Exception)
        )
        assert one[1].tolist() == [21.0, 31.0]
        assert isinstance(other, AlreadyPendingCallError)
        assert envs.step([1, 1])[1].tolist() == [12.0, 12.0]


def test_workers_whose_close_was_interrupted_end_with_the_vector_env() -> None:
    envs = make_vec(functools.partial(Misbehaving, "hang", "close"), 2, backend="process", num_workers=2)
    workers = {row["pid"] for row in envs.stats()["workers"]}
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have SIGINT ignored
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            envs.close()
            timer.join()  # it comes to this test alone
    finally:
        signal.signal(signal.SIGINT, was)
    assert workers <= children()
    del envs
    gc.collect()
    assert not workers & children()
