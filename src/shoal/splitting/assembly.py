"""Make the samples of one trajectory: cut, encode, read images, place masks and rewards.

`split_recording` is a pure function of plan and job, so any executor gives the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting.encoder import Encoder, places_of
from shoal.splitting.plans import Job, Plan, SplitTrajectory
from shoal.splitting.recordings import Message, Recording
from shoal.splitting.samples import Sample, add_step_scores, place_reward
from shoal.splitting.sides import fitted, untrained_before
from shoal.splitting.step_sides import rollout_step, step_sides
from shoal.splitting.window_sides import rendered_sides, window_sides
from shoal.splitting.windows import Cut, cut_last, cut_steps, cut_windows

_CUTS = {"stepwise": cut_steps, "window": cut_windows, "last-n": cut_last}


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
    shown = [place for cut in cuts for piece in cut.pieces for place in places_of(messages, piece)]
    places = list(dict.fromkeys(shown))
    in_order = [place for message in messages for place in message.images if place in set(places)]
    places = list(dict.fromkeys(in_order))
    pixels, tokens = plan.images.read(places, job.store)
    encoder = Encoder(plan, recording, {place: index for index, place in enumerate(places)}, tokens)
    samples = [_sample(plan, job, recording, encoder, cut) for cut in cuts]
    return SplitTrajectory(job.index, job.dataset_id, samples, pixels, len(places))


def _trains_after(cut: Cut, messages: Sequence[Message], first_turn: int) -> bool:
    if first_turn == 0:
        return True
    return any(piece.turn is not None and piece.turn >= first_turn for piece in cut.pieces)


def _sample(plan: Plan, job: Job, recording: Recording, encoder: Encoder, cut: Cut) -> Sample:
    fixes = plan.fixes
    step = rollout_step(plan, recording, cut)
    if plan.kind == "stepwise":
        prompt, response, attended = step_sides(plan, encoder, cut, step)
    elif encoder.joins:
        prompt, response, attended = window_sides(plan, encoder, cut)
    else:
        prompt, response, attended = rendered_sides(encoder, cut)
    if job.first_turn:
        response = untrained_before(response, job.first_turn)
    prompt, response, cut_short = fitted(plan, encoder, prompt, response)
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
        places = [place for piece in cut.pieces for place in places_of(recording.messages, piece)]
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


def _as_dict(message: Message, keep: tuple[int, ...] | None) -> dict[str, Any]:
    """The message as JSON would have it."""
    if keep is None and isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = message.parts if keep is None else [message.parts[index] for index in keep]
    return {"role": message.role, "content": [dict(part) for part in parts]}
