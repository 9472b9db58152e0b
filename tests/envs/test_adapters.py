"""Other people's environments through their adapters, each really played."""

import contextlib
import copy
import json
import pickle
import queue
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from fractions import Fraction
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.envs
from shoal.core.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError
from shoal.envs.adapters.gymnasium import (
    GymnasiumEnv,
    describe_space,
    plain_drawing,
    read_numbers,
    write_value,
)
from shoal.envs.bandit import BanditEnv
from shoal.testing import check_text_env

GYMNASIUM = ["CartPole-v1", "MountainCar-v0", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1", "Taxi-v4"]


@pytest.mark.parametrize("env_id", GYMNASIUM)
@pytest.mark.filterwarnings("ignore")
def test_gymnasium_envs_keep_the_promises_of_text_envs(env_id):
    check_text_env(lambda: shoal.envs.make("gymnasium", id=env_id, max_steps=25), seeds=range(2))


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.MultiBinary(2), "256 1"),
        (spaces.MultiBinary(2), "-255 1"),
        (spaces.Box(0, 255, (1,), np.uint8), "-1"),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), "1e39"),
    ],
    ids=str,
)
def test_numbers_that_an_action_has_no_room_for_are_no_action(space, text):
    assert read_numbers(space, text) is None


def test_the_choices_of_an_action_that_do_not_begin_at_zero_are_told_as_they_are():
    space = spaces.MultiDiscrete([2, 3], start=[5, 6])
    assert describe_space(space) == "2 numbers, each from [5, 6] up to [6, 8]"
    assert read_numbers(space, "6 8").tolist() == [6, 8]
    assert describe_space(spaces.MultiDiscrete([2, 3])) == "2 numbers, each from 0 up to [1, 2]"


def test_a_gymnasium_env_is_stepped_exactly_as_without_the_adapter():
    env = shoal.envs.make("gymnasium", id="CartPole-v1")
    env.reset(seed=9)
    plain = gymnasium.make("CartPole-v1")
    plain.reset(seed=0)
    plain.unwrapped.state = tuple(env.inner.unwrapped.state)
    over, total = False, 0.0
    choose = random.Random(1)
    while not over:
        word = choose.choice(["push left", "push right"])
        text, reward, terminated, truncated, _ = env.step(
            env.projection(f"<action>{word}</action>").actions[0]
        )
        values, expected, their_end, _, _ = plain.step(int(word == "push right"))
        assert (reward, terminated) == (expected, their_end)
        numbers = [float(line.rpartition(": ")[2]) for line in text.split("\n")]
        assert numbers == pytest.approx(values.tolist(), rel=6e-3)  # three digits are shown
        total += reward
        over = terminated or truncated
    assert text.startswith("cart position: ")
    assert total > 5


def test_success_is_reaching_the_threshold():
    env = shoal.envs.make("gymnasium", id="CartPole-v1", success_return=3, max_steps=3)
    env.reset(seed=0)
    assert [env.step(1 + step % 2)[4]["success"] for step in range(3)] == [False, False, True]


def test_numbers_are_actions_of_box_spaces():
    env = shoal.envs.make("gymnasium", id="Pendulum-v1", max_steps=5)
    env.reset(seed=0)
    assert env.projection("<action>-1.5</action>").actions == ("-1.5",)
    assert env.step("-1.5")[4]["action_is_valid"]
    for text in ("2.5", "left", "1 2", "nan", "1e999", "", "٣", "1_0"):
        assert not env.projection(f"<action>{text}</action>").valid
    assert not env.step("5")[4]["action_is_valid"]


SPACES = [
    spaces.Box(-2, 2, (3,), np.float32),
    spaces.Box(0, 9, (2, 2), np.int64),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(4),
]


@settings(max_examples=100)
@given(st.sampled_from(SPACES), st.integers(0, 1000))
def test_what_is_written_of_a_space_can_be_read_back(space, seed):
    space.seed(seed)
    value = space.sample()
    text = write_value(space, value, digits=12)
    assert np.allclose(read_numbers(space, text), value, rtol=1e-9, atol=0)


@settings(max_examples=200)
@given(st.sampled_from(SPACES), st.text())
def test_any_text_is_read_as_a_value_of_the_space_or_not_at_all(space, text):
    value = read_numbers(space, text)
    assert value is None or space.contains(value)


def test_composite_observations_are_written_a_part_a_line():
    space = spaces.Dict({"pos": spaces.Box(0, 1, (2,)), "left": spaces.Discrete(3)})
    value = {"pos": np.array([0.25, 1], np.float32), "left": 2}
    assert sorted(write_value(space, value).split("\n")) == ["left: 2", "pos: 0.25 1"]
    assert plain_drawing("\x1b[1mS\x1b[0m\x1b[41mF\x1b[0m") == "S[F]"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "id must name"),
        ({"id": "NoSuchEnv-v0"}, "NoSuchEnv"),
        ({"id": "CarRacing-v3"}, "27648 numbers"),
        ({"id": "CartPole-v1", "action_names": ["left"]}, "2 actions, but action_names has 1"),
        ({"id": "CartPole-v1", "action_names": ["go", "Go "]}, "must differ, case aside"),
        ({"id": "Pendulum-v1", "action_names": ["left"]}, "action_names are for a choice"),
        (
            {"id": "CartPole-v1", "observation_names": ["x"]},
            "4 numbers to be named, but observation_names has 1",
        ),
        ({"id": "FrozenLake-v1", "observation_names": ["x"]}, "its drawing has none: use show='values'"),
        ({"id": "CartPole-v1", "show": "ansi"}, "show='values'"),
        ({"id": "CartPole-v1", "kwargs": {"wings": 2}}, "wings"),
        (
            {"id": "CartPole-v1", "kwargs": ["wings"]},
            "GymnasiumConfig.kwargs: Expected `object`, got",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gymnasium_settings_that_cannot_work_are_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        shoal.envs.make("gymnasium", **config)


class Told(gymnasium.Env):
    """Tells what it was asked, and whether it was closed."""

    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(3)
    closed = 0

    def reset(self, *, seed=None, options=None):
        self.options = options
        return np.zeros(2, np.float32), {}

    def close(self):
        Told.closed += 1


def test_an_env_that_is_called_like_a_known_one_has_as_many_actions_as_it_has():
    env = GymnasiumEnv(id="my_package:Taxi-v9", make=Told)
    assert env.projection.words() == ["0", "1", "2"]


def test_an_env_that_cannot_be_asked_to_draw_is_shown_by_its_values():
    class Old(gymnasium.Env):
        metadata = types.MappingProxyType({"render_modes": ["ansi"]})
        observation_space = action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 1, {}

    make = shoal.envs.catalogue.resolve_text(Old)
    assert make().reset(seed=0)[0] == "1"
    with pytest.raises(ConfigError, match="unexpected keyword|takes no arguments"):
        GymnasiumEnv(id="Old", make=Old, show="ansi")
    Old.metadata = {"render_modes": None}
    assert make().reset(seed=0)[0] == "1"
    Old.action_space = spaces.Discrete(2_000_000)
    with pytest.raises(ConfigError, match="Old has 2000000 actions; text can offer 65536"):
        make()


def test_an_env_that_cannot_be_shown_as_asked_is_closed(monkeypatch):
    monkeypatch.setattr(Told, "closed", 0)
    with pytest.raises(ConfigError, match="3 actions"):
        GymnasiumEnv(id="Told-v0", make=Told, action_names=["one"])
    assert Told.closed == 1


def test_options_of_a_reset_reach_the_env_inside():
    env = GymnasiumEnv(id="Told-v0", make=Told)
    env.reset(seed=1, options={"low": 0.5})
    assert env.inner.options == {"low": 0.5}
    env.reset(seed=1)
    assert env.inner.options is None


class Pays(Told):
    """Pays what it is told."""

    def __init__(self, what, ends=(False, False), info=None, render_mode=None):
        self.what, self.ends, self.info = what, ends, info or {}

    def step(self, action):
        return np.zeros(2, np.float32), self.what, *self.ends, dict(self.info)


class Several:
    """Several numbers, as a tensor may hold them."""

    def __repr__(self):
        return "several"

    def __float__(self):
        raise ValueError("only one element tensors can be converted")


@pytest.mark.parametrize(
    "what",
    ["1.5", np.str_("1.5"), b"1", None, [1.0], np.array(["1.5"]), np.ones(2), np.complex64(1j), Several()],
    ids=repr,
)
def test_a_reward_in_words_is_no_number(what):
    env = GymnasiumEnv(id="Pays-v0", make=lambda **_: Pays(what))
    env.reset(seed=1)
    with pytest.raises(EnvError, match="the reward must be a number, got "):
        env.step(1)


@pytest.mark.parametrize(
    "what", [2, 2.0, np.float32(2), np.int64(2), np.array([2.0]), np.array(2), Fraction(2)], ids=repr
)
def test_a_reward_may_be_any_number(what):
    env = GymnasiumEnv(id="Pays-v0", make=lambda **_: Pays(what))
    env.reset(seed=1)
    assert env.step(1)[1] == 2.0


@pytest.mark.parametrize(
    ("ends", "name"), [(("False", False), "terminated"), ((False, np.str_("False")), "truncated")]
)
def test_an_end_in_words_is_none(ends, name):
    env = GymnasiumEnv(id="Pays-v0", make=lambda **_: Pays(1.0, ends))
    env.reset(seed=1)
    with pytest.raises(EnvError, match=f"{name} must be True or False, got "):
        env.step(1)


def test_an_answer_that_is_none_of_gymnasiums_is_told_as_such():
    class Wrong(Told):
        observation_space = spaces.Text(5)
        answer = None

        def reset(self, *, seed=None, options=None):
            return "old", {}

        def step(self, action):
            return self.answer

    for answer, said in (
        (("new", 1.0, False, {}), "step must return .*got 4 values as in the old Gym API"),
        (("new", 1.0, False, False, None), "the info must be a dict, got NoneType"),
        ((None, 1.0, False, False, {}), "the observation must be str in a Text space, got NoneType"),
    ):
        Wrong.answer = answer
        env = GymnasiumEnv(id="Wrong-v0", make=lambda **_: Wrong())
        env.reset(seed=1)
        with pytest.raises(EnvError, match=said):
            env.step(1)


@pytest.mark.parametrize("key", ["success", "is_success", "won"])
def test_success_is_what_an_env_says_and_no_word(key):
    for said in (True, False, np.bool_(True)):
        env = GymnasiumEnv(id="Pays-v0", make=lambda said=said, **_: Pays(1.0, (True, False), {key: said}))
        env.reset(seed=1)
        assert env.step(1)[4]["success"] is bool(said)
    env = GymnasiumEnv(id="Pays-v0", make=lambda **_: Pays(1.0, (True, False), {key: "False"}))
    env.reset(seed=1)
    with pytest.raises(EnvError, match=f"{key} must be True or False, got 'False'"):
        env.step(1)


# --- reasoning-gym


def test_a_library_that_is_there_and_broken_is_not_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "textworld", raising=False)
    (tmp_path / "textworld.py").write_text("import part_of_textworld_gone\n")
    told = "textworld is installed, but cannot be imported: No module named 'part_of_textworld_gone'"
    with pytest.raises(MissingExtraError, match=told):
        shoal.envs.make("textworld")


def test_no_number_is_no_answer_where_a_number_is_asked_for():
    pytest.importorskip("reasoning_gym")
    env = shoal.envs.make("reasoning_gym", dataset="complex_arithmetic", size=5)
    for answer in ("nan", " NaN ", "-nan", "nan+nanj", "nanj"):
        env.reset(seed=3)
        _, reward, terminated, _, info = env.step(answer)
        assert (reward, terminated, info["success"]) == (0.0, False, False)
    env.reset(seed=3)
    assert env.step(env._item["answer"])[1] == pytest.approx(1.0)


def test_reasoning_gym_scores_its_own_answers_right():
    pytest.importorskip("reasoning_gym")
    env = shoal.envs.make("reasoning_gym", dataset="leg_counting", size=50, max_steps=2)
    check_text_env(lambda: shoal.envs.make("reasoning_gym", dataset="leg_counting", size=50), seeds=range(2))
    questions = set()
    for seed in range(8):
        question, _ = env.reset(seed=seed)
        questions.add(question)
        answer = env._item["answer"]
        assert env.step("wrong")[1:4] == (0.0, False, False)
        _, reward, terminated, _, info = env.step(answer)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert len(questions) > 4


@pytest.mark.parametrize(("key", "setting"), [("seed", "dataset_seed"), ("size", "the setting size")])
def test_a_setting_of_a_dataset_that_the_envs_own_would_hide_is_refused(key, setting):
    with pytest.raises(ConfigError, match=setting):
        shoal.envs.make("reasoning_gym", dataset_config={key: 5})


def test_reasoning_gym_scorers_that_would_run_the_answer_are_refused(capfd):
    pytest.importorskip("reasoning_gym")
    for dataset in ("countdown", "puzzle24", "string_insertion", "n_queens", "composite"):
        with pytest.raises(ConfigError, match="run code"):
            shoal.envs.make("reasoning_gym", dataset=dataset)
    with pytest.raises(UnknownNameError, match="Did you mean 'leg_counting'"):
        shoal.envs.make("reasoning_gym", dataset="leg_count")
    # why: trusted, such a scorer executes the text
    env = shoal.envs.make("reasoning_gym", dataset="string_insertion", size=5, trust_scorer=True)
    env.reset(seed=0)
    env.step('[print("executed")]')
    assert "executed" in capfd.readouterr().out


class _Watch:
    """Sees, while it is on, whether a text with its word in it is evaluated or compiled anywhere in the process."""

    word = "marker_was_run"

    def __init__(self):
        self.on, self.seen = False, False
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if not self.on:
            return
        if event == "exec":
            code = arguments[0]
            self.seen |= any(self.word in str(part) for part in (*code.co_names, *code.co_consts))
        elif event == "compile":
            self.seen |= self.word in str(arguments[0])

    def __call__(self, function, *arguments):
        self.on, self.seen = True, False
        try:
            with contextlib.suppress(Exception):
                function(*arguments)
        finally:
            self.on = False
        return self.seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # some datasets leave files open
def test_no_dataset_that_is_taken_runs_an_answer_and_all_that_do_are_refused():
    library = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from shoal.envs.adapters.reasoning_gym import CHECKED

    watch = _Watch()
    running = set()
    for name in sorted(DATASETS.keys() - {"composite"}):
        dataset = library.create_dataset(name, seed=0, size=1)
        answer = str(dataset[0]["answer"])
        word = watch.word
        tries = [
            word,
            f"[{word}]",
            f"{word} + 1",
            f"{answer} + 0*{word}",
            re.sub(r"[0-9]+", word, answer, count=1),
        ]
        if any([watch(dataset.score_answer, said, dataset[0]) for said in tries]):
            running.add(name)
    assert {"countdown", "n_queens", "simple_integration"} <= running  # the watch sees what there is to see
    assert not running & CHECKED
    assert len(CHECKED & DATASETS.keys()) > 90


def test_a_scorer_that_nobody_checked_is_refused(monkeypatch):
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from shoal.envs.adapters.reasoning_gym import _is_known_safe

    kind, config = DATASETS["leg_counting"]
    monkeypatch.setitem(DATASETS, "brand_new", (kind, config))
    with pytest.raises(ConfigError, match="not among those known"):
        shoal.envs.make("reasoning_gym", dataset="brand_new")

    class Mine(kind):
        def score_answer(self, answer, entry):
            return getattr(__builtins__, "ev" + "al")(answer)

    monkeypatch.setitem(DATASETS, "leg_counting", (Mine, config))
    with pytest.raises(ConfigError, match="not among those known"):
        shoal.envs.make("reasoning_gym", dataset="leg_counting")

    def unreadable(function):
        raise OSError("source not available")

    judge, chain_sum = _is_known_safe.__wrapped__, DATASETS["chain_sum"][0]  # without what it remembers
    assert judge("chain_sum", chain_sum)
    for source in (unreadable, lambda function: "def score_answer(self, answer): return eval(answer)"):
        monkeypatch.setattr("inspect.getsource", source)
        assert not judge("chain_sum", chain_sum)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("prime_factorization", "two × three"), ("boxnet", "[1]"), ("game_of_life", '{"a": 1}')],
)
def test_an_answer_that_a_scorer_fails_on_scores_nothing(dataset, answer):
    pytest.importorskip("reasoning_gym")
    env = shoal.envs.make("reasoning_gym", dataset=dataset, size=3, max_steps=2)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(answer)
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    env.step(answer)


# --- textarena


@pytest.mark.filterwarnings("ignore")
def test_textarena_games_are_played_to_the_end():
    pytest.importorskip("textarena")
    env = shoal.envs.make("textarena", id="GuessTheNumber-v0")
    check_text_env(lambda: shoal.envs.make("textarena", id="FrozenLake-v0", max_steps=6), seeds=range(2))
    observation, _ = env.reset(seed=4)
    low, high, over = 1, 20, False
    while not over:  # by halving, a number from 1 to 20 takes at most five guesses
        guess = (low + high) // 2
        observation, reward, over, _, info = env.step(f"[{guess}]")
        last = observation.rpartition("[Enter")[0] or observation
        low, high = (guess + 1, high) if "higher" in last.split("\n")[-1].lower() else (low, guess - 1)
    assert info["success"]
    assert reward == 1.0
    env.reset(seed=4)
    assert not env.step("no number")[4]["action_is_valid"]


@pytest.mark.filterwarnings("ignore")
def test_textarena_games_that_do_not_start_say_why():
    pytest.importorskip("textarena")
    env = shoal.envs.make("textarena", id="NoSuchGame-v0")
    with pytest.raises(EnvError, match="cannot start 'NoSuchGame-v0'"):
        env.reset(seed=0)


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_that_ends_a_game_and_has_words_for_a_reward_pays_the_penalty():
    pytest.importorskip("textarena")
    env = shoal.envs.make("textarena", id="ThreeCardMonte-v0", invalid_penalty=-0.25)
    env.reset(seed=3)
    assert env.step("no cup")[1:4] == (0.0, False, False)
    _, reward, terminated, _, info = env.step("no cup")
    assert (reward, terminated, info["action_is_valid"], info["success"]) == (-0.25, True, False, False)


@pytest.mark.filterwarnings("ignore")
def test_a_textarena_game_can_be_copied_in_the_middle():
    pytest.importorskip("textarena")
    env = shoal.envs.make("textarena", id="FrozenLake-v0")
    env.reset(seed=3)
    twin = copy.deepcopy(env)
    for action in ("[right]", "[down]"):
        assert twin.step(action) == env.step(action)


# --- textworld


class Adventure:
    """What the adapter asks of TextWorld, without an adventure."""

    __version__ = "9"
    commands: tuple | None = ("go east", "look")
    GameOptions, EnvInfos = types.SimpleNamespace, dict

    def make(self, options):
        Path(options.path).write_text("a game")

    def start(self, path, wanted):
        assert Path(path).is_file()
        said = types.SimpleNamespace(objective="Win.", description="A room.", feedback="Yes.\n\n> _", score=0)
        said.__dict__.update(max_score=2, won=False, admissible_commands=self.commands)
        return types.SimpleNamespace(
            reset=lambda: said, step=lambda command: (said, 1, False), close=lambda: None
        )


@pytest.fixture
def adventure(monkeypatch):
    library = Adventure()
    monkeypatch.setitem(sys.modules, "textworld", library)
    return library


def test_a_textworld_env_is_played_and_can_be_copied_between_episodes(adventure, tmp_path):
    env = shoal.envs.make("textworld", cache=str(tmp_path), num_games=1)
    pickle.loads(pickle.dumps(env))
    assert env.reset(seed=0)[0] == "Win.\n\nA room."
    assert env.available_actions() == ["go east", "look"]
    observation, reward, terminated, truncated, info = env.step("go east")
    assert (observation, reward, terminated, truncated) == ("Win.\n\nYes.", 0.5, False, False)
    assert info["action_is_valid"]
    assert not env.step("fly")[4]["action_is_valid"]


def test_games_are_kept_in_the_users_cache_where_no_folder_is_given(adventure, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shoal.envs.make("textworld", num_games=1).reset(seed=0)
    assert [file.name for file in tmp_path.glob("shoal/textworld/*/game.z8")] == ["game.z8"]


def test_commands_are_valid_where_a_game_does_not_tell_which_are(adventure, tmp_path):
    adventure.commands = None
    env = shoal.envs.make("textworld", cache=str(tmp_path), num_games=1)
    assert env.reset(seed=0)[1]["available_actions"] == ["<command>"]
    assert env.step("go east")[4]["action_is_valid"]


def test_a_textworld_game_that_is_not_whole_any_more_is_made_again(adventure, tmp_path, caplog):
    env = shoal.envs.make("textworld", cache=str(tmp_path), num_games=1)
    env.reset(seed=0)
    (folder,) = tmp_path.iterdir()
    made = (folder / "game.z8").stat().st_ino
    env.reset(seed=1)
    assert (folder / "game.z8").stat().st_ino == made
    assert not [record for record in caplog.records if record.name.startswith("shoal.")]
    for harm in (
        lambda: (folder / "game.z8").write_text("a"),
        lambda: (folder / "game.z8").rename(folder / "moved.z8"),
        lambda: (folder / "manifest.json").unlink(),  # as an earlier shoal left it
    ):
        harm()
        caplog.clear()
        env.reset(seed=0)
        assert "generating a game again" in caplog.text
        assert (folder / "game.z8").read_text() == "a game"
        assert [*tmp_path.iterdir()] == [folder]


def test_an_archive_of_words_that_is_not_whole_is_told_by_textarenas_env(tmp_path, monkeypatch):
    pytest.importorskip("textarena")
    nltk = pytest.importorskip("nltk")
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "words.zip").write_bytes(b"PK half")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    env = shoal.envs.make("textarena", id="Wordle-v0")
    with pytest.raises(EnvError, match="textarena cannot start 'Wordle-v0' for one player: BadZipFile"):
        env.reset(seed=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_textworld_games_are_generated_kept_and_won(tmp_path):
    pytest.importorskip("textworld")
    settings_of = {"cache": str(tmp_path), "num_games": 1, "nb_rooms": 2, "quest_length": 2}
    env = shoal.envs.make("textworld", **settings_of)
    check_text_env(lambda: shoal.envs.make("textworld", **settings_of, max_steps=5), seeds=range(2))
    assert len(list(tmp_path.iterdir())) == 1
    env.reset(seed=0)
    import textworld

    game = textworld.Game.load(str(next(tmp_path.glob("*/game.json"))))
    for command in game.metadata["walkthrough"]:
        assert command in env.available_actions()
        _, _, terminated, _, info = env.step(command)
    assert terminated
    assert info["success"]


# --- the OpenEnv convention, between two ends of our own; foreign ends below


def start_server(make=lambda: shoal.envs.make("sokoban", max_steps=12)):
    from shoal.envs.adapters.openenv_server import serve

    ready = queue.Queue()

    def run():
        serve("sokoban", make, port=0, on_ready=ready.put)

    threading.Thread(target=run, daemon=True).start()
    return ready.get(timeout=200)


@pytest.fixture(scope="module")
def port():
    return start_server()


def test_an_env_behind_a_server_plays_the_same_episodes(port):
    def remote():
        return shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}", max_steps=12)

    check_text_env(remote, seeds=range(2))
    env, local = remote(), shoal.envs.make("sokoban", max_steps=12)
    choose = random.Random(0)
    for seed in range(5):
        text, info = env.reset(seed=seed)
        expected, expected_info = local.reset(seed=seed)
        over = False
        while not over:
            assert text == expected
            assert info["available_actions"] == expected_info["available_actions"]
            word = choose.choice([*local.projection.words(), "jump"])
            text, *mine, info = env.step(word)
            action = local.projection.action_of(word)
            expected, *theirs, expected_info = local.step(0 if action is None else action)
            assert mine == theirs
            for key in ("success", "action_is_valid", "action_is_effective", "step", "seed"):
                assert info[key] == expected_info[key]
            over = mine[1] or mine[2]
    assert env.instructions == local.instructions
    env.close()


def test_talking_to_a_server_leaves_no_thread_and_global_random_alone(port):
    # websockets' own pings draw from the global generator, in a thread, at any moment
    def threads():  # without those in which the server, in this process too, steps its envs
        return {thread for thread in threading.enumerate() if thread.name != "shoal-session"}

    before, state = threads(), random.getstate()
    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}")
    env.reset(seed=1)
    assert not [thread for thread in threading.enumerate() if "keepalive" in thread.name]
    env.close()
    assert random.getstate() == state
    assert threads() <= before


def post(port, path, body, headers=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_the_server_answers_plain_http_and_refuses_nonsense(port):
    start = post(port, "/reset", b'{"seed": 3}')
    assert start["observation"]["text"] == shoal.envs.make("sokoban").reset(seed=3)[0]
    step = post(port, "/step", b'{"action": {"text": "<action>up</action>"}}')
    assert step["reward"] == -0.1
    assert not step["done"]
    for body in (b"[]", b"{", b'{"seed": -1}', b'{"seed": true}', b"[" * 100_000):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(port, "/reset", body)
        assert refusal.value.code == 422
        refusal.value.close()


def test_the_server_talks_only_to_programs_of_this_machine(port):
    for headers in ({"Host": "evil.example"},):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(port, "/reset", b"{}", headers)
        assert refusal.value.code == 400
        refusal.value.close()
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus):
        connect(f"ws://127.0.0.1:{port}/ws", origin="http://evil.example", proxy=None)


ORIGINS = [
    "http://evil.example",
    "http://evil.example:8000",
    "null",
    "http://[::1",
    "http://127.0.0.1.evil.example",
    "x",
]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("path", ["/reset", "/step", "/state", "/metadata"])
def test_pages_of_other_sites_are_refused_whatever_they_ask(port, origin, path):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        b"{}" if path in ("/reset", "/step") else None,
        {"content-type": "text/plain", "origin": origin},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.code == 403
    assert "this machine" in json.load(refusal.value)["detail"]
    refusal.value.close()


def test_a_refused_request_does_not_reach_the_env(port):
    post(port, "/reset", b'{"seed": 3}')
    post(port, "/step", b'{"action": "up"}')
    with pytest.raises(urllib.error.HTTPError) as refusal:
        post(port, "/reset", b"{}", {"origin": "http://evil.example"})
    refusal.value.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=60) as response:
        assert json.load(response)["step_count"] == 1


@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "http://127.0.0.1"])
def test_programs_and_pages_of_this_machine_may_play(port, origin):
    headers = {"origin": origin} if origin else {}
    assert "text" in post(port, "/reset", b'{"seed": 3}', headers)["observation"]
    json_with_charset = {"content-type": "application/json; charset=utf-8", **headers}
    assert "text" in post(port, "/reset", b"{}", json_with_charset)["observation"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_foreign_page_gets_no_session_and_no_traceback(port, origin, caplog):
    raw, answer = handshake(port, f"Origin: {origin}\r\n")
    raw.close()
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def handshake(port, headers=""):
    """A socket after a WebSocket's handshake, and what came back first."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=60)
    raw.sendall(
        f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{headers}"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    return raw, raw.recv(4096)


def test_sessions_are_bounded_and_given_back(monkeypatch):
    from websockets.sync.client import connect

    monkeypatch.setattr("shoal.envs.adapters.openenv_server.MAX_SESSIONS", 3)
    url = f"ws://127.0.0.1:{start_server()}/ws"
    with contextlib.ExitStack() as open_ones:
        for _ in range(3):
            open_ones.enter_context(connect(url, proxy=None))
        with connect(url, proxy=None) as one_too_many:
            assert json.loads(one_too_many.recv(timeout=60))["data"]["code"] == "CAPACITY_REACHED"
    for _ in range(200):  # the server notices the goodbye a moment later
        with connect(url, proxy=None) as next_one:
            next_one.send('{"type": "reset", "data": {"seed": 1}}')
            answer = json.loads(next_one.recv(timeout=60))
        if answer["type"] == "observation":
            break
    assert answer["type"] == "observation"


class OfOneThread(BanditEnv):
    """Holds what may only be used in the thread that opened it."""

    def __init__(self):
        super().__init__()
        self.database = sqlite3.connect(":memory:")

    def _start(self, rng):
        self.database.execute("select 1")
        super()._start(rng)

    def close(self):
        self.database.close()  # raises in another thread
        super().close()


def test_a_served_env_is_made_stepped_and_closed_in_one_thread(caplog):
    ended = queue.Queue()

    class Watched(OfOneThread):
        def close(self):
            super().close()
            ended.put(self)

    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{start_server(Watched)}")
    ended.get(timeout=60)  # the one that the server tried first
    env.reset(seed=1)
    assert env.step("1")[1] >= 0
    env.close()
    ended.get(timeout=60)
    assert not [record for record in caplog.records if record.name.startswith("shoal.")]


def test_envs_that_hang_keep_no_other_session_from_playing():
    from websockets.sync.client import connect

    free = threading.Event()

    class Waiting(BanditEnv):
        def _start(self, rng):
            if self._seed:
                free.wait()
            super()._start(rng)

    port = start_server(Waiting)
    with contextlib.ExitStack() as hanging:
        hanging.callback(free.set)  # before they are closed
        for _ in range(40):  # more than there are threads in a pool of asyncio's
            line = hanging.enter_context(connect(f"ws://127.0.0.1:{port}/ws", proxy=None))
            hanging.callback(free.set)
            line.send('{"type": "reset", "data": {"seed": 1}}')
        env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}", answer_seconds=100.0)
        assert env.reset(seed=0)[1]["seed"] == 0
        env.close()


def test_a_constructor_that_fails_on_a_server_is_told_to_who_plays(caplog):
    made = []

    def make():
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("no more of them")
        return BanditEnv()

    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{start_server(make)}")
    with pytest.raises(EnvError, match="RuntimeError: no more of them"):
        env.reset(seed=0)
    env.close()


@pytest.mark.parametrize("error", [StopIteration("done"), SystemExit(3)])
def test_whatever_a_served_env_raises_is_an_answer(error):
    class Raising(BanditEnv):
        def _advance(self, action):
            raise error

    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{start_server(Raising)}", answer_seconds=100.0)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=f"{type(error).__name__}: {error}"):
        env.step("1")
    assert env.reset(seed=1)[1]["step"] == 0
    env.close()


SERVED = """
import threading
from shoal.envs.adapters.openenv_server import serve
from shoal.envs.bandit import BanditEnv

class Hanging(BanditEnv):
    def _start(self, rng):
        print("hangs", flush=True)
        threading.Event().wait()

serve("bandit", Hanging, port=0, on_ready=lambda port: print(port, flush=True))
"""


def test_a_server_whose_env_hangs_ends_on_an_interrupt():
    from websockets.sync.client import connect

    server = subprocess.Popen(
        [sys.executable, "-c", SERVED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with (
        server,
        contextlib.suppress(OSError),
        connect(f"ws://127.0.0.1:{int(server.stdout.readline())}/ws", proxy=None) as line,
    ):
        try:
            line.send('{"type": "reset"}')
            assert server.stdout.readline() == "hangs\n"
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)  # TimeoutExpired where it does not end
        finally:
            server.kill()


def test_a_session_survives_broken_messages(port):
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket:
        for message in ("", "[1]", "{", '{"type": "dance"}', '{"type": "step", "data": {}}'):
            socket.send(message)
            assert json.loads(socket.recv(timeout=60))["type"] == "error"
        socket.send('{"type": "step", "data": {"action": "up"}}')
        assert "never started" in json.loads(socket.recv(timeout=60))["data"]["message"]
        socket.send('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads(socket.recv(timeout=60))["type"] == "observation"


def test_what_an_env_raises_on_a_server_is_told_to_who_plays_it_and_logged(caplog):
    import asyncio

    from starlette.websockets import WebSocketDisconnect

    from shoal.envs.adapters.openenv_server import Session, _converse

    class Failing(BanditEnv):
        def _advance(self, action):
            raise KeyError("arm 7")

    class Socket:
        def __init__(self):
            self.asked = ['{"type": "reset", "data": {"seed": 1}}', '{"type": "step", "data": {"action": 1}}']
            self.told = []

        async def receive_text(self):
            if not self.asked:
                raise WebSocketDisconnect
            return self.asked.pop(0)

        async def send_text(self, text):
            self.told.append(json.loads(text))

    line = Socket()
    asyncio.run(_converse(line, Session(Failing)))
    assert [answer["type"] for answer in line.told] == ["observation", "error"]
    assert line.told[1]["data"]["message"] == "KeyError: 'arm 7'"
    assert "an env that is served failed" in caplog.text


def test_a_server_that_is_not_there_is_an_env_error():
    env = shoal.envs.make("openenv", url="http://127.0.0.1:9")
    with pytest.raises(EnvError, match="did not answer a reset"):
        env.reset(seed=0)
    with pytest.raises(ConfigError, match="url must be like"):
        shoal.envs.make("openenv", url="ftp://x")


class Line:
    """A connection to a server that gives these answers, and then is gone."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def send(self, message):
        pass

    def recv(self, timeout):
        if not self.answers:
            raise ConnectionResetError("gone")
        return json.dumps({"type": "observation", "data": self.answers.pop(0)})


def answered(monkeypatch, **data):
    """An env in an episode whose server gives this answer to the first step."""
    line = Line({"observation": {"text": "hello"}}, {"observation": {"text": "you"}, **data})
    monkeypatch.setattr("shoal.envs.adapters.openenv.OpenEnvEnv._connect", lambda env: line)
    env = shoal.envs.make("openenv", url="http://127.0.0.1:9")
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    "data",
    [{"reward": "1"}, {"reward": float("nan")}, {"reward": 10**400}, {"reward": [1]}, {"done": "false"}],
)
def test_an_answer_that_is_no_reward_or_end_is_an_env_error(monkeypatch, data):
    with pytest.raises(EnvError, match="a number as reward and true or false as done"):
        answered(monkeypatch, **data).step("x")


def test_words_of_a_server_do_not_count_as_success_or_end(monkeypatch):
    said = {
        "text": "",
        "success": "false",
        "truncated": "no",
        "action_is_valid": None,
        "action_is_effective": 0,
    }
    _, reward, terminated, truncated, info = answered(monkeypatch, observation=said, done=True).step("x")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["success"], info["action_is_valid"], info["action_is_effective"]) == (False, True, True)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://localhost:abc", "http://localhost:99999", "http://:80", "x"]
)
def test_an_address_that_is_none_is_refused_before_anybody_plays(url):
    with pytest.raises(ConfigError, match="url must be like"):
        shoal.envs.make("openenv", url=url)


def test_what_an_address_asks_for_reaches_the_server(monkeypatch):
    asked = []

    def connect(url, **settings):
        asked.append(url)
        raise OSError("nobody there")

    monkeypatch.setattr("websockets.sync.client.connect", connect)
    with pytest.raises(EnvError, match="nobody there"):
        shoal.envs.make("openenv", url="https://example.org/shop?token=7").reset(seed=0)
    assert asked == ["wss://example.org/shop/ws?token=7"]


def test_a_step_after_close_plays_no_other_episode(monkeypatch):
    env = answered(monkeypatch)
    env.close()
    with pytest.raises(EnvError, match=r"reset\(\) first"):
        env.step("x")


def test_an_answer_that_is_too_deep_to_be_read_is_an_env_error(monkeypatch):
    env = answered(monkeypatch)
    monkeypatch.setattr(Line, "recv", lambda line, timeout: "[" * 100_000)
    with pytest.raises(EnvError, match="did not answer a step: maximum recursion depth"):
        env.step("x")


def test_an_episode_whose_server_is_gone_is_over(monkeypatch):
    env = answered(monkeypatch)
    env.step("x")
    with pytest.raises(EnvError, match="did not answer a step: gone"):
        env.step("x")
    with pytest.raises(EnvError, match=r"reset\(\) first"):  # the server would know nothing of it
        env.step("x")


@pytest.mark.filterwarnings("ignore")
def test_openenvs_own_client_plays_on_our_server(port):
    client = pytest.importorskip("openenv.core.generic_client")
    import asyncio

    async def play():
        async with client.GenericEnvClient(base_url=f"http://127.0.0.1:{port}") as remote:
            start = await remote.reset(seed=5)
            step = await remote.step({"action": "Left"})
            return start, step, await remote.state()

    start, step, state = asyncio.run(play())
    local = shoal.envs.make("sokoban")
    assert start.observation["text"] == local.reset(seed=5)[0]
    assert step.observation["text"] == local.step(3)[0]
    assert state["step_count"] == 1


@pytest.mark.filterwarnings("ignore")
def test_our_client_plays_on_openenvs_own_server():
    server = pytest.importorskip("openenv.core.env_server")
    import uvicorn

    class Said(server.Action):
        message: str

    class Heard(server.Observation):
        echo: str = ""

    class Echo(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **more):
            self.turns = 0
            return Heard(echo=f"hello {seed}")

        def step(self, action, timeout_s=None, **more):
            self.turns += 1
            return Heard(echo=action.message, reward=float(len(action.message)), done=self.turns == 2)

        @property
        def state(self):
            return server.State(step_count=self.turns)

    app = server.create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning"))
    threading.Thread(target=running.run, daemon=True).start()
    while not running.started:
        pass
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    env = shoal.envs.make(
        "openenv", url=url, action_field="message", observation_field="echo", success_reward=4
    )
    assert env.reset(seed=7)[0] == "hello 7"
    assert env.step("hi")[:3] == ("hi", 2.0, False)
    assert env.step('{"message": "json"}')[:3] == ("json", 4.0, True)
    wrong = shoal.envs.make("openenv", url=url)
    wrong.reset(seed=1)
    with pytest.raises(EnvError, match="VALIDATION_ERROR"):
        wrong.step("x")
    running.should_exit = True
