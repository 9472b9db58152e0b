from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.skills.graph.launchers import job_environment

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_skills.py"


@pytest.mark.slow
def test_the_example_does_what_its_first_sentence_says() -> None:
    env = {**os.environ, **job_environment(2)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Make Wood Pickaxe x1" in done.stdout
