"""From image files to what the model reads: each image once per trajectory, kept once and small.

Processors whose pixels are "resize, cut into patches, map each 8-bit value through a table" (Qwen2-VL and its
successors on Pillow) are imitated bit for bit; a probe at construction makes sure. 8-bit patches then hold all
there is to know: the table, made with the processor's own arithmetic, gives back bit-identical tensors. Any other
processor is called itself, once per image.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from shoal.core.errors import ConfigError, DataError, needs_extra
from shoal.core.seeding import stream
from shoal.splitting.place import Layout, image_on_grid, text_like

if TYPE_CHECKING:
    from shoal.splitting.encode import ChatTemplate

Store = Literal["auto", "u8", "float32"]
Array = np.ndarray
NOT_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")

MAX_IMAGE_PIXELS = 16_000_000
MAX_DATA_URL = 64 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""What a screenshot may be; other formats of Pillow start programs, or say one size and hold another."""
UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's `Transpose` that makes an image of an EXIF orientation upright."""


# --- loops over pixels
@functools.cache
def compiled_loops() -> tuple[Any, Any]:
    """`patches_from_image` and `values_from_patches`, compiled; they release the interpreter lock."""
    from numba import njit

    compiled = njit(nogil=True, cache=True)
    return compiled(patches_from_image), compiled(values_from_patches)


def patches_from_image(image: Any, patch: int, merge: int, out: Any) -> None:
    """Cut `[H, W, 3]` uint8 into `out` `[H/p * W/p, 3, p * p]`, in the order Qwen2-VL reads patches.

    Patches come in blocks of `merge x merge`, blocks row by row, so that the vision tower can fold each block
    into one token.
    """
    rows, columns = image.shape[0] // (patch * merge), image.shape[1] // (patch * merge)
    at = 0
    for block_row in range(rows):
        for block_column in range(columns):
            for inner_row in range(merge):
                top = (block_row * merge + inner_row) * patch
                for inner_column in range(merge):
                    left = (block_column * merge + inner_column) * patch
                    for y in range(patch):
                        for x in range(patch):
                            for channel in range(3):
                                out[at, channel, y * patch + x] = image[top + y, left + x, channel]
                    at += 1


def values_from_patches(patches: Any, table: Any, repeat: int, out: Any) -> None:
    """Look `[N, 3, p * p]` uint8 up in `table` `[3, 256]` into `out` `[N, 3, repeat, p * p]`.

    The `repeat` copies are the frames of a still image: Qwen2-VL takes it for a film of that length.
    """
    size = patches.shape[2]
    for at in range(patches.shape[0]):
        for channel in range(3):
            for x in range(size):
                out[at, channel, 0, x] = table[channel, patches[at, channel, x]]
            for frame in range(1, repeat):
                for x in range(size):
                    out[at, channel, frame, x] = out[at, channel, 0, x]


# --- files
def open_image(place: str, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[Any, tuple[int, int]]:
    """The image at a path or in a data URL, its pixels not yet decoded, and its (width, height) when it is upright."""
    with needs_extra("reading images", "vision"):
        from PIL import Image
    name = short_name(place)
    source = io.BytesIO(data_url_bytes(place)) if place.startswith("data:") else place
    try:
        image = Image.open(source, formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise DataError(
            f"image {name} is none of {', '.join(FORMATS)}; record it again or convert it"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"image {name} is too large to be a screenshot: {error}") from error
    except Exception as error:  # a decoder that reads nonsense may raise anything
        raise DataError(f"image {name} cannot be read ({error}); record it again or remove it") from error
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise DataError(
            f"image {name} says it is {width}x{height}, more than {max_pixels:,} pixels; "
            "shrink it or raise max_image_pixels"
        )
    return image, (height, width) if _orientation(image) >= 5 else (width, height)


def decode_rgb(place: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """The decoded image in RGB on white, upright as its EXIF has it, as large as its header says."""
    image, said = open_image(place, max_pixels)
    from PIL import Image

    try:
        with image:
            image.load()
            if image.mode[0] in "IF":  # Pillow, and so any processor, makes all above 255 white
                raise ValueError(f"its pixels have more than 8 bits, mode {image.mode}; convert it")
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                # laid on white, as the processors of transformers read it
                white = Image.new("RGBA", image.size, (255, 255, 255, 255))
                rgb = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
            else:
                rgb = image if image.mode == "RGB" else image.convert("RGB")
            if (turn := UPRIGHT.get(_orientation(image))) is not None:
                rgb = rgb.transpose(turn)
    except Exception as error:
        raise DataError(
            f"image {short_name(place)} is broken ({error}); record it again or remove it"
        ) from error
    if rgb.size != said:
        raise DataError(
            f"image {short_name(place)} says it is {said[0]}x{said[1]} and holds {rgb.size[0]}x{rgb.size[1]}; "
            "record it again or remove it"
        )
    return rgb


def image_size(place: str, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """(width, height) of the upright image, from the header alone."""
    image, size = open_image(place, max_pixels)
    image.close()
    return size


def _orientation(image: Any) -> int:
    """That of EXIF, from 1 to 8; 1 where it says none, or nonsense."""
    from PIL import ExifTags, Image

    head = Image.Image()  # a PNG that is asked itself decodes its pixels, to look behind them
    head.info = image.info
    with contextlib.suppress(Exception):  # metadata may be anything, and the pixels still good
        found = head.getexif().get(ExifTags.Base.Orientation)
        return found if found in UPRIGHT else 1
    return 1


def data_url_bytes(url: str) -> bytes:
    """The file in a data URL."""
    head, comma, payload = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise DataError(f"image {short_name(url)} must look like data:image/png;base64,…")
    if len(payload) > MAX_DATA_URL:
        raise DataError(
            f"image {short_name(url)} has {len(payload):,} characters, more than {MAX_DATA_URL:,}"
        )
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise DataError(f"image {short_name(url)} is not valid base64 ({error})") from error


def short_name(place: str) -> str:
    """How messages call the image at a path or in a data URL."""
    return repr(place[:40] + "…") if place.startswith("data:") else place


# --- pixels as they are kept
@dataclass(frozen=True)
class PatchTable:
    """How 8-bit patches become `pixel_values`: a table per channel, and frames that repeat."""

    float32: Array  # [3, 256]
    frames: int  # temporal_patch_size

    def expand(self, patches: Array, out: Array | None = None) -> Array:
        """`[N, 3 * frames * p * p]` float32 from `[N, 3, p * p]`, in `out` where it is given."""
        table, (rows, channels, pixels) = self.float32, patches.shape
        if out is None:
            out = np.empty((rows, channels * self.frames * pixels), np.float32)
        _agree(patches.dtype == np.uint8 and table.shape == (channels, 256) == (3, 256), patches, table)
        _agree(out.size == rows * channels * self.frames * pixels, patches, out)
        compiled_loops()[1](patches, table, self.frames, out.reshape(rows, channels, self.frames, pixels))
        return out


def cut_patches(image: Array, patch: int, merge: int, out: Array) -> None:
    """Cut `[H, W, 3]` uint8 into `out` `[H/p * W/p, 3, p * p]`; the loop behind it checks nothing."""
    _agree(image.ndim == 3 and image.shape[2] == 3 and image.dtype == out.dtype == np.uint8, image, out)
    height, width = image.shape[:2]
    _agree(height % (patch * merge) == 0 and width % (patch * merge) == 0, image, out)
    _agree(out.shape == (height * width // patch**2, 3, patch**2), image, out)
    compiled_loops()[0](image, patch, merge, out)


def _agree(shapes_agree: bool, source: Array, out: Array) -> None:
    if not shapes_agree:
        raise ValueError(f"{source.dtype} {source.shape} does not go into {out.dtype} {out.shape}")


@dataclass
class TrajectoryPixels:
    """All images of one trajectory, in order of first use.

    `rows` are uint8 patches `[N, 3, p * p]`, or expanded: float32 `[N, D]`.
    """

    grids: Array  # [images, 3] int64: frames, height and width of each image in patches
    rows: Array
    table: PatchTable
    merge: int = 2  # patches along a side of one token
    sizes: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # (width, height) as recorded
    _offsets: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(np.prod(self.grids, axis=1))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def nbytes(self) -> int:
        """Bytes the pixels occupy in memory."""
        return int(self.rows.nbytes)

    names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw")

    def tensor(self, name: str, images: Sequence[int]) -> Any:
        """What the model calls `name`, of the images: a view where pixels are stored expanded and adjacent."""
        if name != "pixel_values":
            return _tensor(self.grids[list(images)])
        rows = self._kept(images)
        return _tensor(self.table.expand(rows) if rows.dtype == np.uint8 else rows)

    def _kept(self, images: Sequence[int]) -> Array:
        """Rows of the images: a view where they stand one behind the other."""
        runs = np.split(np.asarray(images), np.flatnonzero(np.diff(images) != 1) + 1)
        pieces = [self.rows[self._offsets[run[0]] : self._offsets[run[-1] + 1]] for run in runs]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def picture(self, image: int) -> Array:
        """One image as it is after resizing, `[H, W, 3]` uint8.

        Raises:
            ValueError: the pixels are kept expanded.
        """
        if self.rows.dtype != np.uint8:
            raise ValueError("these pixels are kept expanded; use store='u8' to have pictures")
        return joined_patches(self._kept([image]), self.grids[image], self.merge)


def joined_patches(patches: Array, grid: Array, merge: int = 2) -> Array:
    """The image `[H, W, 3]` whose patches are `[N, 3, p * p]`, as `patches_from_image` cut them.

    Its `grid` is its frames, height and width in patches.
    """
    _, rows, columns = (int(side) for side in grid)
    side = math.isqrt(patches.shape[2])
    blocks = patches.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)


def thumbnail_url(picture: Any) -> str:
    """A picture of Pillow as a data URL that is not long."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass
class ProcessorOutputs:
    """What a processor of another kind made of each image of a trajectory, kept as it came."""

    outputs: tuple[dict[str, Array], ...]

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes the outputs occupy in memory."""
        return sum(int(array.nbytes) for output in self.outputs for array in output.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What the model calls them."""
        return tuple(self.outputs[0])

    def tensor(self, name: str, images: Sequence[int]) -> Any:
        """One of them, images joined along the first axis."""
        return _tensor(np.concatenate([self.outputs[image][name] for image in images]))


class PixelInputs(Mapping[str, Any]):
    """`multi_modal_inputs` of one sample (`pixel_values`, `image_grid_thw` …), made when they are read."""

    def __init__(self, pixels: TrajectoryPixels | ProcessorOutputs, images: Sequence[int]) -> None:
        self.pixels = pixels
        self.images = tuple(images)

    def first(self, count: int) -> PixelInputs | dict[str, Any]:
        """Those of the first images; a model is not to be given any for none."""
        return PixelInputs(self.pixels, self.images[:count]) if count else {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.pixels.names:
            raise KeyError(key)
        return self.pixels.tensor(key, self.images)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pixels.names)

    def __len__(self) -> int:
        return len(self.pixels.names)

    def __repr__(self) -> str:
        return f"PixelInputs({len(self.images)} images, {self.pixels.nbytes:,} bytes in the trajectory)"


def _tensor(array: Array) -> Any:
    """A tensor that shares memory with the array where the array may be written to."""
    import torch

    if not array.flags.writeable:  # Ray hands out read-only memory, which tensors have no notion of
        array = array.copy()
    return torch.from_numpy(array)


Pixels = TrajectoryPixels | ProcessorOutputs | None


# --- reading them for a processor
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
    def imitating(image_processor: Any, max_pixels: int) -> PatchImages | None:
        """The imitation of a processor with a table made by it, or None where it would not be exact."""
        wanted = ("patch_size", "merge_size", "temporal_patch_size", "size", "resample")
        steps = ("do_resize", "do_rescale", "do_normalize")
        if any(getattr(image_processor, name, None) is None for name in wanted):
            return None
        if not all(getattr(image_processor, name, False) for name in steps):
            return None
        size = image_processor.size
        smallest, largest = (
            int(size[name] if isinstance(size, dict) else getattr(size, name))
            for name in ("shortest_edge", "longest_edge")
        )
        patch, merge = int(image_processor.patch_size), int(image_processor.merge_size)
        table = _make_table(image_processor, patch, merge)
        resample = int(image_processor.resample)
        images = PatchImages(patch, merge, smallest, largest, resample, max_pixels, table)
        return images if images.equals(image_processor) else None

    def patches(self, place: str, out: Array) -> Array:
        """Write `[N, 3, p * p]` uint8 of the image at a path or in a data URL to `out`.

        Raises:
            DataError: the image has another size than `out` was made for: the file changed meanwhile.
        """
        image = decode_rgb(place, self.max_pixels)
        width, height = self.fitted(*image.size)
        if width * height != len(out) * self.patch**2:
            raise DataError(
                f"image {short_name(place)} is now {image.size[0]}x{image.size[1]}, another size than when it was "
                "looked at first: something writes to it. Split when the recording is done"
            )
        return self.patches_of(image, out)

    def patches_of(self, image: Any, out: Array | None = None) -> Array:
        """`[N, 3, p * p]` uint8 of a decoded image, in `out` where it is given."""
        size = self.fitted(*image.size)
        values = np.asarray(image if image.size == size else image.resize(size, self.resample))
        if out is None:
            out = np.empty((size[0] * size[1] // self.patch**2, 3, self.patch**2), np.uint8)
        cut_patches(values, self.patch, self.merge, out)
        return out

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after resizing."""
        return fitted_size(width, height, self.patch * self.merge, self.smallest, self.largest)

    def equals(self, image_processor: Any) -> bool:
        """Whether probe images come out bit-identical: one to grow, one in between, and one to shrink if 1 MP do."""
        from PIL import Image

        noise = stream(0, "splitting", "probe")
        unit = self.patch * self.merge
        large = 40 * unit + 7, 31 * unit
        if math.prod(large) <= self.largest:  # it would not be shrunk: a smaller one shows the same
            large = 9 * unit + 7, 7 * unit
        for width, height in ((unit // 2 + 1, unit // 2), (5 * unit + 3, 3 * unit - 5), large):
            image = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
            wanted = image_processor(images=[image], return_tensors="np")
            if set(wanted) != {"pixel_values", "image_grid_thw"}:
                return False
            size = self.fitted(width, height)
            grid = [1, size[1] // self.patch, size[0] // self.patch]
            values = self.table.expand(self.patches_of(image))
            if np.asarray(wanted["image_grid_thw"]).tolist() != [grid] or not np.array_equal(
                values, np.asarray(wanted["pixel_values"])
            ):
                return False
        return True


def _make_table(image_processor: Any, patch: int, merge: int) -> PatchTable:
    """What the processor makes of each 8-bit value in each channel, by its own rescaling and normalising."""
    from PIL import Image

    # 16 x 16 pixels or more, so that every value occurs
    side = patch * merge * math.ceil(16 / (patch * merge))
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
    return PatchTable(table, frames)


class ImageReader:
    """Reads the images of a trajectory for one processor, `threads` of them at a time."""

    def __init__(
        self, processor: Any, template: ChatTemplate, store: Store, max_pixels: int, threads: int
    ) -> None:
        self.processor = processor
        self.image_token, self.image_token_id = template.image_token, template.image_token_id
        self.max_pixels, self.threads = max_pixels, threads
        image_processor = getattr(processor, "image_processor", None)
        self.by_table = PatchImages.imitating(image_processor, max_pixels)
        self.rows = 3 if hasattr(image_processor, "merge_size") else 1
        if self.by_table is None and store == "u8" and image_processor is not None:
            raise ConfigError(
                "store='u8' needs a processor of the Qwen2-VL kind on Pillow; "
                f"{type(image_processor).__name__} makes its pixels another way: use store='auto' or 'float32'"
            )
        self.store: Store = store if store != "auto" else ("u8" if self.by_table is not None else "float32")

    def read(self, places: Sequence[str]) -> tuple[Pixels, list[Layout]]:
        """Pixels of the images and how each stands among tokens."""
        if not places:
            return None, []
        if self.image_token is None:
            raise DataError("this processor reads no images; use one with an image_processor")
        if self.by_table is None:
            return self._by_processor(places)
        return self._by_table(self.by_table, places)

    def _by_table(self, reader: PatchImages, places: Sequence[str]) -> tuple[Pixels, list[Layout]]:
        recorded = [image_size(place, reader.max_pixels) for place in places]
        sizes = [reader.fitted(*size) for size in recorded]
        grids = np.array(
            [[1, height // reader.patch, width // reader.patch] for width, height in sizes], np.int64
        )
        tokens = [self._grid_tokens(int(h) // reader.merge, int(w) // reader.merge) for _, h, w in grids]
        offsets = np.concatenate([[0], np.cumsum(grids[:, 1] * grids[:, 2])])
        area, kept = reader.patch**2, self.store == "u8"
        width = 3 * area if kept else 3 * area * reader.table.frames
        rows = np.empty((int(offsets[-1]), width), np.uint8 if kept else np.float32)

        def fill(index: int) -> None:
            out = rows[offsets[index] : offsets[index + 1]]
            if kept:
                reader.patches(places[index], out.reshape(len(out), 3, area))
            else:
                patches = np.empty((len(out), 3, area), np.uint8)
                reader.table.expand(reader.patches(places[index], patches), out)

        if self.threads > 1 and len(places) > 1:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(fill, range(len(places))))
        else:
            list(map(fill, range(len(places))))
        shaped = rows.reshape(len(rows), 3, area) if kept else rows
        return TrajectoryPixels(grids, shaped, reader.table, reader.merge, dict(enumerate(recorded))), tokens

    def _by_processor(self, places: Sequence[str]) -> tuple[Pixels, list[Layout]]:
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
            outputs.append({name: value.numpy() for name, value in output.items()})
        return ProcessorOutputs(tuple(outputs)), tokens

    def _around(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts before and after any text by itself."""
        tokenizer = self.processor.tokenizer
        bare, dressed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
        before = next(index for index in range(len(dressed)) if dressed[index : index + len(bare)] == bare)
        return before, len(dressed) - before - len(bare)

    def _grid_tokens(self, height: int, width: int) -> Layout:
        return image_on_grid(self.image_token_id, height, width, self.rows)
