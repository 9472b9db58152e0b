"""Prompt and response of a step, from the messages or from what the sampler recorded."""

from __future__ import annotations

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting import oddities
from shoal.splitting.encoder import Encoder, places_of
from shoal.splitting.layout import Layout, moved
from shoal.splitting.plans import Plan
from shoal.splitting.recordings import Recording, RolloutTokens
from shoal.splitting.sides import Side, side_of
from shoal.splitting.windows import Cut


def step_sides(plan: Plan, encoder: Encoder, cut: Cut, step: RolloutTokens | None) -> tuple[Side, Side, int]:
    """Everything before the answer, and the answer."""
    template, fixes = plan.template, plan.fixes
    messages, context, answer = encoder.recording.messages, cut.pieces[:-1], cut.pieces[-1]
    if step is not None and step.prompt_ids:
        prompt = side_of(encoder.rows, [("recorded", recorded_prompt(plan, encoder, cut, step))])
    elif encoder.joins:
        parts = [(messages[p.message].role, encoder.as_context(p, i == 0)) for i, p in enumerate(context)]
        if fixes.assistant_header:
            parts.append(("assistant", encoder.plain(template.header_ids)))
        prompt = side_of(encoder.rows, parts)
    else:
        chat = [(messages[piece.message], piece.keep) for piece in context]
        text = template.render(chat, ask=fixes.assistant_header)
        prompt = side_of(encoder.rows, [("rendered", encoder.lay_out(text, context))])
    message = messages[answer.message]
    if step is not None:
        ids = np.asarray(step.response_ids, np.int32)
    elif fixes.exact_response_text:
        ids = np.concatenate([template.answer_ids(message, answer.keep), template.closing_ids[0]])
    else:
        ids = oddities.stripped_answer(template, message)
    attended = len(ids)
    if not fixes.masks_from_messages:
        ids, attended = oddities.until_first_end(
            ids, template.eos_id, template.pad_id, plan.max_response_length
        )
    mask = np.arange(len(ids)) < attended
    assert answer.turn is not None
    layout = moved(encoder.plain(ids), prompt.layout.span)
    return (
        prompt,
        Side(layout, mask, ((answer.turn, attended - 1),), (("assistant", 0, len(ids)),)),
        attended,
    )


def rollout_step(plan: Plan, recording: Recording, cut: Cut) -> RolloutTokens | None:
    """What the sampler recorded for this step, where it is to be used."""
    if not plan.use_rollout:
        return None
    if recording.steps is None:
        raise DataError(f"{recording.source} has no recorded tokens; set use_vllm_logp=False")
    if cut.step_index >= len(recording.steps):
        raise DataError(f"{recording.source}: {len(recording.steps)} recorded steps, but more answers; "
                        "record the missing ones or set use_vllm_logp=False")  # fmt: skip
    return recording.steps[cut.step_index]


def recorded_prompt(plan: Plan, encoder: Encoder, cut: Cut, step: RolloutTokens) -> Layout:
    """The prompt from recorded ids; image tokens may be recorded one per image or already spread out."""
    image_token = plan.template.image_token_id
    places = [place for piece in cut.pieces[:-1] for place in places_of(encoder.recording.messages, piece)]
    images = [encoder.image_of[place] for place in places]
    ids = np.asarray(step.prompt_ids, np.int32)
    if image_token is None or image_token < 0:
        return encoder.plain(ids)
    inside = ids == image_token
    starts = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    stops = np.flatnonzero(inside & ~np.concatenate([inside[1:], [False]])) + 1
    wanted = [len(encoder.tokens[image].ids) for image in images]
    got = (stops - starts).tolist()
    if got != wanted and got != [1] * len(images):
        raise DataError(
            f"{step.source}: the prompt has image tokens in runs of {got}, but its images need {wanted}; "
            "the recorded tokens belong to other images or image settings"
        )
    keep = np.ones(len(ids), bool)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        keep[start + 1 : stop] = False
    return encoder.text(ids[keep], images)
