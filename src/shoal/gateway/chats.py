"""What a program says and what a model answers, in one form for all wires: turns of text, calls and results of tools.

How a model is shown them is for `shoal.rollout.tools.chat` to say. Two messages that mean the same have the same text
here, in whatever order a tool's arguments stand, so a program that sends an answer back is recognised.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from shoal.core.data import ToolUse
from shoal.core.errors import ShoalError
from shoal.envs.actions import ToolCall
from shoal.envs.calls import in_order_of_calls, with_tools, written_call, written_result
from shoal.envs.tools import Tool
from shoal.samplers.sampler import Sampling

PICKING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens",
}  # fmt: skip
"""Parameters that say how tokens are picked, and what `Sampling` calls them."""


class RefusedError(ShoalError):
    """A request that is not served; `status` is that of HTTP, `param` what in the request it is about."""

    def __init__(self, text: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.param = status, param


Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Part:
    """A message, or one of the results of tools in it."""

    role: Role
    text: str
    param: str = "messages"  # where it stands in the request
    calls: tuple[tuple[str | None, ToolCall], ...] = ()  # of an answer, each behind its id
    result: ToolUse | None = None  # what a tool said; its name is empty where it was not sent
    call_id: str | None = None  # of a result: of what call

    def written(self, write: Callable[[ToolCall], str] = written_call) -> str:
        """Its text, calls and results included."""
        if self.result is not None:
            return written_result(self.result.shown)
        if not self.calls:
            return self.text
        return "\n".join(filter(None, [self.text, *(write(call) for _, call in self.calls)]))


@dataclass(frozen=True)
class Turn:
    """What one side says; roles alternate but for a system turn in front."""

    role: Role
    parts: tuple[Part, ...]

    @cached_property
    def text(self) -> str:
        """The same text for turns that mean the same."""
        return self.written(written_call)

    def written(self, write: Callable[[ToolCall], str]) -> str:
        """Its text, with calls as a model writes them."""
        return "\n".join(part.written(write) for part in self.parts)

    @cached_property
    def results(self) -> tuple[ToolUse, ...]:
        """What tools said, where it is all that the turn holds."""
        found = tuple(part.result for part in self.parts if part.result is not None)
        return found if len(found) == len(self.parts) else ()


@dataclass(frozen=True)
class ChatRequest:
    """A request of a program."""

    chat: tuple[Turn, ...]
    sampling: Sampling
    choices: int = 1
    model: str = ""
    stream: bool = False
    logprobs: bool = False
    tools: tuple[Tool, ...] = ()
    usage: bool = False  # whether a stream ends with the count of tokens
    settings: Mapping[str, float] = field(default_factory=dict)  # parameters of `PICKING` that it names
    begun: str = ""  # what the answer begins with; the model goes on from there
    unenforced: tuple[
        str, ...
    ] = ()  # parameters that the model was told of in words, or that nothing comes of
    wants_json: bool = False
    token_ids: bool = False  # whether the answer names the tokens of prompt and answer
    custom: frozenset[str] = frozenset()  # tools that take one text, not arguments
    raw: str | tuple[int, ...] | None = None  # a prompt that is no chat: its text or tokens as they are

    @cached_property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Role and text of each turn, the tools behind what the system says."""
        turns = tuple((turn.role, turn.text) for turn in self.chat)
        if not self.tools:
            return turns
        begins = turns[0][0] == "system"
        system = with_tools(turns[0][1] if begins else "", [tool.schema for tool in self.tools])
        return (("system", system), *turns[begins:])


class Wishes:
    """What a request wants of its answer: the model is told so in its system message, and nothing enforces it.

    Each wish is counted in the record of the episode.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told: list[str] = []
        self.json = False
        self.only: str | None = None  # the tool that must be called
        self._choice: Any = None

    def unused(self, body: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note parameters that nothing comes of."""
        self.names += [name for name in sorted(names) if body.get(name) not in (None, {}, [])]

    def answer_in_json(self, format: Any, param: str) -> None:
        """An object that describes the form of the answer: `{"type": "json_schema", …}`."""
        kind = format.get("type") if isinstance(format, Mapping) else None
        if format is None or kind == "text":
            return
        if kind not in ("json_object", "json_schema"):
            raise RefusedError(f"{param}: a format of {kind!r:.40} is not served here", param=param)
        inner = format.get("json_schema", format) if kind == "json_schema" else {}
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping | None):
            raise RefusedError(f"{param}: the schema must be an object", param=param)
        fits = (
            "" if schema is None else f" It must fit this JSON Schema: {json.dumps(schema, sort_keys=True)}"
        )
        self.names.append(param)
        self.told.append(f"Answer with one JSON value and nothing else.{fits}")
        self.json = True

    def choose_tool(self, choice: Any, required: Sequence[str]) -> bool:
        """Take `tool_choice`: a word, or an object with a type or a tool's name; whether tools may be called at all."""
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        if kind in (None, "auto", "none"):
            return kind != "none"
        inner = choice.get("function", choice) if isinstance(choice, Mapping) else {}
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if kind not in required and not isinstance(name, str):
            raise RefusedError(f"tool_choice={choice!r:.80} is not served here", param="tool_choice")
        self.only, self._choice = name, choice
        self.names.append("tool_choice")
        self.told.append("Call a tool." if name is None else f"Call the tool {name}.")
        return True

    def one_call(self, asked: bool, name: str) -> None:
        """At most one call in an answer."""
        if asked:
            self.names.append(name)
            self.told.append("Call at most one tool.")

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Of the tools those that may be called: one, where it is named.

        Raises:
            RefusedError: none has this name, or one must be called and there is none.
        """
        if self._choice is not None and not tools:
            raise RefusedError(f"tool_choice={self._choice!r:.80}: there are no tools", param="tool_choice")
        if self.only is None:
            return tuple(tools)
        found = tuple(tool for tool in tools if tool.name == self.only)
        if not found:
            raise RefusedError(f"tool_choice: no tool is named {self.only!r:.80}", param="tool_choice")
        return found

    def in_front(self, parts: Iterable[Part]) -> list[Part]:
        """The messages, with what the model is told behind the system's."""
        found = list(parts)
        place = next((i for i, part in enumerate(found) if part.role != "system"), len(found))
        return [*found[:place], *(Part("system", text, "system") for text in self.told), *found[place:]]

    @property
    def noted(self) -> dict[str, Any]:
        """Its fields of a `ChatRequest`."""
        return {"unenforced": tuple(self.names), "wants_json": self.json}


def answer_part(text: str, calls: Sequence[tuple[Any, ToolCall]], param: str) -> Part:
    """An answer that is sent back: its text, and its calls behind their ids."""
    return Part("assistant", text, param, tuple((known_id(id, param), call) for id, call in calls))


def result_part(text: str, call_id: Any, param: str, *, tool: str = "", failed: bool = False) -> Part:
    """What a tool said to a call."""
    result = ToolUse(tool, {}, *(("", text) if failed else (text,)))
    return Part("user", "", param, result=result, call_id=known_id(call_id, param))


def offered_tool(name: str, description: Any, parameters: Any) -> Tool:
    """A tool that a program offers."""
    if not isinstance(description, str | None) or not isinstance(parameters, Mapping | None):
        raise RefusedError(
            f"tools: description and schema of {name!r:.80} must be text and object", param="tools"
        )
    return Tool(name, description or "", parameters or {"type": "object", "properties": {}})


def known_id(value: Any, param: str) -> str | None:
    """The id of a call; None where there is none."""
    if value is None or isinstance(value, str):
        return value or None
    raise RefusedError(f"{param}: the id of a call must be text, got {value!r:.80}", param=param)


def from_json(text: str | bytes) -> Any:
    """The value of JSON as every reader takes it: with NaN, or half of a surrogate pair, it is none.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def listed(value: Any, param: str) -> list[Any]:
    """A list of a request; nothing is an empty one."""
    if value is None or isinstance(value, list):
        return value or []
    raise RefusedError(f"{param} must be a list, got {value!r:.80}", param=param)


def fields_of(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in a request; nothing is an empty one."""
    value = body.get(name) or {}
    if isinstance(value, Mapping):
        return value
    raise RefusedError(f"{name} must be an object", param=name)


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """The messages of a request, of which there must be one."""
    found = body.get("messages")
    if isinstance(found, list) and found:
        return found
    raise RefusedError("messages must be a list with at least one message", param="messages")


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A switch of a request; nothing is off."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RefusedError(f"{name} must be true or false, got {value!r:.80}", param=name)


def arguments_of(value: Any, param: str) -> Any:
    """The arguments of a tool call: JSON text or the object itself; nothing is no arguments."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError:
        raise RefusedError(f"{param} must be JSON, got {value[:80]!r}", param=param) from None


def turns_of(parts: Sequence[Part]) -> tuple[Turn, ...]:
    """Messages as turns: those of one side that follow each other become one, and there must be something to answer.

    A system message behind others stands in the user's turn: models are trained on one in front.
    """
    begun = next((place for place, part in enumerate(parts) if part.role != "system"), len(parts))
    parts = [
        replace(part, role="user") if part.role == "system" and place > begun else part
        for place, part in enumerate(parts)
    ]
    turns = [
        Turn(role, tuple(members))
        for role, members in itertools.groupby(_with_ordered_results(parts), key=lambda part: part.role)
    ]
    if not turns or turns[-1].role != "user":
        raise RefusedError(
            "messages: the last message must be of the user or a tool, so that there is something to answer",
            param="messages",
        )
    return tuple(turns)


def _with_ordered_results(parts: Sequence[Part]) -> list[Part]:
    """The parts, with the results behind each answer in the order of its calls.

    Raises:
        RefusedError: something follows an answer, and not every call in it has its one result.
    """
    found: list[Part] = []
    answers: list[Part] = []
    for is_answer, group in itertools.groupby(parts, key=lambda part: part.role == "assistant"):
        members = list(group)
        if is_answer:
            answers = members
        elif any(part.result is not None for part in members) or any(part.calls for part in answers):
            numbers = [number for number, part in enumerate(members) if part.result is not None]
            for number, part in zip(numbers, _ordered(answers, [members[n] for n in numbers]), strict=True):
                members[number] = part
        found += members
    return found


def _ordered(answers: Sequence[Part], results: Sequence[Part]) -> list[Part]:
    calls = [call for answer in answers for call in answer.calls]
    named = {"", *(call.name for _, call in calls)}
    for part in results:
        if part.result is not None and part.result.name not in named:
            raise RefusedError(
                f"{part.param}.name={part.result.name!r:.80}: the answer before calls no tool of this name",
                param=part.param,
            )
    ids, named_ids = [id for id, _ in calls], [result.call_id for result in results]
    try:
        if len(ids) != len(named_ids) and not any([*ids, *named_ids]):
            raise ValueError(f"{len(ids)} calls without ids have {len(named_ids)} results")
        plain = len(ids) == len(named_ids) == 1 and not any(named_ids)  # the one result of the one call
        if ids and named_ids and not plain and any(ids) != any(named_ids):
            lacks, has = ("results have", "calls do") if any(ids) else ("calls have", "results do")
            raise ValueError(f"the {lacks} no ids, while their {has}")
        return in_order_of_calls(ids, list(zip(named_ids, results, strict=True)))
    except ValueError as error:
        param = (answers if calls else results)[-1].param
        raise RefusedError(f"{param}: {error}", param=param) from None
