"""An env of one's own as a plain Gymnasium class with text, or with chat messages, needs nothing of shoal."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiBinary, Sequence, Text

from shoal.cli.main import main
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.catalogue import resolve_text
from shoal.testing import check_text_env

HERE = "tests.envs.test_plain_gymnasium"
THINGS = ("feather", "apple", "iron bar", "ox")


class Scales(gymnasium.Env):
    """Which side is heavier?"""

    observation_space = Text(16)
    action_space = Discrete(2)
    action_names = ("left", "right")
    instructions = "Say which side is heavier."
    max_steps = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pair = [int(n) for n in self.np_random.permutation(4)[:2]]
        return self.look(), {}

    def look(self):
        return f"left: {THINGS[self.pair[0]]}, right: {THINGS[self.pair[1]]}"

    def step(self, action):
        won = bool(self.pair[action] == max(self.pair))
        return self.look(), float(won), won, False, {"success": won}


class Spelling(Scales):
    """The heavier thing by its name: actions are free text."""

    action_space = Text(9)

    def step(self, action):
        won = action == THINGS[max(self.pair)]
        return self.look(), float(won), won, False, {"success": won}


class Drawn(Spelling):
    """The same, with actions for the warm-up: random ones, and the right one."""

    def random_action(self, rng):
        return THINGS[int(rng.integers(4))]

    def expert_action(self):
        return THINGS[max(self.pair)]


class DrawnByNumber(Scales):
    """Random actions as the class itself counts them."""

    def random_action(self, rng):
        return rng.integers(2)


class DrawnWrongly(Scales):
    def random_action(self, rng):
        return 2


class Chat(Scales):
    """The same as a chat that grows."""

    observation_space = Sequence(Discrete(2))

    def reset(self, *, seed=None, options=None):
        text, info = super().reset(seed=seed)
        self.chat = [
            {"role": "system", "content": "You know how heavy things are."},
            {"role": "user", "content": text},
        ]
        return list(self.chat), info

    def step(self, action):
        _, reward, over, cut, info = super().step(action)
        self.chat += [
            {"role": "assistant", "content": self.action_names[action]},
            {"role": "user", "content": "yes" if over else "no"},
        ]
        return list(self.chat), reward, over, cut, info


class LastMessage(Chat):
    """Only the newest message of each turn, and no spaces stated."""

    observation_space = action_space = property(lambda self: self.nothing)

    def reset(self, *, seed=None, options=None):
        messages, info = super().reset(seed=seed)
        return messages[1:], info

    def step(self, action):
        messages, *rest = super().step(["left", "right"].index(action) if action in ("left", "right") else 0)
        return messages[-1:], *rest


class Numbers(Scales):
    """Shows what is neither text nor messages, and does not say what."""

    observation_space = Sequence(Discrete(2))

    def look(self):
        return {"left": self.pair[0]}


class ChangesItsMind(Scales):
    """Text first, a number later."""

    def step(self, action):
        return 7, 0.0, False, False, {}


def test_a_class_with_text_is_played_by_its_own_words_rules_and_limit():
    make = resolve_text(f"{HERE}:Scales")
    check_text_env(make)
    env = make()
    assert (env.instructions, env.max_steps) == ("Say which side is heavier.", 4)
    observation, info = env.reset(seed=3)
    assert observation.startswith("left: ")
    assert info["available_actions"] == ["left", "right"]
    heavier = env.projection(
        f"<action>{'right' if env.inner.pair[1] > env.inner.pair[0] else 'left'}</action>"
    )
    _, reward, terminated, _, info = env.step(heavier.actions[0])
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_settings_of_a_plain_class_win_over_what_the_class_says():
    env = resolve_text("gymnasium", {"id": f"{HERE}:Scales", "action_names": ["l", "r"], "max_steps": 2})()
    assert (env.projection.words(), env.max_steps) == (["l", "r"], 2)


def test_actions_of_a_text_space_are_free_text_of_the_length_that_it_says():
    make = resolve_text(f"{HERE}:Spelling")
    check_text_env(make)
    env = make()
    assert env.projection("<action>iron bar</action>").actions == ("iron bar",)
    assert not env.projection("<action>a very long bar of iron</action>").valid
    env.reset(seed=0)
    assert env.step("a very long bar of iron")[4]["action_is_valid"] is False
    assert env.step(THINGS[max(env.inner.pair)])[4]["success"] is True


def test_of_chat_messages_the_system_message_joins_the_rules_and_a_turn_shows_what_is_new():
    make = resolve_text(f"{HERE}:Chat")
    check_text_env(make)
    env = make()
    assert env.instructions == "Say which side is heavier.\n\nYou know how heavy things are."
    first, _ = env.reset(seed=3)
    assert first == resolve_text(f"{HERE}:Scales")().reset(seed=3)[0]
    assert env.step(1)[0] in ("yes", "no")
    again, _ = env.reset(seed=3)
    assert again == first


def test_an_env_may_show_its_newest_message_only_and_state_no_spaces():
    make = resolve_text(f"{HERE}:LastMessage")
    check_text_env(make)
    env = make()
    env.reset(seed=0)
    assert env.step("left")[0] in ("yes", "no")


def test_what_is_neither_text_nor_messages_is_refused_by_name():
    with pytest.raises(ConfigError, match="no text and no chat messages, but dict"):
        resolve_text(f"{HERE}:Numbers")()


def test_what_a_plain_class_does_wrong_is_told_with_its_class_method_and_line():
    env = resolve_text(f"{HERE}:ChangesItsMind")()
    env.reset(seed=0)
    with pytest.raises(
        EnvError, match=r"ChangesItsMind.step\(\): the observation must be str .*got int \(test_plain"
    ):
        env.step(1)


class Unsolvable(Scales):
    def step(self, action):
        return self.look(), 1.0, True, False, {}


class Switches(Scales):
    action_space = MultiBinary(2)


def test_action_names_of_a_class_count_for_a_choice_of_actions_only():
    assert resolve_text(f"{HERE}:Switches")().available_actions() == ["<2 numbers, each 0 or 1>"]


def test_random_and_expert_actions_of_the_class_are_used():
    env = resolve_text(f"{HERE}:Drawn")()
    env.reset(seed=3)
    assert env.draws_actions
    assert {env.random_action(np.random.default_rng(n)) for n in range(30)} == set(THINGS)
    assert env.step(env.projection.action_of(env.expert_action()))[4]["success"]
    plain = resolve_text(f"{HERE}:Spelling")()
    assert not plain.draws_actions
    assert plain.random_action(np.random.default_rng(0)) is plain.expert_action() is None
    numbers = resolve_text(f"{HERE}:DrawnByNumber")()
    assert {numbers.random_action(np.random.default_rng(n)) for n in range(9)} == {"left", "right"}
    with pytest.raises(EnvError, match=r"DrawnWrongly\.random_action\(\) must return an action.*got 2"):
        resolve_text(f"{HERE}:DrawnWrongly")().random_action(np.random.default_rng(0))


class Unseeded(Scales):
    def reset(self):
        return super().reset()


class SameWords(Scales):
    action_names = ("left", "left")


class Never(Scales):
    def step(self, action):
        return self.look(), 0.0, False, False, {"success": False}


def test_a_reset_without_seed_and_a_word_for_two_actions_are_named():
    with pytest.raises(
        EnvError, match=r"Unseeded\.reset\(\) must be reset\(self, \*, seed=None.*test_plain_gym.*py:\d+"
    ):
        resolve_text(f"{HERE}:Unseeded")()
    with pytest.raises(ConfigError, match=r"action_names of .*SameWords has 'left' twice"):
        resolve_text(f"{HERE}:SameWords")()


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("Chat", "32 episodes of at most 4 steps"),
        ("Scales", "Text(16) is read as FreeText"),
        ("Unsolvable", "nothing says when an episode is solved"),
        ("Never", "never rewarded"),
    ],
)
def test_envs_check_plays_plain_classes_as_agents_see_them_and_notes_what_is_odd(capsys, kind, note):
    assert main(["envs", "check", f"{HERE}:{kind}"]) == 0
    said = capsys.readouterr().out
    assert note in said
    assert ("never rewarded" in said) == (kind == "Never")
