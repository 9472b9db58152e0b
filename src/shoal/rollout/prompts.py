"""Prompts: the text of each turn, built from templates.

Two modes. `window`: every turn is a fresh chat that shows the last `history` turns, so each turn is a training
sample of its own. `append`: the chat grows, each prompt extends the tokens before it, and an episode is one
sample. What the model wrote is kept as tokens in both; nothing is ever tokenized again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec

from shoal.core.configuration import check_settings
from shoal.core.errors import ConfigError, EngineError, did_you_mean
from shoal.envs.tools import Tool
from shoal.rollout.tools.chat import ToolChat
from shoal.samplers.sampler import ChatTokenizer, Message
from shoal.samplers.tokenizers import first_difference

logger = logging.getLogger(__name__)

FIELDS = ("instructions", "observation", "history", "actions", "step", "max_turns")
TURNFIELDS = ("step", "observation", "response", "action", "reward")
FIELD = re.compile(r"\{([a-z_]+)\}")
_DRIFT_CHECKS = 8  # a template that rewrites earlier turns does it in the first of them


@dataclass(frozen=True)
class PromptConfig:
    """Prompt templates; `{name}` is replaced by a field, everything else is text."""

    mode: Literal["window", "append"] = "window"
    """`window`: each turn is a new chat with the last `history` turns; `append`: one growing chat."""
    history: int = 2
    """Past turns in a `window` prompt."""
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
    """Text put after the prompt; the model continues from it."""
    closing: str = ""
    """Text appended to what the model wrote, unless that ends so: with `prefill: <action>` and `closing: </action>` a
    model that answers with one word writes one token (`max_tokens: 1`)."""
    on_drift: Literal["warn", "raise", "ignore"] = "warn"
    """In append mode, and behind results of tools: what to do if the chat template would render an earlier turn
    differently."""

    def __post_init__(self) -> None:
        check_settings(self, history=0)
        if self.mode == "append" and (self.prefill or self.closing):
            raise ConfigError(
                "prompt.prefill and prompt.closing work in window mode only, since append mode keeps the model's own "
                "tokens: set both to ''"
            )
        for name, fields in (("first", FIELDS), ("later", FIELDS), ("turn", TURNFIELDS)):
            for field in FIELD.findall(getattr(self, name)):
                if field not in fields:
                    raise ConfigError(f"prompt.{name} has no field {{{field}}}.{did_you_mean(field, fields)}")

    def response(self, written: str) -> str:
        """The whole answer, of which the model wrote that; a closing that it wrote itself is not put there twice."""
        return f"{self.prefill}{written.removesuffix(self.closing)}{self.closing}"

    def written(self, response: str) -> str:
        """What the model writes of an answer."""
        return response.removeprefix(self.prefill).removesuffix(self.closing)


TOOL_PROMPT = {
    "first": "{instructions}\n\n{observation}",
    "later": "{instructions}\n\n{observation}",
    "prefill": "",
    "closing": "",
}
"""For an env that acts by tools, whose chat goes on behind their results in both modes; its own settings go before."""


@dataclass(frozen=True, slots=True)
class PastTurn:
    """The fields of a past turn."""

    observation: str
    response: str
    action: str
    reward: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The fields of a prompt."""

    instructions: str
    observation: str
    actions: Sequence[str]
    past: Sequence[PastTurn]
    max_turns: int
    n_images: int = 0  # pictures that belong to the observation


class Prompter:
    """Scenes to prompt tokens."""

    def __init__(self, config: PromptConfig, tokenizer: ChatTokenizer, tools: ToolChat | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer if tools is None else tools.tokenizer
        self.tools = tools
        if self.tools is not None and (config.prefill or config.closing):
            raise ConfigError(
                "tools work without agent_proxy.prompt.prefill and closing, which say how each answer begins and ends: "
                "set both to ''"
            )
        self.shows_images = bool(getattr(tokenizer, "takes_images", False))
        self._start = lru_cache(maxsize=4096)(self._tokenize)
        self._variants: dict[str, Prompter] = {}
        self._with_tools = lru_cache(maxsize=64)(self._offering)
        self._drift_checks = 0 if config.on_drift == "ignore" else _DRIFT_CHECKS

    def variant(self, settings: Mapping[str, Any]) -> Prompter:
        """A copy with some settings replaced, for one kind of env."""
        if not settings:
            return self
        key = repr(sorted(settings.items()))
        known = self._variants.get(key)
        if known is None:  # of several threads that come here at once, all get the one that was first
            known = self._variants.setdefault(
                key, Prompter(replace(self.config, **settings), self.tokenizer, self.tools)
            )
        return known

    def offering(self, tools: Sequence[Tool]) -> Prompter:
        """A copy for an episode whose env has these tools.

        Raises:
            ConfigError: a control token of the model stands in what a tool says of itself.
        """
        return self._with_tools(msgspec.json.encode([tool.schema for tool in tools]))

    def _offering(self, schemas: bytes) -> Prompter:
        tools = [Tool(**schema) for schema in msgspec.json.decode(schemas)]
        return Prompter(self.config, self.tokenizer, ToolChat(self.tokenizer, tools))

    def prompt(
        self, scene: Scene, before: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ) -> tuple[int, ...]:
        """The tokens that the next response is sampled after.

        Args:
            scene: the present state and the past.
            before: prompt and response of the turn before, None on the first turn.
        """
        text, images = self.message(scene), scene.n_images if self.shows_images else 0
        if before is None or self.config.mode == "window":
            return self._start(text, images)
        prompt, response = before
        message: Message = {"role": "user", "content": text}
        if images:
            message["images"] = images
        try:
            return prompt + response + self.tokenizer.extend(response, message)
        except EngineError as error:
            raise EngineError(
                f"{error}; use prompt.mode=window, where each turn is a chat of its own"
            ) from error

    @property
    def checks_drift(self) -> bool:
        """Whether `check_drift` still looks for one."""
        return self._drift_checks > 0

    def check_drift(self, chat: Sequence[Message], prompt_ids: Sequence[int]) -> None:
        """Compare an append prompt with what the chat template makes of the same chat; to warn, the first few times.

        Raises:
            EngineError: they differ and `on_drift` is "raise"; the message names the piece of the template.
        """
        if not self.checks_drift:
            return
        if self.config.on_drift == "warn":  # which episodes are ended must not depend on which came first
            self._drift_checks -= 1
        if self.config.system:
            chat = [{"role": "system", "content": self.config.system}, *chat]
        if self.tools is not None:
            chat = self.tools.with_tools(chat)
        try:
            drift = find_drift(self.tokenizer, chat, prompt_ids)
        except EngineError as error:  # there are templates that refuse an answer for what it holds
            message = str(error)
        else:
            if drift is None:
                return
            message = f"the chat template does not write this chat as the model saw it: {drift}"
        if self.config.on_drift == "raise":
            otherwise = " or use prompt.mode=window" if self.config.mode == "append" else ""
            raise EngineError(f"{message}; set prompt.on_drift=warn to go on{otherwise}")
        self._drift_checks = 0
        logger.warning("%s; the tokens of the episode stay exactly as sampled", message)

    def message(self, scene: Scene) -> str:
        """The user message of this turn."""
        return compose(self.config, scene)

    def _tokenize(self, text: str, images: int = 0) -> tuple[int, ...]:
        messages: list[Message] = [{"role": "user", "content": text}]
        if images:
            messages[0]["images"] = images
        if self.config.system:
            messages.insert(0, {"role": "system", "content": self.config.system})
        if self.tools is not None:
            messages = self.tools.with_tools(messages)
        prefill = self.tokenizer.encode(self.config.prefill) if self.config.prefill else ()
        return self.tokenizer.start(messages) + prefill


def compose(config: PromptConfig, scene: Scene) -> str:
    """The user message of a turn, from the templates."""
    template = config.later if scene.past else config.first
    shown = scene.past[max(0, len(scene.past) - config.history) :]
    history = "\n".join(
        fill(
            config.turn,
            {
                "step": str(step),
                "observation": turn.observation,
                "response": turn.response,
                "action": turn.action,
                "reward": f"{turn.reward:g}",
            },
        )
        for step, turn in enumerate(shown, len(scene.past) - len(shown) + 1)
    )
    fields = {
        "instructions": scene.instructions,
        "observation": scene.observation,
        "history": history,
        "actions": ", ".join(scene.actions) or "any text",
        "step": str(len(scene.past)),
        "max_turns": str(scene.max_turns),
    }
    return fill(template, fields)


def fill(template: str, fields: dict[str, str]) -> str:
    """Replace each `{name}` by its field in one pass: braces inside a field stay as they are.

    >>> fill("{a} {b}", {"a": "{b}", "b": "x"})
    '{b} x'
    """
    return FIELD.sub(lambda match: fields[match[1]], template)


# --- where a chat template would write a chat otherwise than the model saw it
def find_drift(tokenizer: Any, chat: Sequence[Message], prompt_ids: Sequence[int]) -> str | None:
    """Where `prompt_ids` and the template's text for `chat` differ first, in words; None when they agree.

    A template that cuts thoughts or a newline out of earlier turns makes the model see, in append mode, chats that it
    was not trained on. Texts are compared, not tokens: a model may spell a word with other tokens than the tokenizer
    would, and those tokens are kept. Tokenizers without a template (which cannot `render`) never drift.
    """
    if not hasattr(tokenizer, "render"):
        return None
    seen, written = tokenizer.spell(prompt_ids), tokenizer.render(chat)
    if seen == written:
        return None
    at = first_difference(seen, written)
    shown = slice(max(0, at - 10), at + 30)
    return (
        f"in {_piece(seen, chat, at)} the model saw {seen[shown]!r}, the template writes {written[shown]!r}"
    )


def _piece(text: str, chat: Sequence[Message], at: int) -> str:
    """Name the part of `text` that character `at` stands in: a message, or what the template puts around it."""
    start = 0
    for number, message in enumerate(chat):
        begin = text.find(message["content"], start)
        start = begin + len(message["content"])
        if 0 <= at < begin:
            return f"what the template puts before message {number} ({message['role']})"
        if begin < 0 or at < start:
            return f"message {number} ({message['role']})"
    return "what the template puts after the last message"
