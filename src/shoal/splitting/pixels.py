"""Pixels of a trajectory, kept once and small, handed out per sample as the tensors the model expects.

8-bit patches hold all there is to know: rescaling and normalising map each channel's 256 values to 256
numbers, so a table made with the processor's own arithmetic gives back bit-identical tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Store = Literal["auto", "u8", "float32", "bfloat16", "path"]
Array = np.ndarray


@dataclass(frozen=True)
class PatchTable:
    """How 8-bit patches become `pixel_values`: a table per channel, and frames that repeat."""

    float32: Array  # [3, 256]
    bfloat16: Array  # [3, 256] uint16, the same numbers rounded to bfloat16
    frames: int  # temporal_patch_size

    def row_width(self, patches: Array) -> int:
        """Values in one row of `pixel_values`."""
        return int(patches.shape[1] * self.frames * patches.shape[2])

    def expand(self, patches: Array, half: bool = False) -> Array:
        """`[N, 3 * frames * p * p]` from `[N, 3, p * p]`, float32, or the bits of bfloat16."""
        out = np.empty((len(patches), self.row_width(patches)), np.uint16 if half else np.float32)
        self.expand_into(patches, out)
        return out

    def reduce(self, values: Array) -> Array:
        """The 8-bit patches `[N, 3, p * p]` that expanded rows came from (the nearest ones for bfloat16)."""
        table = self.bfloat16 if values.dtype == np.uint16 else self.float32
        frame = values.reshape(len(values), 3, self.frames, -1)[:, :, 0]
        patches = np.empty(frame.shape, np.uint8)
        for channel in range(3):
            order = np.argsort(table[channel])
            found = np.searchsorted(table[channel], frame[:, channel], sorter=order)
            patches[:, channel] = order[np.minimum(found, 255)]
        return patches

    def expand_into(self, patches: Array, out: Array) -> None:
        """`expand` into rows that are there already."""
        from shoal.splitting.kernels import values_from_patches

        table = self.bfloat16 if out.dtype == np.uint16 else self.float32
        rows, channels, pixels = patches.shape
        _agree(patches.dtype == np.uint8 and table.shape == (channels, 256) == (3, 256), patches, table)
        _agree(out.size == rows * channels * self.frames * pixels, patches, out)
        values_from_patches(patches, table, self.frames, out.reshape(rows, channels, self.frames, pixels))


def cut_patches(image: Array, patch: int, merge: int, out: Array) -> None:
    """Cut `[H, W, 3]` uint8 into `out` `[H/p * W/p, 3, p * p]`; the loop behind it checks nothing."""
    from shoal.splitting.kernels import patches_from_image

    _agree(image.ndim == 3 and image.shape[2] == 3 and image.dtype == out.dtype == np.uint8, image, out)
    height, width = image.shape[:2]
    _agree(height % (patch * merge) == 0 and width % (patch * merge) == 0, image, out)
    _agree(out.shape == (height * width // patch**2, 3, patch**2), image, out)
    patches_from_image(image, patch, merge, out)


def _agree(shapes_agree: bool, source: Array, out: Array) -> None:
    if not shapes_agree:
        raise ValueError(f"{source.dtype} {source.shape} does not go into {out.dtype} {out.shape}")


@dataclass
class TrajectoryPixels:
    """All images of one trajectory, in order of first use.

    `rows` is one of: uint8 patches `[N, 3, p * p]`, expanded float32 `[N, D]`, bfloat16 bits (uint16)
    `[N, D]`, or `None` where images are read again from `places` whenever they are asked for.
    """

    grids: Array  # [images, 3] int64: frames, height and width of each image in patches
    rows: Array | None
    table: PatchTable | None = None  # None where a processor of another kind made the rows
    places: tuple[str, ...] = ()
    merge: int = 2  # patches along a side of one token
    reload: Any = None  # the `PatchImages` that reads places, for `rows is None`
    _offsets: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(np.prod(self.grids, axis=1))]).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes the pixels occupy in memory."""
        return 0 if self.rows is None else int(self.rows.nbytes)

    def converted(self, store: Store) -> TrajectoryPixels:
        """The same pixels kept as `store` says; only 8-bit rows can be expanded further."""
        wanted = {"float32": np.float32, "bfloat16": np.uint16}.get(store)
        if wanted is None or self.rows is None or self.rows.dtype != np.uint8 or self.table is None:
            return self
        rows = self.table.expand(self.rows, half=store == "bfloat16")
        return TrajectoryPixels(self.grids, rows, self.table, self.places, self.merge)

    def values(self, images: Sequence[int]) -> Any:
        """`pixel_values` of the images as a tensor: a view where they are stored expanded and adjacent."""
        if self.rows is None:
            assert self.table is not None
            return _tensor(self.table.expand(self.patches(images)))
        spans = _adjacent(images)
        if self.rows.dtype == np.uint8:
            assert self.table is not None
            sizes = [self._offsets[last + 1] - self._offsets[first] for first, last in spans]
            out = np.empty((int(sum(sizes)), self.table.row_width(self.rows)), np.float32)
            at = 0
            for (first, last), size in zip(spans, sizes, strict=True):
                self.table.expand_into(
                    self.rows[self._offsets[first] : self._offsets[last + 1]], out[at : at + size]
                )
                at += size
            return _tensor(out)
        pieces = [self.rows[self._offsets[first] : self._offsets[last + 1]] for first, last in spans]
        return _tensor(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    def patches(self, images: Sequence[int]) -> Array:
        """8-bit patches of the images `[N, 3, p * p]`; read again from disk where only places are kept."""
        if self.rows is None:
            side = self.reload.patch
            sizes = [int(self._offsets[image + 1] - self._offsets[image]) for image in images]
            blank = [np.empty((size, 3, side**2), np.uint8) for size in sizes]
            return np.concatenate(
                [self.reload.patches(self.places[i], out) for i, out in zip(images, blank, strict=True)]
            )
        if self.rows.dtype != np.uint8:
            raise ValueError("these pixels are kept expanded; use store='u8' to have patches")
        return np.concatenate([self.rows[self._offsets[i] : self._offsets[i + 1]] for i in images])

    def picture(self, image: int) -> Array:
        """One image as it is after resizing, `[H, W, 3]` uint8; float stores are turned back by the table."""
        first, last = self._offsets[image], self._offsets[image + 1]
        if self.rows is None or self.rows.dtype == np.uint8:
            patches = self.patches([image])
        else:
            assert self.table is not None
            patches = self.table.reduce(self.rows[first:last])
        _, rows, columns = (int(side) for side in self.grids[image])
        side, merge = int(np.sqrt(patches.shape[2])), self.merge
        blocks = patches.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
        return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)


class PixelInputs(Mapping[str, Any]):
    """`multi_modal_inputs` of one sample: `pixel_values` and `image_grid_thw`, made when they are read."""

    def __init__(self, pixels: TrajectoryPixels, images: Sequence[int]) -> None:
        self.pixels = pixels
        self.images = tuple(images)

    def __getitem__(self, key: str) -> Any:
        if key == "pixel_values":
            return self.pixels.values(self.images)
        if key == "image_grid_thw":
            return _tensor(self.pixels.grids[list(self.images)])
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("pixel_values", "image_grid_thw"))

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"PixelInputs({len(self.images)} images, {self.pixels.nbytes:,} bytes in the trajectory)"


@dataclass
class ProcessorOutputs:
    """What a processor of another kind made of each image of a trajectory, kept as it came."""

    outputs: tuple[dict[str, Array], ...]

    @property
    def nbytes(self) -> int:
        """Bytes the outputs occupy in memory."""
        return sum(int(array.nbytes) for output in self.outputs for array in output.values())

    def inputs(self, images: Sequence[int]) -> dict[str, Any]:
        """Tensors by name, images joined along the first axis."""
        names = self.outputs[images[0]] if images else {}
        return {name: _tensor(np.concatenate([self.outputs[i][name] for i in images])) for name in names}


def _adjacent(images: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, last).

    >>> _adjacent([0, 3, 4, 5])
    [(0, 0), (3, 5)]
    """
    spans: list[tuple[int, int]] = []
    for image in images:
        if spans and image == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], image)
        else:
            spans.append((image, image))
    return spans


def _tensor(array: Array) -> Any:
    """A tensor that shares memory with the array where the array may be written to."""
    import torch

    if not array.flags.writeable:  # Ray hands out read-only memory, which tensors have no notion of
        array = array.copy()
    return (
        torch.from_numpy(array).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)
    )
