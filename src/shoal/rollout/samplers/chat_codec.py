"""Chats as reversible numbers, for servers that take messages and keep their tokens to themselves.

The "tokens" here are Unicode code points and marks for roles: exact to hand over and to store, useless to learn
from. That is why an engine that uses them is for evaluation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Message

_MARKS = 0x110000  # the first number that is no code point
SYSTEM, USER, ASSISTANT, IMAGE = range(_MARKS, _MARKS + 4)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_NAMES = {mark: role for role, mark in _ROLES.items()}


class ChatCodec:
    """Messages to numbers and back."""

    takes_images = True
    size = _MARKS
    """How many tokens a response may be of: the marks are the prompt's."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as code points."""
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        """Code points as text, marks left out."""
        return "".join(chr(i) for i in ids if i < _MARKS)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Each message after the mark of its role, pictures first; then the assistant's mark."""
        ids: list[int] = []
        for message in messages:
            pictures = (IMAGE,) * message.get("images", 0)
            ids += (_ROLES[message["role"]], *pictures, *self.encode(message["content"]))
        return (*ids, ASSISTANT)

    def extend(self, response_ids: tuple[int, ...], message: Message) -> tuple[int, ...]:
        """The message and the assistant's mark; a response needs no end of its own."""
        return self.start([message])

    def messages(self, ids: Sequence[int], images: Sequence[str]) -> list[dict[str, Any]]:
        """The chat for `/v1/chat/completions`; what stands after the last assistant mark is a prefill.

        Raises:
            EngineError: there are more or fewer pictures than marks for them.
        """
        chat: list[dict[str, Any]] = []
        waiting = list(images)
        if not ids or ids[0] not in _NAMES:
            raise EngineError("this prompt was not made by the engine's own tokenizer")
        for i in ids:
            if i in _NAMES:
                chat.append({"role": _NAMES[i], "content": [], "text": []})
            elif i == IMAGE:
                if not waiting:
                    raise EngineError(
                        f"the prompt shows more pictures than the {len(images)} that came with it"
                    )
                chat[-1]["content"].append({"type": "image_url", "image_url": {"url": waiting.pop(0)}})
            else:
                chat[-1]["text"].append(chr(i))
        if waiting:
            raise EngineError(f"{len(waiting)} of {len(images)} pictures have no place in the prompt")
        for message in chat:
            text = "".join(message.pop("text"))
            pictures = message["content"]
            message["content"] = [*pictures, {"type": "text", "text": text}] if pictures else text
        if chat[-1]["role"] == "assistant" and not chat[-1]["content"]:
            chat.pop()
        return chat
