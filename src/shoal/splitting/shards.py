"""A folder of recordings split into shards, each a batch on disk: a shard that is written is never written again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError, reading
from shoal.core.files import read_json, remove_leftovers, sha256_of, verify_folder, write_folder, write_json
from shoal.core.run_folder import FolderLock
from shoal.splitting.batch import Batch, Skipped
from shoal.splitting.splitters import Progress, TrajectorySplitter, rows_of

PLAN = "plan.json"
SKIPPED = "skipped.json"


def split_shards(
    splitter: TrajectorySplitter,
    dataset_ids: Sequence[str],
    rewards: Sequence[float] | None,
    folder: Path | str,
    *,
    size: int,
    about: str = "",
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Split `size` recordings at a time and write each shard to `folder/<number>` as `Batch.save` does.

    Existing shards are verified and kept, so the same call resumes one that was killed: only the unfinished shard is
    split again. A shard without samples holds just the reasons of its skipped recordings.

    Args:
        splitter: how; a folder that was begun with other settings, or whose recordings have changed since (their files,
            where the reader tells its `sources()`; images are not looked at), is refused.
        dataset_ids: which recordings; the same ones in the same order for every call.
        rewards: one each.
        folder: where to write.
        size: recordings in a shard.
        about: what else must be the same for every call, as text.
        executor: where the recordings of a shard are split.
        progress: called with (recordings done, recordings in all).

    Yields:
        The folder of each shard that was written now, and its counts, once it is safe on disk.

    Raises:
        ConfigError: the folder was begun with something else.
        DataError: a shard that is there is damaged.
        WorkerError: another split is writing there.
    """
    ids, rewards = list(dataset_ids), rows_of("reward_tensor", rewards, len(dataset_ids))
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not ids or isinstance(dataset_ids, str):
        raise ValueError(f"dataset_ids must be a list of at least one id, got {dataset_ids!r}")
    if splitter.traj_filter and size < len(ids):
        raise ConfigError(
            "traj_filter needs the mean length of all successful recordings, and a shard knows only its own: leave it "
            f"out, or write one shard of all {len(ids)} recordings, got shards of {size}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder / ".lock", "another split")
    lock.take()
    try:
        remove_leftovers(folder)
        digests = {
            "digest": [ids, rewards, about],
            "contents": _contents(splitter.plan.reader),
            "settings": _settings(splitter),
            "processor": _model(splitter),
        }
        plan = {"recordings": len(ids), "size": size} | {name: _digest(of) for name, of in digests.items()}
        begun = _plan_of(folder) if (folder / PLAN).is_file() else {}
        if changed := [name for name, value in plan.items() if begun.get(name, value) != value]:
            other = "another tokenizer, image processor or chat template" if "processor" in changed else ""
            other = "recordings that have changed since" if changed == ["contents"] else other
            raise ConfigError(
                f"{folder} was begun with {other or 'other recordings or settings'}; give another folder, or remove it"
            )
        write_json(folder / PLAN, plan)
        for number, first in enumerate(range(0, len(ids), size)):
            place = folder / f"{number:06d}"
            if place.is_dir():
                _verify(place)
            else:
                of = None if rewards is None else rewards[first : first + size]
                results = splitter.results(ids[first : first + size], of, executor=executor)
                yield place, _save(splitter, results, place)
            if progress is not None:
                progress(min(first + size, len(ids)), len(ids))
    finally:
        lock.release()


def read_shards(folder: Path | str) -> Iterator[Batch]:
    """The batches of a folder in order, one in memory at a time; a missing or damaged shard is an error."""
    folder = Path(folder)
    plan = _plan_of(folder)
    shards = -(-plan["recordings"] // plan["size"])
    for number in range(shards):
        place = folder / f"{number:06d}"
        if not place.is_dir():
            raise DataError(f"{folder} has {number} of {shards} shards: the run is not done; resume it")
        if (place / SKIPPED).is_file():
            verify_folder(place)
            continue
        yield Batch.load(place)


def count_shards(folder: Path | str) -> dict[str, Any]:
    """Counts of all shards of a folder together; `reasons` has the reason of each skipped id."""
    shards = sorted(place for place in Path(folder).glob("[0-9]*") if place.is_dir())
    total: dict[str, Any] = {"shards": len(shards), "reasons": {}}
    for place in shards:
        if (place / SKIPPED).is_file():
            counts = _counts(None, [Skipped(*item) for item in read_json(place / SKIPPED).items()])
        else:
            with reading(place, "is damaged", "; make it again"):
                counts = read_json(place / "batch.json")["counts"]
        total["reasons"] |= counts.pop("reasons")
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    return total


def _save(splitter: TrajectorySplitter, results: Any, place: Path) -> dict[str, Any]:
    batch, skipped = splitter.collected(results)
    counts = _counts(batch, skipped)
    if batch is not None:
        batch.save(place, counts=counts)
    else:
        with write_folder(place) as new:
            write_json(new / SKIPPED, {item.dataset_id: item.reason for item in skipped})
    return counts


def _counts(batch: Batch | None, skipped: Sequence[Skipped]) -> dict[str, Any]:
    nothing = {"trajectories": 0, "samples": 0, "images": 0, "skipped": len(skipped)}
    counts: dict[str, Any] = nothing if batch is None else batch.summary()
    return counts | {"reasons": {item.dataset_id: item.reason for item in skipped}}


def _verify(place: Path) -> None:
    try:
        verify_folder(place)
    except DataError as error:
        raise DataError(f"{error}; remove {place}, and split again with the same folder") from error


def _contents(reader: Any) -> list[list[str]]:
    """Name and digest of each file that the recordings are made of, as far as the reader tells them."""
    found = []
    for file in getattr(reader, "sources", tuple)():
        with reading(file, "cannot be read"):
            found.append([file.name, sha256_of(file)])
    return found


def _settings(splitter: TrajectorySplitter) -> list[Any]:
    """All that the samples of a recording follow from, apart from what the recording holds."""
    plan, processor = splitter.plan, splitter.plan.template.processor
    exact = {} if plan.images.by_table is None else vars(plan.images.by_table)
    images = {name: value for name, value in exact.items() if name != "table"}
    return [
        plan.kind, asdict(plan.limits), plan.max_prompt_length, plan.max_response_length, plan.truncation,
        plan.use_rollout, splitter.rows, splitter.padding, splitter.traj_filter,
        plan.images.store, plan.images.max_pixels, images,
        plan.reward if isinstance(plan.reward, str) else getattr(plan.reward, "__qualname__", ""),
        type(plan.reader).__qualname__, getattr(processor, "chat_template", None), plan.template.header_ids.tolist(),
    ]  # fmt: skip


def _model(splitter: TrajectorySplitter) -> list[Any]:
    """All of the model's processor that tokens and pixels follow from."""
    processor, tokenizer = splitter.plan.template.processor, splitter.plan.template.tokenizer
    fast, images = getattr(tokenizer, "backend_tokenizer", None), getattr(processor, "image_processor", None)
    told = getattr(tokenizer, "get_vocab", dict)() if fast is None else json.loads(fast.to_str())
    words = {name: told[name] for name in sorted(told) if name not in ("padding", "truncation")}
    templates = [getattr(one, "chat_template", None) for one in (processor, tokenizer)]
    return [templates, words, getattr(images, "to_json_string", str)()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=float).encode()).hexdigest()


def _plan_of(folder: Path) -> dict[str, Any]:
    try:
        plan = read_json(folder / PLAN)
    except FileNotFoundError:
        raise DataError(f"{folder} has no {PLAN}: it is not a folder that split_shards wrote") from None
    if not isinstance(plan, dict) or not all(
        isinstance(plan.get(name), int) and plan[name] > 0 for name in ("recordings", "size")
    ):
        raise DataError(f"{folder / PLAN} is damaged; remove the folder and split again")
    return plan
