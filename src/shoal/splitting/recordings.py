"""A recorded trajectory as the splitters see it, and the checks that every reader applies to its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import DataError

Part = dict[str, str]
"""`{"type": "text", "text": …}` or `{"type": "image", "image": …}`"""

ROLES = ("system", "user", "assistant", "tool")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `content` keeps its recorded form, since templates may tell text from parts."""

    role: str
    content: str | tuple[Part, ...]
    images: tuple[
        str, ...
    ] = ()  # where the images are, in the order of the image parts: a path or a data URL

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content as parts, also when it was recorded as one string."""
        return ({"type": "text", "text": self.content},) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """All text of the message."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")


@dataclass(frozen=True, slots=True)
class RolloutTokens:
    """What the sampler saw and wrote at one step: the truth about tokens, where it was recorded."""

    prompt_ids: tuple[int, ...]  # () when only the response was recorded
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `response_ids`
    source: str  # the file, for messages


@dataclass(frozen=True, slots=True)
class Recording:
    """One trajectory: its messages, and what else was recorded with them."""

    dataset_id: str
    uid: str  # equal for trajectories of one task
    messages: tuple[Message, ...]
    source: str  # the file it came from, for messages
    reward: float | None = None  # used where the caller gives no rewards
    steps: tuple[RolloutTokens, ...] | None = None  # one per assistant message
    folder: str | None = None  # where files beside the messages are


class Reader(Protocol):
    """Finds recordings by id. Readers travel to worker processes, so they must be picklable."""

    def ids(self) -> list[str]:
        """The ids of all recordings, in a fixed order."""
        ...

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The recording, from `path` where one is given; `DataError` names the file that is wrong and why."""
        ...


def parse_messages(raw: Any, source: str, locate: Any) -> tuple[Message, ...]:
    """Messages from JSON values of OpenAI's or Qwen's form; `locate(reference)` says where an image is.

    A part `{"type": "image_url", "image_url": …}` and a part `{"type": "image", "image": …}` are the same;
    the reference is a string or `{"url": string}`.
    """
    if not isinstance(raw, list) or not raw:
        raise DataError(f"{source} must hold a list of messages, got {_kind(raw)}")
    messages = []
    for number, item in enumerate(raw):
        where = f"{source}, message {number}"
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object with role and content, got {_kind(item)}")
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}")
        if isinstance(content, str):
            messages.append(Message(role, _encodable(content, where)))
        elif isinstance(content, list):
            parts = tuple(_part(part, where) for part in content)
            references = [part["image"] for part in parts if part["type"] == "image"]
            if references and role == "assistant":
                raise DataError(f"{where}: an assistant message cannot hold an image")
            messages.append(Message(role, parts, tuple(locate(item, where) for item in references)))
        else:
            raise DataError(f"{where}: content must be text or a list of parts, got {_kind(content)}")
    return tuple(messages)


def _part(part: Any, where: str) -> Part:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            return {"type": "text", "text": _encodable(part["text"], where)}
        if kind in ("image", "image_url", "input_image"):
            value = part.get("image_url", part.get("image"))
            value = value.get("url") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                return {"type": "image", "image": value}
    got = part.get("type") if isinstance(part, dict) else _kind(part)
    raise DataError(f"{where}: expected a text or image part, got {got!r}; convert or remove it")


def _encodable(text: str, where: str) -> str:
    """`text` if it is valid Unicode: JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text is not valid Unicode ({error.reason}); record it again") from None
    return text


def check_order(recording: Recording, *, strict: bool) -> None:
    """Refuse role orders that cannot be cut into turns.

    Args:
        recording: what to check.
        strict: demand system, user, assistant, user, assistant, … as the original does; otherwise any run of
            system, user and tool messages may come before an assistant message.
    """
    roles = [message.role for message in recording.messages]
    problem = _strict_problem(roles) if strict else _turn_problem(roles)
    if problem:
        raise DataError(f"{recording.source}: {problem}")


def _strict_problem(roles: Sequence[str]) -> str | None:
    expected = ["system", *("user" if index % 2 else "assistant" for index in range(1, len(roles)))]
    for index, (want, got) in enumerate(zip(expected, roles, strict=True)):
        if want != got:
            return (
                f"message {index} must be from {want!r}, got {got!r}: the order must be system, user, "
                "assistant, user, …; compat='fixed' also takes tool messages and user messages in a row"
            )
    return (
        None if len(roles) >= 3 else f"needs system, user and assistant messages, got {len(roles)} messages"
    )


def _turn_problem(roles: Sequence[str]) -> str | None:
    if "assistant" not in roles:
        return "there is no assistant message, so nothing to learn from; remove the trajectory"
    if "user" not in roles[: roles.index("assistant")]:
        return "an assistant message comes before the first user message; add the instruction it answers"
    for index in range(1, len(roles)):
        if roles[index] == roles[index - 1] == "assistant":
            return f"messages {index - 1} and {index} are both from the assistant; merge them into one"
    late = [index for index in range(roles.index("assistant"), len(roles)) if roles[index] == "system"]
    return (
        f"message {late[0]} is a system message after the first answer; move it to the front"
        if late
        else None
    )


def finite_reward(value: Any, where: str) -> float:
    """`value` as a finite float, or a `DataError` that says where it came from."""
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: reward must be a number, got {value!r}") from None
    if not math.isfinite(reward):
        raise DataError(
            f"{where}: reward must be finite, got {reward}; score the trajectory again or remove it"
        )
    return reward


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), type(value).__name__
    )
