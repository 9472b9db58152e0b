"""Pictures as text: a small PNG writer (numpy and zlib only), so that an observation fits a line of JSON."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError

PREFIX = "data:image/png;base64,"


def picture_url(picture: Any) -> str:
    """A picture as a data URL; text (a data URL or a path) stays as it is.

    Raises:
        DataError: it is neither text nor `[rows, columns, 3]` uint8.
    """
    if isinstance(picture, str | Path):
        return str(picture)
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or not array.size:
        raise DataError(
            f"a picture must be [rows, columns, 3] uint8, a data URL or a path, got {array.dtype} of shape "
            f"{array.shape}"
        )
    return PREFIX + base64.b64encode(png_bytes(array)).decode("ascii")


def png_bytes(array: np.ndarray) -> bytes:
    """`[rows, columns, 3]` uint8 as an 8-bit RGB file; equal arrays give equal bytes."""
    rows, columns = array.shape[:2]
    # Each line begins with its filter, 0 for none.
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), array.reshape(rows, columns * 3)], 1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
