"""How calls of tools stand in text: the grammars that models write them in, and the texts around them.

What a model writes is data: it is read as JSON or as tags within limits, and whatever is wrong with a call becomes its
`error`, which the model is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from shoal.core.errors import whole_characters
from shoal.envs.actions import MAX_TEXT, ToolCall, complete_tags

Grammar = Literal["tags", "xml", "json"]
"""`tags`: each call is JSON in `<tool_call>` (Hermes, Qwen 2.5 and 3); `xml`: it is `<function=…>` there, with a
`<parameter=…>` for each argument (Qwen3-Coder, Qwen 3.5); `json`: the whole answer is JSON (Llama, Mistral). The
first two read each other's calls too."""
MOST_CALLS = 16
"""Of one answer."""
MOST_PARAMETERS = 64
"""Of a call in tags."""
MOST_NAME = 64
"""Characters of the name of a tool or parameter in tags."""
MOST_DEPTH = 32
"""Of the arguments of a call."""
_OPEN = re.compile(r"<tool_call>", re.IGNORECASE | re.ASCII)
_BETWEEN = re.compile(r"[\s;,]*")
_SCANNER = json.JSONDecoder()
T = TypeVar("T")
BROKEN = (msgspec.MsgspecError, RecursionError, ValueError)


class Found(NamedTuple):
    """A call, and where it begins and ends in the text."""

    call: ToolCall
    start: int
    end: int


def read_calls(text: str, grammar: Grammar) -> list[ToolCall]:
    """The calls in an answer, outside thoughts, in order; what is beyond `MOST_CALLS` becomes one with an error."""
    text = whole_characters(text)
    calls = _bare_calls(text) if grammar == "json" else [found.call for found in tagged_calls(text)]
    if grammar != "json" and not calls and _cut_off(text):
        calls = [ToolCall("", text[-80:], "a call must end with </tool_call>")]
    if len(calls) > MOST_CALLS:
        few = f"at most {MOST_CALLS} calls are made in one answer"
        calls[MOST_CALLS:] = [replace(calls[MOST_CALLS], error=few)]
    return calls


def tagged_calls(text: str) -> list[Found]:
    """The calls in `<tool_call>` outside thoughts, and where they stand.

    >>> [found] = tagged_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> found.call
    ToolCall(name='add', arguments={'a': 1}, error=None)
    """
    return [
        Found(_call_in(content), start, end)
        for content, start, end in complete_tags(text, ("tool_call",), literal=True)
    ]


def _cut_off(text: str) -> bool:
    """Whether the text behind all thoughts opens a call that does not end."""
    said = text[-MAX_TEXT:].rpartition("</think>")[2]
    return "<think>" not in said and _OPEN.search(said) is not None


def _bare_calls(text: str) -> list[ToolCall]:
    """The calls of an answer that is nothing but JSON, one object or list behind the other."""
    said = text[-MAX_TEXT:].rpartition("</think>")[2].strip()
    if not said.startswith(("{", "[")):
        return []
    calls: list[ToolCall] = []
    at = 0
    while at < len(said):
        try:
            _, end = _SCANNER.raw_decode(said, at)
            value = msgspec.json.decode(said[at:end])
        except BROKEN as error:
            return [*calls, _broken(said[at:], error)] if calls or '"name"' in said else []
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, dict) and "name" in one for one in values):
            return calls
        calls += map(_call_of, values)
        at = _BETWEEN.match(said, end).end()  # type: ignore[union-attr]
    return calls


def _call_in(content: str) -> ToolCall:
    if content.lstrip().startswith("<function="):
        return _xml_call(content.strip())
    try:
        return _call_of(msgspec.json.decode(content))
    except BROKEN as error:
        return _broken(content, error)


def _broken(content: str, error: BaseException) -> ToolCall:
    why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
    return ToolCall("", content.strip()[:500], f"a call must be JSON: {why}")


_FUNCTION = re.compile(rf"<function=([^<>\n]{{1,{MOST_NAME}}})>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(rf"\s*<parameter=([^<>\n]{{1,{MOST_NAME}}})>(?:\n)?")


def _xml_call(text: str) -> ToolCall:
    """A call in tags; its arguments are text, which `fitted` types by the tool's schema.

    A value ends at the first `</parameter>`; a line break behind its opening and one before its end are not part of it.
    """
    whole = _FUNCTION.fullmatch(text)
    if whole is None:
        return ToolCall("", text[:500], "a call must be <function=NAME>…</function> in <tool_call>")
    name, inside = whole[1].strip(), whole[2].rstrip()
    arguments: dict[str, str] = {}
    at = 0
    while at < len(inside):
        opened = _PARAMETER.match(inside, at)
        if opened is None:
            return ToolCall(name, inside[at : at + 500], "an argument must be <parameter=NAME>…</parameter>")
        parameter, end = opened[1].strip(), inside.find("</parameter>", opened.end())
        if end < 0:
            return ToolCall(
                name, inside[at : at + 500], f"the parameter {parameter} must end with </parameter>"
            )
        if parameter in arguments or len(arguments) >= MOST_PARAMETERS:
            few = f"a call has each parameter once, and at most {MOST_PARAMETERS}"
            return ToolCall(name, inside[at : at + 500], few)
        arguments[parameter] = inside[opened.end() : end].removesuffix("\n")
        at = end + len("</parameter>")
    return ToolCall(name, arguments)


def _call_of(value: Any) -> ToolCall:
    """A call from what its JSON says; its arguments may be JSON text, and stand under another name."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        text = json.dumps(value)[:500]
        return ToolCall("", text, 'a call must be such as {"name": "...", "arguments": {...}}')
    given = value.get("arguments", value.get("parameters"))
    if isinstance(given, str) and given.strip():
        try:
            given = msgspec.json.decode(given)
        except BROKEN:
            return ToolCall(name, given[:500], "the arguments must be a JSON object")
    arguments = given if given or isinstance(given, bool | int | float) else {}
    if not isinstance(arguments, dict):
        error = f"the arguments must be a JSON object, got {json.dumps(arguments)[:80]}"
        return ToolCall(name, arguments, error)
    if (problem := too_much(arguments)) is not None:
        return ToolCall(name, {}, problem)
    return ToolCall(name, arguments)


def too_much(value: Any) -> str | None:
    """What of a value hosts and drivers cannot send."""
    if _depth(value) > MOST_DEPTH:
        return f"the arguments must be nested at most {MOST_DEPTH} deep"
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return "whole numbers must have 64 bits"
    return None


def _depth(value: Any, depth: int = 0) -> int:
    if depth > MOST_DEPTH or not isinstance(value, dict | list):
        return depth
    inside = value.values() if isinstance(value, dict) else value
    return max((_depth(item, depth + 1) for item in inside), default=depth + 1)


# --- as the action of an env
def calls_as_action(calls: Sequence[ToolCall]) -> str:
    """Calls as the action of an env that acts by tools: text, which every worker takes."""
    return msgspec.json.encode(calls).decode()


def calls_of_action(action: str) -> list[ToolCall]:
    """The calls in an action; none where it is no list of calls.

    >>> calls_of_action('[{"name": "look", "arguments": {}}]')
    [ToolCall(name='look', arguments={}, error=None)]
    """
    try:
        calls = msgspec.json.decode(action, type=list[ToolCall])
    except BROKEN:
        return []
    return [
        call
        if call.error is not None or isinstance(call.arguments, dict)
        else replace(call, error="the arguments must be a JSON object")
        for call in calls
    ]


# --- what came of them
def in_order_of_calls(calls: Sequence[str | None], results: Sequence[tuple[str | None, T]]) -> list[T]:
    """The results of parallel calls in the order of the calls; as they came, where calls or results have no ids.

    Args:
        calls: their ids.
        results: each behind the id of its call.

    Raises:
        ValueError: not every call has its one result; the message names the id.

    >>> in_order_of_calls(["a", "b"], [("b", "20"), ("a", "10")])
    ['10', '20']
    """
    given = [call for call, _ in results]
    if any(ids and set(ids) == {None} for ids in (calls, given)):
        return [result for _, result in results]
    for what, ids in (("call", calls), ("result", given)):
        if None in ids:
            raise ValueError(f"a {what} has no id, while others have one")
        if twice := [call for place, call in enumerate(ids) if call in ids[:place]]:
            raise ValueError(f"two {what}s have the id {twice[0]!r:.80}")
    if unknown := [call for call in given if call not in calls]:
        raise ValueError(f"there is a result of the call {unknown[0]!r:.80}, which was not made")
    if missing := [call for call in calls if call not in given]:
        raise ValueError(f"the call {missing[0]!r:.80} has no result")
    found = dict(results)
    return [found[call] for call in calls]


# --- the texts around them, where a model's own template has none
def written_call(call: ToolCall) -> str:
    """A tool call as the model would write it, keys sorted."""
    value = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(value, sort_keys=True, ensure_ascii=False)}\n</tool_call>"


def written_in_xml(call: ToolCall) -> str:
    """A tool call as Qwen3-Coder writes it."""
    lines = ["<tool_call>", f"<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={name}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def written_result(text: str) -> str:
    """A tool's result as the model is shown it."""
    return f"<tool_response>\n{text}\n</tool_response>"


def with_tools(system: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message with the schemas of tools behind it."""
    schemas = "\n".join(json.dumps(tool, sort_keys=True, ensure_ascii=False) for tool in tools)
    told = (
        "# Tools\n\nYou may call one or more functions. Their signatures:\n<tools>\n"
        + schemas
        + "\n</tools>\n\n"
        'For each call return a JSON object in tags:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    )
    return f"{system}\n\n{told}" if system else told
