"""Where two records of an episode part, and what a comparison of many says."""

from dataclasses import fields, replace

import pytest
from msgspec import UNSET
from tests.cli.recorded import trajectory, turn
from tests.records import exchanges, with_call

from shoal.core.data import Call, Judged, Trajectory, Turn
from shoal.train.records import replay
from shoal.train.records.compare import compare, difference_of

CHANGES = [
    ({"env_seed": 8}, "seed", None, None),
    ({"turns": (turn(), turn(observation="b"))}, "observation", 2, None),
    ({"turns": (turn(prompt_ids=(1, 9, 3)), turn())}, "prompt token", 1, 1),
    ({"turns": (turn(prompt_ids=(1, 2)), turn())}, "prompt token", 1, 2),
    ({"turns": (turn(), turn(response_ids=(4, 6)))}, "response token", 2, 1),
    ({"turns": (turn(), turn(logprobs=(-0.5, -0.3)))}, "log-probability", 2, 1),
    ({"turns": (turn(reward=1.0), turn())}, "reward", 1, None),
    ({"turns": (turn(action=None), turn())}, "action", 1, None),
    ({"turns": (turn(),)}, "the number of turns", None, None),
    ({"success": True}, "success", None, None),
    ({"status": "timeout"}, "status", None, None),
]


@pytest.mark.parametrize(("changes", "what", "at", "token"), CHANGES)
def test_the_first_difference_of_two_records_has_its_place(changes, what, at, token):
    found = difference_of(trajectory(), trajectory(**changes))
    assert (found.what, found.turn, found.token) == (what, at, token)
    assert difference_of(trajectory(), trajectory()) is None
    if what == "log-probability":
        assert difference_of(trajectory(), trajectory(**changes), tokens_only=True) is None


def other_than(value):
    """A value of the same kind that is not the same."""
    if isinstance(value, bool | None):
        return not value
    if value is UNSET:
        return Judged((1.0,), ())
    return value + type(value)("x" if isinstance(value, str) else [9] if isinstance(value, tuple) else 1)


@pytest.mark.parametrize(
    "name", [field.name for field in fields(Trajectory) if field.name not in ("calls", "turns")]
)
def test_no_field_of_an_episode_goes_unseen(name):
    one = trajectory()
    other = replace(one, **{name: other_than(getattr(one, name))})
    assert difference_of(one, other).turn is None
    assert compare([one], [other]).level == "L0"


@pytest.mark.parametrize("name", [field.name for field in fields(Turn) if field.name != "call"])
def test_no_field_of_a_turn_goes_unseen(name):
    one = trajectory()
    bent = replace(one.turns[1], **{name: other_than(getattr(one.turns[1], name))})
    assert difference_of(one, replace(one, turns=(one.turns[0], bent))).turn == 2


@pytest.mark.parametrize("name", [field.name for field in fields(Call) if field.name != "parent"])
def test_no_field_of_a_call_goes_unseen(name):
    one = trajectory()
    assert difference_of(one, with_call(one, 1, **{name: other_than(getattr(one.calls[1], name))})).turn == 2
    assert difference_of(one, with_call(one, 1, parent=0)).what == "prompt token"


def test_a_verdict_counts_what_is_equal():
    one = [trajectory(member=member) for member in range(4)]
    rounded = trajectory(turns=(turn(), turn(logprobs=(-0.5, -0.125))), member=1)
    wrong = trajectory(turns=(turn(), turn(response_ids=(4, 6))), member=2)
    assert compare(one, one).level == "L2"
    verdict = compare(one, [one[0], rounded, *one[2:]])
    assert (verdict.level, verdict.same_episodes, verdict.turns, verdict.same_logprobs) == ("L1", 4, 8, 7)
    assert verdict.largest_difference == pytest.approx(abs(-0.125 - exchanges(one[0])[1].logprobs[1]))
    assert verdict.first is None
    verdict = compare(one, [one[0], rounded, wrong, one[3]])
    assert (verdict.level, verdict.same_episodes) == ("L0", 3)
    assert "member 2, turn 2, token 1: response token is" in verdict.first
    assert verdict.first in str(verdict)
    spoken = trajectory(turns=(turn(), turn(logprobs=())), member=1)  # of a server that takes messages
    assert compare(one, [one[0], spoken, *one[2:]]).level == "L1"
    verdict = compare(one, one[:3])
    assert (verdict.level, verdict.episodes, verdict.first) == ("L0", 4, "4 episodes against 3")


def test_replaying_is_found_where_tests_of_users_look_for_it():
    from shoal.testing.replay import Replay, find_episode

    assert (Replay, find_episode) == (replay.Replay, replay.find_episode)
