"""Other people's environments through their adapters, each really played."""

import contextlib
import copy
import pickle
import random
import re
import sys
import time
import types
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
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
from shoal.testing import check_text_env

GYMNASIUM = ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1", "Taxi-v4"]


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
    """Tells what it was asked."""

    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.options = options
        return np.zeros(2, np.float32), {}


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
    Old.action_space = spaces.Discrete(2_000_000)
    with pytest.raises(ConfigError, match="Old has 2000000 actions; text can offer 65536"):
        make()


def test_options_of_a_reset_reach_the_env_inside():
    env = GymnasiumEnv(id="Told-v0", make=Told)
    env.reset(seed=1, options={"low": 0.5})
    assert env.inner.options == {"low": 0.5}
    env.reset(seed=1)
    assert env.inner.options is None


class Answers(Told):
    """Gives this answer to a step."""

    def __init__(self, *answer):
        self.answer = (np.zeros(2, np.float32), *answer)

    def step(self, action):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (("1.5", False, False, {}), "the reward must be a number, got "),
        ((1.0, "False", False, {}), "terminated must be True or False, got "),
        ((1.0, True, False, {"is_success": "False"}), "is_success must be True or False, got 'False'"),
        ((1.0, False, {}), "step must return .*got 4 values as in the old Gym API"),
        ((1.0, False, False, None), "the info must be a dict, got NoneType"),
    ],
)
def test_an_answer_that_is_none_of_gymnasiums_names_what_is_wrong(answer, problem):
    env = GymnasiumEnv(id="Answers-v0", make=lambda **_: Answers(*answer))
    env.reset(seed=1)
    with pytest.raises(EnvError, match=problem):
        env.step(1)


@pytest.mark.parametrize(("key", "said"), [("success", True), ("is_success", np.bool_(True)), ("won", False)])
def test_success_is_what_an_env_says_and_the_reward_any_number(key, said):
    env = GymnasiumEnv(id="Answers-v0", make=lambda **_: Answers(np.array([2.0]), True, False, {key: said}))
    env.reset(seed=1)
    _, reward, *_, info = env.step(1)
    assert (reward, info["success"]) == (2.0, bool(said))


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
        assert (reward, terminated, info["success"]) == (0.0, True, False)
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
        env.reset(seed=seed)
        env.step("wrong")
        assert env.step("wrong again")[1:4] == (0.0, True, False)  # the attempts are used up
        env.reset(seed=seed)
        env.step("")
        assert env.step("")[2:4] == (False, True)  # no answer is none
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


class Words(gymnasium.Space):
    """Text in a space of one's own, as MiniGrid's missions are."""

    def __init__(self, *words):
        super().__init__(shape=(), dtype=str)
        self.words = words

    def contains(self, x):
        return x in self.words if self.words else isinstance(x, str)


class Polite(gymnasium.Env):
    """Asks for a word."""

    observation_space = spaces.Dict({"mission": Words(), "left": spaces.Discrete(5)})
    action_space = Words("yes", "please, yes")

    def reset(self, *, seed=None, options=None):
        return {"mission": "Say yes, please.", "left": 3}, {}

    def step(self, action):
        assert action in self.action_space
        return {"mission": "Thank you.", "left": 2}, 1.0, True, False, {}


class Reporting(Polite):
    """Reports numbers, arrays, a time, and keys that mean something to shoal."""

    action_space = spaces.Discrete(2)

    def _report(self):
        mask = np.array([1, 0], np.int8)
        return {
            "progress": 0.5,
            "action_mask": mask,
            "at": time.time(),
            "step": 99,
            "image": "none",
            "text": "no",
        }

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self._report()

    def step(self, action):
        return {"mission": "Thank you.", "left": 2}, 1.0, False, False, self._report()


def test_the_infos_of_an_env_inside_are_passed_on_beside_those_of_every_text_env():
    env = shoal.envs.make(f"{__name__}:Reporting")
    infos = [env.reset(seed=0)[1], env.step(1)[4]]
    for k, info in enumerate(infos):
        assert (info["progress"], info["action_mask"].tolist(), info["step"]) == (0.5, [1, 0], k)
        assert not {"image", "text", "anchor"} & info.keys()
        assert info["available_actions"] == ["0"], "what the mask allows"
    assert "progress" not in env.step(0)[4]  # which did not reach it
    check_text_env(lambda: shoal.envs.make(f"{__name__}:Reporting"), seeds=range(2))


def test_a_space_of_strings_of_ones_own_is_text():
    env = shoal.envs.make(f"{__name__}:Polite")
    assert env.reset(seed=0)[0] == "left: 3\nmission: Say yes, please."
    assert env.available_actions() == ["<text>"]
    assert not env.projection("<action>no</action>").valid
    (action,) = env.projection("<action>please, yes</action>").actions
    assert env.step(action)[:3] == ("left: 2\nmission: Thank you.", 1.0, True)


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
        self.heard = []

        def step(command):
            self.heard.append(command)
            return said, 1, False

        return types.SimpleNamespace(reset=lambda: said, step=step, close=lambda: None)


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
    env = shoal.envs.make("textworld", num_games=1)
    env.reset(seed=0)
    [game] = tmp_path.glob("shoal/textworld/*/game.z8")
    made = game.stat().st_ino
    env.reset(seed=1)
    assert game.stat().st_ino == made


OF_THE_INTERPRETER = (
    "save restore restart undo quit q script unscript noscript transcript recording record replay restoring "
    "tw-print tw-trace-actions tw-extra-infos"
).split()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    word=st.sampled_from(OF_THE_INTERPRETER),
    before=st.sampled_from(
        ["", "look. ", "look.", "look\n", "look then ", "take key and ", "bob, ", "\\", ">", "#", "* ", '"']
    ),
    after=st.sampled_from(["", " on", ".", "!", " now", "\n", ". look", " then look", "\\R file", "\x00"]),
    case=st.sampled_from([str, str.upper, str.title]),
    listed=st.booleans(),
)
def test_commands_of_the_interpreter_never_reach_it(adventure, tmp_path, word, before, after, case, listed):
    adventure.commands = ("go east", "look") if listed else None
    env = shoal.envs.make("textworld", cache=str(tmp_path), num_games=1, invalid_penalty=-0.25)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(before + case(word) + after)
    assert adventure.heard == []
    assert (reward, terminated, truncated, info["action_is_valid"]) == (-0.25, False, False, False)
    assert "interpreter" in observation
    assert (info["step"], info["action_is_effective"]) == (1, False)


@pytest.mark.parametrize(
    ("listed", "command", "valid"),
    [
        *((("look",), said, False) for said in ("n", "put the half-eaten apple on bob's table", "go then look")),
        (("take the record of mr. x", "look"), "take the record of mr. x", True),
        (None, "go east", True),
    ],
)  # fmt: skip
def test_plain_commands_reach_the_game_and_are_valid_where_it_lists_them_or_none(
    adventure, tmp_path, listed, command, valid
):
    adventure.commands = listed
    env = shoal.envs.make("textworld", cache=str(tmp_path), num_games=1)
    assert env.reset(seed=0)[1]["available_actions"] == list(listed or ["<command>"])
    assert env.step(f"  {command}\n")[4]["action_is_valid"] is valid
    assert adventure.heard == [command]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_textworld_episodes_share_no_state_and_write_no_file(tmp_path, monkeypatch):
    pytest.importorskip("textworld")
    settings_of = {"cache": str(tmp_path / "games"), "num_games": 1, "nb_rooms": 2, "quest_length": 2}
    first, other = (shoal.envs.make("textworld", **settings_of) for _ in range(2))
    begins = first.reset(seed=0)[1]["available_actions"]
    other.reset(seed=0)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first.step(next(command for command in begins if command.startswith(("go", "open", "take"))))
    for command in ("save", "save\nmine", "look. save", "script", "look then script", "\\Rmine"):
        assert not first.step(command)[4]["action_is_valid"]
    for command in ("restore", "restore\nmine", "look. restore", "undo", "restart"):
        _, reward, _, _, info = other.step(command)
        assert (reward, info["available_actions"]) == (0.0, begins)
    assert list((tmp_path / "here").iterdir()) == []


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
