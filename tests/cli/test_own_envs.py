"""`shoal train` on an env of one's own: what its faults are told as, and how a run with it is ended."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

ENVS = """
import time
from shoal.envs import make

Lake = type(make("frozen_lake"))

class Raises(Lake):
    def step(self, action):
        raise KeyError("garden")

class SlowToClose(Lake):
    def close(self):
        if self._steps:
            print("closing", flush=True)
            time.sleep(60)
"""
SMALL = (
    "engine.threads=1 warmup.steps=0 es_manager.train.env_groups=2 es_manager.train.group_size=2 "
    "es_manager.val.env_groups=2 trainer.tensorboard=false run_dir=run"
).split()


@pytest.fixture
def started(tmp_path):
    (tmp_path / "mine.py").write_text(ENVS)
    processes = []

    def start(env, *settings):
        words = ["train", "--config-name", "demo", f"custom_envs.FrozenLakeEnv.env_type=mine:{env}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words, *SMALL, *settings],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_fault_of_ones_own_env_is_one_error_before_anything_is_loaded(started, tmp_path):
    process = started("Raises")
    said, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said == ""
    assert re.match(r"shoal: custom_envs.FrozenLakeEnv: (mine:)?Raises.step\(\) ", told)
    assert re.search(r"mine.py:\d+ in step", told)
    assert "trainer.check_envs=false" in told
    assert len(told.splitlines()) < 5
    assert not (tmp_path / "run").exists()


def test_a_second_interrupt_ends_a_run_at_once(started):
    process = started("SlowToClose", "trainer.check_envs=false", "vector.backend=serial")
    for line in process.stdout:
        if line.strip().startswith("1/"):
            process.send_signal(signal.SIGINT)
        if line.strip() == "closing":
            break
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - asked < 10
