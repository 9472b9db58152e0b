"""OpenAI's chat completions and responses: requests into turns, answers into JSON and streams.

What is not honoured is refused by name; nothing is dropped in silence.
"""

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
    flag,
    listed,
    messages_of,
    offered_tool,
    result_part,
    turns_of,
)
from shoal.gateway.sessions import Choice
from shoal.samplers.sampler import Sampling

UNUSED = {"seed", "reasoning", "reasoning_effort", "thinking", "verbosity"}
"""Parameters that have no effect here, and are counted."""
SILENT = {
    "service_tier", "metadata", "store", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
"""Parameters that ask nothing of the answer."""
CHAT = UNUSED | SILENT | {
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "n", "stream",
    "stream_options", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "frequency_penalty",
    "presence_penalty", "response_format", "top_k", "min_p", "add_generation_prompt", "continue_final_message",
    "return_token_ids",
}  # fmt: skip
"""Parameters of a chat completion that are known; some of them may only have the value that changes nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "top_logprobs": (0,),
}  # fmt: skip
"""Values of parameters that change nothing; others are refused."""


def check(body: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Refuse parameters that are not honoured, by name; null is none."""
    for name, value in body.items():
        if value is None:
            continue
        if name not in known:
            raise RefusedError(f"{name}: this parameter is not served here; leave it out", param=name)
        if name in neutral and value not in neutral[name]:
            allowed = " or ".join(map(repr, neutral[name]))
            advice = f"it may be {allowed}" if allowed else "leave it out"
            raise RefusedError(f"{name}={value!r:.80} is not served here; {advice}", param=name)


def number(body: Mapping[str, Any], name: str, kind: type, default: Any, low: float, high: float) -> Any:
    """A number of a request, within its limits."""
    value = body.get(name)
    if value is None:
        return default
    right = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        raise RefusedError(
            f"{name} must be {kind.__name__} in [{low:g}, {high:g}], got {value!r:.80}", param=name
        )
    return value


def sampling_of(body: Mapping[str, Any], most: int, *names: str) -> Sampling:
    """How tokens are picked; `names` are the parameters that limit them."""
    limits = [number(body, name, int, most, 1, 10**9) for name in names]
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(listed(stop or None, "stop"))
    if not all(isinstance(text, str) and text for text in stop):
        raise RefusedError("stop must be a text or a list of texts", param="stop")
    return Sampling(
        min(most, *limits), number(body, "temperature", float, 1.0, 0, 2), stop,
        top_p=number(body, "top_p", float, 1.0, 1e-9, 1), top_k=number(body, "top_k", int, 0, -1, 10**9),
        min_p=number(body, "min_p", float, 0.0, 0, 1),
    )  # fmt: skip


def text_of(content: Any, param: str) -> str:
    """The text of a message: text, a list of parts with text, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RefusedError(f"{param}: only text is served here, got {kind!r}", param=param)
            parts.append(part["text"])
        return "".join(parts)
    raise RefusedError(f"{param} must be text, got {type(content).__name__}", param=param)


ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The arguments of a tool that takes one text."""


def tools_of(body: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """The fields of a `ChatRequest` that say which tools may be called; what is said of calls becomes a wish."""
    found, custom = [], set()
    for tool in listed(body.get("tools"), "tools"):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else "function"
        if kind == "custom":
            function: Any = tool.get("custom", tool)
            parameters: Any = ONE_TEXT
        elif kind == "function":
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            parameters = function.get("parameters") if isinstance(function, Mapping) else None
        else:
            raise RefusedError(f"tools: one of type {kind!r:.40} is not served here", param="tools")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedError("tools: each must be a function with a name", param="tools")
        found.append(offered_tool(function["name"], function.get("description"), parameters))
        if kind == "custom":
            custom.add(function["name"])
    may_call = wishes.choose_tool(body.get("tool_choice"), ("required", "function", "custom"))
    wishes.one_call(bool(found) and body.get("parallel_tool_calls") is False, "parallel_tool_calls")
    return {"tools": wishes.offered(found) if may_call else (), "custom": frozenset(custom)}


def chat(body: Mapping[str, Any], most: int) -> ChatRequest:
    """A chat completion as turns, to be answered in at most `most` tokens."""
    check(body, CHAT)
    messages = messages_of(body)
    wishes = Wishes()
    wishes.unused(body, UNUSED)
    wishes.answer_in_json(body.get("response_format"), "response_format")
    tools = tools_of(body, wishes)
    begun = ""
    if _goes_on(body):
        *messages, last = messages
        begun = begun_answer(last, len(messages))
    several = len(set(map(_speaker, messages)) - {None}) > 1
    parts = wishes.in_front(_chat_message(place, message, several) for place, message in enumerate(messages))
    return ChatRequest(
        turns_of(parts), sampling_of(body, most, "max_tokens", "max_completion_tokens"),
        choices=number(body, "n", int, 1, 1, 128), logprobs=flag(body, "logprobs"),
        usage=flag(fields_of(body, "stream_options"), "include_usage"), begun=begun,
        token_ids=flag(body, "return_token_ids"), **tools, **wishes.noted,
    )  # fmt: skip


def _goes_on(body: Mapping[str, Any]) -> bool:
    """Whether the last message is an answer to go on with, as servers of open models have it."""
    goes_on = flag(body, "continue_final_message")
    ask = body.get("add_generation_prompt")
    if ask not in (None, not goes_on):
        raise RefusedError(
            f"add_generation_prompt={ask!r:.40}: it must be false with continue_final_message=true, else true",
            param="add_generation_prompt",
        )
    return goes_on


def begun_answer(message: Any, index: int) -> str:
    """The text of an answer that is to be gone on with."""
    param = f"messages[{index}]"
    if not isinstance(message, Mapping) or message.get("role") != "assistant" or message.get("tool_calls"):
        raise RefusedError(
            f"{param} must be a message of the assistant without calls, to go on with it", param=param
        )
    return text_of(message.get("content"), f"{param}.content")


def _speaker(message: Any) -> str | None:
    """The name of who answered, as agents send it that let several models speak."""
    spoke = isinstance(message, Mapping) and message.get("role") == "assistant"
    return str(message["name"]) if spoke and message.get("name") is not None else None


def _chat_message(index: int, message: Any, several: bool) -> Part:
    """One message; the name of who answered is shown where there are several."""
    param = f"messages[{index}]"
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RefusedError(
            f"{param}.role must be system, user, assistant or tool, got {role!r:.40}", param=param
        )
    for name in ("function_call", "audio", "refusal"):
        if message.get(name) is not None:
            advice = "use tool_calls" if name == "function_call" else "leave it out"
            raise RefusedError(f"{param}.{name} is not served here; {advice}", param=param)
    text, name = text_of(message.get("content"), f"{param}.content"), message.get("name")
    if name is not None and not isinstance(name, str):
        raise RefusedError(f"{param}.name must be text, got {name!r:.80}", param=param)
    if role == "tool":
        return result_part(text, message.get("tool_call_id"), param, tool=name or "")
    if name and (role != "assistant" or several):
        text = f"{name}: {text}"
    if role != "assistant":
        return Part("user" if role == "user" else "system", text, param)
    calls = []
    for call in listed(message.get("tool_calls"), f"{param}.tool_calls"):
        kind = call.get("type") if isinstance(call, Mapping) else None
        custom = kind == "custom"
        function = call.get("custom" if custom else "function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RefusedError(f"{param}.tool_calls: each must be a function", param=param)
        given = {"input": function.get("input")} if custom else arguments_of(function.get("arguments"), param)
        calls.append((call.get("id"), ToolCall(str(function.get("name")), given)))
    return answer_part(text, calls, param)


# --- answers
def chat_answer(asked: ChatRequest, session: str, answers: Sequence[Choice]) -> dict[str, Any]:
    """A chat completion."""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {
            "index": index, "message": _message(asked, answer), "finish_reason": _finish(answer), "logprobs": None,
        }  # fmt: skip
        if asked.token_ids:
            choice["token_ids"] = list(answer.completion.token_ids)
        if asked.logprobs:
            pairs = zip(answer.pieces, answer.completion.logprobs, strict=True)
            content: list[dict[str, Any]] = [
                {"token": text, "logprob": p, "bytes": list(text.encode()), "top_logprobs": []}
                for text, p in pairs
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        choices.append(choice)
    more = {"prompt_token_ids": list(answers[0].prompt_ids)} if asked.token_ids else {}
    return {
        "id": f"chatcmpl-{session}-{answers[0].number}", "object": "chat.completion", "created": int(time.time()),
        "model": asked.model, "choices": choices, **more,
        "usage": usage_of(answers),
    }  # fmt: skip


def usage_of(answers: Sequence[Choice]) -> dict[str, Any]:
    """How many tokens were read and written."""
    read, known = answers[0].prompt_tokens, answers[0].prompt_tokens - answers[0].new_tokens
    written = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": known},
    }  # fmt: skip


def _message(asked: ChatRequest, answer: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        found["content"] = answer.text or None
        found["tool_calls"] = [
            {"id": call_id(answer, index), **_call(call, call.name in asked.custom)}
            for index, call in enumerate(answer.calls)
        ]
    return found


def _call(call: ToolCall, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": call.name, "input": one_text(call)}}
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def one_text(call: ToolCall) -> str:
    """The text of a call of a tool that takes one."""
    given = call.arguments.get("input", "") if isinstance(call.arguments, Mapping) else call.arguments
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def call_id(answer: Choice, index: int) -> str:
    """The id of a tool call."""
    return f"call_{answer.number}_{index}"


def _finish(answer: Choice) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def chat_stream(asked: ChatRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
    """A finished chat completion as server-sent events."""
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def event(**more: Any) -> bytes:
        return b"data: " + json.dumps({**head, **more}).encode() + b"\n\n"

    for choice in answer["choices"]:
        message = dict(choice["message"])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
        for index, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            entry = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None}
            yield event(choices=[entry])
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield event(choices=[{**last, "logprobs": choice["logprobs"]}])
    if asked.usage:
        yield event(choices=[], usage=answer["usage"])
    yield b"data: [DONE]\n\n"
