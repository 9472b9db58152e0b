"""Tokens with their positions: text counts up, an image spreads over a grid, then text goes on behind it.

The positions are Qwen2-VL's (M-RoPE): three rows for time, height and width; text has the same number in all
three, an image of h x w merged patches starts where text stopped and text continues max(h, w) further on.
Models with plain positions have one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shoal.core.errors import DataError

Array = np.ndarray
Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How one image stands among the tokens."""

    ids: Array  # [n] int32
    positions: Array  # [rows, n] int32, from 0
    span: int  # how far text behind it moves on


@dataclass(frozen=True, slots=True)
class Layout:
    """A stretch of tokens; positions start at 0."""

    ids: Array  # [n] int32
    positions: Array  # [rows, n] int32
    span: int  # the position of what follows
    images: tuple[tuple[int, int, int], ...] = ()  # (image of the trajectory, first token, token behind it)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Layout:
        """Tokens of a slice with the positions they have here; images cut by its borders are not listed."""
        start, stop, _ = part.indices(len(self))
        inside = tuple(
            (image, first - start, last - start)
            for image, first, last in self.images
            if first >= start and last <= stop
        )
        return Layout(self.ids[start:stop], self.positions[:, start:stop], self.span, inside)


def image_on_grid(token: int, height: int, width: int, rows: int) -> ImageTokens:
    """An image of `height x width` tokens; with one row its tokens count on like text."""
    size = height * width
    if rows == 1:
        return text_like(np.full(size, token, np.int32))
    down = np.repeat(np.arange(height, dtype=np.int32), width)
    right = np.tile(np.arange(width, dtype=np.int32), height)
    positions = np.stack([np.zeros(size, np.int32), down, right])
    return ImageTokens(np.full(size, token, np.int32), positions, max(height, width))


def text_like(ids: Array) -> ImageTokens:
    """An image whose tokens have plain positions."""
    return ImageTokens(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids))


def lay_out(
    ids: Array, image_token: int, images: Sequence[int], tokens: Sequence[ImageTokens], rows: int
) -> Layout:
    """Positions for encoded text in which each image is still a single `image_token`.

    Args:
        ids: the encoded text.
        image_token: the id that stands for an image, -1 where there are none.
        images: which images of the trajectory the text shows, in order.
        tokens: how each image of the trajectory stands among tokens.
        rows: 1 or 3.
    """
    places = np.flatnonzero(ids == image_token) if image_token >= 0 else np.empty(0, np.int64)
    if len(places) != len(images):
        raise DataError(
            f"the rendered text has {len(places)} image tokens for {len(images)} images; recorded text that "
            "spells out the image token does this unless the fix escape_control_tokens is on"
        )
    stretches: list[Array | int] = []
    start = 0
    for place, image in zip(places.tolist(), images, strict=True):
        stretches += [ids[start:place], image]
        start = place + 1
    return _assemble([*stretches, ids[start:]], tokens, rows)


def join(layouts: Sequence[Layout], rows: int) -> Layout:
    """One after the other."""
    ids: list[Array] = [np.empty(0, np.int32)]
    positions: list[Array] = [np.empty((rows, 0), np.int32)]
    images: list[tuple[int, int, int]] = []
    length = span = 0
    for layout in layouts:
        ids.append(layout.ids)
        positions.append(layout.positions + np.int32(span))
        images += [(image, first + length, last + length) for image, first, last in layout.images]
        length, span = length + len(layout), span + layout.span
    return Layout(np.concatenate(ids), np.concatenate(positions, axis=1), span, tuple(images))


def kept_by(length: int, limit: int, truncation: Truncation) -> Array:
    """Which of `length` tokens stay under a limit `[length]` bool."""
    keep = np.ones(length, bool)
    if length > limit:
        if truncation == "left":
            keep[: length - limit] = False
        elif truncation == "right":
            keep[limit:] = False
        elif truncation == "middle":
            keep[limit // 2 : length - (limit - limit // 2)] = False
        else:
            raise ValueError(f"truncation must be left, right or middle to cut, got {truncation!r}")
    return keep


def without_torn_images(layout: Layout, keep: Array, frame: frozenset[int]) -> Array:
    """`keep` with every image that lost a token gone whole, the tokens that frame it too."""
    keep = keep.copy()
    for _, first, last in layout.images:
        before, behind = first > 0 and int(layout.ids[first - 1]) in frame, last < len(layout)
        start = first - 1 if before else first
        stop = last + 1 if behind and int(layout.ids[last]) in frame else last
        if not keep[start:stop].all():
            keep[start:stop] = False
    return keep


def shortened(layout: Layout, keep: Array, tokens: Sequence[ImageTokens]) -> Layout:
    """The kept tokens with positions counted anew; every image is kept or gone whole."""
    stretches: list[Array | int] = []
    start = 0
    for image, first, last in layout.images:
        stretches.append(layout.ids[start:first][keep[start:first]])
        if keep[first:last].all():
            stretches.append(image)
        start = last
    stretches.append(layout.ids[start:][keep[start:]])
    return _assemble(stretches, tokens, layout.positions.shape[0])


def moved(layout: Layout, offset: int) -> Layout:
    """The same tokens, positions starting at `offset`."""
    return replace(layout, positions=layout.positions + np.int32(offset), span=layout.span + offset)


def _assemble(stretches: Sequence[Array | int], tokens: Sequence[ImageTokens], rows: int) -> Layout:
    """Text stretches and image numbers in a row."""
    ids, positions, images = [], [], []
    length = span = 0
    for stretch in stretches:
        if isinstance(stretch, int):
            image = tokens[stretch]
            ids.append(image.ids)
            positions.append(image.positions + np.int32(span))
            images.append((stretch, length, length + len(image.ids)))
            length, span = length + len(image.ids), span + image.span
        elif len(stretch):
            ids.append(stretch)
            count = np.arange(span, span + len(stretch), dtype=np.int32)
            positions.append(np.broadcast_to(count, (rows, len(stretch))))
            length, span = length + len(stretch), span + len(stretch)
    if not ids:
        return Layout(np.empty(0, np.int32), np.empty((rows, 0), np.int32), 0)
    return Layout(np.concatenate(ids), np.concatenate(positions, axis=1), span, tuple(images))
