"""What the original does and `Fixes` turns off, reproduced token by token for `compat="seed"`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting.layout import Layout
from shoal.splitting.recordings import Message
from shoal.splitting.templates import ChatTemplate
from shoal.splitting.windows import Cut

Array = np.ndarray
HEADER = "<|im_start|>assistant"
END = "<|im_end|>"
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>"
SCREEN_END = "<|vision_end|><|im_end|>"


def stripped_answer(template: ChatTemplate, message: Message) -> Array:
    """The answer rendered alone, with header and default system prompt removed wherever they stand."""
    text = template.render([(message, None)])
    text = text.replace(DEFAULT_SYSTEM, "").strip().replace(HEADER + "\n", "").strip()
    return template.encode(text)


def until_first_end(ids: Array, eos: int, pad: int, limit: int) -> tuple[Array, int]:
    """The response ids and how many count: up to the first end token, or all and the padding without one."""
    ends = np.flatnonzero(ids == eos)
    if len(ends):
        return ids, int(ends[0]) + 1
    padded = np.full(max(limit, len(ids)), pad, np.int32)
    padded[: len(ids)] = ids
    return padded, len(padded)


def doubled_newline(template: ChatTemplate, prompt: Layout, response: Layout) -> tuple[Layout, int]:
    """The response cut from the whole chat behind the first screenshot's end token, and how much it grew.

    What follows that token in the prompt (a newline) stands in both, with the same position.
    """
    whole = Layout(
        np.concatenate([prompt.ids, response.ids]),
        np.concatenate([prompt.positions, response.positions], axis=1),
        response.span,
        (*prompt.images, *((i, a + len(prompt), b + len(prompt)) for i, a, b in response.images)),
    )
    places = _find(whole.ids, template.encode(SCREEN_END))
    if not len(places):
        raise DataError(
            "no message ends with a screenshot, and the original looks for one to find where the response "
            "starts; turn the fix single_newline on"
        )
    start = int(places[0]) + 2
    return whole[start:], len(prompt) - start


def searched_mask(template: ChatTemplate, prompt: Array, response: Array) -> Array:
    """Trained tokens found by search: from each header to the end token that is paired with it.

    Only every second end token is taken, since a screenshot's end token is expected between two answers.
    """
    whole = np.concatenate([prompt, response])
    screens = _find(whole, template.encode(SCREEN_END))
    after = int(screens[0]) if len(screens) else -1
    starts = [int(at) for at in _find(whole, template.encode(HEADER)) if at > after]
    ends = [int(at) for at in _find(whole, template.encode(END)) if at > after + 2][::2]
    mask = np.zeros(len(whole), bool)
    for start, end in zip(starts, ends, strict=False):
        if start >= end:
            raise DataError("the search for answers found an end before its start, as the original would; "
                            "turn the fix masks_from_messages on")  # fmt: skip
        mask[start : end + 1] = True
    return mask[len(prompt) :]


def answer_ends(cut: Cut, lengths: Sequence[int], total: int) -> tuple[tuple[int, int], ...]:
    """(turn, its end token) of a response whose last tokens are pieces of these lengths."""
    ends = []
    place = total - sum(lengths)
    for piece, length in zip(cut.pieces[cut.n_prompt :], lengths, strict=True):
        place += length
        if piece.turn is not None:
            ends.append((piece.turn, place - 2))  # a newline follows the end token
    return tuple(ends)


def _find(ids: Array, wanted: Array) -> Array:
    """Where the sequence `wanted` starts in `ids`."""
    if len(ids) < len(wanted):
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    return np.flatnonzero((windows == wanted).all(axis=1))
