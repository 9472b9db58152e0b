"""Samples as one batch: padded tensors under the original's names, the ways out of it, and batches on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.core.errors import DataError, needs_extra, reading
from shoal.core.files import read_json, verify_folder, write_folder, write_json
from shoal.splitting.images import (
    PatchTable,
    PixelInputs,
    Pixels,
    ProcessorOutputs,
    TrajectoryPixels,
)

Array = np.ndarray
Padding = Literal["max", "longest"]


@dataclass(slots=True)
class Sample:
    """Tokens of one sample; `rows` is 3 for models with M-RoPE positions, else 1."""

    dataset_id: str
    uid: str
    traj_index: int
    step_index: int
    n_steps: int
    prompt_ids: Array  # [p] int32
    response_ids: Array  # [r] int32
    prompt_positions: Array  # [rows, p] int32
    response_positions: Array  # [rows, r] int32
    response_mask: Array  # [r] bool: the tokens that are trained
    rewards: Array  # [r] float32
    pads_count_on: bool  # positions behind the response keep counting, instead of being 1
    images: tuple[int, ...]  # images of the trajectory that it shows, in order
    messages: list[dict[str, Any]]
    reward: float  # of its trajectory, wherever `rewards` puts it
    logprobs: Array | None = None  # [r] float32 of the response, as recorded by the sampler
    # (role, first token, token behind), over prompt and response
    roles: tuple[tuple[str, int, int], ...] = ()
    image_spans: tuple[tuple[int, int, int], ...] = ()  # (image, first token, token behind), likewise
    inputs: Any = field(default=None, repr=False)  # multi_modal_inputs, filled in when a batch is made

    @property
    def is_last_step(self) -> bool:
        """Whether this is the last sample of its trajectory."""
        return self.step_index == self.n_steps - 1

    @property
    def input_ids(self) -> Array:
        """Prompt and response, `[p + r]` int32."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def position_ids(self) -> Array:
        """`[rows, p + r]` int32."""
        return np.concatenate([self.prompt_positions, self.response_positions], axis=1)

    @property
    def prompt_inputs(self) -> Any:
        """Like `inputs`, of the images that the prompt shows."""
        shown = sum(first < len(self.prompt_ids) for _, first, _ in self.image_spans)
        return self.inputs.first(shown) if self.inputs else {}

    @property
    def n_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A trajectory that was left out, and why."""

    dataset_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shape:
    """How samples are padded."""

    prompt: int  # tokens on the left of the border; prompts are padded on their left
    response: int  # tokens on its right
    pad_id: int
    rows: int  # of position_ids: 1, 3, or 4 (3 below one that numbers the tokens)


class Batch(dict[str, Any]):
    """A dict of tensors `[B, …]` and object arrays `[B]`, made from unpadded samples.

    `prompts [B, P]`, `responses [B, R]`, `input_ids`, `attention_mask`, `loss_mask [B, P + R]`,
    `response_mask [B, R]` int64; `position_ids [B, rows, P + R]` (or `[B, P + R]` with one row);
    `reward_tensor [B, R]` float32, `rollout_log_probs [B, R]` float32 where recorded; `traj_index`,
    `step_index`, `n_steps` int64 and `is_last_step` bool `[B]`; object arrays `multi_modal_inputs`,
    `raw_messages`, `dataset_ids`, `uid`. `prompts`, `responses` and `response_mask` are views.

    Attributes:
        skipped: trajectories left out by `on_error="skip"`.
        shape: how it is padded.
        pixels: those of each trajectory, by its `traj_index`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        pixels: Mapping[int, Pixels],
        shape: Shape,
        skipped: Sequence[Skipped] = (),
    ) -> None:
        if not samples:
            raise DataError("no samples: every trajectory was skipped or filtered out")
        super().__init__()
        self.shape, self.skipped = shape, tuple(skipped)
        self._samples = [replace(sample, inputs=_inputs(sample, pixels)) for sample in samples]
        self.pixels = {index: pixels[index] for index in {sample.traj_index for sample in samples}}
        self._fill()

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self._samples, self.pixels, self.shape, self.skipped)

    def samples(self) -> list[Sample]:
        """The samples without padding; `inputs` holds what the model needs of their images."""
        return list(self._samples)

    def summary(self) -> dict[str, int]:
        """Counts of samples, tokens, images, and bytes."""
        import torch

        tensors = [value for value in self.values() if isinstance(value, torch.Tensor)]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
        }
        return {
            "trajectories": len(self.pixels),
            "samples": len(self._samples),
            "tokens": sum(sample.n_tokens for sample in self._samples),
            "trained_tokens": int(sum(sample.response_mask.sum() for sample in self._samples)),
            "images": sum(len(pixels) for pixels in self.pixels.values() if pixels is not None),
            "image_references": sum(len(sample.images) for sample in self._samples),
            "pixel_bytes": sum(pixels.nbytes for pixels in self.pixels.values() if pixels is not None),
            "tensor_bytes": sum(storages.values()),
            "skipped": len(self.skipped),
        }

    def to_dataproto(self, meta_info: dict[str, Any] | None = None, *, expand: bool = False) -> Any:
        """The batch as verl's `DataProto`.

        Args:
            meta_info: goes along as it is.
            expand: make `multi_modal_inputs` plain dicts of tensors now, for readers without shoal; they take
                up to 30 times the memory.
        """
        try:
            from verl import DataProto
        except ImportError as error:
            raise ImportError("to_dataproto needs verl: run pip install verl") from error
        fields = dict(self)
        if expand:
            fields["multi_modal_inputs"] = object_array([dict(sample.inputs) for sample in self._samples])
        return DataProto.from_single_dict(fields, meta_info=meta_info)

    def to_tensordict(self, *, jagged: bool = True) -> Any:
        """A TensorDict: `jagged` rows have their own lengths (nested tensors), otherwise padded as here."""
        with needs_extra("to_tensordict", "vision"):
            from tensordict import NonTensorStack, TensorDict
        import torch

        fields: dict[str, Any] = {}
        for name, value in self.items():
            if not isinstance(value, torch.Tensor):
                fields[name] = NonTensorStack(*value)
            elif value.ndim == 1 or not jagged:
                fields[name] = value
        if jagged:
            rows = [_unpadded(sample, self.shape) for sample in self._samples]
            for row, sample in zip(rows, self._samples, strict=True):
                row["prompts"], row["responses"] = np.split(row["input_ids"], [len(sample.prompt_ids)])
                row["response_mask"] = row["loss_mask"][len(sample.prompt_ids) :]
            for name in rows[0]:
                kind = np.float32 if rows[0][name].dtype == np.float32 else np.int64
                fields[name] = _nested([torch.from_numpy(row[name].astype(kind)) for row in rows])
        return TensorDict(fields, batch_size=[len(self._samples)])

    def save(self, folder: Path | str, **notes: Any) -> Path:
        """Write the unpadded samples and each trajectory's pixels once; the folder appears whole or not at all.

        Args:
            folder: a new one.
            notes: JSON values that are kept beside them in `batch.json`, such as counts.
        """
        from safetensors.numpy import save_file

        samples = self._samples
        names = [*ARRAYS, "logprobs"] if samples[0].logprobs is not None else list(ARRAYS)
        arrays: dict[str, Array] = {
            name: np.concatenate([getattr(sample, name) for sample in samples], axis=-1) for name in names
        }
        arrays["prompt_lengths"] = np.array([len(sample.prompt_ids) for sample in samples])
        arrays["response_lengths"] = np.array([len(sample.response_ids) for sample in samples])
        document = {
            **notes,
            "format": FORMAT,
            "shape": asdict(self.shape),
            "skipped": [asdict(item) for item in self.skipped],
            "samples": [{name: getattr(sample, name) for name in VALUES} for sample in samples],
            "pixels": {str(index): _pixel_record(index, kept, arrays) for index, kept in self.pixels.items()},
        }
        with write_folder(folder) as new:
            tensors = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            save_file(tensors, new / "batch.safetensors")
            write_json(new / "batch.json", document)
        return Path(folder)

    @staticmethod
    def load(folder: Path | str) -> Batch:
        """What `save` wrote, also by the run folder of `shoal split`; altered or missing files are a `DataError`."""
        from safetensors.numpy import load_file

        inside = Path(folder) / "batch"
        folder = verify_folder(inside if inside.is_dir() else folder)
        document = read_json(folder / "batch.json")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise DataError(
                f"{folder} is not a batch of format {FORMAT}; make it again with this version of shoal"
            )
        arrays = load_file(folder / "batch.safetensors")
        with reading(folder, "is damaged", "; make it again"):
            samples = _samples(document["samples"], arrays)
            pixels = {
                int(index): _pixels(int(index), item, arrays) for index, item in document["pixels"].items()
            }
            skipped = [Skipped(**item) for item in document["skipped"]]
            return Batch(samples, pixels, Shape(**document["shape"]), skipped)

    def _fill(self) -> None:
        import torch

        samples, shape = self._samples, self.shape
        count, border, length = len(samples), shape.prompt, shape.prompt + shape.response
        # Zeros from NumPy cost nothing until they are written to; those from torch are written at once.
        arrays = {name: np.zeros((count, length), np.int64) for name in ("attention_mask", "loss_mask")}
        arrays["input_ids"] = np.full((count, length), shape.pad_id, np.int64)
        arrays["reward_tensor"] = np.zeros((count, shape.response), np.float32)
        if samples[0].logprobs is not None:
            arrays["rollout_log_probs"] = np.zeros((count, shape.response), np.float32)
        positions = np.ones((count, shape.rows, length), np.int64)
        arrays["position_ids"] = positions if shape.rows > 1 else positions[:, 0]
        for row, sample in enumerate(samples):
            start = border - len(sample.prompt_ids)
            for name, values in _unpadded(sample, shape).items():
                first = 0 if name in ("reward_tensor", "rollout_log_probs") else start
                arrays[name][row, ..., first : first + values.shape[-1]] = values
            if sample.pads_count_on and len(sample.response_ids):
                stop = start + sample.n_tokens
                rows = positions[row, -sample.prompt_positions.shape[0] :, stop:]
                rows[:] = sample.response_positions[:, -1:] + np.arange(1, rows.shape[1] + 1)
        self.update({name: torch.from_numpy(array) for name, array in arrays.items()})
        self["prompts"], self["responses"] = self["input_ids"][:, :border], self["input_ids"][:, border:]
        self["response_mask"] = self["loss_mask"][:, border:]
        for name in ("traj_index", "step_index", "n_steps"):
            self[name] = torch.tensor([getattr(sample, name) for sample in samples])
        self["is_last_step"] = torch.tensor([sample.is_last_step for sample in samples])
        self["multi_modal_inputs"] = object_array([sample.inputs for sample in samples])
        self["raw_messages"] = object_array([sample.messages for sample in samples])
        self["dataset_ids"] = object_array([sample.dataset_id for sample in samples])
        self["uid"] = object_array([sample.uid for sample in samples])


def object_array(values: Sequence[Any]) -> Array:
    """`[B]` of Python objects; lists of equal lengths stay lists."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _unpadded(sample: Sample, shape: Shape) -> dict[str, Array]:
    """One sample's rows under the batch's names; `prompts`, `responses` and `response_mask` are parts of them."""
    border, length = len(sample.prompt_ids), sample.n_tokens
    positions = sample.position_ids
    if shape.rows == 4:
        positions = np.concatenate([np.arange(length)[None], positions])
    mask = np.zeros(length, bool)
    mask[border:] = sample.response_mask
    rows = {
        "input_ids": sample.input_ids,
        "attention_mask": np.ones(length, bool),
        "position_ids": positions if shape.rows > 1 else positions[0],
        "reward_tensor": sample.rewards,
        "loss_mask": mask,
    }
    return rows if sample.logprobs is None else rows | {"rollout_log_probs": sample.logprobs}


def _nested(values: Sequence[Any]) -> Any:
    """A jagged tensor whose last axis is ragged."""
    import torch

    if values[0].ndim == 1:
        return torch.nested.nested_tensor(list(values), layout=torch.jagged)
    lengths = torch.tensor([0, *(value.shape[-1] for value in values)]).cumsum(0)
    joined = torch.cat(list(values), dim=-1)
    return torch.nested.nested_tensor_from_jagged(joined, lengths, jagged_dim=2)


def _inputs(sample: Sample, pixels: Mapping[int, Pixels]) -> Any:
    kept = pixels[sample.traj_index]
    return PixelInputs(kept, sample.images) if sample.images and kept is not None else {}


# --- on disk
FORMAT = 1
ARRAYS = ("prompt_ids", "response_ids", "prompt_positions", "response_positions", "response_mask", "rewards")
VALUES = (
    "dataset_id", "uid", "traj_index", "step_index", "n_steps", "pads_count_on", "messages", "images",
    "roles", "image_spans", "reward",
)  # fmt: skip


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
        fields["images"] = tuple(record["images"])
        for name in ("roles", "image_spans"):
            fields[name] = tuple((what, int(first), int(last)) for what, first, last in record[name])
        samples.append(Sample(**fields))
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
    arrays[f"pixels.{index}.rows"], arrays["table.float32"] = pixels.rows, pixels.table.float32
    sizes = [list(size) for _, size in sorted(pixels.sizes.items())]
    return {"kind": "patches", "merge": pixels.merge, "frames": pixels.table.frames, "sizes": sizes}


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
    return TrajectoryPixels(
        grids=arrays[f"pixels.{index}.grids"],
        rows=arrays[f"pixels.{index}.rows"],
        table=PatchTable(arrays["table.float32"], int(record["frames"])),
        merge=int(record["merge"]),
        sizes={image: (int(w), int(h)) for image, (w, h) in enumerate(record["sizes"])},
    )
