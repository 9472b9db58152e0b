"""The splitters: recorded trajectories in, one training batch out, the same on every executor."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.executors import RayExecutor, SerialExecutor, available_cpus, connect_ray, map_ordered
from shoal.splitting.batch import Batch, Padding, Sample, Shape, Skipped
from shoal.splitting.cut import CUTS, Cut, Limits, answers_of
from shoal.splitting.encode import MODEL_TEXT, ChatTemplate, Encoder
from shoal.splitting.images import MAX_IMAGE_PIXELS, ImageReader, Pixels, Store
from shoal.splitting.place import (
    RewardPlacement,
    Truncation,
    add_step_scores,
    fitted,
    place_reward,
    sides_of,
    untrained_before,
)
from shoal.splitting.readers.recordings import (
    FolderReader,
    Message,
    Reader,
    Recording,
    RolloutTokens,
    check_tokens,
    finite_reward,
    shortage,
)

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Paths = Mapping[str, Path | str] | Sequence[Path | str] | None
Kind = Literal["stepwise", "window", "last-n"]


@dataclass(frozen=True)
class Plan:
    """All that turns a recording into samples."""

    kind: Kind
    reader: Reader
    template: ChatTemplate
    images: ImageReader
    limits: Limits
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
    refused: DataError | None = None  # why it cannot be started: something is wrong with what came with it


@dataclass(slots=True)
class SplitTrajectory:
    """The samples of one trajectory."""

    index: int
    samples: list[Sample]
    pixels: Pixels


class TrajectorySplitter:
    """Cuts each trajectory into windows of `window_size` turns, a new one every `stride_size` turns.

    Args:
        processor: a transformers processor (`load_processor`), or a tokenizer for text.
        root_dir: where `<dataset_id>/final_messages.json` is.
        window_size: turns in a sample.
        stride_size: turns from one window to the next, at most `window_size` so that no turn is skipped.
        max_prompt_length: tokens; prompts are padded to it on the left.
        max_response_length: tokens; responses are padded to it on the right.
        truncation: what to do with more tokens: "error", or drop them at the "left", "right" or "middle" of a
            prompt (and at the end of a response).
        limit_images: a sample shows at most so many images, the newest.
        limit_messages: a sample looks back over so many turns.
        traj_filter: trajectories with reward 0 do not train their first steps, as many as the successful ones
            have on average.
        store: how pixels are kept: "u8" (8-bit, expanded when read), "float32", or "auto": "u8" where the
            processor allows it, else "float32".
        reward: where the reward goes, see `RewardPlacement`.
        position_rows: 3 or 4 rows of positions for Qwen2-VL models (4: verl's, with the token's number on
            top), 1 for others; None chooses 3 or 1.
        padding: "max" pads to the two limits, "longest" to the longest prompt and response of the batch.
        reader: finds recordings; the default reads `root_dir` as above.
        on_error: "raise" stops at the first bad trajectory; "skip" leaves it out and lists it in
            `batch.skipped`.
        max_image_pixels: larger images are refused before they are decoded.
        image_threads: images of one trajectory that are decoded at a time.
        model_text: special tokens that models write in their answers; all others are escaped in recorded
            text.
    """

    kind: ClassVar[Kind] = "window"

    def __init__(
        self,
        processor: Any,
        root_dir: Path | str,
        window_size: int = 5,
        stride_size: int = 5,
        max_prompt_length: int = 32048,
        max_response_length: int = 32000,
        truncation: Truncation = "error",
        limit_images: int = 5,
        limit_messages: int = 35,
        traj_filter: bool = False,
        *,
        compat: Literal["fixed"] = "fixed",
        store: Store = "auto",
        reward: RewardPlacement = "final",
        position_rows: Literal[1, 3, 4] | None = None,
        padding: Padding = "max",
        reader: Reader | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        image_threads: int = 1,
        model_text: Sequence[str] = MODEL_TEXT,
        _use_rollout: bool = False,
    ) -> None:
        _whole(1, window_size=window_size, limit_messages=limit_messages, max_image_pixels=max_image_pixels)
        _whole(1, max_prompt_length=max_prompt_length, max_response_length=max_response_length)
        _whole(1, image_threads=image_threads)
        _whole(0, limit_images=limit_images, stride_size=stride_size)
        if not 1 <= stride_size <= window_size:
            raise ValueError(
                f"stride_size must be in [1, window_size={window_size}] so no turn is skipped, "
                f"got {stride_size}"
            )
        _one_of("traj_filter", traj_filter, (False, True))
        _one_of("use_vllm_logp", _use_rollout, (False, True))
        _one_of("truncation", truncation, ("error", "left", "right", "middle"))
        _one_of("padding", padding, ("max", "longest"))
        _one_of("on_error", on_error, ("raise", "skip"))
        _one_of("store", store, ("auto", "u8", "float32"))
        _one_of("position_rows", position_rows, (None, 1, 3, 4))
        if not callable(reward):
            _one_of("reward", reward, ("final", "all", "last_step"))
        if isinstance(model_text, str) or not all(isinstance(token, str) for token in model_text):
            raise ValueError(f"model_text must be a list of special tokens, got {model_text!r}")
        if reader is not None and not callable(getattr(reader, "read", None)):
            raise ValueError(
                f"reader must have ids() and read(), got {reader!r}; find_reader(path) makes one"
            )
        if compat != "fixed":
            raise ConfigError(f"compat must be 'fixed', the only way samples are made, got {compat!r}")
        template = ChatTemplate(processor, model_text=model_text)
        images = ImageReader(processor, template, store, max_image_pixels, image_threads)
        self.rows = position_rows if position_rows is not None else images.rows
        if (self.rows == 1) != (images.rows == 1):
            raise ValueError(
                f"this processor's positions have {images.rows} rows, got position_rows={self.rows}"
            )
        self.padding, self.on_error, self.traj_filter = padding, on_error, traj_filter
        self.plan = Plan(
            kind=self.kind,
            reader=reader if reader is not None else FolderReader(root_dir, rollout_tokens=_use_rollout),
            template=template,
            images=images,
            limits=Limits(window_size, stride_size, limit_images, limit_messages),
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            truncation=truncation,
            reward=reward,
            use_rollout=_use_rollout,
        )

    # --- ways in
    def split(
        self,
        dataset_ids: Iterable[str],
        reward_tensor: Any = None,
        *,
        executor: Executor | None = None,
        process_reward_tensor: Any = None,
        dataset_paths: Paths = None,
        progress: Progress | None = None,
    ) -> Batch:
        """One batch with the samples of all trajectories, in the order of the ids.

        Args:
            dataset_ids: which trajectories.
            reward_tensor: one reward each; without it, rewards that were recorded, or 0.
            executor: any `concurrent.futures.Executor`; without one, trajectories are split in this thread.
                Threads are fastest on one machine: images are read and resized outside the interpreter lock, and
                nothing is copied. The batch is the same on all.
            process_reward_tensor: `[N, turns]` scores in [0, 1], -1 for none; each adds `0.5 * (score - 0.5)`
                on the last token of its turn.
            dataset_paths: where a trajectory is, instead of `root_dir`: by id, or one for each id.
            progress: called with (trajectories done, trajectories in all).
        """
        jobs = make_jobs(dataset_ids, reward_tensor, process_reward_tensor, dataset_paths)
        return self._collected(self._results(jobs, executor, progress))

    def split_parallel(
        self,
        dataset_ids: Iterable[str],
        reward_tensor: Any = None,
        num_cpus: int = 4,
        *,
        process_reward_tensor: Any = None,
        dataset_paths: Paths = None,
        progress: Progress | None = None,
    ) -> Batch:
        """`split` on Ray with `num_cpus` tasks at a time; Ray is started if it is not, and stays."""
        _whole(1, num_cpus=num_cpus)
        connect_ray(num_cpus, wanted_by="split_parallel")
        with RayExecutor({"max_retries": 3}, num_cpus) as executor:  # a task may be done twice: it only reads
            jobs = make_jobs(dataset_ids, reward_tensor, process_reward_tensor, dataset_paths)
            return self._collected(self._results(jobs, executor, progress, num_cpus))

    def stream(
        self,
        dataset_ids: Iterable[str],
        reward_tensor: Any = None,
        *,
        batch_size: int,
        executor: Executor | None = None,
        process_reward_tensor: Any = None,
        dataset_paths: Paths = None,
        progress: Progress | None = None,
    ) -> Iterator[Batch]:
        """Batches of `batch_size` samples (the last may have fewer), the same samples as `split` in order.

        Only a few trajectories are in memory at a time: those of the batch and those that workers are ahead.
        """
        _whole(1, batch_size=batch_size)
        samples: list[Sample] = []
        pixels: dict[int, Pixels] = {}
        skipped: list[Skipped] = []
        jobs = make_jobs(dataset_ids, reward_tensor, process_reward_tensor, dataset_paths)
        for result in self._results(jobs, executor, progress):
            if isinstance(result, Skipped):
                skipped.append(result)
                continue
            samples += result.samples
            pixels[result.index] = result.pixels
            while len(samples) >= batch_size:
                yield self._batch(samples[:batch_size], pixels, skipped)
                samples, skipped = samples[batch_size:], []
            alive = {sample.traj_index for sample in samples}
            pixels = {index: kept for index, kept in pixels.items() if index in alive}
        if samples:
            yield self._batch(samples, pixels, skipped)
        elif skipped:
            logger.warning("%d trajectories at the end of the stream were skipped", len(skipped))

    # --- how
    def results(
        self, dataset_ids: Iterable[str], reward_tensor: Any = None, *, executor: Executor | None = None
    ) -> Iterator[SplitTrajectory | Skipped]:
        """The samples and pixels of each trajectory, in order, or why it was skipped."""
        return self._results(make_jobs(dataset_ids, reward_tensor), executor)

    def collected(
        self, results: Iterable[SplitTrajectory | Skipped]
    ) -> tuple[Batch | None, tuple[Skipped, ...]]:
        """One batch of results, or None if none of them has a sample; and the skipped trajectories."""
        samples: list[Sample] = []
        pixels: dict[int, Pixels] = {}
        skipped: list[Skipped] = []
        for result in results:
            if isinstance(result, Skipped):
                skipped.append(result)
            elif result.samples:
                samples += result.samples
                pixels[result.index] = result.pixels
        if not samples:
            return None, tuple(skipped)
        return self._batch(samples, pixels, skipped), tuple(skipped)

    def _collected(self, results: Iterable[SplitTrajectory | Skipped]) -> Batch:
        batch, skipped = self.collected(results)
        if batch is None and not skipped:
            raise DataError("no samples: nothing in these trajectories is to be trained")
        if batch is None:
            raise DataError(
                f"all {len(skipped)} trajectories were skipped; the first because {skipped[0].reason}"
            )
        return batch

    def _results(
        self,
        jobs: list[Job],
        executor: Executor | None,
        progress: Progress | None = None,
        workers: int | None = None,
    ) -> Iterator[SplitTrajectory | Skipped]:
        executor = executor if executor is not None else SerialExecutor()
        if not callable(getattr(executor, "submit", None)):
            raise ValueError(f"executor must be one, got {executor!r}; make_executor makes one by its name")
        if self.traj_filter:
            jobs = without_first_turns(self.plan.reader, jobs)
        ahead = 1 if isinstance(executor, SerialExecutor) else max(4, 2 * (workers or available_cpus()))
        # Elsewhere than in this process the plan travels with each task: 5 MB for the tokenizer of Qwen2.5-VL.
        here = isinstance(executor, SerialExecutor | ThreadPoolExecutor)
        size = 1 if here else max(1, min(MOST_IN_TASK, len(jobs) // ahead))
        tasks = (jobs[first : first + size] for first in range(0, len(jobs), size))
        done = 0
        for outcomes in map_ordered(executor, partial(_split_jobs, self.plan), tasks, in_flight=ahead):
            for outcome in outcomes:
                job, done = jobs[done], done + 1
                if isinstance(outcome, SplitTrajectory):
                    yield outcome
                else:
                    if not here and isinstance(_split_job(self.plan, job), SplitTrajectory):
                        raise ConfigError(
                            f"{outcome}; here it can be read: the recordings must lie in a folder that is the same "
                            "wherever tasks run, or be split without Ray"
                        ) from outcome
                    if self.on_error == "raise":
                        raise outcome
                    logger.warning("skipped: %s", outcome)
                    yield Skipped(job.dataset_id, str(outcome))
                if progress is not None:
                    progress(done, len(jobs))

    def _batch(
        self, samples: Sequence[Sample], pixels: Mapping[int, Pixels], skipped: Sequence[Skipped]
    ) -> Batch:
        prompt, response = self.plan.max_prompt_length, self.plan.max_response_length
        if self.padding == "longest" and samples:
            prompt = max(len(sample.prompt_ids) for sample in samples)
            response = max(len(sample.response_ids) for sample in samples)
        return Batch(samples, pixels, Shape(prompt, response, self.plan.template.pad_id, self.rows), skipped)


class StepwiseTrajectorySplitter(TrajectorySplitter):
    """One sample per turn: what the model saw before its message is the prompt, its message the response.

    It takes what `TrajectorySplitter` takes, of which `window_size` and `stride_size` do nothing: a step looks back
    over `limit_messages` turns. With `use_vllm_logp` tokens and log-probabilities are those that the sampler recorded
    (see `write_rollout`), instead of the text encoded again.
    """

    kind: ClassVar[Kind] = "stepwise"

    def __init__(
        self,
        processor: Any,
        root_dir: Path | str,
        window_size: int = 5,
        stride_size: int = 1,
        max_prompt_length: int = 32048,
        max_response_length: int = 32000,
        truncation: Truncation = "error",
        limit_images: int = 5,
        limit_messages: int = 35,
        use_vllm_logp: bool = False,
        traj_filter: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            processor,
            root_dir,
            window_size,
            stride_size,
            max_prompt_length,
            max_response_length,
            truncation,
            limit_images,
            limit_messages,
            traj_filter,
            _use_rollout=use_vllm_logp,
            **options,
        )


class LastNTrajectorySplitter(TrajectorySplitter):
    """One sample per trajectory: its last `window_size` turns."""

    kind: ClassVar[Kind] = "last-n"


SPLITTERS: dict[str, type[TrajectorySplitter]] = {
    each.kind: each for each in (TrajectorySplitter, StepwiseTrajectorySplitter, LastNTrajectorySplitter)
}
"""By name, as settings say them."""


MOST_IN_TASK = 8
"""Recordings that a task of another process splits, where there are many."""


def _split_jobs(plan: Plan, jobs: Sequence[Job]) -> list[SplitTrajectory | DataError]:
    """The samples of each trajectory, or why it cannot be split."""
    return [_split_job(plan, job) for job in jobs]


def _split_job(plan: Plan, job: Job) -> SplitTrajectory | DataError:
    if job.refused is not None:
        return job.refused
    try:
        return split_recording(plan, job)
    except Exception as error:
        if fault := shortage(error):
            raise fault from None  # the recording is whole, and would be missing
        if isinstance(error, DataError | OSError):
            refused = DataError(f"trajectory {job.dataset_id!r}: {error}")
            refused.__cause__ = error
            return refused
        if isinstance(error, ImportError | MemoryError | ShoalError):
            raise
        # of a template, a tokenizer or a processor, about what is in this recording
        refused = DataError(
            f"trajectory {job.dataset_id!r} cannot be split: {type(error).__name__}: {error}; "
            "mend it, or leave it out (on_error='skip')"
        )
        refused.add_note(traceback.format_exc())
        return refused


def _whole(least: int, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


# --- one trajectory
def split_recording(plan: Plan, job: Job) -> SplitTrajectory:
    """The samples of one trajectory."""
    recording = plan.reader.read(job.dataset_id, job.path)
    messages = recording.messages
    cuts = [
        cut
        for cut in CUTS[plan.kind](recording, plan.limits)
        if not job.first_turn or any((piece.turn or -1) >= job.first_turn for piece in cut.pieces)
    ]
    pieces = {piece for cut in cuts for piece in cut.pieces}
    shown = {place for piece in pieces for place in messages[piece.message].shown(piece.keep)}
    in_order = dict.fromkeys(place for message in messages for place in message.images)
    places = [place for place in in_order if place in shown]
    pixels, tokens = plan.images.read(places)
    encoder = Encoder(plan, recording, {place: index for index, place in enumerate(places)}, tokens)
    samples = [_sample(plan, job, recording, encoder, cut) for cut in cuts]
    return SplitTrajectory(job.index, samples, pixels)


def _sample(plan: Plan, job: Job, recording: Recording, encoder: Encoder, cut: Cut) -> Sample:
    step = _rollout_step(plan, recording, cut)
    prompt, response = sides_of(plan.kind, encoder, cut, step)
    if job.first_turn:
        response = untrained_before(response, job.first_turn)
    prompt, response, truncated = fitted(plan, encoder, prompt, response)
    reward = job.reward if job.reward is not None else (recording.reward or 0.0)
    rewards = place_reward(reward, plan.reward, cut.step_index, cut.n_steps, response.mask)
    add_step_scores(rewards, response.ends, job.scores)
    start = len(prompt.layout)
    if truncated:
        images = [image for side in (prompt, response) for image, _, _ in side.layout.images]
    else:
        images = encoder.images_of(cut.pieces)
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
        reward=reward,
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
    return {"role": message.role, "content": [dict(part) for part in message.kept(keep)]}


def _rollout_step(plan: Plan, recording: Recording, cut: Cut) -> RolloutTokens | None:
    """What the sampler recorded for this step, where it is to be used."""
    if not plan.use_rollout:
        return None
    if recording.steps is None:
        raise DataError(f"{recording.source} has no recorded tokens; set use_vllm_logp=False")
    turn = cut.pieces[-1].turn
    assert turn is not None
    if turn >= len(recording.steps):
        raise DataError(f"{recording.source}: {len(recording.steps)} recorded steps, but more answers; "
                        "record the missing ones or set use_vllm_logp=False")  # fmt: skip
    check_tokens(recording.steps[turn])
    return recording.steps[turn]


# --- jobs
def make_jobs(dataset_ids: Iterable[str], rewards: Any, scores: Any = None, paths: Paths = None) -> list[Job]:
    """One job per trajectory, in order; `refused` where what came with a trajectory is wrong."""
    if isinstance(dataset_ids, str) or not isinstance(dataset_ids, Iterable):
        what = "the text " if isinstance(dataset_ids, str) else ""
        raise ValueError(f"dataset_ids must be a list of ids, got {what}{dataset_ids!r}")
    ids = [str(item) for item in dataset_ids]
    if not ids:
        raise ValueError("dataset_ids is empty; give at least one trajectory")
    reward_of = rows_of("reward_tensor", rewards, len(ids)) or [None] * len(ids)
    scores_of = rows_of("process_reward_tensor", scores, len(ids)) or [()] * len(ids)
    path_of = _paths(paths, ids)
    jobs = []
    for index, name in enumerate(ids):
        job, where = Job(index, name, path_of[index]), f"trajectory {name!r}"
        try:
            reward = None if rewards is None else finite_reward(reward_of[index], where)
            jobs.append(replace(job, reward=reward, scores=_checked_scores(scores_of[index], where)))
        except DataError as error:
            jobs.append(replace(job, refused=error))
    return jobs


def without_first_turns(reader: Reader, jobs: list[Job]) -> list[Job]:
    """The jobs; those of failed trajectories have the first turn that is trained (`traj_filter`)."""
    lengths, rewards = {}, {}
    for job in jobs:
        if job.refused is None:
            try:
                recording = reader.read(job.dataset_id, job.path)
            except Exception as error:
                if fault := shortage(error):
                    raise fault from None
                continue  # splitting it raises the same
            lengths[job.index] = len(answers_of(recording.messages))
            rewards[job.index] = job.reward if job.reward is not None else recording.reward
    if any(reward is None for reward in rewards.values()):
        raise ValueError("traj_filter needs rewards: pass reward_tensor")
    good = [lengths[index] for index, reward in rewards.items() if reward is not None and reward > 0]
    if not good:
        return jobs
    first = int(sum(good) / len(good))
    return [replace(job, first_turn=first) if rewards.get(job.index) == 0 else job for job in jobs]


def rows_of(name: str, values: Any, count: int) -> list[Any] | None:
    """`values` as a list with one item per trajectory."""
    if values is None:
        return None
    if isinstance(values, Mapping | str):
        raise ValueError(f"{name} must have one entry per trajectory, in order, got {type(values).__name__}")
    rows = values.tolist() if hasattr(values, "tolist") else values
    rows = list(rows) if isinstance(rows, Iterable) else rows
    if not isinstance(rows, list) or len(rows) != count:
        got = len(rows) if isinstance(rows, list) else 1
        raise ValueError(f"{name} must have one entry per trajectory: {count} dataset_ids, got {got}")
    return [
        row[0] if name == "reward_tensor" and isinstance(row, list) and len(row) == 1 else row for row in rows
    ]


def _checked_scores(row: Any, where: str) -> tuple[float, ...]:
    if not isinstance(row, Iterable) or isinstance(row, str):
        raise ValueError(f"process_reward_tensor must have a row of scores per trajectory, got {row!r}")
    scores = tuple(finite_reward(value, f"{where}: process_reward_tensor") for value in row)
    wrong = [score for score in scores if score != -1 and not 0 <= score <= 1]
    if wrong:
        raise DataError(f"{where}: process rewards must be in [0, 1], or -1 for none; got {wrong[0]}")
    return scores


def _paths(paths: Paths, ids: list[str]) -> list[Path | None]:
    if paths is None:
        return [None] * len(ids)
    if isinstance(paths, Mapping):
        return [Path(paths[name]) if name in paths else None for name in ids]
    if isinstance(paths, str | Path) or len(paths) != len(ids):
        raise ValueError(
            f"dataset_paths must map ids to folders or have one entry for each of {len(ids)} ids"
        )
    return [Path(path) for path in paths]
