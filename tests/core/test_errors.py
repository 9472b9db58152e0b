"""Errors of somebody else's code say where in that code they came from."""

import gymnasium
import numpy as np

from shoal.core.errors import did_you_mean, format_error, user_frames
from shoal.envs.catalogue import make


class Breaks(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(10)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a", {}

    def step(self, action):
        return self.look_up("garden")

    def look_up(self, name):
        return {}[name]


def raised(work):
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_an_env_behind_gymnasiums_wrappers_shows_the_lines_of_its_author_only():
    env = gymnasium.wrappers.TimeLimit(gymnasium.wrappers.OrderEnforcing(Breaks()), 5)
    env.reset(seed=0)
    lines = user_frames(raised(lambda: env.step(0)))
    here = [line for line in lines if "lambda" not in line and "in raised" not in line]
    assert [line.split(":")[0] for line in here] == ["test_errors.py", "test_errors.py"]
    assert here[0].endswith('in step: return self.look_up("garden")')
    assert here[1].endswith("in look_up: return {}[name]")


def test_a_package_that_the_authors_line_called_is_left_out():
    lines = user_frames(raised(lambda: np.zeros(3).reshape(2, 2).mean(axis=7)))
    assert "reshape(2, 2)" in lines[-1]


def test_an_error_that_shoal_raised_because_of_another_shows_where_the_other_one_came_from():
    def chained():
        try:
            Breaks().look_up("cellar")
        except KeyError as error:
            raise RuntimeError("the env failed") from error

    bare = raised(chained).with_traceback(None)
    assert user_frames(bare)[-1].endswith("in look_up: return {}[name]")


def test_at_most_five_lines_are_shown_and_the_innermost_is_the_last():
    def deeper(level):
        if level == 0:
            raise ValueError("bottom")
        deeper(level - 1)

    lines = user_frames(raised(lambda: deeper(20)))
    assert len(lines) == 5
    assert lines[-1].endswith('raise ValueError("bottom")')


def test_an_error_of_shoals_own_code_has_no_line_of_the_user():
    env = make("bandit")
    error = raised(lambda: env.step(1))
    assert user_frames(error.with_traceback(error.__traceback__.tb_next.tb_next)) == []


def test_an_error_whose_message_raises_is_told_all_the_same():
    class SpeechlessError(Exception):
        def __str__(self):
            raise LookupError("no words")

    assert format_error(SpeechlessError()) == "SpeechlessError: its message raises LookupError"


def test_a_long_list_of_known_names_is_cut():
    told = did_you_mean("ep-7x", [f"ep-{number}" for number in range(250)])
    assert told.startswith(" Did you mean 'ep-7'? Known: ep-0, ep-1, ep-10, ")
    assert told.endswith(", … (150 more)")
