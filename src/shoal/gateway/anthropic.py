"""Anthropic's messages: requests into turns, answers into JSON and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.envs.actions import ToolCall
from shoal.envs.tools import Tool
from shoal.gateway.chats import (
    ChatRequest,
    Part,
    RefusedError,
    Wishes,
    answer_part,
    fields_of,
    listed,
    messages_of,
    offered_tool,
    result_part,
    turns_of,
)
from shoal.gateway.openai import call_id, check, sampling_of, text_of
from shoal.gateway.sessions import Choice

THREAD = "thread"
"""A conversation that the server keeps; packages of Anthropic that are told so send the whole one instead."""
UNUSED = {"thinking", "context_management", "speed"}
"""Parameters that nothing comes of here."""
KNOWN = UNUSED | {
    "model", "messages", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "system", "tools",
    "tool_choice", "metadata", "service_tier", "output_config", "output_format", "betas", "inference_geo",
    THREAD,
}  # fmt: skip


def messages(body: Mapping[str, Any], most: int) -> ChatRequest:
    """A request of the messages API as turns, to be answered in at most `most` tokens."""
    if body.get("thread"):
        raise RefusedError("thread: no conversation is kept here, send the whole one", param=THREAD)
    check(body, KNOWN, {})
    given = messages_of(body)
    wishes = Wishes()
    wishes.unused({} if body.get("thinking") == {"type": "disabled"} else body, {"thinking"})
    wishes.unused(body, UNUSED - {"thinking"})
    output = fields_of(body, "output_config")
    wishes.answer_in_json(output.get("format"), "output_config.format")
    wishes.answer_in_json(body.get("output_format"), "output_format")
    wishes.unused(output, {"effort"})
    choice = body.get("tool_choice")
    offered = [_tool(tool) for tool in listed(body.get("tools"), "tools")]
    may_call = wishes.choose_tool(choice, ("any", "tool"))
    one = isinstance(choice, Mapping) and bool(choice.get("disable_parallel_tool_use"))
    wishes.one_call(bool(offered) and one, "disable_parallel_tool_use")
    tools = wishes.offered(offered) if may_call else ()
    system = text_of(body.get("system"), "system")
    begun = ""
    if _role(given[-1]) == "assistant":  # to be gone on with
        [part] = _message(len(given) - 1, given[-1])
        if part.calls:
            raise RefusedError("messages: the last one calls tools, and has no results", param="messages")
        given, begun = given[:-1], part.text
    parts = [Part("system", system)] if system else []
    parts += (part for place, message in enumerate(given) for part in _message(place, message))
    stop = listed(body.get("stop_sequences"), "stop_sequences")
    if not all(isinstance(text, str) and text for text in stop):
        raise RefusedError("stop_sequences must be a list of texts", param="stop_sequences")
    sampling = sampling_of({**body, "stop": stop}, most, "max_tokens")
    return ChatRequest(turns_of(wishes.in_front(parts)), sampling, tools=tools, begun=begun, **wishes.noted)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _tool(tool: Any) -> Tool:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise RefusedError("tools: each must have a name and an input_schema", param="tools")
    if tool.get("type", "custom") != "custom":
        raise RefusedError(f"tools: one of type {tool['type']!r:.40} is not served here", param="tools")
    return offered_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _message(index: int, message: Any) -> list[Part]:
    param = f"messages[{index}]"
    role = _role(message)
    if role not in ("user", "assistant", "system"):
        raise RefusedError(f"{param}.role must be user or assistant, got {role!r:.40}", param=param)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise RefusedError(f"{param}.content must be text or a list of blocks", param=param)
    texts: list[str] = []
    calls: list[tuple[Any, ToolCall]] = []
    found: list[Part] = []  # of the user
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            text = text_of(block.get("text"), param)
            texts.append(text)
            found.append(Part("system" if role == "system" else "user", text, param))
        elif kind == "tool_use" and role == "assistant":
            calls.append((block.get("id"), ToolCall(str(block.get("name")), block.get("input") or {})))
        elif kind == "tool_result" and role == "user":
            text, failed = text_of(block.get("content"), param), bool(block.get("is_error"))
            found.append(result_part(text, block.get("tool_use_id"), param, failed=failed))
        elif kind not in ("thinking", "redacted_thinking"):
            raise RefusedError(f"{param}: a block of {kind!r:.40} is not served here", param=param)
    if role == "assistant":
        return [answer_part("".join(texts), calls, param)]
    return found or [Part("user", "", param)]


def message_answer(asked: ChatRequest, session: str, answers: Sequence[Choice]) -> dict[str, Any]:
    """A message of the assistant."""
    answer = answers[0]
    content: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    for index, call in enumerate(answer.calls):
        content.append({"type": "tool_use", "id": f"toolu_{call_id(answer, index)}", "name": call.name,
                        "input": call.arguments})  # fmt: skip
    ended = "end_turn" if answer.stop is None else "stop_sequence"
    ended = "max_tokens" if answer.cut else "tool_use" if answer.calls else ended
    return {
        "id": f"msg_{session}_{answer.number}", "type": "message", "role": "assistant", "model": asked.model,
        "content": content, "stop_reason": ended, "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.completion.token_ids)},
    }  # fmt: skip


def message_stream(asked: ChatRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
    """A finished message as server-sent events."""

    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()

    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**answer["usage"], "output_tokens": 0},
    }
    yield event("message_start", message=begun)
    for index, block in enumerate(answer["content"]):
        text = block["type"] == "text"
        empty = {**block, "text": ""} if text else {**block, "input": {}}
        yield event("content_block_start", index=index, content_block=empty)
        if text:
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    last = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=last, usage={"output_tokens": answer["usage"]["output_tokens"]})
    yield event("message_stop")
