"""Batches on disk: safetensors for numbers, JSON for the rest, a manifest over both."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import read_json, verify_folder, write_folder, write_json
from shoal.splitting.batch import Batch, Shape, Skipped
from shoal.splitting.images import PatchImages, Pixels
from shoal.splitting.pixels import PatchTable, ProcessorOutputs, TrajectoryPixels
from shoal.splitting.samples import Sample

FORMAT = 1
ARRAYS = ("prompt_ids", "response_ids", "prompt_positions", "response_positions", "response_mask", "rewards")
VALUES = (
    "dataset_id",
    "uid",
    "traj_index",
    "step_index",
    "n_steps",
    "n_attended",
    "pads_count_on",
    "messages",
)

Array = np.ndarray


def save_batch(batch: Batch, folder: Path) -> Path:
    """Write the unpadded samples and each trajectory's pixels once."""
    from safetensors.numpy import save_file

    samples = batch.samples()
    names = [*ARRAYS, "logprobs"] if samples[0].logprobs is not None else list(ARRAYS)
    arrays: dict[str, Array] = {}
    for name in names:
        arrays[name] = np.concatenate([getattr(sample, name) for sample in samples], axis=-1)
    arrays["prompt_lengths"] = np.array([len(sample.prompt_ids) for sample in samples])
    arrays["response_lengths"] = np.array([len(sample.response_ids) for sample in samples])
    document = {
        "format": FORMAT,
        "shape": asdict(batch.shape),
        "skipped": [asdict(item) for item in batch.skipped],
        "samples": [
            {name: getattr(sample, name) for name in VALUES}
            | {
                "images": list(sample.images),
                "roles": [list(role) for role in sample.roles],
                "image_spans": [list(span) for span in sample.image_spans],
            }
            for sample in samples
        ],
        "pixels": {str(index): _pixel_record(index, kept, arrays) for index, kept in batch.pixels.items()},
    }
    with write_folder(folder) as new:
        tensors = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(tensors, new / "batch.safetensors")
        os.chmod(new / "batch.safetensors", 0o644)  # safetensors writes for the owner alone
        write_json(new / "batch.json", document)
    return folder


def load_batch(folder: Path) -> Batch:
    """The batch in a folder; altered, missing or foreign files are a `DataError`."""
    from safetensors.numpy import load_file

    verify_folder(folder)
    document = read_json(folder / "batch.json")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(
            f"{folder} is not a batch of format {FORMAT}; make it again with this version of shoal"
        )
    arrays = load_file(folder / "batch.safetensors")
    try:
        samples = _samples(document["samples"], arrays)
        pixels = {int(index): _pixels(int(index), item, arrays) for index, item in document["pixels"].items()}
        skipped = [Skipped(**item) for item in document["skipped"]]
        return Batch(samples, pixels, Shape(**document["shape"]), skipped)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{folder} is damaged ({type(error).__name__}: {error}); make it again") from error


def _samples(records: list[dict[str, Any]], arrays: dict[str, Array]) -> list[Sample]:
    samples = []
    prompt_end = response_end = 0
    for index, record in enumerate(records):
        prompt = slice(prompt_end, prompt_end := prompt_end + int(arrays["prompt_lengths"][index]))
        response = slice(response_end, response_end := response_end + int(arrays["response_lengths"][index]))
        fields: dict[str, Any] = {
            name: arrays[name][..., prompt if name.startswith("prompt") else response] for name in ARRAYS
        }
        if "logprobs" in arrays:
            fields["logprobs"] = arrays["logprobs"][response]
        fields |= {name: record[name] for name in VALUES}
        roles = tuple((str(role), int(first), int(last)) for role, first, last in record["roles"])
        spans = tuple((int(image), int(first), int(last)) for image, first, last in record["image_spans"])
        samples.append(Sample(**fields, images=tuple(record["images"]), roles=roles, image_spans=spans))
    return samples


def _pixel_record(index: int, pixels: Pixels, arrays: dict[str, Array]) -> dict[str, Any]:
    """What JSON keeps of a trajectory's pixels; the arrays go into `arrays`."""
    if pixels is None:
        return {"kind": "none"}
    if isinstance(pixels, ProcessorOutputs):
        for image, output in enumerate(pixels.outputs):
            for name, array in output.items():
                arrays[f"pixels.{index}.{image}.{name}"] = array
        return {"kind": "processor", "names": [sorted(output) for output in pixels.outputs]}
    arrays[f"pixels.{index}.grids"] = pixels.grids
    record: dict[str, Any] = {"kind": "patches", "places": list(pixels.places), "merge": pixels.merge}
    if pixels.rows is not None:
        arrays[f"pixels.{index}.rows"] = pixels.rows
        record["places"] = []  # not needed to make pixels, and paths of this machine are nobody's business
    if pixels.table is not None:
        arrays["table.float32"], arrays["table.bfloat16"] = pixels.table.float32, pixels.table.bfloat16
        record["frames"] = pixels.table.frames
    if pixels.reload is not None:
        record["reload"] = {name: value for name, value in vars(pixels.reload).items() if name != "table"}
    return record


def _pixels(index: int, record: dict[str, Any], arrays: dict[str, Array]) -> Pixels:
    if record["kind"] == "none":
        return None
    if record["kind"] == "processor":
        return ProcessorOutputs(
            tuple(
                {name: arrays[f"pixels.{index}.{image}.{name}"] for name in names}
                for image, names in enumerate(record["names"])
            )
        )
    table = None
    if "frames" in record:
        table = PatchTable(arrays["table.float32"], arrays["table.bfloat16"], int(record["frames"]))
    reload = (
        PatchImages(**record["reload"], table=table) if "reload" in record and table is not None else None
    )
    return TrajectoryPixels(
        grids=arrays[f"pixels.{index}.grids"],
        rows=arrays.get(f"pixels.{index}.rows"),
        table=table,
        places=tuple(record["places"]),
        merge=int(record["merge"]),
        reload=reload,
    )
