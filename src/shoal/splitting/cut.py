"""Cut a recording into samples: which messages, which of their parts, what is prompt, what is trained.

Pure functions of the messages; no tokens and no pixels here. A turn is what the environment said followed by
one assistant message, however many messages that are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from shoal.splitting.readers.recordings import Message, Recording, check_order


class Piece(NamedTuple):
    """A message as it appears in a sample."""

    message: int  # its index in the recording
    keep: tuple[int, ...] | None = None  # indices of the content parts that stay; None for all
    turn: int | None = None  # the turn this assistant message ends, where the sample trains it


@dataclass(frozen=True, slots=True)
class Cut:
    """One sample before it has tokens."""

    pieces: tuple[Piece, ...]
    n_prompt: int  # so many pieces are the prompt
    step_index: int
    n_steps: int  # samples in this trajectory


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a sample looks back."""

    window: int = 5
    stride: int = 5
    images: int = 5
    messages: int = 35


def cut_steps(recording: Recording, limits: Limits) -> list[Cut]:
    """One sample per turn: everything the model saw before its message, then that message."""
    check_order(recording)
    messages, answers = recording.messages, answers_of(recording.messages)
    turns = [turn for turn, at in enumerate(answers) if messages[at].trained]
    head = repeated_head(messages)
    cuts = []
    for index, turn in enumerate(turns):
        first = turn - limits.messages
        begin = 0 if first < 0 else answers[first]
        context = [Piece(message) for message in range(begin, answers[turn])]
        context = with_newest_images(messages, context, limits.images)
        pieces = (*(head if first >= 0 else ()), *context, Piece(answers[turn], turn=turn))
        cuts.append(Cut(pieces, len(pieces) - 1, index, len(turns)))
    return cuts


def cut_windows(recording: Recording, limits: Limits) -> list[Cut]:
    """One sample per `window` turns, a new one every `stride` turns; of older turns only the answers."""
    return _windows(recording, limits, range(0, len(answers_of(recording.messages)), limits.stride))


def cut_last(recording: Recording, limits: Limits) -> list[Cut]:
    """One sample: the last `window` turns."""
    return _windows(recording, limits, [max(0, len(answers_of(recording.messages)) - limits.window)])


def _windows(recording: Recording, limits: Limits, firsts: Sequence[int]) -> list[Cut]:
    """The windows that start at these turns and train something."""
    check_order(recording)
    messages, answers = recording.messages, answers_of(recording.messages)
    windows = [
        _window(messages, answers, first, limits)
        for first in firsts
        if any(messages[at].trained for at in answers[first : first + limits.window])
    ]
    return [Cut(tuple(pieces), n, index, len(windows)) for index, (pieces, n) in enumerate(windows)]


CUTS: dict[str, Callable[[Recording, Limits], list[Cut]]] = {
    "stepwise": cut_steps,
    "window": cut_windows,
    "last-n": cut_last,
}


def _window(
    messages: Sequence[Message], answers: Sequence[int], first: int, limits: Limits
) -> tuple[list[Piece], int]:
    """Pieces of the window that starts at turn `first` and ends with its last trained one; how many are the prompt."""
    turns = range(first, min(first + limits.window, len(answers)))
    turn_of = {answers[turn]: turn for turn in turns if messages[answers[turn]].trained}
    last = max(turn_of.values()) + 1
    begin = answers[first - 1] + 1 if first else 0
    body = [Piece(index, None, turn_of.get(index)) for index in range(begin, answers[last - 1] + 1)]
    older = [Piece(at) for at in answers[max(0, last - limits.messages - 1) : first]]
    head = repeated_head(messages) if first else []
    pieces = with_newest_images(messages, [*head, *older, *body], limits.images)
    return pieces, next(index for index, piece in enumerate(pieces) if piece.turn is not None)


def answers_of(messages: Sequence[Message]) -> list[int]:
    """Where the model speaks."""
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def repeated_head(messages: Sequence[Message]) -> list[Piece]:
    """System prompts, and the text of all that stands before the first answer, as later samples repeat them."""
    head = []
    for at, message in enumerate(takewhile(lambda message: message.role != "assistant", messages)):
        texts = tuple(index for index, part in enumerate(message.parts) if part["type"] == "text")
        if message.role == "system":
            head.append(Piece(at))
        elif texts:
            head.append(Piece(at, texts))
    return head


def images_of(messages: Sequence[Message], piece: Piece) -> list[int]:
    """Indices of the image parts that the piece keeps."""
    if not messages[piece.message].images:
        return []
    parts = messages[piece.message].parts
    kept = range(len(parts)) if piece.keep is None else piece.keep
    return [index for index in kept if parts[index]["type"] == "image"]


def with_newest_images(messages: Sequence[Message], pieces: list[Piece], limit: int) -> list[Piece]:
    """Keep the newest `limit` images; a message that had nothing but dropped images goes with them."""
    spare = sum(len(images_of(messages, piece)) for piece in pieces) - limit
    limited = []
    for piece in pieces:
        dropped = images_of(messages, piece)[: max(0, spare)]
        if dropped:
            spare -= len(dropped)
            parts = range(len(messages[piece.message].parts)) if piece.keep is None else piece.keep
            keep = tuple(index for index in parts if index not in dropped)
            if not keep:
                continue
            piece = piece._replace(keep=keep)
        limited.append(piece)
    return limited
