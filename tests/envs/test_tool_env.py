"""Envs that act by tools, stepped by hand."""

import numpy as np
import pytest
from tests.rollout.tools.vault import Vault

from shoal.core.errors import EnvError
from shoal.envs.actions import ToolCall
from shoal.envs.calls import calls_as_action, calls_of_action
from shoal.envs.text import Outcome
from shoal.envs.tool_env import ToolEnv
from shoal.envs.tools import Tool, random_call
from shoal.testing import check_text_env
from shoal.vector import make_vec


def test_it_keeps_the_promises_of_text_envs():
    check_text_env(Vault)


def test_calls_are_stepped_as_one_call_a_list_of_them_or_json():
    env, shown = Vault(), []
    note = ToolCall("note", {})
    for action in (note, [note], '[{"name": "note", "arguments": {}}]'):
        _, info = env.reset(seed=4)
        assert [tool["name"] for tool in info["tools"]] == ["note", env.lock.__name__]
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["action_is_valid"]) == (0.0, False, True)
        assert "tools" not in info
        shown.append(info["tool_results"])
    assert shown == [[f"the code is {env.code}"]] * 3


@pytest.mark.parametrize("action", ["", "hello", "[]", "{}", "[1]", "[" * 100_000, '[{"name": "note"}]'])
def test_what_is_no_call_is_an_invalid_step_and_the_model_is_told(action):
    env = Vault()
    env.reset(seed=4)
    _, reward, _, _, info = env.step(action)
    assert (reward, info["action_is_valid"], info["action_is_effective"]) == (0.0, False, False)
    [said] = info["tool_results"]
    assert said["error"].startswith("an action must call a tool; there are: note, ")


def test_arguments_that_do_not_fit_are_an_error_and_no_invalid_action():
    env = Vault()
    env.reset(seed=4)
    lock = env.lock.__name__
    *_, info = env.step([ToolCall("note", {"x": 1}), ToolCall(lock, {}), ToolCall("note", [1])])
    assert info["action_is_valid"]
    unknown, missing, no_object = info["tool_results"]
    assert "unknown field `x`" in unknown["error"]
    assert "missing required field" in missing["error"]
    assert no_object == {"error": "the arguments must be a JSON object"}
    *_, info = env.step([ToolCall("note", {}), ToolCall("drill", {})])
    assert not info["action_is_valid"]
    assert info["tool_results"][0].startswith("the code is ")
    assert "no tool 'drill'" in info["tool_results"][1]["error"]


def test_calls_become_text_and_calls_again():
    calls = [ToolCall("a", {"x": [1, {"é": None}]}), ToolCall("", "nö", "broken")]
    assert calls_of_action(calls_as_action(calls)) == calls


def test_a_vector_of_such_envs_is_stepped_by_text():
    with make_vec(Vault, 2, backend="process") as envs:
        _, infos = envs.reset(seed=[1, 2])
        assert [tools[0]["name"] for tools in infos["tools"]] == ["note", "note"]
        *_, infos = envs.step([calls_as_action([ToolCall("note", {})])] * 2)
        codes = []
        for seed in (1, 2):
            env = Vault()
            env.reset(seed=seed)
            codes.append([f"the code is {env.code}"])
        assert list(infos["tool_results"]) == codes


class Twice(Vault):
    """Two tools of one name."""

    def tools(self):
        return [self.note, self.note]


class Described(Vault):
    """A tool that is no function, and nothing that answers it."""

    def tools(self):
        return [Tool("ask", "Ask.", {"type": "object", "properties": {}})]


class Broken(Vault):
    """Its tool finds that the env cannot go on."""

    def note(self) -> str:
        """Read the note."""
        raise EnvError("the note is lost")


class Half(ToolEnv):
    """Does not say what its tools are."""

    instructions = "Do."

    def _start(self, rng): ...

    def observe(self):
        return ""

    def _outcome(self):
        return Outcome(0.0)


def test_what_an_env_does_wrong_is_said():
    with pytest.raises(EnvError, match="two tools named 'note'"):
        Twice().reset(seed=0)
    for kind, name, why in ((Described, "ask", "override _use"), (Broken, "note", "the note is lost")):
        env = kind()
        env.reset(seed=0)
        with pytest.raises(EnvError, match=why):
            env.step(ToolCall(name, {}))
    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_random_calls_fit_their_schema_or_are_none():
    rng = np.random.default_rng(0)
    integer = {"type": "integer", "minimum": 3, "maximum": 4}
    parts = {"a": integer, "b": {"enum": ["x", "y"]}, "c": {"type": "boolean"}, "d": {"type": "string"}}
    tool = Tool("t", "", {"type": "object", "properties": parts, "required": ["a", "b", "c"]})
    drawn = [random_call(tool, rng).arguments for _ in range(64)]
    assert {(d["a"], d["b"], d["c"]) for d in drawn} == {
        (a, b, c) for a in (3, 4) for b in "xy" for c in (True, False)
    }
    assert random_call(Tool("t", "", {**tool.parameters, "required": ["d"]}), rng) is None
