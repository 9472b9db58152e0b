"""From image files to pixels and image tokens, each image once per trajectory.

Processors whose pixels are "resize, cut into patches, map each 8-bit value through a table" (Qwen2-VL and its
successors on Pillow) are imitated bit for bit; a probe at construction makes sure. Any other processor is
called itself, once per image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.core.seeding import stream
from shoal.splitting.image_files import MAX_IMAGE_PIXELS, decode_rgb, image_size, short_name
from shoal.splitting.layout import ImageTokens, image_on_grid, text_like
from shoal.splitting.pixels import PatchTable, ProcessorOutputs, Store, TrajectoryPixels, cut_patches

Array = np.ndarray
Pixels = TrajectoryPixels | ProcessorOutputs | None
NOT_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def fitted_size(width: int, height: int, factor: int, smallest: int, largest: int) -> tuple[int, int]:
    """(width, height) near the given ones, multiples of `factor`, with an area in [smallest, largest].

    >>> fitted_size(1280, 720, 28, 3136, 12845056)
    (1288, 728)
    """
    if max(width, height) > 200 * min(width, height):
        raise DataError(
            f"an image of {width}x{height} is too long: the longer side may be 200 times the shorter"
        )
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > largest:
        shrink = math.sqrt(height * width / largest)
        new_height, new_width = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif new_height * new_width < smallest:
        grow = math.sqrt(smallest / (height * width))
        new_height, new_width = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return new_width, new_height


@dataclass(frozen=True)
class PatchImages:
    """Images as 8-bit patches and a table: Qwen2-VL's processor without its arithmetic per pixel."""

    patch: int  # side of a patch in pixels
    merge: int  # patches along a side of what becomes one token
    smallest: int  # area in pixels, also the next
    largest: int
    resample: int  # Pillow's number of the filter
    max_pixels: int
    table: PatchTable

    @staticmethod
    def imitating(image_processor: Any, max_pixels: int) -> PatchImages:
        """The settings of a processor, and a table made by it."""
        patch, merge = int(image_processor.patch_size), int(image_processor.merge_size)
        return PatchImages(
            patch=patch,
            merge=merge,
            smallest=_edge(image_processor, "shortest_edge"),
            largest=_edge(image_processor, "longest_edge"),
            resample=int(image_processor.resample),
            max_pixels=max_pixels,
            table=_make_table(image_processor, patch, merge),
        )

    def size(self, place: str) -> tuple[int, int]:
        """(width, height) after resizing."""
        return self._fit(*image_size(place, self.max_pixels))

    def patches(self, place: str, out: Array) -> Array:
        """Write `[N, 3, p * p]` uint8 of the image at a path or in a data URL to `out`.

        Raises:
            DataError: the image has another size than `out` was made for: the file changed meanwhile.
        """
        image = decode_rgb(place, self.max_pixels)
        width, height = self._fit(*image.size)
        if width * height != len(out) * self.patch**2:
            raise DataError(
                f"image {short_name(place)} is now {image.size[0]}x{image.size[1]}, another size than when it was "
                "looked at first: something writes to it. Split when the recording is done"
            )
        return self.patches_of(image, out)

    def patches_of(self, image: Any, out: Array | None = None) -> Array:
        """`[N, 3, p * p]` uint8 of a decoded image, in `out` where it is given."""
        size = self._fit(*image.size)
        values = np.asarray(image if image.size == size else image.resize(size, self.resample))
        if out is None:
            out = np.empty((size[0] * size[1] // self.patch**2, 3, self.patch**2), np.uint8)
        cut_patches(values, self.patch, self.merge, out)
        return out

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        return fitted_size(width, height, self.patch * self.merge, self.smallest, self.largest)

    def equals(self, image_processor: Any) -> bool:
        """Whether probe images come out bit-identical: one to grow, one to shrink, one in between."""
        from PIL import Image

        noise = stream(0, "splitting", "probe")
        unit = self.patch * self.merge
        for width, height in (
            (unit // 2 + 1, unit // 2),
            (5 * unit + 3, 3 * unit - 5),
            (40 * unit + 7, 31 * unit),
        ):
            image = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
            wanted = image_processor(images=[image], return_tensors="np")
            if set(wanted) != {"pixel_values", "image_grid_thw"}:
                return False
            size = self._fit(width, height)
            grid = [1, size[1] // self.patch, size[0] // self.patch]
            values = self.table.expand(self.patches_of(image))
            if np.asarray(wanted["image_grid_thw"]).tolist() != [grid]:
                return False
            if not np.array_equal(values, np.asarray(wanted["pixel_values"])):
                return False
        return True


def _make_table(image_processor: Any, patch: int, merge: int) -> PatchTable:
    """What the processor makes of each 8-bit value in each channel, by its own rescaling and normalising."""
    import torch
    from PIL import Image

    side = (
        patch * merge * math.ceil(16 / (patch * merge))
    )  # 16 x 16 pixels or more, so that every value occurs
    ramp = np.repeat((np.arange(side * side) % 256).astype(np.uint8)[:, None], 3, axis=1)
    ramp = ramp.reshape(side, side, 3)
    patches = np.empty((side * side // patch**2, 3, patch**2), np.uint8)
    cut_patches(ramp, patch, merge, patches)
    made = image_processor(images=[Image.fromarray(ramp)], do_resize=False, return_tensors="np")
    frames = int(image_processor.temporal_patch_size)
    values = np.asarray(made["pixel_values"], np.float32).reshape(len(patches), 3, frames, -1)
    table = np.zeros((3, 256), np.float32)
    for channel in range(3):
        table[channel, patches[:, channel]] = values[:, channel, 0]
    half = torch.from_numpy(table).to(torch.bfloat16).view(torch.uint16).numpy()
    return PatchTable(table, half, frames)


class ImageReader:
    """Reads the images of a trajectory for one processor.

    Args:
        processor: with an `image_processor`, or without one for text models.
        image_token: the token that stands for an image in rendered text.
        image_token_id: its id.
        store: how pixels are kept.
        max_pixels: larger images are refused before they are decoded.
        threads: decode and resize so many images of a trajectory at a time.
    """

    def __init__(
        self,
        processor: Any,
        image_token: str | None,
        image_token_id: int,
        *,
        store: Store = "auto",
        max_pixels: int = MAX_IMAGE_PIXELS,
        threads: int = 1,
    ) -> None:
        self.processor = processor
        self.image_token, self.image_token_id = image_token, image_token_id
        self.max_pixels, self.threads = max_pixels, threads
        image_processor = getattr(processor, "image_processor", None)
        self.by_table = _patch_images(image_processor, max_pixels) if image_processor is not None else None
        self.rows = 3 if image_processor is not None and hasattr(image_processor, "merge_size") else 1
        if self.by_table is None and store in ("u8", "path") and image_processor is not None:
            raise ConfigError(
                f"store={store!r} needs a processor of the Qwen2-VL kind on Pillow; "
                f"{type(image_processor).__name__} makes its pixels another way: "
                "use store='auto', 'float32' or 'bfloat16'"
            )
        self.store: Store = store if store != "auto" else ("u8" if self.by_table is not None else "float32")

    def read(self, places: Sequence[str], store: Store) -> tuple[Pixels, list[ImageTokens]]:
        """Pixels of the images and how each stands among tokens."""
        if not places:
            return None, []
        if self.image_token is None:
            raise DataError("this processor reads no images; use one with an image_processor")
        return (
            self._by_table(places, store) if self.by_table is not None else self._by_processor(places, store)
        )

    def _by_table(self, places: Sequence[str], store: Store) -> tuple[Pixels, list[ImageTokens]]:
        reader = self.by_table
        assert reader is not None
        sizes = [reader.size(place) for place in places]
        grids = np.array(
            [[1, height // reader.patch, width // reader.patch] for width, height in sizes], np.int64
        )
        tokens = [self._grid_tokens(int(h) // reader.merge, int(w) // reader.merge) for _, h, w in grids]
        if store == "path":
            return TrajectoryPixels(grids, None, reader.table, tuple(places), reader.merge, reader), tokens
        offsets = np.concatenate([[0], np.cumsum(grids[:, 1] * grids[:, 2])])
        width = 3 * reader.patch**2
        kind, columns = {
            "u8": (np.uint8, width),
            "float32": (np.float32, width * reader.table.frames),
            "bfloat16": (np.uint16, width * reader.table.frames),
        }[store]
        rows = np.empty((int(offsets[-1]), columns), kind)

        def fill(index: int) -> None:
            out = rows[offsets[index] : offsets[index + 1]]
            if store == "u8":
                reader.patches(places[index], out.reshape(len(out), 3, -1))
            else:
                patches = np.empty((len(out), 3, reader.patch**2), np.uint8)
                reader.table.expand_into(reader.patches(places[index], patches), out)

        if self.threads > 1 and len(places) > 1:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(fill, range(len(places))))
        else:
            for index in range(len(places)):
                fill(index)
        kept = rows.reshape(len(rows), 3, -1) if store == "u8" else rows
        return TrajectoryPixels(grids, kept, reader.table, tuple(places), reader.merge), tokens

    def _by_processor(self, places: Sequence[str], store: Store) -> tuple[Pixels, list[ImageTokens]]:
        outputs, tokens = [], []
        frame = self._around()
        for place in places:
            image = decode_rgb(place, self.max_pixels)
            made = dict(self.processor(text=[self.image_token], images=[image], return_tensors="pt"))
            ids = made["input_ids"][0].numpy().astype(np.int32)
            first, last = np.flatnonzero(ids == self.image_token_id)[[0, -1]]
            ids = ids[frame[0] : len(ids) - frame[1]]
            output = {name: value for name, value in made.items() if name not in NOT_PIXELS}
            if self.rows == 3 and "image_grid_thw" in output:
                merge = self.processor.image_processor.merge_size
                _, height, width = (int(side) for side in output["image_grid_thw"][0])
                tokens.append(self._grid_tokens(height // merge, width // merge))
                if len(tokens[-1].ids) != last - first + 1:
                    raise DataError(f"{place}: the processor made {last - first + 1} tokens for a grid of "
                                    f"{height}x{width}")  # fmt: skip
            else:
                tokens.append(text_like(ids))
            outputs.append({name: _kept_array(value, store) for name, value in output.items()})
        return ProcessorOutputs(tuple(outputs)), tokens

    def _around(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts before and after any text by itself."""
        tokenizer = self.processor.tokenizer
        bare, dressed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
        before = next(index for index in range(len(dressed)) if dressed[index : index + len(bare)] == bare)
        return before, len(dressed) - before - len(bare)

    def _grid_tokens(self, height: int, width: int) -> ImageTokens:
        return image_on_grid(self.image_token_id, height, width, self.rows)


def _patch_images(image_processor: Any, max_pixels: int) -> PatchImages | None:
    """The imitation of a processor where it is exact, else None."""
    wanted = ("patch_size", "merge_size", "temporal_patch_size", "size", "resample")
    steps = ("do_resize", "do_rescale", "do_normalize")
    if any(getattr(image_processor, name, None) is None for name in wanted):
        return None
    if not all(getattr(image_processor, name, False) for name in steps):
        return None
    images = PatchImages.imitating(image_processor, max_pixels)
    return images if images.equals(image_processor) else None


def _edge(image_processor: Any, name: str) -> int:
    size = image_processor.size
    return int(size[name] if isinstance(size, dict) else getattr(size, name))


def _kept_array(value: Any, store: Store) -> Array:
    """A processor's tensor as an array; bfloat16 travels as its bits."""
    import torch

    if store == "bfloat16" and value.is_floating_point():
        return value.to(torch.bfloat16).view(torch.uint16).numpy()  # type: ignore[no-any-return]
    return value.numpy()  # type: ignore[no-any-return]
