"""Pictures of grid worlds from their text observation: one small painted tile per symbol (numpy only)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

TILE = 24
"""Pixels on each side of a tile."""

_Color = tuple[int, int, int]
_Image = np.ndarray
_SNOW, _ICE, _WATER, _DEEP = (232, 240, 246), (190, 214, 230), (62, 118, 166), (40, 84, 130)
_SAND, _LINE, _BRICK, _MORTAR = (238, 226, 202), (222, 207, 178), (122, 94, 84), (150, 124, 112)
_WOOD, _EDGE, _GREEN, _RED = (198, 140, 70), (130, 84, 36), (96, 156, 84), (200, 66, 56)
_GOLD = (236, 190, 60)
_SKIN, _COAT, _DARK = (246, 214, 180), (52, 92, 160), (34, 34, 40)

THEMES = {
    "sokoban": {
        "#": "wall", "_": "sand", "O": "target", "√": "stored", "X": "box", "P": "player", "S": "waiting",
    },
    "frozen_lake": {"_": "ice", "O": "hole", "G": "goal", "P": "skater", "X": "fallen", "√": "arrived"},
}  # fmt: skip
"""For each world, what a symbol shows."""


def picture_of(text: str, theme: str) -> _Image:
    """`[rows * TILE, columns * TILE, 3]` uint8 of an observation; short rows end in background."""
    rows = text.split("\n")
    columns = max(map(len, rows))
    names = THEMES[theme]
    picture = np.full((len(rows) * TILE, columns * TILE, 3), 255, np.uint8)
    for row, symbols in enumerate(rows):
        for column, symbol in enumerate(symbols):
            spot = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            spot[:] = _tile(names[symbol])
    return picture


@lru_cache(maxsize=32)
def _tile(name: str) -> _Image:
    y, x = np.mgrid[0:TILE, 0:TILE] / (TILE - 1) * 2 - 1  # both from -1 to 1
    radius = np.hypot(x, y)
    image = np.empty((TILE, TILE, 3), np.uint8)

    def paint(where: np.ndarray, color: _Color) -> None:
        image[where] = color

    everywhere = radius >= 0
    border = np.maximum(abs(x), abs(y)) > 0.93
    if name in ("ice", "hole", "goal", "skater", "fallen", "arrived"):
        paint(everywhere, _SNOW)
        paint(abs(x - y * 0.5 - 0.3) < 0.06, _ICE)
        paint(border, _ICE)
        if name in ("hole", "fallen"):
            paint(radius < 0.86, _DEEP)
            paint(np.hypot(x, y + 0.08) < 0.76, _WATER)
        if name in ("goal", "arrived"):
            paint((abs(x + 0.35) < 0.07) & (abs(y) < 0.75), _DARK)
            paint((x > -0.28) & (x < 0.55) & (y > -0.75) & (y < -0.15), _GOLD)
    elif name == "wall":
        paint(everywhere, _BRICK)
        course = np.floor((y + 1) * 2).astype(int)
        paint(abs((y + 1) * 2 - np.round((y + 1) * 2)) < 0.13, _MORTAR)
        joint = (x + 1) + 0.5 * (course % 2)
        paint(abs(joint - np.round(joint)) < 0.07, _MORTAR)
    else:
        paint(everywhere, _SAND)
        paint(border, _LINE)
        if name in ("target", "waiting"):
            paint((radius < 0.5) & (radius > 0.3), _RED)
            paint(radius < 0.14, _RED)
        if name in ("box", "stored"):
            side = np.maximum(abs(x), abs(y))
            paint(side < 0.82, _EDGE)
            paint(side < 0.68, _WOOD if name == "box" else _GREEN)
            paint((side < 0.68) & ((abs(x - y) < 0.16) | (abs(x + y) < 0.16)), _EDGE)
    if name in ("player", "waiting", "skater", "fallen", "arrived"):
        down = 0.3 if name == "fallen" else 0.0
        above_water = y < 0.35 if name == "fallen" else everywhere
        paint((np.hypot(x * 1.1, (y - 0.45 - down) * 1.3) < 0.5) & above_water, _COAT)
        paint((np.hypot(x, y + 0.22 - down) < 0.42) & above_water, _SKIN)
        for eye in (-0.16, 0.16):
            paint((np.hypot(x - eye, y + 0.24 - down) < 0.08) & above_water, _DARK)
        paint((np.hypot(x, y + 0.22 - down) < 0.42) & (y < -0.4 + down), _RED)
    return image
