"""Prompts: what the agent is told each turn, built from templates that are data.

Two modes. `window`: every turn is a fresh chat that shows the last `history` turns, so each turn is a training
sample of its own. `append`: the chat grows, each prompt extends the tokens before it, and an episode is one
sample. What the model wrote is kept as tokens in both; nothing is ever tokenized again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shoal.core.errors import ConfigError, did_you_mean
from shoal.rollout.engine import ChatTokenizer, Message

FIELDS = ("instructions", "observation", "history", "actions", "step", "max_turns")
TURN_FIELDS = ("step", "observation", "response", "action", "reward")
_FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class PromptConfig:
    """Templates and what they show; `{name}` stands for a field, everything else is text."""

    mode: Literal["window", "append"] = "window"
    history: int = 2
    """Turns before the present one that a `window` prompt shows."""
    system: str = ""
    """System message; empty for none."""
    first: str = (
        "{instructions}\n\n{observation}\n\nPossible actions: {actions}. "
        "Answer with one of them inside <action> and </action>."
    )
    """User message of the first turn."""
    later: str = (
        "{instructions}\n\n{history}\n\nNow, after {step} steps:\n{observation}\n\nPossible actions: {actions}. "
        "Answer with one of them inside <action> and </action>."
    )
    """User message of every later turn."""
    turn: str = "Step {step}:\n{observation}\nYour action: {action}"
    """One past turn inside `{history}`."""
    prefill: str = ""
    """Text that the answer begins with, given to the model rather than asked of it."""

    def __post_init__(self) -> None:
        if self.mode not in ("window", "append"):
            raise ConfigError(f"prompt.mode must be 'window' or 'append', got {self.mode!r}")
        if self.history < 0:
            raise ConfigError(f"prompt.history must be at least 0, got {self.history}")
        if self.mode == "append" and self.prefill:
            raise ConfigError("prompt.prefill works in window mode only: in append mode it would be written twice")
        for name, fields in (("first", FIELDS), ("later", FIELDS), ("turn", TURN_FIELDS)):
            for field in _FIELD.findall(getattr(self, name)):
                if field not in fields:
                    raise ConfigError(f"prompt.{name} has no field {{{field}}}.{did_you_mean(field, fields)}")


@dataclass(frozen=True, slots=True)
class PastTurn:
    """What a prompt may say of a turn that is over."""

    observation: str
    response: str
    action: str
    reward: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt is made from."""

    instructions: str
    observation: str
    actions: Sequence[str]
    past: Sequence[PastTurn]
    max_turns: int


class Prompter:
    """Scenes to prompt tokens, for one tokenizer."""

    def __init__(self, config: PromptConfig, tokenizer: ChatTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._start = lru_cache(maxsize=4096)(self._tokenize)

    def prompt(
        self, scene: Scene, before: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ) -> tuple[int, ...]:
        """The tokens that the next response is sampled after.

        Args:
            scene: the present state and the past.
            before: prompt and response of the turn before, None on the first turn.
        """
        text = self.message(scene)
        if before is None or self.config.mode == "window":
            return self._start(text)
        prompt, response = before
        return prompt + response + self.tokenizer.extend(response, {"role": "user", "content": text})

    def message(self, scene: Scene) -> str:
        """The user message of this turn."""
        template = self.config.later if scene.past else self.config.first
        shown = scene.past[len(scene.past) - self.config.history :] if self.config.history else ()
        first = len(scene.past) - len(shown)
        history = "\n".join(
            fill(
                self.config.turn,
                {
                    "step": str(first + index + 1),
                    "observation": turn.observation,
                    "response": turn.response,
                    "action": turn.action,
                    "reward": f"{turn.reward:g}",
                },
            )
            for index, turn in enumerate(shown)
        )
        fields = {
            "instructions": scene.instructions,
            "observation": scene.observation,
            "history": history,
            "actions": ", ".join(scene.actions),
            "step": str(len(scene.past)),
            "max_turns": str(scene.max_turns),
        }
        return fill(template, fields)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        messages: list[Message] = [{"role": "user", "content": text}]
        if self.config.system:
            messages.insert(0, {"role": "system", "content": self.config.system})
        prefill = self.tokenizer.encode(self.config.prefill) if self.config.prefill else ()
        return self.tokenizer.start(messages) + prefill


def fill(template: str, fields: dict[str, str]) -> str:
    """Replace each `{name}` by its field in one pass: braces inside a field stay as they are.

    >>> fill("{a} {b}", {"a": "{b}", "b": "x"})
    '{b} x'
    """
    return _FIELD.sub(lambda match: fields[match[1]], template)
