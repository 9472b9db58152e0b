"""The messages of a row of a chat, however other programs name them.

Sources: TRL's dataset formats (prompt and completion), and ShareGPT as LLaMA-Factory describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import from_json
from shoal.splitting.readers.keys import MARKS, is_there

SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "function_call": "assistant", "observation": "tool", "tool": "tool",
    "function_response": "tool",
}  # fmt: skip
"""Whom `from` names in ShareGPT."""


def messages_of(row: Mapping[str, Any], where: str) -> Any:
    """The messages of a row, in OpenAI's form: `messages`, `conversations`, or `prompt` and `completion`.

    Raises:
        DataError: the row has none of them, or several, or a prompt that is no chat.
    """
    found = [name for name in ("messages", "conversations", "completion") if is_there(row.get(name))]
    if len(found) > 1:
        raise DataError(f"{where}: {' and '.join(found)} hold a chat each; keep one of them")
    if found == ["conversations"]:
        return _of_sharegpt(_listed(row["conversations"], where), f"{where}, conversations")
    if found == ["completion"]:
        return _of_prompt(row, where)
    if "messages" not in row:
        keys = ", ".join(sorted(row)) or "nothing"
        raise DataError(
            f"{where} must hold a list of messages in 'messages' (or 'conversations', or 'prompt' and 'completion'), "
            f"got only {keys}"
        )
    return _listed(row["messages"], where)


def _listed(value: Any, where: str) -> Any:
    return from_json(value, where) if isinstance(value, str) else value


def _of_prompt(row: Mapping[str, Any], where: str) -> list[Any]:
    """A prompt that is context, answers and all, and a completion."""
    chat: list[Any] = []
    for name in ("prompt", "completion"):
        part = row.get(name)
        if not isinstance(part, list):
            raise DataError(
                f"{where}: {name} must be a list of messages, got {type(part).__name__}; text without roles is no "
                'chat: write it as [{"role": "user", "content": …}]'
            )
        chat += map(_context, part) if name == "prompt" else part
    return chat


def _context(message: Any) -> Any:
    """A message of a prompt; an answer is not trained unless a mark says so."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    marked = any(message.get(name) is not None for name in MARKS)
    return message if marked else {**message, "trained": False}


def _of_sharegpt(turns: Any, where: str) -> Any:
    """Turns of `from` and `value`; such as have a `role` are messages already."""
    if not isinstance(turns, list):
        return turns
    return [
        _message(turn, f"{where} {number}") if isinstance(turn, dict) and "role" not in turn else turn
        for number, turn in enumerate(turns)
    ]


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    speaker, value = turn.get("from"), turn.get("value")
    if speaker not in SPEAKERS:
        raise DataError(f"{where}: from must be one of {', '.join(SPEAKERS)}, got {speaker!r}")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": SPEAKERS[speaker], "content": value}
    calls = from_json(value, where) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where}: a function_call must be JSON with name and arguments, got {value!r:.80}")
    return {**rest, "role": "assistant", "content": "", "tool_calls": calls}
