import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete, Text
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import envs
from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.rollout.compat.managers import (
    MANAGERS,
    TEMPLATES,
    EnvironmentManager,
    make_manager,
    multi_turn_loop,
    template_of,
)
from shoal.rollout.compat.projections import create_projection_function
from shoal.rollout.images import PREFIX, picture_url, png_bytes
from shoal.samplers.sampler import Sampling
from shoal.samplers.scripted import RandomEngine, ScriptedEngine
from shoal.samplers.servers.dialects import as_url
from shoal.vector import MultiProcessEnvironmentContainer

LAKE = {"desc": "4x4", "is_slippery": False, "max_steps": 9}
WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


def lake(env_num=2, group_n=2, env_kwargs=LAKE, **settings):
    return make_manager("frozen_lake", env_num, group_n, 3, env_kwargs, backend="serial", **settings)


def say(word):
    return f"<think>hm</think><action>{word}</action>"


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_every_manager_plays_its_env_as_the_env_alone_would(backend):
    for name in MANAGERS:
        with make_manager(name, 2, 1, 4, {}, backend=backend, prompt={"history": 0}) as manager:
            observations, infos = manager.reset()
            alone = [envs.make(name) for _ in range(2)]
            for i, env in enumerate(alone):
                observation, info = env.reset(seed=derive_seed(4, "env", 0, i))
                assert observation in observations["text"][i]
                assert env.instructions in observations["text"][i]
                assert infos[i] == info
                assert observations["anchor"][i] == env.anchor()
            texts = [say(env.available_actions()[0]) for env in alone]
            texts[1] = "nothing usable"
            observations, rewards, dones, infos = manager.step(texts)
            for i, env in enumerate(alone):
                projected = create_projection_function(name)([texts[i]])[0][0]
                observation, reward, terminated, truncated, info = env.step(projected)
                assert (rewards[i], dones[i]) == (reward, terminated or truncated)
                assert observation in observations["text"][i]
                assert infos[i]["success"] == info["success"]
            assert not infos[1]["is_action_valid"]
            assert rewards.dtype == np.float64
            assert dones.dtype == np.bool_


def test_a_manager_is_made_from_container_projection_and_name():
    container = MultiProcessEnvironmentContainer("frozen_lake", 1, 2, 0, LAKE, backend="serial")
    manager = shoal.FrozenLakeEnvironmentManager(
        container, create_projection_function("frozen_lake"), "frozen_lake"
    )
    observations, _ = manager.reset()
    assert "P___" in observations["text"][0]
    assert manager.get_available_actions() == [["Left", "Down", "Right", "Up"]] * 2
    assert observations["image"] is None


def test_the_known_way_is_walked_and_counted_as_success():
    manager = lake()
    manager.reset()
    total = []
    for word in WAY:
        _, rewards, dones, infos = manager.step([say(word)] * 3 + [say("Left")])
        total.append(infos)
    assert rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert dones.tolist() == [True, True, True, False]
    by_env = list(zip(*total, strict=True))
    assert manager.success_evaluator(total_infos=by_env)["success_rate"].tolist() == [1, 1, 1, 0]
    masks = [[{"active_masks": step < 5} for step in range(6)]] * 4
    counted = manager.success_evaluator(total_infos=by_env, total_batch_list=masks)
    assert counted["success_rate"].tolist() == [0, 0, 0, 0]  # the step that succeeded is masked out


def test_episodes_that_are_over_ignore_what_is_said():
    manager = lake(1, 2)
    manager.reset()
    for word in WAY:
        manager.step([say(word), None])
    observations, rewards, dones, infos = manager.step([say("Left"), say("Down")])
    assert rewards.tolist() == [0.0, 0.0]
    assert dones.tolist() == [True, False]
    assert [info["is_active"] for info in infos] == [False, True]
    assert infos[0]["success"]
    assert "P" in observations["text"][1].split("The lake now")[1]


def test_what_the_env_does_not_offer_is_invalid_and_costs_a_step():
    manager = make_manager("webshop", 1, 1, 0, backend="serial")
    observations, _ = manager.reset()
    assert "search[<your query>]" in observations["text"][0]
    _, _, _, infos = manager.step([say("click[buy now]")])
    assert not infos[0]["is_action_valid"]
    assert infos[0]["step"] == 1
    observations, _, _, infos = manager.step([say("search[red shoes]")])
    assert infos[0]["is_action_valid"]
    assert "click[" in observations["text"][0]


def test_a_projection_of_one_argument_will_do():
    container = MultiProcessEnvironmentContainer("frozen_lake", 1, 2, 0, LAKE, backend="serial")
    manager = EnvironmentManager(container, lambda texts: ([2] * len(texts), [1] * len(texts)))
    manager.reset()
    _, _, _, infos = manager.step(["x", "y"])
    assert [info["is_action_valid"] for info in infos] == [True, True]


def test_one_text_is_not_the_responses_of_all():
    manager = lake(1, 3)
    with pytest.raises(ValueError, match=r"expected 0 responses after reset\(\), got 3"):
        manager.step(["a", "b", "c"])
    manager.reset()
    with pytest.raises(ValueError, match="expected 3 responses.*got one text"):
        manager.step("abc")


def test_pictures_are_carried_beside_or_instead_of_text():
    beside = lake(1, 1, {**LAKE, "render_mode": "rgb_array"})
    observations, _ = beside.reset()
    assert observations["image"][0].shape == (96, 96, 3)
    assert "P___" in observations["text"][0]
    instead = lake(1, 2, {**LAKE, "observation": "rgb"})
    observations, _ = instead.reset()
    assert "<image>" in observations["text"][0]
    assert observations["image"][0].dtype == np.uint8
    assert observations["anchor"][0] == observations["anchor"][1] != ""
    moved, *_ = instead.step([say("Down"), say("Left")])
    assert moved["anchor"][0] != moved["anchor"][1] == observations["anchor"][0]


def test_the_loop_over_a_manager_gives_whole_episodes():
    words = ["Left", "Down", "Right", "Up"]
    runs = []
    for backend in ("serial", "process"):
        with make_manager("frozen_lake", 2, 3, 5, {"size": 3}, backend=backend) as manager:
            runs.append(
                [multi_turn_loop(manager, RandomEngine(words), Sampling(8), max_turns=4) for _ in "ab"]
            )
    assert runs[0] == runs[1]
    first, second = runs[0]
    assert [(t.iteration, t.group, t.member) for t in first] == [(0, g, m) for g in (0, 1) for m in range(3)]
    assert {t.iteration for t in second} == {1}
    assert {t.env_seed for t in first}.isdisjoint(t.env_seed for t in second)
    assert all(t.terminated or len(t.turns) == 4 for t in first)


def test_the_loop_tells_a_projection_what_each_env_accepts_as_steps_do():
    told = []

    def projection(texts, action_spaces):
        told.append(action_spaces)
        return [1] * len(texts), [True] * len(texts)

    container = MultiProcessEnvironmentContainer("frozen_lake", 1, 2, 0, LAKE, backend="serial")
    manager = EnvironmentManager(container, projection, "frozen_lake")
    played = multi_turn_loop(manager, RandomEngine(["Left"]), Sampling(8), max_turns=1)
    assert [t.status for t in played] == ["ok", "ok"]
    assert told == [[["Left", "Down", "Right", "Up"]]] * 2
    with pytest.raises(ValueError, match="max_turns must be at least 1, or None, got 0"):
        multi_turn_loop(manager, RandomEngine(["Left"]), max_turns=0)
    arms = make_manager("bandit", 8, 2, 0, backend="serial")
    by_name = multi_turn_loop(arms, ScriptedEngine(lambda prompt, key: say("dragon")), Sampling(99))
    assert all(t.success for t in by_name)
    assert {t.turns[0].action for t in by_name} == {"1", "2"}, "the better arm is not always the same"


class Counts(gymnasium.Env):
    """A plain environment of text: it has no config, words or instructions."""

    observation_space, action_space = Text(9), Discrete(9)

    def reset(self, *, seed=None, options=None):
        self.sum = 0
        return "0", {}

    def step(self, action):
        self.sum += int(action)
        return str(self.sum), float(action), False, False, {"won": self.sum >= 6}


def test_the_loop_plays_environments_that_know_nothing_of_shoal():
    container = MultiProcessEnvironmentContainer(Counts, 1, 2, 0, backend="serial")
    manager = EnvironmentManager(
        container, lambda texts: ([len(text) for text in texts], [True] * len(texts))
    )
    engine = ScriptedEngine(lambda prompt, key: "ab")
    with pytest.raises(ConfigError, match="no max_steps of their own: give max_turns"):
        multi_turn_loop(manager, engine)
    played = multi_turn_loop(manager, engine, max_turns=3)
    assert [[turn.observation for turn in t.turns] for t in played] == [["0", "2", "4"]] * 2
    assert all(t.truncated and t.reward == 6.0 for t in played)
    assert all(t.success for t in played), "as success_evaluator reads what the env says"


def test_templates_are_data_that_settings_replace():
    assert set(TEMPLATES) == set(MANAGERS)
    changed = template_of("sokoban", {"first": "{observation}!", "history": 1})
    assert (changed.first, changed.history) == ("{observation}!", 1)
    assert changed.later == template_of("sokoban").later
    with pytest.raises(ConfigError, match="unknown key 'prompt.frist'"):
        template_of("sokoban", {"frist": "x"})
    with pytest.raises(ConfigError, match="must be window"):
        lake(prompt={"mode": "append"})


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_picture_survives_as_a_png(rows, columns, seed):
    image = pytest.importorskip("PIL.Image")
    array = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    url = picture_url(array)
    assert url.startswith(PREFIX)
    read = image.open(io.BytesIO(base64.b64decode(url.removeprefix(PREFIX))))
    assert np.array_equal(np.asarray(read), array)


def test_a_file_becomes_a_data_url_and_other_arrays_are_refused(tmp_path):
    array = np.zeros((2, 2, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(png_bytes(array))
    assert as_url(str(tmp_path / "a.png")) == picture_url(array)
    (tmp_path / "b.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="neither a PNG nor a JPEG"):
        as_url(str(tmp_path / "b.png"))
    with pytest.raises(ValueError, match=r"must be \[rows, columns, 3\] uint8.*float64"):
        picture_url(np.zeros((2, 2, 3)))


class Unhurried(FrozenLakeEnv):
    """Lets other threads go on in the middle of a step."""

    def _advance(self, action):
        time.sleep(1e-3)
        return super()._advance(action)


def test_loops_and_steps_of_several_threads_over_one_manager_are_played_one_after_another():
    envs.register("test_unhurried", Unhurried, replace=True)

    def play(threads):
        with make_manager("test_unhurried", 2, 2, 3, LAKE | {"max_steps": 40}, backend="serial") as manager:
            engine = RandomEngine(["Up", "Down", "Left", "Right"])
            with ThreadPoolExecutor(threads) as pool:
                loops = list(pool.map(lambda _: multi_turn_loop(manager, engine, Sampling(8)), range(3)))
                manager.reset()
                list(pool.map(lambda _: manager.step([say("Up")] * 4), range(30)))
            loops.sort(key=lambda loop: loop[0].iteration)
            return loops, manager.step([say("Up")] * 4), manager.reset()

    (loops, *steps), (in_turn, *expected) = play(3), play(1)
    assert loops == in_turn
    np.testing.assert_equal(steps, expected)
