"""How many files, functions and threads carry one turn: from one action to the next, in all processes together."""

import json
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.rollout.doubles import CounterConfig, CounterEnv, HashEngine, config

from shoal import ParallelRolloutManager

OWN = ("rollout/", "samplers/")
"""What carries a turn; the env itself and what is below are not counted."""


class Noted:
    """The functions of shoal that are entered while it is on, with their threads."""

    def __init__(self):
        self.on, self.seen = False, []

    def __call__(self, frame, event, argument):
        file = frame.f_code.co_filename
        if self.on and event == "call" and "/src/shoal/" in file:
            where = file.partition("/src/shoal/")[2], frame.f_code.co_qualname
            self.seen.append((*where, f"{os.getpid()} {threading.current_thread().name}"))

    def start(self):
        threading.setprofile(self)
        sys.setprofile(self)


NOTED = Noted()
if multiprocessing.parent_process() is not None:  # this is the process of a host
    NOTED.start()


@dataclass(frozen=True)
class NotingConfig(CounterConfig):
    """Settings of `NotingEnv`."""

    folder: str = ""


class NotingEnv(CounterEnv):
    """Writes down what its process enters between its second action and its third one."""

    Config = NotingConfig

    def _advance(self, action):
        found = super()._advance(action)
        NOTED.on = self._steps == 1
        if self._steps == 2:
            Path(self.config.folder, "host.json").write_text(json.dumps(NOTED.seen))
        return found


class Server(HashEngine):
    """Answers each request by itself, as servers do."""

    async def sample(self, request):
        self.before([request])
        return self._answer(request)


@pytest.mark.parametrize("engine", [Server, HashEngine])
def test_a_turn_on_worker_processes_passes_few_files_functions_and_threads(engine, tmp_path):
    noted = Noted()

    def before(requests):
        noted.on = requests[0].key.path[3] == 1
        sys.setprofile(noted)

    settings = config(groups=1, members=1, n_jobs=1, folder=str(tmp_path))
    settings["custom_envs"]["Counter"]["env_type"] = f"{__name__}:NotingEnv"

    async def profile(how):  # in the event loop of the process, which lives on
        sys.setprofile(how)

    threading.setprofile(noted)
    try:
        with ParallelRolloutManager(settings, engine(before), backend="process") as manager:
            manager.inference.loop.run(profile(noted))
            (played,) = manager.collect(4)
            manager.inference.loop.run(profile(None))
    finally:
        threading.setprofile(None)
    assert played.status == "ok"
    seen = [*noted.seen, *map(tuple, json.loads((tmp_path / "host.json").read_text()))]
    assert len({thread.split()[0] for *_, thread in seen}) == 2  # the driver's process and the host's
    assert len({file for file, _, _ in seen if file.startswith("rollout/")}) <= 6
    assert len({(file, name) for file, name, _ in seen if file.startswith(OWN)}) <= 60 + 10 * (
        engine is HashEngine
    )
    threads = {thread for *_, thread in seen}
    assert len(threads) <= 3 + (engine is HashEngine)  # what works in batches has a thread of its own
