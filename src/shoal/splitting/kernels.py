"""Compiled loops over pixels: an image into patches, and 8-bit patches into what the model reads.

Imported only where images are processed. The loops release the interpreter lock, so threads overlap.
"""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
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
