"""Prompt and response of a sample while they are put together: tokens, masks, ends of turns, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting.encoder import Encoder
from shoal.splitting.layout import Layout, join, kept_by, moved, shortened, without_torn_images
from shoal.splitting.plans import Plan

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Side:
    """Prompt or response while it is put together."""

    layout: Layout
    mask: Array  # [n] bool
    ends: tuple[tuple[int, int], ...]  # (turn, its last trained token)
    roles: tuple[tuple[str, int, int], ...]


def side_of(
    rows: int, parts: Sequence[tuple[str, Layout]], turns: Sequence[int | None] | None = None
) -> Side:
    """Layouts in a row; those with a turn number are trained."""
    layout = join([layout for _, layout in parts], rows)
    mask = np.zeros(len(layout), bool)
    ends, roles, start = [], [], 0
    for index, (role, part) in enumerate(parts):
        turn = turns[index] if turns is not None else None
        if turn is not None:
            mask[start : start + len(part)] = True
            ends.append((turn, start + len(part) - 1))
        roles.append((role, start, start + len(part)))
        start += len(part)
    return Side(layout, mask, tuple(ends), tuple(roles))


def shifted(roles: Sequence[tuple[str, int, int]], by: int) -> list[tuple[str, int, int]]:
    """Stretches moved by `by` tokens; what would start before the first token starts there."""
    return [(role, max(0, first + by), last + by) for role, first, last in roles if last + by > 0]


def untrained_before(side: Side, first_turn: int) -> Side:
    """The side with the turns before `first_turn` masked out."""
    mask, start = side.mask.copy(), 0
    for turn, end in side.ends:
        if turn < first_turn:
            mask[start : end + 1] = False
        start = end + 1
    return Side(side.layout, mask, tuple(item for item in side.ends if item[0] >= first_turn), side.roles)


def fitted(plan: Plan, encoder: Encoder, prompt: Side, response: Side) -> tuple[Side, Side, bool]:
    """Prompt and response within their limits, cut or refused."""
    shared = plan.kind != "stepwise" and not plan.fixes.response_limit
    together = len(prompt.layout) + len(response.layout)
    limits = {
        "prompt": (len(prompt.layout), plan.max_prompt_length),
        "response": (len(response.layout), plan.max_response_length),
    }
    if shared:
        limits["window"] = (together, plan.max_prompt_length)
    over = {name: size for name, size in limits.items() if size[0] > size[1]}
    if not over:
        return prompt, response, False
    name, (length, limit) = next(iter(over.items()))
    option = "max_response_length" if name == "response" else "max_prompt_length"
    advice = f"raise {option}, lower window_size, limit_messages or limit_images, or set truncation"
    if plan.truncation == "error" or shared:
        raise DataError(f"a {name} of {length} tokens is over {option}={limit}: {advice}")
    prompt_keep = kept_by(len(prompt.layout), plan.max_prompt_length, plan.truncation)
    response_keep = kept_by(len(response.layout), plan.max_response_length, "right")
    sides = []
    offset = 0
    for side, keep in ((prompt, prompt_keep), (response, response_keep)):
        whole = without_torn_images(side.layout, keep, plan.template.image_frame_ids)
        lost_images = any(not whole[first:last].all() for _, first, last in side.layout.images)
        if lost_images and not plan.fixes.drop_images_with_tokens:
            raise DataError(
                f"a {name} of {length} tokens is over {option}={limit} and truncation would tear images from "
                "their tokens; turn the fix drop_images_with_tokens on"
            )
        layout = moved(shortened(side.layout, whole, encoder.tokens), offset)
        offset = layout.span
        new_place = np.cumsum(whole) - 1
        ends = tuple((turn, int(new_place[end])) for turn, end in side.ends if whole[end])
        roles = tuple(
            (role, int(whole[:first].sum()), int(whole[:last].sum())) for role, first, last in side.roles
        )
        sides.append(Side(layout, side.mask[whole], ends, roles))
    return sides[0], sides[1], True
