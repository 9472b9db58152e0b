"""The tiny engine's tokens: control marks, tags and action words whole, everything else by character."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from shoal.rollout.samplers.sampler import Message

CONTROL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<unknown>")
PAD, END, SYSTEM, USER, ASSISTANT, UNKNOWN = range(len(CONTROL))
TAGS = ("<action>", "</action>", "<answer>", "</answer>", "<think>", "</think>")
CHARACTERS = tuple(string.digits + string.ascii_letters + string.punctuation + " \n√")
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class TinyTokenizer:
    """Greedy longest-match over tags, `words` and characters; control tokens never come from text.

    Args:
        words: action words that shall be one token each.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = tuple(dict.fromkeys(word for word in words if len(word) > 1))
        self.tokens = CONTROL + TAGS + self.words + CHARACTERS
        offset = len(CONTROL)
        self._ids = {token: index + offset for index, token in enumerate(self.tokens[offset:])}
        whole = sorted(TAGS + self.words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, whole)) + "|(?s:.)")

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as token ids; a character outside the vocabulary becomes `<unknown>`."""
        get = self._ids.get
        return tuple(get(piece, UNKNOWN) for piece in self._pattern.findall(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, control tokens left out (`<unknown>` shows as U+FFFD)."""
        text = (self.tokens[i] if i >= len(CONTROL) else "�" if i == UNKNOWN else "" for i in ids)
        return "".join(text)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """`<role>content` for each message, then `<assistant>`."""
        ids: list[int] = []
        for message in messages:
            ids += (_ROLES[message["role"]], *self.encode(message["content"]))
        return (*ids, ASSISTANT)

    def extend(self, response_ids: tuple[int, ...], message: Message) -> tuple[int, ...]:
        """The end mark if the response lacks it, the message, and `<assistant>`."""
        closing = () if response_ids and response_ids[-1] == END else (END,)
        return closing + self.start([message])
