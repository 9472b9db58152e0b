"""Between text and tokens: chat templates of Hugging Face, the tiny model's words, and messages for servers.

All of them are safe to use from many threads, and text never becomes a control token.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import string
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import DataError, EngineError, needs_extra, reading
from shoal.core.files import read_json
from shoal.envs.calls import written_result
from shoal.samplers.sampler import Message

_MARK = re.compile("\ue000(\\d+)\ue001")
_AS_IT_IS = {"clean_up_tokenization_spaces": False}
"""How ids are decoded: tokenizers may be set to take spaces away before punctuation."""
ANY = "\ufdd1"
"""A noncharacter: text that others go on from."""


class _Content(NamedTuple):
    """Where the content of a message stands in a chat, and the text that it goes on from; see `going_on`."""

    number: int
    behind: str


_Part = tuple[int, ...] | _Content
"""Of a chat: tokens of the template, or a content."""


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Where two sequences of one type part; the length of the shorter one, where it is the beginning of the other."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared fast, so halve the interval instead of walking
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def puts_spaces(encode: Callable[[str], list[int]]) -> bool:
    """Whether a tokenizer puts a space before any text that it is given, as those of Llama 2 and Mistral do."""
    said = encode("a")
    return bool(said) and encode(f"{ANY}a")[-len(said) :] != said


def going_on(encode: Callable[[str], list[int]], text: str, behind: str) -> list[int]:
    """Tokens of a text as it goes on from another one; where there is none, as the tokenizer begins with it."""
    if not behind:
        return encode(text)
    first, both = encode(behind), encode(behind + text)
    return both[len(first) :] if both[: len(first)] == first else encode(text)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of `transformers` in a model folder; nothing is fetched or run.

    Raises:
        DataError: it does not load, or knows no text, as where its files were not copied with the weights.
    """
    with needs_extra("exact tokens", "llm"):
        from transformers import AutoTokenizer
    with reading(folder, "has no tokenizer that loads"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        known = tokenizer("a 1", add_special_tokens=False)["input_ids"]
    if not known:
        raise DataError(f"the tokenizer in {folder} knows no text: copy its files (tokenizer.json) too")
    return tokenizer


class TemplateTokenizer:
    """Chats to tokens for a tokenizer of `transformers` that has a chat template; safe to use from many threads.

    The template is rendered once around marks instead of contents. What stands between the marks is tokenized with
    control tokens, the contents without: an observation that says `<|im_end|>` stays plain text.

    A fast tokenizer of `transformers` keeps in shared state how it was called last, whether control tokens are split
    among it: two threads that use one change each other's tokens without a word. So there is a copy here, which one
    thread uses at a time, and what others do with `tokenizer` changes no prompt.

    Args:
        tokenizer: as `AutoTokenizer.from_pretrained` gives it.
        model: the model, which may declare further tokens that end a turn. Those that the model folder of the
            tokenizer declares are known without it.
        template_settings: passed to the template (such as `enable_thinking=False`).
    """

    def __init__(self, tokenizer: Any, *, model: Any = None, **template_settings: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise EngineError("this tokenizer has no chat template: use a model made for chat, or set one")
        folder = getattr(tokenizer, "name_or_path", "")
        ends = _declared_ends(model, Path(folder) if folder else None)
        self._begin(tokenizer, template_settings, copy.deepcopy(tokenizer), threading.Lock(), ends)

    def _begin(
        self, tokenizer: Any, settings: dict[str, Any], own: Any, lock: threading.Lock, ends: tuple[int, ...]
    ) -> None:
        self.tokenizer = tokenizer
        self._settings, self._ends = settings, ends
        self._own, self._lock = own, lock
        self._spaced = puts_spaces(self._ids)
        self._marks = self._marks_of_turns()
        self._starts: dict[tuple[str, ...], list[_Part]] = {}
        self._behind: dict[Any, list[_Part]] = {}  # what follows an answer, by roles and kinds
        self._quoted: bool | None = None  # whether results of role tool are JSON strings
        asked = self.written([{"role": "user", "content": "\ue0000\ue001"}], add_generation_prompt=True)
        self._header = self._before(ANY + asked.split("\ue001")[-1])
        self.end_ids = self._end_of_turn()

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "settings": self._settings, "ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # what was unpickled is nobody else's
        own = state["tokenizer"]
        self._begin(own, state["settings"], own, threading.Lock(), state["ends"])

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as the tokens of an answer's begin; what looks like a control token is spelled out."""
        return self._content(text, self._header)

    def _content(self, text: str, behind: str) -> tuple[int, ...]:
        def plain(text: str) -> list[int]:
            return self._ids(text, split_special_tokens=True)

        return tuple(going_on(plain, text, behind))

    def _ids(self, text: str, **how: bool) -> list[int]:
        with self._lock:
            return list(self._own(text, add_special_tokens=False, **how)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without control tokens."""
        with self._lock:
            return str(self._own.decode(list(ids), skip_special_tokens=True, **_AS_IT_IS))

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for a chat, up to where the assistant begins to write."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._starts:
            self._starts[roles] = self._cut(self.around(roles))
        return self._join(self._starts[roles], [self._as_shown(m["role"], m["content"]) for m in messages])

    def extend(self, response_ids: tuple[int, ...], *messages: Message) -> tuple[int, ...]:
        """The end of the response's turn, these messages, and the next assistant header.

        Raises:
            EngineError: the template is not append-only: a later turn changes what was written before it.
        """
        kinds = tuple((message["role"], _is_result(message)) for message in messages)
        if kinds not in self._behind:
            self._behind[kinds] = self._cut(self._continuation(kinds), ANY)
        contents = [self._as_shown(message["role"], message["content"]) for message in messages]
        ids = self._join(self._behind[kinds], ["", "", *contents])
        ended = response_ids[-1:] and response_ids[-1] in self.end_ids and ids[0] in self.end_ids
        return ids[1:] if ended else ids

    def with_settings(self, **settings: Any) -> TemplateTokenizer:
        """One whose template gets these settings too, such as `tools`."""
        twin = TemplateTokenizer.__new__(TemplateTokenizer)
        twin._begin(self.tokenizer, {**self._settings, **settings}, self._own, self._lock, self._ends)
        return twin

    def holds_control(self, text: str) -> bool:
        """Whether a control token stands in a text."""
        return self._ids(text) != self._ids(text, split_special_tokens=True)

    def _as_shown(self, role: str, content: str) -> str:
        """A content as the template writes it: there are some that write results as JSON strings."""
        if role != "tool":
            return content
        if self._quoted is None:
            asked: list[Any] = [{"role": role, "content": role} for role in ("user", "assistant")]
            self._quoted = '\\"\ue000' in self.written([*asked, {"role": "tool", "content": '"\ue000'}])
        return json.dumps(content, ensure_ascii=False)[1:-1] if self._quoted else content

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the template writes it, contents and all, up to where the assistant begins."""
        return self.written(messages, add_generation_prompt=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Tokens as text, control tokens included."""
        with self._lock:
            return str(self._own.decode(list(ids), skip_special_tokens=False, **_AS_IT_IS))

    def _cut(self, rendered: str, behind: str = "") -> list[_Part]:
        """Rendered text that goes on from another one as tokens, and as a content where a mark stands."""
        pieces, cut = _MARK.split(rendered), list[_Part]()
        for header, number in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            cut.append(self.tokens(header, behind))
            if number is not None:
                cut.append(_Content(int(number), self._before(behind + header)))
            behind = ANY
        return cut

    def tokens(self, piece: str, behind: str = "") -> tuple[int, ...]:
        """A piece of the template as tokens, control tokens among them."""
        if not piece:
            return ()
        behind = behind if self._spaced else ""
        return tuple(going_on(self._ids, piece, behind))

    def _before(self, text: str) -> str:
        """What a content goes on from behind a text; nothing where the tokenizer's space is to stand before it."""
        if not self._spaced or not text:
            return ""
        said = self.tokens("a")
        put = not text[-1].isspace() and self.tokens(f"{text}a")[-len(said) :] == said
        return "" if put else ANY

    def _join(self, pieces: Sequence[_Part], contents: Sequence[str]) -> tuple[int, ...]:
        """The tokens of a chat from those of its template and its contents."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, _Content):
                ids += self._content(contents[piece.number], piece.behind)
            else:
                ids += piece
        return tuple(ids)

    def written(self, messages: Sequence[Any], **settings: bool) -> str:
        """A chat as the template writes it, contents and all.

        Raises:
            EngineError: the template refuses it.
        """
        from jinja2 import TemplateError  # transformers writes chats with it

        how = {"tokenize": False, **settings, **self._settings}
        try:
            return str(self._own.apply_chat_template(list(map(_whole, messages)), **how))
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise EngineError(
                f"the chat template refuses a chat of {roles} ({type(error).__name__}: {error}): use a prompt "
                f"without the role that it does not take, or a model made for such chats"
            ) from error

    def around(self, roles: Sequence[str], contents: Sequence[str] = ()) -> str:
        """A chat of these roles with a mark in each content, up to where the assistant begins."""
        contents = contents or [f"\ue000{number}\ue001" for number in range(len(roles))]
        chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        text = self.written(chat, add_generation_prompt=True)
        shown = [int(number) for number in _MARK.findall(text)]
        if shown != list(range(len(roles))):
            raise EngineError(
                f"the chat template drops or repeats messages: of a chat of {', '.join(roles)} it shows the messages "
                f"{shown}; use a prompt without the role that it does not show, or another model"
            )
        return text

    def _continuation(self, kinds: Sequence[tuple[str, bool]]) -> str:
        """What the template writes behind an answer, with marks in the place of what these messages say."""
        roles, written = [role for role, _ in kinds], "\ue0001\ue001"
        marks = [f"\ue000{number}\ue001" for number in range(2, 2 + len(kinds))]
        shaped = [
            written_result(m) if r == "user" and result else m
            for (r, result), m in zip(kinds, marks, strict=True)
        ]
        before = self.around(("user",))
        after = self.around(("user", "assistant", *roles), ["\ue0000\ue001", written, *shaped])
        results = any(result for _, result in kinds)  # before these a template may write an answer otherwise
        if not results and not after.startswith(before + written):
            same = first_difference(before, after)
            raise EngineError(
                "the chat template is not append-only, a later turn rewrites the ones before: after "
                f"{before[max(0, same - 20) : same]!r} it has {after[same : same + 30]!r} instead of "
                f"{(before + written)[same : same + 30]!r}"
            )
        text = after.split(written)[1]
        # what stands around a result is a part of its content
        for shape, mark in zip(shaped, marks, strict=True):
            text = text.replace(shape, mark)
        return text

    def _end_of_turn(self) -> tuple[int, ...]:
        """Ids that end a turn: of the tokenizer, of the template, and all that the model or its folder declares."""
        ids = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        answer = {"role": "assistant", "content": "\ue0001\ue001"}
        written = self.written([{"role": "user", "content": "u"}, answer])
        tail = self.tokens(written.split("\ue001")[-1], ANY)
        if tail and (tail[0] in self.tokenizer.all_special_ids or tail[0] in self._marks):
            ids.append(tail[0])
        ids += (token for token in self._ends if 0 <= token < self.size)
        return tuple(dict.fromkeys(ids))

    def _marks_of_turns(self) -> frozenset[int]:
        """Tokens with which the template marks turns, which are control tokens here, be they declared as such or not.

        DeepSeek's `<｜User｜>`, say, is an added token like any word. What a template opens for the model behind the
        header of its turn (`<think>`) stays text, and so do spaces.
        """
        user, answer = ({"role": role, "content": "\ue0000\ue001"} for role in ("user", "assistant"))
        alone, asked = self.written([user]), self.written([user], add_generation_prompt=True)
        ids = list(self.tokens(asked.removeprefix(alone), ANY)[:1])
        ids += self.tokens(self.written([user, answer]).split("\ue001")[-1], ANY)[:1]
        with contextlib.suppress(Exception):  # there are templates that refuse a system message
            alone += self.written([{**user, "role": "system"}, user])
        ids += (token for piece in _MARK.split(alone)[::2] for token in self.tokens(piece))
        added = getattr(self._own, "added_tokens_decoder", {})  # not all are transformers' own
        marks = {token for token in ids if token in added and not added[token].content.isspace()}
        undeclared = [added[token] for token in sorted(marks) if not added[token].special]
        if undeclared and self._own.is_fast:  # others take no added token out of contents
            self._own.backend_tokenizer.add_special_tokens(undeclared)
        return frozenset(marks)


def _is_result(message: Message) -> bool:
    """Whether a message holds results of tools; there are templates that look for the tags of Hermes."""
    content = message["content"]
    tagged = content.startswith("<tool_response>") and content.endswith("</tool_response>")
    return message["role"] == "tool" or (message["role"] == "user" and tagged)


def _whole(message: Any) -> Any:
    """A message as templates take it; those of Mistral want to know the call of a result."""
    return {**message, "tool_call_id": "call00000", "name": "tool"} if message["role"] == "tool" else message


def _declared_ends(model: Any, folder: Path | None) -> tuple[int, ...]:
    """The tokens that end an answer by the settings of a model of `transformers`, and by the files of its folder."""
    settings = [getattr(model, name, None) for name in ("generation_config", "config")]
    found = [getattr(each, "eos_token_id", None) for each in settings]
    for file in [] if folder is None else [folder / "generation_config.json", folder / "config.json"]:
        read = read_json(file) if file.is_file() else None
        found.append(read.get("eos_token_id") if isinstance(read, dict) else None)
    lists = (value if isinstance(value, list) else [value] for value in found)
    return tuple(dict.fromkeys(one for values in lists for one in values if type(one) is int))


CONTROL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<unknown>")
PAD, END, SYSTEM, USER, ASSISTANT, UNKNOWN = range(len(CONTROL))
TAGS = ("<action>", "</action>", "<answer>", "</answer>", "<think>", "</think>")
CHARACTERS = tuple(string.digits + string.ascii_letters + string.punctuation + " \n√")
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class TinyTokenizer:
    """The tiny model's tokens: greedy longest-match over tags, `words` and characters; text gives no control tokens.

    Args:
        words: action words that shall be one token each.
    """

    end_ids = (END,)

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


_MARKS = 0x110000  # the first number that is no code point
_CODED = {"system": _MARKS, "user": _MARKS + 1, "assistant": _MARKS + 2}
_NAMES = {mark: role for role, mark in _CODED.items()}
_IMAGE = _MARKS + 3


class ChatCodec:
    """Chats as reversible numbers, for servers that take messages and keep their tokens to themselves.

    The "tokens" are Unicode code points and marks for roles: exact to hand over and to store, useless to learn from.
    That is why a sampler that uses them is for evaluation only.
    """

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
            pictures = (_IMAGE,) * message.get("images", 0)
            ids += (_CODED[message["role"]], *pictures, *self.encode(message["content"]))
        return (*ids, _CODED["assistant"])

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
            raise EngineError("this prompt was not made by the sampler's own tokenizer")
        for i in ids:
            if i in _NAMES:
                chat.append({"role": _NAMES[i], "content": [], "text": []})
            elif i == _IMAGE:
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
