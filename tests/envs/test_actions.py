import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projection, last_tag

WORDS = {"Up": 1, "Down": 2, "Left": 3, "Right": 4}
ONE = Projection(lookup=WORDS)
MANY = Projection(lookup=WORDS, tags=("answer", "action"), separator="||", max_actions=3)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>up</action>", 1),
        ("  <ACTION> \n LEFT\t</Action> and so on", 3),
        ("<think>first <action>up</action></think><action>down</action>", 2),
        ("<action>up</action> no, better: <action>right</action>", 4),
        ("<action>up</action> <action>right", 1),
        ("<action><action>down</action>", 2),
        ("up, thinking was opened by the prompt <action>up</action></think><action>left</action>", 3),
        ("İ" * 50 + "<action>up</action>", 1),  # lower() makes two characters of each
    ],
)
def test_the_last_complete_tag_outside_thoughts_counts(text, action):
    assert ONE(text).actions == (action,)
    assert ONE(text).valid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "up",
        "<action></action>",
        "<action>right then up</action>",
        "<action>support</action>",
        "<action>up",
        "up</action>",
        "</action>up<action>",
        "<think><action>up</action>",
        "<action>up</action></think>",
        "<action>u<think>x</think>p</action>",
        "<answer>up</answer>",
        "<action>up</answer>",
        "<acTİon>up</acTİon>",
        "<action>1</action>",
        "< action>up</ action>",
    ],
)
def test_nothing_is_guessed_from_what_is_not_exactly_an_action(text):
    projected = ONE(text)
    assert (projected.actions, projected.valid) == ((0,), False)


def test_several_actions_stand_between_separators():
    assert MANY("<answer>up || Left||down</answer>").actions == (1, 3, 2)
    assert MANY("<action>up</action>").actions == (1,)
    for text in ("up||jump", "up||", "||", "up||up||up||up", "up|left"):
        assert not MANY(f"<answer>{text}</answer>").valid


TAGS = ("<think>", "</think>", "<action>", "</action>")


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*"<>/ actionhkup|İK", *TAGS, *TAGS]), max_size=40).map("".join))
def test_strict_projection_agrees_with_a_scan_from_the_definition(text):
    assert last_tag(text) == slow_last_tag(text)


def slow_last_tag(text):
    """Character by character, from the words of the rule."""
    found, start, thinking, i = None, None, False, 0
    fold = "".join(c.lower() if "A" <= c <= "Z" else c for c in text)
    while i < len(fold):
        tag = next(
            (t for t in ("<think>", "</think>", "<action>", "</action>") if fold.startswith(t, i)), None
        )
        if tag == "<think>":
            thinking, start = True, None
        elif tag == "</think>":
            if not thinking:
                found = None
            thinking, start = False, None
        elif tag == "<action>" and not thinking:
            start = i + len(tag)
        elif tag == "</action>" and not thinking and start is not None:
            found, start = text[start:i], None
        i += len(tag) if tag else 1
    return found


UNITS = ("<think>", "</think>", "<action>", "</action>", "<answer>", "<", "||", " ", "İ", "<think></think>")
HOSTILE = [
    *(unit * 200_000 for unit in UNITS),
    "<think>" + "</think>   " * 50_000,
    "<think>" + "\n" * 300_000,
    "<action>" + "up||" * 100_000 + "</action>",
]


@pytest.mark.parametrize("style", ["strict", "lenient", "ragen", "verl-agent"])
def test_hostile_text_costs_no_more_than_ordinary_text_of_its_length(style):
    """A quadratic scan of 65,536 characters would take minutes; the cap is generous for a loaded machine."""
    for text in HOSTILE:
        for projection in (ONE, MANY):
            began = time.thread_time()
            replace(projection, style=style)(text)
            assert time.thread_time() - began < 2.0


@settings(max_examples=100)
@given(st.text(), st.sampled_from(["strict", "lenient", "ragen", "verl-agent"]))
def test_any_text_gives_an_action_and_a_verdict(text, style):
    for response in (text, f"<action>{text}</action>", f"<think></think><answer>{text}</answer>"):
        for projection in (ONE, MANY):
            projected = replace(projection, style=style)(response)
            assert projected.actions
            assert set(projected.actions) <= {0, 1, 2, 3, 4}
            assert isinstance(projected.valid, bool)


# What verl-agent's Sokoban projection returns for these texts, by reading it.
VERL = [
    ("<think>t</think><action>up</action>", 1, True),
    ("<action>up</action>", 1, False),  # no thoughts: the action counts, the verdict does not
    ("<think></think><action>right then up</action>", 1, True),  # the order of its list, not of the text
    ("<think></think><action>support</action>", 1, True),
    ("<think></think><action>STILL</action>", 0, True),
    ("<think></think><action>jump</action>", 0, False),
    ("<think><action>left</action></think><action>down</action>", 3, True),
    ("<think></think></action>left<action>", 0, False),
    ("<think></think>left", 0, False),
]


@pytest.mark.parametrize(("text", "action", "valid"), VERL)
def test_the_verl_agent_style_repeats_its_quirks(text, action, valid):
    projected = replace(ONE, style="verl-agent")(text)
    assert (projected.actions, projected.valid) == ((action,), valid)
    if "<action>" in text:
        assert replace(ONE, style="lenient")(text) == projected


# RAGEN with thoughts enabled: unknown names are dropped, and then the response is not valid.
RAGEN = [
    ("<think>a</think><answer>Up || Left</answer>", (1, 3), True),
    ("<think>a</think> \n <answer>up</answer>", (1,), True),
    ("<answer>up</answer>", (0,), False),
    ("<think>a</think> so <answer>up</answer>", (0,), False),
    ("<think>a</think><answer>up || jump || down</answer>", (1, 2), False),
    ("<think>a</think><answer>|| up ||</answer>", (1,), True),
    ("<think>a</think><answer>up||up||up||up</answer>", (1, 1, 1), True),  # cut to three actions
    ("<think>a</think><answer></answer>", (0,), False),
    ("<think>a</think><answer>up</answer><think>b</think><answer>down</answer>", (1,), True),
    ("<think>a</think>x</think><answer>left</answer>", (3,), True),
]


@pytest.mark.parametrize(("text", "actions", "valid"), RAGEN)
def test_the_ragen_style_repeats_its_quirks(text, actions, valid):
    projected = replace(MANY, style="ragen")(text)
    assert (projected.actions, projected.valid) == (actions, valid)
    assert replace(MANY, style="lenient")(text) == projected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"style": "raegn"}, "style of a projection must be one of .*'ragen'.*got 'raegn'"),
        ({"tags": ()}, "needs a tag"),
        ({"separator": ""}, "a separator that is not empty"),
        ({"max_actions": 0}, "at least one action"),
        ({"lookup": {"go": 1, " GO": 2}}, "must differ, case aside"),
        ({"lookup": {" ": 1}}, "must differ"),
    ],
)
def test_a_projection_that_would_read_responses_otherwise_than_meant_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(MANY, **change)
