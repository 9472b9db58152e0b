import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from shoal.cli.envs import read_key
from shoal.cli.main import main
from shoal.envs import names


def run(capsys, *arguments):
    code = main(["envs", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def type_lines(monkeypatch, *lines):
    answers = iter(lines)

    def answer(prompt=""):
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)


def test_list_names_every_env(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in names())
    assert "shoal/Sokoban-v0" in out


def test_show_tells_settings_rules_and_a_first_observation(capsys):
    code, out, _ = run(capsys, "show", "frozen_lake", "desc=4x4")
    assert code == 0
    assert "is_slippery = True" in out
    assert "Whether a move can go to the left or right" in out
    assert "  P___\n  _O_O\n  ___O\n  O__G" in out
    assert "Left, Down, Right, Up" in out


OWN = """
import gymnasium
import numpy as np

class Door(gymnasium.Env):
    '''Opens by the right key.

    # Keys

    A page of them.

    # Doors

    Another page.
    '''

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, keys: int = 3, *, color, **more):
        self.color = color

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"action_mask": [1, 0, 1]}
"""


def test_show_tells_settings_and_allowed_actions_of_ones_own_env(tmp_path, monkeypatch, capsys):
    (tmp_path / "doors.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "show", "doors:Door", "color=red")
    sys.modules.pop("doors", None)
    assert (code, err) == (0, "")
    assert out.startswith("doors:Door: Opens by the right key.\n\n(its docstring has 2 more sections: ")
    assert "  keys = 3   int\n  color = (needed)\n" in out
    assert "Actions allowed now (its info has an action_mask): 0, 2" in out
    assert "wrapped as" not in out


def test_show_says_whether_agents_can_see_an_env(tmp_path, monkeypatch, capsys):
    (tmp_path / "sizes.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Large(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (30, 30), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros((30, 30), np.float32), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "show", "sizes:Large")
    sys.modules.pop("sizes", None)
    assert (code, err) == (0, "")
    assert "Agents cannot see it: observations of sizes:Large have 900 numbers" in out
    assert "Agents see it as text" in run(capsys, "show", "CartPole-v1")[1]


@pytest.mark.parametrize("dataset", ["leg_counting", "gcd"])
def test_check_accepts_reasoning_gym_as_it_is(capsys, dataset):
    pytest.importorskip("reasoning_gym")
    code, out, _ = run(capsys, "check", "reasoning_gym", f"dataset={dataset}", "--episodes", "4")
    assert code == 0, out


def test_play_takes_words_prefixes_and_refuses_nonsense(capsys, monkeypatch):
    type_lines(monkeypatch, "Down", "d", "jump", "r", "right", "Down", "Right")
    code, out, _ = run(capsys, "play", "frozen_lake", "desc=4x4", "is_slippery=false")
    assert code == 0
    assert "'jump' is no action here: Left, Down, Right, Up" in out
    assert "solved after 7 steps, return 1" in out


def test_play_takes_calls_of_tools_as_json_and_shows_what_they_said(capsys, monkeypatch):
    note = '[{"name": "note", "arguments": {}}]'
    type_lines(monkeypatch, note, "open it", '[{"name": "drill", "arguments": {}}]')
    code, out, _ = run(capsys, "play", "tests.rollout.tools.vault:Vault")
    assert code == 0
    assert '{"name": "note", "description": "Read the note.", "parameters": ' in out
    assert re.search(r"^the code is \d$", out, re.MULTILINE)
    assert "Error: an action must call a tool; there are: note, keypad" in out
    assert "Error: there is no tool 'drill'" in out


def test_play_hints_lead_to_the_solution(capsys, monkeypatch):
    from shoal.envs.sokoban import SokobanEnv

    env = SokobanEnv()
    env.reset(seed=3)
    words = [env.projection.words()[action - 1] for action in env.solution().actions]
    type_lines(monkeypatch, *(line for word in words for line in ("h", word)))
    _, out, _ = run(capsys, "play", "sokoban", "--seed", "3")
    hints = [line.removeprefix("hint: ") for line in out.split("\n") if line.startswith("hint: ")]
    assert hints == words
    assert f"solved after {len(words)} steps" in out
    assert "▣" in out  # drawn, not spelled


def test_play_ends_politely_when_input_ends(capsys, monkeypatch):
    type_lines(monkeypatch, "Up")
    code, out, _ = run(capsys, "play", "sokoban")
    assert code == 0
    assert "left after 1 steps" in out


def test_check_accepts_good_envs_and_names_the_broken_promise(capsys, tmp_path, monkeypatch):
    assert run(capsys, "check", "shoal.envs.bandit:BanditEnv")[0] == 0
    (tmp_path / "my_broken_env.py").write_text(
        "from shoal.envs.bandit import BanditEnv\n"
        "class Broken(BanditEnv):\n"
        "    def available_actions(self):\n"
        "        return ['one', 'two']\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "check", "my_broken_env:Broken")
    assert code == 1
    assert "broken  Broken.available_actions() offers" in out
    code, out, _ = run(capsys, "check", "gymnasium.envs.classic_control:CartPoleEnv")
    assert code == 0
    assert "skipped check_text_env" in out
    assert re.search(r"ok      32 episodes of random actions, \d+ steps", out)


def test_arrow_keys_play_in_a_terminal():
    """A real pseudo-terminal: down, down, right, right, down, right crosses the 4x4 lake."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shoal", "envs", "play", "frozen_lake", "desc=4x4", "is_slippery=false"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    keys = [b"\x1b[B", b"s", b"\x1b[C", b"D", b"x", b"\x1b[B", b"\x1b[C"]
    deadline = time.monotonic() + 100
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.3)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # the other end is closed: the game is over
                    break
                if not chunk:
                    break
                shown += chunk
            elif keys and b"Each turn" in shown:
                os.write(ours, keys.pop(0))
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert b"solved after 6 steps" in shown


def test_keys_that_were_typed_ahead_come_one_by_one(monkeypatch):
    typed = ["s", "\x1b[B", "\x1bOC", "é", "d", "\x1b[1;5C", "\x1b"]
    ours, theirs = pty.openpty()
    with open(theirs) as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, "".join(typed).encode())
        shown = b""
        while shown.count(b"^[") < 4:  # they are there when the terminal has shown them
            shown += screen.read(100)
        assert [read_key() for _ in typed] == typed


FAULTY = """
import gymnasium, numpy

class Whole(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        return numpy.zeros(2, numpy.float32), 0.0, True, False, {}

class NoReset(Whole):
    def reset(self, *, seed=None, options=None):
        raise KeyError("level 3")

class LateStep(Whole):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 40:
            raise RuntimeError("worn out")
        return numpy.zeros(2, numpy.float32), 0.0, False, False, {}

class NoReward(Whole):
    def step(self, action):
        return numpy.zeros(2, numpy.float32), float("inf"), True, False, {}

class NoEnd(Whole):
    def close(self):
        raise RuntimeError("still open")
"""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("NoReset", "level 3"),
        ("LateStep", "worn out"),
        ("NoReward", "a reward must be a finite number, got inf"),
        ("NoEnd", "still open"),
    ],
)
def test_what_an_env_raises_is_a_broken_promise_and_no_traceback(capsys, tmp_path, monkeypatch, kind, why):
    (tmp_path / "faulty_envs.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "check", f"faulty_envs:{kind}")
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("broken") and why in line]
    code, _, err = run(capsys, "show", f"faulty_envs:{kind}")
    assert (code, why in err) == ((1, True) if kind in ("NoReset", "NoEnd") else (0, False))
