"""What the references call, type and write into YAML is there; new things may stand beside it."""

from __future__ import annotations

import json

import pytest
import tests.freeze.record as recorder

RECORDED = json.loads(recorder.RECORD.read_text("utf-8"))


def lost(old: list[str], new: list[str]) -> list[str]:
    """Why a call that fitted the old parameters may not fit the new ones."""
    wrong = [f"{parameter!r} is gone or changed" for parameter in old if parameter not in new]
    places = [p for p in old if p[0] != "*"]
    if [p for p in new if p[0] != "*"][: len(places)] != places:
        wrong.append("parameters by position are no longer in their old order, with new ones behind")
    added = [p for p in new if p not in old and " = " not in p and (p[0] != "*" or p[:3] == "*, ")]
    return wrong + [f"{parameter!r} is new and has no default" for parameter in added]


@pytest.mark.parametrize("name", RECORDED["names"])
def test_a_name_is_called_as_before(name):
    assert lost(RECORDED["names"][name], recorder.names()[name]) == []


@pytest.mark.parametrize("command", RECORDED["commands"])
def test_a_command_takes_every_flag_it_took(command):
    assert set(RECORDED["commands"][command]) <= set(recorder.commands().get(command, ()))


def test_every_key_of_agent_training_is_there():
    assert set(RECORDED["keys"]) <= set(recorder.keys())


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        (["a", "b = 1"], ["a", "b = 1", "c = 2", "*, d = 3"], True),
        (["a", "b = 1"], ["a", "b = 2"], False),
        (["a", "b = 1"], ["b = 1", "a"], False),
        (["a", "b = 1"], ["a", "c = 0", "b = 1"], False),
        (["a", "b = 1"], ["a", "*, b = 1"], False),
        (["a"], ["a", "*, c"], False),
        (["a"], ["a", "c"], False),
        (["a", "**k"], ["a"], False),
        (["a"], ["a", "*args", "**k"], True),
        ([], [], True),
    ],
)
def test_the_comparison_itself_knows_what_breaks_a_call(old, new, fits):
    assert (lost(old, new) == []) == fits
