"""Cut a recording into samples: which messages, which of their parts, what is prompt, what is trained.

Pure functions of the messages; no tokens and no pixels here. A turn is what the environment said followed by
one assistant message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.errors import DataError
from shoal.splitting.fixes import Fixes
from shoal.splitting.recordings import Message, Recording, check_order


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


def cut_steps(recording: Recording, limits: Limits, fixes: Fixes) -> list[Cut]:
    """One sample per turn: everything the model saw before its message, then that message."""
    check_order(recording, strict=not fixes.masks_from_messages)
    messages = recording.messages
    answers = _answers(messages)
    trained = [at for at in answers if fixes.keep_last_step or at < len(messages) - 1]
    cuts = []
    for turn, at in enumerate(trained):
        first = turn - limits.messages
        head = [] if first < 0 else _head(messages, fixes.text_instruction)
        begin = 0 if first < 0 else answers[first]
        context = _limit_images(messages, [Piece(index) for index in range(begin, at)], limits.images)
        pieces = (*head, *context, Piece(at, turn=turn))
        cuts.append(Cut(pieces, len(pieces) - 1, turn, len(trained)))
    return cuts


def cut_windows(recording: Recording, limits: Limits, fixes: Fixes) -> list[Cut]:
    """One sample per `window` turns, a new one every `stride` turns; of older turns only the answers."""
    check_order(recording, strict=not fixes.masks_from_messages)
    messages, answers = recording.messages, _answers(recording.messages)
    whole_instruction = True
    windows: list[tuple[list[Piece], int]] = []
    for first in range(0, len(answers) + 1, limits.stride):
        begin = _turn_start(messages, answers, first)
        if begin >= len(messages) or (first == len(answers) and (fixes.trim_tail or fixes.assistant_header)):
            break
        if not fixes.text_instruction and len(messages[begin].parts) == 1:
            whole_instruction = False
        windows.append(_window(recording, first, limits, fixes, whole_instruction))
    return [
        Cut(tuple(pieces), n_prompt, index, len(windows)) for index, (pieces, n_prompt) in enumerate(windows)
    ]


def cut_last(recording: Recording, limits: Limits, fixes: Fixes) -> list[Cut]:
    """One sample: the last `window` turns."""
    if not fixes.last_n_turns:
        last = cut_windows(recording, limits, fixes)[-1]
        return [Cut(last.pieces, last.n_prompt, 0, 1)]
    check_order(recording, strict=not fixes.masks_from_messages)
    first = max(0, len(_answers(recording.messages)) - limits.window)
    pieces, n_prompt = _window(recording, first, limits, fixes, whole_instruction=fixes.text_instruction)
    return [Cut(tuple(pieces), n_prompt, 0, 1)]


def count_turns(messages: Sequence[Message]) -> int:
    """How many times the model spoke."""
    return len(_answers(messages))


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _instruction(messages: Sequence[Message]) -> int:
    return next(index for index, message in enumerate(messages) if message.role == "user")


def _turn_start(messages: Sequence[Message], answers: Sequence[int], turn: int) -> int:
    """The first message of a turn; the first turn starts with the instruction."""
    return answers[turn - 1] + 1 if turn else _instruction(messages)


def _head(messages: Sequence[Message], text_instruction: bool) -> list[Piece]:
    """System prompt and instruction, where later samples repeat them without the first screenshot."""
    at = _instruction(messages)
    parts = messages[at].parts
    texts = tuple(index for index, part in enumerate(parts) if part["type"] == "text")
    keep = texts if text_instruction else (0,)
    return [*(Piece(index) for index in range(at)), *([Piece(at, keep)] if keep else [])]


def _window(
    recording: Recording, first: int, limits: Limits, fixes: Fixes, whole_instruction: bool
) -> tuple[list[Piece], int]:
    """Pieces of the window that starts at turn `first`, and how many of them are the prompt."""
    messages, answers = recording.messages, _answers(recording.messages)
    begin = _turn_start(messages, answers, first)
    last = first + limits.window
    end = answers[last - 1] + 1 if last <= len(answers) else len(messages)
    if fixes.trim_tail and answers[first:]:
        end = answers[min(last, len(answers)) - 1] + 1
    turn_of = {at: turn for turn, at in enumerate(answers)}
    begun = sum(at < end for at in answers) + (messages[end - 1].role != "assistant")  # turns up to `end`
    history = [Piece(at) for at in answers[max(0, begun - limits.messages - 1) : first]]
    if first == 0:
        at = _instruction(messages)
        keep = None if whole_instruction else (0,)
        head, begin = [*(Piece(index) for index in range(at)), Piece(at, keep)], at + 1
    elif fixes.text_instruction or not whole_instruction:
        head = _head(messages, fixes.text_instruction)
    else:
        head = [Piece(index) for index in range(_instruction(messages) + 1)]
    body = [Piece(index, None, turn_of.get(index)) for index in range(begin, end)]
    pieces = [*head, *history, *body]
    if fixes.limit_images_in_windows:
        pieces = _limit_images(messages, pieces, limits.images)
    return pieces, _prompt_length(recording, pieces, fixes)


def _prompt_length(recording: Recording, pieces: Sequence[Piece], fixes: Fixes) -> int:
    if fixes.assistant_header:
        return next(index for index, piece in enumerate(pieces) if piece.turn is not None)
    for index, piece in enumerate(pieces):
        if recording.messages[piece.message].role == "user" and _images_of(recording.messages, piece):
            return index + 1
    raise DataError(
        f"{recording.source}: a window without a screenshot has no prompt unless the fix assistant_header is "
        "on; use compat='fixed'"
    )


def _images_of(messages: Sequence[Message], piece: Piece) -> list[int]:
    """Indices of the image parts that the piece keeps."""
    parts = messages[piece.message].parts
    kept = range(len(parts)) if piece.keep is None else piece.keep
    return [index for index in kept if parts[index]["type"] == "image"]


def _limit_images(messages: Sequence[Message], pieces: list[Piece], limit: int) -> list[Piece]:
    """Keep the newest `limit` images; a message that had nothing but dropped images goes with them."""
    spare = sum(len(_images_of(messages, piece)) for piece in pieces) - limit
    limited = []
    for piece in pieces:
        dropped = _images_of(messages, piece)[: max(0, spare)]
        if dropped:
            spare -= len(dropped)
            parts = range(len(messages[piece.message].parts)) if piece.keep is None else piece.keep
            keep = tuple(index for index in parts if index not in dropped)
            if not keep:
                continue
            piece = piece._replace(keep=keep)
        limited.append(piece)
    return limited
