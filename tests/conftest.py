"""What all tests share: one thread per test process, and properties judged by neither the clock nor luck.

Two test processes share two cores, and the engines promise bit-equality with one thread. A test that sets a limit
of about a second may fail on a machine that stands still for as long: it, and no other, has three tries, by
`pytest.mark.flaky(reruns=2)`.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # a command takes a thread a core, which would spin on a busy one

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a script's background jobs, and theirs, ignore Ctrl-C
settings.register_profile(
    "shoal", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shoal")


gc.disable()  # until all test files are there: looking for garbage among what stays is a fifth of their import


def pytest_collection_finish() -> None:
    """Leave what all test files brought along out of every later look for garbage, which takes 0.4 s with it."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command that a test runs in this process may set another number of threads; the next test has one again."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def prints(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call a command; what it prints on standard output, or on standard error if it ends with another code than 0."""
    from shoal.cli.main import main

    def call(*words: object, code: int = 0) -> str:
        assert main([*map(str, words)]) == code
        told = capsys.readouterr()
        return told.out if code == 0 else told.err

    return call


@pytest.fixture
def drawn() -> None:
    """For tests that look at curves: they are drawn."""


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are not drawn in this process, which takes a third of a small run, unless a test asks for them."""

    def write(_rows: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"")

    for module, name in (("train.agent.run.records", "write_curves"), ("train.ppo.run", "write_ppo_curves")):
        if f"shoal.{module}" in sys.modules and "drawn" not in request.fixturenames:
            monkeypatch.setattr(sys.modules[f"shoal.{module}"], name, write)


@pytest.fixture(scope="module")
def ray_finds_shoal() -> Iterator[None]:
    """Workers of Ray start from its own node processes and find shoal as on the user's cluster: installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p))
        yield
