"""A model's chat template and tokenizer: each message rendered and encoded once.

Most templates write messages one after the other, so the tokens of a chat are the tokens of its messages
joined. That is checked when a template is wrapped, on a probe chat, and again for each recording; templates
that look back (they drop the thoughts of earlier turns, say) are rendered per sample instead.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.errors import DataError
from shoal.samplers.tokenizers import ANY, going_on, puts_spaces
from shoal.splitting.cut import Cut, Piece
from shoal.splitting.place import Layout, lay_out, text_like
from shoal.splitting.readers.recordings import Message, Part, Recording

if TYPE_CHECKING:
    from shoal.splitting.splitters import Plan

logger = logging.getLogger(__name__)

# a noncharacter: cut the text here before encoding, so that no control token spans the place
BREAK = "\ufdd0"
END = ANY  # where the text of an assistant message ended

MODEL_TEXT = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>",
              "<|quad_end|>")  # fmt: skip
"""Special tokens that models write as part of an answer; they steer no roles and stay what they are."""

Chat = Sequence[tuple[Message, tuple[int, ...] | None]]
"""Messages with the parts of each that are kept (None for all)."""

Array = np.ndarray

_SYSTEM = Message("system", "You act.")
_USER = Message("user", "What now?")
_ANSWER = Message("assistant", "Go on.")


class ChatTemplate:
    """The template of a processor or tokenizer.

    Args:
        processor: has `apply_chat_template`, and `tokenizer` unless it is one itself.
        model_text: special tokens that stay special in recorded text; all others are encoded as plain text.
    """

    end_mark = END
    tools: Any = None  # what the model could call in the chats that are rendered, see `with_tools`
    tools_missing = False  # whether some of them are not written

    def __init__(self, processor: Any, *, model_text: Sequence[str] = MODEL_TEXT) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.sees_images = hasattr(processor, "image_processor")
        self.image_token = getattr(processor, "image_token", None) if self.sees_images else None
        found = (
            self.tokenizer.convert_tokens_to_ids(self.image_token) if self.image_token is not None else None
        )
        self.image_token_id = -1 if found is None else int(found)
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        if eos is None:
            raise DataError("the tokenizer has neither a padding nor an end token; set tokenizer.eos_token")
        self.pad_id = int(eos if pad is None else pad)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self._added_ids = frozenset(int(token) for token in added)
        texts = sorted((str(token) for token in added.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._longest_added = max((len(str(token)) for token in added.values()), default=0)
        control = {str(token) for token in added.values() if token.special} - set(model_text)
        ordered = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._spaced = puts_spaces(self._ids)
        self._lead = self._leading()
        self.header, self.opening = self._header()
        self.header_ids = self.encode(self.header)
        self.closing_ids = self._closing_ids()
        if not len(self.closing_ids[0]):
            raise DataError(
                "the chat template writes nothing at the end of an answer, so a model trained on it would never stop: "
                "let it write the token that ends a turn after each assistant message"
            )
        self.image_frame_ids = self._image_frame_ids()
        self._adjoining: dict[tuple[str, str], bool] = {}
        self._starts: dict[str, tuple[Chat, str]] = {}
        self._begins_with_added: dict[str, bool] = {}
        self._by_tools: dict[str, ChatTemplate] = {}
        self.concatenates = self._probe()

    def with_tools(self, tools: Sequence[dict[str, Any]], source: str) -> ChatTemplate:
        """The template as it writes chats whose model had these tools; says once if it writes none of them."""
        if not tools:
            return self
        key = json.dumps(tools)
        if key not in self._by_tools:
            if len(self._by_tools) > 1000:  # of a long run in which each recording has other tools
                self._by_tools.clear()
            other = copy.copy(self)
            other._starts, other._adjoining, other._by_tools = {}, {}, {}
            other.tools = self._as_text(list(tools))
            names = [str(tool["function"]["name"]) for tool in tools]
            shown = other.render([*self._lead, (_USER, None)], ask=True).replace(BREAK, "")
            missing = [name for name in names if name not in shown]
            if missing and not any(kept.tools_missing for kept in self._by_tools.values()):
                logger.warning(
                    "%s: the chat template does not write its tools into the prompt (%s): the model is trained without "
                    "them; give a template that writes tools if the recorded model saw them",
                    source,
                    ", ".join(missing),
                )
            other.tools_missing = bool(missing)
            self._by_tools[key] = other
        return self._by_tools[key]

    def _as_text(self, value: Any) -> Any:
        """A JSON value in which no text can spell a control token."""
        if isinstance(value, dict):
            return {self._as_text(key): self._as_text(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [self._as_text(inside) for inside in value]
        return self._texts([{"type": "text", "text": value}])[0] if isinstance(value, str) else value

    # --- text
    def message_text(self, message: Message, keep: tuple[int, ...] | None, first: bool) -> str | None:
        """What the message adds to a chat, or None where the template rewrites what stood before it."""
        before, start = ((), "") if first else self._before(message.role)
        try:
            text = self.render([*before, (message, keep)])
        except Exception:  # whatever a template raises: some want a user's message in each chat
            if not first or message.role == "user":
                raise
            user = self.message_text(_USER, None, False) or END
            text = self.render([(message, keep), (_USER, None)])
            return text.removesuffix(user) if text.endswith(user) else None
        return text.removeprefix(start) if text.startswith(start) else None

    def texts(self, messages: Sequence[Message]) -> list[str | None]:
        """What each message of a chat adds to it, as `message_text` says."""
        return [self.message_text(message, None, index == 0) for index, message in enumerate(messages)]

    # --- tokens
    def encode(self, text: str, behind: str = "") -> Array:
        """Token ids `[n]` int32 of text with `BREAK`s; what spells a control token elsewhere is one.

        It goes on from the text `behind` which it stands, where a tokenizer puts a space before all that it is given.
        """
        ids: list[int] = []
        for piece in text.split(BREAK):
            ids += self._ids(piece, behind) if piece else []
            behind = END
        return np.asarray(ids, np.int32)

    def _ids(self, text: str, behind: str = "") -> list[int]:
        if behind and self._spaced:
            return going_on(self._ids, text, behind)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def answer_ids(self, message: Message, keep: tuple[int, ...] | None) -> Array:
        """Tokens of an answer's text as the model wrote it, apart from header and end."""
        return self.encode(self.opening + "".join(self._texts(message.kept(keep))), self.header)

    def _texts(self, parts: Sequence[Part]) -> list[str]:
        """Texts of the parts, "" for images, with a `BREAK` inside each control token that one or several spell out."""
        said = [part["text"] if part["type"] == "text" else END for part in parts]
        if any(
            part["type"] == "text" and (BREAK in text or END in text)
            for part, text in zip(parts, said, strict=True)
        ):
            raise DataError("recorded text holds the noncharacters U+FDD0 or U+FDD1; remove them")
        found = self._control.finditer("".join(said)) if self._control else ()
        breaks = [match.start() + 1 for match in found]
        if not breaks:
            return [text if part["type"] == "text" else "" for part, text in zip(parts, said, strict=True)]
        texts, at = [], 0
        for part, text in zip(parts, said, strict=True):
            inside = breaks[bisect_right(breaks, at) : bisect_right(breaks, at + len(text))]
            borders = [0, *(place - at for place in inside), len(text)]
            cut = BREAK.join(text[first:last] for first, last in itertools.pairwise(borders))
            texts.append(cut if part["type"] == "text" else "")
            at += len(text)
        return texts

    def render(
        self, chat: Chat, *, ask: bool = False, mark_ends: bool = False, mark_starts: bool = False
    ) -> str:
        """The chat as text; `ask` adds the generation prompt, the marks are an `END` at each end of an answer."""
        messages = []
        for message, keep in chat:
            parts = message.kept(keep)
            texts = self._texts(parts)
            if mark_starts and message.role == "assistant":
                texts[0] = END + texts[0]
            if mark_ends and message.role == "assistant":
                texts[-1] += END
            if isinstance(message.content, str) or not self.sees_images:
                content: Any = "".join(texts)
            else:
                content = [
                    {"type": "text", "text": text} if part["type"] == "text" else dict(part)
                    for part, text in zip(parts, texts, strict=True)
                ]
            messages.append({"role": message.role, "content": content})
        more = {} if self.tools is None else {"tools": self.tools}
        return str(
            self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask, **more)
        )

    # --- what is learned about the template
    def _before(self, role: str) -> tuple[Chat, str]:
        """A chat that a message of this role may follow, and its text."""
        if role not in self._starts:
            chat = [*self._lead, *([] if role == "system" else [(_USER, None)])]
            chat += [] if role in ("system", "assistant") else [(_ANSWER, None)]
            self._starts[role] = chat, self.render(chat) if chat else ""
        return self._starts[role]

    def _leading(self) -> Chat:
        """What chats begin with to learn from: a system message, unless the template refuses that role.

        Templates that put a system message of their own where there is none then never do.
        """
        lead: Chat = [(_SYSTEM, None)]
        try:
            self.render([*lead, (_USER, None)])
        except Exception as refused:  # whatever a template raises
            try:
                self.render([(_USER, None)])
            except Exception:
                raise refused from None
            return []
        return lead

    def _header(self) -> tuple[str, str]:
        """The generation prompt, and what the template writes between it and the text of an answer.

        Mistral's templates have no generation prompt and open an answer with a space, which the model writes.
        """
        asking = self.render([*self._lead, (_USER, None)], ask=True)
        asked = self.render([*self._lead, (_USER, None)])
        pairs = zip(asking, asked, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._added:  # a token that begins like another is not cut in two
            same = next((m.start() for m in self._added.finditer(asking) if m.start() < same < m.end()), same)
        if header := asking[same:]:
            return header, ""
        answer = self.render([*self._lead, (_USER, None), (_ANSWER, None)]).removeprefix(asking)
        opening, found, _ = answer.partition(str(_ANSWER.content))
        if not found or opening.strip():
            raise DataError(
                "the chat template has no generation prompt to end a prompt with; let it write what opens an answer "
                "where add_generation_prompt is set"
            )
        return "", opening

    def _closing_ids(self) -> tuple[Array, Array]:
        """Tokens after an answer: those the model writes itself (up to its end token), and the rest."""
        marked = self.render([*self._lead, (_USER, None), (_ANSWER, None)], mark_ends=True)
        ids = self.encode(marked.rpartition(END)[2], END)
        ends = [index for index, token in enumerate(ids.tolist()) if token in self._added_ids]
        own = ends[0] + 1 if ends else len(ids)
        return ids[:own], ids[own:]

    def _image_frame_ids(self) -> frozenset[int]:
        """Tokens that the template puts right around an image: they go where the image goes."""
        if self.image_token is None:
            return frozenset()
        parts: tuple[Part, ...] = ({"type": "text", "text": "A"}, {"type": "image", "image": "x"},
                                   {"type": "text", "text": "B"})  # fmt: skip
        text = self.render([*self._lead, (Message("user", parts, ("x",)), None)])
        around = text.rpartition("A")[2].partition("B")[0] if text.count("A") == 1 else text
        frame = set(self.encode(around).tolist()) & self._added_ids
        return frozenset(frame - {self.image_token_id})

    def _probe(self) -> bool:
        """Whether joining encoded messages gives the encoded chat, on a chat with all there is."""
        picture: Part = {"type": "image", "image": "x"}
        parts: tuple[Part, ...] = ({"type": "text", "text": "Look:"}, picture)
        chat: list[Message] = [
            *(message for message, _ in self._lead),
            Message("user", parts, ("x",)) if self.image_token is not None else _USER,
            Message("assistant", "<think>\nHm.\n</think>\n\nI click."),
            Message("user", parts[::-1], ("x",)) if self.image_token is not None else _USER,
            Message("assistant", " Done. "),
        ]
        return self.joins(chat, self.texts(chat))

    def adjoin(self, before: str, role: str) -> bool:
        """Whether a message of one role is written as ever behind one of another."""
        if (before, role) not in self._adjoining:
            messages = [Message(each, "Say.") for each in (before, role)]
            chat: list[Message] = (
                [] if before == "system" else [*(message for message, _ in self._lead), _USER]
            )
            chat += [_ANSWER] if before in ("user", "tool") else []
            try:
                texts = [
                    self.message_text(message, None, not chat and not i) for i, message in enumerate(messages)
                ]
                start = self.render([(message, None) for message in chat]) if chat else ""
                whole = self.render([(message, None) for message in (*chat, *messages)])
                self._adjoining[before, role] = None not in texts and whole == start + "".join(
                    map(str, texts)
                )
            except Exception:
                # the template refuses such a pair, and says why when the sample is rendered whole
                self._adjoining[before, role] = False
        return self._adjoining[before, role]

    def first_header_ids(self) -> Array:
        """Tokens that open an answer with nothing before it: some templates begin with a system prompt."""
        text = self.message_text(_ANSWER, None, True) or ""
        return self.encode(text.partition(self.header)[0] + self.header)

    def joins(self, messages: Sequence[Message], texts: Sequence[str | None]) -> bool:
        """Whether the chat's text is its messages' `texts` joined, at borders that no token can cross."""
        known = [text for text in texts if text is not None]
        if len(known) < len(texts):
            return False
        if "".join(known) != self.render([(message, None) for message in messages]):
            return False
        behind = [text for message, text in zip(messages, known, strict=True) if message.role == "assistant"]
        if not all(
            text.startswith(self.header + self.opening) for text in behind[messages[0].role == "assistant" :]
        ):
            return False  # an answer to go on with is opened otherwise than one that was given
        return all(self._begins_at_border(text[: self._longest_added + 1]) for text in known)

    def _begins_at_border(self, text: str) -> bool:
        """Whether the first token is one that was added to the vocabulary: no other reaches into it."""
        if text not in self._begins_with_added:
            if len(self._begins_with_added) > 10_000:  # of a long run over many recordings
                self._begins_with_added.clear()
            ids = self.encode(text)
            self._begins_with_added[text] = bool(len(ids)) and int(ids[0]) in self._added_ids
        return self._begins_with_added[text]


# --- a recording


class Encoder:
    """Encodes each message of a recording once, in each form it is needed."""

    def __init__(
        self, plan: Plan, recording: Recording, image_of: dict[str, int], tokens: Sequence[Layout]
    ) -> None:
        recorded = plan.use_rollout and all(step.prompt_ids for step in recording.steps or ())
        tools = () if recorded else recording.tools  # a prompt that was recorded is not written again
        named = f"trajectory {recording.dataset_id!r}: {recording.source}"
        self.template = plan.template.with_tools(tools, named)
        self.rows, self.tokens = plan.images.rows, tokens
        self.recording, self.image_of = recording, image_of
        self._texts = self.template.texts(recording.messages) if self.template.concatenates else []
        self.joins = bool(self._texts) and self.template.joins(recording.messages, self._texts)
        self._known: dict[tuple[Piece, bool], Layout] = {}

    def joins_in(self, cut: Cut) -> bool:
        """Whether the messages of a sample can be joined: it may set side by side what was recorded apart."""
        roles = [self.recording.messages[piece.message].role for piece in cut.pieces]
        return self.joins and all(self.template.adjoin(*pair) for pair in itertools.pairwise(roles))

    def header(self, first: bool) -> Layout:
        """What opens an answer; where the answer comes first, what the template writes before it too."""
        return self.plain(self.template.first_header_ids() if first else self.template.header_ids)

    def as_context(self, piece: Piece, first: bool) -> Layout:
        """The whole message as the template writes it."""
        key = (piece._replace(turn=None), first)
        if key not in self._known:
            message = self.recording.messages[piece.message]
            if piece.keep is None and self._texts and first == (piece.message == 0):
                text = self._texts[piece.message]
            else:
                text = self.template.message_text(message, piece.keep, first)
            if text is None:
                raise DataError(f"the chat template rewrites what stands before message {piece.message}")
            self._known[key] = self.lay_out(text, [piece])
        return self._known[key]

    def images_of(self, pieces: Sequence[Piece]) -> list[int]:
        """The images that the pieces show, in order."""
        messages = self.recording.messages
        return [
            self.image_of[place] for piece in pieces for place in messages[piece.message].shown(piece.keep)
        ]

    def lay_out(self, text: str, pieces: Sequence[Piece]) -> Layout:
        """Tokens and positions of rendered text that shows the images of the pieces."""
        return self.text(self.template.encode(text), self.images_of(pieces))

    def text(self, ids: Array, images: Sequence[int]) -> Layout:
        """Tokens and positions of encoded text."""
        return lay_out(ids, self.template.image_token_id, images, self.tokens, self.rows)

    def plain(self, ids: Array) -> Layout:
        """Tokens and positions of encoded text in which no token stands for an image."""
        return text_like(ids, self.rows)
