"""The progress of long work: a bar with its ETA on a terminal, lines and a heartbeat elsewhere."""

import contextlib
import datetime
import io
import os
import pty
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
    assert re.search(r"… training: \d+(\.\d)? s so far\n", screen.getvalue())
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
    assert re.search(r"… warm-up, 3 of 20 steps: \d+(\.\d)? s so far\n", told)
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
@pytest.mark.parametrize("pace", [1.0, 45.0, 7200.0])
def test_a_terminal_gets_a_bar_with_an_eta_at_any_pace(monkeypatch, columns, pace):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = [100.0]
    monkeypatch.setattr(grammar.time, "monotonic", lambda: clock[0])
    screen = Screen(True)
    with grammar.Progress("training", screen) as progress:
        assert progress.on_terminal
        progress.doing = lambda: "warm-up, 3 of 20 steps"
        progress._bar.refresh()
        progress.at(0.0, "0/4")
        clock[0] += pace
        progress.at(0.25, "1/4")
        progress._bar.refresh()
        assert f"ETA {datetime.timedelta(seconds=3 * pace)}" in plain(screen)  # three quarters are left
        clock[0] += pace
        progress.at(0.5, "2/4  success 0.50  reward 0.19  valid 0.91", "a line that is not shown")
        progress._bar.refresh()
        last = plain(screen).rpartition("ETA")[2]
    assert re.fullmatch(r" [-0-9:]{7}\s+2/4  success 0.50  reward 0.19  valid\s+0.91\s*", last)
    assert "warm-up, 3 of 20 steps" in screen.getvalue()
    assert "a line that is not shown" not in screen.getvalue()


def plain(screen):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


FAILING = """
defaults: [base, _self_]
custom_envs:
  FrozenLakeEnv: null
  Agent: {env_type: program, env_config: {function: "agent:play", folder: "."}}
es_manager:
  train: {env_groups: 2, group_size: 2, env_configs: {tags: [Agent]}}
  val: {env_groups: 2, env_configs: {tags: [Agent]}}
agent_proxy: {use_parallel_rollout: true, parallel_n_jobs: 2, parallel: {env_retries: 0}}
warmup: {steps: 0}
trainer: {tensorboard: false, iterations: 1}
"""


def terminal(read):
    """The lines that a terminal shows at the end, so wide that none is broken."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", read):
        if piece == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif piece.startswith("\x1b") and piece.endswith("A"):
            at -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[at] = ""
        elif piece[0] not in "\r\x1b":
            lines[at] += piece
    return lines


def test_on_a_terminal_a_warning_stays_whole_and_no_bar_does(tmp_path):
    (tmp_path / "failing.yaml").write_text(FAILING)
    why = f"the data set is missing {'x' * 150} after all"
    (tmp_path / "agent.py").write_text(f"def play(base_url):\n    raise RuntimeError({why!r})\n")
    ours, theirs = pty.openpty()
    words = ["train", "--config-dir", ".", "--config-name", "failing"]
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "1000"},
    ) as process:  # fmt: skip
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):  # how Linux tells that nobody has the terminal any more
            while part := os.read(ours, 4096):
                read += part
        os.close(ours)
    lines = terminal(read.decode())
    assert process.returncode == 1
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1  # of equal ones the first
    assert why in warnings[0]
    assert "ETA" in read.decode()
    assert not [line for line in lines if "ETA" in line or "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line]
    last = [line for line in lines if line][-1]
    assert last.startswith("shoal: all 2 episodes of the evaluation failed")
