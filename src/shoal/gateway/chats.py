"""What a program says and what a model answers, in one form for all wires: turns of text, tools among them.

Tools are written as Hermes and Qwen write them, see `shoal.envs.calls`. Two messages that mean the same have
the same text here, in whatever order a tool's arguments stand, so a program that sends an answer back is recognised.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shoal.core.errors import ShoalError
from shoal.envs.actions import ToolCall
from shoal.envs.calls import (
    in_order_of_calls,
    tagged_calls,
    with_tools,
    written_call,
    written_result,
)
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


@dataclass(frozen=True)
class Said:
    """What a message of the assistant holds: text, and calls of tools."""

    text: str
    calls: tuple[ToolCall, ...] = ()

    def canonical(self) -> str:
        """The same text for messages that mean the same."""
        return "\n".join(filter(None, [self.text, *map(written_call, self.calls)]))


Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Part:
    """A message, or one of the results of tools in it."""

    role: Role
    text: str
    param: str = "messages"  # where it stands in the request
    calls: tuple[tuple[str | None, str], ...] = ()  # of an answer: the id and the tool of each
    is_result: bool = False
    call_id: str | None = None  # of a result: of what call
    tool: str | None = None  # of a result: the name of the tool, if it was sent


@dataclass(frozen=True)
class Turn:
    """What one side says; roles alternate but for a system turn in front."""

    role: Role
    text: str
    results: tuple[str, ...] = ()  # what tools said, where it is all that the turn holds


@dataclass(frozen=True)
class Asked:
    """A request of a program."""

    chat: tuple[Turn, ...]
    sampling: Sampling
    choices: int = 1
    model: str = ""
    stream: bool = False
    logprobs: bool = False
    tools: tuple[str, ...] = ()  # their names
    usage: bool = False  # whether a stream ends with the count of tokens
    settings: Mapping[str, float] = field(default_factory=dict)  # parameters of `PICKING` that it names
    begun: str = ""  # what the answer begins with; the model goes on from there

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Role and text of each turn."""
        return tuple((turn.role, turn.text) for turn in self.chat)


def answer_part(text: str, calls: Sequence[tuple[Any, ToolCall]], param: str) -> Part:
    """An answer that is sent back: its text, and its calls behind their ids."""
    said = Said(text, tuple(call for _, call in calls)).canonical()
    ids = tuple((known_id(call_id, param), call.name) for call_id, call in calls)
    return Part("assistant", said, param, ids)


def result_part(text: str, call_id: Any, param: str, tool: Any = None) -> Part:
    """What a tool said to a call."""
    return Part("user", text, param, is_result=True, call_id=known_id(call_id, param), tool=tool)


def known_id(value: Any, param: str) -> str | None:
    """The id of a call; None where there is none."""
    if value is None or isinstance(value, str):
        return value or None
    raise RefusedError(f"{param}: the id of a call must be text, got {value!r:.80}", param=param)


def with_schemas(parts: Sequence[Part], tools: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Messages with the schemas of tools behind those of the system that come first."""
    if not tools:
        return list(parts)
    system = [part.text for part in itertools.takewhile(lambda part: part.role == "system", parts)]
    return [Part("system", with_tools("\n".join(system), tools)), *parts[len(system) :]]


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


def read_answer(text: str, tools: Sequence[str]) -> Said:
    """What the model wrote, with its calls of known tools taken out of the text.

    A call that is broken, or of a tool that nobody offered, stays text.
    """
    if not tools:
        return Said(text)
    calls: list[ToolCall] = []
    parts, end = [], 0
    for found in tagged_calls(text):
        if found.call.error is None and found.call.name in tools:
            parts.append(text[end : found.start])
            calls.append(found.call)
            end = found.end
    left = "".join([*parts, text[end:]])
    return Said(left.strip() if calls else left, tuple(calls))


def turns_of(parts: Sequence[Part]) -> tuple[Turn, ...]:
    """Messages as turns: those of one side that follow each other become one, and there must be something to answer."""
    turns: list[Turn] = []
    for part in _with_ordered_results(parts):
        if part.role == "system" and turns and turns[-1].role != "system":
            raise RefusedError("messages: a system message must come before all others", param="messages")
        one = Turn(part.role, part.text)
        if part.is_result:
            one = Turn(part.role, written_result(part.text), (part.text,))
        if turns and turns[-1].role == one.role:
            last = turns[-1]
            both = (*last.results, *one.results) if last.results and one.results else ()
            turns[-1] = Turn(one.role, f"{last.text}\n{one.text}", both)
        else:
            turns.append(one)
    if not turns or turns[-1].role != "user":
        raise RefusedError(
            "messages: the last message must be of the user or a tool, so that there is something to answer",
            param="messages",
        )
    first = turns[1 if turns[0].role == "system" else 0 :][:1]
    if first and first[0].role != "user":
        raise RefusedError(
            "messages: the first message after the system's must be the user's", param="messages"
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
        else:
            places = [place for place, part in enumerate(members) if part.is_result]
            for place, part in zip(places, _ordered(answers, [members[p] for p in places]), strict=True):
                members[place] = part
        found += members
    return found


def _ordered(answers: Sequence[Part], results: Sequence[Part]) -> list[Part]:
    calls = [call for answer in answers for call in answer.calls]
    named = {tool for _, tool in calls}
    for result in results:
        if result.tool is not None and result.tool not in named:
            raise RefusedError(
                f"{result.param}.name={result.tool!r:.80}: the answer before calls no tool of this name",
                param=result.param,
            )
    try:
        return in_order_of_calls([id for id, _ in calls], [(result.call_id, result) for result in results])
    except ValueError as error:
        param = (answers if calls else results)[-1].param
        raise RefusedError(f"{param}: {error}", param=param) from None
