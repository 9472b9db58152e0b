"""Doubles for skills: a launcher that trains nothing, and a config that trains for an instant."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.seeding import stream
from shoal.skills.graph.launchers import TmuxLauncher, server_of
from shoal.skills.graph.process import NotLearnedError, write_failure
from shoal.skills.learning.network import Network, Shape
from shoal.skills.learning.trainer import TrainingConfig
from shoal.skills.learning.training import Run, finish_training
from shoal.skills.spec import Skill, parse_skill
from shoal.skills.worlds.crafting import CraftingWorld

QUICK = TrainingConfig(
    total_timesteps=2048,
    num_envs=32,
    num_steps=16,
    layer_size=8,
    bank_worlds=64,
    evaluation_episodes=8,
    min_success=0.0,
    checkpoint_every=1,
    evaluate_every=1,
)


def some_net(*names: str | int, hidden: int = 8) -> Network:
    shape = Shape(CraftingWorld.obs_size, hidden, CraftingWorld.n_actions)
    return Network.initial(shape, stream(0, *names))


def skill(
    name: str, gain: str, uses: dict[str, int] | None = None, holds: dict[str, int] | None = None, amount: int = 1,
    **more: Any,
) -> Skill:  # fmt: skip
    """A skill that gains so much of a feature, uses others up, and holds more of them."""
    uses = uses or {}
    said = {"consumption": uses, "requirements": {**uses, **(holds or {})}, **more}
    return parse_skill({"name": name, "gain": {gain: amount}, "done": {"feature": gain}, **said})


def wait_for(condition: Callable[[], Any], seconds: float = 150) -> Any:
    """What `condition` gives once it is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return found


class ScriptedLauncher:
    """Runs `script(run_folder, attempt)` in a thread instead of a training; by default it finishes at once.

    The script may return the words for how it ended, or raise. `gate` holds trainings back until it is set.
    """

    name = "scripted"

    def __init__(self, script: Callable[[Path, int], str | None] | None = None) -> None:
        self.script = script or self.finish
        self.launched: list[tuple[str, int]] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.killed: list[int] = []
        self.ended: dict[int, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def finish(self, folder: Path, attempt: int) -> None:
        run = Run.open(folder)
        experts = {local: some_net(index).params() for local, index in run.local_to_global.items()}
        own = next(local for local, index in run.local_to_global.items() if index == run.expert)
        finish_training(folder, {own: experts[own]}, {own: 1000}, attempt=attempt, success=0.9)

    def launch(
        self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path
    ) -> dict[str, Any]:
        folder, attempt = Path(command[-3]), int(command[-1])
        name = Run.open(folder).spec["skill"]
        self.launched.append((name, attempt))
        with self._lock:
            self.running.add(name)
            self.most_running = max(self.most_running, len(self.running))
        threading.Thread(target=self._work, args=(folder, attempt, name), daemon=True).start()
        return {"attempt": attempt}

    def _work(self, folder: Path, attempt: int, name: str) -> None:
        self.gate.wait()
        words = "exit status 0"
        try:
            words = self.script(folder, attempt) or words
        except Exception as error:
            write_failure(
                folder, attempt, error if isinstance(error, NotLearnedError | OSError) else str(error)
            )
            words = "exit status 1"
        with self._lock:
            self.running.discard(name)
        self.ended[attempt] = words

    def poll(self, handle: dict[str, Any]) -> str | None:
        return self.ended.get(handle["attempt"])

    def kill(self, handle: dict[str, Any]) -> None:
        self.killed.append(handle["attempt"])
        self.gate.set()


@pytest.fixture
def scripted() -> type[ScriptedLauncher]:
    return ScriptedLauncher


@pytest.fixture
def quick() -> TrainingConfig:
    return QUICK


@pytest.fixture
def net() -> Callable[..., Network]:
    return some_net


@pytest.fixture
def rng() -> np.random.Generator:
    return stream(0, "test")


@pytest.fixture
def tmux() -> Iterator[Callable[[Path], TmuxLauncher]]:
    """The launcher in tmux of a folder; its server ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = []

    def of(folder: Path) -> TmuxLauncher:
        made.append(TmuxLauncher(server_of(folder)))
        return made[-1]

    yield of
    for launcher in made:
        launcher._tmux("kill-server", check=False)


STANDS_STILL = """
import os, pathlib, signal
replace, stood = os.replace, pathlib.Path(__file__).with_name("stood")

def stands_still(source, target):
    replace(source, target)
    policies = pathlib.Path(target).parent
    if policies.name.endswith("_policies") and len([*policies.glob("checkpoint-*")]) > 1 and not stood.exists():
        stood.touch()
        os.kill(os.getpid(), signal.SIGSTOP)

os.replace = stands_still
"""


@pytest.fixture
def stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, the first training that has a second checkpoint stops itself there, by SIGSTOP."""

    def arm() -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(STANDS_STILL)
        paths = [str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))

    return arm


@pytest.fixture
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fail if processes are still running, and end them."""
    yield

    def there() -> list[int]:
        entries = Path("/proc").glob("[0-9]*/cmdline")
        pids = [int(entry.parent.name) for entry in entries if _mentions(entry, str(tmp_path))]
        return [pid for pid in pids if pid != os.getpid()]

    try:
        wait_for(lambda: not there(), 60)  # what was killed takes a moment to be gone
    finally:
        for pid in there():
            os.kill(pid, signal.SIGKILL)


def _mentions(entry: Path, text: str) -> bool:
    try:
        return text in entry.read_text(errors="replace")
    except OSError:
        return False
