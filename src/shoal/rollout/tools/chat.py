"""Tools in a chat: how a model is told of them, how its calls are read, and how it is shown the results.

A model's own template writes all of it where it knows tools and its calls can be read. For other models the tools stand
in the system message and results in the user's turn, as Hermes has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.core.data import ToolUse
from shoal.envs.actions import Projected, Reader, ToolCall
from shoal.envs.calls import Grammar, read_calls, with_tools, written_call, written_result
from shoal.rollout.tools.functions import Tool
from shoal.rollout.tools.template import TemplateTools
from shoal.samplers.sampler import ChatTokenizer, Message
from shoal.samplers.tokenizers import TemplateTokenizer

MAX_TURNS = 8
"""Default of `agent_proxy.max_tool_turns`."""


class ToolChat:
    """A `ChatTokenizer` that shows tools; whatever else the tokenizer can, it can too.

    Args:
        tokenizer: of the model.
        tools: those that it may call.
        max_turns: responses with calls in an episode; behind the last of them it is truncated.
    """

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[Tool], max_turns: int = MAX_TURNS) -> None:
        self.max_turns = max_turns
        self.tools = {tool.name: tool for tool in tools}
        schemas = [tool.schema for tool in tools]
        own = None
        self._template: TemplateTools | None = None
        if isinstance(tokenizer, TemplateTokenizer):
            own = TemplateTools.writing(tokenizer, schemas)
            self._template = own or TemplateTools(tokenizer)
        self.inner: Any = own.tokenizer if own else tokenizer
        self.grammar: Grammar = (own.grammar if own else None) or "tags"
        self._own, self._brief = own is not None, bool(getattr(tokenizer, "brief", False))
        self._told = " ".join(map(_signature, tools)) if self._brief else with_tools("", schemas)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self.inner, name)

    # --- prompts
    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for a chat, tools and all."""
        return tuple(self.inner.start(self._with_tools(messages)))

    @property
    def render(self) -> Any:
        """The chat as the template writes it, where there is one."""
        render = self.inner.render
        return lambda messages: render(self._with_tools(messages))

    def extend_results(self, response_ids: tuple[int, ...], uses: Sequence[ToolUse]) -> tuple[int, ...]:
        """What follows a response with calls: its end, the results in the order of the calls, the next header."""
        if self._template is not None:
            return self._template.extend(response_ids, [use.shown for use in uses])
        return tuple(self.inner.extend(response_ids, *self.messages(uses)))

    def messages(self, uses: Sequence[ToolUse]) -> list[Message]:
        """The results as messages of the chat."""
        if self._template is not None:
            return self._template.messages([use.shown for use in uses])
        if self._brief:
            return [{"role": "user", "content": "".join(map(_brief_result, uses))}]
        return [{"role": "user", "content": "\n".join(written_result(use.shown) for use in uses)}]

    def _with_tools(self, messages: Sequence[Message]) -> list[Message]:
        if self._own:
            return list(messages)
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        told: Message = {"role": "system", "content": "\n\n".join(filter(None, (system, self._told)))}
        return [told, *messages[bool(system) :]]

    # --- answers
    def read(self, text: str, otherwise: Reader) -> Projected:
        """The calls in a response, those that cannot be made with their error; else what `otherwise` reads in it."""
        calls = read_calls(text, self.grammar)
        if not calls:
            return otherwise(text)
        valid = all(call.error is None and call.name in self.tools for call in calls)
        return Projected((), valid, tuple(map(self._checked, calls)))

    def _checked(self, call: ToolCall) -> ToolCall:
        if call.error is not None:
            return call
        if (tool := self.tools.get(call.name)) is not None:
            return replace(call, error=tool.problem(call.arguments))
        return replace(call, error=f"there is no tool {call.name[:64]!r}; there are: {', '.join(self.tools)}")

    def written(self, call: ToolCall) -> str:
        """A call as this model writes it."""
        if self.grammar == "json":
            return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        if self._brief:
            inside = json.dumps(call.arguments, ensure_ascii=False)[1:-1]
            return f"{_opening(call.name)}{inside}{_CLOSING}"
        return written_call(call)


# --- for the tiny model, to which each letter is a token
_CLOSING = "}}</tool_call>"


def _opening(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{'


def _brief_result(use: ToolUse) -> str:
    return f"<tool_response>{use.shown}</tool_response>"


def _signature(tool: Tool) -> str:
    return f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})"


def tool_words(tools: Sequence[Tool]) -> list[str]:
    """The pieces of calls and results of which an untrained tiny model makes tokens."""
    words = [] if not tools else [_CLOSING, "<tool_response>", "</tool_response>"]
    for tool in tools:
        words += [tool.name, _opening(tool.name)]
        for name, schema in tool.parameters.get("properties", {}).items():
            words.append(f'"{name}": ')
            words += [json.dumps(value, ensure_ascii=False) for value in schema.get("enum", ())]
    return words
