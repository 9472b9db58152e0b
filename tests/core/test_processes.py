"""What a worker leaves behind is found and ended."""

import os
import subprocess
import sys
import threading
import time
import types
import zipimport

import cloudpickle
import pytest

from shoal.core.errors import WorkerDiedError
from shoal.core.processes import (
    TOKEN,
    WorkerProcess,
    Zygote,
    by_value,
    describe_exit,
    dumps,
    end_programs,
    environment_of,
)


def folder_of(tmp_path, environ: bytes, env_end: int, program: bool = True):
    """A process as `/proc` shows it."""
    (tmp_path / "environ").write_bytes(environ)
    fields = ["0"] * 50
    fields[0], fields[48] = "S", str(env_end)
    (tmp_path / "stat").write_text("7 (a (name) 9) " + " ".join(fields) + "\n")
    if program:
        (tmp_path / "exe").symlink_to(sys.executable)
    return tmp_path


def test_the_variables_of_a_program_that_is_just_starting_are_waited_for(tmp_path):
    folder = folder_of(tmp_path, b"", 0)
    threading.Timer(0.1, lambda: (folder / "environ").write_bytes(b"A=1\0")).start()
    assert environment_of(folder, 20.0) == b"A=1\0"


def test_variables_that_came_between_two_looks_are_read(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, b"", 5)
    look = os.readlink
    monkeypatch.setattr(
        os, "readlink", lambda path: ((folder / "environ").write_bytes(b"A=1\0"), look(path))[1]
    )
    assert environment_of(folder) == b"A=1\0"


def test_a_program_without_variables_is_not_waited_for(tmp_path):
    began = time.monotonic()
    assert environment_of(folder_of(tmp_path, b"", 4711), 60.0) == b""
    assert time.monotonic() - began < 30.0


def test_a_program_that_never_gets_variables_is_left_alone_in_the_end(tmp_path):
    assert environment_of(folder_of(tmp_path, b"", 0), 0.05) == b""


def test_who_is_dead_or_of_the_kernel_is_passed_over(tmp_path):
    with pytest.raises(OSError, match="exe"):
        environment_of(folder_of(tmp_path, b"", 0, program=False), 60.0)


def test_programs_are_found_as_soon_as_they_were_started():
    token = f"test-{os.urandom(6).hex()}"
    for _ in range(100):
        program = subprocess.Popen(["sleep", "100"], env={**os.environ, TOKEN: token}, start_new_session=True)
        end_programs(token.__eq__)
        assert program.wait(timeout=60) == -9


def test_what_a_module_holds_that_was_made_at_run_time_goes_by_value(monkeypatch):
    module = types.ModuleType("made_at_run_time")
    exec("class Mine:\n    name = 'mine'", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_at_run_time", module)
    data, plain = dumps(module.Mine())
    program = f"import pickle; print(pickle.loads({data!r}).name)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (told.stdout, plain) == ("mine\n", False)


@pytest.mark.parametrize("item", [time.sleep, zipimport.zipimporter, subprocess.run, pytest.fixture])
def test_what_every_interpreter_has_or_can_import_goes_by_name(item):
    with by_value([item]):
        assert len(cloudpickle.dumps(item)) < 100


def test_a_worker_whose_zygote_is_gone_counts_as_killed(monkeypatch):
    def gone(*_):
        raise WorkerDiedError("the zygote is gone")

    worker = WorkerProcess("shoal.vector.worker:main")
    worker.start()
    with monkeypatch.context() as patch:
        patch.setattr(Zygote, "ask", gone)
        worker.kill()
    worker.release()
    assert describe_exit(worker.exit_code) == "was killed by SIGKILL"


def test_what_forks_workers_says_nothing_where_its_parent_is_gone_before_it_is_ready():
    """Ctrl-C amid a start ended in its traceback."""
    program = (
        "import socket\nfrom shoal.core.processes import zygote_main\nours, theirs = socket.socketpair()\n"
        "ours.close()\nzygote_main(theirs.detach())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
