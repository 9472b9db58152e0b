"""OpenAI's responses: requests into turns, answers into JSON and streams. Nothing is stored for later requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.envs.actions import ToolCall
from shoal.gateway.chats import (
    ChatRequest,
    Part,
    RefusedError,
    Wishes,
    answer_part,
    arguments_of,
    fields_of,
    result_part,
    turns_of,
)
from shoal.gateway.openai import SILENT, call_id, check, one_text, sampling_of, text_of, tools_of
from shoal.gateway.sessions import Choice

UNUSED = {"reasoning", "seed"}
"""Parameters that nothing comes of here."""
KNOWN = UNUSED | SILENT | {
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "tools", "tool_choice",
    "parallel_tool_calls", "include", "truncation", "text", "previous_response_id", "client_metadata",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (), "truncation": ("disabled", "auto"), "include": ([], ["reasoning.encrypted_content"]),
}  # fmt: skip


def response(body: Mapping[str, Any], most: int) -> ChatRequest:
    """A request of the responses API as turns, to be answered in at most `most` tokens."""
    check(body, KNOWN, NEUTRAL)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RefusedError("input must be text or a list of items", param="input")
    instructions = text_of(body.get("instructions"), "instructions")
    wishes = Wishes()
    wishes.unused(body, UNUSED)
    text = fields_of(body, "text")
    wishes.answer_in_json(text.get("format"), "text.format")
    wishes.unused(text, {"verbosity"})
    tools = tools_of(body, wishes)
    front = [Part("system", instructions, "instructions")] if instructions else []
    return ChatRequest(
        turns_of(wishes.in_front([*front, *_items(items)])), sampling_of(body, most, "max_output_tokens"),
        **tools, **wishes.noted,
    )  # fmt: skip


def _items(items: Sequence[Any]) -> Iterator[Part]:
    """Items as messages: what the assistant said and called between two inputs is one message."""
    texts: list[str] = []
    calls: list[tuple[Any, ToolCall]] = []
    for index, item in enumerate(items):
        param = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        role = item.get("role") if kind == "message" else None
        if role == "assistant":
            texts.append(text_of(item.get("content"), param))
            continue
        if kind in ("function_call", "custom_tool_call"):
            custom = kind == "custom_tool_call"
            given = {"input": item.get("input")} if custom else arguments_of(item.get("arguments"), param)
            calls.append((item.get("call_id"), ToolCall(str(item.get("name")), given)))
            continue
        if kind == "reasoning":
            continue
        if texts or calls:
            yield answer_part("".join(texts), calls, f"input[{index - 1}]")
            texts, calls = [], []
        if role in ("system", "developer"):
            yield Part("system", text_of(item.get("content"), param), param)
        elif role == "user":
            yield Part("user", text_of(item.get("content"), param), param)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            yield result_part(text_of(item.get("output"), param), item.get("call_id"), param)
        else:
            raise RefusedError(f"{param}: an item of {kind!r:.40} is not served here", param=param)
    if texts or calls:
        yield answer_part("".join(texts), calls, f"input[{len(items) - 1}]")


def response_answer(asked: ChatRequest, session: str, answers: Sequence[Choice]) -> dict[str, Any]:
    """A response."""
    answer = answers[0]
    name = f"{session}_{answer.number}"
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        ended = "incomplete" if answer.cut else "completed"
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": ended}
        output.append({**message, "content": [part]})
    for index, call in enumerate(answer.calls):
        if call.name in asked.custom:
            item = {"type": "custom_tool_call", "id": f"ctc_{name}_{index}", "input": one_text(call)}
        else:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            item = {"type": "function_call", "id": f"fc_{name}_{index}", "arguments": arguments}
        output.append({**item, "call_id": call_id(answer, index), "name": call.name, "status": "completed"})
    read, written = answer.prompt_tokens, len(answer.completion.token_ids)
    return {
        "id": f"resp_{name}", "object": "response", "created_at": int(time.time()), "model": asked.model,
        "status": "incomplete" if answer.cut else "completed", "output": output, "error": None, "instructions": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None, "metadata": {},
        "parallel_tool_calls": True, "temperature": asked.sampling.temperature, "tool_choice": "auto", "tools": [],
        "top_p": asked.sampling.top_p,
        "usage": {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": read - answer.new_tokens},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
        },
    }  # fmt: skip


def response_stream(asked: ChatRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
    """A finished response as server-sent events."""
    count = 0

    def event(kind: str, **more: Any) -> bytes:
        nonlocal count
        count += 1
        value = {"type": kind, "sequence_number": count - 1, **more}
        return f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode()

    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    for index, item in enumerate(answer["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            yield event("response.output_item.added", output_index=index, item={**item, "content": []})
            empty = {**part, "text": ""}
            yield event("response.content_part.added", **where, content_index=0, part=empty)
            yield event(
                "response.output_text.delta", **where, content_index=0, delta=part["text"], logprobs=[]
            )
            yield event("response.output_text.done", **where, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **where, content_index=0, part=part)
        else:
            custom = item["type"] == "custom_tool_call"
            kind, field = (
                ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
            )
            yield event("response.output_item.added", output_index=index, item={**item, field: ""})
            yield event(f"response.{kind}.delta", **where, delta=item[field])
            yield event(f"response.{kind}.done", **where, **{field: item[field]})
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{answer['status']}", response=dict(answer))
