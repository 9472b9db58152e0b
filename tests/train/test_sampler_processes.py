"""Several training processes, each with a sampler of its own: what they learn is what one process learns."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import torch
import transformers
from tests.train.test_processes import alone, launch, rows_of, same_run  # noqa: F401
from tests.train.tiny_model import write_tiny_model

pytest.importorskip("accelerate")
PYTHON = os.environ.get("SHOAL_TEST_VLLM")
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_each_process_samples_with_replicas_of_its_own(alone, tmp_path, sharding):  # noqa: F811
    """Two clusters, since none is named; a tiny engine says the same bits wherever it runs."""
    pytest.importorskip("ray")
    settings = ["engine.name=ray", "engine.replicas.engine=tiny", f"trainer.sharding={sharding}"]
    done = launch(tmp_path / "run", 2, "trainer.iterations=3", *settings)
    assert done.returncode == 0, done.stderr
    assert "ray engine" in done.stdout
    same_run(alone, tmp_path / "run", 1e-5)


@pytest.mark.parametrize("n_cpus", [1, 2])
def test_one_cluster_takes_the_replicas_of_all_processes_or_refuses_them(alone, tmp_path, monkeypatch, n_cpus):  # noqa: F811
    pytest.importorskip("ray")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    port, short = free_port(), tempfile.mkdtemp(prefix="ray")  # sockets lie there, whose names must be short
    start += [f"--num-cpus={n_cpus}", f"--port={port}", f"--temp-dir={short}"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        settings = ["engine.name=ray", "engine.replicas.engine=tiny", "trainer.iterations=3"]
        done = launch(tmp_path / "run", 2, *settings)
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(short, ignore_errors=True)
    if n_cpus == 1:
        assert done.returncode != 0
        assert "make 2 replicas, which need 2 of 'CPU'; their Ray cluster has 1" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        same_run(alone, tmp_path / "run", 1e-5)


def free_port():
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def wait_for(port):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("Ray did not start")
