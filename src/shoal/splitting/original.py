"""The tensors of the splitter that this one replaces (`compat="seed"`), and each difference as a switch.

What is proven of them: they equal, tensor for tensor, a plain program written from that splitter's description
(tests/splitting/per_window_reference.py). Nothing else in shoal needs this file; without it, and without the
arguments `compat` and `fixes`, all that is right stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from shoal.core.errors import ConfigError, DataError, did_you_mean
from shoal.splitting.cut import (
    Cut,
    Limits,
    Piece,
    answers_of,
    images_of,
    instruction_of,
    repeated_head,
    step_cut,
    with_newest_images,
)
from shoal.splitting.place import (
    Layout,
    Side,
    Truncation,
    Way,
    kept_by,
    moved,
    step_prompt,
    too_long,
    window_sides,
    without_torn_images,
)
from shoal.splitting.readers.recordings import Message, Recording, RolloutTokens, check_order

if TYPE_CHECKING:
    from shoal.splitting.encode import ChatTemplate, Encoder
    from shoal.splitting.splitters import Plan

Array = np.ndarray
Compat = Literal["fixed", "seed"]


@dataclass(frozen=True, slots=True)
class Fixes:
    """What is done right (`True`, `compat="fixed"`) or as the original does it (`False`, `compat="seed"`)."""

    assistant_header: bool = True
    """The header that opens an answer ends the prompt. Off: steps have none, windows carry it in the response."""
    keep_last_step: bool = True
    """Stepwise: a recording that ends on an answer trains it. Off: that answer is dropped."""
    single_newline: bool = True
    """Windows: the newline after the first screenshot stands once. Off: in prompt and response, with one position.
    `assistant_header` implies it."""
    reward_on_loss_token: bool = True
    """The reward is on the last trained token. Off: on the last of the response, in windows an untrained newline."""
    masks_from_messages: bool = True
    """Trained are the texts of the sample's own answers and the tokens that end them. Off: what a search for header
    and end tokens (windows) or the first end token (steps) finds."""
    response_limit: bool = True
    """Windows: prompt and response have a limit each. Off: both together must fit `max_prompt_length`."""
    drop_images_with_tokens: bool = True
    """Truncation removes an image whole, tokens and pixels. Off: a torn image is an error (the original went on)."""
    trim_tail: bool = True
    """Windows end at their last trained token. Off: a trailing screenshot or newline stays, and a lone trailing
    screenshot becomes a window with nothing to learn."""
    exact_response_text: bool = True
    """Stepwise: answers as recorded. Off: stripped, less the default system prompt or a header inside them."""
    escape_control_tokens: bool = True
    """Control tokens that recorded text spells out are text. Off: they can forge roles, images and masks."""
    text_instruction: bool = True
    """A repeated instruction keeps its text parts. Off: its first part; in windows only once a window began with a
    message of a single part."""
    limit_images_in_windows: bool = True
    """Windows respect `limit_images` by dropping their oldest images. Off: they ignore it."""
    last_n_turns: bool = True
    """`LastNTrajectorySplitter` takes the last `window_size` turns. Off: the last window of the stride grid."""

    @staticmethod
    def resolve(compat: Compat, overrides: Mapping[str, bool] | Fixes | None = None) -> Fixes:
        """All switches on for "fixed", off for "seed", then the named ones as given."""
        if isinstance(overrides, Fixes):
            return overrides
        if compat not in ("fixed", "seed"):
            raise ConfigError(f"compat must be 'fixed' or 'seed', got {compat!r}")
        names = [field.name for field in dataclasses.fields(Fixes)]
        for name, value in (overrides or {}).items():
            if name not in names:
                raise ConfigError(f"no fix named {name!r}.{did_you_mean(name, names)}")
            if not isinstance(value, bool):
                raise ConfigError(f"fix {name!r} must be True or False, got {value!r}")
        return Fixes(**{name: compat == "fixed" for name in names} | dict(overrides or {}))


class OriginalWay(Way):
    """The original's way where a fix is off, the right one where it is on."""

    def __init__(self, fixes: Fixes) -> None:
        self.fixes = fixes

    def cuts(self, kind: str, recording: Recording, limits: Limits) -> list[Cut]:
        """The samples of a recording before they have tokens."""
        if any(message.role == "assistant" and not message.trained for message in recording.messages):
            raise DataError(f"{recording.source}: the original trains every answer; use compat='fixed'")
        if self.fixes.masks_from_messages:
            check_order(recording)
        else:
            _check_strict_order(recording)
        if kind == "stepwise":
            return _cut_steps(recording.messages, limits, self.fixes)
        if kind == "window":
            return _cut_windows(recording, limits, self.fixes)
        if not self.fixes.last_n_turns:
            return [
                dataclasses.replace(_cut_windows(recording, limits, self.fixes)[-1], step_index=0, n_steps=1)
            ]
        first = max(0, len(answers_of(recording.messages)) - limits.window)
        pieces, n_prompt = _window(recording, first, limits, self.fixes, self.fixes.text_instruction)
        return [Cut(tuple(pieces), n_prompt, 0, 1)]

    def sides(
        self, plan: Plan, encoder: Encoder, cut: Cut, step: RolloutTokens | None
    ) -> tuple[Side, Side, int]:
        """Prompt and response, and how many tokens of the response are attended to."""
        if not encoder.joins_in(cut):
            if not (self.fixes.masks_from_messages and self.fixes.assistant_header):
                raise DataError(
                    "the chat template renders a message differently by its place, which the original cannot "
                    "handle; use compat='fixed'"
                )
            if plan.kind != "stepwise":
                return super().sides(plan, encoder, cut, step)
        if plan.kind == "stepwise":
            return _step_sides(self.fixes, plan, encoder, cut, step)
        return _window_sides(self.fixes, encoder, cut)

    def fitted(self, plan: Plan, encoder: Encoder, prompt: Side, response: Side) -> tuple[Side, Side, bool]:
        """Both within their limits; a window may have only one, and a torn image may be an error."""
        together, limit = len(prompt.layout) + len(response.layout), plan.max_prompt_length
        if plan.kind != "stepwise" and not self.fixes.response_limit:
            for what, length, option in (
                ("prompt", len(prompt.layout), "max_prompt_length"),
                ("response", len(response.layout), "max_response_length"),
                ("window", together, "max_prompt_length"),
            ):
                if length > getattr(plan, option):
                    raise too_long(what, length, option, getattr(plan, option))
        if not self.fixes.drop_images_with_tokens and plan.truncation != "error":
            self._refuse_torn(plan, prompt, limit, plan.truncation, "prompt")
            self._refuse_torn(plan, response, plan.max_response_length, "right", "response")
        return super().fitted(plan, encoder, prompt, response)

    def rewarded(self, mask: Array, attended: int) -> int | None:
        """The token that stands for the whole sample; the original's may be one that is not trained."""
        return super().rewarded(mask, attended) if self.fixes.reward_on_loss_token else attended - 1

    @staticmethod
    def _refuse_torn(plan: Plan, side: Side, limit: int, truncation: Truncation, what: str) -> None:
        length = len(side.layout)
        keep = kept_by(length, limit, truncation)
        whole = without_torn_images(side.layout, keep, plan.template.image_frame_ids)
        if any(not whole[first:last].all() for _, first, last in side.layout.images):
            raise DataError(
                f"a {what} of {length} tokens is over max_{what}_length={limit} and truncation would tear images "
                "from their tokens; turn the fix drop_images_with_tokens on"
            )


def way_of(compat: Compat, overrides: Mapping[str, bool] | Fixes | None) -> tuple[Way, Fixes]:
    """How to split with these switches, and the switches."""
    fixes = Fixes.resolve(compat, overrides)
    return (Way() if fixes == Fixes() else OriginalWay(fixes)), fixes


# --- what is cut
def _check_strict_order(recording: Recording) -> None:
    roles = [message.role for message in recording.messages]
    expected = ["system", *("user" if index % 2 else "assistant" for index in range(1, len(roles)))]
    for index, (want, got) in enumerate(zip(expected, roles, strict=True)):
        if want != got:
            raise DataError(
                f"{recording.source}: message {index} must be from {want!r}, got {got!r}: the order must be system, "
                "user, assistant, user, …; compat='fixed' also takes tool messages and user messages in a row"
            )
    if len(roles) < 3:
        raise DataError(
            f"{recording.source}: needs system, user and assistant messages, got {len(roles)} messages"
        )


def _cut_steps(messages: Sequence[Message], limits: Limits, fixes: Fixes) -> list[Cut]:
    answers = answers_of(messages)
    count = sum(fixes.keep_last_step or at < len(messages) - 1 for at in answers)
    head = _head(messages, fixes)
    return [step_cut(messages, answers, turn, head, limits, turn, count) for turn in range(count)]


def _cut_windows(recording: Recording, limits: Limits, fixes: Fixes) -> list[Cut]:
    messages, answers = recording.messages, answers_of(recording.messages)
    whole_instruction = True
    windows: list[tuple[list[Piece], int]] = []
    for first in range(0, len(answers) + 1, limits.stride):
        begin = _turn_start(messages, answers, first)
        if begin >= len(messages) or (first == len(answers) and (fixes.trim_tail or fixes.assistant_header)):
            break
        if not fixes.text_instruction and len(messages[begin].parts) == 1:
            whole_instruction = False
        windows.append(_window(recording, first, limits, fixes, whole_instruction))
    return [Cut(tuple(pieces), n, index, len(windows)) for index, (pieces, n) in enumerate(windows)]


def _turn_start(messages: Sequence[Message], answers: Sequence[int], turn: int) -> int:
    return answers[turn - 1] + 1 if turn else instruction_of(messages)


def _head(messages: Sequence[Message], fixes: Fixes) -> list[Piece]:
    if fixes.text_instruction:
        return repeated_head(messages)
    at = instruction_of(messages)
    return [*(Piece(index) for index in range(at)), Piece(at, (0,))]


def _window(
    recording: Recording, first: int, limits: Limits, fixes: Fixes, whole_instruction: bool
) -> tuple[list[Piece], int]:
    """Pieces of the window that starts at turn `first`, and how many of them are the prompt."""
    messages, answers = recording.messages, answers_of(recording.messages)
    begin = _turn_start(messages, answers, first)
    last = first + limits.window
    end = answers[last - 1] + 1 if last <= len(answers) else len(messages)
    if fixes.trim_tail and answers[first:]:
        end = answers[min(last, len(answers)) - 1] + 1
    turn_of = {at: turn for turn, at in enumerate(answers)}
    begun = sum(at < end for at in answers) + (messages[end - 1].role != "assistant")  # turns up to `end`
    history = [Piece(at) for at in answers[max(0, begun - limits.messages - 1) : first]]
    if first == 0:
        at = instruction_of(messages)
        keep = None if whole_instruction else (0,)
        head, begin = [*(Piece(index) for index in range(at)), Piece(at, keep)], at + 1
    elif fixes.text_instruction or not whole_instruction:
        head = _head(messages, fixes)
    else:
        head = [Piece(index) for index in range(instruction_of(messages) + 1)]
    body = [Piece(index, None, turn_of.get(index)) for index in range(begin, end)]
    pieces = [*head, *history, *body]
    if fixes.limit_images_in_windows:
        pieces = with_newest_images(messages, pieces, limits.images)
    return pieces, _prompt_length(recording, pieces, fixes)


def _prompt_length(recording: Recording, pieces: Sequence[Piece], fixes: Fixes) -> int:
    if fixes.assistant_header:
        return next(index for index, piece in enumerate(pieces) if piece.turn is not None)
    for index, piece in enumerate(pieces):
        if recording.messages[piece.message].role == "user" and images_of(recording.messages, piece):
            return index + 1
    raise DataError(
        f"{recording.source}: a window without a screenshot has no prompt unless the fix assistant_header is "
        "on; use compat='fixed'"
    )


# --- prompt and response
def _step_sides(
    fixes: Fixes, plan: Plan, encoder: Encoder, cut: Cut, step: RolloutTokens | None
) -> tuple[Side, Side, int]:
    """Everything before the answer, and the answer."""
    template, answer = plan.template, cut.pieces[-1]
    prompt = step_prompt(encoder, cut, step, ask=fixes.assistant_header)
    message = encoder.recording.messages[answer.message]
    if step is not None:
        ids = np.asarray(step.response_ids, np.int32)
    elif fixes.exact_response_text:
        ids = np.concatenate([template.answer_ids(message, answer.keep), template.closing_ids[0]])
    else:
        ids = _stripped_answer(template, message)
    attended = len(ids)
    if not fixes.masks_from_messages:
        ids, attended = _until_first_end(ids, template.eos_id, template.pad_id, plan.max_response_length)
    mask = np.arange(len(ids)) < attended
    assert answer.turn is not None
    layout = moved(encoder.plain(ids), prompt.layout.span)
    return (
        prompt,
        Side(layout, mask, ((answer.turn, attended - 1),), (("assistant", 0, len(ids)),)),
        attended,
    )


def _window_sides(fixes: Fixes, encoder: Encoder, cut: Cut) -> tuple[Side, Side, int]:
    """Several turns in one sample, messages joined."""
    train = fixes.masks_from_messages
    prompt, response = window_sides(
        encoder, cut, ask=fixes.assistant_header and train, train=train, trim=fixes.trim_tail and train
    )
    lengths = [last - first for _, first, last in response.roles]
    if not fixes.single_newline and not fixes.assistant_header:
        layout, grown = _doubled_newline(encoder.template, prompt.layout, response.layout)
        response = Side(
            layout,
            np.concatenate([np.zeros(max(0, grown), bool), response.mask[max(0, -grown) :]]),
            tuple((turn, end + grown) for turn, end in response.ends if end + grown >= 0),
            (
                ("user", 0, max(0, grown)),
                *((role, max(0, a + grown), b + grown) for role, a, b in response.roles if b + grown > 0),
            ),
        )
    if not fixes.masks_from_messages:
        mask = _searched_mask(encoder.template, prompt.layout.ids, response.layout.ids)
        ends = _answer_ends(cut, lengths, len(response.layout))
        response = Side(response.layout, mask, ends, response.roles)
    return prompt, response, len(response.layout)


HEADER = "<|im_start|>assistant"
END = "<|im_end|>"
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>"
SCREEN_END = "<|vision_end|><|im_end|>"


def _stripped_answer(template: ChatTemplate, message: Message) -> Array:
    """The answer rendered alone, with header and default system prompt removed wherever they stand."""
    text = template.render([(message, None)])
    text = text.replace(DEFAULT_SYSTEM, "").strip().replace(HEADER + "\n", "").strip()
    return template.encode(text)


def _until_first_end(ids: Array, eos: int, pad: int, limit: int) -> tuple[Array, int]:
    """The response ids and how many count: up to the first end token, or all and the padding without one."""
    ends = np.flatnonzero(ids == eos)
    if len(ends):
        return ids, int(ends[0]) + 1
    padded = np.full(max(limit, len(ids)), pad, np.int32)
    padded[: len(ids)] = ids
    return padded, len(padded)


def _doubled_newline(template: ChatTemplate, prompt: Layout, response: Layout) -> tuple[Layout, int]:
    """The response cut from the whole chat behind the first screenshot's end token, and how much it grew.

    What follows that token in the prompt (a newline) stands in both, with the same position.
    """
    ids = np.concatenate([prompt.ids, response.ids])
    positions = np.concatenate([prompt.positions, response.positions], axis=1)
    places = _places_of_tokens(ids, template.encode(SCREEN_END))
    if not len(places):
        raise DataError(
            "no message ends with a screenshot, and the original looks for one to find where the response "
            "starts; turn the fix single_newline on"
        )
    start = int(places[0]) + 2
    grown = len(prompt) - start
    shown = (*((i, a - len(prompt), b - len(prompt)) for i, a, b in prompt.images), *response.images)
    images = tuple((i, a + grown, b + grown) for i, a, b in shown if a + grown >= 0)
    return Layout(ids[start:], positions[:, start:], response.span, images), grown


def _searched_mask(template: ChatTemplate, prompt: Array, response: Array) -> Array:
    """Trained tokens found by search: from each header to the end token that is paired with it.

    Only every second end token is taken, since a screenshot's end token is expected between two answers.
    """
    whole = np.concatenate([prompt, response])
    screens = _places_of_tokens(whole, template.encode(SCREEN_END))
    after = int(screens[0]) if len(screens) else -1
    starts = [int(at) for at in _places_of_tokens(whole, template.encode(HEADER)) if at > after]
    ends = [int(at) for at in _places_of_tokens(whole, template.encode(END)) if at > after + 2][::2]
    mask = np.zeros(len(whole), bool)
    for start, end in zip(starts, ends, strict=False):
        if start >= end:
            raise DataError("the search for answers found an end before its start, as the original would; "
                            "turn the fix masks_from_messages on")  # fmt: skip
        mask[start : end + 1] = True
    return mask[len(prompt) :]


def _answer_ends(cut: Cut, lengths: Sequence[int], total: int) -> tuple[tuple[int, int], ...]:
    """(turn, its end token) of a response whose last tokens are pieces of these lengths."""
    ends = []
    place = total - sum(lengths)
    for piece, length in zip(cut.pieces[cut.n_prompt :], lengths, strict=True):
        place += length
        if piece.turn is not None:
            ends.append((piece.turn, place - 2))  # a newline follows the end token
    return tuple(ends)


def _places_of_tokens(ids: Array, wanted: Array) -> Array:
    """Where the sequence `wanted` starts in `ids`."""
    if len(ids) < len(wanted):
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    return np.flatnonzero((windows == wanted).all(axis=1))
