import gymnasium
import pytest

import shoal.envs
from shoal.core.errors import UnknownNameError
from shoal.envs.catalogue import BUILT_IN
from shoal.rollout.compat.projections import create_projection_function


@pytest.mark.parametrize(
    ("env_type", "texts", "expected"),
    [
        ("sokoban", ["<action>up</action>", "<action>down</action>"], ([1, 2], [True, True])),
        ("sokoban", ["<answer>Left</answer>", "right"], ([3, 0], [True, False])),
        ("frozen_lake", ["<action>left</action>", "<action>Up</action>"], ([1, 4], [True, True])),
        ("bandit", ["<action>2</action>", "<action>3</action>"], ([2, 0], [True, False])),
        ("generic", ["<action> go north </action>", "<action> </action>"], (["go north", ""], [True, False])),
    ],
)
def test_each_kind_of_env_has_its_projection(env_type, texts, expected):
    assert create_projection_function(env_type)(texts) == expected


NUMERICAL = [
    "5", "-2.5", "1,000", "3/4", "50%", "$12", "5 apples", "1 or 5", r"\boxed{7}", r"\frac{1}{2}", "(1, 2)", "x = 5",
    "The answer is: 42", "so it is 3, #### 3", r"3\sqrt{2}", "2^{10}", "x^2+1", r"\frac{a}{b}", "p - q", r"\pi", "∞",
    "B",
]  # fmt: skip
NOT_NUMERICAL = ["hello", "hello world", "I cannot tell", "+", "?", "The answer is: yes", "٪"]


def test_what_states_no_number_is_no_action_of_metamathqa():
    function = create_projection_function("metamathqa")
    for texts, valid in ((NUMERICAL, True), (NOT_NUMERICAL, False)):
        shown = [f"<think>so</think><answer>{text}</answer>" for text in texts]
        actions, valids = function(shown)
        assert dict(zip(texts, valids, strict=True)) == dict.fromkeys(texts, valid)
        assert actions == (texts if valid else [""] * len(texts))


def test_a_separator_gives_a_list_per_response():
    function = create_projection_function("frozen_lake", separator="||", max_actions=2)
    texts = ["<action>up || down</action>", "<action>up</action>", "<action>up||up||up</action>"]
    assert function(texts) == ([[4, 2], [4], [0]], [True, True, False])
    assert create_projection_function("frozen_lake", separator="||")(texts[1:2]) == ([[4]], [True])


def test_action_spaces_limit_what_counts():
    function = create_projection_function("sokoban")
    up = "<action>up</action>"
    assert function([up, up, up], [None, ["Down", "Left"], {"Up": 9}]) == ([1, 0, 9], [True, False, True])
    free = create_projection_function("generic")
    spaces = [["search[<words>]", "click[back]"]] * 3
    texts = [
        "<action>search[red shoe]</action>",
        "<action>click[back]</action>",
        "<action>click[buy]</action>",
    ]
    assert free(texts, spaces) == (["search[red shoe]", "click[back]", ""], [True, True, False])
    with pytest.raises(ValueError, match="one entry per response"):
        function([up], [])


def test_lenient_projection_imitates_the_older_projects():
    support = "<think>hm</think><action>support</action>"
    several = "<think>hm</think><answer>up || jump</answer>"
    assert create_projection_function("sokoban")([support, several]) == ([0, 0], [False, False])
    lenient = create_projection_function("sokoban", lenient=True, separator="||", max_actions=5)
    assert lenient([support, several]) == ([[1], [1]], [True, False])
    assert create_projection_function("sokoban", lenient="ragen")([support]) == ([0], [False])


def test_an_unknown_kind_is_told_the_closest_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'bandit'"):
        create_projection_function("bandits")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_own_env_is_made_by_gymnasium_too(name):
    from shoal.envs.catalogue import gymnasium_id

    env = gymnasium.make(gymnasium_id(name), max_steps=7)
    observation, _ = env.reset(seed=11)
    assert observation == shoal.envs.make(name, max_steps=7).reset(seed=11)[0]
    env.step(env.unwrapped.invalid_action)
    assert env.unwrapped.config.max_steps == 7


@pytest.mark.parametrize("options", [{"max_actions": 3}, {"max_actions": 0}, {"separator": ""}])
def test_options_that_would_say_nothing_are_refused(options):
    with pytest.raises(ValueError, match="more than one need a separator, got"):
        create_projection_function("sokoban", **options)


def test_actions_stand_in_the_tags_that_are_named():
    function = create_projection_function("sokoban", tags=("move",))
    assert function(["<move>up</move>", "<action>up</action>"]) == ([1, 0], [True, False])
