"""The text that a model must write for an action, and whether prompt settings and limits allow it.

The shortest text counts that means the action once the prompt's `prefill` stands before it and its `closing` behind:
`west`, `west</action>`, `<action>west` or `<action>west</action>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from shoal.core.errors import ConfigError
from shoal.envs.actions import ToolCall
from shoal.rollout.episode import Role
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.settings import RolloutSettings
from shoal.samplers.sampler import ChatTokenizer, Sampling

S = TypeVar("S", bound=RolloutSettings)
FREE_TEXT_TOKENS = 64
"""`max_tokens: auto` for free text, whose length is unknown."""


def answer(content: str, role: Role, prompt: PromptConfig) -> str | None:
    """The shortest text that the model may write for what stands in an action's tag; None if no text means it."""
    tag = role.projection.tags[0]
    opened, closed = f"<{tag}>", f"</{tag}>"
    wanted = role.projection(f"{opened}{content}{closed}")
    for text in (content, content + closed, opened + content, opened + content + closed):
        if wanted.valid and role.projection(prompt.response(text)) == wanted:
            return text
    return None


def answer_ids(
    content: str, role: Role, prompt: PromptConfig, sampling: Sampling, tokenizer: ChatTokenizer
) -> tuple[int, ...]:
    """The tokens of `answer`, with the end of the turn where nothing else ends it before `closing` is put behind it."""
    tag = role.projection.tags[0]
    text = answer(content, role, prompt)
    if text is None:  # the env's own style of answers, which wants more than a tag
        text = prompt.written(f"<{tag}>{content}</{tag}>")
    ids = tokenizer.encode(text)
    if not prompt.closing or len(ids) >= sampling.max_tokens or text.endswith(sampling.stop):
        return ids
    return ids + tuple(getattr(tokenizer, "end_ids", ()))[:1]


def with_room(settings: S, roles: Mapping[str, Role], prompter: Prompter) -> S:
    """These settings, with as many tokens as the longest answer of the envs needs in the place of `max_tokens: auto`.

    Raises:
        ConfigError: an action of an env cannot be answered, whatever the model writes; it names the setting, the action
            and a value that works.
    """
    if settings.max_tokens == "auto":
        needed = [FREE_TEXT_TOKENS for role in roles.values() if prompter.tools or _is_free(role)]
        for role in roles.values():
            needed.append(_shortest_call(role, prompter)[0])
            needed += [
                tokens for tokens, _ in _lengths(role, settings, prompter, role.projection.max_actions)
            ]
        return replace(settings, max_tokens=max(needed))
    for role in roles.values():
        tokens, word = max(_lengths(role, settings, prompter, 1), default=_shortest_call(role, prompter))
        if tokens > settings.max_tokens:
            raise ConfigError(
                f"agent_proxy.max_tokens={settings.max_tokens} is too small for the action {word!r} of {role.tag}, for "
                f"which the model writes {tokens} tokens: set it to {tokens} or more, or to auto"
            )
    return settings


def _is_free(role: Role) -> bool:
    """Whether the answers cannot be listed: actions are free text, or answers have a style of their own."""
    return not role.projection.lookup or role.projection.style != "strict"


def _shortest_call(role: Role, prompter: Prompter) -> tuple[int, str]:
    """How many tokens a call without arguments has, and its tool; none where the env does not act by tools."""
    tools = role.tools and prompter.variant(role.prompt).offering(role.tools).tools
    if not tools:
        return 0, ""
    encode = prompter.tokenizer.encode
    return min((len(encode(tools.written(ToolCall(name, {})))), name) for name in tools.tools)


def _lengths(
    role: Role, settings: RolloutSettings, prompter: Prompter, most: int
) -> Iterator[tuple[int, str]]:
    """How many tokens the answer with each word has, `most` times in one answer."""
    prompt = prompter.variant(role.prompt).config
    for word in [] if _is_free(role) else role.projection.words():
        text = answer((role.projection.separator or "").join([word] * most), role, prompt)
        if text is None:
            tag = role.projection.tags[0]
            raise ConfigError(
                f"no answer can express the action {word!r} of {role.tag} between prompt.prefill="
                f"{prompt.prefill!r} and prompt.closing={prompt.closing!r}: leave both out, or set prefill to "
                f"'<{tag}>' and closing to '' or '</{tag}>'"
            )
        ends = [text.find(end) + len(end) for end in settings.stop if end in text]
        cut = text[: min(ends, default=len(text))]  # an answer ends behind the first stop text
        if cut != text:
            raise ConfigError(
                f"agent_proxy.stop={list(settings.stop)} ends the answer {text!r}, the action {word!r} of {role.tag}, "
                f"behind {cut!r}: leave that stop text out, or set stop to ['</{role.projection.tags[0]}>']"
            )
        yield len(prompter.tokenizer.encode(text)), word
