"""The tools of an OpenEnv server as actions."""

import copy

import pytest
from tests.envs.tool_server import TOOLS, Safe, served

import shoal.envs
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.actions import ToolCall
from shoal.testing import check_text_env


@pytest.fixture(scope="module")
def url():
    with served() as address:
        yield address


def make(url, **settings):
    return shoal.envs.make("openenv_tools", url=url, **settings)


def turn(number):
    return ToolCall("turn", {"number": number})


def test_an_env_behind_a_server_keeps_the_promises(url):
    check_text_env(lambda: make(url), seeds=range(3))


def test_calls_are_steps_of_the_server_up_to_the_end_of_the_episode(url):
    env = make(url, instructions="Open the safe.")
    seen, info = env.reset(seed=3)
    assert (env.instructions, seen) == ("Open the safe.", "")
    assert [tool["parameters"] for tool in info["tools"]] == [tool["input_schema"] for tool in TOOLS]
    _, reward, over, _, info = env.step([ToolCall("note", {}), turn(77)])
    code = int(info["tool_results"][0].removeprefix("the code is "))
    assert info["tool_results"][1] == {"error": "one digit"}
    assert (reward, over) == (-0.5, False)
    _, reward, over, _, info = env.step([turn((code + 1) % 10), turn(code), ToolCall("note", {})])
    told = ['{"opened":false}', '{"opened":true}', {"error": "the episode was over before this call"}]
    assert info["tool_results"] == told
    assert (reward, over, info["success"]) == (1.0, True, True)
    env.close()


class Toolless(Safe):
    """Lists no tools."""

    def answer(self, kind, data):
        seen, reward, done = super().answer(kind, data)
        return {**seen, "tools": []}, reward, done


class Nameless(Safe):
    """Describes a tool without its name."""

    def answer(self, kind, data):
        seen, reward, done = super().answer(kind, data)
        return {**seen, "tools": [{"description": "?"}]}, reward, done


class Silent(Safe):
    """Ends the session at the first call."""

    def answer(self, kind, data):
        if data.get("type") == "call_tool":
            raise ConnectionError
        return super().answer(kind, data)


def reset_and_call(env):
    env.reset(seed=0)
    env.step(ToolCall("note", {}))


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Toolless, "must list tools"), (Nameless, "must have name"), (Silent, "did not answer a step")],
)
def test_what_a_server_does_wrong_is_said(kind, why):
    with served(kind) as address:
        env = make(address)
        with pytest.raises(EnvError, match=why):
            reset_and_call(env)
        with pytest.raises(EnvError, match="call reset"):
            env.step(ToolCall("note", {}))
        env.close()


def test_an_open_episode_is_not_copied_and_an_address_must_be_one(url):
    env = make(url)
    copy.deepcopy(env)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="cannot be copied"):
        copy.deepcopy(env)
    env.close()
    with pytest.raises(ConfigError, match="url must be like"):
        make("nowhere")
