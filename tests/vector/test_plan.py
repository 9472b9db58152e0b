"""What `backend="auto"` chooses, and that it looks before it relies on a second core."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from shoal.vector import AsyncVectorEnv, make, make_vec
from shoal.vector.env_group import Trial
from shoal.vector.make import LEAST, LONGEST, StepCost, default_workers, open_workers, pays
from shoal.vector.process import Worker
from tests.vector.faulty import CountEnv
from tests.vector.scripted import Scripted

ROOT = Path(__file__).parents[2]


class Machine:
    """A clock that goes on only while somebody works: 10 ns a round."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def work(self, rounds: int) -> None:
        self.seconds += rounds * 1e-8


class Busy(Worker):
    """A worker that begins `late` seconds after it is told, on a core of its own or on the caller's."""

    inline = False

    def __init__(self, machine: Machine, count: int, *, late: float = 0.0, own_core: bool = True) -> None:
        super().__init__(0, [print] * count)  # type: ignore[list-item]
        self.machine, self.late, self.own_core = machine, late, own_core
        self.rounds: list[int] = []

    def start(self, command: Any, *, bell: bool = False) -> None:
        assert isinstance(command, Trial)
        self.command = command
        self.rounds.append(command.rounds)
        self.ready = self.machine.seconds + self.late + command.rounds * 1e-8

    def receive(self) -> None:
        if self.own_core:
            self.machine.seconds = max(self.machine.seconds, self.ready)
        else:
            self.machine.work(self.rounds[-1])


def caller(count: int) -> Worker:
    return Worker(0, [print] * count)  # type: ignore[list-item]


def decision(cost: StepCost, n_envs: int = 32, **options: Any) -> tuple[bool, Busy]:
    machine = Machine()
    worker = Busy(machine, n_envs // 2, **options)
    return pays([worker, caller(n_envs // 2)], cost, work=machine.work, now=machine.now), worker


def test_workers_pay_when_they_work_while_the_caller_does() -> None:
    paid, worker = decision(StepCost(20e-6, 20e-6))
    assert paid
    # 16 of 32 environments of 20 us at 10 ns a round
    assert set(worker.rounds) <= {31_999, 32_000, 32_001}
    assert 155 <= len(worker.rounds) <= 160  # 150 ms of 320 us together and 640 us alone


def test_workers_do_not_pay_when_there_is_one_core_for_all() -> None:
    assert not decision(StepCost(20e-6, 20e-6), own_core=False)[0]


@pytest.mark.parametrize(("late", "paid"), [(150e-6, True), (250e-6, False)])
def test_workers_pay_only_while_waking_them_costs_less_than_they_save(late: float, paid: bool) -> None:
    # alone 640 us, of which 0.8 is 512; shared 320 us and the time to wake up
    assert decision(StepCost(20e-6, 20e-6), late=late)[0] is paid


def test_workers_do_not_pay_when_carrying_costs_more_than_stepping() -> None:
    assert not decision(StepCost(2e-6, 2e-6, nbytes=100_000))[0]


def test_rare_long_waits_count_for_workers_wake_up_late_where_others_keep_the_core() -> None:
    class Crowded(Busy):
        def receive(self) -> None:
            super().receive()
            if len(self.rounds) % 10 == 9:
                self.machine.seconds += 3e-3  # somebody else's time slice

    machine = Machine()
    crowded = Crowded(machine, 16)
    assert not pays([crowded, caller(16)], StepCost(20e-6, 20e-6), work=machine.work, now=machine.now)


def test_nothing_is_tried_where_steps_are_long() -> None:
    paid, worker = decision(StepCost(LONGEST, LONGEST), own_core=False)
    assert paid
    assert not worker.rounds


@pytest.mark.parametrize(
    ("seconds", "tried"),
    # 300 at most; 50 ms; three where that takes longer, which may take half a second
    [(1e-5, 300), (1e-3, 50), (0.03, 3), (0.2, 3), (0.6, 1)],
)
def test_an_env_is_tried_for_a_moment_and_three_times_if_half_a_second_is_enough(
    monkeypatch: Any, seconds: float, tried: int
) -> None:
    machine = Machine()
    steps = []

    class Timed(CountEnv):
        def misbehave(self, action: Any) -> None:
            machine.seconds += seconds
            steps.append(action)

    clock = types.SimpleNamespace(perf_counter=machine.now, thread_time=lambda: machine.seconds / 2)
    monkeypatch.setattr(make, "time", clock)
    cost = make.probe(functools.partial(Timed, 4))
    assert cost is not None
    assert abs(len(steps) - tried) <= (tried == 50)  # sums of milliseconds are not exact
    assert cost.wall == pytest.approx(seconds)
    assert cost.cpu == pytest.approx(seconds / 2)
    assert cost.nbytes == 32


def test_an_env_that_cannot_be_tried_is_left_to_whoever_makes_it_and_an_interrupt_is_not() -> None:
    class Fails(CountEnv):
        def misbehave(self, action: Any) -> None:
            raise error

    error: BaseException = SystemExit(1)
    assert make.probe(Fails) is None
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        make.probe(Fails)


def test_the_slowest_quarter_of_a_trial_is_not_counted(monkeypatch: Any) -> None:
    machine = Machine()
    takes = iter([1e-3, 1e-3, 9e-3, 1e-3] * 3 + [1.0])

    class Timed(CountEnv):
        def misbehave(self, action: Any) -> None:
            machine.seconds += next(takes)

    monkeypatch.setattr(
        make, "time", types.SimpleNamespace(perf_counter=machine.now, thread_time=machine.now)
    )
    cost = make.probe(Timed)
    assert cost is not None
    assert cost.wall == pytest.approx(1e-3)  # nine of twelve or thirteen


PROGRAM = """
import os, sys
sys.path.insert(0, {root!r})
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import shoal.vector.make as plan
from shoal.vector import make_vec
from tests.vector.faulty import CountEnv
from tests.vector.scripted import Scripted
class Busy(CountEnv):
    def misbehave(self, action):
        for _ in range(2000):
            pass
plan.available_cpus = lambda: 2  # a core that is counted and never free
assert plan.choose(plan.probe(Busy), 16).backend == "process"
for _ in range(3):  # others that use this core may spoil a trial
    envs = make_vec(Busy, 16)
    if [worker.inline for worker in envs.workers] == [True]:
        break
    envs.close()
else:
    sys.exit("it went to workers three times")
assert envs.stats()["workers"] == []
obs, _ = envs.reset(seed=0)
assert obs[:, 1].tolist() == [1.0] * 16  # the first episode: the trial touched no env
assert envs.step([2] * 16)[1].tolist() == [21.0] * 16
envs.close()
"""


def test_auto_stays_with_the_caller_when_the_second_core_never_comes() -> None:
    program = PROGRAM.format(root=str(ROOT))
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=200)


@pytest.mark.parametrize("moment", ["pays", "VectorPool"])
def test_an_interrupt_while_auto_tries_leaves_no_worker_behind(monkeypatch: Any, moment: str) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    plan = make.Plan("process", workers=1, caller_share=1, cost=StepCost(1e-3, 1e-3))
    monkeypatch.setattr(make, "probe", lambda fn: plan.cost)
    monkeypatch.setattr(make, "choose", lambda cost, n_envs: plan)
    opened = []
    monkeypatch.setattr(make, "open_workers", lambda *given: opened.append(open_workers(*given)) or opened[0])
    monkeypatch.setattr(make, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_vec(CountEnv, 2)
    (process,) = opened[0].backend.processes
    assert not process.alive()


def test_the_first_two_rounds_of_a_trial_wake_up_and_do_not_count() -> None:
    class Sleepy(Busy):
        def receive(self) -> None:
            super().receive()
            if len(self.rounds) <= 2:
                self.machine.seconds += 1.0

    machine = Machine()
    worker = Sleepy(machine, 16)
    # so long that the trial is over after the fewest rounds: 8, of which 6 count
    cost = StepCost(100e-6, 100e-6)
    assert pays([worker, caller(16)], cost, work=machine.work, now=machine.now)
    assert len(worker.rounds) == LEAST


def test_what_the_clocks_take_is_no_cost_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Timed(CountEnv):
        def misbehave(self, action: Any) -> None:
            clock[0] += 5.0

    def thread_time() -> float:  # it takes a second to look at
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(
        make, "time", types.SimpleNamespace(perf_counter=lambda: clock[0], thread_time=thread_time)
    )
    cost = make.probe(Timed)
    assert cost is not None
    assert (cost.wall, cost.texts, cost.nbytes) == (5.0, 0, 32)


@pytest.mark.parametrize(
    ("texts", "backend"), [(0, "process"), (1, "serial")], ids=["as many bytes", "as text"]
)
def test_short_steps_that_show_text_stay_with_the_caller(texts: int, backend: str) -> None:
    assert make.choose(StepCost(1e-6, 1e-6, 500, texts), 64, cpus=2).backend == backend
    assert make.choose(StepCost(20e-6, 20e-6, 500, texts), 64, cpus=2).backend == "process"


def test_what_a_worker_writes_is_part_of_its_share() -> None:
    assert make.choose(StepCost(20e-6, 20e-6, 100_000), 32, cpus=2).backend == "serial"
    plan = make.choose(StepCost(20e-6, 20e-6, 20_000), 32, cpus=2)
    assert (plan.backend, plan.caller_share) == ("process", 16)


def test_texts_are_counted_wherever_they_are() -> None:
    spaces = gymnasium.spaces
    space = spaces.Dict({"a": spaces.Text(9), "b": spaces.Tuple((spaces.Text(9), spaces.Discrete(2)))})
    cost = make.probe(lambda: Scripted(space, spaces.Discrete(2), 3, 0))
    assert cost is not None
    assert cost.texts == 2


@pytest.mark.parametrize(
    ("n_envs", "threads", "cpus", "workers"),
    [
        (1, True, 2, 1),
        (8, True, 2, 2),
        (32, True, 2, 4),
        (128, True, 2, 16),
        (128, True, 32, 32),
        (128, False, 2, 2),
    ],
)
def test_threads_that_wait_are_shared_out_over_more_processes_than_cores(
    n_envs: int, threads: bool, cpus: int, workers: int
) -> None:
    assert default_workers(n_envs, threads, cpus) == workers


@pytest.mark.parametrize("made", [make_vec, AsyncVectorEnv])
def test_forty_envs_in_threads_live_in_five_processes(monkeypatch: Any, made: Any) -> None:
    monkeypatch.setattr(make, "available_cpus", lambda: 2)
    given = {"backend": "process"} if made is make_vec else {}
    with contextlib.closing(made([CountEnv] * 40, threads=True, make_timeout=60.0, **given)) as envs:
        assert len({worker.home for worker in envs.workers}) == 5
