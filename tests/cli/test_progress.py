"""The progress of long work: a bar with its ETA on a terminal, lines and a heartbeat elsewhere."""

import io
import re
import subprocess
import sys
import time

import pytest

from shoal.cli import grammar


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def test_silence_off_a_terminal_is_broken_by_a_heartbeat_with_the_time_that_is_left(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(grammar.time, "monotonic", lambda: clock[0])
    screen = Screen(False)
    progress = grammar.Progress("training", screen, heartbeat=30.0)
    progress.at(0.0)
    assert progress.left() == ""
    clock[0] += 60.0
    progress.at(0.25, line="1/4")
    assert progress.left() == "about 3 min 0 s left"  # 60 s for a quarter: three quarters are left
    clock[0] += 20.0
    progress.may_end_early = True
    assert progress.left() == "at most 4 min 0 s left"
    progress.at(1.0)
    assert progress.left() == ""
    assert screen.getvalue() == "1/4\n"


def test_the_heartbeat_comes_only_when_nothing_was_said():
    screen = Screen(False)
    with grammar.Progress("training", screen, heartbeat=0.05):
        deadline = time.monotonic() + 60
        while "… training: " not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"… training: \d+ s so far\n", screen.getvalue())
    quiet = Screen(False)
    with grammar.Progress("training", quiet, heartbeat=1000.0) as progress:
        progress.at(0.5, line="half")
    assert quiet.getvalue() == "half\n"


def test_before_the_first_result_what_is_done_is_told_sooner(monkeypatch):
    monkeypatch.setattr(grammar, "FIRST_HEARTBEAT", 0.05)
    screen = Screen(False)
    with grammar.Progress("loading", screen, heartbeat=1000.0) as progress:
        progress.doing = lambda: "warm-up, 3 of 20 steps"
        deadline = time.monotonic() + 60
        while "… warm-up" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        progress.at(0.5, line="half")
        told = screen.getvalue()
        time.sleep(0.2)
    assert re.search(r"… warm-up, 3 of 20 steps: \d+ s so far\n", told)
    assert screen.getvalue() == told


def test_bars_of_other_libraries_stay_out_of_files():
    script = """
from shoal.cli.main import main
main(["model", "list"])
from transformers.modeling_gguf_pytorch_utils import tqdm as unpacks
from huggingface_hub.utils import tqdm as downloads
print(list(unpacks(range(2), desc="unpacking")), list(downloads(range(2), desc="downloading")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[0, 1] [0, 1]"
    assert done.stderr == ""


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_gets_a_bar_with_an_eta(monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(True)
    with grammar.Progress("training", screen) as progress:
        assert progress.on_terminal
        progress.doing = lambda: "warm-up, 3 of 20 steps"
        progress._bar.refresh()
        progress.at(0.5, "2/4  success 0.50  reward 0.19  valid 0.91", "a line that is not shown")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).rpartition("ETA")[2]
    assert re.fullmatch(r" [-0-9:]{7}\s+2/4  success 0.50  reward 0.19  valid\s+0.91\s*", last)
    assert "warm-up, 3 of 20 steps" in screen.getvalue()
    assert "a line that is not shown" not in screen.getvalue()
