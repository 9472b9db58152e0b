"""Where a chat template would write a chat otherwise than the model saw it, and which piece of it does so.

The tokens of an episode are never rewritten here. But a template that cuts thoughts or a newline out of earlier
turns makes the model see, in append mode, chats that it was not trained on: that should be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.rollout.samplers.sampler import Message


@runtime_checkable
class Renders(Protocol):
    """A tokenizer that can say what its template makes of a whole chat."""

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the template writes it, up to where the assistant begins."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Tokens as text, control tokens included."""
        ...


@dataclass(frozen=True, slots=True)
class Drift:
    """The first place where the two differ."""

    piece: str  # which part of the chat it lies in
    seen: str  # what the model saw there, from a few characters before
    written: str  # what the template writes there

    def __str__(self) -> str:
        return f"in {self.piece} the model saw {self.seen!r}, the template writes {self.written!r}"


def find_drift(tokenizer: object, chat: Sequence[Message], prompt_ids: Sequence[int]) -> Drift | None:
    """Compare `prompt_ids` with the template's text for `chat`; None when they agree.

    Texts are compared, not tokens: a model may spell a word with other tokens than the tokenizer would, and
    those tokens are kept. Tokenizers without a template (which cannot `render`) never drift.
    """
    if not isinstance(tokenizer, Renders):
        return None
    seen, written = tokenizer.spell(prompt_ids), tokenizer.render(chat)
    if seen == written:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(seen, written, strict=False)) if a != b),
        min(len(seen), len(written)),
    )
    shown = slice(max(0, at - 10), at + 30)
    return Drift(_piece(seen, chat, at), seen[shown], written[shown])


def _piece(text: str, chat: Sequence[Message], at: int) -> str:
    """Name the part of `text` that character `at` stands in: a message, or what the template puts around it."""
    start = 0
    for number, message in enumerate(chat):
        begin = text.find(message["content"], start)
        if begin < 0:
            return f"message {number} ({message['role']})"
        if at < begin:
            return f"what the template puts before message {number} ({message['role']})"
        if at < begin + len(message["content"]):
            return f"message {number} ({message['role']})"
        start = begin + len(message["content"])
    return "what the template puts after the last message"
