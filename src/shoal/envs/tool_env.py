"""An env whose actions are calls of tools: it names its tools at each reset, and answers each call of a turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from shoal.core.data import ToolUse
from shoal.core.errors import EnvError, format_error
from shoal.envs.actions import Projection, ToolCall
from shoal.envs.calls import calls_as_action, calls_of_action
from shoal.envs.spaces import FreeText
from shoal.envs.text import Action, Outcome, TextEnv
from shoal.envs.tools import Tool, check_names, checked, function_tool, random_call

C = TypeVar("C")
MOST_ERROR = 500
"""Characters of what a tool raised."""


class ToolEnv(TextEnv[C], ABC):
    """Base of text envs whose actions are calls of tools.

    A subclass states `instructions` and four methods: `_start` and `observe`, as any text env, `tools` and `_outcome`.
    The model is shown what `observe` returns once, when the episode begins, and behind each of its answers what the
    tools said. One answer is one step, however many calls it holds.

    `info["tools"]` of a reset lists the tools (name, description, parameters as JSON schema); `info["tool_results"]` of
    a step has a text for each call in order, or `{"error": text}`. An action is the calls as JSON, see
    `shoal.envs.calls.calls_as_action`; `step` takes a `ToolCall`, or a list of them, too. An action without a call, or
    with one of an unknown tool, is invalid.
    """

    calls_tools = True
    projection = Projection(parse=lambda text: text if calls_of_action(text) else None, invalid="")
    action_space = FreeText(1 << 20)
    invalid_action = ""
    invalid_penalty: float = 0.0
    """Reward of a step in which no call could be made; that of the `Config` goes before that of the class."""
    _tools: Mapping[str, Tool] = MappingProxyType({})

    @abstractmethod
    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """The tools of the episode that has begun: typed functions or methods with a docstring, or `Tool`s.

        A `Tool` that is no function is answered by a `_use` of the subclass's own.
        """

    @abstractmethod
    def _outcome(self) -> Outcome:
        """What the calls of this step came to: reward, whether the episode ended, success."""

    def _use(self, calls: Sequence[ToolCall]) -> Sequence[ToolUse]:
        """What came of the calls of a step, in their order; all are of known tools.

        What a function raises is shown to the model, but for an `EnvError`, which ends the episode.
        """
        return [self._called(call) for call in calls]

    # --- what the base does
    def _called(self, call: ToolCall) -> ToolUse:
        tool = self._tools[call.name]
        if tool.function is None:
            raise EnvError(f"{type(self).__name__}: the tool {tool.name} is no function: override _use()")
        try:
            said = tool.result(tool.function(**tool.converted(call.arguments)))
        except EnvError:
            raise
        except Exception as error:  # the model's to learn from
            return ToolUse(call.name, call.arguments, error=format_error(error)[:MOST_ERROR])
        return ToolUse(call.name, call.arguments, said)

    def _checked(self, action: Any) -> Action:
        if isinstance(action, ToolCall):
            action = [action]
        if isinstance(action, Sequence) and not isinstance(action, str):
            action = calls_as_action(list(action))
        return super()._checked(action)

    def _advance(self, action: Action) -> Outcome:
        none = ToolCall("", "", f"an action must call a tool; there are: {', '.join(self._tools)}")
        calls = [checked(call, self._tools) for call in calls_of_action(str(action))] or [none]
        good = [call for call in calls if call.error is None]
        said = iter(self._use(good) if good else ())
        uses = [
            next(said) if call.error is None else ToolUse(call.name, call.arguments, error=call.error)
            for call in calls
        ]
        penalty = getattr(self.config, "invalid_penalty", self.invalid_penalty)
        outcome = self._outcome() if good else Outcome(penalty, effective=False)
        shown = [use.result if use.error is None else {"error": use.error} for use in uses]
        known = all(call.name in self._tools for call in calls)
        return outcome._replace(
            valid=outcome.valid and known, metrics={**outcome.metrics, "tool_results": shown}
        )

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        if not self._steps:
            found = [tool if isinstance(tool, Tool) else function_tool(tool) for tool in self.tools()]
            check_names(found)
            self._tools = {tool.name: tool for tool in found}
        info = super()._info(outcome)
        return info if self._steps else {**info, "tools": [tool.schema for tool in self._tools.values()]}

    def available_actions(self) -> list[str]:
        """A pattern for each tool."""
        return [f"<call of {name}>" for name in self._tools]

    @property
    def draws_actions(self) -> bool:
        """Whether some tool can be called at random, in the episode that has begun."""
        own = type(self).random_action is not ToolEnv.random_action
        return own or self.random_action(np.random.default_rng(0)) is not None

    def random_action(self, rng: np.random.Generator) -> tuple[ToolCall, ...] | None:
        """A call of a random tool with random arguments, of those that need only choices and numbers."""
        drawn = [random_call(tool, rng) for tool in self._tools.values()]
        calls = [call for call in drawn if call is not None]
        return (calls[int(rng.integers(len(calls)))],) if calls else None
