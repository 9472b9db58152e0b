import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_gui_trajectories.py"


@pytest.mark.slow
def test_the_example_runs_and_is_short(capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 60
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "Action: finished()<|im_end|>" in out or "Action: click" in out
    assert "look at" in out
