"""One of two training processes is killed: the other ends with it, nothing is left, and the run goes on unharmed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from tests.train.agent.checkpoints import tensors_of
from tests.train.agent.processes.test_processes import SETTINGS, ended_early, launch, rows_of, same_run

from shoal.train.agent.run.checkpoint import list_checkpoints, newest_checkpoint

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]
ITERATIONS = 8
PATIENCE = 60  # seconds; without the launcher's care the other process would wait for two hours
STARTS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "accelerate": [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2",
        "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
    ],
}  # fmt: skip


def marked(mark):
    """The processes, by number, that inherited a mark in their environment, and the rank of each."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                variables = dict(
                    line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line
                )
                status = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if variables.get("SHOAL_TEST_MARK") == mark and status != "Z":
                command = (folder / "cmdline").read_text()
                found[int(folder.name)] = variables.get("RANK") if "shoal\0train" in command else None
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs of two processes that nobody disturbs, by how their weights are held."""
    runs = {}
    for sharding in ("none", "full"):
        folder = runs[sharding] = tmp_path_factory.mktemp("undisturbed") / "run"
        done = launch(folder, 2, f"trainer.iterations={ITERATIONS}", f"trainer.sharding={sharding}")
        assert done.returncode == 0, done.stderr
    return runs


@pytest.mark.parametrize(
    ("launcher", "sharding", "victim"),
    [("torchrun", "none", "1"), ("torchrun", "full", "1"), ("torchrun", "full", "0"), ("accelerate", "full", "1")],
)  # fmt: skip
def test_a_killed_process_ends_the_others_and_the_run_resumes_to_the_same_end(
    undisturbed, tmp_path, launcher, sharding, victim
):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    settings = [
        *SETTINGS,
        f"run_dir={folder}",
        f"trainer.iterations={ITERATIONS}",
        f"trainer.sharding={sharding}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_TEST_MARK": mark}
    env["PYTHONPATH"] = os.pathsep.join(p or "." for p in sys.path)
    start = [*STARTS[launcher], f"--log_dir={folder}.logs", "-m", "shoal", "train"]
    command = [sys.executable, *start, "--config-name", "demo", *settings]
    command += ["use_parallel_envs=true", "vector.backend=process", "vector.num_workers=1"]
    with (tmp_path / "stderr").open("w") as stderr:
        run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            until = time.monotonic() + 900  # in which two processes compile
            while not (folder / "checkpoints" / "step-000002").exists():
                assert run.poll() is None, (tmp_path / "stderr").read_text()
                assert time.monotonic() < until
                time.sleep(0.005)
            ranks = marked(mark)
            assert len(ranks) > 4  # the launcher, two that train, and their env workers
            os.kill(next(pid for pid, rank in ranks.items() if rank == victim), signal.SIGKILL)
            assert run.wait(timeout=PATIENCE) != 0
            until = time.monotonic() + PATIENCE
            while marked(mark) and time.monotonic() < until:
                time.sleep(0.05)  # env workers end with those who started them, a moment later
            assert marked(mark) == {}
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            run.wait()
    assert ended_early(folder)
    before = len(rows_of(folder)) - 1
    assert 2 <= before < ITERATIONS
    done = launch(
        folder, 2, f"trainer.iterations={ITERATIONS}", f"trainer.sharding={sharding}", "resume=true"
    )
    assert done.returncode == 0, done.stderr
    same_run(undisturbed[sharding], folder, 1e-6)


KILLING = """
import os, signal, sys
from shoal.core import files

commit = files._commit


def uncommitted(temporary, folder):
    if folder.name == "step-000002":
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(temporary, folder)


files._commit = uncommitted
from shoal.cli.main import main

sys.exit(main())
"""


def test_a_process_killed_amid_a_checkpoint_leaves_the_one_before(tmp_path, monkeypatch):
    folder, calm = tmp_path / "run", tmp_path / "calm"
    settings = ("trainer.iterations=3", "trainer.sharding=full")
    assert launch(calm, 2, *settings).returncode == 0
    (tmp_path / "killing.py").write_text(KILLING)
    monkeypatch.syspath_prepend(tmp_path)
    done = launch(folder, 2, *settings, module="killing")
    assert "SIGKILL" in done.stderr
    assert newest_checkpoint(folder / "checkpoints").name == "step-000001"
    assert list((folder / "checkpoints").glob(".step-000002.*"))
    done = launch(folder, 2, *settings, "resume=true")
    assert done.returncode == 0, done.stderr
    assert not list((folder / "checkpoints").glob(".*"))
    one, two = (tensors_of(list_checkpoints(path / "checkpoints")[-1]) for path in (calm, folder))
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
