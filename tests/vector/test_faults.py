"""Faults cost time, never data: each is noticed soon, named, and hits only its own worker's environments."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import psutil
import pytest

from shoal.core.errors import ConfigError, EnvError, WorkerDiedError, WorkerTimeoutError
from shoal.vector.buffers import shared_block
from tests.vector.faulty import DEATHS, EXCEPTIONS, HANGS, CountEnv, Faulty, one_faulty
from tests.vector.living import alive, children
from tests.vector.same_step import make_vec
from tests.vector.scripted import SlowEnv

ROOT = Path(__file__).parents[2]


def vec(fault: str, n: int = 4, **options: Any) -> Any:
    """`n` environments, one per worker; number 1 is faulty."""
    return make_vec(one_faulty(fault, n), backend="process", **{"num_workers": n, **options})


@pytest.mark.parametrize("fault", DEATHS)
def test_a_dead_worker_is_named_with_env_pid_cause_and_action(fault: str) -> None:
    envs = vec(fault)
    envs.reset(seed=0)
    pids = [row["pid"] for row in envs.stats()["workers"]]
    with pytest.raises(WorkerDiedError) as caught:
        envs.step([1, 9, 1, 1])
    cause = {"kill": "SIGKILL", "exit": "code 7", "segv": "SIGSEGV"}[fault]
    assert re.search(rf"env 1 \(pid {pids[1]}\) .* action .*9.*{cause}", str(caught.value))
    if fault == "segv":
        assert "misbehave" in str(caught.value.__cause__)  # the stack of the crash
    envs.close()
    envs.close()


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        *((fault, "serial") for fault in EXCEPTIONS),
        ("raise", "thread"),
        *((fault, "process") for fault in ("sys.exit", "raise", "unpicklable")),
    ],
)
def test_an_exception_names_its_env_and_keeps_type_and_traceback(fault: str, backend: Any) -> None:
    envs = make_vec(one_faulty(fault, 3), backend=backend)
    envs.reset(seed=0)
    with pytest.raises(Exception, match="env 1 .*failed in step with action") as caught:
        envs.step([1, 9, 1])
    if fault == "raise":
        assert type(caught.value) is ZeroDivisionError
        if backend == "process":
            assert "misbehave" in str(caught.value.__cause__)  # the traceback of its process
    if fault == "unpicklable":
        assert "1 and 2" in str(caught.value)
    obs, _ = envs.reset(seed=5)  # a reset brings all of them back
    assert obs[:, 0].tolist() == [5, 6, 7]
    assert envs.step([2, 2, 2])[1].tolist() == [21.0, 21.0, 21.0]
    envs.close()


class Afar(CountEnv):
    """Raises with action 9 what only a module of a folder that its caller does not search knows."""

    def __init__(self, folder: str) -> None:
        super().__init__(1000)
        self.folder = folder

    def misbehave(self, action: Any) -> None:
        if int(action) == 9:
            sys.path.append(self.folder)
            raise importlib.import_module("module_of_afar").AfarError("what really happened")


def test_an_exception_that_only_its_worker_knows_is_told_by_its_text_and_blames_no_neighbour(
    tmp_path: Path,
) -> None:
    (tmp_path / "module_of_afar.py").write_text("class AfarError(Exception): pass\n")
    fns = [functools.partial(Afar, str(tmp_path)), functools.partial(CountEnv, 1000)]
    envs = make_vec(fns, backend="process", num_workers=1, on_failure="restart")
    envs.reset(seed=0)
    _, rewards, _, truncated, infos = envs.step([9, 1])
    assert (rewards.tolist(), truncated.tolist()) == ([0.0, 11.0], [True, False])
    assert re.search(
        r"^env 0 .*in step with action .*AfarError: what really happened \(.*:\d+ in misbehave\)$",
        infos["worker_error"][0],
    )
    envs.close()


@pytest.mark.parametrize("error", [StopIteration("no more data"), StopAsyncIteration("no more data")])
def test_an_env_that_runs_out_of_data_ends_no_loop_of_its_caller(error: Exception) -> None:
    class OutOfData(CountEnv):
        def misbehave(self, action: Any) -> None:
            raise error

    with closing(make_vec(OutOfData, 2, backend="serial")) as envs:
        envs.reset(seed=0)
        with pytest.raises(Exception, match=f"env 0 .*{type(error).__name__}") as caught:
            envs.step([1, 1])
    assert not isinstance(caught.value, StopIteration | StopAsyncIteration)


@pytest.mark.parametrize("fault", HANGS)
@pytest.mark.flaky(reruns=2)
def test_a_hung_env_is_killed_and_named_with_the_place_where_it_hung(fault: str) -> None:
    envs = vec(fault, step_timeout=0.5)
    envs.reset(seed=0)
    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as caught:
        envs.step([1, 9, 1, 1])
    assert 0.4 < time.monotonic() - start < 60
    assert "env 1 " in str(caught.value)
    assert "misbehave" in str(caught.value.__cause__)
    envs.close()


@pytest.mark.parametrize("fault", ["kill", *HANGS, "raise", "nan reward"])
@pytest.mark.flaky(reruns=2)
def test_restart_replaces_only_the_envs_of_the_failed_worker(fault: str) -> None:
    timeout = 0.5 if fault in HANGS else None
    envs = vec(fault, 6, num_workers=3, on_failure="restart", step_timeout=timeout)
    envs.reset(seed=0)
    before = envs.step([1] * 6)[0]
    obs, rewards, terminated, truncated, infos = envs.step([1, 9, 1, 1, 1, 1])
    lost = [1] if fault in EXCEPTIONS else [0, 1]
    kept = [i for i in range(6) if i not in lost]
    assert np.flatnonzero(truncated).tolist() == lost
    assert not terminated.any()
    assert infos["worker_restarted"].tolist() == [i in lost for i in range(6)]
    assert rewards[lost].tolist() == [0.0] * len(lost)
    assert rewards[kept].tolist() == [12.0] * len(kept)
    assert obs[kept, 2].tolist() == [2.0] * len(kept)  # they went on as if nothing had happened
    assert obs[lost, 2].tolist() == [0.0] * len(lost)  # new episodes …
    assert (obs[lost, 0] != before[lost, 0]).all()  # … from other seeds
    for i in lost:
        assert infos["final_obs"][i].tolist() == before[i].tolist()
        assert "env 1" in infos["worker_error"][i]
    assert envs.step([1] * 6)[1].tolist() == [11.0 if i in lost else 13.0 for i in range(6)]
    envs.close()


def test_envs_lost_with_a_neighbour_are_reset_first() -> None:
    fns = [functools.partial(Faulty, "kill"), CountEnv, CountEnv]
    envs = make_vec(fns, backend="process", num_workers=1, on_failure="restart", autoreset="disabled")
    envs.reset(seed=0)
    envs.step([1, 1, 1])
    assert envs.step_some([0], [9])[0].truncated
    for act in (lambda: envs.step_some([1], [4]), lambda: envs.step([1, 1, 1])):
        with pytest.raises(WorkerDiedError, match="env 0 .*SIGKILL") as caught:
            act()
        assert "env 1 was replaced with its worker: reset() it before" in caught.value.__notes__[0]
        assert caught.value.details["worker_env"] == 0
    ((obs, _),) = envs.reset_some([2], [8])
    assert obs.tolist() == [8, 1, 0, 0]
    assert not envs.step_some([2], [1])[0].truncated
    envs.reset_some([0, 1], [3, 4])
    assert envs.step([1, 1, 1])[1].tolist() == [11.0, 11.0, 12.0]
    envs.close()


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_an_env_that_failed_while_it_was_reset_begins_with_the_seed_that_was_given(mode: str) -> None:
    class Once(CountEnv):
        left: ClassVar[list[int]] = []

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed in self.left:
                self.left.remove(seed)
                raise ZeroDivisionError
            return super().reset(seed=seed, options=options)

    envs = make_vec(Once, 3, backend="thread", autoreset=mode, on_failure="restart")
    Once.left = [8]
    obs, infos = envs.reset(seed=[7, 8, 9])
    assert obs[:, :2].tolist() == [[7, 1], [8, 1], [9, 1]]
    assert infos["worker_restarted"].tolist() == [False, True, False]
    assert "final_obs" not in infos
    Once.left = [4]
    ((seen, info),) = envs.reset_some([2], [4])
    assert (seen.tolist(), info["worker_restarted"]) == ([4, 1, 0, 0], True)
    Once.left = [5]
    envs.send_reset([0], [5])
    ready = envs.recv()
    assert ready.observations.tolist() == [[5, 1, 0, 0]]
    assert ready.infos[0]["worker_restarted"]
    _, rewards, _, truncated, infos = envs.step([1, 1, 1])
    assert (rewards.tolist(), truncated.any()) == ([11.0] * 3, False)
    assert "worker_restarted" not in infos
    assert envs.stats()["restarts"] == envs.stats()["failures"] == [1, 1, 1]
    envs.close()


@pytest.mark.parametrize("operation", ["reset", "call", "step"])
def test_a_worker_that_died_between_two_operations_is_named_by_the_next(operation: str) -> None:
    envs = vec("none")
    envs.reset(seed=0)
    process = psutil.Process(envs.stats()["workers"][1]["pid"])
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
    begin: Any = {
        "reset": lambda: envs.reset(seed=1),
        "call": lambda: envs.call("length"),
        "step": lambda: envs.step_some([0, 1], [1, "loose"]),
    }
    with pytest.raises(WorkerDiedError, match="env 1 .*was killed by SIGKILL"):
        begin[operation]()
    envs.close()


def test_an_error_tells_the_action_where_there_was_one_and_only_there() -> None:
    envs = make_vec([functools.partial(Faulty, "raise")] * 2, backend="serial")
    envs.reset(seed=0)
    told = r"failed in step with action (9|np.int64\(9\)): ZeroDivisionError"  # as NumPy's print options are
    with pytest.raises(ZeroDivisionError, match=told):
        envs.step([1, 9])
    envs.reset(seed=0)
    with pytest.raises(AttributeError, match=r"env 0 \(pid \d+\) failed in call nothing: "):
        envs.call("nothing")
    assert envs.call("length") == (1000, 1000)  # a call that fails breaks nothing off
    envs.close()


def test_an_info_or_answer_that_cannot_be_sent_names_its_env() -> None:
    envs = vec("info", num_workers=1)
    envs.reset(seed=0)
    with pytest.raises(Exception, match="env 1 .*sending its info.*lock"):
        envs.step([1, 9, 1, 1])
    envs.close()
    fns = [functools.partial(CountEnv, 5, i) for i in range(4)]
    envs = make_vec(fns, backend="process", num_workers=2)
    with pytest.raises(Exception, match=r"env 3 .*sending its result.*lock"):
        envs.apply(lambda env: threading.Lock() if env.index == 3 else env.index)
    with pytest.raises(Exception, match=r"env 3 .*sending its result.*lock"):
        envs.apply(lambda env: threading.Lock(), indices=[3])
    assert envs.apply(lambda env: env.index) == [0, 1, 2, 3]
    envs.close()


def not_in(pid: int) -> None:
    """Loads what `Strange` is, elsewhere."""
    if os.getpid() == pid:
        raise ModuleNotFoundError("it lives elsewhere")


class Strange:
    """Cannot be loaded in one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return not_in, (self.pid,)


class Showing(CountEnv):
    """Shows `(seed, t)`, and something else in the step with action 9."""

    observation_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(1000))

    def __init__(self, something: str, pid: int) -> None:
        super().__init__(1000)
        self.something, self.pid = something, pid

    def observe(self, action: Any) -> Any:
        if int(action) == 9:
            return threading.Lock() if self.something == "lock" else Strange(self.pid)
        return self.seed_, self.t


@pytest.mark.parametrize(("something", "hurt"), [("lock", [1]), ("strange", [0, 1, 2])])
def test_who_shows_what_cannot_be_sent_or_read_is_replaced_and_nobody_shows_something_old(
    something: str, hurt: list[int]
) -> None:
    envs = make_vec([functools.partial(Showing, something, os.getpid())] * 3, backend="process", num_workers=1,
                    on_failure="restart")  # fmt: skip
    envs.reset(seed=[4, 5, 6])
    envs.step([1, 1, 1])
    obs, rewards, _, truncated, infos = envs.step([1, 9, 1])
    assert np.flatnonzero(truncated).tolist() == hurt
    for i in range(3):
        if i not in hurt:
            assert (obs[i], rewards[i]) == ((4 + i, 2), 12.0)
            continue
        assert rewards[i] == 0.0
        blamed = i if something == "lock" else 0  # a reply that cannot be read is its worker's
        assert f"env {blamed} " in infos["worker_error"][i]
        assert obs[i][1] == 0
        assert infos["final_obs"][i] == (4 + i, 1)
    envs.close()


def test_an_env_that_cannot_be_made_or_sent_to_a_worker_says_which_and_why() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("no such level")

    with pytest.raises(Exception, match="env 2.*no such level") as caught:
        make_vec([CountEnv, CountEnv, broken], backend="process", num_workers=2)
    assert isinstance(caught.value, ZeroDivisionError)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent"):
        make_vec(lambda: (lock, CountEnv())[1], 2, backend="process")


def test_what_cannot_be_sent_to_one_worker_reaches_none_and_leaves_nothing_behind() -> None:
    lock = threading.Lock()
    envs = make_vec(CountEnv, 4, backend="process", num_workers=2)
    envs.reset(seed=0)
    envs.set_attr("given", [1, 2, 3, 4])
    with pytest.raises(TypeError, match="pickle"):
        envs.call("observe", lock)
    with pytest.raises(TypeError, match="pickle"):
        envs.set_attr("given", [5, 6, 7, lock])
    assert envs.get_attr("given") == (1, 2, 3, 4)
    envs.set_attr("given", [5, 6, 7, 8])
    assert envs.get_attr("given") == (5, 6, 7, 8)
    assert envs.step([1] * 4)[1].tolist() == [11.0] * 4
    envs.close()


@pytest.mark.parametrize("moment", ["idle", "pending", "dead", "hung"])
def test_close_is_quick_in_every_state(moment: str) -> None:
    envs = vec("kill" if moment == "dead" else "stubborn hang")
    envs.reset(seed=0)
    if moment == "pending":
        envs.step_async([1, 1, 1, 1])
    if moment in ("dead", "hung"):
        envs.step_async([1, 9, 1, 1])
        time.sleep(0.2)
    pids = [row["pid"] for row in envs.stats()["workers"]]
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < 60
    assert not any(alive(pid) for pid in pids)
    envs.close()


class Writes(CountEnv):
    """Writes a file when it is closed, which takes a moment; may fail or hang at it."""

    def __init__(self, file: Path, fault: str = "") -> None:
        super().__init__()
        self.file, self.fault = file, fault

    def close(self) -> None:
        if self.fault == "hang":
            time.sleep(3600)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            self.file.write_text("half")
        self.file.write_text("whole")
        if self.fault == "raise":
            raise OSError("disk full")


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_close_waits_for_an_env_that_is_writing_and_tells_what_it_raised(
    backend: Any, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shoal.vector.workers.END_SECONDS", 0.1)  # for the end of what has closed its envs
    fns = [functools.partial(Writes, tmp_path / "a", "raise"), functools.partial(Writes, tmp_path / "b")]
    envs = make_vec(fns, backend=backend, num_workers=None if backend == "serial" else 2)
    envs.reset(seed=0)
    envs.close()
    assert [(tmp_path / name).read_text() for name in "ab"] == ["whole", "whole"]
    (record,) = caplog.records
    assert re.fullmatch(r"env 0 \(pid \d+\) failed in close: OSError: disk full \(.*\)", record.message)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_close_gives_up_an_env_that_hangs_and_names_it(backend: Any, tmp_path: Path, caplog: Any) -> None:
    fns = [CountEnv, functools.partial(Writes, tmp_path / "a", "hang")]
    envs = make_vec(fns, backend=backend, num_workers=2)
    envs.close(timeout=0.2)
    assert "env 1 was still closing after 0.2 s" in caplog.text


def test_thirty_pools_leave_no_memory_descriptors_or_shared_memory_behind() -> None:
    names: set[Any] = set()

    def once() -> None:
        envs = make_vec(CountEnv, 2, backend="process", num_workers=1)
        envs.reset(seed=0)
        envs.step([1, 1])
        names.add(envs._policy._attach.memory)
        envs.close()

    for _ in range(10):
        once()
    me = psutil.Process()
    files, memory = me.num_fds(), me.memory_info().rss
    processes = children()
    for _ in range(20):
        once()
    assert me.num_fds() <= files + 3
    assert me.memory_info().rss - memory < 8 * 2**20
    assert len(names) == 30
    assert not names & set(os.listdir("/dev/shm"))
    assert children() <= processes


PARENT = """
import functools, signal, sys
from concurrent.futures import ThreadPoolExecutor
signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as a shell may have it
sys.path.insert(0, {root!r})
from tests.vector.same_step import make_vec
from tests.vector.faulty import CountEnv, Faulty
fns = [functools.partial(Faulty, "stubborn hang"), CountEnv, CountEnv]
method, _, thread = {method!r}.partition(" in a ")
make = functools.partial(make_vec, fns, backend="process", num_workers=3, start_method=method)
envs = ThreadPoolExecutor(1).submit(make).result() if thread else make()
envs.reset(seed=0)
print(*[row["pid"] for row in envs.stats()["workers"]], flush=True)
envs.step_async([9, 1, 1])
if {end!r} == "return":
    sys.exit()
envs.step_wait()
"""


@pytest.mark.parametrize(
    ("method", "end"),
    [
        *(("forkserver", end) for end in ("SIGKILL", "SIGINT", "return")),
        *((method, "SIGKILL") for method in ("spawn", "fork", "fork in a thread")),
    ],
)
def test_no_worker_outlives_its_parent(method: str, end: str) -> None:
    program = PARENT.format(root=str(ROOT), method=method, end=end)
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    time.sleep(0.3)
    if end.startswith("SIG"):
        parent.send_signal(getattr(signal, end))
    parent.wait(60)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_workers_outlive_the_thread_that_forked_them() -> None:
    make = functools.partial(make_vec, CountEnv, 2, backend="process", num_workers=2, start_method="fork")
    with ThreadPoolExecutor(1) as pool:
        envs = pool.submit(make).result()
    with closing(envs):
        for row in envs.stats()["workers"]:
            with pytest.raises(psutil.TimeoutExpired):
                psutil.Process(row["pid"]).wait(0.1)
        envs.reset(seed=0)
        assert envs.step([1, 2])[1].tolist() == [11.0, 21.0]


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """So many files more may be opened, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, held = max(map(int, os.listdir("/proc/self/fd"))), [-1]
    try:
        while held[-1] < highest:  # the limit is on the number: no gap may be left
            held.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + descriptors, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held[1:]:
            os.close(descriptor)


def test_too_many_open_files_is_a_clear_error_and_leaves_nothing_behind() -> None:
    """In a process of its own: the programs of other tests come and go in this one."""
    program = "from tests.vector.test_faults import short_of_files; short_of_files()"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def short_of_files() -> None:
    def stepped() -> bool:
        with closing(make_vec(CountEnv, 4, backend="process", num_workers=2, start_method="fork")) as envs:
            envs.reset(seed=0)
            return envs.step([1] * 4)[1].tolist() == [11.0] * 4

    assert stepped()  # what is started once is there already
    before, files = children(), psutil.Process().num_fds()
    outcomes = []
    for spare in range(0, 48, 3):
        with room_for(spare):
            try:
                outcomes.append(stepped())
            except ConfigError as error:
                assert "too many open files" in str(error)  # noqa: PT017 - it depends on how many are left
                outcomes.append(False)
            except WorkerDiedError:  # what a worker or the fork server lacks is on stderr
                outcomes.append(False)
    gc.collect()
    left = children() - before
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
    assert psutil.Process().num_fds() <= files + 10
    assert not outcomes[0]
    assert outcomes[-1]


def test_too_little_shared_memory_is_a_clear_error() -> None:
    with pytest.raises(
        ConfigError, match=r"need 1073741824.0 MiB of shared memory, and .* MiB free: .*--shm-size"
    ):
        shared_block(1 << 50)


class ReadsAFile(Faulty):
    """Ends its process with action 9; its reward is what a file of the folder that it was made in says."""

    def __init__(self, name: str) -> None:
        super().__init__("exit")
        self.paid = float(Path(name).read_text())

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.paid, *rest


def test_a_relative_name_means_the_same_file_when_an_env_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, paid in (("first", "1"), ("second", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "paid.txt").write_text(paid)
    monkeypatch.chdir(tmp_path / "first")
    fns = [functools.partial(ReadsAFile, "paid.txt")] * 2
    envs = make_vec(fns, backend="process", num_workers=2, on_failure="restart")
    monkeypatch.chdir(tmp_path / "second")
    envs.reset(seed=0)
    assert envs.step([1, 9])[3].tolist() == [False, True]
    assert envs.step([1, 1])[1].tolist() == [1.0, 1.0]
    envs.close()


@pytest.mark.flaky(reruns=2)
def test_a_thread_that_hangs_is_given_up_and_cannot_write_into_its_successors_rows() -> None:
    fns = [functools.partial(SlowEnv, 2.0, 9), CountEnv]
    envs = make_vec(fns, backend="thread", step_timeout=1.0, on_failure="restart")
    envs.reset(seed=0)
    _, _, _, truncated, infos = envs.step([9, 1])
    assert truncated.tolist() == [True, False]
    assert infos["worker_restarted"].tolist() == [True, False]
    for t in range(1, 5):
        obs, rewards, *_ = envs.step([1, 1])
        assert rewards[0] == 10.0 + t
        assert obs[0, 2] == t
        time.sleep(0.4)  # the old thread wakes up meanwhile
    envs.close()


@pytest.mark.parametrize(
    ("policy", "backend"),
    [("raise", "serial"), ("restart", "serial"), ("restart", "process")],
)
def test_a_step_after_the_end_raises_under_every_policy_and_costs_no_env(policy: Any, backend: Any) -> None:
    fns = [functools.partial(CountEnv, 1), CountEnv]
    envs = make_vec(fns, backend=backend, autoreset="disabled", on_failure=policy)
    envs.reset(seed=0)
    assert envs.step([1, 1])[2].tolist() == [True, False]
    with pytest.raises(EnvError, match="env 0 .*the episode is over; reset it before the next step"):
        envs.step([1, 1])
    assert envs.reset(seed=7)[0].tolist() == [[7, 1, 0, 0], [8, 1, 0, 0]]
    assert envs.step([2, 2])[1].tolist() == [21.0, 21.0]
    stats = envs.stats()
    envs.close()
    assert stats["restarts"] == [0, 0]
    assert stats["failures"] == [0, 0]


class NeverBegins(CountEnv):
    """Its episodes with an odd seed do not begin; the others do."""

    def __init__(self, how: str, log: str) -> None:
        super().__init__()
        self.how, self.log = how, Path(log)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and seed % 2:
            with self.log.open("a") as file:
                file.write("tried\n")
            if self.how == "raise":
                raise ZeroDivisionError("no beginning")
            time.sleep(60)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(("how", "backend"), [("raise", "serial"), ("raise", "process"), ("hang", "process")])
@pytest.mark.flaky(reruns=2)
def test_an_env_that_never_begins_is_given_up_in_one_operation_and_may_begin_in_the_next(
    how: str, backend: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    fns = [CountEnv, functools.partial(NeverBegins, how, str(log))]
    limits = {"step_timeout": 0.5, "num_workers": 2} if how == "hang" else {}
    options: Any = {"backend": backend, "on_failure": "restart", "max_restarts": 1000, **limits}
    with closing(make_vec(fns, **options)) as envs:
        # At first and after three restarts, in each operation.
        for tried in (4, 8) if how == "raise" else (4,):
            with pytest.raises(Exception, match="env 1") as caught:
                envs.reset_some([0, 1], [2, 7])
            assert caught.value.__notes__[-1] == "env 1 was restarted 3 times at once before this"
            assert log.read_text().count("tried") == tried
        (_, _), (_, info) = envs.reset_some([0, 1], [2, 4])
        assert "worker_restarted" not in info
        assert envs.step([1, 1])[1].tolist() == [11.0, 11.0]
