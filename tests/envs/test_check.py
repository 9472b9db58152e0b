"""An env with a fault is told in one message: the class, its method, the file and the line."""

import sys

import pytest

from shoal.cli.main import main
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.check import quick_check

FAULTY = '''
import os
import random
import time

from shoal.envs.actions import Projection
from shoal.envs.text import Outcome, TextEnv


class Well(TextEnv):
    """A bucket goes up and down; water is at one of six depths."""

    instructions = "Bring the bucket to the water."
    projection = Projection(lookup={"up": 1, "down": 2})
    max_steps = 6

    def _start(self, rng):
        self.water, self.bucket = int(rng.integers(6)), 3

    def _advance(self, action):
        self.bucket += {1: -1, 2: 1}.get(action, 0)
        found = self.bucket == self.water
        return Outcome(float(found), found, found)

    def observe(self):
        return f"bucket at {self.bucket}, water at {self.water}"


class Raises(Well):
    def _advance(self, action):
        raise RuntimeError("the rope tore")


class RaisesSeldom(Well):
    def _advance(self, action):
        if self.water == 5 and self.bucket == 4:
            return {}["fish"]
        return super()._advance(action)


class Number(Well):
    def observe(self):
        return self.bucket


class Triple(Well):
    def _advance(self, action):
        return 0.0, False, False


class Unseeded(Well):
    def _start(self, rng):
        super()._start(rng)
        self.water = random.choice([0, 1, 4, 5])


class Remembers(Well):
    wells = 0

    def _start(self, rng):
        super()._start(rng)
        self.wells += 1
        self.bucket = self.wells


class Sleeps(Well):
    def _advance(self, action):
        if self.water == 1:
            time.sleep(1000)
        return super()._advance(action)


class Exits(Well):
    def _advance(self, action):
        if self.water == 1:
            os._exit(3)
        return super()._advance(action)


class Leaves(Well):
    def _start(self, rng):
        raise SystemExit(4)


class Crashes(Well):
    def _advance(self, action):
        import ctypes

        ctypes.string_at(0)


class NoConstructor(Well):
    def __init__(self):
        super().__init__()
        self.pump = open("/no/such/pump")

'''

MESSAGES = {
    "RaisesSeldom": ("RaisesSeldom._advance() raised KeyError: 'fish'", 'return {}["fish"]'),
    "Number": ("Number.observe() must return a string, got int (wells.py:",),
    "Triple": (
        "Triple._advance() must return an Outcome, got a tuple of 3 (wells.py:",
        "in step 1 of seed 0",
    ),
    "Unseeded": (
        "Unseeded: the global state of random or numpy.random was changed; draw all that is random from the rng",
        "(wells.py:",
    ),
    "Remembers": (
        "the episode before changed the episode after reset()",
        "observation at reset is 'bucket at 1, water at",
        "set all that changes in _start()",
    ),
    "Sleeps": ("Sleeps._advance() did not return within 2 s", "_advance: time.sleep(1000)"),
    "Exits": ("Exits ended its process, which exited with code 3, in step 1 of seed",),
    "Leaves": ("Leaves._start() raised SystemExit: 4, in the reset of seed 0", "_start: raise SystemExit(4)"),
    "Crashes": (
        "Crashes._advance() ended its process, which was killed by SIGSEGV",
        "_advance: ctypes.string_at(0)",
    ),
}


@pytest.fixture
def wells(tmp_path, monkeypatch):
    (tmp_path / "wells.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("wells", None)


@pytest.mark.parametrize("kind", MESSAGES)
def test_each_fault_is_one_message_with_class_method_file_and_line(wells, capsys, kind):
    seconds = 2 if kind == "Sleeps" else 60
    code = main(["envs", "check", f"wells:{kind}", f"--step-timeout={seconds}"])
    out = capsys.readouterr().out
    assert code == 1
    assert out.startswith("broken  ")
    assert len(out.splitlines()) <= 10
    for part in MESSAGES[kind]:
        assert part in out


def test_an_env_that_cannot_be_made_says_in_which_line(wells, capsys):
    assert main(["envs", "check", "wells:NoConstructor"]) == 1
    said = capsys.readouterr().err
    assert "wells:NoConstructor.__init__() raised FileNotFoundError" in said
    assert 'in __init__: self.pump = open("/no/such/pump")' in said


def test_an_env_without_a_fault_is_played_by_32_seeds(wells, capsys):
    assert main(["envs", "check", "wells:Well"]) == 0
    out = capsys.readouterr().out
    assert "32 episodes of at most 6 steps" in out
    assert "ok      gymnasium's check_env" in out


def test_the_quick_check_raises_the_same_message(wells):
    with pytest.raises(EnvError, match=r"Raises\._advance\(\) raised .*\n.*wells\.py:\d+ in _advance"):
        quick_check("wells:Raises", seeds=16)
    quick_check("wells:Well")


def test_the_quick_check_of_an_env_that_cannot_be_made_with_its_settings_names_the_setting(wells):
    with pytest.raises(ConfigError, match="no setting 'depth'"):
        quick_check("wells:Well", {"depth": 3})
    with pytest.raises(ConfigError, match="max_steps must be a whole number of at least 1, got 0"):
        quick_check("wells:Well", {"max_steps": 0})


def test_show_tells_the_limit_that_the_class_states(wells, capsys):
    assert main(["envs", "show", "wells:Well"]) == 0
    assert "max_steps = 6 " in capsys.readouterr().out


def test_a_class_that_is_refused_and_a_module_that_breaks_are_told_with_their_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_env.py").write_text(
        "from shoal.envs.text import TextEnv\nclass Half(TextEnv):\n    max_steps = 3\n"
    )
    (tmp_path / "broken_module.py").write_text("depth = 3\nwater = dept + 1\n")
    assert main(["envs", "check", "half_env:Half"]) == 2
    assert "Half (half_env.py:2) needs a method _start(self, rng)" in capsys.readouterr().err
    assert main(["envs", "check", "broken_module:Env"]) == 2
    said = capsys.readouterr().err
    assert "importing 'broken_module' failed with NameError: name 'dept' is not defined" in said
    assert "broken_module.py:2 in <module>: water = dept + 1" in said


MASKED = '''
import gymnasium
import numpy as np


class Masked(gymnasium.Env):
    """Counts; of three actions only the one whose turn it is may be taken."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def action_masks(self):
        return np.arange(3) == self.count % 3

    def seen(self):
        return np.array([self.count], np.float32), {"action_mask": self.action_masks()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.seen()

    def step(self, action):
        if action != self.count % 3:
            raise ValueError(f"action {action} is not allowed")
        self.count += 1
        observation, info = self.seen()
        return observation, 1.0, self.count == 7, False, info


class ByMethod(Masked):
    def seen(self):
        return super().seen()[0], {}


class TooShort(Masked):
    def action_masks(self):
        return np.ones(2, bool)


class Nothing(Masked):
    def action_masks(self):
        return np.zeros(3, bool)
'''


@pytest.fixture
def masked(tmp_path, monkeypatch):
    (tmp_path / "masked_env.py").write_text(MASKED)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("masked_env", None)


@pytest.mark.parametrize("kind", ["Masked", "ByMethod"])
def test_an_env_with_action_masks_is_given_allowed_actions_by_every_check(masked, capsys, kind):
    assert main(["envs", "check", f"masked_env:{kind}", "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 episodes of random actions that its masks allow, 14 steps without a fault" in out
    assert "ok      gymnasium's check_env" in out
    assert "unwrapped" not in out


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("TooShort", "must be 3 values of 0 or 1, one an action, got [True, True]"),
        ("Nothing", "must allow at least one action, got [False, False, False]"),
    ],
)
def test_a_mask_that_is_none_is_a_fault(masked, capsys, kind, told):
    assert main(["envs", "check", f"masked_env:{kind}"]) == 1
    assert told in capsys.readouterr().out
