"""Environments of aviary: on the package where it is installed, else on a stand-in with the same interface."""

import importlib.util
import random
import sys
import types


def stand_in():
    """The modules `aviary`, `aviary.core` and `aviary.env`, as far as an adapter sees them (fhaviary 0.37)."""
    package, core, env = (types.ModuleType(name) for name in ("aviary", "aviary.core", "aviary.env"))

    class Plain:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    class Message(Plain):
        content = None

        @property
        def deserialized_content(self):
            return self.content

    class ToolCall(Plain): ...

    class ToolCallFunction(Plain): ...

    class ToolRequestMessage(Message): ...

    class ToolResponseMessage(Message):
        @classmethod
        def from_call(cls, call, content):
            return cls(content=content, name=call.function.name, tool_call_id=call.id)

    class FunctionInfo(Plain):
        def model_dump(self, **_):
            return dict(self.__dict__)

    class Tool(Plain):
        @classmethod
        def from_function(cls, function, **_):
            kinds = {int: "integer", str: "string"}
            hints = {n: kind for n, kind in function.__annotations__.items() if n != "return"}
            properties = {name: {"type": kinds[kind]} for name, kind in hints.items()}
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            info = FunctionInfo(name=function.__name__, description=function.__doc__, parameters=schema)
            return cls(info=info, function=function)

    class Environment:
        async def close(self):
            return None

        async def exec_tool_calls(self, message):
            by_name = {tool.info.name: tool.function for tool in self.tools}
            return [
                ToolResponseMessage.from_call(
                    call, str(by_name[call.function.name](**call.function.arguments))
                )
                for call in message.tool_calls
            ]

        @classmethod
        def from_name(cls, name, **kwargs):
            return env.ENV_REGISTRY[name](**kwargs)

    class TaskDataset:
        def __len__(self):
            raise TypeError("it has no len()")

        @classmethod
        def from_name(cls, name, **kwargs):
            return env.TASK_DATASET_REGISTRY[name](**kwargs)

    for one in (Message, ToolCall, ToolCallFunction, ToolRequestMessage, ToolResponseMessage, Tool):
        setattr(core, one.__name__, one)
    core.Environment, core.TaskDataset = Environment, TaskDataset
    env.ENV_REGISTRY, env.TASK_DATASET_REGISTRY = {}, {}
    package.core, package.env = core, env
    return {"aviary": package, "aviary.core": core, "aviary.env": env}


STAND_IN = {} if importlib.util.find_spec("aviary") else stand_in()
"""Empty where the package is installed."""
sys.modules.update(STAND_IN)  # workers import this module to find the env; tests take it away again

from aviary import core  # noqa: E402


class Sums(core.Environment):
    """Add up: the number to reach is drawn from the global generator, as aviary's own envs do."""

    open_ones = 0

    def __init__(self, most=3, least=1):
        self.most, self.least = most, least

    async def reset(self):
        Sums.open_ones += 1
        self.goal, self.sum = random.randint(self.least, self.most), 0

        def add(number: int) -> str:
            """Add to the sum.

            Args:
                number: what to add.
            """
            if number > 9:
                raise ValueError("one digit at a time")
            self.sum += number
            return f"the sum is {self.sum}"

        self.tools = [core.Tool.from_function(add)]
        return [
            core.Message(role="system", content="Rules."),
            core.Message(content=f"Reach {self.goal}."),
        ], self.tools

    async def step(self, action):
        said = await self.exec_tool_calls(action)
        done = self.sum >= self.goal
        told = [core.Message(content=f"{self.goal - self.sum} to go")]
        return [*said[::-1], *told], float(self.sum == self.goal), done, False

    async def close(self):
        Sums.open_ones -= 1


class Tasks(core.TaskDataset):
    """Goals from 10 to 14."""

    def __len__(self):
        return 5

    def get_new_env_by_idx(self, idx):
        return Sums(10 + idx, 10 + idx)


class Endless(core.TaskDataset):
    """Goals without an end."""

    def get_new_env(self):
        return Sums(99)


def seven():
    """Makes no env."""
    return 7
