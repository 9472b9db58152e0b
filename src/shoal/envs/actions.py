"""From what a model wrote to what an env takes: small grammars over the last complete tag, never evaluated.

The strict rule: thoughts (`<think>…</think>`, an unclosed one up to the end) are cut away, then the last
complete `<action>…</action>` counts, and its content must equal one of the env's words (case and outer space
aside). Nothing is guessed from substrings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_TEXT = 65_536
"""Characters looked at, from the end: longer model text cannot slow a step down."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Projected:
    """The actions found in one response; `valid` is False when nothing usable came."""

    actions: tuple[int | str, ...]
    valid: bool


@dataclass(frozen=True)
class Projection:
    """How text becomes actions of one kind of env.

    Attributes:
        lookup: the env's words and what they stand for; empty for free text.
        parse: for free text, from the content of the tag to the action, or None when it is not one.
        invalid: the action that stands for "nothing usable".
        tags: tag names that may hold an action.
        separator: what parts several actions in one response, None when only one is allowed.
        max_actions: how many of them count; more make the response invalid.
    """

    lookup: Mapping[str, int | str] = field(default_factory=dict)
    parse: Callable[[str], int | str | None] | None = None
    invalid: int | str = 0
    tags: tuple[str, ...] = ("action",)
    separator: str | None = None
    max_actions: int = 1

    def words(self) -> list[str]:
        """The words of a closed vocabulary, in the order of the env."""
        return list(self.lookup)

    def __call__(self, text: str) -> Projected:
        """The actions in a response; never raises, whatever the text."""
        content = last_tag(text, self.tags)
        if content is None:
            return Projected((self.invalid,), False)
        parts = content.split(self.separator) if self.separator else [content]
        actions = [self._one(part.strip()) for part in parts]
        if len(actions) > self.max_actions or None in actions:
            return Projected((self.invalid,), False)
        return Projected(tuple(action for action in actions if action is not None), True)

    def _one(self, word: str) -> int | str | None:
        if self.parse is not None:
            return self.parse(word)
        return self._folded.get(word.casefold())

    @property
    def _folded(self) -> dict[str, int | str]:
        return {word.casefold(): action for word, action in self.lookup.items()}


def last_tag(text: str, tags: tuple[str, ...] = ("action",)) -> str | None:
    """The content of the last complete tag outside thoughts, or None; linear in the length of the text."""
    text = _THOUGHT.sub("", text[-MAX_TEXT:])
    lowered = text.lower()
    best: tuple[int, str] | None = None
    for tag in tags:
        end = lowered.rfind(f"</{tag}>")
        start = lowered.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
        if start >= 0 and (best is None or end > best[0]):
            best = (end, text[start + len(tag) + 2 : end])
    return best[1] if best else None
