"""`send` and `recv`: who is ready, who is late, and what happens when somebody fails on the way."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError

from shoal.core.errors import ConfigError, WorkerDiedError, WorkerTimeoutError
from shoal.vector import make_vec
from shoal.vector.vector_env import PendingTimeoutError, VectorPool
from tests.vector.faulty import CountEnv, Faulty
from tests.vector.living import children

HELD = 3
"""The action that takes long."""


class Held(CountEnv):
    """Takes its time over the action `HELD`."""

    seconds = 0.6

    def misbehave(self, action: Any) -> None:
        if action == HELD:
            time.sleep(self.seconds)


class HeldLong(Held):
    seconds = 2.0


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_recv_names_those_it_did_not_wait_for_and_brings_them_later(backend: Any) -> None:
    fns = [functools.partial(HeldLong, 1000), *[functools.partial(CountEnv, 1000)] * 2]
    envs = make_vec(fns, backend=backend, num_workers=3)
    envs.reset(seed=0)
    envs.send([0, 1, 2], [HELD, 1, 2])
    early = envs.recv(min_envs=3, timeout=0.7)
    assert sorted(early.ids.tolist()) == [1, 2]
    assert early.late == [0]
    assert envs.in_flight == [0]
    envs.send([2], [4])  # the others go on meanwhile
    again = envs.recv(min_envs=1, timeout=60.0)
    assert again.late == []  # env 0 is at work, but not for so long
    assert again.ids.tolist() == [2]
    assert again.rewards.tolist() == [42.0]
    with pytest.raises(ValueError, match="still in flight"):
        envs.send([0], [1])
    with pytest.raises(AlreadyPendingCallError):
        envs.step([1, 1, 1])
    last = envs.recv()
    assert last.ids.tolist() == [0]
    assert last.rewards.tolist() == [1.0 + 10 * HELD]  # its own result, to its own action
    assert last.late == []
    with pytest.raises(ValueError, match="send some actions first"):
        envs.recv()
    assert envs.step([0, 0, 0])[1].tolist() == [2.0, 2.0, 3.0]
    envs.close()


def test_recv_with_a_timeout_may_return_nothing_but_says_who_is_late() -> None:
    envs = make_vec([functools.partial(Held, 1000)] * 2, backend="process", num_workers=2)
    envs.reset(seed=0)
    envs.send([0, 1], [HELD, HELD])
    ready = envs.recv(min_envs=1, timeout=0.05)
    assert ready.ids.tolist() == []
    assert ready.late == [0, 1]
    assert ready.observations.shape == (0, 4)
    assert sorted(envs.recv(2).ids.tolist()) == [0, 1]
    envs.close()


@pytest.mark.parametrize("flying", [True, False])
@pytest.mark.parametrize(("backend", "fault"), [("process", "kill"), ("process", "hang"), ("thread", "hang")])
@pytest.mark.flaky(reruns=2)
def test_who_asks_often_and_never_waits_long_hears_of_a_failure(
    backend: Any, fault: str, flying: bool
) -> None:
    options = {"step_timeout": 0.3} if fault == "hang" else {}
    envs = make_vec([functools.partial(Faulty, fault), CountEnv], backend=backend, num_workers=2, **options)
    envs.reset(seed=0)

    def ask() -> None:
        if flying:
            envs.send([0], [9])
        actions, end = [9, 0], time.monotonic() + 60.0
        while time.monotonic() < end:
            if flying:
                envs.recv(timeout=0.01)
                continue
            envs.step_async(actions)
            actions = [0, 0]
            with contextlib.suppress(PendingTimeoutError):
                envs.step_wait(timeout=0.01)

    with pytest.raises(WorkerTimeoutError if fault == "hang" else WorkerDiedError, match="env 0"):
        ask()
    envs.close(terminate=True)


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
@pytest.mark.flaky(reruns=2)
def test_a_failure_in_flight_is_replaced_and_the_others_come_as_ever(fault: str) -> None:
    fns = [functools.partial(CountEnv, 1000), functools.partial(Faulty, fault)]
    timeout = 0.5 if fault == "hang" else None
    envs = make_vec(fns, backend="process", num_workers=2, on_failure="restart", step_timeout=timeout)
    envs.reset(seed=0)
    seen: dict[int, Any] = {}
    envs.send([0, 1], [2, 9])
    while len(seen) < 2:
        ready = envs.recv()
        for k, i in enumerate(ready.ids.tolist()):
            seen[i] = (ready.rewards[k], bool(ready.truncated[k]), ready.infos[k])
    assert seen[0][:2] == (21.0, False)
    assert seen[1][:2] == (0.0, True)
    assert seen[1][2]["worker_restarted"]
    envs.send([0, 1], [1, 1])
    rewards = dict.fromkeys((0, 1), 0.0)
    while envs.in_flight:
        ready = envs.recv()
        rewards.update(zip(ready.ids.tolist(), ready.rewards.tolist(), strict=True))
    assert rewards == {0: 12.0, 1: 11.0}
    envs.close()


@pytest.mark.parametrize("flying", [True, False])
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.flaky(reruns=2)
def test_an_env_is_not_late_because_its_caller_was_away(backend: Any, flying: bool) -> None:
    fns = [functools.partial(Held, 1000)] * 3  # 1.8 s for all, 0.6 s for each
    envs = make_vec(fns, backend=backend, num_workers=1, step_timeout=1.5)
    envs.reset(seed=0)
    if flying:
        envs.send(range(3), [HELD] * 3)
        time.sleep(1.6)
        assert sorted(envs.recv(3).ids.tolist()) == [0, 1, 2]
    else:
        envs.step_async([HELD] * 3)
        time.sleep(1.6)
        assert envs.step_wait()[1].tolist() == [31.0] * 3
    envs.close()


def test_resets_fly_too_and_each_env_gets_its_own_seed() -> None:
    envs = make_vec(CountEnv, 3, backend="process", num_workers=2)
    envs.reset(seed=0)
    envs.send_reset([2, 0], [7, 8])
    first: dict[int, Any] = {}
    while len(first) < 2:
        ready = envs.recv()
        assert ready.rewards.tolist() == [0.0] * len(ready.ids)
        first.update(zip(ready.ids.tolist(), ready.observations[:, 0].tolist(), strict=True))
    assert first == {2: 7.0, 0: 8.0}
    envs.close()


def test_a_pool_that_does_not_fit_into_memory_is_refused_and_leaves_no_worker() -> None:
    make_vec(CountEnv, 2, backend="process", num_workers=1).close()  # the starter is there already
    before = children()
    with pytest.raises(ConfigError, match="not enough shared memory for .* MiB.*shorter ring"):
        make_vec(CountEnv, 2, backend="process", num_workers=2, ring=1 << 36)
    assert children() <= before


def test_an_interrupt_in_the_callers_own_group_leaves_only_those_it_cut_off_out_of_flight() -> None:
    class Interrupted(CountEnv):
        def misbehave(self, action: Any) -> None:
            if action == HELD:
                raise KeyboardInterrupt

    envs = make_vec([functools.partial(Interrupted, 1000)] * 3, backend="serial")
    envs.reset(seed=0)
    envs.send([1, 2], [HELD, 2])
    envs.send([0], [4])  # waits for the group
    with pytest.raises(KeyboardInterrupt):
        envs.recv()
    assert envs.in_flight == [0]
    ready = envs.recv()
    assert (ready.ids.tolist(), ready.rewards.tolist()) == ([0], [41.0])
    with pytest.raises(ValueError, match="send some actions first"):
        envs.recv()
    envs.send_reset([1], [9])
    assert envs.recv().observations.tolist() == [[9, 1, 0, 0]]
    assert envs.step([1, 1, 1])[1].tolist() == [12.0, 11.0, 11.0]
    envs.close()


def receive_all(envs: Any, received: list[int]) -> None:
    while envs.in_flight:
        received += envs.recv(timeout=60.0).ids.tolist()


def test_of_several_failures_in_flight_the_first_is_raised_and_names_the_others() -> None:
    envs = make_vec(functools.partial(Faulty, "raise"), 3, backend="process", num_workers=3)
    envs.reset(seed=0)
    envs.send([0, 1, 2], [9, 9, 9])
    while not all(worker.answered() for worker in envs.workers):
        time.sleep(0.005)
    with pytest.raises(ZeroDivisionError, match="env 0 ") as caught:
        envs.recv(3)
    assert [note.partition(" (pid")[0] for note in caught.value.__notes__] == ["also: env 1", "also: env 2"]
    envs.close()


class Interrupts:
    """An action that is interrupted while it is sent."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_in_send_leaves_nobody_in_flight_who_never_began() -> None:
    envs = make_vec(CountEnv, 3, backend="process", num_workers=3)
    envs.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        envs.send([0, 1, 2], [1, Interrupts(), 2])
    assert envs.in_flight == [0]
    assert envs.recv(min_envs=3).ids.tolist() == [0]
    envs.send([1, 2], [3, 4])
    assert sorted(envs.recv(min_envs=2).rewards.tolist()) == [31.0, 41.0]
    envs.close()


def test_an_interrupt_while_an_env_in_flight_is_replaced_leaves_nobody_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fns = [functools.partial(Faulty, "kill"), *[functools.partial(CountEnv, 1000)] * 2]
    envs = make_vec(fns, backend="process", num_workers=3, on_failure="restart")
    envs.reset(seed=0)
    envs.send([0, 1], [9, 1])

    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(VectorPool, "_make_anew", interrupted)
    received: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        receive_all(envs, received)
    receive_all(envs, received)
    assert received == [1]
    assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4, 5]
    assert envs.step([1, 1, 1])[1].tolist() == [11.0] * 3
    envs.close()


def test_an_interrupt_while_a_result_is_taken_over_leaves_nobody_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    envs = make_vec(CountEnv, 2, backend="process", num_workers=2)
    envs.reset(seed=0)
    envs.send([0, 1], [1, 2])
    while not all(worker.answered() for worker in envs.workers):
        time.sleep(0.005)
    monkeypatch.setattr(VectorPool, "_landing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        envs.recv(2)
    assert envs.in_flight == [1]
    assert envs.recv(2).ids.tolist() == [1]
    assert envs.step([1, 1])[1].tolist() == [12.0, 12.0]
    envs.close()


def test_results_that_were_taken_over_before_an_interrupt_come_with_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    envs = make_vec(
        "CartPole-v1", 2, backend="process", num_workers=2
    )  # they tell nothing beside the buffers
    envs.reset(seed=0)
    envs.send([0, 1], [np.int64(0), np.int64(1)])
    while not all(worker.answered() for worker in envs.workers):
        time.sleep(0.005)
    monkeypatch.setattr(envs.workers[1], "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        envs.recv(2)
    assert envs.in_flight == [0, 1]
    assert sorted(envs.recv(2).ids.tolist()) == [0, 1]
    envs.close()


class PaysNothingKnown(CountEnv):
    """Its reward for the action 9 is NaN, which is noticed when its observation has been written."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if action == 9 else reward, *rest


@pytest.mark.parametrize("flights", [1, 2, 3])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_the_last_observation_of_an_env_that_fails_after_a_flight_is_what_it_showed(
    backend: Any, flights: int
) -> None:
    envs = make_vec([PaysNothingKnown] * 2, backend=backend, on_failure="restart", autoreset="same_step")
    envs.reset(seed=0)
    envs.step_some([0], [1])  # which moves the places on without the flights
    for _ in range(flights):
        envs.send([0], [1])
        shown = envs.recv().observations[0].tolist()
    infos = envs.step(np.array([9, 1]))[4]
    assert infos["worker_restarted"].tolist() == [True, False]
    assert infos["final_obs"][0].tolist() == shown
    envs.close()
