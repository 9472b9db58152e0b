"""Functions as jobs, in processes of their own; launchers that are not local."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import queue
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError, WorkerError
from shoal.skills.jobs import runner
from shoal.skills.jobs.graph import Graph
from shoal.skills.jobs.run import Run, load_function, name_of, pack, unpack
from shoal.skills.jobs.runner import (
    LocalLauncher,
    RayLauncher,
    SlurmLauncher,
    TmuxLauncher,
    adopting_launcher,
    alive,
    ask_to_cancel,
    condition,
    exit_words,
    job_environment,
    kill_group,
    make_launcher,
    reopen,
    resident_memory,
    server_of,
    start_time,
    watch_process,
)
from shoal.skills.jobs.store import Store, read_done, read_failure

REPO = Path(__file__).parents[3]
JOBS = """
import os, subprocess, sys, time
from shoal.skills.jobs.run import ExhaustedError

def write(run):
    (run.folder / "made").mkdir(exist_ok=True)
    (run.folder / "made" / "deep").mkdir(exist_ok=True)
    (run.folder / "made" / "deep" / "file").write_text(run.settings["text"])
    run.finish(run.folder / "made", {"length": len(run.settings["text"])}, steps=3)

def join(run):
    texts = [(run.input(name) / "deep" / "file").read_text() for name in run.needs]
    run.finish("".join(texts).encode(), {"total": sum(run.numbers(name)["length"] for name in run.needs)})

def counts(run):
    path = run.folder / "count"
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
    if int(path.read_text()) < 3:
        os.kill(os.getpid(), 9)
    run.finish(numbers={"launches": int(path.read_text())})

def leaves_another(run):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(run.folder)])
    if run.attempt < 3:
        os.kill(os.getpid(), 9)

def waits(run):
    while not (run.folder / "go").exists():
        time.sleep(0.02)

def says_nothing(run):
    (run.folder / "kept").write_text(run.settings["text"])

def greedy(run):
    if run.steps < 50:
        raise ExhaustedError(f"{run.steps} steps are not enough")
    run.finish(steps=run.steps)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    (tmp_path / "my jobs.py").write_text(JOBS)
    return str(tmp_path / "my jobs.py")


def test_what_jobs_make_reaches_those_that_need_them(tmp_path: Path, jobs: str) -> None:
    graph = Graph(tmp_path / "graph", 2)
    for name in ("one", "two"):
        graph.add(name, f"{jobs}:write", settings={"text": name})
    graph.add("both", f"{jobs}:join", needs=["one", "two"])
    assert graph.run()
    assert graph.result("both") == b"onetwo"
    assert graph.numbers("both") == {"total": 6}
    for _ in range(2):  # a script may be run again
        assert (graph.unpack("one", tmp_path / "out") / "deep" / "file").read_text() == "one"
    with pytest.raises(ConfigError, match="out cannot be unpacked to"):  # it would stay what it was
        graph.unpack("two", tmp_path / "out")
    with pytest.raises(ConfigError, match="'both' made no folder but 6 bytes"):
        graph.unpack("both", tmp_path / "bytes")
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name or "bytes" in path.name) == [
        "out"
    ]
    assert graph.store.job("one").budget_used == 3
    assert not (tmp_path / "graph" / "jobs" / "both").exists()
    again = Graph(tmp_path / "graph")
    assert again.run()  # nothing is left to do
    assert len(again.store.attempts()) == 3
    graph.close()
    again.close()


def test_a_killed_job_finds_what_it_saved_and_one_without_enough_steps_waits_for_more(
    tmp_path: Path, jobs: str
) -> None:
    graph = Graph(tmp_path / "graph", 2, max_retries=2)
    graph.add("killed", f"{jobs}:counts")
    graph.add("greedy", f"{jobs}:greedy", steps=10)
    assert not graph.run()
    assert graph.numbers("killed") == {"launches": 3}
    assert graph.failures() == {"greedy": "ExhaustedError: 10 steps are not enough"}
    assert len(graph.store.attempts("greedy")) == 1
    reopen(graph.store, "greedy", budget=60)
    assert graph.run()
    graph.close()


@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize("launcher", ["local", "tmux", "ray"])
def test_nothing_is_left_of_a_job_killed_alone_and_nobody_waits_for_what_it_started(
    tmp_path: Path, jobs: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ray(CPU=1).stand_in(monkeypatch)
    if launcher == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    graph = Graph(tmp_path / "graph", launcher=launcher)
    graph.add("one", f"{jobs}:leaves_another")
    assert graph.run(), graph.failures()
    assert [row.outcome for row in graph.store.attempts()] == ["failed", "failed", "merged"]
    graph.close()


def test_a_function_is_named_so_that_another_process_finds_it(tmp_path: Path, jobs: str) -> None:
    assert name_of(pack) == "shoal.skills.jobs.run:pack"  # type: ignore[arg-type]
    assert load_function("shoal.skills.jobs.run:pack") is pack
    assert load_function(f"{jobs}:join").__name__ == "join"
    with pytest.raises(ConfigError, match="top of a module"):
        name_of(lambda run: None)


def test_a_packed_folder_is_the_same_bytes_and_never_leaves_its_place(tmp_path: Path) -> None:
    import io
    import tarfile

    for name in ("b", "a"):
        (tmp_path / "from" / name).mkdir(parents=True)
        (tmp_path / "from" / name / "x").write_text(name)
    data = pack(tmp_path / "from")
    os.utime(tmp_path / "from" / "a" / "x", (1, 1))
    assert pack(tmp_path / "from") == data
    unpack(data, tmp_path / "to")
    assert (tmp_path / "to" / "b" / "x").read_text() == "b"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    with pytest.raises(tarfile.FilterError):
        unpack(out.getvalue(), tmp_path / "evil")
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_behind")
def test_the_examples_two_trainings_and_their_evaluation_run(tmp_path: Path) -> None:
    env = {**os.environ, **job_environment(2), "TMPDIR": str(tmp_path)}
    example = REPO / "examples" / "job_graph.py"
    done = subprocess.run(
        [sys.executable, str(example), "2000"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\{'best': 'ppo [01]', 'return': [0-9.]+\}", done.stdout)
    assert len(example.read_text().split("def main")[0].split("def train")[1].splitlines()) <= 30


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of one machine: programs by SLURM's names that keep processes as batch jobs."""
    programs = {
        "sbatch": """
log=""; script=""; echo "$@" >> {0}/calls
for word in "$@"; do case $word in --output=*) log=${{word#--output=}};; --*) ;; *) script=$word;; esac; done
[ -f {0}/late ] && {{ cp "$script" {0}/spooled; echo "Socket timed out on send/recv operation" >&2; exit 1; }}
log=$(echo "$log" | sed 's/%%/@@/g; s/%j/7/g; s/@@/%/g')
setsid sh "$script" >> "$log" 2>&1 < /dev/null & echo "$! $script" > {0}/last
[ -f {0}/lost ] && {{ cat {0}/lost; exit 1; }}
echo "$!;cluster"
""",
        "squeue": """
for word in "$@"; do case $word in --jobs=*) id=${{word#--jobs=}};; --name=*) named=yes;; esac; done
[ -f {0}/down ] && {{ echo "Unable to contact slurm controller" >&2; exit 1; }}
case "$*" in *--clusters=cluster*) echo "CLUSTER: cluster";; *) [ "$named" ] || id=none;; esac
[ "$named" ] && {{ echo "nonsense"; echo "12 /elsewhere/training-1.sh"; cat {0}/last 2>/dev/null; exit; }}
kill -0 $id 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
echo RUNNING
""",
        "scancel": """
[ -f {0}/deaf ] && {{ rm {0}/deaf; echo "Unable to contact slurm controller" >&2; exit 1; }}
[ "$1" = --clusters=cluster ] && kill -9 -"$2"
""",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        path = folder / name
        path.write_text(
            "#!/bin/sh\n" + text.replace("{0}", str(tmp_path)).replace("{{", "{").replace("}}", "}")
        )
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_slurm_runs_jobs_with_every_word_quoted(slurm: Path, jobs: str) -> None:
    launcher = SlurmLauncher(["--partition=a b"], every=0.05)
    graph = Graph(slurm / "graph 100%job $(touch x)", 2, launcher=launcher)  # %j would be its number
    graph.add("one", f"{jobs}:write", settings={"text": "'\"; touch y"})
    graph.add("both", f"{jobs}:join", needs=["one"])
    assert graph.run(), graph.failures()
    assert graph.result("both") == b"'\"; touch y"
    assert not (slurm / "x").exists()
    assert "--partition=a b" in (slurm / "calls").read_text()
    graph.close()


def test_a_batch_job_is_found_again_ended_and_not_given_up_while_the_controller_is_silent(
    slurm: Path,
) -> None:
    launcher = SlurmLauncher(every=0.05)
    handle = launcher.launch(["sleep", "600"], "name", {}, slurm / "log")
    assert alive("slurm", handle)
    ended: list[str] = []
    assert adopting_launcher("slurm", handle).watch(handle, ended.append)
    assert launcher.watch(handle, ended.append)
    (slurm / "down").touch()
    time.sleep(0.2)
    assert not ended
    (slurm / "down").unlink()
    launcher.kill(handle)
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert ended
    assert not alive("slurm", handle)
    assert not launcher.watch(handle, ended.append)


@pytest.mark.parametrize("answer", ["Socket timed out on send/recv operation", "Submitted, I think", ""])
def test_a_batch_job_whose_number_was_not_told_is_found_in_the_queue_and_not_launched_again(
    slurm: Path, jobs: str, answer: str
) -> None:
    (slurm / "lost").write_text(answer)
    launcher = SlurmLauncher(["--clusters=cluster"], every=0.05)
    graph = Graph(slurm / "graph", launcher=launcher, max_retries=0)
    graph.add("one", f"{jobs}:write", settings={"text": "x"})
    assert graph.run(), graph.failures()
    assert [row.launcher for row in graph.store.attempts()] == ["slurm"]
    assert len((slurm / "calls").read_text().splitlines()) == 1
    graph.close()


@pytest.mark.parametrize("silent", [False, True])
def test_a_batch_job_that_the_queue_did_not_show_does_nothing_when_it_comes_after_all(
    slurm: Path, jobs: str, silent: bool
) -> None:
    (slurm / "late").touch()
    if silent:
        (slurm / "down").touch()
    graph = Graph(slurm / "graph", launcher=SlurmLauncher(every=0.05), max_retries=0)
    graph.add("one", f"{jobs}:write", settings={"text": "x"})
    assert not graph.run()
    assert "could not be launched: RuntimeError: sbatch failed: Socket timed" in graph.failures()["one"]
    spooled = subprocess.run(["sh", str(slurm / "spooled")], check=False)
    assert spooled.returncode == 0
    assert not (slurm / "graph" / "jobs" / "one" / "made").exists()
    graph.close()


def test_a_scheduler_that_died_before_it_noted_a_batch_jobs_number_finds_it(slurm: Path, jobs: str) -> None:
    graph = Graph(slurm / "graph", launcher=SlurmLauncher(["--clusters=cluster"], every=0.05))
    graph.add("one", f"{jobs}:write", settings={"text": "x"})
    graph.store.set_handle = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        graph.run()
    assert condition(graph.store, graph.store.job("one"), held=False) == "not known"
    graph.close()
    (slurm / "down").touch()  # it may still run, and must not be launched a second time
    again = Graph(slurm / "graph", launcher=SlurmLauncher(["--clusters=cluster"], every=0.05))
    with pytest.raises(WorkerError, match="squeue does not answer .Unable to contact slurm controller"):
        again.run()
    again.close()
    (slurm / "down").unlink()
    again = Graph(slurm / "graph", launcher=SlurmLauncher(["--clusters=cluster"], every=0.05))
    assert again.run(), again.failures()
    assert [row.launcher for row in again.store.attempts()] == ["slurm"]
    assert len((slurm / "calls").read_text().splitlines()) == 1
    again.close()


def test_stopping_ends_a_batch_job_whose_number_its_scheduler_did_not_live_to_note(
    slurm: Path, jobs: str
) -> None:
    graph = Graph(slurm / "graph", launcher=SlurmLauncher(["--clusters=cluster"], every=0.05))
    graph.add("one", f"{jobs}:waits")
    graph.store.set_handle = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        graph.run()
    graph.close()
    pid = int((slurm / "last").read_text().split()[0])
    assert start_time(pid) is not None
    other = Graph(slurm / "graph")  # as `shoal skills stop` opens a folder: it does not know the launcher
    other.runner.settle(kill=True)
    assert start_time(pid) is None
    assert [(row.launcher, row.outcome) for row in other.store.attempts()] == [("slurm", "stopped")]
    other.close()


def test_stopping_ends_a_local_job_whose_process_its_scheduler_did_not_live_to_note(
    tmp_path: Path, jobs: str
) -> None:
    launcher = LocalLauncher()
    graph = Graph(tmp_path, launcher=launcher)
    graph.add("one", f"{jobs}:waits")
    graph.store.set_handle = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        graph.run()
    graph.close()
    (child,) = launcher._children.values()
    try:
        other = Graph(tmp_path)
        other.runner.settle(kill=True)
        assert child.wait(60) == -9
        assert [(row.launcher, row.outcome) for row in other.store.attempts()] == [("local", "stopped")]
        other.close()
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def deaf(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SLURM takes a job and then never tells anything of it; the programs that were asked in vain."""
    run, asked = subprocess.run, []

    def ask(command: list[str], **how) -> subprocess.CompletedProcess[str]:
        if "sleep 600" in (slurm / "bin" / command[0]).read_text():
            asked.append(command[0])
            how["timeout"] = 0.2
        return run(command, **how)

    for name in ("squeue", "scancel"):
        (slurm / "bin" / name).write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(runner.subprocess, "run", ask)
    monkeypatch.setattr(SlurmLauncher, "_silent_until", 0.0)
    return asked


def test_jobs_are_told_to_end_once_to_a_controller_that_never_answers(
    slurm: Path,
    deaf: list[str],
    jobs: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runner, "ENDING_SECONDS", 0.2)
    graph = Graph(slurm / "graph", 3, launcher=SlurmLauncher(every=0.05))
    for name in ("one", "two", "three"):
        graph.add(name, f"{jobs}:waits")
        number = graph.store.begin_attempt(name, slurm / "graph" / "jobs" / name, None)
        graph.store.set_handle(number, "slurm", {"slurm": str(10 + number)}, slurm / "log")
        graph.store.update(name, status="running")
    with pytest.raises(
        WorkerError, match=r"as far as is known: SLURM does not answer \(batch jobs 11, 12, 13\)"
    ):
        graph.runner.settle(kill=True)
    assert deaf == ["squeue"]  # a minute, and not six times
    assert [one.message for one in caplog.records if "SLURM" in one.message] == [
        "squeue gives no answer for 60 s: SLURM's controller may be down"
    ]
    graph.close()


def test_a_graph_ends_when_slurm_tells_nothing_of_a_batch_job_and_goes_on_with_it_later(
    slurm: Path, deaf: list[str], jobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph(slurm / "graph", launcher=SlurmLauncher(every=0.05))
    graph.add("one", f"{jobs}:waits")
    said = r"told nothing of batch job \d+ for 0.5 s, so it is not known whether"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "SILENT_SECONDS", 0.5)
        with pytest.raises(WorkerError, match=said):
            graph.run()
    graph.close()
    folder = slurm / "graph" / "jobs" / "one"
    assert folder.is_dir()
    (folder / "go").touch()
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    monkeypatch.setattr(SlurmLauncher, "_silent_until", 0.0)
    again = Graph(slurm / "graph", launcher=SlurmLauncher(every=0.05))
    until = time.monotonic() + 60
    while not (folder / runner.DONE).exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert again.run(), again.failures()
    assert len(again.store.attempts()) == 1
    again.close()


def test_a_batch_job_is_cancelled_until_it_is_over_and_known_without_slurms_programs(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ended = SlurmLauncher(every=0.05), queue.SimpleQueue()
    handle = launcher.launch(["sleep", "600"], "name", {}, slurm / "log")
    assert launcher.watch(handle, ended.put)
    (slurm / "deaf").touch()
    launcher.kill(handle)
    assert ended.get(timeout=60) == "ended"
    monkeypatch.setenv("PATH", "")  # a folder looked at elsewhere
    assert alive("slurm", handle)


@pytest.mark.usefixtures("nothing_is_left_behind")
def test_a_session_begins_though_the_last_one_takes_its_tmux_server_along(tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    launcher = TmuxLauncher(server_of(tmp_path))
    for number in range(80):  # of which one in seven met a server that was about to end
        assert launcher._tmux("new-session", "-d", "-P", "--", "sleep", f"{number % 12 / 1000}")


def test_a_tmux_that_answers_too_late_or_nonsense_has_its_session_found_and_not_made_again(
    tmp_path: Path, jobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "tmux"
    fake.write_text(f'#!/bin/sh\n{shutil.which("tmux")} "$@" > /dev/null; sleep 1; echo late; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    graph = Graph(tmp_path / "graph", launcher="tmux", max_retries=0)
    graph.add("one", f"{jobs}:waits", settings={"text": "x"})

    def let_go() -> None:
        while not (tmp_path / "graph" / "jobs" / "one").is_dir():
            time.sleep(0.02)
        time.sleep(2)
        (tmp_path / "graph" / "jobs" / "one" / "go").touch()

    threading.Thread(target=let_go, daemon=True).start()
    assert graph.run(), graph.failures()
    assert len(graph.store.attempts()) == 1
    graph.close()
    with pytest.raises(FileNotFoundError):  # a session that comes after it was given up: its log is gone
        runner.tee(str(tmp_path / "gone.log"), ["touch", str(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


class Ray:
    """A cluster of one machine, whose tasks run when somebody waits for them."""

    def __init__(self, **have: float) -> None:
        self.have, self.cancelled, self.session, self.hears = have, [], 1, True

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the Ray of all launchers."""
        monkeypatch.setattr(runner, "connect_ray", lambda **_: self.connect())

    def connect(self) -> Self:
        self.session = 1
        return self

    def is_initialized(self) -> bool:
        return self.session == 1

    def cluster_resources(self) -> dict[str, float]:
        return self.have

    def remote(self, **_: Any) -> Any:
        def remote(function: Any, *given: Any) -> Any:
            def future() -> Future[int]:
                return ThreadPoolExecutor(1).submit(function, *given) if self.hears else Future()

            return SimpleNamespace(future=future)

        return lambda function: SimpleNamespace(remote=functools.partial(remote, function))

    def cancel(self, task: Any, *, force: bool) -> None:
        self.cancelled.append((task, force))


def test_a_ray_task_ends_with_words_and_one_of_another_driver_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray(CPU=6, GPU=2)
    ray.stand_in(monkeypatch)
    launcher = RayLauncher(gpus=0.5, slots=2)  # three CPUs a job
    assert [launcher.room(running, slots) for running, slots in ((0, 9), (1, 9), (0, 1))] == [2, 1, 1]
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = [sys.executable, "-c", "import os, sys; print('said'); sys.exit(int(os.environ['CODE']))"]
    handles = [launcher.launch(command, "name", {"CODE": code}, tmp_path / "log") for code in ("0", "3")]
    assert handles[0]["task"] != handles[1]["task"]
    for handle, words in zip(handles, ("exit status 0", "exit status 3"), strict=True):
        assert launcher.watch(handle, ended.put)
        assert ended.get(timeout=60) == words
    assert (tmp_path / "log").read_text() == "said\n" * 2
    assert not launcher.watch({**handles[0], "driver": os.getpid() + 1}, ended.put)
    assert not launcher.watch({"task": "another", "driver": os.getpid()}, ended.put)
    launcher.kill(handles[1])
    launcher.kill({"task": "another"})
    assert [force for _, force in ray.cancelled] == [True]


def test_jobs_of_a_session_of_ray_that_ended_are_told_so_and_the_next_run_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray(CPU=6)
    ray.stand_in(monkeypatch)
    launcher, ended = RayLauncher(), queue.SimpleQueue[str]()
    ray.hears = False  # of a session that is over Ray says nothing any more
    handle = launcher.launch(["python", "-c", ""], "name", {}, tmp_path / "log")
    assert launcher.watch(handle, ended.put)
    ray.session, ray.have = 2, {}
    assert ended.get(timeout=60) == "RuntimeError: the session of Ray ended"
    launcher.kill(handle)
    assert not ray.cancelled  # such a call would start a Ray of its own
    assert launcher.room(1, 3) == 2
    ray.hears, ray.have = True, {"CPU": 6.0}
    assert launcher.watch(launcher.launch(["python", "-c", ""], "name", {}, tmp_path / "log"), ended.put)
    assert ended.get(timeout=60) == "exit status 0"
    assert launcher.room(0, 3) == 1


def test_a_launch_on_ray_waits_until_the_one_before_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may take a launch for gone whose node only lost its cluster's head, and goes on for a while."""
    first = (
        "import os, time\nprint('first', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.05)\nprint('end', flush=True)"
    )
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(runner._run_command, ["python", "-c", first], {}, str(tmp_path / "1.log"))]
        until = time.monotonic() + 200
        while not (tmp_path / "1.log").exists() or not (tmp_path / "1.log").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        second = f"print(open({str(tmp_path / '1.log')!r}).read())"
        futures.append(
            pool.submit(runner._run_command, ["python", "-c", second], {}, str(tmp_path / "2.log"))
        )
        time.sleep(0.5)  # in which it would begin
        (tmp_path / "go").touch()
        assert [future.result(60) for future in futures] == [0, 0]
        assert (tmp_path / "2.log").read_text().split() == ["first", "end"]
        (tmp_path / "go").unlink()
        futures = [pool.submit(runner._run_command, ["python", "-c", first], {}, str(tmp_path / "3.log"))]
        while not (tmp_path / "3.log").exists() or not (tmp_path / "3.log").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        monkeypatch.setattr(runner, "LAST_SECONDS", 0.1)
        with pytest.raises(TimeoutError, match="still runs"):
            runner._run_command(["python", "-c", second], {}, str(tmp_path / "4.log"))
        (tmp_path / "go").touch()
        assert futures[0].result(60) == 0


def test_what_a_worker_of_ray_ran_dies_with_it(tmp_path: Path) -> None:
    """Another launch begins in the same folder at once."""
    nap = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    arguments = repr((["python", "-c", nap], {}, str(tmp_path / "log")))
    worker = subprocess.Popen(
        [sys.executable, "-c", f"from shoal.skills.jobs.runner import _run_command as r; r(*{arguments})"]
    )
    until = time.monotonic() + 200
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.05)
    pid = int((tmp_path / "log").read_text())
    worker.kill()
    worker.wait()
    while start_time(pid) is not None:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("layout", [1, 99])
def test_a_database_with_another_layout_is_refused_and_left_as_it_is(tmp_path: Path, layout: int) -> None:
    Store(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as db:
        db.execute(f"pragma user_version={layout}")
    with pytest.raises(DataError, match=f"state.db has layout {layout}, and this shoal reads layout 2"):
        Store(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as db:
        assert db.execute("pragma user_version").fetchone() == (layout,)


def test_a_packed_folder_has_what_links_lead_to_and_programs_still_run(tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    (tmp_path / "blob").write_text("weights")
    (source / "model").symlink_to(tmp_path / "blob")
    (source / "run.sh").write_text("#!/bin/sh")
    (source / "run.sh").chmod(0o700)
    unpack(pack(source), tmp_path / "to")
    assert (tmp_path / "to" / "model").read_text() == "weights"
    assert os.access(tmp_path / "to" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "to" / "model", os.X_OK)
    for target in (tmp_path / "nowhere", tmp_path / "to"):
        (source / "link").unlink(missing_ok=True)
        (source / "link").symlink_to(target)
        with pytest.raises(ConfigError, match="link is a link to a folder or to nothing"):
            pack(source)


def test_a_function_that_its_process_could_not_find_is_refused_when_it_is_added() -> None:
    with pytest.raises(ConfigError, match="top of a module, got 'functools.partial"):
        name_of(functools.partial(pack))
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def work(run):\n    pass\n", "<stdin>", "exec"), typed)
    with pytest.raises(
        ConfigError, match="must stand in a .py file, for its process: 'work' is in .*<stdin>"
    ):
        name_of(typed["work"])


def test_numbers_of_a_result_may_be_numpys_and_need_not_be_finite(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "one", "", {}, 0, {})
    run.finish(numbers={"loss": np.float32(0.5), "best": np.int64(3), "rest": [math.nan, -math.inf]})
    assert read_done(tmp_path, 1)["numbers"] == {"loss": 0.5, "best": 3, "rest": [None, None]}
    with pytest.raises(TypeError, match=r"numbers must be plain JSON, got \{3\}"):
        run.finish(numbers={"loss": {3}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs": [3]}, r"what 'one' needs must be a list of names, got \[3\]"),
        ({"settings": {"text": np.int64(3)}}, "what 'one' is to do must be plain JSON: .* int64"),
        ({"settings": {"text": math.nan}}, "what 'one' is to do must be plain JSON: .*not JSON compliant"),
        ({"steps": -4}, "the budget of 'one' must be a whole number of steps, at least 0, got -4"),
        ({"steps": math.nan}, "the budget of 'one' must be a whole number of steps, at least 0, got nan"),
        ({"steps": "9"}, "the budget of 'one' must be a whole number of steps, at least 0, got '9'"),
        ({"function": "write"}, "named module:function or file.py:function, got 'write'"),
    ],
)
def test_a_job_that_could_never_run_is_refused_and_the_others_go_on(
    tmp_path: Path, jobs: str, options: dict[str, Any], message: str
) -> None:
    with contextlib.closing(Graph(tmp_path / "graph", 2)) as graph:
        with pytest.raises(ValueError, match=message):
            graph.add("one", **{"function": f"{jobs}:says_nothing", "settings": {"text": ""}, **options})
        graph.add("one", f"{jobs}:says_nothing", settings={"text": ""})
        assert graph.run()


def test_a_job_that_used_no_number_of_steps_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "one", "m:f", {}, 0, {})
    for steps in (-5, "3", None, 1.5, math.nan):
        with pytest.raises(DataError, match="what 'one' used must be a whole number of steps, at least 0"):
            run.finish(b"", steps=steps)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    run.finish(b"", steps=np.int64(3))
    assert read_done(tmp_path)["steps"] == 3


def test_a_job_started_by_hand_beside_its_folder_leaves_its_failure_there(tmp_path: Path, jobs: str) -> None:
    (tmp_path / "job").mkdir()
    told = {"name": "one", "function": f"{jobs}:greedy", "settings": {}, "steps": 1, "needs": {}}
    (tmp_path / "job" / "job.json").write_text(json.dumps(told))
    done = subprocess.run(
        [sys.executable, "-m", "shoal.skills.jobs.run", "job", "--attempt", "3"],
        cwd=tmp_path, env={**os.environ, **job_environment(1)}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert read_failure(tmp_path / "job", 3) == ("ExhaustedError: 1 steps are not enough", True)


def test_a_function_that_only_returns_has_made_nothing_and_is_done(tmp_path: Path, jobs: str) -> None:
    told = {
        "name": "one",
        "function": f"{jobs}:says_nothing",
        "settings": {"text": "x"},
        "steps": 0,
        "needs": {},
    }
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text(json.dumps(told))
    done = subprocess.run(
        [sys.executable, "-m", "shoal.skills.jobs.run", "job", "--attempt", "3"],
        cwd=tmp_path, env={**os.environ, **job_environment(1)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, '{"event": "finished", "job": "one", "attempt": 3}\n')
    assert (tmp_path / "job" / "kept").read_text() == "x"
    mark = read_done(tmp_path / "job", 3)
    assert (mark["steps"], mark["packed"], mark["numbers"]) == (0, False, {})
    assert (tmp_path / "job" / "result").read_bytes() == b""
    assert mark["peak_memory"] > 1 << 20  # bytes


def test_an_empty_folder_is_packed_and_unpacked_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    unpack(pack(tmp_path / "from"), tmp_path / "deep" / "to")
    assert list((tmp_path / "deep" / "to").iterdir()) == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["to"]
    (tmp_path / "from" / "x").touch()
    with pytest.raises(ConfigError, match="from cannot be unpacked to: .*; name a new folder"):
        unpack(pack(tmp_path / "deep" / "to"), tmp_path / "from")


def test_what_a_needed_job_made_is_a_file_or_is_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "x").write_text("1")
    (tmp_path / "blob").write_bytes(pack(tmp_path / "from"))
    sha256 = hashlib.sha256((tmp_path / "blob").read_bytes()).hexdigest()
    told = {"path": str(tmp_path / "blob"), "sha256": sha256, "numbers": {"loss": 2}}
    run = Run(
        tmp_path, 1, "one", "", {}, 0, {"file": {**told, "packed": False}, "folder": {**told, "packed": True}}
    )
    assert run.input("file") == tmp_path / "blob"
    assert (run.input("folder") / "x").read_text() == "1"
    (tmp_path / "blob").write_bytes((tmp_path / "blob").read_bytes()[:-512])
    assert run.input("folder") == tmp_path / "inputs" / sha256
    shutil.rmtree(tmp_path / "inputs")
    for name in ("file", "folder"):
        with pytest.raises(DataError, match=f"blob was altered or truncated: it is not what '{name}' made"):
            run.input(name)
    assert not (tmp_path / "inputs").exists()
    assert run.numbers("file") == {"loss": 2}
    with pytest.raises(ConfigError, match="'one' does not need 'else'; it needs file, folder"):
        run.input("else")
    with pytest.raises(ConfigError, match="'one' does not need 'else'; it needs nothing"):
        Run(tmp_path, 1, "one", "", {}, 0, {}).input("else")
    with pytest.raises(DataError, match="is not the folder of a job: it has no job.json"):
        Run.open(tmp_path)


def test_a_job_that_may_not_be_changed_says_what_can_be(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, needs in (("one", []), ("two", ["one"]), ("three", ["two"])):
        store.add(name, {}, needs, budget=100)
    with pytest.raises(ConfigError, match="'one' is waiting; only its budget can be changed now"):
        reopen(store, "one")
    with pytest.raises(ConfigError, match="'one' is waiting; only its budget"):
        reopen(store, "one", budget=200, fresh=True)
    assert reopen(store, "one", budget=200) == []
    assert store.job("one").budget_total == 200
    store.update("one", status="completed", budget_used=150)
    with pytest.raises(ConfigError, match="'one' is completed; --budget STEPS works on it further"):
        reopen(store, "one")
    with pytest.raises(ConfigError, match="'one' has used 150 steps; --budget must be more"):
        reopen(store, "one", budget=150)
    for rounds in (1, 2):
        store.update("one", status="completed", retries=2, fresh=0)
        assert reopen(store, "one", budget=150 + rounds) == ["one"]
        row = store.job("one")
        assert (row.status, row.rounds, row.retries, row.fresh, row.left) == (
            "waiting",
            rounds,
            0,
            True,
            rounds,
        )
    store.update("one", status="failed", retries=2, cancel=1, fresh=0)
    for name in ("two", "three"):
        store.update(name, status="blocked", reason="one failed")
    assert reopen(store, "one") == ["one", "two", "three"]
    row = store.job("one")
    assert (row.status, row.rounds, row.retries, row.cancel, row.fresh) == ("waiting", 2, 0, False, False)
    assert [(row.status, row.reason) for row in store.jobs()] == [("waiting", None)] * 3
    store.update("one", status="failed")
    reopen(store, "one", fresh=True)
    assert (store.job("one").rounds, store.job("one").fresh) == (3, True)
    store.close()


def test_only_what_waits_or_runs_can_be_cancelled(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("one", {})
    for status in ("waiting", "blocked", "running"):
        store.update("one", status=status, cancel=0)
        ask_to_cancel(store, "one")
        assert store.job("one").cancel
    for status in ("merging", "completed", "failed", "skipped"):
        store.update("one", status=status)
        with pytest.raises(ConfigError, match=f"'one' is {status}; there is nothing to cancel"):
            ask_to_cancel(store, "one")
    store.close()


def test_what_is_true_of_a_job_depends_on_its_process_and_on_who_watches(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("one", {})
    assert condition(store, store.job("one"), held=False) == "waiting"
    number = store.begin_attempt("one", tmp_path / "run")
    assert condition(store, store.job("one"), held=True) == "running"
    assert condition(store, store.job("one"), held=False) == "interrupted"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "DONE.json").write_text("{}")
    assert condition(store, store.job("one"), held=False) == "done, not merged"
    mine = {"pid": os.getpid(), "began": start_time(os.getpid())}
    store.set_handle(number, "local", mine, tmp_path / "log")
    assert condition(store, store.job("one"), held=True) == "running"
    assert condition(store, store.job("one"), held=False) == "running, no scheduler"
    store.set_handle(number, "local", {**mine, "began": "1"}, tmp_path / "log")  # another process by then
    assert condition(store, store.job("one"), held=False) == "done, not merged"
    store.close()


def test_whether_a_launch_is_alive_is_known_from_what_is_kept_of_it() -> None:
    mine = start_time(os.getpid())
    assert alive("local", {"pid": os.getpid(), "began": mine})
    assert alive("ray", {"task": "x", "driver": os.getpid()})
    for name, handle in (
        ("local", None), ("local", {}), ("local", {"pid": os.getpid(), "began": None}), ("ray", {"task": "x"}),
        ("local", {"pid": os.getpid(), "began": "7"}), ("local", {"driver": os.getpid()}),
    ):  # fmt: skip
        assert not alive(name, handle)
    assert adopting_launcher("ray", {"task": "x", "driver": 1}) is None
    assert isinstance(adopting_launcher("local", {"pid": 1}), LocalLauncher)
    assert isinstance(adopting_launcher("ray", {"pid": 1}), LocalLauncher)
    with pytest.raises(ConfigError, match="no launcher named 'slrum'. Did you mean 'slurm'"):
        make_launcher("slrum")


def test_jobs_side_by_side_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    found = job_environment(3, "0,1")
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "1"
    assert (found["XLA_PYTHON_CLIENT_MEM_FRACTION"], found["CUDA_VISIBLE_DEVICES"]) == ("0.30", "0,1")
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "shoal" / "jax")
    assert found["PYTHONPATH"].split(":")[1:] == ["/one", "/two"]
    assert (Path(found["PYTHONPATH"].split(":")[0]) / "shoal" / "skills" / "jobs" / "runner.py").is_file()
    assert "CUDA_VISIBLE_DEVICES" not in job_environment(1)
    assert job_environment(1)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.90"
    assert job_environment(1)["PYTHONUNBUFFERED"] == "1"


def test_a_process_is_told_from_a_later_one_of_its_number_and_measured() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = start_time(child.pid)
    assert began
    assert began != start_time(1)
    assert resident_memory(os.getpid()) > 10 << 20
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    handle = {"pid": child.pid, "began": began}
    for other in ({**handle, "began": "7"}, {**handle, "began": None}):
        assert not watch_process(other, ended.put)
        kill_group(other)
    assert watch_process(handle, ended.put)
    assert ended.empty()
    child.communicate(b"\n")
    assert child.returncode == 0
    assert ended.get(timeout=60) == "ended"
    assert start_time(child.pid) is None
    assert resident_memory(child.pid) == 0
    assert [exit_words(code) for code in (-9, 0, 1)] == [
        "killed by signal 9",
        "exit status 0",
        "exit status 1",
    ]


def test_what_a_command_says_is_written_here_and_behind_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    command = [
        sys.executable,
        "-c",
        "import sys; print('said'); print('wrong', file=sys.stderr); sys.exit(3)",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shoal.skills.jobs.runner", str(tmp_path / "log"), *command],
        env={**os.environ, **job_environment(1)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["said", "wrong"]
    assert (tmp_path / "log").read_text() == "before\n" + done.stdout


def test_a_batch_job_that_is_not_taken_says_why(slurm: Path) -> None:
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\necho 'no such partition' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="sbatch failed: no such partition"):
        SlurmLauncher().launch(["true"], "name", {}, slurm / "log")
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\nexit 4\n")
    with pytest.raises(RuntimeError, match="sbatch failed: 4"):
        SlurmLauncher().launch(["true"], "name", {}, slurm / "log")
    assert SlurmLauncher().room(2, 5) == 3


def test_a_batch_job_may_lie_where_names_are_no_text_of_the_locale(slurm: Path) -> None:
    """The script was written by the locale: a path with an ü ended the launch under LC_ALL=C."""
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\nexit 4\n")
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\n")
    with pytest.raises(RuntimeError, match="sbatch failed: 4"):
        SlurmLauncher().launch(["cat", os.fsdecode(b"f\xfc")], "name", {}, slurm / "log")
    assert b"exec cat 'f\xfc'\n" in (slurm / "log.sh").read_bytes()
    assert SlurmLauncher().find("name", slurm / "log") is None
    (slurm / "bin" / "squeue").unlink()  # what cannot be asked is not known to have ended
    assert SlurmLauncher().state({"slurm": "7"}) == "UNKNOWN"


def test_who_waits_for_a_job_keeps_no_program_from_ending(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, threads = Ray(CPU=1), []
    ray.stand_in(monkeypatch)
    ray.hears = False
    command = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    adopted = {"pid": child.pid, "began": start_time(child.pid)}
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    for launcher, handle in (
        (RayLauncher(), None), (SlurmLauncher(every=0.05), None), (LocalLauncher(), None), (LocalLauncher(), adopted),
    ):  # fmt: skip
        known = set(threading.enumerate())
        handle = handle or launcher.launch(["sleep", "600"], "name", {}, slurm / "log")
        assert launcher.watch(handle, ended.put)
        began = set(threading.enumerate()) - known
        threads += [thread for thread in began if thread.name.startswith("wait-")]
        launcher.kill(handle)
        ray.session = 2
        assert ended.get(timeout=60)
    assert [thread.daemon for thread in threads] == [True] * 4
    child.wait()
    child.stdin.close()  # type: ignore[union-attr]
