"""Envs and task datasets of aviary through their adapter."""

import importlib
import sys

import pytest

import shoal.envs
from shoal import ParallelRolloutManager
from shoal.core.data import encode_trajectory
from shoal.core.errors import ConfigError, MissingExtraError
from shoal.envs.actions import ToolCall
from shoal.samplers.scripted import ScriptedEngine
from shoal.testing import check_text_env

HERE = "tests.envs.aviary_like"


@pytest.fixture(autouse=True)
def like():
    """The module of envs; where aviary is not installed, its stand-in is there for this test."""
    module = importlib.import_module(HERE)
    sys.modules.update(module.STAND_IN)
    yield module
    for name in module.STAND_IN:
        del sys.modules[name]


def make(name="Sums", **settings):
    return shoal.envs.make("aviary", id=f"{HERE}:{name}", **settings)


def add(number):
    return ToolCall("add", {"number": number})


def test_an_env_of_aviary_keeps_the_promises_and_closes_what_it_opened(like):
    check_text_env(make, seeds=range(4))
    assert like.Sums.open_ones == 0


def test_calls_of_a_step_go_to_the_env_together_and_each_gets_its_result():
    env = make(kwargs={"most": 12, "least": 12})
    seen, info = env.reset(seed=0)
    assert seen == "Rules.\n\nReach 12."
    [tool] = info["tools"]
    assert (tool["name"], tool["parameters"]["required"]) == ("add", ["number"])
    _, reward, over, _, info = env.step([add(4), add(5)])
    assert (reward, over) == (0.0, False)
    assert info["tool_results"] == ["the sum is 4", "the sum is 9\n3 to go"]  # whatever order they came in
    _, reward, over, cut, info = env.step(add(3))
    assert (reward, over, cut, info["success"]) == (1.0, True, False, True)
    env.close()


def test_what_a_tool_raises_is_shown_and_costs_the_step():
    env = make()
    env.reset(seed=0)
    _, reward, over, _, info = env.step(add(10))
    assert (reward, over, info["action_is_valid"]) == (0.0, False, True)
    assert info["tool_results"] == [{"error": "ValueError: one digit at a time"}]
    *_, info = env.step(ToolCall("sub", {}))
    assert not info["action_is_valid"]
    env.close()
    strict = make(invalid_penalty=-0.25)
    strict.reset(seed=0)
    assert [strict.step(action)[1] for action in ([], [ToolCall("sub", {})], [add(10)])] == [
        -0.25,
        -0.25,
        0.0,
    ]
    strict.close()


def test_an_episode_of_a_dataset_is_one_of_its_tasks_by_the_seed():
    env = make("Tasks")
    goals = [env.reset(seed=seed)[0] for seed in range(40)]
    assert {*goals} == {f"Rules.\n\nReach {n}." for n in range(10, 15)}
    assert [env.reset(seed=seed)[0] for seed in range(5)] == goals[:5]
    env.close()
    endless = make("Endless")
    assert len({endless.reset(seed=seed)[0] for seed in range(9)}) > 5
    endless.close()


def test_episodes_are_the_same_wherever_they_are_played():
    side = {"env_groups": 3, "group_size": 2, "env_configs": {"tags": ["Sums"]}}
    config = {
        "custom_envs": {
            "Sums": {"env_type": "aviary", "env_config": {"id": f"{HERE}:Sums", "kwargs": {"most": 9}}}
        },
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {"max_tokens": 99, "parallel_n_jobs": 2},
    }
    engine = ScriptedEngine(
        lambda text, key: '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>'
    )
    played = {}
    for backend in ("serial", "thread", "process"):
        with ParallelRolloutManager(config, engine, backend=backend) as manager:
            played[backend] = manager.collect(0)
    assert len({b"".join(map(encode_trajectory, episodes)) for episodes in played.values()}) == 1
    assert {episode.success for episode in played["serial"]} == {True}
    assert len({len(episode.turns) for episode in played["serial"]}) > 1


def test_what_cannot_be_made_is_said():
    with pytest.raises(ConfigError, match="aviary has no 'chess'"):
        shoal.envs.make("aviary", id="chess")
    with pytest.raises(ConfigError, match="aviary cannot make .*'wrong'"):
        make(kwargs={"wrong": 1})
    with pytest.raises(ConfigError, match="must make an env or task dataset of aviary, got 7"):
        make("seven")


def test_the_package_to_install_is_named(monkeypatch):
    for name in ("aviary", "aviary.core", "aviary.env"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match='pip install "fhaviary"'):
        shoal.envs.make("aviary")


def test_the_env_that_comes_with_aviary_is_played(like):
    if like.STAND_IN:
        pytest.skip("fhaviary is not installed")
    env = shoal.envs.make("aviary")
    assert "story" in env.reset(seed=1)[0]
    _, reward, over, _, info = env.step(ToolCall("print_story", {"story": "a b c d e"}))
    assert (reward, over, info["success"]) == (1.0, True, True)
    env.close()
