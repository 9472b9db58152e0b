"""The room itself: how many doors a step goes through, and its parts where no environment shows them."""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector import SyncVectorEnv

from shoal.core.errors import ConfigError, EnvError
from shoal.core.processes import SLICE, dumps
from shoal.vector import env_group, make_vec, process
from shoal.vector.buffers import (
    BUCKETS,
    LINE,
    LOADING,
    NOTHING_LOOSE,
    WHOLE,
    Buffers,
    Observations,
    Patience,
    RowWriter,
    TextBuffer,
    of_group,
    read,
    shared_file,
    split,
    write_batch,
    write_some,
)
from shoal.vector.env_group import Apply, Step, StepTimes, bucket_of
from shoal.vector.failures import restart_seed
from shoal.vector.make import probe
from shoal.vector.process import Limits, Worker, look_at, wait_any
from shoal.vector.values import Layout, Leaf, Told, batch_infos
from shoal.vector.worker import Make
from tests.rooms.trace import Tracer
from tests.vector.faulty import CountEnv


def test_a_step_in_worker_processes_passes_at_most_six_files(tmp_path: Path) -> None:
    with Tracer("shoal", tmp_path) as tracer:
        fns = [functools.partial(tracer.installed, CountEnv, 3)] * 4
        envs = make_vec(fns, backend="process", num_workers=2)
        envs.reset(seed=0)
        with tracer.piece() as passed:
            for _ in range(7):  # with infos, and with episodes that end
                envs.step(np.array([1, 2, 3, 4]))
        envs.close()
    assert len(passed.processes()) == 3
    files = passed.files(leave_out=("core/", "vector/vector_env.py"))
    assert {"vector/process.py", "vector/worker.py", "vector/env_group.py"} <= files
    assert len(files) <= 6, files


def large(places: int) -> tuple[Buffers, Observations]:
    """Observations of 1 MiB whose memory is used again."""
    layout, actions = Layout.of(Box(0, 255, (512, 512), np.uint8)), Layout.of(Discrete(2))
    buffers = Buffers(4, layout, actions, places=places)
    return buffers, Observations(buffers, copy=True, handouts=places > 1)


def test_memory_of_large_copies_is_used_again_only_when_nobody_looks_at_it() -> None:
    buffers, observations = large(1)
    seen = set()
    for k in range(8):
        buffers.obs[0][0] = k
        batch = observations.batch(0)
        seen.add(batch.ctypes.data)
        assert (batch == k).all()
        del batch
    assert len(seen) == 1
    kept = []
    for k in range(12):  # more than there is room for: the rest are plain copies
        buffers.obs[0][0] = k
        kept.append(observations.batch(0)[2, :3])  # a view alone keeps the whole
    gc.collect()
    assert [row[0, 0] for row in kept] == list(range(12))


def test_a_place_that_was_handed_out_is_written_again_only_when_nobody_looks_at_it() -> None:
    buffers, observations = large(5)
    kept: list[Any] = []
    place = 0
    for k in range(9):
        place = observations.next_place(place)
        buffers.obs[0][place] = k
        kept.append(observations.batch(place)[1, 7])
    assert [row[0] for row in kept] == list(range(9))
    assert observations.next_place(place) == 0  # all others are looked at: place 0 is copied
    del kept[2]
    assert observations.next_place(place) == 3


def test_restart_seeds_are_numbers_that_every_generator_takes_and_never_twice_the_same() -> None:
    seeds = [restart_seed(seed, k) for seed in (*range(40), 2**31 - 1, 2**64) for k in range(1, 6)]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert restart_seed(None, 1) is None


def test_infos_of_different_kinds_under_one_key_are_kept_as_they_are() -> None:
    told = [Told(0, None, None, {"a": 1}), Told(2, None, None, {"a": "x"}), Told(1, None, None, {"a": [3]})]
    batch = batch_infos(3, told)
    assert batch["a"].tolist() == [1, [3], "x"]
    assert batch["_a"].tolist() == [True, True, True]


def test_an_array_in_an_info_fills_the_room_of_the_first_one_as_in_gymnasium() -> None:
    told = [Told(i, None, None, {"a": np.full(3 - 2 * i, i)}) for i in range(2)]
    theirs = SyncVectorEnv.__new__(SyncVectorEnv)
    theirs.num_envs, infos = 2, dict[str, Any]()
    for item in told:
        infos = theirs._add_info(infos, item.info, item.env)
    assert batch_infos(2, told)["a"].tolist() == infos["a"].tolist() == [[0, 0, 0], [1, 1, 1]]


class Ours:
    """Of a module that is no library's."""


def test_what_is_plain_is_told_from_what_brings_code_along() -> None:
    for value in (1, "a", None, (1.5, {"a": [b"x"]}), np.arange(3), np.float32(2), Box(0, 1, (2,))):
        assert dumps(value)[1], value
    for value in (Ours(), Ours, lambda: 0, {"a": [Ours()]}, np.array([Ours()], dtype=object)):
        assert not dumps(value)[1], value


def test_infos_made_of_numbers_arrive_as_they_were_told() -> None:
    from shoal.vector.env_group import Reply
    from shoal.vector.values import IN_BUFFER
    from shoal.vector.worker import packed, unpacked

    numbers = [
        {
            "a": np.float64(k + 0.5),
            "b": float(k),
            "c": k > 1,
            "d": np.bool_(k),
            "e": np.int32(-k),
            "f": 10**30,
        }
        for k in range(3)
    ]
    told = [Told(k, None, None, info) for k, info in enumerate(numbers)]
    told += [Told(7, None, None, {"b": 1.0}), Told(8, None, None, {"a": np.float64(1), "text": "x"})]
    told += [Told(9, IN_BUFFER, {"a": np.float64(2)}, {}), Told(5, None, None, {"a": np.float32(2)})]
    sequence, reply = unpacked(packed(Reply(told=list(told)), 41, 0))
    assert sequence == 41
    came = {item.env: item for item in reply.told}
    assert sorted(came) == sorted(item.env for item in told)
    for item in told:
        assert came[item.env].final is item.final
        assert came[item.env].final_info == item.final_info
        mine, theirs = came[item.env].info, item.info
        assert list(mine) == list(theirs)
        assert [(type(a), a) for a in mine.values()] == [(type(a), a) for a in theirs.values()]


def test_looking_that_never_pays_is_done_ever_more_rarely_until_it_pays_again() -> None:
    tries: list[bool] = []
    there = False

    def acquire(_: bool) -> bool:
        tries.append(there)
        return there

    patience = Patience(most=1e-3)
    looked = []  # in which of the waits was there more than one try
    for wait in range(140):
        tries.clear()
        assert patience.look(acquire) is False
        if len(tries) > 1:
            looked.append(wait)
    assert looked == [0, 2, 6, 14, 30, 62, 126]  # 1, 3, 7, 15, 31, 63 are skipped in between
    there = True
    assert patience.look(acquire) is True
    there, tries[:] = False, []
    for _ in range(64):
        patience.look(acquire)
    assert len(tries) > 64


@pytest.mark.parametrize(
    ("seconds", "timed", "then"), [(50e-6, 10, 10), (150e-6, 1 + (170 - 17), 11)], ids=["short", "long"]
)
def test_one_short_step_in_seventeen_is_timed_and_every_long_one(
    monkeypatch: Any, seconds: float, timed: int, then: int
) -> None:
    now, takes = [1000.0], [seconds]

    def step(action: int) -> int:
        now[0] += takes[0]
        return action

    monkeypatch.setattr(env_group, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    rows = np.zeros((2, BUCKETS), np.uint32)
    times = StepTimes(rows)
    times.wrap([step, step])
    for k in range(170):
        assert [one(k) for one in times.turn([step, step])] == [k, k]
    assert rows[:, bucket_of(seconds)].tolist() == rows.sum(axis=1).tolist() == [timed] * 2
    takes[0] = 50e-6  # after a long one the next is looked at, then the 2nd, 19th, … 155th
    for k in range(170):
        assert [one(k) for one in times.turn([step, step])] == [k, k]
    assert rows.sum(axis=1).tolist() == [timed + then] * 2


@pytest.mark.parametrize(
    ("space", "values", "nbytes"),
    [
        (Box(0, 1, (3,), np.float64), np.zeros(3), 24),
        (Text(9), "four", 4),
        (
            Dict({"a": Discrete(2), "b": Tuple((Box(0, 1, (2,), np.uint8), Text(3)))}),
            {"a": 1, "b": (np.zeros(2, np.uint8), "xyz")},
            8 + 2 + 3,
        ),
    ],
)
def test_a_trial_tells_the_size_of_an_observation(space: Any, values: Any, nbytes: int) -> None:
    class Told(gymnasium.Env[Any, Any]):
        observation_space, action_space = space, Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return values, {}

        def step(self, action: Any) -> Any:
            return values, 0.0, False, False, {}

    cost = probe(Told)
    assert cost is not None
    assert cost.nbytes == nbytes
    assert 0 < cost.cpu <= cost.wall * 1.5


def test_rows_of_memory_are_aligned_and_never_overlap() -> None:
    layout = Layout.of(Dict({"a": Box(0, 1, (3,), np.float32), "b": Text(5), "c": Discrete(2)}))
    sizes = Buffers(5, layout, Layout.of(Discrete(2)), places=3, text_bytes=7, memory=False).nbytes
    memory = bytearray(sizes)
    buffers = Buffers(5, layout, Layout.of(Discrete(2)), places=3, text_bytes=7, memory=memory)
    arrays = [buffers.rewards, buffers.terminated, buffers.truncated, buffers.members, buffers.times]
    arrays += [item for item in (*buffers.act, *buffers.obs, buffers.final) if item is not None]
    starts = sorted((item.ctypes.data - arrays[0].ctypes.data, item.nbytes) for item in arrays)
    assert all(start % LINE == 0 for start, _ in starts)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(starts))
    assert sum(starts[-1]) <= sizes < sum(starts[-1]) + LINE
    assert [item.shape for item in buffers.obs] == [(3, 5, 3), (5, 16 + 7), (3, 5)]


def test_text_that_does_not_fit_is_not_packed() -> None:
    buffer = TextBuffer(memoryview(bytearray(4 * 5 + 6)), 3)
    assert buffer.capacity == 6
    assert buffer.pack(["ab", "", "☃c"])  # 2 + 0 + 4 bytes
    assert buffer.unpack() == ["ab", "", "☃c"]
    assert not buffer.pack(["ab", "", "☃cd"])
    assert not buffer.pack(["ab", None, "c"])  # type: ignore[list-item]
    assert buffer.unpack() == ["ab", "", "☃c"]


class Clocked(Worker):
    """A worker that is where it is said to be."""

    inline = False
    at = 0

    def start(self, command: Any, *, bell: bool = False) -> None:
        self.command = command

    def answered(self) -> bool:
        return False

    def progress(self) -> int:
        return self.at


def test_the_time_limit_of_an_env_begins_when_its_turn_does(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    worker = Clocked(0, [CountEnv] * 3, Limits(step=1.0, make=5.0))
    worker.begin(Step(None, 0, {}))
    seen = []
    for at, later in ((0, 0.4), (0, 0.4), (1, 0.1), (1, 0.9), (2, 0.1), (2, 0.9), (2, 0.2)):
        now[0] += later
        worker.at = at
        seen.append(worker.overdue(now[0]))
    assert seen == [None] * 6 + [1.0]
    worker.begin(Make(0, ()))
    worker.at = LOADING
    now[0] += 6.0
    assert worker.overdue(now[0]) is None  # starting and importing have their own time
    worker.at = 0
    assert worker.overdue(now[0]) is None
    assert worker.overdue(now[0] + 5.1) == 5.0
    worker.excuse(now[0] + 5.1)
    assert worker.overdue(now[0] + 10.0) is None


def test_a_worker_without_limits_is_never_overdue() -> None:
    worker = Clocked(0, [CountEnv])
    worker.begin(Step(None, 0, {}))
    assert worker.overdue(1e12) is None
    limited = Clocked(0, [CountEnv], Limits(make=1.0))
    limited.begin(Step(None, 0, {}))
    assert limited.overdue(1e12) is None


def test_memory_that_cannot_be_had_is_told_before_it_is_written(monkeypatch: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for code, error, message in (
        (errno.ENOSPC, ConfigError, "not enough shared memory for 1 MiB .*No space left"),
        (errno.EPERM, PermissionError, "not permitted"),
    ):

        def refuse(*_: Any, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(error, match=message):
            shared_file(2**20)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ConfigError, match="MiB are available"):
        shared_file(1 << 61)
    descriptor = shared_file(10)
    assert os.fstat(descriptor).st_size == 10
    os.close(descriptor)


def test_those_who_live_with_one_that_is_overdue_are_lost_with_it_and_nobody_else() -> None:
    def worker(first: int, home: Any, limit: float | None) -> Clocked:
        made = Clocked(first, [CountEnv] * 2, Limits(step=limit))
        made.home = home
        made.stack = lambda: "here"  # type: ignore[method-assign]
        made.begin(Step(None, 0, {}))
        return made

    house: Any = object()
    workers = [worker(0, house, 1e-9), worker(2, house, None), worker(4, None, 1e-9), worker(6, None, None)]
    look_at(workers)  # each clock starts when its worker is seen at work
    look_at(workers)
    lost = [worker.lost for worker in workers]
    assert lost[0] is lost[1]
    assert [None if one is None else (one.env, one.kind) for one in lost] == [
        (0, "timeout"),
        (0, "timeout"),
        (4, "timeout"),
        None,
    ]
    assert lost[0] is not None
    assert (lost[0].summary, lost[0].trace) == ("no answer within 1e-09 s", "here")


def test_those_who_die_together_are_lost_for_one_reason_that_names_the_others() -> None:
    class Gone(Clocked):
        def is_gone(self) -> bool:
            return True

    def worker(first: int, home: Any, kind: type[Clocked] = Gone) -> Clocked:
        made = kind(first, [CountEnv] * 2)
        made.home = home
        made.begin(Step(None, 0, {}))
        return made

    house: Any = object()
    workers = [
        worker(0, house),
        worker(2, house),
        worker(4, house),
        worker(6, None),
        worker(8, house, Clocked),
    ]
    workers[1].at = 1
    idle, done = worker(10, house), worker(12, None)
    idle.command = None
    done.answered = lambda: True  # type: ignore[method-assign]
    look_at([*workers, idle, done])
    lost = [one.lost for one in workers]
    assert lost[0] is not None
    assert lost[3] is not None
    assert lost[0] is lost[1] is lost[2]
    said = "its thread ended (or it was the fault of env 3, 4, which it stepped at the same time)"
    assert (lost[0].env, lost[0].kind, lost[0].summary) == (0, "died", said)
    assert (lost[3].env, lost[3].doing, lost[3].summary) == (6, "step", "its thread ended")
    assert [lost[4], idle.lost, done.lost] == [None] * 3


def test_the_time_of_a_constructor_begins_when_no_process_is_starting_any_more(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=now.append))
    monkeypatch.setattr(Clocked, "stack", lambda worker: "here")
    starting, making, stepping = (Clocked(i, [CountEnv], Limits(step=1.0, make=5.0)) for i in range(3))
    starting.begin(Make(0, ()))
    starting.at = LOADING
    making.begin(Make(1, ()))
    stepping.begin(Step(None, 0, {}))
    look_at([making, stepping])
    now[0] += 6.0
    look_at([starting, making, stepping])
    assert (starting.lost, making.lost) == (None, None)
    assert stepping.lost is not None
    starting.at = 0
    now[0] += 4.9
    look_at([starting, making])
    assert (starting.lost, making.lost) == (None, None)
    now[0] += 0.2
    look_at([starting, making])
    assert starting.lost is None
    assert making.lost is not None
    assert (making.lost.doing, making.lost.summary) == ("make", "no answer within 5 s")


def test_a_wait_gives_those_who_are_ready_looks_at_all_and_ends_at_its_deadline(monkeypatch: Any) -> None:
    now, looks, pauses = [100.0], list[float](), list[float]()
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    workers = [Clocked(i, [CountEnv]) for i in range(3)]

    def look(at: Sequence[Any]) -> None:
        looks.append(len(at))
        for worker in at:
            worker.looked = now[0]

    monkeypatch.setattr(process, "look_at", look)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds + 1e-9

    with pytest.raises(TimeoutError):
        wait_any(workers[:2], workers, 100.0 + 2.5 * SLICE, pause)
    assert looks == [3, 3]
    assert pauses == pytest.approx([SLICE, SLICE, SLICE / 2], rel=1e-3)
    with pytest.raises(TimeoutError):
        wait_any(workers[:2], workers, now[0], pause)
    workers[2].answered = lambda: True  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        wait_any(workers[:2], workers, now[0] + SLICE / 2, pause)
    assert wait_any(workers[1:], workers, now[0] - 1.0, pause) == [workers[2]]


def test_the_time_in_which_the_caller_itself_stands_still_is_no_envs(monkeypatch: Any) -> None:
    now, stops = [100.0], {1: 50.0, 2: 0.5, 3: 60.0}
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=now.append))
    monkeypatch.setattr(Clocked, "stack", lambda worker: "here")
    worker, pauses = Clocked(0, [CountEnv], Limits(step=1.0)), itertools.count()
    worker.answered = lambda: worker.lost is not None  # type: ignore[method-assign]
    worker.begin(Step(None, 0, {}))
    wait_any(
        [worker],
        [worker],
        None,
        lambda seconds: now.append(now.pop() + seconds + stops.get(next(pauses), 1e-9)),
    )
    assert 1.0 < now[0] - 210.0 < 1.0 + 3 * SLICE


def test_the_stack_of_what_hangs_is_told_whole_though_it_is_written_in_pieces(monkeypatch: Any) -> None:
    now, pieces = [0.0], ((2.0, ""), (2.015, "Current thread 0x"), (9.0, "Current thread 0x1: line 7"))
    sleep = lambda seconds: now.append(now.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(Clocked, "stack", lambda worker: next(told for end, told in pieces if now[0] <= end))
    worker = Clocked(0, [CountEnv], Limits(step=1.0))
    worker.begin(Step(None, 0, {}))
    look_at([worker])
    now[0] = 2.0
    look_at([worker])
    assert worker.lost is not None
    assert worker.lost.trace == "Current thread 0x1: line 7"


def test_what_a_worker_is_at_is_told_with_the_action_as_far_as_it_is_known() -> None:
    worker = Clocked(10, [CountEnv] * 4)
    assert worker.current() == (10, "wait", None)
    worker.buffers, _ = large(1)
    worker.at = 3
    worker.begin(Step([1, 3], 0, {}, ["first", "second"]))
    assert worker.current() == (13, "step", "second")
    worker.at = 0  # it has not begun
    assert worker.current() == (10, "step", None)
    worker.begin(Apply("call name", print, [()], [1]))
    worker.at = 1
    assert worker.current() == (11, "call name", None)


@pytest.mark.parametrize("n", [3, 16, 17, 40])
@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(2), np.int64(-3), "text", None, np.arange(2)], ids=repr
)
def test_infos_that_all_tell_are_batched_like_those_that_some_do(n: int, value: Any) -> None:
    for who in (range(n), range(0, n, 2), [n - 1]):
        infos = dict[str, Any]()
        theirs = SyncVectorEnv.__new__(SyncVectorEnv)
        theirs.num_envs = n
        for i in who:
            infos = theirs._add_info(infos, {"a": value, "deep": {"b": value}}, i)
        ours = batch_infos(n, [Told(i, None, None, {"a": value, "deep": {"b": value}}) for i in who])
        for got, wanted in ((ours, infos), (ours["deep"], infos["deep"])):
            assert list(got) == list(wanted)
            for key in ("a", "_a") if got is ours else ("b", "_b"):
                assert got[key].dtype == wanted[key].dtype
                assert np.array_equal(got[key], wanted[key])


def test_what_does_not_fit_into_a_row_is_refused_with_what_was_expected() -> None:
    rows = np.zeros((2, 3), np.float32)
    writer = RowWriter(Leaf("fixed", (3,), np.dtype(np.float32)), rows)
    writer.write(0, np.array([1, 2, 3], np.float64))  # the same kind of number
    writer.write(1, [4, 5, 6])
    assert rows.tolist() == [[1, 2, 3], [4, 5, 6]]
    for value, message in (
        (np.zeros(2, np.float32), r"must have shape \(3,\), got \(2,\)"),
        (np.zeros((1, 3), np.float32), r"must have shape \(3,\), got \(1, 3\)"),
        (np.zeros(3, complex), r"must have dtype float32, got complex128"),
    ):
        with pytest.raises(EnvError, match=message):
            writer.write(0, value)
    numbers = np.zeros(2, np.int8)
    one = RowWriter(Leaf("fixed", (), np.dtype(np.int8)), numbers)
    one.write(0, 127)
    one.write(1, np.int8(7))
    one.write(1, np.int64(-128))
    assert numbers.tolist() == [127, -128]
    for wrong, message in (
        (np.int64(128), "no room for"),
        (np.int64(-129), "no room for"),
        (1.5, "must have dtype"),
    ):
        with pytest.raises(EnvError, match=message):
            one.write(0, wrong)
    assert numbers.tolist() == [127, -128]


def test_what_one_env_showed_can_be_put_carried_and_kept_without_the_others() -> None:
    space = Dict({"a": Box(0, 9, (2,), np.float32), "b": Text(5)})
    buffers = Buffers(3, Layout.of(space), Layout.of(Discrete(2)), places=2)
    observations = Observations(buffers, copy=True)
    for i in range(3):
        observations.put(i, 0, [np.full(2, i, np.float32), f"t{i}"])
    observations.carry([0, 2], 0, 1)
    assert observations.batch(1)["a"].tolist() == [[0, 0], [0, 0], [2, 2]]
    observations.carry([1], 1, 1)
    observations.keep([2, 0], {1: ["two", "none"]}, but={0})
    observations.keep(range(1, 2), {1: ["one"]})
    assert observations.batch(0)["b"] == ("t0", "one", "two")
    one = observations.one(2, 1)
    assert (one["a"].tolist(), one["b"]) == ([2, 2], "two")
    a, b = observations.columns([2, 1], [1, 0])
    assert (a.tolist(), b) == ([[2, 2], [1, 1]], ("two", "one"))
    stacked = observations.joined([observations.columns([1], [0]), observations.columns([0], [1])])
    assert (stacked["a"].tolist(), stacked["b"]) == ([[1, 1], [0, 0]], ("one", "t0"))
    assert stacked["a"].dtype == np.float32


def test_actions_are_read_as_they_were_written_whatever_part_of_them_is_loose() -> None:
    space = Dict({"go": Discrete(5), "say": Text(9)})
    buffers = Buffers(4, Layout.of(Discrete(2)), Layout.of(space))
    parts = split(buffers.actions, {"go": np.arange(4), "say": list("abcd")}, 4)
    loose = write_batch(buffers, parts)
    assert sorted(loose) == [1]
    mine = of_group(loose, 1, 2)
    assert mine == {1: {1: "b", 2: "c"}}
    assert read(buffers, 1, range(2), mine) == [{"go": 1, "say": "b"}, {"go": 2, "say": "c"}]
    assert read(buffers, 1, [1], mine) == [{"go": 2, "say": "c"}]
    assert read(buffers, 1, [], mine) == []
    plain = Buffers(4, Layout.of(Discrete(2)), Layout.of(Discrete(5)))
    loose = write_some(plain, [3, 1, 2], [np.int64(4), np.int64(3), "up"])
    assert loose == {WHOLE: {2: "up"}}
    assert read(plain, 1, range(3), loose) == [3, "up", 4]
    assert read(plain, 1, [0, 2], loose) == [3, 4]
    assert read(plain, 1, [1], loose) == ["up"]
    assert of_group(NOTHING_LOOSE, 0, 4) is NOTHING_LOOSE
    pairs = Buffers(2, Layout.of(Discrete(2)), Layout.of(Box(0, 1, (2,))))
    loose = write_some(pairs, [0, 1], [np.ones(2, np.float32), np.ones(1, np.float32)])
    assert {i: action.shape for i, action in loose[WHOLE].items()} == {1: (1,)}
    assert [action.tolist() for action in read(pairs, 0, range(2), loose)] == [[1, 1], [1]]
