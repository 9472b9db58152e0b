"""A folder of recordings split piece by piece into a folder of batches: what is done stays done after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, remove_leftovers, verify_folder, write_folder, write_json
from shoal.splitting.batch import Batch
from shoal.splitting.splitters import Progress, TrajectorySplitter

PLAN = "plan.json"


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
    """Split `size` recordings at a time, each lot into `folder/<number>` as `Batch.save` writes it.

    A lot that is there already is passed over, so the same call goes on where another was killed; only the lot that
    was under way is begun anew. Where no recording of a lot has a sample, its folder holds just
    the reasons of those that were skipped.

    Args:
        splitter: how.
        dataset_ids: which recordings; the same ones in the same order for every call.
        rewards: one each.
        folder: where to write.
        size: recordings of a lot.
        about: the settings as text: a folder that was begun with others is refused.
        executor: where the recordings of a lot are split.
        progress: called with (recordings done, recordings in all).

    Yields:
        The place of each lot that was made now, and its counts, once it is safe on disk.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if splitter.traj_filter and size < len(dataset_ids):
        raise ConfigError(
            "traj_filter drops as many turns as the successful ones of all recordings have on average, and a lot knows "
            f"only its own: leave it out, or make one lot of all ({len(dataset_ids)} recordings), got lots of {size}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    told = json.dumps([list(dataset_ids), None if rewards is None else list(rewards), about])
    plan = {"recordings": len(dataset_ids), "size": size, "digest": hashlib.sha256(told.encode()).hexdigest()}
    if (folder / PLAN).is_file() and read_json(folder / PLAN) != plan:
        raise ConfigError(
            f"{folder} was begun with other recordings or settings; give another folder, or remove it"
        )
    write_json(folder / PLAN, plan)
    for number, first in enumerate(range(0, len(dataset_ids), size)):
        place = folder / f"{number:06d}"
        ids = list(dataset_ids[first : first + size])
        if not place.is_dir():
            of = None if rewards is None else list(rewards[first : first + size])
            results = splitter.results(ids, of, executor=executor)
            yield place, _save(splitter, results, place, ids)
        if progress is not None:
            progress(min(first + size, len(dataset_ids)), len(dataset_ids))


def _save(splitter: TrajectorySplitter, results: Any, place: Path, ids: Sequence[str]) -> dict[str, Any]:
    batch, skipped = splitter.collected(results)
    if batch is not None:
        batch.save(place)
        return batch.summary()
    with write_folder(place) as new:
        write_json(new / "skipped.json", {item.dataset_id: item.reason for item in skipped})
    return {"trajectories": 0, "samples": 0, "images": 0, "skipped": len(skipped)}


def read_shards(folder: Path | str) -> Iterator[Batch]:
    """The batches of a folder in order, one in memory at a time; a lot that is missing or damaged is an error."""
    folder = Path(folder)
    plan = read_json(folder / PLAN)
    lots = -(-plan["recordings"] // plan["size"])
    for number in range(lots):
        place = folder / f"{number:06d}"
        if not place.is_dir():
            raise DataError(f"{folder} has {number} of {lots} lots: the run is not done; resume it")
        if (place / "skipped.json").is_file():
            verify_folder(place)
            continue
        yield Batch.load(place)
