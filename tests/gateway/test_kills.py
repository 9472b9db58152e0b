"""The gateway and programs are killed at random moments: what was answered is kept, and all goes on equal.

`SHOAL_KILLS=100` kills more often than the tests do by themselves.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from http.client import HTTPException

import psutil
import pytest

from shoal import ParallelRolloutManager
from shoal.cli.main import main
from shoal.gateway.programs import sessions_of
from shoal.samplers.tiny import TinyEngine, TinyShape
from tests.gateway.test_command import ask, recorded
from tests.gateway.test_programs import PROGRAM, config

KILLS = int(os.environ.get("SHOAL_KILLS", "10"))
START = multiprocessing.get_context("spawn")


def killing(seconds, stop, killed):
    """Kill a program now and then, until told to stop."""
    rng = random.Random(0)
    while not stop.wait(rng.uniform(0.0, seconds)):
        with contextlib.suppress(psutil.Error, IndexError):
            children = psutil.Process().children(recursive=True)
            programs = [child for child in children if str(PROGRAM) in " ".join(child.cmdline())]
            rng.choice(programs).kill()
            killed.append(0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_episodes_of_programs_that_are_killed_at_random_moments_are_as_if_they_had_not_been(tmp_path):
    settings = config(tmp_path, "es_manager.train.env_groups=4", "agent_proxy.parallel.env_retries=1000")
    stop, killed = threading.Event(), []
    killer = threading.Thread(target=killing, args=(0.5, stop, killed))
    engine = TinyEngine([], TinyShape(32, 1, 2, 1000), seed=1)
    with ParallelRolloutManager(settings, engine, 2, sessions=sessions_of) as manager:
        right = manager.collect(0)
    killer.start()
    try:
        while len(killed) < KILLS:
            with ParallelRolloutManager(settings, engine, 2, sessions=sessions_of) as manager:
                assert manager.collect(0) == right
    finally:
        stop.set()
        killer.join()


def started(function, *given):
    """A process that calls a function."""
    process = START.Process(target=function, args=given)
    process.start()
    return process


def serve(out):
    """`shoal gateway` in this process; its address goes into a file."""
    with (out / "address").open("w") as file, contextlib.redirect_stdout(file):
        main(["gateway", "tiny", "--out", str(out)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_was_answered_is_on_disk_whenever_the_gateway_is_killed(tmp_path):
    asked = 0
    for run in range(KILLS):
        answered, out = [], tmp_path / str(run)

        def agent(url, number, answered=answered):
            for turn in itertools.count():
                try:
                    answer = ask(url, f"{number} {turn}")
                except (OSError, ValueError, HTTPException):
                    return
                answered.append((answer["id"], answer["choices"][0]["message"]["content"]))

        out.mkdir()
        process = started(serve, out)
        while not (url := (out / "address").read_text().strip() if (out / "address").exists() else ""):
            time.sleep(0.01)
        agents = [threading.Thread(target=agent, args=(url, number)) for number in range(4)]
        for one in agents:
            one.start()
        rng = random.Random(run)
        while len(answered) < rng.randint(1, 30):
            time.sleep(rng.uniform(0.0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        for one in agents:
            one.join()
        kept = [(f"chatcmpl-a-{call.number}", call.answer) for call in recorded(out)]
        assert len(set(kept)) == len(kept)
        assert set(answered) <= set(kept)
        asked += len(answered)
    assert asked >= KILLS
