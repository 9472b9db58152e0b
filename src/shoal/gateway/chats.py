"""What a program says and what a model answers, in one form for all wires: turns of text, tools among them.

Tools are written as Hermes and Qwen write them, see `shoal.rollout.tools.calls`. Two messages that mean the same have
the same text here, in whatever order a tool's arguments stand, so a program that sends an answer back is recognised.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ShoalError
from shoal.envs.actions import ToolCall
from shoal.rollout.samplers.sampler import Sampling
from shoal.rollout.tools.calls import tagged_calls, with_tools, written_call


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


@dataclass(frozen=True)
class Asked:
    """A request of a program."""

    turns: tuple[tuple[str, str], ...]  # role and text; roles alternate but for a system turn in front
    sampling: Sampling
    choices: int = 1
    model: str = ""
    stream: bool = False
    logprobs: bool = False
    tools: tuple[str, ...] = ()  # their names
    usage: bool = False  # whether a stream ends with the count of tokens


def with_schemas(
    parts: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Messages with the schemas of tools behind those of the system that come first."""
    if not tools:
        return list(parts)
    system = [text for _, text in itertools.takewhile(lambda part: part[0] == "system", parts)]
    return [("system", with_tools("\n".join(system), tools)), *parts[len(system) :]]


def from_json(text: str | bytes) -> Any:
    """The value of JSON that every reader of JSON can read: no NaN, no half of a surrogate pair.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


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


def turns_of(parts: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Messages as turns: those of one side that follow each other become one, and there must be something to answer."""
    turns: list[tuple[str, str]] = []
    for role, text in parts:
        if role == "system" and turns and turns[-1][0] != "system":
            raise RefusedError("messages: a system message must come before all others", param="messages")
        if turns and turns[-1][0] == role:
            turns[-1] = role, f"{turns[-1][1]}\n{text}"
        else:
            turns.append((role, text))
    if not turns or turns[-1][0] != "user":
        raise RefusedError(
            "messages: the last message must be of the user or a tool, so that there is something to answer",
            param="messages",
        )
    first = turns[1 if turns[0][0] == "system" else 0 :][:1]
    if first and first[0][0] != "user":
        raise RefusedError(
            "messages: the first message after the system's must be the user's", param="messages"
        )
    return tuple(turns)
