"""Environments and task datasets of aviary (fhaviary), whose actions are calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shoal.core.data import ToolUse, reward_of
from shoal.core.errors import ConfigError, EnvError, format_error
from shoal.core.executors import OwnThread
from shoal.envs.actions import ToolCall
from shoal.envs.adapters.library import OthersToolEnv, PrivateRandom, library
from shoal.envs.catalogue import function_named
from shoal.envs.text import Outcome, check_numbers
from shoal.envs.tool_env import MOST_ERROR
from shoal.envs.tools import Tool

PIP = "fhaviary"
"""What is installed for `aviary`."""
CLOSE_SECONDS = 10.0
"""For which the end of an env is waited for."""


@dataclass(frozen=True)
class AviaryConfig:
    """Settings of `AviaryEnv`."""

    id: str = "dummy"
    """An env or task dataset by its name in aviary, or `module:name` of a class or function that makes one. Each
    episode is a new env, of a dataset one of its tasks."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of what makes it."""
    success_reward: float = 1.0
    """Sum of the rewards from which an episode that the env has ended counts as a success."""
    max_steps: int = 20
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a step in which no call could be made."""

    def __post_init__(self) -> None:
        check_numbers(self, max_steps=1)


class AviaryEnv(OthersToolEnv[AviaryConfig]):
    """An env of aviary, in an event loop of its own; its draws are private and follow the seed.

    What a tool raises is shown to the model, for each call of that step. A message of the env that answers no call
    stands behind the last result.
    """

    Config = AviaryConfig
    seed_stream = "AviaryEnv"

    def __init__(self, config: AviaryConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._random = PrivateRandom()
        self._inner: Any = None
        self._loop: tuple[OwnThread, asyncio.Runner] | None = None
        self._dataset: Any = None
        with self._random.active():
            made = self._made()
        if isinstance(made, library("aviary.core", PIP).TaskDataset):
            self._dataset = made

    def _made(self) -> Any:
        """An env, or a task dataset."""
        name = self.config.id
        make = function_named(name, "the env of aviary") if ":" in name else _named(name)
        core = library("aviary.core", PIP)
        try:
            made = make(**self.config.kwargs)
        except Exception as error:  # it raises what it likes: ImportError, TypeError, what pydantic finds
            raise ConfigError(f"aviary cannot make {name!r}: {format_error(error)}") from error
        if not isinstance(made, core.Environment | core.TaskDataset):
            raise ConfigError(f"{name!r} must make an env or task dataset of aviary, got {made!r:.80}")
        return made

    def _start(self, rng: np.random.Generator) -> None:
        self._random.seed(int(rng.integers(2**31)))
        with self._random.active():
            self._leave()
            self._inner = self._made() if self._dataset is None else self._task(rng)
            messages, tools = self._run(self._inner.reset())
        self._told = "\n\n".join(map(_text, messages))
        self._listed = [_tool(tool) for tool in tools]
        self._total, self._step_outcome = 0.0, Outcome(0.0)

    def _task(self, rng: np.random.Generator) -> Any:
        """One of the dataset, which may be without an end."""
        try:
            count = len(self._dataset)
        except TypeError:
            return self._dataset.get_new_env()
        return self._dataset.get_new_env_by_idx(int(rng.integers(count)))

    def _use(self, calls: Sequence[ToolCall]) -> Sequence[ToolUse]:
        core = library("aviary.core", PIP)
        asked = [
            core.ToolCall(
                id=f"call{n:05d}", function=core.ToolCallFunction(name=call.name, arguments=call.arguments)
            )
            for n, call in enumerate(calls)
        ]
        request = core.ToolRequestMessage(tool_calls=asked)
        try:
            with self._random.active():
                messages, reward, done, truncated = self._run(self._inner.step(request))
        except Exception as error:  # of a tool, mostly: the model's to learn from
            self._step_outcome = Outcome(0.0)
            why = format_error(error)[:MOST_ERROR]
            return [ToolUse(call.name, call.arguments, error=why) for call in calls]
        paid = reward_of(reward)
        self._total += paid
        won = bool(done) and self._total >= self.config.success_reward
        self._step_outcome = Outcome(paid, bool(done), won, truncated=bool(truncated) and not done)
        said: dict[str, list[str]] = {one.id: [] for one in asked}
        for message in messages:
            said.get(getattr(message, "tool_call_id", ""), said[asked[-1].id]).append(_text(message))
        results = ("\n".join(filter(None, texts)) for texts in said.values())
        return [
            ToolUse(call.name, call.arguments, self._tools[call.name].result(result))
            for call, result in zip(calls, results, strict=True)
        ]

    # --- its event loop
    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = OwnThread("shoal-aviary"), asyncio.Runner()
        thread, runner = self._loop
        return thread.submit(partial(runner.run, work)).result()

    def _leave(self) -> None:
        """Close the env of the episode before."""
        if self._inner is not None:
            inner, self._inner = self._inner, None
            self._run(inner.close())

    def close(self) -> None:
        """Close the env, and its event loop."""
        super().close()
        self._leave()
        if self._loop is not None:
            thread, runner = self._loop
            self._loop = None
            thread.submit(runner.close).result(CLOSE_SECONDS)
            thread.end()

    def __getstate__(self) -> dict[str, Any]:
        if self._inner is not None and not self._over:
            raise EnvError(
                "an episode of aviary cannot be copied or sent elsewhere; reset() the copy instead"
            )
        return {**self.__dict__, "_inner": None, "_loop": None}


def _named(name: str) -> Callable[..., Any]:
    """What makes the env or task dataset that aviary has under this name."""
    core, known = library("aviary.core", PIP), library("aviary.env", PIP)
    if name in known.ENV_REGISTRY:
        return partial(core.Environment.from_name, name)
    if name in known.TASK_DATASET_REGISTRY:
        return partial(core.TaskDataset.from_name, name)
    names = ", ".join(sorted({*known.ENV_REGISTRY, *known.TASK_DATASET_REGISTRY}))
    raise ConfigError(f"aviary has no {name!r}; it has {names}, others are 'module:name'")


def _text(message: Any) -> str:
    """The text of a message, without its pictures."""
    content = message.deserialized_content
    if isinstance(content, str) or not content:
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)


def _tool(tool: Any) -> Tool:
    described = tool.info.model_dump(exclude_none=True)
    schema = described.get("parameters") or {"type": "object", "properties": {}}
    return Tool(described["name"], described["description"], schema)
