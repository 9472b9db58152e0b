"""`shoal doctor` on machines that lack this and that."""

import json
import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shoal.cli import doctor
from shoal.cli.main import main
from shoal.core import executors


def findings(capsys, *words, code=0):
    assert main(["doctor", "--json", *words]) == code
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def bare(monkeypatch):
    """No Ray, tmux, torch, GPU; 64 open files; 64 MiB of shared memory."""
    has = doctor._has
    monkeypatch.setattr(doctor, "_has", lambda module: module not in ("ray", "torch", "jax") and has(module))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    real = os.statvfs
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16000)
    monkeypatch.setattr(os, "statvfs", lambda path: small if path == "/dev/shm" else real(path))
    limit = resource.getrlimit
    few = lambda kind: (64, 64) if kind == resource.RLIMIT_NOFILE else limit(kind)  # noqa: E731
    monkeypatch.setattr(doctor.resource, "getrlimit", few)


def test_a_bare_machine_is_told_what_it_lacks_and_what_to_do(bare, capsys):
    found = findings(capsys, "--no-self-test")
    assert {name: found[name]["status"] for name in ("ray", "tmux", "gpu", "files", "shm", "folder")} == {
        "ray": "missing", "tmux": "missing", "gpu": "missing", "files": "warning", "shm": "warning", "folder": "ok",
    }  # fmt: skip
    assert found["files"]["found"].startswith("64 open files allowed (up to 64): enough for about 6 workers")
    assert found["shm"]["found"] == "/dev/shm has 64 MiB, 62 free"
    assert "--launcher local" in found["tmux"]["advice"]
    assert "shoal[parallel]" in found["ray"]["advice"]
    assert found["[parallel]"]["found"] == "without ray"


def test_a_warning_is_a_failure_only_where_that_was_asked_for(bare, capsys):
    assert main(["doctor", "--no-self-test"]) == 0
    assert "shoal works here" in capsys.readouterr().out
    assert main(["doctor", "--no-self-test", "--strict"]) == 1
    assert "wrong: " in capsys.readouterr().out


def test_the_limits_of_a_container_are_read(tmp_path, monkeypatch):
    assert doctor._cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor._cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor._cpu_quota(tmp_path) is None
    assert doctor._shared_memory(str(tmp_path / "none")).status == "warning"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert doctor._shared_memory(str(tmp_path)).found == f"{tmp_path} cannot be written"


def test_a_self_test_that_fails_is_told_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_try_vector", lambda: "nothing works")

    def raises():
        raise OSError("no processes")

    monkeypatch.setattr(doctor, "_try_rollout", raises)
    found = findings(capsys, code=1)
    assert found["vector"]["found"].startswith("nothing works")
    assert found["rollout"]["found"].startswith("OSError: no processes")


@pytest.mark.slow
def test_the_self_test_runs_with_64_open_files(tmp_path):
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); from shoal.cli.main import main; "
        "sys.exit(main(['doctor', '--json']))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, cwd=tmp_path
    )
    found = {one["name"]: one["status"] for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert (found["files"], found["vector"], found["rollout"]) == ("warning", "ok", "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_ray_cluster_that_does_not_answer_is_found(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(executors, "RAY_ANSWERS_SECONDS", 0.0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        finding = doctor._ray()
        held.listen()
        assert address in doctor._ray().found
    assert finding.status == "failed"
    assert f"nothing answers at {address}" in finding.found


@pytest.mark.parametrize(
    "raised", [OSError("libcudart.so: cannot open"), RuntimeError("built for another Python")]
)
def test_a_package_that_cannot_be_imported_is_a_finding_among_the_others(monkeypatch, capsys, raised):
    def raises():
        raise raised

    monkeypatch.setitem(doctor.LOOKS, "gpu", raises)
    found = findings(capsys, "--no-self-test", code=1)
    assert found["gpu"]["status"] == "failed"
    assert str(raised) in found["gpu"]["found"]
    assert {"ray", "tmux", "[train]"} <= found.keys()


def test_a_folder_with_the_name_of_a_package_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "vllm_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not doctor._has("vllm_of_nobody")
    assert doctor._has("numpy")
