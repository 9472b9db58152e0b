"""What tests of both trainings share."""

from pathlib import Path
from typing import Any

import pytest

from shoal.train.agent import records
from shoal.train.ppo import run


@pytest.fixture
def drawn() -> None:
    """For tests that look at curves: they are drawn."""


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are not drawn in this process, which takes a third of a small run, unless a test asks for them."""

    def write(_rows: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"")

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(records, "write_curves", write)
        monkeypatch.setattr(run, "write_ppo_curves", write)
