import errno
import fcntl
import json
import logging
import logging.config
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import main
from shoal.core import run_folder
from shoal.core.errors import ConfigError, WorkerError
from shoal.core.run_folder import FolderLock, RunFolder

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), min_size=1, max_size=4)


@given(rows=ROWS, cut=st.integers(0, 10_000), fill=st.sampled_from([b"", b"\0\0\0"]))
def test_a_row_torn_anywhere_costs_that_row_alone(tmp_path_factory, rows, cut, fill):
    path = tmp_path_factory.mktemp("run")
    with RunFolder(path, "train", 0) as run:
        for row in rows:
            run.append_metrics(row)
        data = run.metrics_path.read_bytes()
        begin = data.rstrip(b"\n").rfind(b"\n") + 1  # of the last row
        kept = begin + cut % (len(data) - begin)
        run.metrics_path.write_bytes(data[:kept] + fill)
        run.append_metrics({"after": 1})
        whole = rows if kept == len(data) - 1 and not fill else rows[:-1]  # only its end of line was missing
        assert run.read_metrics() == [*whole, {"after": 1}]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this module logged, and no thread that a test before left behind."""
    return [record.getMessage() for record in caplog.records if record.name == run_folder.__name__]


def test_lines_that_are_no_rows_are_named_and_passed_over(tmp_path, caplog):
    run = RunFolder(tmp_path, "train", 0)
    run.metrics_path.write_bytes(b'{"i": 0}\n{"i": 1, "x"{"i": 2}\n\xff\n{"i": 3}\n7\n{"i": 4')
    with caplog.at_level(logging.WARNING):
        assert [row["i"] for row in run.read_metrics()] == [0, 3]
    assert told(caplog) == [f"{run.metrics_path}: 4 half-written lines are passed over"]
    caplog.clear()
    run.keep_metrics("i", 9)
    assert run.metrics_path.read_bytes() == b'{"i": 0}\n{"i": 3}\n'
    caplog.clear()
    run.read_metrics()
    assert not told(caplog)


def test_a_summary_tells_the_time_of_this_run_and_not_of_the_process(tmp_path):
    began = sum(os.times()[:4])
    while sum(os.times()[:4]) - began < 0.1:  # what the process has used before
        pass
    summary = RunFolder(tmp_path, "train", 0).finish({})
    assert 0 <= summary["cpu_seconds"] < 0.1
    assert 0 <= summary["seconds"] < 60


def holder_of(folder: Path, then: str = "sys.stdin.read()") -> subprocess.Popen:
    """Another process that holds a run folder; it lives as long as its input is open."""
    code = (
        "import os, sys\nfrom shoal.core.run_folder import RunFolder\n"
        f"run = RunFolder({str(folder)!r}, 'train', 0)\nprint(os.getpid(), flush=True)\n{then}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == f"{process.pid}\n"
    return process


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path):
    process = holder_of(tmp_path / "run")
    with pytest.raises(
        WorkerError, match=rf"another run \(process {process.pid}\) is running on .*run; stop it"
    ):
        RunFolder(tmp_path / "run", "train", 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    RunFolder(tmp_path / "run", "train", 0).append_metrics({"i": 0})


def test_a_process_that_was_forked_off_does_not_hold_the_folder(tmp_path):
    fork = "if os.fork() == 0:\n    print('child', flush=True)\nsys.stdin.read()"
    process = holder_of(tmp_path / "run", fork)
    assert process.stdout.readline() == "child\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    try:
        with pytest.raises(WorkerError):
            RunFolder(tmp_path / "run", "train", 0)  # the child has not let go of what the parent holds
        process.kill()
        process.wait()
        RunFolder(tmp_path / "run", "train", 0).close()
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_a_run_that_has_not_come_to_its_end_is_not_written_over_by_another_command(tmp_path):
    # Of one that failed before it wrote anything there is nothing to lose.
    RunFolder(tmp_path, "train", 0).close()
    with RunFolder(tmp_path, "eval", 0) as run:
        run.append_metrics({"i": 0})
    with pytest.raises(
        ConfigError, match="holds a run of `shoal eval`, which one of `shoal train` would write"
    ):
        RunFolder(tmp_path, "train", 0)
    RunFolder(tmp_path, "eval", 0).close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_whose_folder_was_removed_writes_nothing_into_the_next_ones(tmp_path, caplog, ended):
    """It wrote on, beside the other or over what it had left."""
    folder = tmp_path / "run"
    with RunFolder(folder, "train", 0) as first:
        shutil.rmtree(folder)
        with RunFolder(folder, "train", 1) as second:
            if ended:
                second.finish({})
            before = sorted(folder.iterdir())
            for write in (first.hold, lambda: first.append_metrics({"i": 0}), lambda: first.finish({})):
                with pytest.raises(WorkerError, match="run was removed, and another run has begun there: no"):
                    write()
            first.fail(ValueError("whatever"))
            assert "its summary could not be written" in caplog.text or ended
            own = {folder / "log.txt"}  # of the second, which is in this process, too, and hears what it says
            assert sorted({*folder.iterdir()} - own) == sorted({*before} - own)
            assert "whatever" not in (folder / "log.txt").read_text()


def test_a_run_whose_folder_is_gone_says_so_and_one_whose_lock_is_gone_takes_it_anew(tmp_path):
    """The one made half a folder anew, without its config, and neither kept others out."""
    folder = tmp_path / "run"
    with RunFolder(folder, "train", 0) as run:
        (folder / ".lock").unlink()
        run.append_metrics({"i": 0})
        with pytest.raises(WorkerError, match="is running on"):
            RunFolder(folder, "train", 0)
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError, match=r"run/\.lock"):
            run.hold()
    assert not folder.exists()


def test_one_process_opens_a_folder_again_when_it_is_done_with_it(tmp_path):
    first = RunFolder(tmp_path, "train", 0)
    with pytest.raises(
        WorkerError, match=rf"process {os.getpid()}\) is running on .*, which this process has open"
    ):
        RunFolder(tmp_path, "train", 0)
    first.finish({})
    second = RunFolder(tmp_path, "train", 0)
    with pytest.raises(WorkerError, match="this process has open"):
        first.append_metrics({"i": 0})  # it is the other's now
    with pytest.raises(WorkerError, match="this process has open"):
        first.keep_metrics("i", 9)
    with pytest.raises(WorkerError, match="this process has open"):
        first.finish({})
    second.close()
    second.close()
    first.append_metrics({"i": 0})
    del first
    RunFolder(tmp_path, "train", 0).close()
    RunFolder(tmp_path, "train", 0, lock=False).append_metrics({"i": 1})


def test_two_further_processes_of_one_run_hold_no_lock(tmp_path):
    with RunFolder(tmp_path, "train", 0):
        RunFolder(tmp_path, "train", 0, lock=False).close()
        assert FolderLock(tmp_path / ".lock").is_taken()
    assert not FolderLock(tmp_path / ".lock").is_taken()
    assert not FolderLock(tmp_path / "none").is_taken()
    assert not (tmp_path / "none").exists()


def test_where_files_cannot_be_locked_a_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    def flock(descriptor, how):
        raise OSError(run_folder.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    RunFolder(tmp_path, "train", 0).append_metrics({"i": 0})
    assert "this file system has no locks" in caplog.text


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_run_folder_that_cannot_be_one_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a run folder must be a folder"):
        RunFolder(tmp_path / place, "train", 0)
    assert os.listdir(tmp_path) == ["file"]


COMMANDS = {
    "train": "train --config-name demo-bandit run_dir={}",
    "train-ppo": "train-ppo --backend serial --path torch --run-dir {}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_training_into_a_folder_in_use_is_refused_in_one_line(tmp_path, capsys, command):
    process = holder_of(tmp_path)
    try:
        assert main(COMMANDS[command].format(tmp_path).split()) == 1
    finally:
        process.kill()
        process.communicate()
    out = capsys.readouterr()
    assert out.err.splitlines()[-1].startswith(
        f"shoal: another run (process {process.pid}) is running on {tmp_path}"
    )
    assert "Traceback" not in out.err
    assert os.listdir(tmp_path) == [".lock"]


def test_who_looks_whether_a_run_goes_on_never_refuses_one(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / ".lock")
    lock.take()
    lock.release()
    looking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not lock.is_taken()  # two may look at once
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: os.close(looking))  # it has looked by then
    lock.take()
    lock.release()


def test_a_run_of_somebody_else_can_be_looked_at(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / ".lock")
    lock.take()
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(run_folder.os, "open", read_only)
    assert FolderLock(tmp_path / ".lock").is_taken()
    lock.release()
    assert not FolderLock(tmp_path / ".lock").is_taken()


@pytest.mark.parametrize(
    "add", [lambda run: run.append_metrics({"step": 2}), lambda run: run.event("checkpoint")]
)
def test_a_run_that_goes_on_is_not_told_as_completed_however_it_ends(tmp_path, add):
    with RunFolder(tmp_path, "train", 0) as run:
        add(run)
        run.finish({"steps": 1})
    with RunFolder(tmp_path, "train", 0):
        assert run_folder.read_summary(tmp_path)["status"] == "completed"
    with RunFolder(tmp_path, "train", 0) as run:
        add(run)
        assert not (tmp_path / "summary.json").exists()
        run.finish({"steps": 2})
        run.fail(KeyboardInterrupt())  # after its end
        assert run_folder.read_summary(tmp_path)["metrics"] == {"steps": 2}
        add(run)  # in the same process
        assert not (tmp_path / "summary.json").exists()


def test_rows_that_stay_stand_once_and_in_order(tmp_path):
    """Of a file that somebody put together from two, a resumed run kept both rows of a step."""
    with RunFolder(tmp_path, "train", 0) as run:
        for step, loss in ((1, "a"), (3, "b"), (2, "c"), (4, "d"), (1, "e")):
            run.append_metrics({"step": step, "loss": loss})
        kept = [{"step": 1, "loss": "e"}, {"step": 2, "loss": "c"}, {"step": 3, "loss": "b"}]
        assert run.keep_metrics("step", 3) == run.read_metrics() == kept
        run.keep_metrics("step", 3, {"step": 3, "loss": "again"})
        assert run.read_metrics() == [*kept[:2], {"step": 3, "loss": "again"}]


def test_numbers_of_numpy_are_numbers_of_metrics_and_summaries(tmp_path):
    metrics = {
        "mean": np.float32(0.5),
        "n": np.int64(3),
        "won": np.bool_(True),
        "all": np.array([1.0, np.nan]),
    }
    with RunFolder(tmp_path, "train", 0) as run:
        run.append_metrics(metrics)
        assert run.read_metrics() == [{"mean": 0.5, "n": 3, "won": True, "all": [1.0, None]}]
        assert (
            run.finish(metrics)["metrics"]
            == run_folder.read_summary(tmp_path)["metrics"]
            == run.read_metrics()[0]
        )


def test_no_command_writes_over_the_run_of_another(tmp_path, capsys):
    with RunFolder(tmp_path, "train", 0) as run:
        run.finish({"success": 0.5})
    before = sorted((path, path.read_bytes()) for path in tmp_path.iterdir())
    for words in (
        ["bench", "CartPole-v1", "--run-dir"],
        ["eval", "openai:M", "--env", "bandit", "--out"],
    ):
        assert main([*words, str(tmp_path)]) == 2
        assert "holds a run of `shoal train`" in capsys.readouterr().err
    assert sorted((path, path.read_bytes()) for path in tmp_path.iterdir()) == before
    with RunFolder(tmp_path, "train", 0) as again:
        again.finish({})


def test_a_run_stays_in_its_folder_when_the_working_directory_changes(tmp_path, monkeypatch):
    """An env that is stepped in this process may do that."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunFolder("runs/mine", "train", 0) as run:
        run.append_metrics({"iteration": 0})
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.append_metrics({"iteration": 1})
        assert len(run.read_metrics()) == 2
        run.finish({})
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()


def test_the_summary_of_a_failed_run_says_why(tmp_path: Path) -> None:
    for number, error in enumerate((RuntimeError("nan loss"), KeyboardInterrupt())):
        with RunFolder(tmp_path / str(number), "train", 0) as run:
            run.fail(error)
    failed, interrupted = (json.loads((tmp_path / str(n) / "summary.json").read_text()) for n in (0, 1))
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: nan loss")
    assert interrupted["status"] == "interrupted"
    assert "error" not in interrupted


def test_a_summary_that_cannot_be_written_does_not_hide_why_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "no space", str(path))

    monkeypatch.setattr("shoal.core.run_folder.write_json", full)
    with RunFolder(tmp_path, "train", 0) as run:
        run.fail(RuntimeError("nan loss"))
    assert "its summary could not be written: [Errno 28] no space" in caplog.text


def test_two_threads_that_say_the_first_things_at_once_begin_one_log(tmp_path, monkeypatch):
    take = run_folder.FolderLock.take

    def slowly(lock):
        time.sleep(0.1)
        take(lock)

    with RunFolder(tmp_path, "train", 0) as run:
        monkeypatch.setattr(run_folder.FolderLock, "take", slowly)
        thread = threading.Thread(
            target=lambda: logging.getLogger("shoal.envs").warning("the lake is closed")
        )
        thread.start()
        run.append_metrics({"i": 0})
        thread.join()
    assert (tmp_path / "log.txt").read_text().count("started by: ") == 1


def test_the_log_of_a_run_has_its_command_its_warnings_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/shoal", "train", "note=a b"])
    with RunFolder(tmp_path / "other", "train", 0):
        with RunFolder(tmp_path / "run", "train", 0) as run:
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as uvicorn does
            logging.getLogger("shoal.envs").warning("the lake is closed")
            run.fail(ZeroDivisionError("no fish"))
        logging.getLogger("shoal.envs").warning("of the other alone")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    told = [line[20:] for line in lines]  # behind the time
    assert told[:2] == ["INFO started by: shoal train 'note=a b'", "WARNING the lake is closed"]
    assert told[2] == "ERROR ZeroDivisionError: no fish"
    assert re.fullmatch(r"INFO failed after [0-9.]+ s", told[-1])
    assert "of the other alone" in (tmp_path / "other" / "log.txt").read_text()
    # Resumed by another program.
    monkeypatch.setattr("sys.argv", ["/somewhere/mine.py", "--password", "carp"])
    with RunFolder(tmp_path / "run", "train", 0) as run:
        logging.getLogger("shoal.envs").warning("an env\n2026-01-01 00:00:00 INFO started by: no\rshoal")
        run.finish({})
    again = (tmp_path / "run" / "log.txt").read_text().split("\n")[len(lines) :]
    assert [line[20:] for line in again[:2]] == ["INFO started by: mine.py", "WARNING an env"]
    assert again[2:4] == ["    2026-01-01 00:00:00 INFO started by: no", "    shoal"]
    assert "carp" not in "".join(again)


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "log.txt").mkdir()
    with RunFolder(tmp_path, "train", 0) as run:
        run.append_metrics({"iteration": 1})
        assert run.finish({})["status"] == "completed"
    assert capsys.readouterr() == ("", "")
