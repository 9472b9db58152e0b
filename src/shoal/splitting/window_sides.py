"""Prompt and response of a window: messages joined, or rendered as a whole where a template looks back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting import oddities
from shoal.splitting.encoder import Encoder, places_of
from shoal.splitting.layout import Layout, moved
from shoal.splitting.plans import Plan
from shoal.splitting.sides import Side, shifted, side_of
from shoal.splitting.templates import END
from shoal.splitting.windows import Cut


def window_sides(plan: Plan, encoder: Encoder, cut: Cut) -> tuple[Side, Side, int]:
    """Several turns in one sample, messages joined."""
    template, fixes, messages = plan.template, plan.fixes, encoder.recording.messages
    before = [
        (messages[piece.message].role, encoder.as_context(piece, index == 0))
        for index, piece in enumerate(cut.pieces[: cut.n_prompt])
    ]
    after: list[tuple[str, Layout, int | None]] = []
    for piece in cut.pieces[cut.n_prompt :]:
        message = messages[piece.message]
        if piece.turn is None or not fixes.masks_from_messages:
            after.append((message.role, encoder.as_context(piece, False), None))
            continue
        own, rest = template.closing_ids
        answer = np.concatenate([template.answer_ids(message, piece.keep), own])
        header = encoder.plain(template.header_ids)
        if not after and fixes.assistant_header:
            before.append(("assistant", header))
        else:
            after.append(("assistant", header, None))
        after.append(("assistant", encoder.plain(answer), piece.turn))
        after.append(("assistant", encoder.plain(rest), None))
    if fixes.trim_tail and fixes.masks_from_messages:
        while after and after[-1][2] is None:
            after.pop()
    prompt = side_of(encoder.rows, before)
    response = side_of(
        encoder.rows, [(role, layout) for role, layout, _ in after], [turn for _, _, turn in after]
    )
    response = Side(moved(response.layout, prompt.layout.span), response.mask, response.ends, response.roles)
    if not fixes.single_newline and not fixes.assistant_header:
        layout, grown = oddities.doubled_newline(template, prompt.layout, response.layout)
        response = Side(
            layout,
            np.concatenate([np.zeros(max(0, grown), bool), response.mask[max(0, -grown) :]]),
            tuple((turn, end + grown) for turn, end in response.ends if end + grown >= 0),
            (("user", 0, max(0, grown)), *shifted(response.roles, grown)),
        )
    if not fixes.masks_from_messages:
        mask = oddities.searched_mask(template, prompt.layout.ids, response.layout.ids)
        ends = oddities.answer_ends(cut, [len(layout) for _, layout, _ in after], len(response.layout))
        response = Side(response.layout, mask, ends, response.roles)
    return prompt, response, len(response.layout)


def rendered_sides(encoder: Encoder, cut: Cut) -> tuple[Side, Side, int]:
    """A window under a template that looks back: rendered whole, answers found by marks at their ends."""
    template, messages = encoder.template, encoder.recording.messages
    chat = [(messages[piece.message], piece.keep) for piece in cut.pieces]
    plain, marked = template.render(chat), template.render(chat, mark_ends=True)
    if marked.replace(END, "") != plain or marked.count(END) != sum(m.role == "assistant" for m, _ in chat):
        raise DataError("the chat template rewrites the ends of answers; use the stepwise splitter")
    ends_at = [index for index, piece in enumerate(cut.pieces) if messages[piece.message].role == "assistant"]
    texts: list[tuple[str, int | None]] = []
    context, remaining = "", marked
    for index in ends_at:
        upto, _, remaining = remaining.partition(END)
        turn = cut.pieces[index].turn
        if turn is None:
            context += upto
            continue
        opening, header, answer = upto.partition(template.header)
        if not header:
            raise DataError("the chat template opens answers differently from its generation prompt; "
                            "use the stepwise splitter")  # fmt: skip
        texts += [(context + opening + header, None), (answer, turn)]
        context = ""
    if not texts:
        raise DataError("a window without anything to train")
    return _sides_of_texts(encoder, cut, texts)


def _sides_of_texts(
    encoder: Encoder, cut: Cut, texts: Sequence[tuple[str, int | None]]
) -> tuple[Side, Side, int]:
    """Prompt and response from alternating context and answer texts; answers get the model's end token."""
    own = encoder.template.closing_ids[0]
    images = [
        encoder.image_of[place]
        for piece in cut.pieces
        for place in places_of(encoder.recording.messages, piece)
    ]
    layouts: list[tuple[str, Layout]] = []
    turns: list[int | None] = []
    for number, (text, turn) in enumerate(texts):
        ids = encoder.template.encode(text)
        if turn is not None:
            layouts.append(("assistant", encoder.plain(np.concatenate([ids, own]))))
        else:
            if number:  # the end token of the answer before belongs to that answer
                if not np.array_equal(ids[: len(own)], own):
                    raise DataError(
                        "the chat template ends answers in different ways; use the stepwise splitter"
                    )
                ids = ids[len(own) :]
            count = int((ids == encoder.template.image_token_id).sum())
            layouts.append(("rendered", encoder.text(ids, images[:count])))
            images = images[count:]
        turns.append(turn)
    prompt = side_of(encoder.rows, layouts[:1])
    response = side_of(encoder.rows, layouts[1:], turns[1:])
    layout = moved(response.layout, prompt.layout.span)
    return prompt, Side(layout, response.mask, response.ends, response.roles), len(layout)
