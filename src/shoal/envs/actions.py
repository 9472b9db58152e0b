"""From what a model wrote to what an env takes: small grammars over the last complete tag, never evaluated.

The strict rule: thoughts are cut away (`<think>…</think>`, an unclosed one up to the end, and all before a
`</think>` that nothing opened, since chat templates may open it in the prompt). Then the last complete
`<action>…</action>` counts, and its content must equal one of the env's words (case and outer space aside).
Nothing is guessed from substrings, and the time is linear in the length of the text whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol, get_args

from shoal.core.errors import ConfigError

MAX_TEXT = 65_536
"""Characters looked at, from the end: longer model text cannot slow a step down."""

Style = Literal["strict", "lenient", "ragen", "verl-agent"]
_CHINESE = re.compile("[\u4e00-\u9fff]")
_THOUGHT_THEN_ANSWER = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to be called."""

    name: str
    arguments: Any  # a mapping of names to JSON values; what the model wrote, where that is none
    error: str | None = None  # why it cannot be called as the model wrote it


@dataclass(frozen=True, slots=True)
class Projected:
    """What was found in one response: actions, or calls of tools; `valid` is False when nothing usable came."""

    actions: tuple[int | str, ...]
    valid: bool
    calls: tuple[ToolCall, ...] = ()
    """Where there are some, there are no actions: the model waits for the results."""


class Reader(Protocol):
    """Reads what a model wrote; a `Projection` is one, and so is what reads calls of tools before it."""

    def __call__(self, text: str, /) -> Projected:
        """The actions or calls in a response; never raises, whatever the text."""


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
        style: "strict" is the rule of this module. "ragen" and "verl-agent" reproduce what those projects do
            with a response, quirks included; "lenient" is "verl-agent" for a response with an `<action>` tag
            and "ragen" for any other.
    """

    lookup: Mapping[str, int | str] = field(default_factory=dict)
    parse: Callable[[str], int | str | None] | None = None
    invalid: int | str = 0
    tags: tuple[str, ...] = ("action",)
    separator: str | None = None
    max_actions: int = 1
    style: Style = "strict"

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ConfigError(
                f"the style of a projection must be one of {get_args(Style)}, got {self.style!r}"
            )
        if not self.tags or self.separator == "" or self.max_actions < 1:
            raise ConfigError(
                f"a projection needs a tag, a separator that is not empty, and at least one action a response; "
                f"got {self.tags}, {self.separator!r}, {self.max_actions}"
            )
        if "" in self._folded or len(self._folded) < len(self.lookup):
            raise ConfigError(f"the words for actions must differ, case aside, got {list(self.lookup)}")

    def words(self) -> list[str]:
        """The words of a closed vocabulary, in the order of the env."""
        return list(self.lookup)

    def __call__(self, text: str) -> Projected:
        """The actions in a response; never raises, whatever the text."""
        if self.style != "strict":
            return self._imitated(text[-MAX_TEXT:])
        content = last_tag(text, self.tags)
        if content is None:
            return self.nothing
        if self.separator is None:
            action = self.action_of(content)
            return self.nothing if action is None else Projected((action,), True)
        if content.count(self.separator) >= self.max_actions:
            return self.nothing
        actions = []
        for part in content.split(self.separator):
            action = self.action_of(part)
            if action is None:
                return self.nothing
            actions.append(action)
        return Projected(tuple(actions), True)

    @cached_property
    def nothing(self) -> Projected:
        """What a response without a usable action becomes."""
        return Projected((self.invalid,), False)

    def action_of(self, word: str) -> int | str | None:
        """The action that a word, or free text, stands for; None when it is none."""
        word = word.strip()
        return self._folded.get(word.casefold()) if self.parse is None else self.parse(word)

    @cached_property
    def _folded(self) -> dict[str, int | str]:
        return {word.strip().casefold(): action for word, action in self.lookup.items()}

    def _imitated(self, text: str) -> Projected:
        verl = self.style == "verl-agent" or (self.style == "lenient" and "<action>" in text.lower())
        return self._as_verl_agent(text) if verl else self._as_ragen(text)

    def _as_ragen(self, text: str) -> Projected:
        """RAGEN: the first thought that an answer follows; unknown words are dropped but make it invalid."""
        thought = text.find("<think>")
        opened = _THOUGHT_THEN_ANSWER.search(text, thought + 7) if thought >= 0 else None
        closed = text.find("</answer>", opened.end()) if opened else -1
        if opened is None or closed < 0:
            return self.nothing
        parts = text[opened.end() : closed].split(self.separator or "||")
        words = [part.strip() for part in parts if part.strip()][: self.max_actions]
        actions = [action for action in map(self.action_of, words) if action is not None]
        if not actions:
            return self.nothing
        return Projected(tuple(actions), len(actions) == len(words))

    def _as_verl_agent(self, text: str) -> Projected:
        """verl-agent: between the first `<action>` and the first `</action>`, a word that occurs in it."""
        lowered = text.lower()
        start, end = lowered.find("<action>"), lowered.find("</action>")
        if start < 0 or end < 0:
            return self.nothing
        content = lowered[start + 8 : end].strip()
        thought = "<think>" in text and "</think>" in text
        if self.parse is not None:
            return Projected((content,), thought and not _CHINESE.search(text))
        # "support" holds "up", and the order of the words decides between several: that is what it does.
        for word, action in self._in_verl_order.items():
            if word in content:
                return Projected((action,), thought)
        return self.nothing

    @cached_property
    def _in_verl_order(self) -> dict[str, int | str]:
        order = {"up": 0, "down": 1, "left": 2, "right": 3}
        words = {**self._folded}
        if "up" in words:
            words.setdefault("still", self.invalid)
        return dict(sorted(words.items(), key=lambda item: order.get(item[0], 4)))


class Tagged(NamedTuple):
    """The content of a complete tag, and where the tag begins and ends in the text."""

    content: str
    start: int
    end: int


def complete_tags(text: str, tags: tuple[str, ...], *, literal: bool = False) -> list[Tagged]:
    """The complete tags outside thoughts, in order; linear in the length of the text, of which the end is read.

    Args:
        text: what a model wrote.
        tags: their names.
        literal: whether tags inside one of them are its text, those of thoughts too.
    """
    skipped = max(0, len(text) - MAX_TEXT)
    text = text[skipped:]
    found: list[Tagged] = []
    opened: tuple[str, int, int] | None = None
    thinking = False
    for match in _tag_pattern(tags).finditer(text):
        slash, name = match[1], match[2].lower()
        if literal and opened is not None and (name, slash) != (opened[0], "/"):
            continue
        if name == "think":
            if slash and not thinking:  # it was opened before this text began
                found.clear()
            thinking, opened = not slash, None
        elif thinking:
            continue
        elif not slash:
            opened = name, match.start(), match.end()
        elif opened is not None and opened[0] == name:
            content = text[opened[2] : match.start()]
            found.append(Tagged(content, skipped + opened[1], skipped + match.end()))
            opened = None
    return found


def last_tag(text: str, tags: tuple[str, ...] = ("action",)) -> str | None:
    """The content of the last complete tag outside thoughts, or None.

    >>> last_tag("<think>not <action>up</action></think> <action>down</action>")
    'down'
    """
    found = complete_tags(text, tags)
    return found[-1].content if found else None


@lru_cache(maxsize=64)
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    # ASCII: without it `<thinK>` with a Kelvin sign would be a tag.
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, ('think', *tags)))})>", re.IGNORECASE | re.ASCII)
