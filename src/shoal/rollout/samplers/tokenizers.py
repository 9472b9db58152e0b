"""A Hugging Face chat template cut into pieces, so that text is never tokenized twice and forges no roles.

The template is rendered once around marks instead of contents. What stands between the marks is tokenized with
control tokens, the contents without: an observation that says `<|im_end|>` stays plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Message

_MARK = re.compile("\ue000(\\d+)\ue001")


class TemplateTokenizer:
    """Chats to tokens for a tokenizer of `transformers` that has a chat template.

    Args:
        tokenizer: as `AutoTokenizer.from_pretrained` gives it.
        template_settings: passed to the template (such as `enable_thinking=False`).
    """

    def __init__(self, tokenizer: Any, **template_settings: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise EngineError("this tokenizer has no chat template: use a model made for chat, or set one")
        self.tokenizer = tokenizer
        self._settings = template_settings
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        self._between: str | None = None
        self.end_ids = self._end_of_turn()

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as tokens; what looks like a control token is spelled out."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without control tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for a chat, up to where the assistant begins to write."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._pieces:
            self._pieces[roles] = _MARK.split(self._render(roles))
        return self._join(self._pieces[roles], [message["content"] for message in messages])

    def extend(self, response_ids: tuple[int, ...], message: Message) -> tuple[int, ...]:
        """The end of the response's turn, `message`, and the next assistant header.

        Raises:
            EngineError: the template is not append-only: a later turn changes what was written before it.
        """
        if self._between is None:
            self._between = self._continuation()
        ids = self._join(_MARK.split(self._between), ["", "", message["content"]])
        return (
            ids[1:] if response_ids and response_ids[-1] in self.end_ids and ids[0] in self.end_ids else ids
        )

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the template writes it, contents and all, up to where the assistant begins."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._settings
            )
        )

    def spell(self, ids: Sequence[int]) -> str:
        """Tokens as text, control tokens included."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _join(self, pieces: Sequence[str], contents: Sequence[str]) -> tuple[int, ...]:
        """Tokens of rendered text (even pieces) and of the contents that the marks number (odd pieces)."""
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids += self.encode(contents[int(piece)])
            elif piece:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        return tuple(ids)

    def _render(self, roles: Sequence[str]) -> str:
        chat = [{"role": role, "content": f"\ue000{place}\ue001"} for place, role in enumerate(roles)]
        text = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, **self._settings
        )
        marks = [int(number) for number in _MARK.findall(text)]
        if marks != list(range(len(roles))):
            raise EngineError(
                f"the chat template drops or repeats messages: of {len(roles)} it shows {marks}; use another "
                f"prompt.mode or model"
            )
        return str(text)

    def _continuation(self) -> str:
        before, after = self._render(("user",)), self._render(("user", "assistant", "user"))
        written = "\ue0001\ue001"
        if not after.startswith(before + written):
            same = next(
                (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before)
            )
            raise EngineError(
                "the chat template is not append-only, a later turn rewrites the ones before: after "
                f"{before[max(0, same - 20) : same]!r} it has {after[same : same + 30]!r} instead of "
                f"{(before + written)[same : same + 30]!r}; use prompt.mode=window"
            )
        return after[len(before + written) :]

    def _end_of_turn(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the tokenizer's end token and what the template writes there."""
        ids = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "\ue0001\ue001"}],
            tokenize=False,
            **self._settings,
        )
        tail = self.tokenizer(rendered.split("\ue001")[-1], add_special_tokens=False)["input_ids"]
        if tail and tail[0] in self.tokenizer.all_special_ids:
            ids.append(tail[0])
        return tuple(dict.fromkeys(ids))
