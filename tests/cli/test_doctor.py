"""`shoal doctor` on machines that lack this and that."""

import json
import os
import socket
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import shoal
from shoal.cli.main import main
from shoal.testing import examine, installation

ROOT = Path(__file__).parents[2]


def findings(capsys, *words, code=0):
    assert main(["doctor", "--json", *words]) == code
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def bare(monkeypatch):
    """No Ray, torch, GPU; 64 MiB of shared memory."""
    has = installation._has
    monkeypatch.setattr(
        installation, "_has", lambda module: module not in ("ray", "torch", "jax") and has(module)
    )
    real = os.statvfs
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16000)
    monkeypatch.setattr(os, "statvfs", lambda path: small if path == "/dev/shm" else real(path))


def test_a_bare_machine_is_told_what_it_lacks_and_what_to_do(bare, capsys, prints):
    found = findings(capsys)
    assert {name: found[name]["status"] for name in ("system", "cores", "ray", "gpu", "shm")} == {
        "system": "ok", "cores": "ok", "ray": "optional", "gpu": "optional", "shm": "warning",
    }  # fmt: skip
    assert found["shm"]["found"] == "/dev/shm has 64 MiB, 62 free"
    assert 'pip install ".[parallel]"' in found["ray"]["advice"]
    assert found["[parallel]"]["found"] == "without ray"
    assert f"shoal {shoal.__version__}" in found["system"]["found"]
    assert "shoal works here" in prints("doctor")


def test_every_extra_has_a_line_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(installation, "_has", lambda module: False)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = findings(capsys)
    advice = {name: one["advice"] for name, one in found.items() if name.startswith("[")}
    assert advice == {f"[{extra}]": f'pip install ".[{extra}]"' for extra in extras if extra != "all"}


def pretend(folder, monkeypatch, package, version):
    """Another version of a package, as far as what pip has written down of it goes."""
    about = folder / f"{package}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("peft", "0.19.9", "peft>=0.20"),  # transformers says how new it must be
        ("accelerate", "0.1", "accelerate is 0.1, and shoal needs accelerate>=1.0"),
    ],
)
def test_packages_that_do_not_fit_are_found_with_the_version_that_does(
    package, version, said, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("peft")
    pretend(tmp_path, monkeypatch, package, version)
    found = findings(capsys, code=1)["[llm]"]
    assert found["status"] == "failed"
    assert said in found["found"]
    assert f" {version}" in found["found"]
    assert found["advice"] == 'pip install ".[llm]"'


def ray_finding():
    return next(finding for finding in examine() if finding.name == "ray")


def test_a_ray_cluster_that_does_not_answer_is_found(monkeypatch):
    pytest.importorskip("ray")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        finding = ray_finding()
        held.listen()
        assert address in ray_finding().found
    assert finding.status == "failed"
    assert f"'{address}', but nothing answers there" in finding.found


def test_a_package_that_cannot_be_imported_is_a_finding_among_the_others(monkeypatch, capsys):
    def raises():
        raise OSError("libcudart.so: cannot open")

    monkeypatch.setitem(installation.LOOKS, "gpu", raises)
    found = findings(capsys, code=1)
    assert found["gpu"]["status"] == "failed"
    assert "libcudart.so: cannot open" in found["gpu"]["found"]
    assert {"ray", "[train]"} <= found.keys()


def test_states_are_coloured_on_a_terminal_alone(monkeypatch, prints):
    monkeypatch.setattr(installation, "LOOKS", {"cores": installation.LOOKS["cores"]})
    monkeypatch.setattr(installation, "_has", lambda module: False)
    plain = prints("doctor")
    assert "\noptional [train]" in plain
    assert "missing" not in plain
    assert "\x1b" not in plain
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[32mok      \x1b[0m cores" in prints("doctor")
    monkeypatch.setenv("NO_COLOR", "1")
    assert prints("doctor") == plain
