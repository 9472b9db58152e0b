"""`examples/tools/tau2_env.py`, on a double that answers as tau2 1.0.1 was seen to; tau2 itself needs Python 3.12."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from shoal.core.errors import ConfigError, EnvError
from shoal.envs.actions import ToolCall

CREATE = ToolCall("create_task", {"user_id": "user_1", "title": "Important Meeting"})
DONE = ToolCall("done", {})


def schema(name, *required):
    properties = {key: {"type": "string"} for key in required}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return SimpleNamespace(
        name=name, openai_schema={"function": {"name": name, "description": name, "parameters": parameters}}
    )


class AgentGymEnv:
    """The mock domain: one task is to be created, then the agent, or the user who hears of it, ends the episode."""

    made: ClassVar[list] = []

    def __init__(self, domain, task_id, max_steps, solo_mode, user_llm, user_llm_args):
        self.solo, self.args, self.over, self.created = solo_mode, user_llm_args, False, 0
        self.task = SimpleNamespace(id=task_id, ticket=f"Do {task_id}.")
        AgentGymEnv.made.append(self)

    def reset(self, seed=None):
        tools = [schema("create_task", "user_id", "title"), schema("done")]
        info = {"policy": "Each task must have a title.", "task": self.task, "tools": tools}
        return "" if self.solo else "user: Hello, a meeting is coming up.", info

    def step(self, action):
        ran = {"simulation_run": '{"id": "1"}'}
        if action == "Are you there?":  # the user's model is gone: tau2 only logs that
            self.over = True
            return "", 0.0, True, False, {"simulation_run": "{}"}
        if not action.startswith("{"):
            self.over = "created" in action
            said = "" if self.over else "user: Please create the task."
            return said, float(self.over), self.over, False, ran
        name = json.loads(action)["name"]
        if name == "create_task":
            self.created += 1
            return 'tool: {"task_id": "task_2"}', 0.0, False, False, ran
        self.over = True
        if not self.created:
            raise ValueError("Task task_2 not found")
        return "", 1.0, True, False, ran


class Registry:
    def get_info(self):
        return SimpleNamespace(domains=["mock", "airline"])

    def get_tasks_loader(self, domain):
        tickets = {"mock": ["create_task_1", "create_task_2"], "airline": [None]}[domain]
        return lambda split: [SimpleNamespace(id=ticket or "0", ticket=ticket) for ticket in tickets]


@pytest.fixture
def tau2_env(monkeypatch):
    """The example's module, with the double in the place of tau2."""
    modules = {
        "loguru": {"logger": SimpleNamespace(disable=lambda name: None)},
        "tau2": {},
        "tau2.gym": {},
        "tau2.gym.gym_agent": {"AgentGymEnv": AgentGymEnv},
        "tau2.registry": {"registry": Registry()},
    }
    for name, holds in modules.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "tools"))
    AgentGymEnv.made.clear()
    yield importlib.import_module("tau2_env")
    sys.modules.pop("tau2_env", None)


def test_an_agent_alone_works_on_the_ticket_with_the_domains_tools(tau2_env):
    env = tau2_env.Tau2()
    said, info = env.reset(seed=1)
    assert "Each task must have a title." in said
    assert "Do create_task_" in said
    assert [tool["name"] for tool in info["tools"]] == ["create_task", "done"]
    *_, info = env.step(CREATE)
    assert info["tool_results"] == ['{"task_id": "task_2"}']
    _, reward, terminated, truncated, info = env.step([DONE, CREATE])
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["tool_results"][1] == {"error": "not called: the episode was over"}
    assert AgentGymEnv.made[-1].created == 1


def test_a_user_is_spoken_to_by_a_tool_and_ends_the_episode(tau2_env):
    env = tau2_env.Tau2(user_llm="openai/small", user_llm_args={"temperature": 0})
    said, info = env.reset(seed=1)
    assert said.endswith("user: Hello, a meeting is coming up.")
    assert [tool["name"] for tool in info["tools"]] == ["create_task", "respond"]
    *_, info = env.step(ToolCall("respond", {"message": "What can I do?"}))
    assert info["tool_results"] == ["Please create the task."]
    env.step(CREATE)
    _, reward, terminated, _, info = env.step(ToolCall("respond", {"message": "It is created."}))
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert AgentGymEnv.made[-1].args.keys() == {"temperature", "seed"}


def test_what_tau2_cannot_judge_is_a_failure_and_no_fault(tau2_env):
    env = tau2_env.Tau2()
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step(DONE)
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert "Task task_2 not found" in info["tool_results"][0]


def test_a_user_who_does_not_answer_is_a_fault_and_no_failure_of_the_agent(tau2_env):
    env = tau2_env.Tau2(user_llm="openai/small")
    env.reset(seed=1)
    with pytest.raises(EnvError, match="without a result"):
        env.step(ToolCall("respond", {"message": "Are you there?"}))
    assert env.reset(seed=2)[0]


def test_an_episode_that_is_left_is_ended_since_tau2_plays_it_in_a_thread(tau2_env):
    env = tau2_env.Tau2(max_steps=1)
    env.reset(seed=1)
    assert env.step(CREATE)[3]
    env.reset(seed=2)
    assert AgentGymEnv.made[0].over
    env.close()
    assert AgentGymEnv.made[1].over


def test_settings_that_no_domain_allows_are_refused(tau2_env):
    with pytest.raises(ConfigError, match="no domain 'shop'; it has mock, airline"):
        tau2_env.Tau2(domain="shop")
    with pytest.raises(ConfigError, match="no task of 'airline' has a ticket"):
        tau2_env.Tau2(domain="airline")
