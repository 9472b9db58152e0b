"""Where trainings run: started, watched, ended, adopted; all four alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.skills.conftest import wait_for

from shoal.core.errors import ConfigError
from shoal.skills.graph.launchers import (
    LocalLauncher,
    RayLauncher,
    SlurmLauncher,
    adopting_launcher,
    is_alive,
    job_environment,
    make_launcher,
    process_handle,
    run_command,
    server_of,
    start_time,
)
from shoal.skills.graph.process import read_failure

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
SAYS = """
import json, os, pathlib, sys, time
from shoal.skills.graph.process import run_as_process

def work(folder, attempt):
    print("hello", os.environ["WORD"], flush=True)
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(600 if (folder / "long").exists() else 0)

sys.exit(run_as_process("says", None, work))
"""


RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])


@pytest.fixture(params=["local", "tmux", RAY])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "slurm":
        pytest.importorskip("submitit")
        yield SlurmLauncher(tmp_path, every=0.1, cluster="local")
        return
    if request.param == "ray":
        ray = pytest.importorskip("ray")
        yield RayLauncher()
        ray.shutdown()
        return
    yield request.getfixturevalue("tmux")(tmp_path) if request.param == "tmux" else LocalLauncher()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Arguments of a launch of a small program in `tmp_path / "run"`."""
    (tmp_path / "says.py").write_text(SAYS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "run").mkdir()

    def launch() -> dict[str, Any]:
        return {
            "command": [sys.executable, "-m", "says", str(tmp_path / "run"), "--attempt", "1"],
            "session": "shoal_e0_Collect.Wood_1",
            "env": {**job_environment(1), "WORD": "a 'quoted' $(word)"},
            "log": tmp_path / "run" / "log",
        }

    return launch


def test_a_program_is_run_and_its_output_and_end_are_known(launcher, program, tmp_path: Path) -> None:
    handle = launcher.launch(**program())
    assert json.loads(json.dumps(handle)) == handle
    assert isinstance(wait_for(lambda: launcher.poll(handle)), str)
    assert "hello a 'quoted' $(word)" in (tmp_path / "run" / "log").read_text()


@pytest.mark.parametrize(
    "launcher",
    ["local", "tmux", pytest.param("slurm", marks=pytest.mark.slow), RAY],  # submitit gives a job a minute
    indirect=True,
)
def test_a_program_that_is_killed_is_gone(launcher, program, tmp_path: Path) -> None:
    (tmp_path / "run" / "long").touch()
    handle = launcher.launch(**program())
    pid = int(
        wait_for(lambda: (tmp_path / "run" / "pid").exists() and (tmp_path / "run" / "pid").read_text())
    )
    assert launcher.poll(handle) is None
    launcher.kill(handle)
    assert wait_for(lambda: launcher.poll(handle))
    wait_for(lambda: start_time(pid) is None)
    launcher.kill(handle)  # once more does nothing


@pytest.mark.parametrize("name", ["local", "tmux"])
def test_a_program_outlives_its_launcher_and_is_adopted(name: str, program, tmp_path: Path) -> None:
    if name == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    (tmp_path / "run" / "long").touch()
    handle = make_launcher(name, folder=tmp_path).launch(**program())
    again = adopting_launcher(handle, tmp_path)
    assert again is not None
    assert again.name == name
    assert again.poll(handle) is None
    again.kill(handle)
    wait_for(lambda: again.poll(handle))
    assert adopting_launcher({"task": "of Ray, and gone with its driver"}, tmp_path) is None


def test_a_slurm_job_is_run_and_found_again_by_its_number(program, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    first = SlurmLauncher(tmp_path, every=0.1, cluster="local")
    handle = first.launch(**program())
    assert json.loads(json.dumps(handle)) == handle
    wait_for(lambda: first.poll(handle))
    assert "hello a 'quoted' $(word)" in (tmp_path / "run" / "log").read_text()
    again = adopting_launcher(handle, tmp_path)
    assert again is not None
    assert "ended" in wait_for(lambda: again.poll(handle))


def test_where_there_is_no_slurm_it_says_where_to_run_it(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    if shutil.which("srun") is not None:
        pytest.skip("SLURM is here")
    with pytest.raises(ConfigError, match="run it where batch jobs are submitted"):
        make_launcher("slurm", folder=tmp_path)


def test_options_of_sbatch_reach_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    made = SlurmLauncher(tmp_path, ["--partition=gpu", "--exclusive", "--time=2:00:00"])
    text = made._executor._make_submission_file_text("python x", "1")
    for line in ("--partition=gpu", "--exclusive", "--time=2:00:00"):
        assert f"#SBATCH {line}\n" in text


def test_how_a_process_ended_is_told_in_words(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    for code, words in (("import sys; sys.exit(3)", "exit status 3"),
                        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9")):  # fmt: skip
        handle = launcher.launch([sys.executable, "-c", code], "s", {}, tmp_path / "log")
        assert wait_for(lambda handle=handle: launcher.poll(handle)) == words


def test_a_later_process_of_the_same_number_is_not_taken_for_ours() -> None:
    process = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        handle = process_handle(process.pid)
        assert is_alive(handle)
        assert not is_alive({**handle, "began": "long ago"})
        LocalLauncher().kill({**handle, "began": "long ago"})
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert not is_alive(handle)


def test_what_a_process_left_in_its_group_is_ended_with_it(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    handle = launcher.launch([sys.executable, "-c", code], "s", {}, tmp_path / "log")
    wait_for(lambda: launcher.poll(handle))
    wait_for(lambda: start_time(int((tmp_path / "log").read_text())) is None)


def test_runs_in_two_folders_do_not_end_each_others_sessions(tmp_path: Path, tmux) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    assert server_of(folders[0]) == server_of(tmp_path / "two" / ".." / "one") != server_of(folders[1])
    launchers = [tmux(folder) for folder in folders]
    handles = [launcher.launch(SLEEP, "same", {}, tmp_path / "log") for launcher in launchers]
    launchers[0].kill(handles[0])
    wait_for(lambda: launchers[0].poll(handles[0]))
    assert launchers[1].poll(handles[1]) is None


def test_words_reach_tmux_as_words_and_not_as_commands(tmp_path: Path, tmux) -> None:
    launcher, marker = tmux(tmp_path), tmp_path / "P"
    hostile = [f"$(touch {marker})", f"; touch {marker}", f"`touch {marker}`"]
    handle = launcher.launch(
        [sys.executable, "-c", "import sys; print(sys.argv[1:])", *hostile], f"x; touch {marker} #",
        {"ODD": f"`touch {marker}`"}, tmp_path / "log",
    )  # fmt: skip
    wait_for(lambda: launcher.poll(handle))
    assert str(hostile) in (tmp_path / "log").read_text()
    assert not marker.exists()


def test_a_launch_has_the_environment_of_its_scheduler_and_not_of_the_first_one(
    tmp_path, monkeypatch, tmux
) -> None:
    """A tmux server keeps the environment of who started it: keys, folders of caches, the visible GPUs."""
    launcher, show = tmux(tmp_path), "import os; print([os.environ['MY_KEY']])"
    monkeypatch.setenv("MY_KEY", "1")
    launcher.launch(SLEEP, "hold", {}, tmp_path / "hold")
    value = "2 'x' \"y\" = $HOME\nz"
    monkeypatch.setenv("MY_KEY", value)
    handle = launcher.launch([sys.executable, "-c", show], "two", {}, tmp_path / "two")
    wait_for(lambda: launcher.poll(handle))
    assert repr([value]) in (tmp_path / "two").read_text()
    assert not list(tmp_path.glob(".two*"))


def test_the_reason_that_a_training_gives_for_its_end_is_kept(tmp_path: Path) -> None:
    code = (
        "import sys; from shoal.skills.graph.process import run_as_process; "
        "run_as_process('x', None, lambda folder, attempt: sys.exit('the data set is missing'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), "--attempt", "4"], check=False)
    assert done.returncode == 1
    assert read_failure(tmp_path, 4) == ("the data set is missing", False, False)


def test_a_training_that_finds_no_room_says_so_though_its_output_has_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import errno; from shoal.skills.graph.process import leave, run_as_process\n"
        "def work(folder, attempt):\n    print('lost')\n    raise OSError(errno.ENOSPC, 'No space left')\n"
        "leave(run_as_process('x', None, work))"
    )
    with open("/dev/full", "w") as full:
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), "--attempt", "4"], stdout=full, stderr=full
        )
    assert read_failure(tmp_path, 4).full
    assert not read_failure(tmp_path, 5).full  # another launch, where there is room
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    assert read_failure(tmp_path, 5).full  # which could not even say so


def test_a_training_dies_with_the_process_of_a_cluster_that_runs_it(program, tmp_path: Path) -> None:
    (tmp_path / "run" / "long").touch()
    given = program()
    code = "import json, sys; from shoal.skills.graph import launchers as l; l.run_command(*json.loads(sys.argv[1]))"
    words = json.dumps([given["command"], given["env"], str(given["log"])])
    node = subprocess.Popen([sys.executable, "-c", code, words], env={**os.environ, **given["env"]})
    pid = int(
        wait_for(lambda: (tmp_path / "run" / "pid").exists() and (tmp_path / "run" / "pid").read_text())
    )
    node.send_signal(signal.SIGKILL)
    node.wait()
    wait_for(lambda: start_time(pid) is None)


def test_trainings_side_by_side_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/two")
    found = job_environment(3, "0,1")
    assert (found["OMP_NUM_THREADS"], found["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("1", "0.30")
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["PYTHONPATH"].split(os.pathsep)[1:] == ["/one", "/two"]
    assert "CUDA_VISIBLE_DEVICES" not in job_environment(1)


def test_a_run_folder_that_a_node_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/away is not on .*all nodes share"):
        run_command([sys.executable, "-m", "says"], {}, str(tmp_path / "away" / "log"))
