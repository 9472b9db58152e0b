"""The splitters: recorded trajectories in, one training batch out, the same on every executor."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal

from shoal.core.errors import DataError, ShoalError, missing_extra
from shoal.core.executors import RayExecutor, SerialExecutor, map_ordered
from shoal.core.sharing import Shared, shared_by_ray
from shoal.splitting.assembly import split_recording
from shoal.splitting.batch import Batch, Padding, Shape, Skipped
from shoal.splitting.fixes import Compat, Fixes
from shoal.splitting.image_files import MAX_IMAGE_PIXELS
from shoal.splitting.images import ImageReader, Pixels
from shoal.splitting.jobs import make_jobs, without_first_turns
from shoal.splitting.layout import Truncation
from shoal.splitting.pixels import Store, TrajectoryPixels
from shoal.splitting.plans import Job, Kind, Plan, SplitTrajectory
from shoal.splitting.readers import FolderReader
from shoal.splitting.recordings import Reader
from shoal.splitting.samples import RewardPlacement, Sample
from shoal.splitting.templates import MODEL_TEXT, ChatTemplate
from shoal.splitting.windows import Limits

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


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
        compat: "fixed" is right; "seed" gives the original's tensors bit for bit.
        fixes: single switches of `Fixes` by name, over `compat`.
        store: how pixels are kept: "u8" (8-bit, expanded when read), "float32", "bfloat16", "path" (read
            again when needed), or "auto": "u8" where the processor allows it, else "float32".
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
        compat: Compat = "fixed",
        fixes: Mapping[str, bool] | Fixes | None = None,
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
        _positive(
            window_size=window_size,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            limit_messages=limit_messages,
            image_threads=image_threads,
            max_image_pixels=max_image_pixels,
        )
        if not 1 <= stride_size <= window_size:
            raise ValueError(
                f"stride_size must be in [1, window_size={window_size}] so no turn is skipped, "
                f"got {stride_size}"
            )
        if limit_images < 0:
            raise ValueError(f"limit_images must be at least 0, got {limit_images}")
        _one_of("truncation", truncation, ("error", "left", "right", "middle"))
        _one_of("padding", padding, ("max", "longest"))
        _one_of("on_error", on_error, ("raise", "skip"))
        _one_of("store", store, ("auto", "u8", "float32", "bfloat16", "path"))
        if not callable(reward):
            _one_of("reward", reward, ("final", "all", "last_step"))
        switches = Fixes.resolve(compat, fixes)
        template = ChatTemplate(processor, escape=switches.escape_control_tokens, model_text=model_text)
        images = ImageReader(
            processor,
            template.image_token,
            template.image_token_id,
            store=store,
            max_pixels=max_image_pixels,
            threads=image_threads,
        )
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
            fixes=switches,
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
        dataset_paths: Mapping[str, Path | str] | Sequence[Path | str] | None = None,
        progress: Progress | None = None,
    ) -> Batch:
        """One batch with the samples of all trajectories, in the order of the ids.

        Args:
            dataset_ids: which trajectories.
            reward_tensor: one reward each; without it, rewards that were recorded, or 0.
            executor: where trajectories are split; threads cost nothing to start, since reading and resizing
                images runs outside the interpreter lock. All executors give the same batch.
            process_reward_tensor: `[N, turns]` scores in [0, 1], -1 for none; each adds `0.5 * (score - 0.5)`
                on the last token of its turn.
            dataset_paths: where a trajectory is, instead of `root_dir`: by id, or one for each id.
            progress: called with (trajectories done, trajectories in all).
        """
        return self._collected(
            self._results(
                dataset_ids, reward_tensor, executor, process_reward_tensor, dataset_paths, progress
            )
        )

    def split_parallel(
        self,
        dataset_ids: Iterable[str],
        reward_tensor: Any = None,
        num_cpus: int = 4,
        *,
        process_reward_tensor: Any = None,
        dataset_paths: Mapping[str, Path | str] | Sequence[Path | str] | None = None,
        progress: Progress | None = None,
    ) -> Batch:
        """`split` on Ray with `num_cpus` tasks at a time; Ray is started if it is not, and stays."""
        _positive(num_cpus=num_cpus)
        ahead = _start_ray(num_cpus)
        with RayExecutor({"max_retries": 3}) as executor:  # splitting twice does no harm
            return self._collected(
                self._results(
                    dataset_ids,
                    reward_tensor,
                    executor,
                    process_reward_tensor,
                    dataset_paths,
                    progress,
                    share=shared_by_ray,
                    in_flight=ahead,
                )
            )

    def stream(
        self,
        dataset_ids: Iterable[str],
        reward_tensor: Any = None,
        *,
        batch_size: int,
        executor: Executor | None = None,
        process_reward_tensor: Any = None,
        dataset_paths: Mapping[str, Path | str] | Sequence[Path | str] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Batch]:
        """Batches of `batch_size` samples (the last may have fewer), the same samples as `split` in order.

        Only a few trajectories are in memory at a time: those of the batch and those that workers are ahead.
        """
        _positive(batch_size=batch_size)
        samples: list[Sample] = []
        pixels: dict[int, Pixels] = {}
        skipped: list[Skipped] = []
        for result in self._results(
            dataset_ids, reward_tensor, executor, process_reward_tensor, dataset_paths, progress
        ):
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
    def _collected(self, results: Iterable[SplitTrajectory | Skipped]) -> Batch:
        samples: list[Sample] = []
        pixels: dict[int, Pixels] = {}
        skipped: list[Skipped] = []
        for result in results:
            if isinstance(result, Skipped):
                skipped.append(result)
            elif result.samples:
                samples += result.samples
                pixels[result.index] = result.pixels
        if not samples and skipped:
            raise DataError(
                f"all {len(skipped)} trajectories were skipped; the first because {skipped[0].reason}"
            )
        return self._batch(samples, pixels, skipped)

    def _results(
        self,
        dataset_ids: Iterable[str],
        rewards: Any,
        executor: Executor | None,
        scores: Any,
        paths: Mapping[str, Path | str] | Sequence[Path | str] | None,
        progress: Progress | None,
        *,
        share: Callable[[Plan], Shared[Plan]] = Shared,
        in_flight: int | None = None,
    ) -> Iterator[SplitTrajectory | Skipped]:
        executor = executor if executor is not None else SerialExecutor()
        local = isinstance(executor, SerialExecutor | ThreadPoolExecutor)
        store = self.plan.images.store
        # Elsewhere pixels are packed 8-bit and expanded here: an eighth of the bytes to move.
        packed: Store = store if local or store in ("path",) or self.plan.images.by_table is None else "u8"
        jobs = make_jobs([str(item) for item in dataset_ids], rewards, scores, paths, packed)
        if self.traj_filter:
            jobs = without_first_turns(self.plan.reader, jobs)
        if isinstance(executor, SerialExecutor):
            in_flight = 1
        plan = share(self.plan)
        todo = ((plan, job) for job in jobs if isinstance(job, Job))
        outcomes = map_ordered(executor, _work, todo, in_flight=in_flight)
        for done, job in enumerate(jobs, 1):
            outcome = next(outcomes) if isinstance(job, Job) else job.error
            if isinstance(outcome, SplitTrajectory):
                if not local and isinstance(outcome.pixels, TrajectoryPixels):
                    outcome.pixels = outcome.pixels.converted(store)
                yield outcome
            else:
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

    Args:
        processor: as for `TrajectorySplitter`, like all that is not listed here.
        root_dir: likewise.
        window_size: not used; a step looks back over `limit_messages` turns.
        stride_size: not used either.
        max_prompt_length: as for `TrajectorySplitter`.
        max_response_length: likewise.
        truncation: likewise.
        limit_images: likewise.
        limit_messages: likewise.
        use_vllm_logp: take tokens and log-probabilities as the sampler recorded them (see
            `shoal.splitting.rollouts`) instead of encoding the text again.
        traj_filter: as for `TrajectorySplitter`.
        options: the keyword options of `TrajectorySplitter`.
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


def _start_ray(num_cpus: int) -> int:
    """Start a local Ray if none is running; returns how many tasks may be submitted ahead."""
    try:
        import ray
    except ImportError as error:
        raise missing_extra("split_parallel", "parallel") from error
    if not ray.is_initialized():
        logger.info("starting a local Ray without dashboard; ray.shutdown() ends it")
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            ray.init(num_cpus=num_cpus, include_dashboard=False, **quiet)
        except ValueError:  # RAY_ADDRESS or `ray start` names a cluster: it has CPUs of its own
            ray.init(**quiet)
    # Where Ray has more CPUs than asked for, what is submitted is what runs.
    return num_cpus if ray.cluster_resources().get("CPU", 0) > num_cpus else 2 * num_cpus


def _work(item: tuple[Shared[Plan], Job]) -> SplitTrajectory | DataError:
    plan, job = item
    try:
        return split_recording(plan.get(), job)
    except (ImportError, MemoryError):
        raise
    except ShoalError as error:
        if isinstance(error, DataError):
            return error
        raise
    except Exception as error:  # of a template, a tokenizer or a processor, about what is in this recording
        refused = DataError(
            f"trajectory {job.dataset_id!r} cannot be split: {type(error).__name__}: {error}; "
            "mend it, or leave it out (on_error='skip')"
        )
        refused.add_note(traceback.format_exc())
        return refused


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
