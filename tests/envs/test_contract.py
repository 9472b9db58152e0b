"""What a class of one's own must state, what it may leave out, and what is refused when it is made."""

from abc import ABC
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest
from gymnasium.spaces import Discrete, Text

from shoal.core.errors import ConfigError, EnvError
from shoal.envs.actions import Projection
from shoal.envs.catalogue import resolve_text
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv
from shoal.testing import check_text_env


class Door(TextEnv):
    """Knock until somebody opens; nothing but the least that a class must state."""

    instructions = "Get in."
    projection = Projection(lookup={"knock": 1, "wait": 2})

    def _start(self, rng):
        self.knocks = int(rng.integers(1, 1000))

    def _advance(self, action):
        self.knocks -= action == 1
        return Outcome(0.0, self.knocks == 0, self.knocks == 0)

    def observe(self):
        return f"Closed, it says: {self.knocks} times!"


def made(**parts):
    """A class made with these parts, or without those that are None."""
    body = {"instructions": "Get in.", "projection": Door.projection}
    body |= {name: vars(Door)[name] for name in ("_start", "_advance", "observe")} | parts
    return type("Made", (TextEnv,), {name: part for name, part in body.items() if part is not None})


def test_an_env_without_config_and_spaces_keeps_every_promise():
    check_text_env(Door)
    assert Door().action_space == Discrete(2, start=1)
    assert Door().observation_space.contains("Ünï, \n<b>")


def test_max_steps_of_the_class_ends_the_episode_and_is_a_setting():
    class Short(Door):
        max_steps = 3

    assert (Short().max_steps, Short().config.max_steps) == (3, 3)
    for env, limit in ((Short(), 3), (Short(max_steps=2), 2), (resolve_text(Short, {"max_steps": 1})(), 1)):
        env.reset(seed=0)
        ends = [env.step(2)[3] for _ in range(limit)]
        assert ends == [False] * (limit - 1) + [True]


def test_a_config_without_max_steps_takes_that_of_the_class():
    @dataclass(frozen=True)
    class Settings:
        polite: bool = True

    class Polite(Door):
        Config = Settings
        max_steps = 2

    env = Polite(polite=False)
    env.reset(seed=0)
    assert [env.step(1)[3] for _ in range(2)] == [False, True]
    assert made(Config=Settings)().max_steps == TextEnv.max_steps


@pytest.mark.parametrize("first", [0, 1])
def test_actions_are_numbered_from_0_or_from_1(first):
    class Levers(Door):
        projection = Projection(lookup={str(n): first + n for n in range(8)})
        max_steps = 4

        def _advance(self, action):
            return Outcome(float(action), valid=action != self.invalid_action)

    env = Levers()
    check_text_env(Levers)
    env.reset(seed=0)
    assert env.action_space == Discrete(8, start=first)
    assert [env.step(env.projection(f"<action>{n}</action>").actions[0])[1] for n in (0, 7)] == [
        first,
        first + 7,
    ]
    nothing = env.projection("no action").actions[0]
    assert nothing == env.invalid_action
    assert not env.action_space.contains(nothing)
    assert env.step(nothing)[4]["action_is_valid"] is False


def test_a_subclass_with_more_words_gets_another_space_and_another_invalid_action():
    class Two(Door):
        projection = Projection(lookup={"a": 0, "b": 1})

    class Three(Two):
        projection = Projection(lookup={"a": 0, "b": 1, "c": 2})

    assert (Two.invalid_action, Two.action_space) == (2, Discrete(2))
    assert (Three.invalid_action, Three.action_space) == (3, Discrete(3))
    check_text_env(Three)


def test_an_env_of_free_text_needs_no_spaces():
    env = made(
        projection=Projection(parse=str), _advance=lambda self, action: Outcome(float(len(str(action))))
    )()
    env.reset(seed=0)
    assert env.step(env.projection("<action>open, please</action>").actions[0])[1] == len("open, please")


def test_a_plain_text_space_takes_any_character_and_one_with_characters_of_its_own_stays():
    env = made(observation_space=Text(8))()
    assert "Closed" in env.reset(seed=0)[0]
    letters = made(observation_space=Text(80, charset="abc"))
    with pytest.raises(EnvError, match=r"gave 'Closed.*allows no .*: use shoal.envs.spaces.FreeText\(80\)"):
        letters().reset(seed=0)


def test_a_text_longer_than_its_space_is_told_with_both_lengths():
    env = made(observation_space=FreeText(5))()
    with pytest.raises(EnvError, match=r"Made.observe\(\) gave .*0 to 5 characters, and it has \d\d"):
        env.reset(seed=0)


def test_a_seed_gives_the_same_episode_in_a_class_of_another_name():
    class Renamed(Door):
        pass

    assert [Renamed().reset(seed=seed)[0] for seed in range(5)] == [
        Door().reset(seed=seed)[0] for seed in range(5)
    ]


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_numbers_and_yes_of_numpy_are_those_of_python(reward):
    yes, no = np.bool_(True), np.bool_(False)
    env = made(_advance=lambda self, action: Outcome(reward, yes, no, yes, no))()
    env.reset(seed=0)
    _, paid, terminated, truncated, info = env.step(1)
    told = (
        paid,
        terminated,
        truncated,
        *(info[k] for k in ("success", "action_is_effective", "action_is_valid")),
    )
    assert told == (0.5, True, False, False, True, False)
    assert [type(one) for one in told] == [float, *[bool] * 5]


REFUSED = {
    "needs a method _advance(self, action), which acts and returns an Outcome": {"_advance": None},
    "needs a method observe(self), which returns": {"observe": None},
    "must have _start(self, rng), which begins an episode": {"_start": lambda self: None},
    "must have _advance(self, action)": {"_advance": lambda self: None},
    "state them, as in projection = Projection(": {"projection": None},
    "must have a projection such as Projection(lookup=": {"projection": {"knock": 1}},
    "needs instructions": {"instructions": None},
    "must have a whole number of at least 1 as max_steps, got 0": {"max_steps": 0},
    "must have a dataclass as its Config": {"Config": dict},
    "has the word 'wait' for 2, which is not in action_space Discrete(2)": {"action_space": Discrete(2)},
    "must state its action_space: [1, 7]": {"projection": Projection(lookup={"knock": 1, "wait": 7})},
    "has the invalid_action 1, which means 'no usable action' and is an action too": {"invalid_action": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_class_that_cannot_work_is_refused_when_it_is_made(message):
    with pytest.raises(ConfigError) as refused:
        made(**REFUSED[message])
    assert str(refused.value).startswith("Made (test_contract.py:")
    assert message in str(refused.value)


def test_max_steps_in_the_class_and_in_its_config_is_refused():
    @dataclass(frozen=True)
    class Settings:
        max_steps: int = 3

    with pytest.raises(ConfigError, match="has max_steps twice, in the class and in Settings"):
        made(Config=Settings, max_steps=4)


def test_a_common_base_may_leave_methods_to_its_subclasses():
    class House(TextEnv, ABC):
        instructions = "Get in."

        def observe(self):
            return "a house"

    class Hut(House):
        projection = Door.projection
        _start, _advance = Door._start, Door._advance

    check_text_env(Hut)


def test_the_class_of_an_env_goes_to_another_process_by_value():
    class Local(Door):
        projection = Projection(lookup={"a": 0, "b": 1})

    class Whole(TextEnv):
        instructions, projection = "Get in.", Projection(lookup={"a": 0, "b": 1})
        _start, _advance, observe = Door._start, Door._advance, Door.observe

    for kind in (Local, Whole):
        twin = cloudpickle.loads(cloudpickle.dumps(kind()))
        assert twin.reset(seed=3)[0] == kind().reset(seed=3)[0]
        assert twin.invalid_action == kind.invalid_action == 2
