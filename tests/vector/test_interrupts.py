"""An exception that comes from outside, as Ctrl-C's or that of a signal's handler, at any point of an operation."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import linecache
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError

from shoal.core.errors import EnvError
from shoal.core.processes import Channel
from shoal.vector import make_vec
from shoal.vector.env_group import StepTimes
from tests.vector.faulty import CountEnv

LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
"""After these, in code of Python, it looks for signals."""


def interrupted(act: Callable[[], Any], at: int, error: type[BaseException]) -> str:
    """Do something and raise the error at that point of it, in code of shoal: the line; "" where it was over before."""
    left, before, line = at, sys.gettrace(), ""
    last: tuple[Any, str] = None, ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal last
        last = frame, "RESUME"  # and where it returns to: no look, as that was no call of C
        frame.f_trace_opcodes = True
        return look if "/shoal/" in frame.f_code.co_filename else None

    def look(frame: Any, event: str, _: Any) -> Any:
        nonlocal last, left, line
        if event == "opcode":
            (who, name), last = last, (frame, dis.opname[frame.f_code.co_code[frame.f_lasti]])
            left -= who is frame and name in LOOKS
            if not left:
                sys.settrace(before)
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                raise error("from outside")
        return look

    gc.collect()  # no vector env of another test is closed meanwhile
    gc.disable()
    sys.settrace(trace)
    try:
        with contextlib.suppress(error):
            act()
    finally:
        sys.settrace(before)
        gc.enable()
    return line


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the caller's own envs is timed: an interrupt between such a step and its clock is one amid the env."""
    monkeypatch.setattr(StepTimes, "turn", lambda self, steps: steps)


@pytest.mark.parametrize(
    ("backend", "every", "error"),
    [
        ("serial", 1, KeyboardInterrupt),
        ("thread", 5, KeyboardInterrupt),
        ("process", 5, KeyboardInterrupt),
        ("process", 2, TimeoutError),
    ],
)
def test_a_step_that_is_interrupted_at_any_point_is_done_once_or_never_and_its_end_is_told(
    backend: Any, every: int, error: type[BaseException]
) -> None:
    workers = {} if backend == "serial" else {"num_workers": 2}
    envs = make_vec([functools.partial(CountEnv, n) for n in (10_000, 1, 3)], backend=backend, **workers)
    envs.reset(seed=0)
    t, of_three = 0, 0  # steps of the first env's episode, and of the last one's
    for at in itertools.count(1, every):
        line = interrupted(lambda: envs.step(np.array([3, 3, 3])), at, error)
        if not line:
            break
        try:
            obs, rewards, terminated, _, infos = envs.step(np.array([4, 4, 4]))
        except EnvError:  # it came while the caller itself began the next episode
            envs.reset(seed=0)
            t = of_three = 0
            continue
        done = int(obs[0, 2]) - t - 1
        t += 1 + done
        assert done in (0, 1), at
        assert obs[0].tolist() == [0, 1, t, 4], at
        assert rewards[0] == t + 40, at
        assert terminated[:2].tolist() == [False, True], at
        late = infos.get("late", [False] * 3)
        assert rewards[1] == (31 if late[1] else 41), at
        assert infos["final_obs"][1][2:].tolist() == [1, 3 if late[1] else 4], at
        now = 3 if terminated[2] else int(obs[2, 2])
        handed_over = line.strip() == "self._turn.clear()"  # the last thing that `step` does
        assert now - of_three in (1, 2) or late[2] or handed_over, (at, line)
        of_three = now % 3
    assert at > 40
    envs.close()


@pytest.mark.parametrize(("backend", "every"), [("serial", 1), ("thread", 5), ("process", 5)])
def test_an_end_in_flight_is_told_wherever_sending_and_receiving_are_interrupted(
    backend: Any, every: int
) -> None:
    workers = {} if backend == "serial" else {"num_workers": 2}
    envs = make_vec([functools.partial(CountEnv, n) for n in (10_000, 3)], backend=backend, **workers)
    envs.reset(seed=0)
    t = 0  # of the second env's episode

    def fly() -> None:
        envs.send([0, 1], [np.int64(3)] * 2)
        envs.recv(min_envs=2)

    for at in itertools.count(1, every):
        line = interrupted(fly, at, KeyboardInterrupt)
        if not line:
            break
        while envs.in_flight:
            ready = envs.recv()
            for k in np.flatnonzero(ready.ids == 1):
                t = 0 if ready.terminated[k] else int(ready.observations[k, 2])
        try:
            obs, _, terminated, _, infos = envs.step(np.array([4, 4]))
        except EnvError:  # it came while the caller itself began the next episode
            envs.reset(seed=0)
            t = 0
            continue
        now = 3 if terminated[1] else int(obs[1, 2])
        handed_over = line.strip() == "self._turn.clear()"  # the last thing that `recv` does
        assert now - t in (1, 2) or "late" in infos or handed_over, (at, line, t, obs, terminated)
        t = now % 3
    assert at > 40
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("operation", ["reset", "call", "set_attr", "send"])
def test_after_an_interrupt_at_any_point_the_next_operations_are_right(operation: str, backend: Any) -> None:
    envs = make_vec(functools.partial(CountEnv, 10_000), 2, backend=backend)
    acts = {
        "reset": lambda: envs.reset(seed=5),
        "call": lambda: envs.call("render"),
        "set_attr": lambda: envs.set_attr("index", "more than there is room for on the way" * 20_000),
        "send": lambda: [envs.send([0, 1], [np.int64(3)] * 2), envs.recv(min_envs=2)],
    }
    envs.reset(seed=0)
    for at in itertools.count(1, 3):
        if not interrupted(acts[operation], at, KeyboardInterrupt):
            break
        while envs.in_flight:
            assert set(envs.recv().observations[:, 3]) == {3}
        assert envs.reset(seed=at)[0].tolist() == [[at, 1, 0, 0], [at + 1, 1, 0, 0]], at
        assert envs.step(np.array([4, 4]))[0].tolist() == [[at, 1, 1, 4], [at + 1, 1, 1, 4]], at
    assert at > 40
    envs.close()


def test_a_message_that_was_broken_off_is_sent_to_its_end_by_the_next_flush() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    receiver, sender = Channel(ours, 0.05), Channel(theirs, 0.05)
    data = bytes(range(256)) * 2**13  # more than there is room for on the way
    sender.load(data)
    with pytest.raises(KeyboardInterrupt):
        sender.flush(interrupt)
    rest = threading.Thread(target=sender.flush, args=(lambda: None,))
    rest.start()
    assert receiver.receive_bytes() == data
    rest.join()
    receiver.close()
    sender.close()


def test_a_wait_of_another_thread_takes_nothing_of_a_step_that_the_caller_itself_does() -> None:
    told: list[BaseException] = []

    def wait() -> None:
        try:
            envs.step_wait()
        except AlreadyPendingCallError as error:
            told.append(error)

    class Asks(CountEnv):
        def misbehave(self, action: Any) -> None:
            other = threading.Thread(target=wait)
            other.start()
            other.join()

    envs = make_vec(Asks, 2, backend="serial")
    envs.reset(seed=0)
    assert envs.step(np.array([4, 4]))[0][:, 2:].tolist() == [[1, 4]] * 2
    assert len(told) == 2
    envs.close()


@pytest.mark.parametrize("ends", ["waited for", "given up"])
def test_a_wait_that_comes_late_takes_nothing_of_the_next_operation(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = make_vec(functools.partial(CountEnv, 10_000), 2, backend="serial")
    envs.reset(seed=0)
    expect = envs._expect

    def slowly(operation: str, timeout: float | None) -> Any:
        turn = expect(operation, timeout)
        monkeypatch.undo()  # other threads do this meanwhile
        if ends == "waited for":
            envs.step_wait()
        else:
            with pytest.raises(KeyboardInterrupt):
                envs._at_once(lambda: None, interrupt)
        envs.call_async("render")
        return turn

    def interrupt() -> None:
        raise KeyboardInterrupt

    envs.step_async(np.array([4, 4]))
    monkeypatch.setattr(envs, "_expect", slowly)
    with pytest.raises(AlreadyPendingCallError):
        envs.step_wait()
    assert envs.call_wait() == (("0/1", "1/1") if ends == "waited for" else ("0/0", "1/0"))
    envs.close()
