"""Where a recorded image is, and whether it is safe to open: inside its folder, and not too large."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, missing_extra
from shoal.splitting.recordings import IMAGE_SUFFIXES

MAX_IMAGE_PIXELS = 16_000_000
MAX_DATA_URL = 64 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""What a screenshot may be; other formats of Pillow start programs, or say one size and hold another."""


class ImageLocator:
    """Turns image references into absolute paths or data URLs; never leaves `folder`.

    "x" means "x.png", as in the original; names with another image suffix stay as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inside = folder.resolve()

    def __call__(self, reference: str, where: str) -> str:
        """The place of `reference`; `where` is the message it stands in, for errors."""
        if reference.startswith("data:"):
            return reference
        if reference.startswith(("http://", "https://")):
            raise DataError(
                f"{where}: image {reference[:80]!r} is on the web; download it beside the messages"
            )
        name = reference.removeprefix("file://")
        if not name.lower().endswith(IMAGE_SUFFIXES):
            name += ".png"
        if "\x00" in name:
            raise DataError(f"{where}: image {reference[:80]!r} is not a file name")
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self._inside):
            raise DataError(f"{where}: image {reference[:80]!r} leaves {self.folder}; put it inside")
        if not path.is_file():
            raise DataError(f"{where}: image {path} is missing; restore it or remove the trajectory")
        return str(path)


def open_image(place: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """The image at a path or in a data URL, header read and size checked, pixels not yet decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("reading images", "vision") from error
    name = short_name(place)
    source = io.BytesIO(_data_url_bytes(place)) if place.startswith("data:") else place
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
    return image


def decode_rgb(place: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """The decoded image in RGB, as large as its header says."""
    image = open_image(place, max_pixels)
    said = image.size
    try:
        with image:
            image.load()
            rgb = image if image.mode == "RGB" else image.convert("RGB")
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
    """(width, height) from the header alone."""
    with open_image(place, max_pixels) as image:
        width, height = image.size
    return int(width), int(height)


def _data_url_bytes(url: str) -> bytes:
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
