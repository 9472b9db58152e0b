"""Put a sample together: tokens and positions, prompt and response, what is trained, where the reward sits.

The positions are Qwen2-VL's (M-RoPE): three rows for time, height and width; text has the same number in all
three, an image of h x w merged patches starts where text stopped and text continues max(h, w) further on.
Models with plain positions have one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting.cut import Cut, Piece
from shoal.splitting.readers.recordings import RolloutTokens, finite_reward

if TYPE_CHECKING:
    from shoal.splitting.encode import Chat, ChatTemplate, Encoder
    from shoal.splitting.splitters import Plan

Array = np.ndarray
Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A stretch of tokens, or how one image stands among them; positions start at 0."""

    ids: Array  # [n] int32
    positions: Array  # [rows, n] int32
    span: int  # the position of what follows
    images: tuple[tuple[int, int, int], ...] = ()  # (image of the trajectory, first token, token behind it)

    def __len__(self) -> int:
        return len(self.ids)


def image_on_grid(token: int, height: int, width: int, rows: int) -> Layout:
    """An image of `height x width` tokens; with one row its tokens count on like text."""
    size = height * width
    if rows == 1:
        return text_like(np.full(size, token, np.int32))
    down = np.repeat(np.arange(height, dtype=np.int32), width)
    right = np.tile(np.arange(width, dtype=np.int32), height)
    positions = np.stack([np.zeros(size, np.int32), down, right])
    return Layout(np.full(size, token, np.int32), positions, max(height, width))


def text_like(ids: Array, rows: int = 1) -> Layout:
    """Tokens that count on in all rows, as text does."""
    count = np.arange(len(ids), dtype=np.int32)
    return Layout(ids, np.broadcast_to(count, (rows, len(ids))), len(ids))


def lay_out(
    ids: Array, image_token: int, images: Sequence[int], tokens: Sequence[Layout], rows: int
) -> Layout:
    """Positions for encoded text in which each image is still a single `image_token`.

    Args:
        ids: the encoded text.
        image_token: the id that stands for an image, -1 where there are none.
        images: which images of the trajectory the text shows, in order.
        tokens: how each image of the trajectory stands among tokens.
        rows: 1 or 3.
    """
    places = np.flatnonzero(ids == image_token) if image_token >= 0 else np.empty(0, np.int64)
    if len(places) != len(images):
        raise DataError(
            f"the rendered text has {len(places)} image tokens for {len(images)} images; the chat template must "
            "write one image token for each image"
        )
    stretches: list[Array | int] = []
    start = 0
    for place, image in zip(places.tolist(), images, strict=True):
        stretches += [ids[start:place], image]
        start = place + 1
    return _assemble([*stretches, ids[start:]], tokens, rows)


def join(layouts: Sequence[Layout], rows: int) -> Layout:
    """One after the other."""
    ids: list[Array] = [np.empty(0, np.int32)]
    positions: list[Array] = [np.empty((rows, 0), np.int32)]
    images: list[tuple[int, int, int]] = []
    length = span = 0
    for layout in layouts:
        ids.append(layout.ids)
        positions.append(layout.positions + np.int32(span))
        images += [(image, first + length, last + length) for image, first, last in layout.images]
        length, span = length + len(layout), span + layout.span
    return Layout(np.concatenate(ids), np.concatenate(positions, axis=1), span, tuple(images))


def kept_by(length: int, limit: int, truncation: Truncation) -> Array:
    """Which of `length` tokens stay under a limit `[length]` bool."""
    keep = np.ones(length, bool)
    if length > limit:
        first = {"left": 0, "middle": limit // 2, "right": limit}[truncation]
        keep[first : first + length - limit] = False
    return keep


def without_torn_images(layout: Layout, keep: Array, frame: frozenset[int]) -> Array:
    """`keep` with every image that lost a token gone whole, the tokens that frame it too."""
    keep = keep.copy()
    for _, first, last in layout.images:
        before, behind = first > 0 and int(layout.ids[first - 1]) in frame, last < len(layout)
        start = first - 1 if before else first
        stop = last + 1 if behind and int(layout.ids[last]) in frame else last
        if not keep[start:stop].all():
            keep[start:stop] = False
    return keep


def _assemble(stretches: Sequence[Array | int], tokens: Sequence[Layout], rows: int) -> Layout:
    """Text stretches and image numbers in a row."""
    return join(
        [
            replace(tokens[stretch], images=((stretch, 0, len(tokens[stretch])),))
            if isinstance(stretch, int)
            else text_like(stretch, rows)
            for stretch in stretches
        ],
        rows,
    )


# --- prompt and response
@dataclass(frozen=True, slots=True)
class Side:
    """Prompt or response while it is put together."""

    layout: Layout
    mask: Array  # [n] bool
    ends: tuple[tuple[int, int], ...]  # (turn, its last trained token)
    roles: tuple[tuple[str, int, int], ...]

    def behind(self, other: Side) -> Side:
        """The same tokens, positions going on where the other side's stop."""
        own, start = self.layout, other.layout.span
        positions = own.positions + np.int32(start)
        return replace(self, layout=replace(own, positions=positions, span=own.span + start))

    def kept(self, keep: Array, encoder: Encoder) -> Side:
        """What is left of it, positions counted anew."""
        layout = self.layout
        whole = without_torn_images(layout, keep, encoder.template.image_frame_ids)
        stretches: list[Array | int] = []
        start = 0
        for image, first, last in layout.images:
            stretches.append(layout.ids[start:first][whole[start:first]])
            if whole[first:last].all():
                stretches.append(image)
            start = last
        stretches.append(layout.ids[start:][whole[start:]])
        new_place = np.cumsum(whole) - 1
        return Side(
            _assemble(stretches, encoder.tokens, encoder.rows),
            self.mask[whole],
            tuple((turn, int(new_place[end])) for turn, end in self.ends if whole[end]),
            tuple(
                (role, int(whole[:first].sum()), int(whole[:last].sum())) for role, first, last in self.roles
            ),
        )


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


def untrained_before(side: Side, first_turn: int) -> Side:
    """The side with the turns before `first_turn` masked out."""
    mask, start = side.mask.copy(), 0
    for turn, end in side.ends:
        if turn < first_turn:
            mask[start : end + 1] = False
        start = end + 1
    return Side(side.layout, mask, tuple(item for item in side.ends if item[0] >= first_turn), side.roles)


def sides_of(kind: str, encoder: Encoder, cut: Cut, step: RolloutTokens | None) -> tuple[Side, Side]:
    """Prompt and response of one sample."""
    if kind == "stepwise":
        return _step_sides(encoder, cut, step)
    return _window_sides(encoder, cut) if encoder.joins_in(cut) else _rendered_sides(encoder, cut)


def fitted(plan: Plan, encoder: Encoder, prompt: Side, response: Side) -> tuple[Side, Side, bool]:
    """Both within their limits, truncated or refused, and whether something was truncated.

    An image that would lose a token is removed whole, tokens and pixels.
    """
    limits = {"prompt": plan.max_prompt_length, "response": plan.max_response_length}
    lengths = {"prompt": len(prompt.layout), "response": len(response.layout)}
    over = [name for name in limits if lengths[name] > limits[name]]
    if not over:
        return prompt, response, False
    if plan.truncation == "error":
        raise DataError(
            f"a {over[0]} of {lengths[over[0]]} tokens is over max_{over[0]}_length={limits[over[0]]}: raise "
            f"max_{over[0]}_length, lower window_size, limit_messages or limit_images, or set truncation"
        )
    keep = kept_by(len(prompt.layout), plan.max_prompt_length, plan.truncation)
    prompt = prompt.kept(keep, encoder)
    keep = kept_by(len(response.layout), plan.max_response_length, "right")
    return prompt, response.kept(keep, encoder).behind(prompt), True


def _step_sides(encoder: Encoder, cut: Cut, step: RolloutTokens | None) -> tuple[Side, Side]:
    """Everything before the answer, and the answer."""
    template, answer = encoder.template, cut.pieces[-1]
    prompt = _step_prompt(encoder, cut, step)
    if step is not None:
        ids = np.asarray(step.response_ids, np.int32)
    else:
        ids = template.answer_ids(encoder.recording.messages[answer.message], answer.keep)
        ids = np.concatenate([ids, template.closing_ids[0]])
    assert answer.turn is not None
    response = side_of(encoder.rows, [("assistant", encoder.plain(ids))], [answer.turn])
    return prompt, response.behind(prompt)


def _step_prompt(encoder: Encoder, cut: Cut, step: RolloutTokens | None) -> Side:
    """What stands before the answer, as the sampler recorded it or as the template writes it."""
    messages, context = encoder.recording.messages, cut.pieces[:-1]
    if step is not None and step.prompt_ids:
        return side_of(encoder.rows, [("recorded", _recorded_prompt(encoder, cut, step))])
    if encoder.joins_in(cut) or not context:
        return _joined_prompt(encoder, context)
    text = encoder.template.render([(messages[piece.message], piece.keep) for piece in context], ask=True)
    return side_of(encoder.rows, [("rendered", encoder.lay_out(text, context))])


def _joined_prompt(encoder: Encoder, pieces: Sequence[Piece]) -> Side:
    """The messages joined, and what opens an answer behind them."""
    messages = encoder.recording.messages
    parts = [(messages[p.message].role, encoder.as_context(p, i == 0)) for i, p in enumerate(pieces)]
    return side_of(encoder.rows, [*parts, ("assistant", encoder.header(not parts))])


def _recorded_prompt(encoder: Encoder, cut: Cut, step: RolloutTokens) -> Layout:
    """The prompt from recorded ids; image tokens may be recorded one per image or already spread out."""
    image_token = encoder.template.image_token_id
    images = encoder.images_of(cut.pieces[:-1])
    ids = np.asarray(step.prompt_ids, np.int32)
    if image_token < 0:
        return encoder.plain(ids)
    edges = np.diff((ids == image_token).astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    wanted = [len(encoder.tokens[image]) for image in images]
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


def _window_sides(encoder: Encoder, cut: Cut) -> tuple[Side, Side]:
    """Several turns in one sample, messages joined; the response ends with its last trained answer."""
    template, messages = encoder.template, encoder.recording.messages
    header, (own, rest) = encoder.plain(template.header_ids), template.closing_ids
    after: list[tuple[str, Layout, int | None]] = []
    for piece in cut.pieces[cut.n_prompt :]:
        message = messages[piece.message]
        if piece.turn is None:
            after.append((message.role, encoder.as_context(piece, False), None))
            continue
        answer = np.concatenate([template.answer_ids(message, piece.keep), own])
        after += [("assistant", header, None)] if after else []
        after += [("assistant", encoder.plain(answer), piece.turn), ("assistant", encoder.plain(rest), None)]
    while after and after[-1][2] is None:
        after.pop()
    prompt = _joined_prompt(encoder, cut.pieces[: cut.n_prompt])
    response = side_of(
        encoder.rows, [(role, layout) for role, layout, _ in after], [turn for _, _, turn in after]
    )
    return prompt, response.behind(prompt)


def _rendered_sides(encoder: Encoder, cut: Cut) -> tuple[Side, Side]:
    """A window under a template that looks back: rendered whole, answers found by marks at their ends."""
    template, messages = encoder.template, encoder.recording.messages
    chat = [(messages[piece.message], piece.keep) for piece in cut.pieces]
    ends_at = [index for index, piece in enumerate(cut.pieces) if messages[piece.message].role == "assistant"]
    own, images, context = template.closing_ids[0], encoder.images_of(cut.pieces), ""
    layouts: list[tuple[str, Layout]] = []
    turns: list[int | None] = []
    for index, (opening, answer) in zip(ends_at, _answers(template, chat), strict=True):
        context += opening
        turn = cut.pieces[index].turn
        if turn is None:
            context += answer
            continue
        ids = template.encode(context)
        if layouts:  # the end token of the answer before belongs to that answer
            if not np.array_equal(ids[: len(own)], own):
                raise DataError("the chat template ends answers in different ways; use the stepwise splitter")
            ids = ids[len(own) :]
        count = int((ids == template.image_token_id).sum())
        layouts.append(("rendered", encoder.text(ids, images[:count])))
        ids, images = template.encode(answer, template.header), images[count:]
        layouts.append(("assistant", encoder.plain(np.concatenate([ids, own]))))
        turns, context = [*turns, None, turn], ""
    prompt = side_of(encoder.rows, layouts[:1])
    response = side_of(encoder.rows, layouts[1:], turns[1:])
    return prompt, response.behind(prompt)


def _answers(template: ChatTemplate, chat: Chat) -> list[tuple[str, str]]:
    """What stands before each answer of a chat, and the answer, as the template writes them.

    An answer begins behind the generation prompt; under a template that opens past answers otherwise, where its text
    begins.
    """
    plain, marked, end = template.render(chat), template.render(chat, mark_ends=True), template.end_mark
    count = sum(message.role == "assistant" for message, _ in chat)
    if marked.replace(end, "") != plain or marked.count(end) != count:
        raise DataError("the chat template rewrites the ends of answers; use the stepwise splitter")
    header, opening = template.header, template.opening
    upto = marked.split(end)[:-1]
    if header and all(header in text for text in upto):
        return [(before + header, answer) for before, _, answer in (text.partition(header) for text in upto)]
    marked = template.render(chat, mark_ends=True, mark_starts=True)
    if marked.replace(end, "") != plain or marked.count(end) != 2 * count:
        raise DataError(
            "the chat template opens answers differently from its generation prompt; use the stepwise splitter"
        )
    parts = marked.split(end)[:-1]
    return [
        (before.removesuffix(opening), opening + answer if before.endswith(opening) else answer)
        for before, answer in zip(parts[::2], parts[1::2], strict=True)
    ]


# --- rewards
RewardPlacement = Literal["final", "all", "last_step"] | Callable[[float, int, int], float]
"""Where a trajectory's reward goes in a sample.

"final": on one token of every sample. "all": on every trained token. "last_step": on one token of the
trajectory's last sample. A callable of (reward, step_index, n_steps) gives the number for that one token.
"""


def place_reward(
    reward: float, placement: RewardPlacement, step_index: int, n_steps: int, response_mask: Array
) -> Array:
    """Rewards of the response tokens `[r]` float32; a single one is on the last trained token."""
    rewards = np.zeros(len(response_mask), np.float32)
    trained = np.flatnonzero(response_mask)
    if placement == "all":
        rewards[trained] = reward
    elif len(trained):
        final = trained[-1]
        if callable(placement):
            rewards[final] = finite_reward(
                placement(reward, step_index, n_steps), "the function given as reward"
            )
        elif placement == "final" or step_index == n_steps - 1:
            rewards[final] = reward
    return rewards


def add_step_scores(rewards: Array, ends: Sequence[tuple[int, int]], scores: Sequence[float]) -> None:
    """Add `0.5 * (score - 0.5)` on the last token of each scored turn, in place; a score of -1 means none."""
    for turn, token in ends:
        if turn < len(scores) and scores[turn] != -1:
            rewards[token] += np.float32(0.5 * (scores[turn] - 0.5))
