"""OpenAI's completions: a text, or tokens, that the model goes on with as they are, without a chat template."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.gateway.chats import ChatRequest, Part, RefusedError, Turn, Wishes, fields_of, flag
from shoal.gateway.openai import SILENT, check, number, sampling_of, usage_of
from shoal.gateway.sessions import Choice

KNOWN = SILENT | {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "n", "stream", "stream_options",
    "logprobs", "echo", "best_of", "suffix", "frequency_penalty", "presence_penalty", "seed", "return_token_ids",
    "add_special_tokens",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "best_of": (1,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logprobs": (0, 1), "add_special_tokens": (False,),
}  # fmt: skip


def completion(body: Mapping[str, Any], most: int) -> ChatRequest:
    """A completion as one turn that is no chat, to be answered in at most `most` tokens."""
    check(body, KNOWN, NEUTRAL)
    given: Any = body.get("prompt")
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        [given] = given
    whole = (
        isinstance(given, list) and bool(given) and all(type(token) is int and token >= 0 for token in given)
    )
    if not whole and not (isinstance(given, str) and given):
        raise RefusedError("prompt must be one text, or a list of token ids", param="prompt")
    wishes = Wishes()
    wishes.unused(body, {"seed"})
    text = given if isinstance(given, str) else json.dumps(given)
    return ChatRequest(
        (Turn("user", (Part("user", text, "prompt"),)),), sampling_of({"max_tokens": 16, **body}, most, "max_tokens"),
        choices=number(body, "n", int, 1, 1, 128), logprobs=body.get("logprobs") is not None,
        usage=flag(fields_of(body, "stream_options"), "include_usage"),
        token_ids=flag(body, "return_token_ids"), raw=given if isinstance(given, str) else tuple(given),
        **wishes.noted,
    )  # fmt: skip


def completion_answer(asked: ChatRequest, session: str, answers: Sequence[Choice]) -> dict[str, Any]:
    """A completion."""
    choices = []
    for index, answer in enumerate(answers):
        done = answer.completion
        choice: dict[str, Any] = {
            "index": index, "text": answer.text, "finish_reason": "length" if answer.cut else "stop", "logprobs": None,
        }  # fmt: skip
        if asked.logprobs:
            said = {"tokens": list(answer.pieces), "token_logprobs": list(done.logprobs)}
            choice["logprobs"] = {**said, "top_logprobs": None, "text_offset": None}
        if asked.token_ids:
            choice |= {"token_ids": list(done.token_ids), "prompt_token_ids": list(answer.prompt_ids)}
        choices.append(choice)
    return {
        "id": f"cmpl-{session}-{answers[0].number}", "object": "text_completion", "created": int(time.time()),
        "model": asked.model, "choices": choices, "usage": usage_of(answers),
    }  # fmt: skip


def completion_stream(asked: ChatRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
    """A finished completion as server-sent events."""
    head = {key: answer[key] for key in ("id", "object", "created", "model")}
    for choice in answer["choices"]:
        yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    if asked.usage:
        yield b"data: " + json.dumps({**head, "choices": [], "usage": answer["usage"]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"
