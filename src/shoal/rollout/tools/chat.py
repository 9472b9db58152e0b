"""Tools in a chat: how a model is told of them, how its calls are read, and how it is shown the results.

A model's own template writes all of it where it knows tools and its calls can be read. For other models the tools stand
in the system message and results in the user's turn, as Hermes has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from shoal.core.data import ToolUse
from shoal.envs.actions import Projected, Reader, ToolCall
from shoal.envs.calls import (
    Grammar,
    calls_as_action,
    read_calls,
    tagged_calls,
    with_tools,
    written_call,
    written_in_xml,
    written_result,
)
from shoal.envs.schemas import fitted
from shoal.envs.tools import Tool, checked
from shoal.rollout.tools.template import TemplateTools
from shoal.samplers.sampler import ChatTokenizer, Message
from shoal.samplers.tokenizers import TemplateTokenizer, TinyTokenizer

MAX_TURNS = 8
"""Default of `agent_proxy.max_tool_turns`."""


class ToolChat:
    """How one model is shown tools, calls them and is shown their results.

    Args:
        tokenizer: of the model.
        tools: those that it may call.
        max_turns: responses with calls in an episode; behind the last of them it is truncated.
        in_full: whether the tiny model too is shown whole schemas, as programs and their tests expect it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[Tool] = (),
        max_turns: int = MAX_TURNS,
        *,
        in_full: bool = False,
    ) -> None:
        self.max_turns = max_turns
        self.tools = {tool.name: tool for tool in tools}
        self.tokenizer = tokenizer
        """Makes the prompts: its template writes the tools, where it can."""
        self.grammar: Grammar = "tags"
        schemas = [tool.schema for tool in tools]
        # each letter is a token to the tiny model: what it is shown is short
        self._tiny = isinstance(tokenizer, TinyTokenizer) and not in_full
        self._template: TemplateTools | None = None
        self._description = ""  # of the tools, for the system message
        if isinstance(tokenizer, TemplateTokenizer):
            own = TemplateTools.writing(tokenizer, schemas) if schemas else None
            self._template = own or TemplateTools(tokenizer)
            if own is not None:
                self.tokenizer, self.grammar = own.tokenizer, own.grammar or "tags"
        if tools and self.tokenizer is tokenizer:
            self._description = " ".join(map(_signature, tools)) if self._tiny else with_tools("", schemas)

    # --- prompts
    def with_tools(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of a chat, with the tools in that of the system where the template does not write them."""
        if not self._description:
            return list(messages)
        begins = messages[0]["role"] == "system"
        system = messages[0]["content"] if begins else ""
        text = "\n\n".join(filter(None, (system, self._description)))
        return [{"role": "system", "content": text}, *messages[begins:]]

    def extend_results(self, response_ids: tuple[int, ...], uses: Sequence[ToolUse]) -> tuple[int, ...]:
        """What follows a response with calls: its end, the results in the order of the calls, the next header."""
        if self._template is not None:
            return self._template.extend(response_ids, [use.shown for use in uses])
        [message] = self.messages(uses)
        return self.tokenizer.extend(response_ids, message)

    def messages(self, uses: Sequence[ToolUse]) -> list[Message]:
        """The results as messages of the chat."""
        if self._template is not None:
            return self._template.messages([use.shown for use in uses])
        if self._tiny:
            short = "".join(f"<tool_response>{use.shown}</tool_response>" for use in uses)
            return [{"role": "user", "content": short}]
        return [{"role": "user", "content": "\n".join(written_result(use.shown) for use in uses)}]

    # --- answers
    def read(self, text: str, otherwise: Reader) -> Projected:
        """The calls in a response, those that cannot be made with their error; else what `otherwise` reads in it."""
        calls = read_calls(text, self.grammar)
        if not calls:
            return otherwise(text)
        return Projected((), all(map(self._known, calls)), tuple(map(self._checked, calls)))

    def act(self, text: str) -> Projected:
        """The one action of an env that acts by tools: the calls in a response, or that there are none, as text."""
        missing = ToolCall("", text[-80:], f"an answer must call a tool; there are: {', '.join(self.tools)}")
        found = self.read(text, lambda _: Projected((), False, (missing,)))
        return replace(found, actions=(calls_as_action(found.calls),))

    def split(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """What a response says beside its calls, and these; a call that is broken, or of no known tool, stays text."""
        if self.grammar == "json":  # nothing but calls stands behind the thoughts
            calls = tuple(read_calls(text, self.grammar))
            if not calls or not all(map(self._known, calls)):
                return text, ()
            return "".join(text.rpartition("</think>")[:2]).strip(), tuple(map(self._fitted, calls))
        found = [
            one._replace(call=self._fitted(one.call)) for one in tagged_calls(text) if self._known(one.call)
        ]
        if not found:
            return text, ()
        ends = [0, *(one.end for one in found)]
        pieces = (
            text[end:start] for end, start in zip(ends, [*(one.start for one in found), None], strict=True)
        )
        return "".join(pieces).strip(), tuple(one.call for one in found)

    def _known(self, call: ToolCall) -> bool:
        return call.error is None and call.name in self.tools

    def _fitted(self, call: ToolCall) -> ToolCall:
        return replace(call, arguments=fitted(call.arguments, self.tools[call.name].parameters))

    def _checked(self, call: ToolCall) -> ToolCall:
        return checked(self._fitted(call) if self._known(call) else call, self.tools)

    def written(self, call: ToolCall) -> str:
        """A call as this model writes it."""
        if self.grammar == "json":
            return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        if self.grammar == "xml":
            return written_in_xml(call)
        if self._tiny:
            inside = json.dumps(call.arguments, ensure_ascii=False)[1:-1]
            return f"{_opening(call.name)}{inside}{_CLOSING}"
        return written_call(call)


# --- for the tiny model, to which each letter is a token
_CLOSING = "}}</tool_call>"


def _opening(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{'


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
