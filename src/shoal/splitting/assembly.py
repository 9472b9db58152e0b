"""Make the samples of one trajectory: cut, encode, read images, place masks and rewards.

`split_recording` is a pure function of plan and job, so any executor gives the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting import oddities
from shoal.splitting.fixes import Fixes
from shoal.splitting.images import ImageReader, Pixels
from shoal.splitting.layout import (
    ImageTokens,
    Layout,
    Truncation,
    join,
    kept_by,
    lay_out,
    moved,
    shortened,
    without_torn_images,
)
from shoal.splitting.pixels import Store
from shoal.splitting.recordings import Message, Reader, Recording, RolloutTokens
from shoal.splitting.samples import RewardPlacement, Sample, add_step_scores, place_reward
from shoal.splitting.templates import END, ChatTemplate
from shoal.splitting.windows import Cut, Limits, Piece, cut_last, cut_steps, cut_windows

Array = np.ndarray
Kind = Literal["stepwise", "window", "last-n"]
_CUTS = {"stepwise": cut_steps, "window": cut_windows, "last-n": cut_last}


@dataclass(frozen=True)
class Plan:
    """All that turns a recording into samples; made once, sent to each worker once."""

    kind: Kind
    reader: Reader
    template: ChatTemplate
    images: ImageReader
    limits: Limits
    fixes: Fixes
    max_prompt_length: int
    max_response_length: int
    truncation: Truncation
    reward: RewardPlacement
    use_rollout: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One trajectory to split."""

    index: int
    dataset_id: str
    path: Path | None = None
    reward: float | None = None  # None: as recorded, or 0
    scores: tuple[float, ...] = ()  # one per turn, -1 for none
    first_turn: int = 0  # earlier turns are not trained
    store: Store = "u8"


@dataclass(slots=True)
class SplitTrajectory:
    """What comes back from a worker."""

    index: int
    dataset_id: str
    samples: list[Sample]
    pixels: Pixels
    n_images: int


@dataclass(frozen=True, slots=True)
class _Side:
    """Prompt or response while it is put together."""

    layout: Layout
    mask: Array  # [n] bool
    ends: tuple[tuple[int, int], ...]  # (turn, its last trained token)
    roles: tuple[tuple[str, int, int], ...]


def split_recording(plan: Plan, job: Job) -> SplitTrajectory:
    """The samples of one trajectory, or a `DataError` that names it."""
    try:
        recording = plan.reader.read(job.dataset_id, job.path)
        return _split(plan, job, recording)
    except (DataError, OSError) as error:
        raise DataError(f"trajectory {job.dataset_id!r}: {error}") from error


def _split(plan: Plan, job: Job, recording: Recording) -> SplitTrajectory:
    cuts = _CUTS[plan.kind](recording, plan.limits, plan.fixes)
    messages = recording.messages
    cuts = [cut for cut in cuts if _trains_after(cut, messages, job.first_turn)]
    shown = [place for cut in cuts for piece in cut.pieces for place in _places(messages, piece)]
    places = list(dict.fromkeys(shown))
    in_order = [place for message in messages for place in message.images if place in set(places)]
    places = list(dict.fromkeys(in_order))
    pixels, tokens = plan.images.read(places, job.store)
    encoder = _Encoder(plan, recording, {place: index for index, place in enumerate(places)}, tokens)
    samples = [_sample(plan, job, recording, encoder, cut) for cut in cuts]
    return SplitTrajectory(job.index, job.dataset_id, samples, pixels, len(places))


def _trains_after(cut: Cut, messages: Sequence[Message], first_turn: int) -> bool:
    if first_turn == 0:
        return True
    return any(piece.turn is not None and piece.turn >= first_turn for piece in cut.pieces)


def _places(messages: Sequence[Message], piece: Piece) -> list[str]:
    """Where the images are that a piece shows."""
    message = messages[piece.message]
    if not message.images:
        return []
    numbered = [index for index, part in enumerate(message.parts) if part["type"] == "image"]
    kept = range(len(message.parts)) if piece.keep is None else piece.keep
    return [message.images[numbered.index(index)] for index in kept if index in numbered]


class _Encoder:
    """Encodes each message of a recording once, in each form it is needed."""

    def __init__(
        self, plan: Plan, recording: Recording, image_of: dict[str, int], tokens: Sequence[ImageTokens]
    ) -> None:
        self.template, self.rows, self.tokens = plan.template, plan.images.rows, tokens
        self.recording, self.image_of = recording, image_of
        self.joins = plan.template.concatenates and plan.template.joins(recording.messages)
        if not self.joins and not (plan.fixes.masks_from_messages and plan.fixes.assistant_header):
            raise DataError(
                "the chat template renders a message differently by its place, which the original cannot "
                "handle; use compat='fixed'"
            )
        self._known: dict[tuple[Piece, bool], Layout] = {}

    def as_context(self, piece: Piece, first: bool) -> Layout:
        """The whole message as the template writes it."""
        key = (piece._replace(turn=None), first)
        if key not in self._known:
            message = self.recording.messages[piece.message]
            text = self.template.message_text(message, piece.keep, first)
            if text is None:
                raise DataError(f"the chat template rewrites what stands before message {piece.message}")
            self._known[key] = self.lay_out(text, [piece])
        return self._known[key]

    def lay_out(self, text: str, pieces: Sequence[Piece]) -> Layout:
        """Tokens and positions of rendered text that shows the images of the pieces."""
        images = [
            self.image_of[place] for piece in pieces for place in _places(self.recording.messages, piece)
        ]
        return self.text(self.template.encode(text), images)

    def text(self, ids: Array, images: Sequence[int] = ()) -> Layout:
        """Tokens and positions of encoded text."""
        image_token = self.template.image_token_id
        return lay_out(ids, image_token if image_token is not None else -1, images, self.tokens, self.rows)

    def plain(self, ids: Array) -> Layout:
        """Tokens and positions of encoded text in which no token stands for an image."""
        return lay_out(ids, -1, (), self.tokens, self.rows)


def _sample(plan: Plan, job: Job, recording: Recording, encoder: _Encoder, cut: Cut) -> Sample:
    fixes = plan.fixes
    step = _rollout_step(plan, recording, cut)
    if plan.kind == "stepwise":
        prompt, response, attended = _step_sides(plan, encoder, cut, step)
    elif encoder.joins:
        prompt, response, attended = _window_sides(plan, encoder, cut)
    else:
        prompt, response, attended = _rendered_sides(encoder, cut)
    if job.first_turn:
        response = _untrained_before(response, job.first_turn)
    prompt, response, cut_short = _fitted(plan, encoder, prompt, response)
    if cut_short:
        attended = min(attended, len(response.layout))
    trained = np.flatnonzero(response.mask)
    final = (int(trained[-1]) if len(trained) else None) if fixes.reward_on_loss_token else attended - 1
    reward = job.reward if job.reward is not None else (recording.reward or 0.0)
    rewards = place_reward(reward, plan.reward, cut.step_index, cut.n_steps, response.mask, final)
    add_step_scores(rewards, response.ends, job.scores)
    start = len(prompt.layout)
    if cut_short:
        images = [image for side in (prompt, response) for image, _, _ in side.layout.images]
    else:
        places = [place for piece in cut.pieces for place in _places(recording.messages, piece)]
        images = [encoder.image_of[place] for place in places]
    return Sample(
        dataset_id=job.dataset_id,
        uid=recording.uid,
        traj_index=job.index,
        step_index=cut.step_index,
        n_steps=cut.n_steps,
        prompt_ids=prompt.layout.ids,
        response_ids=response.layout.ids,
        prompt_positions=prompt.layout.positions,
        response_positions=response.layout.positions,
        response_mask=response.mask,
        rewards=rewards,
        n_attended=attended,
        pads_count_on=plan.kind == "stepwise",
        images=tuple(images),
        messages=[_as_dict(recording.messages[piece.message], piece.keep) for piece in cut.pieces],
        logprobs=None if step is None else np.asarray(step.logprobs[: len(response.layout)], np.float32),
        image_spans=(
            *prompt.layout.images,
            *((image, first + start, last + start) for image, first, last in response.layout.images),
        ),
        roles=(*prompt.roles, *((role, first + start, last + start) for role, first, last in response.roles)),
    )


def _step_sides(
    plan: Plan, encoder: _Encoder, cut: Cut, step: RolloutTokens | None
) -> tuple[_Side, _Side, int]:
    """Everything before the answer, and the answer."""
    template, fixes = plan.template, plan.fixes
    messages, context, answer = encoder.recording.messages, cut.pieces[:-1], cut.pieces[-1]
    if step is not None and step.prompt_ids:
        prompt = _side(encoder.rows, [("recorded", _recorded_prompt(plan, encoder, cut, step))])
    elif encoder.joins:
        parts = [(messages[p.message].role, encoder.as_context(p, i == 0)) for i, p in enumerate(context)]
        if fixes.assistant_header:
            parts.append(("assistant", encoder.plain(template.header_ids)))
        prompt = _side(encoder.rows, parts)
    else:
        chat = [(messages[piece.message], piece.keep) for piece in context]
        text = template.render(chat, ask=fixes.assistant_header)
        prompt = _side(encoder.rows, [("rendered", encoder.lay_out(text, context))])
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
        _Side(layout, mask, ((answer.turn, attended - 1),), (("assistant", 0, len(ids)),)),
        attended,
    )


def _window_sides(plan: Plan, encoder: _Encoder, cut: Cut) -> tuple[_Side, _Side, int]:
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
    prompt = _side(encoder.rows, before)
    response = _side(
        encoder.rows, [(role, layout) for role, layout, _ in after], [turn for _, _, turn in after]
    )
    response = _Side(moved(response.layout, prompt.layout.span), response.mask, response.ends, response.roles)
    if not fixes.single_newline and not fixes.assistant_header:
        layout, grown = oddities.doubled_newline(template, prompt.layout, response.layout)
        response = _Side(
            layout,
            np.concatenate([np.zeros(max(0, grown), bool), response.mask[max(0, -grown) :]]),
            tuple((turn, end + grown) for turn, end in response.ends if end + grown >= 0),
            (("user", 0, max(0, grown)), *_shifted(response.roles, grown)),
        )
    if not fixes.masks_from_messages:
        mask = oddities.searched_mask(template, prompt.layout.ids, response.layout.ids)
        ends = oddities.answer_ends(cut, [len(layout) for _, layout, _ in after], len(response.layout))
        response = _Side(response.layout, mask, ends, response.roles)
    return prompt, response, len(response.layout)


def _rendered_sides(encoder: _Encoder, cut: Cut) -> tuple[_Side, _Side, int]:
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
    encoder: _Encoder, cut: Cut, texts: Sequence[tuple[str, int | None]]
) -> tuple[_Side, _Side, int]:
    """Prompt and response from alternating context and answer texts; answers get the model's end token."""
    own = encoder.template.closing_ids[0]
    images = [
        encoder.image_of[place]
        for piece in cut.pieces
        for place in _places(encoder.recording.messages, piece)
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
    prompt = _side(encoder.rows, layouts[:1])
    response = _side(encoder.rows, layouts[1:], turns[1:])
    layout = moved(response.layout, prompt.layout.span)
    return prompt, _Side(layout, response.mask, response.ends, response.roles), len(layout)


def _side(rows: int, parts: Sequence[tuple[str, Layout]], turns: Sequence[int | None] | None = None) -> _Side:
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
    return _Side(layout, mask, tuple(ends), tuple(roles))


def _shifted(roles: Sequence[tuple[str, int, int]], by: int) -> list[tuple[str, int, int]]:
    return [(role, max(0, first + by), last + by) for role, first, last in roles if last + by > 0]


def _untrained_before(side: _Side, first_turn: int) -> _Side:
    """The side with the turns before `first_turn` masked out."""
    mask, start = side.mask.copy(), 0
    for turn, end in side.ends:
        if turn < first_turn:
            mask[start : end + 1] = False
        start = end + 1
    return _Side(side.layout, mask, tuple(item for item in side.ends if item[0] >= first_turn), side.roles)


def _fitted(plan: Plan, encoder: _Encoder, prompt: _Side, response: _Side) -> tuple[_Side, _Side, bool]:
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
        sides.append(_Side(layout, side.mask[whole], ends, roles))
    return sides[0], sides[1], True


def _rollout_step(plan: Plan, recording: Recording, cut: Cut) -> RolloutTokens | None:
    if not plan.use_rollout:
        return None
    if recording.steps is None:
        raise DataError(f"{recording.source} has no recorded tokens; set use_vllm_logp=False")
    if cut.step_index >= len(recording.steps):
        raise DataError(f"{recording.source}: {len(recording.steps)} recorded steps, but more answers; "
                        "record the missing ones or set use_vllm_logp=False")  # fmt: skip
    return recording.steps[cut.step_index]


def _recorded_prompt(plan: Plan, encoder: _Encoder, cut: Cut, step: RolloutTokens) -> Layout:
    """The prompt from recorded ids; image tokens may be recorded one per image or already spread out."""
    image_token = plan.template.image_token_id
    places = [place for piece in cut.pieces[:-1] for place in _places(encoder.recording.messages, piece)]
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


def _as_dict(message: Message, keep: tuple[int, ...] | None) -> dict[str, Any]:
    """The message as JSON would have it."""
    if keep is None and isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = message.parts if keep is None else [message.parts[index] for index in keep]
    return {"role": message.role, "content": [dict(part) for part in parts]}
